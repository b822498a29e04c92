"""Equal blocks are treated equally: a check of the sites of any recipe that knows none of its rules.

Blocks are equal if they are in one list, and have one class and parameters of the same names and shapes.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch import nn

import hookdrop


def differences(plan: hookdrop.Plan) -> Iterator[str]:
    """Yield sites inside others, and blocks that differ from most of their equals, unless a warning names them."""
    calls: Mapping[str, Any] = plan.survey.layers if plan.survey else {}  # neftune may need no forward
    sites = [site.name for site in plan.sites if site.at != "skip"]
    for site in (site for site in sites if any(one != site and is_in(one, site) for one in sites)):
        yield f"the site {site!r} contains another"
    layers = [site.name for site in plan.sites if isinstance(site.regularizer, hookdrop.LayerDrop)]
    for blocks in _equal_blocks(plan.root, calls):
        around = [name for name in layers if name != blocks[0] and is_in(blocks[0], name)]
        if around and _are_layers(blocks, plan.survey):
            yield f"the site {around[0]!r} contains {len(blocks)} layers in a row, such as {blocks[0]}"
        found = {block: tuple(site.removeprefix(block) for site in sites if is_in(site, block)) for block in blocks}
        usual = Counter(found.values()).most_common(1)[0][0]
        for block, own in found.items():
            if own != usual and not is_named(block, named(plan.warnings)):
                yield f"{block} has the sites {own}, others like it have {usual}"


def _equal_blocks(model: nn.Module, called: Collection[str]) -> Iterator[list[str]]:
    """Yield the names of equal blocks that run, two or more."""
    for name, parent in model.named_modules():
        kinds: dict[object, list[str]] = {}
        for key, child in parent.named_children() if isinstance(parent, nn.ModuleList | nn.Sequential) else ():
            shapes = tuple((path, tuple(p.shape)) for path, p in child.named_parameters())
            full = f"{name}.{key}".removeprefix(".")
            # The parts of a Sequential have different tasks, those of a ModuleList have not.
            is_block = bool(shapes) and (
                isinstance(parent, nn.ModuleList) or any([*part.parameters()] for part in child.children())
            )
            if is_block and any(is_in(one, full) for one in called):
                kinds.setdefault((type(child), shapes), []).append(full)
        yield from (blocks for blocks in kinds.values() if len(blocks) > 1)


def _are_layers(blocks: Sequence[str], survey: Any) -> bool:
    """Whether each block gets what the one before returns, and adds something to it."""
    calls = [survey.layers[block][0] for block in blocks if block in survey.layers]
    sums = [op for op in survey.trace.ops if op.name == "add"]
    in_a_row = all({*before.outputs} & {*after.inputs} for before, after in pairwise(calls))
    add = (any(one.start < op.index < one.end and {*op.inputs} & {*one.inputs} for op in sums) for one in calls)
    return len(calls) > 1 and in_a_row and all(add)


def is_in(name: str, block: str) -> bool:
    """Whether a name is that of a block, or of a module inside it."""
    return f"{name}.".startswith(f"{block}." if block else "")


def named(warnings: Sequence[str]) -> list[str]:
    """Return the names of modules in the warnings of a plan."""
    return [name for text in warnings for name in re.findall(r"'([\w.]+)'", text)]


def is_named(block: str, names: Sequence[str]) -> bool:
    """Whether a block, or one like it, or a module inside is among these: a warning names only the first of many."""
    return any(is_in(re.sub(r"\d+", "#", name), re.sub(r"\d+", "#", block)) for name in names)
