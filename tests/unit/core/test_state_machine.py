"""Any order of the calls of a handle, on a model and its copies, compared with a model of a few lines."""

import copy
import json
import pickle
from dataclasses import dataclass, field, replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import nn

from hookdrop import Dropout, Injection, InjectionError, LinearSchedule, find, inject, without_hooks
from tests.support.leaks import entries

STEPS = 10
X = torch.ones(5_000)


@dataclass
class Expected:
    """What the handle should report."""

    target: float = 0.4
    step: int = 0
    enabled: bool = True
    override: Any = None
    """The rate inside `sampling`, None for that of the schedule; "off" inside `disabled`, "no" outside of contexts."""

    @property
    def p(self) -> float:
        on = self.enabled if self.override == "no" else self.override != "off"
        given = self.override if isinstance(self.override, float) else self.target * min(self.step / STEPS, 1.0)
        return given * on


@dataclass
class Run:
    """A model with its expected state."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    expected: Expected | None
    followed: bool = False
    contexts: list[tuple[Any, Expected]] = field(default_factory=list)

    @property
    def drop(self) -> Injection:
        return find(self.model)["dropout"]


def dropped(model: nn.Module) -> float:
    with torch.no_grad():
        return float((model(X) == 0).float().mean())


class Handles(RuleBasedStateMachine):
    runs = Bundle("runs")
    states = Bundle("states")

    def __init__(self) -> None:
        super().__init__()
        self.all: list[Run] = []

    def add(self, model: nn.Module, expected: Expected | None) -> Run:
        self.all.append(Run(model, torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1), expected))
        return self.all[-1]

    def inject(self, run: Run, p: float, **settings: Any) -> None:
        inject(run.model, Dropout(p), layers="*", schedule=LinearSchedule(STEPS), p_scale="depth", **settings)
        run.drop.seek(5)
        run.expected, run.followed = Expected(p, step=5, override="no"), False

    @initialize(target=runs)
    def begin(self) -> Run:
        run = self.add(nn.Sequential(nn.Identity(), nn.Identity()), None)
        self.inject(run, 0.4)
        return run

    @rule(run=runs, p=st.sampled_from([0.2, 0.6]))
    def inject_or_replace(self, run: Run, p: float) -> None:
        if run.contexts:
            return
        if run.expected is not None:
            with pytest.raises(InjectionError):
                self.inject(run, p)
        self.inject(run, p, on_existing="replace")

    @rule(run=runs)
    def remove(self, run: Run) -> None:
        if run.expected is not None and not run.contexts:
            drop = run.drop
            drop.remove()
            drop.remove()
            with pytest.raises(InjectionError):
                drop.seek(3)
            run.expected, run.followed = None, False

    @rule(run=runs, n=st.integers(1, 4))
    def step(self, run: Run, n: int) -> None:
        if run.expected is None:
            return
        if run.followed:
            with pytest.raises(InjectionError):
                run.drop.step(n)
        else:
            run.drop.step(n)
            run.expected.step += n

    @rule(run=runs, step=st.integers(0, 12))
    def seek(self, run: Run, step: int) -> None:
        if run.expected is not None:
            run.drop.seek(step)
            run.expected.step = step

    @rule(run=runs, follow=st.booleans())
    def follow(self, run: Run, follow: bool) -> None:
        if run.expected is not None:
            run.drop.follow(run.optimizer if follow else None)
            run.followed = follow

    @rule(run=runs)
    def optimizer_step(self, run: Run) -> None:
        run.optimizer.step()
        if run.expected is not None:
            run.expected.step += run.followed

    @rule(run=runs, value=st.sampled_from([0.1, 0.8, 1.0, 1.5]))
    def set_target(self, run: Run, value: float) -> None:
        if run.expected is None:
            return
        if value > 1.0:
            with pytest.raises(ValueError):
                run.drop.target_p = value
        else:
            run.drop.target_p = run.expected.target = value

    @rule(run=runs, enabled=st.booleans())
    def enable(self, run: Run, enabled: bool) -> None:
        if run.expected is not None:
            run.drop.enabled = run.expected.enabled = enabled
            run.expected.override = "no"

    @rule(run=runs, rate=st.sampled_from(["off", None, 0.0, 0.5]))
    def enter(self, run: Run, rate: Any) -> None:
        if run.expected is None:
            return
        now = run.expected
        if rate == 0.0 or (rate is None and now.step == 0):
            with pytest.raises(InjectionError), run.drop.sampling(p=rate):
                pass
            return
        context = run.drop.disabled() if rate == "off" else run.drop.sampling(p=rate)
        run.contexts.append((context, replace(now)))
        context.__enter__()
        now.override = rate

    @rule(run=runs)
    def leave(self, run: Run) -> None:
        if run.contexts and run.expected is not None:
            context, before = run.contexts.pop()
            context.__exit__(None, None, None)
            run.expected.enabled, run.expected.override = before.enabled, before.override

    @precondition(lambda self: len(self.all) < 3)
    @rule(target=runs, run=runs, pickled=st.booleans())
    def copy(self, run: Run, pickled: bool) -> Run:
        twin = pickle.loads(pickle.dumps(run.model)) if pickled else copy.deepcopy(run.model)
        return self.add(twin, None if run.expected is None else replace(run.expected, override="no"))

    @rule(target=states, run=runs)
    def save(self, run: Run) -> Any:
        if run.expected is None:
            return None
        return json.loads(json.dumps(run.drop.state_dict())), replace(run.expected)

    @rule(run=runs, state=states)
    def load(self, run: Run, state: Any) -> None:
        if run.expected is not None and state is not None:
            saved, then = state
            run.drop.load_state_dict(saved)
            run.expected.step, run.expected.target = then.step, then.target
            run.expected.enabled = then.enabled

    @rule(run=runs)
    def hide(self, run: Run) -> None:
        with without_hooks(run.model):
            assert not find(run.model)
            assert dropped(run.model) == 0.0

    @invariant()
    def handles_and_models_agree_with_what_is_expected(self) -> None:
        for run in self.all:
            now = run.expected
            if now is None:
                assert (bool(find(run.model)), entries(run.model), dropped(run.model)) == (False, 0, 0.0)
                continue
            drop, p = run.drop, now.p
            assert (drop.step_count, drop.target_p) == (now.step, now.target)
            assert [drop.p, *(site.p for site in drop.sites)] == pytest.approx([p, p / 2, p])
            assert drop.enabled == (now.enabled if now.override == "no" else now.override != "off")
            assert dropped(run.model) == pytest.approx(1 - (1 - p / 2) * (1 - p), abs=0.05)
            sampling = now.override != "no" and now.override != "off"
            run.model.eval()
            assert dropped(run.model) == (pytest.approx(1 - (1 - p / 2) * (1 - p), abs=0.05) if sampling else 0.0)
            run.model.train()

    def teardown(self) -> None:
        for run in self.all:
            while run.contexts:
                self.leave(run)
        self.handles_and_models_agree_with_what_is_expected()


TestHandles = pytest.mark.filterwarnings("ignore::hookdrop.HookdropWarning")(Handles.TestCase)
TestHandles.settings = settings(max_examples=60, stateful_step_count=40)
