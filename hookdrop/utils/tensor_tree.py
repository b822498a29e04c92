"""Finding and exchanging a tensor inside what a layer takes or returns, leaving all else as it is."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from hookdrop.errors import ShapeError

TensorKey = int | str | None
"""Which tensor: an index, a key, `"all"`, or None for the first that can be regularized."""

Change = Callable[[Tensor], Tensor]


def fits(value: object) -> bool:
    """Whether `value` is what a regularizer works on: a floating-point tensor that is not 0-d."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 0


def change(value: Any, which: TensorKey, fn: Change) -> Any:
    """`value` with `fn` applied to the chosen tensor; containers are copied, never written to.

    Args:
        value: a tensor, or tuples, named tuples, lists, mappings and dataclasses of them, nested at will.
        which: an index or a key of `value`, `"all"`, or None for the first tensor that fits, depth first.
        fn: the change.

    Raises:
        ShapeError: there is no such tensor in `value`.
    """
    if isinstance(value, Tensor) and which in (None, "all") and fits(value):
        return fn(value)
    if which in (None, "all"):
        paths = [path for path, leaf in _leaves(value) if fits(leaf)][: 1 if which is None else None]
    else:
        paths = [(_own_key(value, which),)]
    if not paths:
        raise ShapeError(f"got {describe(value)}: no floating-point tensor in it that is not 0-d.")
    for path in paths:
        value = _edit(value, path, fn)
    return value


def change_arguments(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], which: TensorKey, fn: Change
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`change` for the arguments of a call of `module`, taken in the order of its signature."""
    if len(args) == 1 and not kwargs and which is None and fits(args[0]):
        return (fn(args[0]),), kwargs
    names = _forward_names(module)
    positional = [names[i] if i < len(names) else f"*{i}" for i in range(len(args))]
    bound = dict(zip(positional, args, strict=True))
    in_order = sorted(kwargs, key=lambda name: names.index(name) if name in names else len(names))
    bound |= {name: kwargs[name] for name in in_order}
    changed = change(bound, which, fn)
    return tuple(changed[name] for name in positional), {name: changed[name] for name in kwargs}


def _forward_names(module: nn.Module) -> tuple[str, ...]:
    """The named parameters of a module's forward, without self."""
    if "forward" in vars(module):  # patched on this very module
        return _names_of(module.forward)
    cls: Any = type(module)
    # The compiler looks through a cache, and warns that it does.
    return _names_of(cls.forward)[1:] if torch.compiler.is_compiling() else _forward_names_of(cls)


@lru_cache(maxsize=1024)
def _forward_names_of(cls: Any) -> tuple[str, ...]:
    return _names_of(cls.forward)[1:]


def _names_of(function: Callable[..., Any]) -> tuple[str, ...]:
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return tuple(name for name, p in inspect.signature(function).parameters.items() if p.kind not in several)


def require_same_shape_and_dtype(x: Tensor, y: object) -> Tensor:
    """`y`, if it is a tensor with the shape and dtype of `x`."""
    if isinstance(y, Tensor) and y.shape == x.shape and y.dtype == x.dtype:
        return y
    got = f"{tuple(y.shape)} {y.dtype}" if isinstance(y, Tensor) else type(y).__name__
    raise ShapeError(f"got {tuple(x.shape)} {x.dtype} and returned {got}: a regularizer keeps shape and dtype.")


def describe(value: Any) -> str:
    """`value` in a few words: shapes for tensors, types for all else."""
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    children = _children(value)
    if children is None:
        return type(value).__name__
    inside = ", ".join(
        describe(child) if isinstance(key, int) else f"{key}: {describe(child)}" for key, child in children[:6]
    )
    return f"{type(value).__name__}({inside}{', ...' if len(children) > 6 else ''})"


def tensors(value: Any) -> list[Tensor]:
    """Every tensor in `value`, depth first."""
    return [leaf for _, leaf in _leaves(value) if isinstance(leaf, Tensor)]


def _children(value: Any) -> list[tuple[Any, Any]] | None:
    """The (key, child) pairs of a container; None for a leaf."""
    if isinstance(value, tuple | list):
        return list(enumerate(value))
    if isinstance(value, Mapping):
        return list(value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return None


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    children = _children(value)
    if children is None:
        yield path, value
        return
    for key, child in children:
        yield from _leaves(child, (*path, key))


def _own_key(value: Any, which: int | str) -> Any:
    """`which` as a key of the container `value`, pointing at a tensor that fits."""
    children = _children(value)
    if children is None:
        raise ShapeError(f"got {describe(value)}, which has no part {which!r}.\n  leave tensor=None for it.")
    keys = [key for key, _ in children]
    if isinstance(which, int) and not (isinstance(value, Mapping) and which in keys):
        if not -len(keys) <= which < len(keys):
            raise ShapeError(f"got {describe(value)}, which has no tensor={which}: it has {len(keys)} parts.")
        which = keys[which]
    elif which not in keys:
        names = getattr(value, "_fields", keys)
        if which not in names:
            raise ShapeError(f"got {describe(value)}, which has no tensor={which!r}; it has {list(names)}.")
        which = keys[list(names).index(which)]
    chosen = dict(children)[which]
    if not fits(chosen):
        raise ShapeError(f"tensor={which!r} is {describe(chosen)}: it must be a floating-point tensor, not 0-d.")
    return which


def _edit(value: Any, path: tuple[Any, ...], fn: Change) -> Any:
    if not path:
        return fn(value)
    key, rest = path[0], path[1:]
    if isinstance(value, tuple):
        return _edit_tuple(value, key, rest, fn)
    edited = copy.copy(value)
    if isinstance(value, list | Mapping):
        edited[key] = _edit(value[key], rest, fn)
    else:  # a dataclass, frozen perhaps
        object.__setattr__(edited, key, _edit(getattr(value, key), rest, fn))
    return edited


def _edit_tuple(value: tuple[Any, ...], key: int, rest: tuple[Any, ...], fn: Change) -> tuple[Any, ...]:
    items = list(value)
    items[key] = _edit(items[key], rest, fn)
    if hasattr(value, "_make"):
        return value._make(items)  # type: ignore[no-any-return]  # a named tuple of whatever class
    if type(value).__module__ == torch.return_types.__name__:
        return type(value)(items)
    return tuple(items) if type(value) is tuple else type(value)(items)
