"""Check sites without the rule that found them: equal modules in a list have equal sites."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from hookdrop.core.tables import some
from hookdrop.survey.trace import Trace


def sibling_warnings(trace: Trace, sites: Collection[str], known: Collection[str]) -> list[str]:
    """Return a warning for modules whose sites differ from those of equal modules, and that no `known` warning names.

    Equal modules are in one `ModuleList`, `ModuleDict` or `Sequential`, and have one class, equal shapes of parameters,
    and equal shapes of inputs and outputs, so that a block that reduces the resolution is not equal to the next one.
    `sites` are the names of all layers that a recipe chose.
    """
    found, reported = list[str](), list[str]()
    for parent in trace.lists:
        groups: dict[object, list[str]] = {}
        for name in trace.lists[parent]:
            calls = trace.calls_of.get(name, [])
            shapes = [[node.shape for node in (*call.inputs, *call.outputs) if node.fits] for call in calls[:1]]
            if calls or name in trace.lists:
                groups.setdefault((trace.kinds[name], repr(shapes)), []).append(name)
        for names in groups.values():
            inside = {name: frozenset(one.removeprefix(name) for one in sites if f"{one}.".startswith(f"{name}."))
                      for name in names}  # fmt: skip
            usual = Counter(inside.values()).most_common(1)[0][0]
            model = next(name for name in names if inside[name] == usual)
            # Not where one of them has an Identity, as the first block of a timm model has in place of DropPath.
            odd = [name for name in names if any(trace.type_of(name + place) == trace.type_of(model + place) != ""
                                                 for place in inside[name] ^ usual)]  # fmt: skip
            if odd and not f"{parent}.".startswith(tuple(f"{name}." for name in reported)):
                reported += names
                if not any(f"'{name}" in text for name in odd for text in known):
                    others = [name for name in names if name not in odd]
                    found.append(
                        f"{some(odd)} and {some(others)} are equal modules, but their sites differ.\n"
                        "  compare them in the plan; to choose the layers yourself: inject(model, ..., layers=...)"
                    )
    return found
