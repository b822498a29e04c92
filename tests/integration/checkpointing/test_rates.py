"""Checkpointed forwards at changing rates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from hookdrop import Dropout, HookdropWarning, Injection, LinearSchedule, inject
from hookdrop.hooks import checkpointing
from tests.support.checkpointing import MODES, Forward, plain, reentrant, run
from tests.support.models import mlp
from tests.support.regularizers import EVERY, REPRESENTATIVE, SITES, Case
from tests.support.tensors import all_equal


class TestRateChangedBetweenForwardAndBackward:
    """`loss = model(x); drop.step(); loss.backward()`: the recompute has the mask and rate of the forward."""

    CHANGES: dict[str, Callable[[Injection], object]] = {
        "stepped": lambda drop: drop.step(3),
        "target changed": lambda drop: setattr(drop, "target_p", 0.1),
        "to zero": lambda drop: drop.seek(0),
        "disabled": lambda drop: setattr(drop, "enabled", False),
    }

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
    @pytest.mark.parametrize("case", REPRESENTATIVE.values(), ids=REPRESENTATIVE)
    def test_recompute_uses_the_rate_of_the_forward(
        self, case: Case, change: Callable[[Injection], object], mode: Forward
    ) -> None:
        model, x = case.model(), case.input()
        drop = inject(model, case.regularizer, layers=SITES, schedule=LinearSchedule(4))
        drop.step()
        expected = run(model, x, plain)
        assert all_equal(run(model, x, mode, between=lambda: change(drop)), expected)

    @pytest.mark.parametrize("mode", MODES)
    def test_forward_at_rate_0(self, mode: Forward) -> None:
        """As at the first step of a ramp."""
        model, x = EVERY["Dropout"].model(), EVERY["Dropout"].input()
        drop = inject(model, Dropout(0.3), layers=SITES, schedule=LinearSchedule(4))
        model(x)
        expected = run(model, x, plain)
        assert all_equal(run(model, x, mode, between=drop.step), expected)
        assert drop.p == 0.075

    @pytest.mark.parametrize("mode", MODES)
    def test_context_entered_or_exited_before_backward(self, mode: Forward) -> None:
        model, x = EVERY["Dropout"].model(), EVERY["Dropout"].input()
        drop = inject(model, Dropout(0.3), layers=SITES)
        off, on = run(model.eval(), x, plain), run(model.train(), x, plain)

        def forward_in_disabled(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
            with drop.disabled():
                return mode(model, x)

        assert all_equal(run(model, x, forward_in_disabled), off)
        context = drop.disabled()
        assert all_equal(run(model, x, mode, between=context.__enter__), on)
        context.__exit__(None, None, None)
        assert all_equal(run(model, x, plain), on)

    @pytest.mark.parametrize("mode", MODES)
    def test_forwards_at_two_rates_before_one_backward(self, mode: Forward) -> None:
        """Neither the current rate nor that of the last forward is correct for both."""
        model = EVERY["Dropout"].model()
        drop = inject(model, Dropout(0.8), layers=SITES, schedule=LinearSchedule(4))

        def both(way: Forward) -> list[torch.Tensor]:
            torch.manual_seed(1)
            inputs, loss = [], torch.zeros(())
            for step in (1, 3):
                drop.seek(step)
                inputs.append(torch.randn(EVERY["Dropout"].shape).requires_grad_())
                loss = loss + way(model, inputs[-1]).square().sum()
            drop.seek(4)
            loss.backward()
            return [x.grad for x in inputs]

        assert all_equal(both(mode), both(plain))

    @pytest.mark.parametrize("mode", MODES)
    def test_recompute_does_not_change_the_current_rate(self, mode: Forward) -> None:
        model, x = EVERY["Dropout"].model(), EVERY["Dropout"].input()
        drop = inject(model, Dropout(0.4), layers=SITES, schedule=LinearSchedule(4))
        drop.seek(1)
        run(model, x, mode, between=lambda: drop.seek(3))
        assert [site.p for site in drop.sites] == pytest.approx([0.3, 0.3])
        drop.seek(0)
        run(model, x, mode)
        assert torch.equal(model(x), model(x))

    @pytest.mark.parametrize("mode", MODES)
    def test_measuring_a_recompute_reports_the_rate_of_the_forward(self, mode: Forward) -> None:
        model, x = EVERY["Dropout"].model(), EVERY["Dropout"].input()
        drop = inject(model, Dropout(0.8), layers=["0"], schedule=LinearSchedule(4))
        drop.seek(1)
        out = mode(model, x.requires_grad_())
        drop.seek(4)
        with drop.recording(last=0) as m:
            out.sum().backward()
        assert m.totals.asked == pytest.approx(0.2)
        assert m.totals.dropped == pytest.approx(0.2, abs=0.05)


def gradient(scenario: Callable[[nn.Sequential, torch.Tensor, Forward], torch.Tensor], way: Forward) -> torch.Tensor:
    model = mlp()
    x = torch.linspace(-1, 1, 512).view(64, 8).requires_grad_()
    torch.manual_seed(1)
    scenario(model, x, way).backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("way", MODES)
class TestOneRngStateTwoRates:
    """A disabled forward, or one at rate 0, draws nothing, so the next forward starts from the same RNG state."""

    def test_clean_forward_before_a_noisy_one(self, way: Forward) -> None:
        """As in consistency training, with one backward for both."""

        def scenario(model: nn.Sequential, x: torch.Tensor, way: Forward) -> torch.Tensor:
            drop = inject(model, Dropout(0.5), layers=["0", "2"])
            with drop.disabled():
                clean = way(model, x)
            return (clean - way(model, x)).square().sum()

        torch.testing.assert_close(gradient(scenario, way), gradient(scenario, plain))

    def test_forwards_at_the_first_two_steps_of_a_ramp(self, way: Forward) -> None:
        def scenario(model: nn.Sequential, x: torch.Tensor, way: Forward) -> torch.Tensor:
            drop = inject(model, Dropout(0.5), layers=["0", "2"], schedule=LinearSchedule(4))
            first = way(model, x)
            drop.step()
            return (first * way(model, x)).sum()

        torch.testing.assert_close(gradient(scenario, way), gradient(scenario, plain))

    def test_forwards_with_equal_seeds_at_two_rates(self, way: Forward) -> None:
        def scenario(model: nn.Sequential, x: torch.Tensor, way: Forward) -> torch.Tensor:
            drop = inject(model, Dropout(0.5), layers=["0", "2"])
            torch.manual_seed(5)
            first = way(model, x)
            drop.target_p = 0.2
            torch.manual_seed(5)
            return (first * way(model, x)).sum()

        torch.testing.assert_close(gradient(scenario, way), gradient(scenario, plain))

    def test_teacher_without_gradients_from_the_same_rng_state(self, way: Forward) -> None:
        def scenario(model: nn.Sequential, x: torch.Tensor, way: Forward) -> torch.Tensor:
            drop = inject(model, Dropout(0.5), layers=["0", "2"])
            with drop.disabled():
                student = way(model, x)
            with torch.random.fork_rng(), torch.no_grad():
                teacher = model(x)
            return (student - teacher).square().sum()

        torch.testing.assert_close(gradient(scenario, way), gradient(scenario, plain))


@pytest.mark.parametrize("way", MODES)
def test_probe_between_forward_and_backward_changes_no_gradient(way: Forward) -> None:
    def scenario(model: nn.Sequential, x: torch.Tensor, way: Forward) -> torch.Tensor:
        drop = inject(model, Dropout(0.5), layers=["0", "2"], schedule=LinearSchedule(4))
        y = way(model, x)
        drop.probe(x.detach(), step=4)
        return y.square().sum()

    assert torch.equal(gradient(scenario, way), gradient(scenario, plain))


@pytest.mark.parametrize("way", MODES)
def test_backward_after_the_sampling_context(way: Forward) -> None:
    def scenario(model: nn.Sequential, x: torch.Tensor, way: Forward) -> torch.Tensor:
        drop = inject(model.eval(), Dropout(0.5), layers=["0", "2"])
        with drop.sampling():
            y = way(model, x)
        return y.square().sum()

    assert torch.equal(gradient(scenario, way), gradient(scenario, plain))


def test_inject_between_forward_and_backward_warns() -> None:
    model, x = mlp(), torch.ones(4, 8, requires_grad=True)
    y = reentrant(model, x)
    inject(model, Dropout(0.5), layers="0")
    with pytest.warns(HookdropWarning, match="with an RNG state that none of its forwards had"):
        y.sum().backward()


def test_replace_between_forward_and_backward_warns() -> None:
    model, x = mlp(), torch.ones(4, 8, requires_grad=True)
    inject(model, Dropout(0.5), layers="0")
    y = reentrant(model, x)
    inject(model, Dropout(0.2), layers="0", on_existing="replace")
    with pytest.warns(HookdropWarning, match="with an RNG state that none of its forwards had"):
        y.sum().backward()


def test_rng_state_is_read_from_the_device_of_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The current device may differ between forward and backward. Uses a fake CUDA module."""
    requested: list[Any] = []

    class Cuda:
        @staticmethod
        def get_rng_state(device: Any) -> torch.Tensor:
            requested.append(device)
            return torch.get_rng_state()

    with FakeTensorMode():
        x = torch.empty(2, device="cuda:1")
    monkeypatch.setattr(torch, "get_device_module", lambda device: Cuda)
    checkpointing.rng_fingerprint((x, None))
    checkpointing.rng_fingerprint(torch.ones(2))
    assert requested == [torch.device("cuda:1")]
