"""`follow` counts each optimizer step exactly once."""

from collections.abc import Callable, Iterable
from functools import partial, reduce
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hookdrop import Dropout, HookdropWarning, Injection, LinearSchedule, inject
from hookdrop.guards.progress import UPDATES_BEFORE_WARNING
from tests.support.training import backward, optimize, scheduled

X = torch.ones(2, 4)


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.AdamW, torch.optim.LBFGS])
def test_counts_steps_not_forwards_under_gradient_accumulation(cls: Callable[..., torch.optim.Optimizer]) -> None:
    model, drop, _ = scheduled()
    optimizer = cls(model.parameters(), 1e-3)
    assert drop.follow(optimizer) is drop
    for batch in range(12):
        backward(model)
        if batch % 4 == 3:
            optimizer.step(lambda: backward(model))
            optimizer.zero_grad()
    assert drop.step_count == 3
    assert drop.p == pytest.approx(0.015)


class Nesting(torch.optim.SGD):
    """Its step calls that of its base class, whose hooks PyTorch calls too once an instance of it exists."""

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        return super().step(closure)


def test_steps_of_an_optimizer_that_calls_super_count_once() -> None:
    model, drop, base = scheduled()
    nesting = Nesting(model.parameters(), 0.1)
    calls: list[object] = []
    nesting.register_step_post_hook(lambda *args: calls.append(args))
    drop.follow(nesting)
    for _ in range(10):
        backward(model)
        nesting.step()
    assert len(calls) == 20
    with pytest.raises(ZeroDivisionError):
        nesting.step(lambda: 1 / 0)
    assert drop.step_count == 10
    drop.follow(None)
    for _ in range(UPDATES_BEFORE_WARNING):  # counted twice, the schedule would seem to stand still twice as soon
        nesting.step()
    with pytest.warns(HookdropWarning, match="is still at step 10"):
        nesting.step()
    drop.follow(base)
    base.step()
    assert drop.step_count == 11


class Wrapper(torch.optim.Optimizer):
    """A torch optimizer without hooks, with the real one in an attribute: `DPOptimizer` of Opacus."""

    def __init__(self, optimizer: Any = None) -> None:
        self.original_optimizer = optimizer


@pytest.mark.parametrize("wrapper", [Wrapper, lambda optimizer: SimpleNamespace(opt=optimizer)])  # the second as fastai
def test_follow_unwraps_optimizers(wrapper: Callable[..., Any]) -> None:
    model, drop, optimizer = scheduled()
    drop.follow(wrapper(optimizer))
    backward(model)
    optimizer.step()
    assert drop.step_count == 1


@pytest.mark.parametrize("thing", ["sgd", torch.optim.SGD, pytest, Wrapper()])
def test_follow_rejects_other_objects(thing: object) -> None:
    _, drop, _ = scheduled()
    with pytest.raises(TypeError):
        drop.follow(thing)


@pytest.mark.parametrize("fused", [False, True])
def test_steps_skipped_by_grad_scaler_do_not_count(fused: bool) -> None:
    """A fused optimizer also runs its post hooks for skipped steps."""
    model, drop, optimizer = scheduled(fused=fused)
    drop.follow(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    skipped = []
    for inf in (False, True, False, True, True, False):
        optimizer.zero_grad()
        before = [p.detach().clone() for p in model.parameters()]
        scaler.scale(model[0](torch.ones(2, 4)).sum()).backward()
        if inf:
            model[0].weight.grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        skipped.append(all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)))
    assert skipped == [False, True, False, True, True, False]
    assert drop.step_count == 3


class TestResume:
    """A checkpoint restores the optimizer state but not the step count of the injection."""

    @staticmethod
    def resumed(optimizer_class: Any = torch.optim.AdamW) -> tuple[nn.Module, Injection, Any]:
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        first = optimizer_class(model.parameters(), 1e-3)
        optimize(model, 50, first, X)
        drop = inject(model, Dropout(0.5), layers="1", schedule=LinearSchedule(100))
        optimizer = optimizer_class(model.parameters(), 1e-3)
        drop.follow(optimizer)
        optimizer.load_state_dict(first.state_dict())
        return model, drop, optimizer

    @pytest.mark.parametrize("restore", ["seek", "load_state_dict", "end"])
    def test_resumed_optimizer_with_a_new_schedule_warns_once(self, restore: str) -> None:
        """And `check` reports it until the step is set, or the schedule has ended."""
        model, drop, optimizer = self.resumed()
        with pytest.warns(HookdropWarning, match="has already taken 50 steps") as warned:
            optimize(model, 1, optimizer, X)
        optimize(model, 1, optimizer, X)
        moved = {"at step 0": "at step 2", "taken 50": "taken 52", "seek(50)": "seek(52)", "seek(0)": "seek(2)"}
        expected = reduce(lambda text, old: text.replace(old, moved[old]), moved, str(warned[0].message))
        assert (drop.step_count, drop.check()) == (2, [expected])
        if restore == "seek":
            drop.seek(52)
        elif restore == "load_state_dict":
            drop.load_state_dict(drop.state_dict())
        else:
            drop.follow(None).step(100)
        assert drop.check() == []

    @pytest.mark.parametrize("restore", ["seek", "load_state_dict", "seek(0)", "without a step count", "new optimizer"])
    def test_other_steps_do_not_warn(self, restore: str) -> None:
        """Restored or explicit ones, and those of optimizers that count none."""
        kind = torch.optim.SGD if restore == "without a step count" else torch.optim.AdamW
        model, drop, optimizer = self.resumed(kind)
        if restore == "load_state_dict":
            saved = drop.state_dict()
            saved["injections"]["dropout"]["step_count"] = 50
            drop.load_state_dict(saved)
        elif restore.startswith("seek"):
            drop.seek(50 if restore == "seek" else 0)
        elif restore == "new optimizer":
            optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
            drop.follow(None).follow(optimizer)
        optimize(model, 1, optimizer, X)
        assert drop.step_count == (51 if restore in ("seek", "load_state_dict") else 1)

    def test_resumed_momentum_warns(self) -> None:
        """SGD counts no steps, but only a new optimizer has no momentum."""
        model, drop, optimizer = self.resumed(partial(torch.optim.SGD, momentum=0.9))
        with pytest.warns(HookdropWarning, match="has already taken steps"):
            optimize(model, 1, optimizer, X)
        optimize(model, 1, optimizer, X)
        assert drop.step_count == 2


class OtherOptimizer:
    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.parameters:
            parameter.mul_(0.999).add_(parameter.grad, alpha=-1e-6)
            parameter.grad = None


@pytest.mark.parametrize("steps_by_hand", [False, True])
def test_schedule_that_is_not_advancing_warns_under_other_optimizers(steps_by_hand: bool) -> None:
    model, drop, _ = scheduled()
    optimizer = OtherOptimizer(model.parameters())

    def train(steps: int, accumulate: int = 1) -> None:
        for _ in range(steps):
            for _ in range(accumulate):
                backward(model)
            optimizer.step()
            if steps_by_hand:
                drop.step()

    train(2, accumulate=60)
    train(UPDATES_BEFORE_WARNING - 4)
    if steps_by_hand:
        train(60)
        assert drop.check() == []
        return
    with pytest.warns(HookdropWarning, match="its schedule is not advancing") as caught:
        train(60)
    assert len(caught) == 1


def test_first_site_in_eval_mode_does_not_hide_a_schedule_that_is_not_advancing() -> None:
    """As with frozen batch norm at the start of a model."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4).eval(), nn.ReLU())
    inject(model, Dropout(0.5), layers=["1", "2"], schedule=LinearSchedule(100))
    optimizer = OtherOptimizer([model[0].weight])

    def train() -> None:
        for _ in range(2 * UPDATES_BEFORE_WARNING):
            model[0](torch.ones(2, 4)).sum().backward()
            model(torch.ones(2, 4))
            optimizer.step()

    with pytest.warns(HookdropWarning) as caught:
        train()
    texts = [str(warning.message) for warning in caught]
    assert [text for text in texts if "its schedule is not advancing" in text]
    assert [text for text in texts if "'1' only ran in eval mode" in text]
