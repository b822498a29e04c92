"""The modules that run the dropout of a model, which have to be in training mode to sample it."""

from __future__ import annotations

import weakref
from collections.abc import Collection

from torch import nn

from hookdrop.core.errors import InjectionError
from hookdrop.core.registry import hooks_removed
from hookdrop.core.selection import unwrapped
from hookdrop.core.state import InjectionState
from hookdrop.survey.drop_rates import DropRate, known_drop_rates
from hookdrop.survey.facts import survey
from hookdrop.survey.record import modules_of
from hookdrop.survey.sampling import Runners, runners_of


def find_runners(model: nn.Module, state: InjectionState) -> None:
    """Find the modules that have to be in training mode to sample the dropout of `state`, before its first sampling.

    Raises:
        InjectionError: training mode would change more than the dropout.
    """
    own = [sink for sink in state.live.members if sink.at == "attribute"]
    own = [sink for sink in own if sink.constant or (sink.target and sink.p_scale)] or own
    if all(sink.runners is not None for sink in own):
        return
    root = (state.live.root and state.live.root()) or unwrapped(model)
    modules = modules_of(root)
    names = {module: name for name, module in reversed(modules.items())}
    present = [(sink, module) for sink in own if (module := sink.module()) in names]
    rates = {sink: DropRate(names[module], sink.attribute, sink.constant) for sink, module in present}
    with hooks_removed(model):
        runners = _runners(root, state, rates.values())
    for sink, rate in rates.items():
        sink.runners = [weakref.ref(modules[name]) for name in runners[rate]]


def _runners(root: nn.Module, state: InjectionState, rates: Collection[DropRate]) -> Runners:
    try:
        state.live.survey = state.live.survey or survey(root)
    except InjectionError as error:
        if not {*rates} <= {*known_drop_rates(root)}:
            raise InjectionError(
                f"sampling(): {state.name!r} was copied without the example input that shows which modules drop.\n"
                '  inject it here: inject(model, set_dropout(), example_input=x, on_existing="replace")'
            ) from error
        return {rate: (rate.layer,) for rate in rates}  # modules that only drop need no example
    return runners_of(state.live.survey, rates)
