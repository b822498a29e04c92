"""Features together: what each does alone, it does beside the others."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from hookdrop import (
    Dropout,
    HookdropWarning,
    InjectionError,
    LinearSchedule,
    inject,
)
from hookdrop.diagnostics.training import UPDATES_TO_JUDGE
from tests.support.together import net
from tests.support.training import optimize, train


class TestSchedules:
    def test_a_schedule_never_driven_is_told_after_20_updates(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2))
        inject(model, Dropout(0.5), layers="0", schedule=LinearSchedule(10))
        optimize(model, UPDATES_TO_JUDGE)
        with pytest.warns(HookdropWarning) as caught:
            optimize(model, 2 * UPDATES_TO_JUDGE)
        assert len(caught) == 1
        assert str(caught[0].message) == (
            "'dropout' is still at step 0 of LinearSchedule(steps=10): its schedule is not advancing, because nothing calls step(), seek() or follow().\n"
            "  after inject: drop.follow(optimizer)   or after each optimizer.step(): drop.step()   "
            "or: drop.seek(global_step)"
        )

    def test_accumulated_gradients_and_recurrent_calls_are_not_taken_for_updates(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2))
        inject(model, Dropout(0.5), layers="0", schedule=LinearSchedule(10))
        train(model, torch.ones(2), 5000)

    @pytest.mark.parametrize("how", ["loaded", "copied", "another optimizer", "stopped following"])
    def test_a_schedule_that_is_not_driven_any_more_is_told_too(self, how: str) -> None:
        model = nn.Sequential(nn.Linear(2, 2))
        drop = inject(model, Dropout(0.5), layers="0", schedule=LinearSchedule(1000))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        drop.follow(optimizer)
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        if how == "loaded":
            state = drop.state_dict()
            drop.remove()
            drop = inject(model, Dropout(0.5), layers="0", schedule=LinearSchedule(1000))
            drop.load_state_dict(state)
        if how == "copied":
            model = copy.deepcopy(model)
        if how == "stopped following":
            drop.follow(None)
        with pytest.warns(HookdropWarning, match="is still at step 1 of LinearSchedule"):
            optimize(model, 2 * UPDATES_TO_JUDGE)

    def test_a_schedule_that_is_over_needs_nobody(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2))
        drop = inject(model, Dropout(0.5), layers="0", schedule=LinearSchedule(10))
        drop.seek(10)
        optimize(model, 3 * UPDATES_TO_JUDGE)

    def test_a_rebuilt_optimizer_is_reported_at_its_first_step(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2))
        drop = inject(model, Dropout(0.5), layers="0", schedule=LinearSchedule(1000))
        drop.follow(torch.optim.SGD(model.parameters(), 0.1))
        gc.collect()
        with pytest.warns(HookdropWarning, match="the optimizer that it followed is gone"):
            optimize(model, 1)

    def test_the_optimizer_of_a_schedule_that_is_over_may_go(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2))
        drop = inject(model, Dropout(0.5), layers="0", schedule=LinearSchedule(1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        drop.follow(optimizer)
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        del optimizer
        gc.collect()
        model(torch.ones(2))
        assert drop.check() == []

    @pytest.mark.parametrize("layer", ["a layer without weights", "a frozen layer"])
    @pytest.mark.parametrize("start", ["never driven", "loaded", "followed", "an optimizer that is gone"])
    def test_it_is_told_where_hooks_see_no_updates(self, layer: str, start: str) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        drop = inject(model, Dropout(0.5), layers="1" if "without" in layer else "0", schedule=LinearSchedule(1000))
        model[0].requires_grad_(layer != "a frozen layer")
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        if start == "loaded":
            drop.load_state_dict(drop.state_dict() | {"step_count": 7})
        if start == "followed":
            drop.follow(optimizer)
        if "gone" in start:
            drop.follow(torch.optim.SGD(model.parameters(), 0.1))
            gc.collect()

        def update(times: int) -> None:
            for _ in range(times):
                model(torch.ones(2, 2)).sum().backward()
                optimizer.step()

        if start == "followed":
            update(3 * UPDATES_TO_JUDGE)
            drop.follow(None)
        text = "the optimizer that it followed is gone" if "gone" in start else "its schedule is not advancing"
        with pytest.warns(HookdropWarning, match=text) as caught:
            update(2 * UPDATES_TO_JUDGE)
        assert len(caught) == 1
        assert any(text in problem for problem in drop.check())
        drop.seek(1000)
        assert drop.check() == []

    def test_a_schedule_that_is_stepped_rarely_is_driven(self) -> None:
        """As by epochs."""
        model = nn.Sequential(nn.ReLU(), nn.Linear(2, 2))
        drop = inject(model, Dropout(0.5), layers="0", schedule=LinearSchedule(100))
        for _ in range(5):
            optimize(model, UPDATES_TO_JUDGE)
            drop.step()
        assert drop.check() == []

    @pytest.mark.parametrize("ask", ["summary", "remove"])
    def test_a_schedule_never_driven_is_told_when_asked_once(self, ask: str) -> None:
        model = nn.Sequential(nn.Identity())
        drop = inject(model, Dropout(0.5), layers="0", schedule=LinearSchedule(10))
        train(model, torch.ones(2))
        assert len(drop.check()) == 1
        with pytest.warns(HookdropWarning, match="its schedule is not advancing"):
            getattr(drop, ask)()
        drop.remove()

    @pytest.mark.parametrize(
        "drive", [lambda d, o: d.step(), lambda d, o: d.seek(d.step_count + 1), lambda d, o: d.follow(o)]
    )
    def test_a_schedule_that_somebody_drives_is_fine(self, drive: Callable[..., Any]) -> None:
        model = nn.Sequential(nn.Linear(2, 2))
        drop = inject(model, Dropout(0.5), layers="0", schedule=LinearSchedule(10))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        drive(drop, optimizer)
        for _ in range(3 * UPDATES_TO_JUDGE):
            model(torch.ones(2)).sum().backward()
            optimizer.step()
            if drop._follower is None:
                drive(drop, optimizer)
        assert drop.check() == []
        drop.metrics()

    def test_step_while_following(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2))
        drop = inject(model, Dropout(0.5), layers="0", schedule=LinearSchedule(10))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        drop.follow(optimizer)
        with pytest.raises(InjectionError, match="this call would count them twice"):
            drop.step()


class TestHealthyTrainings:
    @pytest.fixture(autouse=True)
    def nothing_is_said(self) -> Iterator[None]:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield

    def test_an_activation_that_is_called_a_thousand_times_a_step(self) -> None:
        class Recurrent(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.fc, self.act = nn.Linear(4, 4), nn.Tanh()

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                for _ in range(1100):
                    x = self.act(self.fc(x))
                return x

        model = Recurrent()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        drop = inject(model, Dropout(0.01), layers="act", schedule=LinearSchedule(100)).follow(optimizer)
        for _ in range(2):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        assert drop.step_count == 2

    def test_a_teacher_in_eval_whose_output_is_detached(self) -> None:
        student = net()
        inject(student, Dropout(0.5), layers="0")
        teacher = copy.deepcopy(student).eval()
        optimizer = torch.optim.SGD(student.parameters(), 0.01)
        for _ in range(30):
            x = torch.ones(2, 8)
            (student(x) - teacher(x).detach()).square().sum().backward()
            optimizer.step()
            with torch.no_grad():
                for mine, theirs in zip(teacher.parameters(), student.parameters(), strict=True):
                    mine.lerp_(theirs, 0.01)


def test_no_optimizers_step_walks_the_models_that_are_alive() -> None:
    model = nn.Sequential(*[nn.Linear(2, 2).requires_grad_(False) for _ in range(20)], nn.Linear(2, 2))
    inject(model, Dropout(0.5), layers="0", schedule=LinearSchedule(1000))
    optimizer = torch.optim.SGD(model[20].parameters(), 0.1)
    walked = []

    def counting(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        walked.append(self)
        return modules(self, *args, **kwargs)

    model(torch.ones(2, 2)).sum().backward()
    optimizer.step()
    modules, nn.Module.modules = nn.Module.modules, counting  # type: ignore[method-assign]
    try:
        optimizer.step()
    finally:
        nn.Module.modules = modules  # type: ignore[method-assign]
    # Other tests' models may be alive, and be looked at for the first time.
    assert not any(part is own for part in walked for own in model.modules())


def test_an_average_that_is_hooked_for_later_is_not_taken_for_a_training() -> None:
    model, average = net(), net().eval()
    drop = inject(average, Dropout(0.5), layers="0")
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(30):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)
    with drop.sampling():
        average(torch.ones(2, 8))
