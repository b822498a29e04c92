"""Activation checkpointing: a recompute draws the same masks as its forward, or warns."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointError,
    CheckpointPolicy,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from hookdrop import Dropout, HookdropWarning, Injection, LinearSchedule, inject
from hookdrop.hooks import checkpointing
from hookdrop.hooks.checkpointing import is_recomputing
from tests.support.checkpointing import MODES, Forward, non_reentrant, plain, reentrant, run
from tests.support.regularizers import EVERY, REPRESENTATIVE, SITES, Case
from tests.support.tensors import all_equal


def nested(way: Callable[..., torch.Tensor], model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    return way(lambda x: way(model[2:], way(model[:2], x)), x)


def save_tanh(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """A policy for selective checkpointing."""
    saved = operation is torch.ops.aten.tanh.default
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def selective(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return non_reentrant(model, x, context_fn=functools.partial(create_selective_checkpoint_contexts, save_tanh))


def offloaded(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        return model(x)


WAYS: dict[str, Forward] = {
    "reentrant": reentrant,
    "non-reentrant": non_reentrant,
    "nested reentrant": functools.partial(nested, reentrant),
    "nested non-reentrant": functools.partial(nested, non_reentrant),
    "sequential reentrant": lambda model, x: checkpoint_sequential(model, 2, x, use_reentrant=True),
    "sequential non-reentrant": lambda model, x: checkpoint_sequential(model, 2, x, use_reentrant=False),
    "selective": selective,
    "offloaded": offloaded,
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # nested reentrant checkpoints
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("case", REPRESENTATIVE.values(), ids=REPRESENTATIVE)
def test_gradients_are_bit_identical_with_and_without_checkpointing(case: Case, way: Forward) -> None:
    model, x = case.model(), case.input()
    clean = run(model, x, plain)
    for at in case.places:
        drop = inject(model, case.regularizer, layers=SITES, at=at)
        expected = run(model, x, plain)
        assert not all_equal(expected, clean)
        assert all_equal(run(model, x, way), expected)
        drop.remove()


class TestRngStateNotPreserved:
    """`preserve_rng_state=False`: the recompute has another mask and the gradients are wrong; PyTorch does not warn."""

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("name", ["DropBlock (sparse)", "LayerDrop"])
    def test_warns_once(self, name: str, mode: Forward) -> None:
        model, x = EVERY[name].model(), EVERY[name].input()
        inject(model, EVERY[name].regularizer, layers=SITES)

        def run_unpreserved() -> None:
            with suppress(CheckpointError):  # PyTorch detects a different number of blocks
                run(model, x, functools.partial(mode, preserve_rng_state=False))

        with pytest.warns(HookdropWarning, match="remove preserve_rng_state=False") as caught:
            run_unpreserved()
        assert len(caught) == 1
        run_unpreserved()

    @pytest.mark.parametrize("mode", MODES)
    def test_warns_for_the_last_layer(self, mode: Forward) -> None:
        """There, an exception stops the recompute as soon as the mask is saved."""
        model, x = nn.Sequential(nn.Linear(8, 8), nn.Identity()), torch.ones(4, 8)
        inject(model, Dropout(0.5), layers="1")
        with pytest.warns(HookdropWarning, match="remove preserve_rng_state=False"):
            run(model, x, functools.partial(mode, preserve_rng_state=False))

    @pytest.mark.parametrize("mode", MODES)
    def test_no_warning_if_nothing_is_drawn(self, mode: Forward) -> None:
        model, x = EVERY["Dropout"].model(), EVERY["Dropout"].input()
        drop = inject(model, Dropout(0.3), layers=SITES, schedule=LinearSchedule(4))
        inject(model, torch.tanh, layers=SITES, on_existing="stack", name="no random function")
        unpreserved = functools.partial(mode, preserve_rng_state=False)
        run(model, x, unpreserved)
        drop.seek(4)
        drop.enabled = False
        run(model, x, unpreserved)
        run(model.eval(), x, unpreserved)

    def test_number_of_remembered_forwards_is_bounded(self) -> None:
        """Forwards without gradients look like checkpointed ones, but may never be recomputed."""
        model = nn.Sequential(nn.Identity())
        inject(model, Dropout(0.3), layers="0")
        (hook,) = model[0]._forward_hooks.values()
        with pytest.MonkeyPatch.context() as patch, torch.no_grad():
            patch.setattr(checkpointing, "CAPACITY", 10)
            for _ in range(30):
                model(torch.ones(2))
        assert len(hook.state.live.checkpointed) == 10
        assert not hook.state.live.checkpointed.complete


class TestOtherThreads:
    """A recompute uses its own rate and does not affect forwards in other threads."""

    @staticmethod
    def recompute_while(during: Callable[[nn.Module, Injection], object]) -> tuple[list[Any], list[Any], Injection]:
        """Return the gradients of a step at rate 0.25, whose recompute runs at rate 0.5 with `during`, and the expected."""
        model, x = EVERY["Dropout"].model(), EVERY["Dropout"].input()
        drop = inject(model, Dropout(0.5), layers=SITES, schedule=LinearSchedule(4))
        drop.seek(2)
        expected = run(model, x, plain)

        def hold(module: nn.Module, args: Any, output: Any) -> None:
            if is_recomputing():
                thread = threading.Thread(target=during, args=(model, drop))
                thread.start()
                thread.join()

        handles = [module.register_forward_hook(hold, prepend=True) for module in model]
        found = run(model, x, non_reentrant, between=lambda: drop.seek(4))
        for handle in handles:
            handle.remove()
        return found, expected, drop

    def test_forward_in_another_thread_uses_the_current_rate(self) -> None:
        rates = []

        def forward(model: nn.Module, drop: Injection) -> None:
            state = torch.get_rng_state()
            with torch.no_grad(), drop.recording(last=0) as measured:
                model(EVERY["Dropout"].input())
            torch.set_rng_state(state)
            rates.append(measured.totals.asked)

        found, expected, _ = self.recompute_while(forward)
        assert all_equal(found, expected)
        assert rates
        assert rates == pytest.approx([0.5] * len(rates))

    def test_seek_in_another_thread_takes_effect_and_lasts(self) -> None:
        found, expected, drop = self.recompute_while(lambda model, drop: drop.seek(0))
        assert all_equal(found, expected)
        assert [drop.p, *(site.p for site in drop.sites)] == [0.0] * 3


class TestBeforePyTorch28:
    """PyTorch 2.6 and 2.7 do not report saved-tensors hooks, so checkpoints are recognized on the call stack."""

    @pytest.fixture(autouse=True)
    def without_saved_tensors_hooks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(checkpointing.internals, "saved_tensors_hooks", None)

    def test_ordinary_forwards_are_not_remembered(self) -> None:
        model, x = EVERY["Dropout"].model(), EVERY["Dropout"].input()
        drop = inject(model, Dropout(0.3), layers=SITES)
        run(model, x, plain)
        assert not drop._states[0].live.checkpointed

    @pytest.mark.parametrize("mode", MODES)
    def test_checkpointed_forwards_are_remembered(self, mode: Forward) -> None:
        model, x = EVERY["Dropout"].model(), EVERY["Dropout"].input()
        drop = inject(model, Dropout(0.3), layers=SITES, schedule=LinearSchedule(4))
        drop.step()
        expected = run(model, x, plain)
        assert all_equal(run(model, x, mode, between=drop.step), expected)

    @pytest.mark.parametrize("mode", MODES)
    def test_warns_if_the_rng_state_is_not_preserved(self, mode: Forward) -> None:
        model, x = EVERY["Dropout"].model(), EVERY["Dropout"].input()
        inject(model, Dropout(0.3), layers=SITES)
        with pytest.warns(HookdropWarning, match="remove preserve_rng_state=False"), suppress(CheckpointError):
            run(model, x, functools.partial(mode, preserve_rng_state=False))
