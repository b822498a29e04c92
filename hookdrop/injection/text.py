"""Create regularizers, schedules and recipes from text. Text is never evaluated as code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hookdrop import recipes
from hookdrop.regularizers import REGULARIZERS
from hookdrop.schedules import SCHEDULES, Schedule
from hookdrop.utils.call_syntax import Call, CallSyntax, parse_call, signature_of


class _Names(Mapping[str, Callable[..., Any]]):
    """The names that `parse` knows. A recipe is imported when it is first used."""

    def __getitem__(self, name: str) -> Callable[..., Any]:
        if name in recipes.RECIPE_MODULES:
            recipe: Callable[..., Any] = getattr(recipes, name)
            return recipe
        return REGULARIZERS[name] if name in REGULARIZERS else SCHEDULES[name]

    def __iter__(self) -> Iterator[str]:
        return iter((*REGULARIZERS, *recipes.RECIPE_MODULES, *SCHEDULES))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, name: object) -> bool:
        return name in REGULARIZERS or name in recipes.RECIPE_MODULES or name in SCHEDULES


_SYNTAX = CallSyntax(
    "parse", "regularizer, recipe or schedule", _Names(), "DropBlock(p=0.1, block_size=7)", nested=True
)


def parse(text: str) -> Any:
    """Create a regularizer, a recipe or a schedule from a string, for flags, sweeps and configuration files.

    The string is never evaluated as code. It is what `repr` returns.

    Args:
        text: a call by name with literal settings.

    Raises:
        TypeError: `text` is not a string, or the class does not accept the settings.
        ValueError: `text` is not such a call, has an unknown name or an argument that is not a literal, or a setting
            is invalid.

    Example:
        >>> parse("DropBlock(p=0.2, block_size=5)")
        DropBlock(p=0.2, block_size=5)
        >>> parse("ChainedSchedule([LinearSchedule(steps=2), ConstantSchedule(0.0)], [4])").simulate(6)
        [0.0, 0.5, 1.0, 1.0, 0.0, 0.0]
    """
    return _build(parse_call(text, _SYNTAX), text)


def as_schedule(given: object, owner: str) -> Schedule:
    """Return a schedule as it is, and create one from a string.

    Raises:
        TypeError: `given` is neither.
        ValueError: the string is invalid.
    """
    found = parse(given) if isinstance(given, str) else given
    if isinstance(found, Schedule):
        return found
    name = getattr(given, "__name__", "fn")
    if isinstance(given, type):
        write = f"{name}(steps=N)"
    else:
        write = f"LambdaSchedule({name})" if callable(given) else "LinearSchedule(steps=N)"
    raise TypeError(f"{owner}: schedule must be a hookdrop schedule, got {given!r}.\n  write: schedule={write}")


def _build(call: Call, text: str) -> Any:
    args, kwargs = [_built(arg, text) for arg in call.args], {n: _built(value, text) for n, value in call.kwargs}
    try:
        return _SYNTAX.known[call.name](*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"parse: {text!r}: {error}{signature_of(call.name, _SYNTAX)}") from None


def _built(value: Any, text: str) -> Any:
    if isinstance(value, Call):
        return _build(value, text)
    return [_built(element, text) for element in value] if isinstance(value, list) else value
