"""Packages that hookdrop works without: what needs one says which extra has it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hookdrop.errors import HookdropError


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """An import inside that fails says which extra to install.

    Args:
        extra: its name in `pip install 'hookdrop[...]'`.

    Raises:
        HookdropError: a package is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise HookdropError(
            f"{(error.name or 'a package').partition('.')[0]} is not installed.\n  pip install 'hookdrop[{extra}]'"
        ) from None
