"""Check sites without the rule that found them: equal modules in a list have equal sites."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from hookdrop.core.tables import some
from hookdrop.survey.ops import FUSED_ATTENTION, PRODUCTS
from hookdrop.survey.trace import Trace

_DIFFER = (
    "{} and {} are layers of one class, but their sites differ.\n"
    "  compare them in the plan; to choose the layers yourself: inject(model, ..., layers=...)"
)


def sibling_warnings(trace: Trace, sites: Collection[str], known: Collection[str]) -> list[str]:
    """Return a warning for modules whose sites differ from those of equal modules, and that no `known` warning names.

    Equal modules are in one `ModuleList`, `ModuleDict` or `Sequential`, and have one class, equal shapes of parameters,
    and equal shapes of inputs and outputs, so that a block that reduces the resolution is not equal to the next one.
    `sites` are the names of all layers that a recipe chose.
    """
    found, reported = list[str](), list[str]()
    inside = {name: frozenset(one.removeprefix(name) for one in sites if f"{one}.".startswith(f"{name}."))
              for names in trace.lists.values() for name in names}  # fmt: skip
    for parent in trace.lists:
        for names in _groups(trace, parent, lambda name: trace.kinds[name]):
            usual = Counter(inside[name] for name in names).most_common(1)[0][0]
            model = next(name for name in names if inside[name] == usual)
            # Not where one of them has an Identity, as the first block of a timm model has in place of DropPath.
            odd = [name for name in names if any(trace.type_of(name + place) == trace.type_of(model + place) != ""
                                                 for place in inside[name] ^ usual)]  # fmt: skip
            if odd and not f"{parent}.".startswith(tuple(f"{name}." for name in reported)):
                reported += names
                if not _are_named(odd, known):
                    others = [name for name in names if name not in odd]
                    found.append(_DIFFER.format(some(odd), some(others)))
    return found + _hybrid_warnings(trace, inside, [*known, *found])


def _hybrid_warnings(trace: Trace, inside: Mapping[str, frozenset[str]], known: Collection[str]) -> list[str]:
    """Return a warning for layers without a site, if others of their class have one, and both multiply tensors.

    So do layers of a hybrid model, whatever kind of attention they have.
    """
    found = list[str]()
    multiplying = {op.call.name for op in trace.ops if op.call and op.name in {*PRODUCTS, FUSED_ATTENTION}
                   and sum(node.is_data and node.has_weights for node in op.inputs) > 1}  # fmt: skip
    for parent in trace.lists:
        for group in _groups(trace, parent, trace.type_of):
            names = [name for name in group if any(f"{one}.".startswith(f"{name}.") for one in multiplying)]
            places = {place for name in names for place in inside[name]}
            without = [name for name in names if not inside[name]]
            is_off = any(trace.type_of(name + place) == "Identity" for name in without for place in places)
            if places and without and not is_off and not _are_named(without, known):
                found.append(_DIFFER.format(some(without), some([name for name in names if inside[name]])))
    return found


def _groups(trace: Trace, parent: str, kind: Callable[[str], object]) -> list[list[str]]:
    """Return the modules in a list that have one kind and equal shapes of inputs and outputs."""
    groups: dict[object, list[str]] = {}
    for name in trace.lists[parent]:
        calls = trace.calls_of.get(name, [])
        shapes = [[node.shape for node in (*call.inputs, *call.outputs) if node.fits] for call in calls[:1]]
        if calls or name in trace.lists:
            groups.setdefault((kind(name), repr(shapes)), []).append(name)
    return [*groups.values()]


def _are_named(names: Sequence[str], warnings: Collection[str]) -> bool:
    return any(f"'{name}{end}" in text for name in names for end in "'." for text in warnings)
