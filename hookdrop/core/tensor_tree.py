"""Find and replace tensors in the nested inputs or outputs of a layer."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from hookdrop.core.errors import ShapeError
from hookdrop.core.tables import counted

TensorKey = int | str | None
"""Selects a tensor: an index, a key, `"all"`, or None for the first that can be regularized."""

TensorFunction = Callable[[Tensor], Tensor]


def fits(value: object) -> TypeGuard[Tensor]:
    """Whether `value` can be regularized: a floating-point tensor with at least one dimension."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 0


def map_tensor(value: Any, which: TensorKey, fn: TensorFunction) -> Any:
    """Return `value` with `fn` applied to the tensor `which`, or raise `ShapeError` if there is none.

    `value` is a tensor, or nested tuples, lists, mappings and dataclasses, which are copied, never modified.
    """
    if which not in (None, "all"):
        return _edit(value, (_own_key(value, which),), fn)
    if fits(value):
        return fn(value)
    paths = [path for path, leaf in leaves(value) if fits(leaf)][: 1 if which is None else None]
    if not paths:
        raise _nothing_fits(value)
    for path in paths:
        value = _edit(value, path, fn)
    return value


def map_arguments(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], which: TensorKey, fn: TensorFunction
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Apply `map_tensor` to the arguments of a call of `module`, in the order of its signature."""
    if len(args) == 1 and not kwargs and which is None and fits(args[0]):
        return (fn(args[0]),), kwargs
    bound = bind_arguments(module, args, kwargs)
    changed = map_tensor(bound, which, fn)
    positional = list(bound)[: len(args)]
    return tuple(changed[name] for name in positional), {name: changed[name] for name in kwargs}


def bind_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of `module` by name: positional ones first, all in the order of its signature."""
    names = parameter_names(module)
    positional = [names[i] if i < len(names) else f"*{i}" for i in range(len(args))]
    in_order = sorted(kwargs, key=lambda name: names.index(name) if name in names else len(names))
    # Not `|`, which the compiler of PyTorch 2.6 does not know.
    return {**dict(zip(positional, args, strict=True)), **{name: kwargs[name] for name in in_order}}


def parameter_names(module: nn.Module) -> tuple[str, ...]:
    if "forward" in module.__dict__:  # patched on this instance
        return _names_of(module.forward)
    cls: Any = type(module)
    # The compiler traces through `lru_cache` and warns about it.
    return (_names_of if torch.compiler.is_compiling() else _cached_names_of)(cls.forward)[1:]


def _names_of(function: Callable[..., Any]) -> tuple[str, ...]:
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return tuple(name for name, p in inspect.signature(function).parameters.items() if p.kind not in several)


_cached_names_of = lru_cache(maxsize=1024)(_names_of)


def map_leaves(value: Any, fn: Callable[[Any], Any]) -> Any:
    """Return `value` with `fn` applied to everything that is not a container. Containers are copied, never modified."""
    for path, leaf in list(leaves(value)):
        if (new := fn(leaf)) is not leaf:
            value = _edit(value, path, lambda _, new=new: new)  # type: ignore[misc]
    return value


def map_tensors(value: Any, fn: Callable[[Tensor], Any]) -> Any:
    """Return `value` with `fn` applied to all of its tensors."""
    return map_leaves(value, lambda leaf: fn(leaf) if isinstance(leaf, Tensor) else leaf)


def describe(value: Any) -> str:
    """Describe `value` briefly: shape and dtype of tensors, type names of other values."""
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    children = _children(value)
    if children is None:
        return type(value).__name__
    inside = [("" if isinstance(key, int) else f"{key}: ") + describe(child) for key, child in children[:6]]
    return f"{type(value).__name__}({', '.join(inside)}{', ...' if len(children) > 6 else ''})"


def detached_copy(x: Tensor, to: torch.device | str | None = None) -> Tensor:
    """Return a detached copy of `x` that later in-place operations cannot change."""
    with torch.inference_mode(False), torch.no_grad():
        return x.detach().to(device=x.device if to is None else to, copy=True)


def leaves_of(value: Any) -> list[Any]:
    return [leaf for _, leaf in leaves(value)]


def tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in leaves_of(value) if isinstance(leaf, Tensor)]


def first_tensor(value: Any) -> Tensor:
    """Return the first tensor in `value` that can be regularized, depth first. Raises `ShapeError` if there is none."""
    for _, leaf in leaves(value):
        if fits(leaf):
            return leaf
    raise _nothing_fits(value)


def container_of(value: Any, x: Tensor) -> Any:
    """Return the innermost container in `value` that holds `x`; `value` itself if there is none."""
    path = next((path for path, leaf in leaves(value) if leaf is x), ())
    for key in path[:-1]:
        value = dict(_children(value) or ())[key]
    return value


def _nothing_fits(value: Any) -> ShapeError:
    is_complex = any(leaf.is_complex() for leaf in tensors(value))
    real = "\n  complex numbers: hook a layer that returns real ones, or use torch.view_as_real(x)" * is_complex
    return ShapeError(f"got {describe(value)}: no floating-point tensor with at least one dimension.{real}")


def _children(value: Any) -> list[tuple[Any, Any]] | None:
    """Return the (key, child) pairs of a container, or None for a leaf."""
    if isinstance(value, (tuple, list)):
        return list(enumerate(value))
    if isinstance(value, Mapping):
        return list(value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return None


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield everything that is not a container, each with the keys that lead to it."""
    children = _children(value)
    if children is None:
        yield path, value
        return
    for key, child in children:
        yield from leaves(child, (*path, key))


def _own_key(value: Any, which: int | str) -> Any:
    """Resolve `which` to a key of the container `value` that holds a tensor that fits."""
    children = _children(value)
    if children is None:
        raise ShapeError(f"got {describe(value)}, which is not a container.\n  use tensor=None instead of {which!r}.")
    keys = [key for key, _ in children]
    if isinstance(which, int) and not (isinstance(value, Mapping) and which in keys):
        if not -len(keys) <= which < len(keys):
            items = counted(len(keys), "item")
            raise ShapeError(f"got {describe(value)}, which has no tensor={which}: it has {items}.")
        which = keys[which]
    elif which not in keys:
        names = getattr(value, "_fields", keys)
        if which not in names:
            raise ShapeError(f"got {describe(value)}, which has no tensor={which!r}; its keys are {list(names)}.")
        which = keys[list(names).index(which)]
    if not fits(chosen := dict(children)[which]):
        wanted = "a floating-point tensor with at least one dimension"
        raise ShapeError(f"tensor={which!r} is {describe(chosen)}, not {wanted}.")
    return which


def _edit(value: Any, path: tuple[Any, ...], fn: TensorFunction) -> Any:
    if not path:
        return fn(value)
    key, rest = path[0], path[1:]
    if isinstance(value, tuple):
        items = list(value)
        items[key] = _edit(items[key], rest, fn)
        make: Any = getattr(value, "_make", type(value))
        return make(items)
    edited = copy.copy(value)
    if isinstance(value, list | Mapping):
        edited[key] = new = _edit(value[key], rest, fn)
        if getattr(edited, "__dict__", {}).get(key, fn) is value[key]:  # a dict with attributes
            vars(edited)[key] = new
    else:  # a dataclass, possibly frozen
        object.__setattr__(edited, key, _edit(getattr(value, key), rest, fn))
    return edited
