"""Fold the layers of a model into rows: equal blocks are one row, and what blocks of a kind contain is shown once."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, product
from typing import Any

from hookdrop.core.selection import glob_expression

SIZES = re.compile(r"\b(\d+(?:x\d+)*)\b")
"""Numbers and shapes in a text: 256 and 14x14, but not the 2 of Dropout2d."""

UNIT = 5
"""The size of a convolution with its norm, activation and dropout, which are a unit and not yet a block."""


@dataclass(frozen=True)
class LayerFacts:
    """One layer of a model."""

    name: str
    """Full name, without wrappers."""
    type: str
    shape: tuple[int, ...] | None = None
    """Of the first floating-point tensor that it returns; like `calls`, None without an example."""
    calls: int | None = None
    """How often one forward calls it; None for containers, which have no forward."""
    fits: tuple[str, ...] = ()
    """What can be added there, such as `"DropBlock, Dropout2d: 256 maps of 14x14"`."""
    rates: tuple[float, ...] = ()
    """The rates at which it already drops."""


@dataclass(frozen=True)
class Row:
    """Layers that are shown as one: they differ in nothing but sizes."""

    pattern: str
    """Matches exactly these layers."""
    depth: int
    layers: Sequence[LayerFacts]


@dataclass
class _Node:
    facts: LayerFacts
    is_block: bool = False
    inside: list[_Node] = field(default_factory=list)

    @property
    def role(self) -> str:
        """What its parent calls it: `conv1`, but without the number for blocks (`layer#`) and elements of a list."""
        own = self.facts.name.rpartition(".")[2]
        return re.sub(r"\d+", "#", own) if self.is_block or own.isdecimal() else own

    @cached_property
    def size(self) -> int:
        """The number of layers, itself included."""
        return 1 + sum(one.size for one in self.inside)

    @cached_property
    def has_list(self) -> bool:
        """Whether it contains, at any depth, a list of blocks: a stage, for example. Each kind of these has a row."""
        blocks = Counter((one.role, one.facts.type) for one in self.inside if one.size > UNIT and "#" in one.role)
        is_list = max(blocks.values(), default=0) > (len(self.inside) > 1)
        return is_list or any(one.has_list for one in self.inside)

    def kind(self, sized: bool) -> Any:
        """Equal for layers that differ in their rates only or, unless `sized`, also in sizes."""
        one = self.facts
        inside = [(each.role, each.kind(sized)) for each in self.inside] if self.has_list else ()
        sizes = (one.shape, one.fits) if sized else (len(one.shape or ()), [SIZES.sub("#", fit) for fit in one.fits])
        return one.type, one.calls, bool(one.rates), sizes, inside


def fold(every: Sequence[LayerFacts], selected: Collection[str]) -> list[Row]:
    """Return the rows of the selected layers, each of which is in one row."""
    kept = {"", *selected, *(name[: dot.start()] for name in selected for dot in re.finditer(r"\.", name))}
    parents, names = {one.name.rpartition(".")[0] for one in every}, [one.name for one in every if one.name]
    nodes = {one.name: _Node(one, one.name in parents) for one in every if one.name in kept}
    for name, node in nodes.items():
        if name:
            nodes[name.rpartition(".")[0]].inside.append(node)
    root, found, families = nodes[""], dict[Any, list[_Node]](), dict[str, list[_Node]]()
    for key, node in _blocks(root, ""):
        families[node.facts.name] = found.setdefault(key, [])
        found[key].append(node)

    def rows(blocks: Sequence[_Node], depth: int) -> Iterator[Row]:
        """Yield what blocks contain, as if they were one."""
        for group in _groups(blocks):
            shown = [node.facts for node in group if node.facts.name in selected]
            for pattern, part in _patterns(shown, names):
                yield Row(pattern, depth, part)
            inside: list[_Node] = []
            for node in group:
                family = families.get(node.facts.name, [node])
                inside += family
                family.clear()  # the rest of a family was shown with its first member
            yield from rows(inside, depth + 1)

    whole = [Row("", 0, [root.facts])] if "" in selected else []
    return [*whole, *rows([root], 0)]


def _blocks(node: _Node, path: str) -> Iterator[tuple[Any, _Node]]:
    """Yield the outermost blocks that contain no list of blocks, each with a key of its type and its place.

    Blocks of one key have one place in a repeating structure, such as `layer#.#`, without others in between.
    """
    runs = Counter[Any]()
    for kind, run in groupby(node.inside, lambda one: (one.role, one.facts.type)):
        for one in run:
            if one.has_list:
                yield from _blocks(one, f"{path}.{one.role}")
            elif one.inside:
                yield (path, *kind, runs[kind]), one
        runs[kind] += 1


def _groups(blocks: Sequence[_Node]) -> list[list[_Node]]:
    """Group the children of blocks that are shown as one: neighbors of a kind, and the same children of each block."""
    groups: dict[tuple[str, int], dict[str, list[_Node]]] = {}
    for block in blocks:
        runs = Counter[str]()
        for (role, _), run in groupby(block.inside, lambda one: (one.role, one.kind(sized=len(blocks) == 1))):
            nodes = list(run)
            groups.setdefault((role, runs[role]), {}).setdefault(repr(nodes[0].kind(sized=False)), []).extend(nodes)
            runs[role] += 1
    return [group for kinds in groups.values() for group in kinds.values()]


# --- patterns


def _patterns(layers: list[LayerFacts], every: Sequence[str]) -> Iterator[tuple[str, list[LayerFacts]]]:
    """Yield the fewest globs that match the layers and no other name, each with the layers that it matches."""
    if not layers:
        return
    columns = [*zip(*[one.name.split(".") for one in layers], strict=True)]
    for parts in product(*map(_segments, columns)):
        pattern = ".".join(parts)
        if sum(glob_expression(pattern).fullmatch(name) is not None for name in every) == len(layers):
            yield pattern, layers
            return
    # No glob does: split the names at the first segment that differs, if it has several tens (1, 10, 20) by these.
    values = next(column for column in columns if len({*column}) > 1)
    tens = len({value[:-1] for value in values}) > 1
    keys = [value[:-1] if tens else value for value in values]
    for key in dict.fromkeys(keys):
        yield from _patterns([one for one, own in zip(layers, keys, strict=True) if own == key], every)


def _segments(values: Sequence[str]) -> list[str]:
    """Return globs for one segment of the names, of which the first that matches no other name is the best."""
    distinct = sorted({*values})
    if len(distinct) == 1:
        return distinct
    stems, before = {value.rstrip("0123456789") for value in distinct}, {value[:-1] for value in distinct}
    last = "".join(value[-1] for value in distinct)
    is_range = ord(last[-1]) - ord(last[0]) == len(last) - 1
    stars = [f"{stem}*" for stem in stems if len(stems) == 1]
    ranges = [f"{one}[{f'{last[0]}-{last[-1]}' if is_range else last}]" for one in before if len(before) == 1]
    return [*stars, *ranges] if "*" in stars else [*ranges, *stars]
