"""`follow` counts the optimizer steps that were taken, each once, and no others."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from hookdrop import Dropout, HookdropWarning, Injection, InjectionError, LinearSchedule, find, inject
from hookdrop.diagnostics.training import UPDATES_TO_JUDGE
from tests.support.followed import backward, setup
from tests.support.nets import Small


def test_counts_steps_not_forwards_under_gradient_accumulation() -> None:
    model, drop, optimizer = setup()
    assert drop.follow(optimizer) is drop
    for batch in range(12):
        backward(model)
        if batch % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    assert drop.step_count == 3
    assert drop.p == pytest.approx(0.015)


def test_counts_once_however_often_it_is_called() -> None:
    model, drop, optimizer = setup()
    for _ in range(3):
        drop.follow(optimizer)
        find(model)[0].follow(optimizer)
    backward(model)
    optimizer.step()
    assert drop.step_count == 1


@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_a_grad_scaler_skips_do_not_count(fused: bool) -> None:
    """A fused optimizer runs its post hook on a skipped step too."""
    model, drop, optimizer = setup(fused=fused)
    drop.follow(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    skipped = []
    for inf in (False, True, False, True, True, False):
        optimizer.zero_grad()
        before = [p.detach().clone() for p in model.parameters()]
        scaler.scale(backward_free(model)).backward()
        if inf:
            model[0].weight.grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        skipped.append(all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)))
    assert skipped == [False, True, False, True, True, False]
    assert drop.step_count == 3


def backward_free(model: nn.Module) -> torch.Tensor:
    return model[0](torch.ones(2, 4)).sum()


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.LBFGS])
def test_any_optimizer(cls: type[torch.optim.Optimizer]) -> None:
    model, drop, _ = setup()
    optimizer = cls(model.parameters(), 1e-3)
    drop.follow(optimizer)
    optimizer.step(lambda: backward(model))
    assert drop.step_count == 1


def test_step_meanwhile_is_an_error() -> None:
    _, drop, optimizer = setup()
    drop.follow(optimizer)
    with pytest.raises(InjectionError, match=r"count them twice(.|\n)*drop.follow\(None\). Still at step 0"):
        drop.step()
    drop.follow(None)
    drop.step()
    assert drop.step_count == 1


def test_seek_meanwhile_is_what_a_resume_does() -> None:
    model, drop, optimizer = setup()
    drop.follow(optimizer).seek(50)
    backward(model)
    optimizer.step()
    assert drop.step_count == 51


def test_another_optimizer_is_an_error() -> None:
    model, drop, optimizer = setup()
    drop.follow(optimizer)
    with pytest.raises(InjectionError, match="already follows another SGD and still does"):
        drop.follow(torch.optim.AdamW(model.parameters(), 0.1))
    backward(model)
    optimizer.step()
    assert drop.step_count == 1


def test_an_optimizer_that_is_gone_makes_room_for_another() -> None:
    """A re-run cell builds the optimizer anew."""
    model, drop, optimizer = setup()
    drop.follow(optimizer)
    del optimizer
    gc.collect()
    assert any("the optimizer that it followed is gone" in text for text in drop.check())
    again = torch.optim.SGD(model.parameters(), 0.1)
    drop.follow(again)
    backward(model)
    again.step()
    assert drop.step_count == 1


def test_remove_detaches() -> None:
    model, drop, optimizer = setup()
    drop.follow(optimizer).remove()
    assert not optimizer._optimizer_step_post_hooks
    backward(model)
    optimizer.step()


def test_replacing_detaches_the_old_one() -> None:
    """A re-run cell: inject(..., on_existing="replace").follow(optimizer)."""
    model, drop, optimizer = setup()
    drop.follow(optimizer)
    again = inject(model, Dropout(0.3), layers="1", schedule=LinearSchedule(10), on_existing="replace")
    again.follow(optimizer)
    backward(model)
    optimizer.step()
    assert (again.step_count, len(optimizer._optimizer_step_post_hooks)) == (1, 1)


def test_an_optimizer_of_another_model_is_warned_of() -> None:
    model, drop, _ = setup()
    assert model is not None
    with pytest.warns(HookdropWarning, match="trains no parameter of this model"):
        drop.follow(torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1))


@pytest.mark.parametrize("thing", ["sgd", torch.optim.SGD, object()])
def test_something_else_than_an_optimizer(thing: object) -> None:
    _, drop, _ = setup()
    with pytest.raises(TypeError, match=r"expected a torch.optim.Optimizer(.|\n)*drop.seek\(global_step\)"):
        drop.follow(thing)


def test_learning_rate_schedulers_do_not_mind(model: Small, images: torch.Tensor) -> None:
    drop = inject(model, Dropout(0.5), layers="layer1.*", schedule=LinearSchedule(4))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=4)
    drop.follow(optimizer)
    for _ in range(4):
        model(images).sum().backward()
        optimizer.step()
        scheduler.step()
    assert drop.p == 0.5


def test_a_copied_model_has_a_count_of_its_own() -> None:
    import copy

    model, drop, optimizer = setup()
    drop.follow(optimizer)
    twin = copy.deepcopy(model)
    backward(model)
    optimizer.step()
    assert (drop.step_count, find(twin)[0].step_count) == (1, 0)
    find(twin)[0].step()
    assert find(twin)[0].step_count == 1


class TestResume:
    """The optimizer's state comes back from a checkpoint, the step count of the injection does not."""

    @staticmethod
    def resumed(optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW) -> tuple[nn.Module, Injection, Any]:
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        first = optimizer_class(model.parameters(), 1e-3)
        for _ in range(50):
            backward(model)
            first.step()
        drop = inject(model, Dropout(0.5), layers="1", schedule=LinearSchedule(100))
        optimizer = optimizer_class(model.parameters(), 1e-3)
        drop.follow(optimizer)
        optimizer.load_state_dict(first.state_dict())
        return model, drop, optimizer

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        backward(model)
        optimizer.step()

    def test_a_schedule_that_begins_anew_is_warned_about_once_with_the_number(self) -> None:
        model, drop, optimizer = self.resumed()
        with pytest.warns(HookdropWarning, match=r"has already taken 50 steps(.|\n)*drop.seek\(50\)"):
            self.step(model, optimizer)
        self.step(model, optimizer)
        assert drop.step_count == 2

    @pytest.mark.parametrize("restore", ["seek", "load_state_dict", "seek(0)"])
    def test_a_restored_or_chosen_step_is_fine(self, restore: str) -> None:
        model, drop, optimizer = self.resumed()
        if restore == "load_state_dict":
            drop.load_state_dict(drop.state_dict() | {"step_count": 50})
        else:
            drop.seek(50 if restore == "seek" else 0)
        self.step(model, optimizer)
        assert drop.step_count == (1 if restore == "seek(0)" else 51)

    def test_a_new_optimizer_and_one_that_does_not_count_are_fine(self) -> None:
        model, drop, optimizer = self.resumed(torch.optim.SGD)
        self.step(model, optimizer)
        drop.follow(None)
        again = torch.optim.AdamW(model.parameters(), 1e-3)
        drop.follow(again)
        self.step(model, again)
        assert drop.step_count == 2


class FastaiOptimizer:
    """As fastai's own: no torch optimizer, and it writes to `parameter.data`, which moves no version."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)

    def step(self) -> None:
        for parameter in self.parameters:
            parameter.data.mul_(0.999).add_(parameter.grad, alpha=-1e-6)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def test_a_schedule_that_is_not_advancing_is_noticed_under_any_optimizer() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    drop = inject(model, Dropout(0.5), layers="1", schedule=LinearSchedule(100))
    optimizer = FastaiOptimizer(model.parameters())

    def train(steps: int, accumulate: int = 1) -> None:
        for _ in range(steps):
            for _ in range(accumulate):
                backward(model)
            optimizer.step()
            optimizer.zero_grad()

    train(2, accumulate=200)
    train(UPDATES_TO_JUDGE - 4)
    with pytest.warns(HookdropWarning, match="its schedule is not advancing") as caught:
        train(60)
    assert len(caught) == 1
    (hook,) = drop._hooks
    assert hook.listeners == ()


def test_a_schedule_that_is_driven_by_hand_under_such_an_optimizer_is_fine() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    drop = inject(model, Dropout(0.5), layers="1", schedule=LinearSchedule(100))
    optimizer = FastaiOptimizer(model.parameters())
    for _ in range(3 * UPDATES_TO_JUDGE):
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
        drop.step()
    assert drop.check() == []


def test_what_is_no_torch_optimizer_is_named_in_full() -> None:
    _, drop, _ = setup()
    with pytest.raises(TypeError, match=r"expected a torch.optim.Optimizer, got tests.unit.hooks.test_optimizer.FastaiOptimizer.\n"):
        drop.follow(FastaiOptimizer([]))
    with pytest.raises(TypeError, match=r"got torch.optim.sgd.SGD \(the class\)"):
        drop.follow(torch.optim.SGD)


def test_through_fastais_wrapper() -> None:
    """`OptimWrapper` is no torch optimizer, and has one in `opt`."""

    class OptimWrapper(FastaiOptimizer):
        def __init__(self, opt: torch.optim.Optimizer) -> None:
            self.opt = opt

    model, drop, optimizer = setup()
    drop.follow(OptimWrapper(optimizer))
    backward(model)
    optimizer.step()
    assert drop.step_count == 1


def test_a_first_site_that_stays_in_eval_does_not_hide_a_schedule_that_is_not_advancing() -> None:
    """Frozen batch norm comes first in many models."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4).eval(), nn.ReLU())
    inject(model, Dropout(0.5), layers=["1", "2"], schedule=LinearSchedule(100))
    optimizer = FastaiOptimizer([model[0].weight])

    def train() -> None:
        for _ in range(2 * UPDATES_TO_JUDGE):
            model[0](torch.ones(2, 4)).sum().backward()
            model(torch.ones(2, 4))
            optimizer.step()
            optimizer.zero_grad()

    with pytest.warns(HookdropWarning) as caught:
        train()
    texts = [str(warning.message) for warning in caught]
    assert [text for text in texts if "its schedule is not advancing" in text]
    assert [text for text in texts if "'1' only ran in eval mode" in text]
