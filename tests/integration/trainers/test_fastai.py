"""`hookdrop.integrations.fastai.InjectionCallback`."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

pytest.importorskip("fastai")
import fastai.callback.schedule  # adds fit_one_cycle, fine_tune and lr_find to Learner
from fastai.callback.core import Callback, CancelFitException, CancelStepException
from fastai.callback.tracker import SaveModelCallback
from fastai.callback.training import GradientAccumulation
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner, load_learner

from hookdrop import InjectionSpec, find, seed_per_rank
from hookdrop.integrations.fastai import InjectionCallback

# fastai loads optimizer states with numpy.core, and removes the folder of a failed search only when it is collected.
pytestmark = pytest.mark.filterwarnings("ignore:numpy.core", "ignore:.*TemporaryDirectory")

HEAD = InjectionSpec("Dropout(p=0.4)", layers="1", schedule="LinearSchedule(steps=1.0)")
INPUT = InjectionSpec("GaussianNoise(std=0.1)", layers="0", schedule="LinearSchedule(steps=4)", at="input")


class Data(TensorDataset):
    def new_empty(self) -> Data:
        return Data(*(tensor[:0] for tensor in self.tensors))


class Rates(Callback):
    """The rates that the batches train with; `fails_at` is a batch."""

    run_valid = False

    def __init__(self, fails_at: int | None = None, error: type[Exception] = FloatingPointError) -> None:
        self.rates: list[float | None] = []
        self.fails_at, self.error = fails_at, error

    def after_pred(self) -> None:
        if len(self.rates) == self.fails_at:
            raise self.error("the loss is nan")
        self.rates.append(find(self.model)["dropout"].p if find(self.model) else None)


class SeedSteps(Callback):
    """Make the masks of a batch independent of the batches before it, as a resumed run has not drawn those."""

    order = 70

    def before_batch(self) -> None:
        torch.manual_seed(self.epoch * self.n_iter + self.iter)


@pytest.fixture
def learn(tmp_path: Path) -> Iterator[Learner]:
    learn = learner(tmp_path)
    with learn.no_bar(), learn.no_logging():
        yield learn


def learner(folder: Path) -> Learner:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    data = Data(torch.randn(24, 8), torch.arange(24) % 3)
    loaders = DataLoaders(DataLoader(data, bs=4), DataLoader(data, bs=4))
    return Learner(loaders, model, loss_func=nn.CrossEntropyLoss(), path=folder)


def ramp(first: int, last: int, total: int = 0) -> Any:
    return pytest.approx([0.4 * step / (total or last) for step in range(first, last)])


class TestSteps:
    @pytest.mark.parametrize(("samples", "batches"), [(1, 1), (8, 2), (7, 2), (16, 4)])
    def test_fractions_cover_the_fit_of_accumulated_batches(self, samples: int, batches: int, learn: Learner) -> None:
        """Accumulation continues across epochs: 6 batches are one and a half steps of 4 batches."""
        rates, accumulation = Rates(), [GradientAccumulation(samples)] if batches > 1 else []
        learn.fit(2, cbs=[InjectionCallback(HEAD), *accumulation, rates])
        assert rates.rates == pytest.approx([0.4 * (batch // batches) * batches / 12 for batch in range(12)])

    def test_canceled_steps_do_not_count(self, learn: Learner) -> None:
        """As MixedPrecision cancels a step whose gradients overflow."""

        def cancel(self: Any) -> None:
            if self.iter % 2:
                raise CancelStepException

        learn.fit(2, cbs=[InjectionCallback(HEAD), rates := Rates(), Callback(before_step=cancel)])
        assert rates.rates[::2] == ramp(0, 6, total=12)

    def test_a_callback_works_in_every_fit_with_its_own_schedule_and_removes_its_hooks(self, learn: Learner) -> None:
        learn.add_cbs([callback := InjectionCallback(HEAD), rates := Rates()])
        learn.fine_tune(2)  # two fits
        assert not find(learn.model)
        learn.remove_cb(callback)
        learn.fit(1)
        assert rates.rates[:6] == ramp(0, 6)
        assert rates.rates[6:18] == ramp(0, 12)
        assert set(rates.rates[18:]) == {None}


class TestLearningRateFinder:
    def test_it_leaves_no_trace(self, learn: Learner) -> None:
        """Nothing is dropped, nothing is counted."""
        learn.add_cb(InjectionCallback(HEAD))
        before = copy.deepcopy(learn.model.state_dict())
        learn.lr_find(num_it=10, show_plot=False, suggest_funcs=None)
        torch.testing.assert_close(learn.model.state_dict(), before, rtol=0, atol=0)
        learn.add_cb(rates := Rates())
        learn.lr_find(num_it=10, show_plot=False, suggest_funcs=None)
        assert set(rates.rates) == {None}
        rates.rates.clear()
        learn.fit(1)
        assert rates.rates == ramp(0, 6)

    def test_a_failed_one_leaves_no_trace(self, learn: Learner) -> None:
        learn.add_cb(InjectionCallback(HEAD))
        with pytest.raises(FloatingPointError):
            learn.fit(1, cbs=[fastai.callback.schedule.LRFinder(), Rates(fails_at=2)])
        learn.fit(1, cbs=(rates := Rates()))
        assert rates.rates == ramp(0, 6)


class TestResume:
    def test_a_resumed_run_ends_bit_equal(self, learn: Learner, tmp_path: Path) -> None:
        saving = SaveModelCallback(every_epoch=True, with_opt=True)
        learn.fit_one_cycle(3, cbs=[InjectionCallback(HEAD, INPUT), SeedSteps(), saving])
        for epoch in (1, 2):
            resumed = learner(tmp_path).load(f"model_{epoch - 1}")
            with resumed.no_bar(), resumed.no_logging():
                callbacks = [InjectionCallback(HEAD, INPUT), SeedSteps(), rates := Rates()]
                resumed.fit_one_cycle(3, cbs=callbacks, start_epoch=epoch)
            assert rates.rates == ramp(6 * epoch, 18)
            torch.testing.assert_close(resumed.model.state_dict(), learn.model.state_dict(), rtol=0, atol=0)

    def test_an_exported_learner_loads(self, learn: Learner, tmp_path: Path) -> None:
        learn.add_cb(InjectionCallback(HEAD))
        learn.fit(1)
        learn.export("learner.pkl")
        with pytest.warns(UserWarning, match="insecure pickle"):
            loaded = load_learner(tmp_path / "learner.pkl")
        x = torch.randn(4, 8)
        assert torch.equal(loaded.model.eval()(x), learn.model.eval()(x))
        assert not find(loaded.model)


def test_the_recorder_keeps_the_rates_unless_disabled(learn: Learner) -> None:
    for log in (True, False):
        learn.fit_one_cycle(1, cbs=InjectionCallback(HEAD, log=log))
        assert learn.recorder.hps.get("hookdrop/dropout/p", []) == (ramp(0, 6) if log else [])


def test_each_rank_gets_its_own_seed(learn: Learner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Distributing data with fastai requires CUDA, so this test has the environment of a rank, and no other rank."""
    learn.remove_cbs([type(learn.recorder)])  # it communicates
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        for each, seed in ((True, seed_per_rank(3, rank=rank)), (False, 3)):
            torch.manual_seed(3)
            learn.fit(1, cbs=InjectionCallback(HEAD, seed_per_rank=each))
            assert torch.initial_seed() == seed


class TestErrors:
    @pytest.mark.parametrize(
        ("error", "batch"), [(FloatingPointError, 0), (KeyboardInterrupt, 8), (CancelFitException, 8)]
    )
    def test_a_fit_that_does_not_finish_leaves_no_hooks(self, error: Any, batch: int, learn: Learner) -> None:
        """Nor warnings about sites that did not run, and schedules that did not advance."""
        with nullcontext() if error is CancelFitException else pytest.raises(error):
            learn.fit(2, cbs=[InjectionCallback(HEAD), Rates(fails_at=batch, error=error)])
        assert not find(learn.model)
        assert "_with_events" not in vars(learn)

    def test_a_canceled_epoch_keeps_the_hooks(self, learn: Learner) -> None:
        def cancel(self: Any) -> None:
            if self.epoch == 0 and self.iter == 3:
                raise fastai.learner.CancelEpochException

        learn.fit(2, cbs=[InjectionCallback(HEAD), rates := Rates(), Callback(after_batch=cancel)])
        assert rates.rates == ramp(0, 10, total=12)
