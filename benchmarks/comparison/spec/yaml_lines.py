"""YAML that remembers its lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from comparison.spec.errors import ConfigError

Place = tuple[str | int, ...]
"""Keys and positions from the top down, as `("arms", 1, "p")`."""


class Lines:
    """The line in which each part of a document begins."""

    def __init__(self, source: str, found: dict[Place, int] | None = None) -> None:
        """`source` is what the document is called in messages."""
        self.source = source
        self.found = found or {}

    def where(self, place: Sequence[str | int]) -> str:
        """As `compare.yaml, line 7, at arms[1].p`: the line of the place, or of the nearest that contains it."""
        line = next((self.found[up] for up in _upwards(tuple(place)) if up in self.found), None)
        in_line = "" if line is None else f", line {line}"
        return f"{self.source}{in_line}" + (f", at {spelled(place)}" if place else "")


def spelled(place: Sequence[str | int]) -> str:
    """A place as it is written in Python."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return text.removeprefix(".")


def load(text: str, source: str) -> tuple[dict[str, Any], Lines]:
    """The settings of a YAML document, and their lines.

    Raises:
        ConfigError: it is no YAML, no mapping, or has a key twice.
    """
    lines = Lines(source)
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        value = _value(node, (), lines) if node else None
    except RecursionError:
        raise ConfigError(f"{source}: a part of it contains itself.") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{source}{at}: this is not YAML: {getattr(error, 'problem', error)}.") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{source}: settings are wanted, as `seeds: 8`, and it is {type(value).__name__}.")
    return value, lines


def _value(node: Node, place: Place, lines: Lines) -> Any:
    lines.found[place] = node.start_mark.line + 1
    if isinstance(node, SequenceNode):
        return [_value(child, (*place, i), lines) for i, child in enumerate(node.value)]
    if not isinstance(node, MappingNode):
        try:
            return yaml.SafeLoader("").construct_object(node)
        except (ValueError, TypeError, OverflowError) as error:
            raise ConfigError(
                f"{lines.source}, line {node.start_mark.line + 1}: can't read {node.value!r}: {error}."
            ) from None
    found: dict[str, Any] = {}
    for name, child in node.value:
        if not isinstance(name, ScalarNode) or name.tag != "tag:yaml.org,2002:str":
            said = f"the name of a setting is wanted, and it is {str(name.value)[:40]!r}"
            raise ConfigError(f"{lines.source}, line {name.start_mark.line + 1}: {said}.")
        if name.value in found:
            raise ConfigError(f"{lines.source}, line {name.start_mark.line + 1}: {name.value!r} is there twice.")
        found[name.value] = _value(child, (*place, name.value), lines)
        lines.found[(*place, name.value)] = name.start_mark.line + 1
    return found


def _upwards(place: Place) -> list[Place]:
    return [place[:end] for end in range(len(place), -1, -1)]
