"""Automatic warnings during training, and no false alarms."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hookdrop import Dropout, HookdropWarning, LinearSchedule, inject
from hookdrop.guards.progress import UPDATES_BEFORE_WARNING
from tests.support.models import mlp, toy
from tests.support.training import optimize, sgd, train


class TestSchedules:
    def test_schedule_that_is_not_advancing_warns_after_20_updates(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2))
        inject(model, Dropout(0.5), layers="0", schedule=LinearSchedule(10))
        optimize(model, UPDATES_BEFORE_WARNING)
        with pytest.warns(HookdropWarning) as caught:
            optimize(model, 2 * UPDATES_BEFORE_WARNING)
        assert len(caught) == 1
        assert "is still at step 0 of LinearSchedule(steps=10)" in str(caught[0].message)

    def test_gradient_accumulation_and_recurrent_calls_do_not_count_as_updates(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2))
        inject(model, Dropout(0.5), layers="0", schedule=LinearSchedule(10))
        train(model, torch.ones(2), 1000)

    @pytest.mark.parametrize("how", ["loaded", "copied", "another optimizer", "stopped following"])
    def test_schedule_that_stops_advancing_warns(self, how: str) -> None:
        model = nn.Sequential(nn.Linear(2, 2))
        drop = inject(model, Dropout(0.5), layers="0", schedule=LinearSchedule(1000))
        optimizer = sgd(model)
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
            optimize(model, 2 * UPDATES_BEFORE_WARNING)

    def test_finished_schedule_does_not_warn(self) -> None:
        """Also if the followed optimizer is deleted."""
        model = nn.Sequential(nn.Linear(2, 2))
        drop = inject(model, Dropout(0.5), layers="0", schedule=LinearSchedule(1))
        drop.follow(optimizer := sgd(model))
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        del optimizer
        gc.collect()
        optimize(model, 3 * UPDATES_BEFORE_WARNING)
        assert drop.check() == []

    @pytest.mark.parametrize("layer", ["without weights", "frozen"])
    @pytest.mark.parametrize("start", ["never stepped", "loaded", "no longer followed", "deleted optimizer"])
    def test_schedule_that_is_not_advancing_warns_if_the_hooked_layer_is_not_updated(
        self, layer: str, start: str
    ) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        place = "1" if layer == "without weights" else "0"
        drop = inject(model, Dropout(0.5), layers=place, schedule=LinearSchedule(1000))
        model[0].requires_grad_(layer != "frozen")
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        if start == "loaded":
            drop.load_state_dict(drop.state_dict() | {"step_count": 7})
        if start == "no longer followed":
            drop.follow(optimizer)
        if start == "deleted optimizer":
            drop.follow(sgd(model))
            gc.collect()

        def update(times: int) -> None:
            for _ in range(times):
                model(torch.ones(2, 2)).sum().backward()
                optimizer.step()

        if start == "no longer followed":
            update(3 * UPDATES_BEFORE_WARNING)
            drop.follow(None)
        gone = start == "deleted optimizer"
        text = "the optimizer that it followed no longer exists" if gone else "its schedule is not advancing"
        with pytest.warns(HookdropWarning, match=text) as caught:
            update(2 * UPDATES_BEFORE_WARNING)
        assert len(caught) == 1
        assert any(text in problem for problem in drop.check())
        drop.seek(1000)
        assert drop.check() == []

    def test_schedule_that_is_stepped_once_per_epoch_warns_at_the_second_step(self) -> None:
        model = nn.Sequential(nn.ReLU(), nn.Linear(2, 2))
        drop = inject(model, Dropout(0.5), layers="0", schedule=LinearSchedule(100))
        for _ in range(2):
            optimize(model, UPDATES_BEFORE_WARNING)
            drop.step()
        with pytest.warns(HookdropWarning, match="advanced 2 times during 41 updates.*not epochs") as caught:
            optimize(model, 2 * UPDATES_BEFORE_WARNING)
        assert len(caught) == 1

    @pytest.mark.parametrize("drive", [lambda drop: drop.step(20), lambda drop: drop.seek(drop.step_count + 20)])
    def test_schedule_that_catches_up_after_each_epoch_does_not_warn(self, drive: Callable[[Any], None]) -> None:
        model = nn.Sequential(nn.ReLU(), nn.Linear(2, 2))
        drop = inject(model, Dropout(0.5), layers="0", schedule=LinearSchedule(100))
        for _ in range(4):
            optimize(model, UPDATES_BEFORE_WARNING)
            drive(drop)
        assert drop.check() == []

    def test_schedule_in_epochs_warns_at_100_times_its_end(self) -> None:
        model = nn.Sequential(nn.ReLU(), nn.Linear(2, 2))
        drop = inject(model, Dropout(0.5), layers="0", schedule=LinearSchedule(3))
        optimizer = sgd(model)
        drop.follow(optimizer)
        model(torch.ones(2)).sum().backward()
        for _ in range(299):
            optimizer.step()
        with pytest.warns(HookdropWarning, match=r"LinearSchedule\(steps=3\) ended long ago.*step 300"):
            optimizer.step()
        for _ in range(100):
            optimizer.step()

    def test_schedule_that_advances_at_every_batch_warns(self) -> None:
        """With accumulated gradients, it would end early. Two steps for one update are no coincidence after 20."""
        model = nn.Sequential(nn.Linear(2, 2))
        drop = inject(model, Dropout(0.5), layers="0", schedule=LinearSchedule(1000))
        optimizer = sgd(model)

        def train_on_batches(count: int) -> None:
            for batch in range(count):
                model(torch.ones(2)).sum().backward()
                drop.step()
                if batch % 2:
                    optimizer.step()

        with pytest.warns(HookdropWarning, match="advanced 40 times during 20 updates") as caught:
            train_on_batches(100)
        assert len(caught) == 1

    def test_lost_hooks_are_reported_instead_of_the_schedule(self) -> None:
        """A followed optimizer no longer counts steps once all hooks are gone."""
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        drop = inject(model, Dropout(0.5), layers="1", schedule=LinearSchedule(1000))
        optimizer = sgd(model)
        drop.follow(optimizer)
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        model[1] = nn.Linear(2, 2)
        with pytest.warns(HookdropWarning) as caught:
            optimize(model, 3 * UPDATES_BEFORE_WARNING)
        assert [str(w.message).partition(":")[2][:29] for w in caught] == [" 1 of 1 sites lost their hook"]
        assert len(drop.check()) == 1

    @pytest.mark.parametrize(
        "drive", [lambda d, o: d.step(), lambda d, o: d.seek(d.step_count + 1), lambda d, o: d.follow(o)]
    )
    def test_stepped_or_followed_schedule_does_not_warn(self, drive: Callable[..., Any]) -> None:
        model = nn.Sequential(nn.Linear(2, 2))
        drop = inject(model, Dropout(0.5), layers="0", schedule=LinearSchedule(10))
        optimizer = sgd(model)
        drive(drop, optimizer)
        for _ in range(3 * UPDATES_BEFORE_WARNING):
            model(torch.ones(2)).sum().backward()
            optimizer.step()
            if not drop._states[0].followed:
                drive(drop, optimizer)
        assert drop.check() == []
        drop.metrics()

    def test_rebuilt_optimizer_warns_at_its_first_step(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2))
        drop = inject(model, Dropout(0.5), layers="0", schedule=LinearSchedule(1000))
        drop.follow(sgd(model))
        gc.collect()
        with pytest.warns(HookdropWarning, match="the optimizer that it followed no longer exists"):
            optimize(model, 1)


class TestHealthyTrainings:
    def test_activation_called_1100_times_per_forward(self) -> None:
        def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
            for _ in range(1100):
                x = m.act(m.fc(x))
            return x

        model = toy(forward, fc=nn.Linear(4, 4), act=nn.Tanh())
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        drop = inject(model, Dropout(0.01), layers="act", schedule=LinearSchedule(100)).follow(optimizer)
        for _ in range(2):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        assert drop.step_count == 2


def test_eval_mode_warning_names_all_sites() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)).eval()
    model[1].train()
    inject(model, Dropout(0.1), layers="*")
    with pytest.warns(HookdropWarning, match="'dropout': '0', '2' only ran in eval mode"):
        optimize(model, 2 * UPDATES_BEFORE_WARNING)


@pytest.mark.parametrize("hooked", ["model", "average"])
def test_hooked_weight_average_does_not_warn(hooked: str) -> None:
    """Nor does a hooked student whose copy is its teacher, in eval mode."""
    model = mlp()
    drop = inject(model, Dropout(0.5), layers="0") if hooked == "model" else None
    average = copy.deepcopy(model).eval()
    drop = drop or inject(average, Dropout(0.5), layers="0")
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(30):
        target = average(torch.ones(2, 8)).detach() if hooked == "model" else 0.0
        (model(torch.ones(2, 8)) - target).square().sum().backward()
        optimizer.step()
        with torch.no_grad():
            for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)
    if hooked == "average":
        with drop.sampling():
            average(torch.ones(2, 8))
