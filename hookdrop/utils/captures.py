"""What captures and recordings share: copies of activations, and contexts that explain how to use them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any, Generic, NoReturn, ParamSpec, TypeVar

import torch
from torch import Tensor

from hookdrop.utils.errors import LayerError

CopyDevice = torch.device | str | None
"""The device of the copies; None is the device of the tensor."""


class NotRecordedError(LayerError, KeyError):
    """Nothing was recorded for the requested layer. A `KeyError`, as of a dict, but with a readable message."""

    __str__ = Exception.__str__


def valid_device(to: CopyDevice, owner: str) -> CopyDevice:
    """Return `to` if the device exists."""
    if to is not None:
        try:
            torch.empty(0, device=to)
        except (RuntimeError, TypeError, AssertionError, NotImplementedError) as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(
                f'{owner}: to must be a device such as "cpu" or "cuda:0", or None, got {to!r}.\n  PyTorch: {reason}'
            ) from None
    return to


def detached_copy(x: Tensor, to: CopyDevice = None) -> Tensor:
    """Return a detached copy of `x` that later in-place operations cannot change."""
    with torch.inference_mode(False), torch.no_grad():
        return x.detach().to(device=x.device if to is None else to, copy=True)


P = ParamSpec("P")
T = TypeVar("T")


class RequiresWith(Generic[T]):
    """A single-use context manager. Any other use raises an error that shows the `with` statement to write."""

    def __init__(self, inner: AbstractContextManager[T], example: str) -> None:
        self._inner, self._hint = inner, f"enter this context manager before the forward.\n  write: {example}"

    def __enter__(self) -> T:
        return self._inner.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._inner.__exit__(*error)

    def __getitem__(self, key: object) -> NoReturn:
        raise TypeError(self._hint)

    def __getattr__(self, name: str) -> Any:
        # copy, pickle and IPython look up private names.
        raise AttributeError(name if name.startswith("_") else f"no attribute {name!r}: {self._hint}")


def requires_with(example: str) -> Callable[[Callable[P, Iterator[T]]], Callable[P, RequiresWith[T]]]:
    """`contextlib.contextmanager` whose errors show `example` if the `with` was forgotten."""

    def decorate(function: Callable[P, Iterator[T]]) -> Callable[P, RequiresWith[T]]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> RequiresWith[T]:
            return RequiresWith(contextmanager(function)(*args, **kwargs), example)

        return call

    return decorate
