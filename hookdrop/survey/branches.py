"""Choose the residual branches of a trace among its residual additions: those of blocks, with an end to hook."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from hookdrop.survey.ops import ENLARGING, FUSED_ATTENTION, PRODUCTS
from hookdrop.survey.regions import Regions
from hookdrop.survey.residuals import Residual, has_weights, have_weights
from hookdrop.survey.trace import Call, Trace


@dataclass(frozen=True)
class Branch:
    """A residual branch. All names are full names of modules."""

    layer: str
    """The outermost block around the addition that adds branches: in BERT, the layer around both of its outputs."""
    end: str
    """The last module of the branch, whose output reaches the addition."""
    shape: tuple[int, ...]
    """The shape of the output of `end`."""
    parts: tuple[str, ...] = ()
    """All modules whose output reaches the addition, `end` first, if nothing but linear operations follows them."""
    is_all: bool = False
    """Whether the model adds no other branches, and all layers with weights run inside them or their skip."""


def find_branches(trace: Trace, everything: list[Residual]) -> tuple[Branch, ...]:
    """Return the residual branches of a trace with these additions, in the order of execution."""
    residuals = _without_long_skips(trace, everything)
    usable = _usable_ends(trace, everything)
    layers = _layers(trace, residuals, usable)
    weighted = [op for op in trace.ops if has_weights(op)]
    found: dict[tuple[str, str], Branch] = {}
    for residual in residuals:
        is_all = len(residuals) == 1 and all(residual.root.index < op.index < residual.op.index for op in weighted)
        for calls in residual.ends:
            usable_calls = [call for call in calls if call.name in usable]
            if usable_calls:
                parts = tuple(dict.fromkeys(call.name for call in usable_calls))
                branch = Branch(layers[residual], parts[0], usable_calls[0].outputs[0].shape, parts, is_all)
                found.setdefault((branch.layer, branch.end), branch)
    return tuple(found.values())


def find_gaps(trace: Trace, everything: list[Residual]) -> tuple[Mapping[str, str], tuple[Call, ...]]:
    """Return what no end of a branch can drop.

    These are the layers with a branch that does not end with a module, each with the reason, and the calls that
    multiply two tensors as matrices outside of the branches.
    """
    kept = _without_long_skips(trace, everything)
    inside = {node for residual in kept for node in residual.before - {residual.root}}
    sums = {residual.output for residual in kept}
    usable = _usable_ends(trace, everything)
    shared = [one for one in kept if usable.isdisjoint(call.name for calls in one.ends for call in calls)]
    reasons: dict[str, str] = {}
    for one in [*(one for one in everything if not one.ends), *shared]:
        if one.output not in inside and sums.isdisjoint(one.before - {one.root}):
            end = "ends with a tensor that has other uses" if one.has_shared_end else "does not end with a module"
            reason = f"a residual branch there {end}.\n  {_ENDLESS}"
            reasons.setdefault(_home_name(one), _COMPLEX if one.output.dtype.is_complex else reason)
            inside |= one.before - {one.root}
    homes = {*map(_home_name, kept)}
    nested = [one for one in everything if one.ends and one.output in inside and not one.is_projection]
    for home in dict.fromkeys(_home_name(one) for one in nested if one not in kept):
        if home not in homes:
            reasons.setdefault(home, "its residual branches are inside another one.")
    reasons |= {name: _HIDDEN for name in _hiding(trace) if name not in reasons}
    products = PRODUCTS | {FUSED_ATTENTION}
    ops = [op for op in trace.ops if op.name in products and inside.isdisjoint(op.outputs)]
    apart = [op.call for op in ops if op.call and sum(node.fits and node.is_data for node in op.inputs) > 1]
    return reasons, tuple(dict.fromkeys(apart))


_ENDLESS = "end the branch with a module, then add: self.act = nn.ReLU(); x + self.act(self.conv(x))"
_COMPLEX = "a residual branch there adds complex numbers, which no regularizer drops."
_HIDDEN = "code whose operations are hidden, such as torch.func.vmap, gets what a layer there returns."


def _hiding(trace: Trace) -> list[str]:
    """Return the modules with hidden code to which layers inside return something, which goes nowhere else."""
    hidden, regions = {node for op in trace.ops if op.name == "opaque" for node in op.outputs}, Regions(trace)
    outer = [call for call in trace.calls if not hidden.isdisjoint(call.outputs)]
    first = [(call, node) for call in trace.calls if outer for node in call.outputs[:1] if node.is_data]
    lost = {call for call, node in first if node.has_weights and not (regions.uses(node) or node in regions.outputs)}
    return [one.name for one in outer if any(one in call.around() for call in lost - {one})]


def _without_long_skips(trace: Trace, everything: list[Residual]) -> list[Residual]:
    """Leave out skips around several blocks, towers beside them, and blocks inside a branch, such as that of a gate."""
    residuals = [one for one in everything if one.ends and not _returns_from_below(trace, one)]
    # What a decoder adds to the queries of an attention, whose stream goes on without it: positions, older than that.
    positions = {
        one
        for outer in residuals
        for one in residuals
        if one.root.index < outer.root.index and one.output in outer.before and outer.root in one.before
    }
    residuals = [one for one in residuals if one not in positions]
    left_out: set[Residual] = set()
    layers = trace.repeated(map(_home_name, everything))
    for outer in everything:
        since, home = outer.root.index, _home_name(outer)
        inside = [one for one in residuals if one.output in outer.before and one.root.index >= since]
        inner = [one for one in inside if _home_name(one) != home]
        beside = {_home_name(one) for one in residuals if one.output in outer.passed} - {home}
        # In the same forward, a sum without weights of parts of a branch, such as a token shift.
        own = [
            one
            for one in inside
            if one.root in outer.before - {outer.root} and not have_weights(one.before - {one.root})
        ]
        is_long = _are_several({*map(_home_name, inner)}) or (home not in layers and _are_several(beside))
        left_out.update([outer] if is_long else inner * (outer in residuals))
        left_out.update(one for one in own if one not in inner)
    return [one for one in residuals if one not in left_out]


def _are_several(names: set[str]) -> bool:
    """Whether none of the modules with these names contains all others."""
    return len([name for name in names if not any(f"{name}.".startswith(f"{one}.") for one in names - {name})]) > 1


def _returns_from_below(trace: Trace, residual: Residual) -> bool:
    """Whether all that a branch adds is enlarged again, by a layer that gets a smaller map, as in a U-Net."""
    op, size = residual.op, residual.output.shape[2:]
    for node in residual.before - {residual.root}:
        if node.op is not None and node.op.name in ENLARGING:
            outer = node.op.call.around() if node.op.call else ()
            around = [call.inputs for call in outer if not call.start < op.index < call.end]
            maps = [one for one in (around[-1] if around else node.op.inputs) if one in residual.before]
            others = trace.reached([residual.root], node)
            if maps and all(one.shape[2:] != size for one in maps) and not others & {residual.branch} - {node}:
                return True
    return False


def _usable_ends(trace: Trace, residuals: list[Residual]) -> set[str]:
    """Return the modules that may be ends: each of their calls is the end of a branch.

    Others, such as a dropout that several branches share, also run inside a branch, or before the end of another.
    """
    terms = [calls for residual in residuals for calls in residual.ends]
    counts = Counter(call.name for call in {call for calls in terms for call in calls})
    usable = {name for name, count in counts.items() if name and count == len(trace.calls_of[name])}
    while True:
        ends = [next((call.name for call in calls if call.name in usable), "") for calls in terms]
        inside = {call.name for calls, end in zip(terms, ends, strict=True) for call in calls if call.name != end}
        wrong = inside & set(ends)
        if not wrong:
            return usable
        usable -= wrong


def _layers(trace: Trace, residuals: list[Residual], usable: set[str]) -> dict[Residual, str]:
    """Return the layer of each residual: the outermost block around it, unless that block is a stack of layers."""
    homes = {residual: _home_name(residual) for residual in residuals}
    ends = {one: next((call.name for calls in one.ends for call in calls if call.name in usable), "") for one in homes}
    patterns: dict[str, dict[str, str]] = {}
    for residual, home in homes.items():
        patterns.setdefault(home, {})[ends[residual]] = re.sub(r"\.\d+(?=\.)", ".#", f".{ends[residual]}.")
    # Several ends whose names differ in an index only belong to several layers.
    stacks = {home for home, names in patterns.items() if not home or len(set(names.values())) < len(names)}
    # An encoder is no layer, even if it adds something itself, such as the positions from a convolution.
    layers = trace.repeated(homes.values())
    inside = [name.rpartition(".")[0] for name in layers]
    stacks |= {home for home in homes.values() if home not in layers and any(x.startswith(f"{home}.") for x in inside)}
    blocks = {home for home in homes.values() if home not in stacks}
    found = {}
    for residual, home in homes.items():
        around = [block for block in blocks if f"{home}.".startswith(f"{block}.")]
        found[residual] = min(around, key=len) if around else ends[residual]
    return found


def _home_name(residual: Residual) -> str:
    """Return the module in which the branch starts, around one that gets it as an argument, as in BERT's output."""
    root, call = residual.root, residual.op.call
    first = max((n.op.index for n in residual.before - {root} if n.op and root in n.op.inputs), default=root.index)
    while call is not None and call.start > max(first, root.index):
        call = call.parent
    return "" if call is None else call.name
