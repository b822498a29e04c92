"""The settings of an object: the arguments of its `__init__`, each stored in an attribute of the same name."""

from __future__ import annotations

import inspect
import re
from abc import ABCMeta
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hookdrop.utils.errors import did_you_mean


class NamedArguments(ABCMeta):
    """The metaclass of what users create and derive: an error about an argument names the nearest one."""

    if not TYPE_CHECKING:

        def __call__(cls, *args, **kwargs):
            try:
                return super().__call__(*args, **kwargs)
            except TypeError:
                if found := unknown_argument(cls, args, kwargs):
                    raise TypeError(found) from None
                raise

    @property
    def __signature__(cls) -> inspect.Signature:
        """What `inspect.signature` returns, which would otherwise be the signature of `__call__` above."""
        made: Any = cls
        if made.__init__ is object.__init__:
            return inspect.Signature()
        signature = inspect.signature(made.__init__)
        return signature.replace(parameters=[*signature.parameters.values()][1:])


def unknown_argument(cls: type, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return what to say about an argument that the class does not have; empty if it has all of them."""
    name, known = cls.__name__, inspect.signature(cls).parameters
    unknown = next((str(one) for one in kwargs if one not in known), "")
    if "__init__" not in vars(cls) and (unknown in inspect.get_annotations(cls) or (not known and (args or kwargs))):
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
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
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
