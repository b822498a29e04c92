"""Optional dependencies, which are installed by extras, and a progress bar, which needs one."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hookdrop.utils.errors import HookdropError


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Raise `HookdropError` if an import inside this block fails, and name the extra to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise HookdropError(
            f"{(error.name or 'a package').partition('.')[0]} is not installed.\n  pip install 'hookdrop[{extra}]'"
        ) from None


@contextmanager
def progress_bar(total: int | None, shown: bool | None, worthwhile: bool = True) -> Iterator[Callable[[int], object]]:
    """Yield a function that advances a progress bar by a number of samples, of `total` if known.

    If `shown` is None, it depends on whether it is worthwhile, tqdm is installed, and a terminal or notebook shows it.
    """
    if shown is None:
        seen = "ipykernel" in sys.modules or (sys.stderr is not None and sys.stderr.isatty())
        shown = worthwhile and seen and importlib.util.find_spec("tqdm") is not None
    if not shown:
        yield lambda samples: None
        return
    with needs("progress"):
        from tqdm.auto import tqdm
    with tqdm(total=total, unit="sample") as bar:
        yield bar.update
