"""Context managers that say what they are where the `with` was forgotten."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any, Generic, NoReturn, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Within(Generic[T]):
    """What `with` takes, once; whoever asks it for more is told to write that."""

    def __init__(self, inner: AbstractContextManager[T], example: str) -> None:
        self._inner, self._example = inner, example

    def __enter__(self) -> T:
        return self._inner.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._inner.__exit__(*error)

    def __getitem__(self, key: object) -> NoReturn:
        raise TypeError(self._text())

    def __getattr__(self, name: str) -> Any:
        # Those are looked up by whoever copies or shows an object.
        raise AttributeError(name if name.startswith("_") else f"no {name!r} yet: {self._text()}")

    def _text(self) -> str:
        return f"there is nothing before a forward.\n  write: {self._example}"


def within(example: str) -> Callable[[Callable[P, Iterator[T]]], Callable[P, Within[T]]]:
    """`contextlib.contextmanager`, with `example` for those who forget the `with`."""

    def decorate(function: Callable[P, Iterator[T]]) -> Callable[P, Within[T]]:
        manager = contextmanager(function)

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> Within[T]:
            return Within(manager(*args, **kwargs), example)

        return call

    return decorate
