"""YAML with line numbers for error messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from comparison.spec.errors import ConfigError

Place = tuple[str | int, ...]
"""A path of keys and indices, such as `("arms", 1, "p")`."""


class Lines:
    """The line number of each part of a document."""

    def __init__(self, source: str, found: dict[Place, int] | None = None) -> None:
        """`source` names the document in messages."""
        self.source = source
        self.found = found or {}

    def where(self, place: Sequence[str | int]) -> str:
        """Format a place such as `compare.yaml, line 7, at arms[1].p`, with the line of the innermost known part."""
        line = next((self.found[outer] for outer in _prefixes(tuple(place)) if outer in self.found), None)
        in_line = "" if line is None else f", line {line}"
        return f"{self.source}{in_line}" + (f", at {format_place(place)}" if place else "")


def format_place(place: Sequence[str | int]) -> str:
    """Format a place as in Python, such as `arms[1].p`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return text.removeprefix(".")


def load(text: str, source: str) -> tuple[dict[str, Any], Lines]:
    """Load the settings of a YAML document and their line numbers.

    Raises:
        ConfigError: The document is not YAML, is not a mapping, or has a duplicate key.
    """
    lines = Lines(source)
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        value = _value(node, (), lines) if node else None
    except RecursionError:
        raise ConfigError(f"{source}: an anchor contains itself.") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{source}{at}: invalid YAML: {getattr(error, 'problem', error)}.") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{source}: expected a mapping of settings, such as `seeds: 8`, got {type(value).__name__}.")
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
                f"{lines.source}, line {node.start_mark.line + 1}: cannot parse {node.value!r}: {error}."
            ) from None
    found: dict[str, Any] = {}
    for name, child in node.value:
        if not isinstance(name, ScalarNode) or name.tag != "tag:yaml.org,2002:str":
            got = str(name.value)[:40]
            raise ConfigError(f"{lines.source}, line {name.start_mark.line + 1}: expected a setting name, got {got!r}.")
        if name.value in found:
            raise ConfigError(f"{lines.source}, line {name.start_mark.line + 1}: duplicate setting {name.value!r}.")
        found[name.value] = _value(child, (*place, name.value), lines)
        lines.found[(*place, name.value)] = name.start_mark.line + 1
    return found


def _prefixes(place: Place) -> list[Place]:
    return [place[:end] for end in range(len(place), -1, -1)]
