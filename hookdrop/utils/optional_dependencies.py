"""Optional dependencies, which are installed by extras."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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
