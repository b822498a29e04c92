"""Optional dependencies, which are installed by extras, and a progress bar, which needs one."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from hookdrop.errors import HookdropError


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Name the extra to install if an import inside this block fails.

    Args:
        extra: the name in `pip install 'hookdrop[...]'`.

    Raises:
        HookdropError: a package is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise HookdropError(
            f"{(error.name or 'a package').partition('.')[0]} is not installed.\n  pip install 'hookdrop[{extra}]'"
        ) from None


class ProgressBar(Protocol):
    """What a bar can do."""

    def update(self, n: int) -> object:
        """Advance by `n`."""


class _Hidden:
    def update(self, n: int) -> None:
        """Do nothing."""


def progress_bar(total: int | None, shown: bool | None, worthwhile: bool = True) -> AbstractContextManager[ProgressBar]:
    """Return a bar that counts samples.

    Args:
        total: the number of samples, if it is known.
        shown: whether to show it; None shows it if it is worthwhile, tqdm is installed, and someone sees it: in a
            terminal or a notebook.
        worthwhile: whether the work may take long.

    Raises:
        HookdropError: `shown` is True, and tqdm is not installed.
    """
    if shown is None:
        shown = worthwhile and _is_seen() and importlib.util.find_spec("tqdm") is not None
    if not shown:
        return nullcontext(_Hidden())
    with needs("progress"):
        from tqdm.auto import tqdm
    bar: AbstractContextManager[ProgressBar] = tqdm(total=total, unit="sample")
    return bar


def _is_seen() -> bool:
    return "ipykernel" in sys.modules or (sys.stderr is not None and sys.stderr.isatty())
