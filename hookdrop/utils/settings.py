"""The settings of an object: the arguments of its `__init__`, each stored in an attribute of the same name."""

from __future__ import annotations

import inspect
from collections.abc import Callable


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
