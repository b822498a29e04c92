"""Arguments: valid values, or errors that show what to write instead; and the settings of an object.

The settings are the arguments of its `__init__`, each stored in an attribute of the same name.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
import re
from abc import ABCMeta
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

from hookdrop.core.errors import did_you_mean

# --- values


CopyDevice = torch.device | str | None  # the device of copies; None is the device of the tensor


def number(value: object, name: str, owner: str) -> float:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if type(value).__name__ in ("bool", "bool_", "str", "bytes") or not hasattr(value, "__float__"):
        raise TypeError(f"{owner}: {name} must be a number, got {value!r} ({type(value).__name__}).")
    try:
        result = float(value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{owner}: {name} must be a single number, got {value!r}.") from None
    if not -math.inf < result < math.inf:  # unlike `math.isfinite`, the compiler can trace this
        raise ValueError(f"{owner}: {name} must be finite, got {result}.")
    return result


def positive(value: object, name: str, owner: str, hint: str = "") -> float:
    result = number(value, name, owner)
    if result <= 0.0:
        raise ValueError(f"{owner}: {name} must be above 0, got {result:g}.{hint}")
    return result


def rate(value: object, name: str, owner: str, high: float = 1.0, *, low: float = 0.0, open_end: bool = False) -> float:
    """Return `value` as a finite float in [low, high], or in [low, high) if `open_end`."""
    result = number(value, name, owner)
    if low <= result < high or (result == high and not open_end):
        return result
    span = f"{'[' if low > -math.inf else '('}{low:g}, {high:g}{')' if open_end or high == math.inf else ']'}"
    hint = f"\n  a percentage? write {name}={result / 100:g}" if high == 1.0 and 2 <= result <= 100 else ""
    raise ValueError(f"{owner}: {name} must lie in {span}, got {result:g}.{hint}")


def as_rate_tensor(rate: float) -> Tensor:
    """Return `rate` as a 0-d CPU tensor, which acts as a scalar on every device and in compiled code."""
    return torch.tensor(rate, dtype=torch.float64, device="cpu")


def count(value: Any, name: str, owner: str, low: int = 1) -> int:
    """Return `value` as a Python int of at least `low`."""
    try:
        if isinstance(value, bool):
            raise TypeError
        result = operator.index(value)
    except TypeError:
        hint = f"\n  write {name}={max(int(value), low)}" if isinstance(value, float) and math.isfinite(value) else ""
        raise TypeError(f"{owner}: {name} must be an integer, got {value!r} ({type(value).__name__}).{hint}") from None
    if result < low:
        raise ValueError(f"{owner}: {name} must be at least {low}, got {result}.")
    return result


def one_of(value: object, name: str, owner: str, allowed: tuple[object, ...]) -> Any:
    for choice in allowed:
        if value is choice or (type(value) is type(choice) and value == choice):
            return value
    raise ValueError(f"{owner}: {name} must be one of {', '.join(map(repr, allowed))}, got {value!r}.")


_SUPPORTED_DTYPES = frozenset((torch.float32, torch.float64, torch.float16, torch.bfloat16))


def floating(x: object, owner: str, *, nested: bool = False) -> None:
    """Raise `TypeError` unless `x` is a dense tensor with a real floating-point dtype."""
    if isinstance(x, Tensor) and x.dtype in _SUPPORTED_DTYPES and x.layout is torch.strided and not x.is_nested:
        return
    if not isinstance(x, Tensor):
        text = repr(x)
        raise TypeError(
            f"{owner}: x must be a tensor, got {text if len(text) < 60 else text[:57] + '...'} ({type(x).__name__}).\n"
            "  write torch.as_tensor(x, dtype=torch.float32)"
        )
    instead = ""
    if x.layout not in (torch.strided, torch.jagged):
        instead = "x.to_dense()"
    elif x.is_nested and not nested:
        instead = "a padded tensor: torch.nested.to_padded_tensor(x, 0.0)"
    elif x.is_complex():
        instead = "its real and imaginary parts: torch.view_as_real(x)"
    elif not x.is_floating_point():
        instead = "x.float()"
    elif x.element_size() < 2:
        instead = "x.to(torch.bfloat16): PyTorch has no arithmetic for 8-bit floats"
    if instead:
        what = "nested" if x.is_nested else f"{x.layout} {tuple(x.shape)}" if "dense" in instead else tuple(x.shape)
        raise TypeError(f"{owner}: x must be a dense floating-point tensor, got {what} {x.dtype}.\n  pass {instead}")


# --- settings


F = TypeVar("F", bound=Callable[..., Any])


class NamedArguments(ABCMeta):
    """The metaclass of what users create and derive: an error about an argument names the nearest one."""

    if not TYPE_CHECKING:

        def __call__(cls, *args, **kwargs):
            return named_arguments(super().__call__, cls)(*args, **kwargs)

    @property
    def __signature__(cls) -> inspect.Signature:
        """What `inspect.signature` returns, which would otherwise be the signature of `__call__` above."""
        made: Any = cls
        if made.__init__ is object.__init__:
            return inspect.Signature()
        signature = inspect.signature(made.__init__)
        return signature.replace(parameters=[*signature.parameters.values()][1:])


def named_arguments(make: F, of: Any = None) -> F:
    """Decorate a function to do the same, or a class to do it in its public methods. Signatures stay as they are."""
    if isinstance(make, type):
        for name, one in [*vars(make).items()]:
            if inspect.isfunction(one) and not name.startswith("_"):
                setattr(make, name, named_arguments(one))
        return make

    @functools.wraps(make)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return make(*args, **kwargs)
        except TypeError as error:
            found = unknown_argument(of or make, args, kwargs)
            if not found and error.__traceback__ and not error.__traceback__.tb_next:  # of the call itself
                found = f"{error}.{signature_line((of or make).__name__, of or make)}"
            if found:
                raise TypeError(found) from None
            raise

    return cast(F, call)


def unknown_argument(cls: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return what to say about an argument that a class or function does not have; empty if it has all of them."""
    name, known = cls.__qualname__.removesuffix(".__init__").rpartition(".")[2], inspect.signature(cls).parameters
    unknown = next((str(one) for one in kwargs if one not in known), "")
    for made in [one if isinstance(one, type) else type(one) for one in args if unknown]:
        if isinstance(made, NamedArguments) and unknown in inspect.signature(made).parameters:
            return f"{name} has no argument {unknown!r}, but {made.__name__} has: write {made.__name__}({unknown}=...)"
    is_field = unknown in inspect.get_annotations(cls) or (not known and (args or kwargs))
    if isinstance(cls, type) and "__init__" not in vars(cls) and is_field:
        return (
            f"{name} is no dataclass, so it does not take its fields as arguments.\n"
            f"  write: @dataclass(frozen=True, repr=False)\n         class {name}({cls.__mro__[1].__name__}): ..."
        )
    if not unknown or any(one.kind is one.VAR_KEYWORD for one in known.values()):
        return ""
    # Otherwise `drop_prob` would be close to `keep_prob`, its opposite.
    is_rate = "p" in known and "keep" not in unknown and re.search("prob|rate|drop", unknown)
    near = "\n  did you mean: 'p'" if is_rate else did_you_mean(unknown, known)
    return f"{name} has no argument {unknown!r}.{near}{signature_line(name, cls)}{getattr(cls, '_argument_note', '')}"


def signature_line(name: str, make: Callable[..., Any]) -> str:
    """Return a message line with the signature of a class, without types."""
    signature = inspect.signature(make)
    shown = [one for one in signature.parameters.values() if one.name != "self"]
    bare = [one.replace(annotation=inspect.Parameter.empty) for one in shown]
    return f"\n  signature: {name}{signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)}"


def init_parameters(cls: type) -> dict[str, inspect.Parameter]:
    """Return the arguments of `__init__` as they are declared, except `keep_prob`, which is an alternative to `p`."""
    stars: dict[int, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    parameters = inspect.signature(cls).parameters.values()
    return {stars.get(one.kind, "") + one.name: one for one in parameters if one.name != "keep_prob"}


def settings_text(thing: object, is_optional: Callable[[inspect.Parameter], bool] = lambda one: False) -> str:
    """Write the settings in the syntax of `parse`, optional ones only if changed; `every=?` is not stored."""
    return ", ".join(
        f"{name}={getattr(thing, name)!r}" if hasattr(thing, name) else f"{name}=?"
        for name, one in init_parameters(type(thing)).items()
        if not (is_optional(one) and hasattr(thing, name) and getattr(thing, name) == one.default)
    )
