"""Find the modules that have to be in training mode for the dropout of a model to drop, and what else that changes.

The model runs once in eval mode with only these modules in training mode. With the drops replaced by their inputs, the
operations must be those of eval mode.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import zip_longest
from typing import Any

from torch import nn

from hookdrop.core.errors import InjectionError
from hookdrop.core.tables import some
from hookdrop.core.tensor_tree import map_leaves
from hookdrop.survey.drop_rates import ATTENTION, Arrivals, DropRate, active_rate
from hookdrop.survey.facts import Survey
from hookdrop.survey.ops import DROPOUTS, RECURRENT
from hookdrop.survey.record import modules_of, record
from hookdrop.survey.trace import Call, Node, Op, Trace

Runners = Mapping[DropRate, tuple[str, ...]]
"""The names of the modules whose own forward runs the drops of each rate."""
Step = tuple[Any, Call | None, str]
"""What was computed, in a form that is equal in equal forward passes; where; and its description."""
_SAME = {*DROPOUTS, "contiguous"}
"""Functions that return the values of their input: attention has another memory layout if it drops."""
_MASKS = {"mul", "div", "where", "masked_fill"}


def runners_of(survey: Survey, rates: Collection[DropRate]) -> Runners:
    """Return the modules that have to be in training mode for the drops of these rates.

    An `InjectionError` if their training mode does not suffice, or changes more than the drops.
    """
    known = survey.all_drop_rates.runners
    runners = {rate: known.get(rate, (rate.layer,)) for rate in rates}
    names = {name for layers in runners.values() for name in layers}
    training = {module for name, module in modules_of(survey.model).items() if name in names}

    def almost_0(rate: DropRate, value: float, index: int) -> float | None:
        # Nothing is dropped, and float32 does not show the scale.
        return 1e-9 + 1e-14 * index if rate in rates else None

    for fake in (survey.is_fake, False):  # a forward may test values in training mode only
        try:
            arrivals = Arrivals(survey.model, survey.example.value, almost_0, fake=fake, training=training)
            break
        except InjectionError as error:
            reason = str(error).partition("\n")[2].partition("\n")[0].strip()
    else:
        raise InjectionError(
            f"sampling(): the model does not run in eval mode with its dropout in training mode.\n  {reason}\n"
            "  leave out the rates of the module that raises this: inject(model, set_dropout(), exclude=[...])"
        )
    trace = arrivals.trace
    for rate in rates:
        if rate in known and rate not in arrivals.ops and not trace.calls_of.keys().isdisjoint(runners[rate]):
            what = f"{rate.attribute} drops only if other modules train"
            raise _refused(survey.model, runners, runners[rate][0], what)
    drops = {op for rate in rates for op in arrivals.ops.get(rate, ())}
    plain = survey.trace if fake == survey.is_fake else record(survey.model, survey.example.value, fake=fake)
    only_drop = _only_drop(plain, trace, names)
    before = [*_steps(plain, names, only_drop, set())]
    differences = []
    for scales in (arrivals.scales, ()):  # eval mode leaves out a mask, or multiplies by what is not dropped
        after = _steps(trace, names, only_drop, drops, scales)
        pairs = zip_longest(before, after, fillvalue=(None, None, ""))
        differing = next((pair for pair in pairs if pair[0][0] != pair[1][0]), None)
        if differing is None:
            return runners
        differences.append(differing)
    raise _refused(survey.model, runners, *_difference(*differences[0], names))


def _difference(old: Step, new: Step, names: Collection[str]) -> tuple[str, str]:
    """Return the sampled module in which two forward passes differ, and how."""
    for (_, call, what), when in ((new, "in training mode"), (old, "in eval mode only")):
        for one in call.around() if call else ():
            if one.name in names:
                return one.name, f"{when}, it {what}"
    return "", "with its dropout in training mode, it calls other functions"


def _refused(model: nn.Module, runners: Runners, name: str, what: str) -> InjectionError:
    kind = type(model.get_submodule(name)).__name__
    held = sorted({rate.layer for rate, layers in runners.items() if name in layers or not name})
    return InjectionError(
        f"sampling(): {kind} ({name or 'the model'!r}) cannot be sampled: {what}.\n"
        f"  leave out its rates: inject(model, set_dropout(), exclude=[{some(held)}])\n"
        "  and drop at its layers: inject(model, Dropout(p=...), layers=...)"
    )


def _only_drop(plain: Trace, trace: Trace, names: Collection[str]) -> set[str]:
    """Return the names of the modules that return their input itself in eval mode, and one tensor in training mode."""
    calls = {name: plain.calls_of.get(name, []) for name in names}
    same = {name for name, found in calls.items() if found and all(one.outputs == one.inputs[:1] for one in found)}
    return {name for name in same if all(len(one.outputs) == 1 for one in trace.calls_of.get(name, []))}


def _effective(trace: Trace, names: Collection[str]) -> list[Op]:
    """Return the operations that an output depends on, or a change of the example or the weights."""
    needed = {node for call in trace.calls if call.name in names or not call.name for node in call.outputs}
    found = []
    for op in reversed(trace.ops):
        if not needed.isdisjoint(op.outputs) or (op.is_in_place and any(map(_is_given, op.inputs))):
            needed.update(op.inputs)
            found.append(op)
    return found[::-1]


def _steps(
    trace: Trace,
    names: Collection[str],
    only_drop: Collection[str],
    drops: Collection[Op],
    scales: Collection[float] = (),
) -> Iterator[Step]:
    """Yield what a forward computes from the example and the weights, without these drops.

    With the `scales` of the drops, also without what applies masks.
    """
    masks: set[Node] = set()  # tensors that are computed from the random numbers of drops
    for op in _effective(trace, names):
        if op.call is not None and any(one.name in only_drop for one in op.call.around()):
            continue
        computed = [node for node in op.inputs if node.is_data or node.has_weights or _is_given(node)]
        rate = 0.0 if op in drops or op.name not in (*DROPOUTS, *ATTENTION) else active_rate(op)
        is_masked = not masks.isdisjoint(op.inputs) or any(isinstance(arg, float) and arg in scales for arg in op.args)
        applies = scales and is_masked and len(computed) == 1 and op.name in _MASKS
        if not computed:
            masks.update(op.outputs if op in drops or is_masked else ())
        elif not applies and (op.name not in _SAME or rate):
            fused = op.name in ATTENTION or op.name in RECURRENT  # which have a rate and a flag as arguments
            what = _key(op.inputs if fused else (op.args, op.kwargs))
            text = f"drops at a rate of {rate} that this injection does not have" if rate else f"calls {op.name}"
            yield (op.name, op.call and op.call.name, rate, what, _key(op.outputs)), op.call, text
    for call in trace.calls:
        if call.name in names and call.name not in only_drop:
            yield _key(call.output), call, "returns something else"


def _key(value: Any) -> str:
    """Return a text that is equal for equal values, with tensors of equal shapes and the same weights."""

    def plain(leaf: Any) -> Any:
        if not isinstance(leaf, Node):
            return leaf if isinstance(leaf, bool | int | float | str) else type(leaf)
        return leaf.index if leaf.leaf == "weight" else "", leaf.is_data, leaf.shape

    return repr(map_leaves(value, plain))


def _is_given(node: Node) -> bool:
    """Whether a tensor is of the example or the weights. All passes of a model number these in the same way."""
    return node.leaf in ("input", "weight")
