"""The settings of an object: the arguments of its `__init__`, each stored in an attribute of the same name."""

from __future__ import annotations

import functools
import inspect
import re
from abc import ABCMeta
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from hookdrop.core.errors import did_you_mean

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


def not_stored(thing: object) -> list[str]:
    """Return the arguments that the object does not store, so that no text can recreate it; `*args` is one."""
    return [name for name in init_parameters(type(thing)) if not hasattr(thing, name)]


def settings_text(thing: object, is_optional: Callable[[inspect.Parameter], bool] = lambda one: False) -> str:
    """Write the settings in the syntax of `parse`, optional ones only if changed; `every=?` is not stored."""
    return ", ".join(
        f"{name}={getattr(thing, name)!r}" if hasattr(thing, name) else f"{name}=?"
        for name, one in init_parameters(type(thing)).items()
        if not (is_optional(one) and hasattr(thing, name) and getattr(thing, name) == one.default)
    )
