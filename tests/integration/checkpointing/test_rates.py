"""Checkpointed forwards at changing rates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from hookdrop import Dropout, HookdropWarning, LinearSchedule, inject
from hookdrop.hooks import checkpointing
from tests.support.checkpoints import MODES, plain, reentrant
from tests.support.together import net

Way = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def gradient(scenario: Callable[[nn.Sequential, torch.Tensor, Way], torch.Tensor], way: Way) -> torch.Tensor:
    model = net()
    x = torch.linspace(-1, 1, 512).view(64, 8).requires_grad_()
    torch.manual_seed(1)
    scenario(model, x, way).backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("way", MODES)
class TestOneRngStateTwoRates:
    """A disabled forward, or one at rate 0, draws nothing, so the next forward starts from the same RNG state."""

    def test_clean_forward_before_a_noisy_one(self, way: Way) -> None:
        """As in consistency training, with one backward for both."""

        def scenario(model: nn.Sequential, x: torch.Tensor, way: Way) -> torch.Tensor:
            drop = inject(model, Dropout(0.5), layers=["0", "2"])
            with drop.disabled():
                clean = way(model, x)
            return (clean - way(model, x)).square().sum()

        torch.testing.assert_close(gradient(scenario, way), gradient(scenario, plain))

    def test_forwards_at_the_first_two_steps_of_a_ramp(self, way: Way) -> None:
        def scenario(model: nn.Sequential, x: torch.Tensor, way: Way) -> torch.Tensor:
            drop = inject(model, Dropout(0.5), layers=["0", "2"], schedule=LinearSchedule(4))
            first = way(model, x)
            drop.step()
            return (first * way(model, x)).sum()

        torch.testing.assert_close(gradient(scenario, way), gradient(scenario, plain))

    def test_forwards_with_equal_seeds_at_two_rates(self, way: Way) -> None:
        def scenario(model: nn.Sequential, x: torch.Tensor, way: Way) -> torch.Tensor:
            drop = inject(model, Dropout(0.5), layers=["0", "2"])
            torch.manual_seed(5)
            first = way(model, x)
            drop.target_p = 0.2
            torch.manual_seed(5)
            return (first * way(model, x)).sum()

        torch.testing.assert_close(gradient(scenario, way), gradient(scenario, plain))

    def test_teacher_without_gradients_from_the_same_rng_state(self, way: Way) -> None:
        def scenario(model: nn.Sequential, x: torch.Tensor, way: Way) -> torch.Tensor:
            drop = inject(model, Dropout(0.5), layers=["0", "2"])
            with drop.disabled():
                student = way(model, x)
            with torch.random.fork_rng(), torch.no_grad():
                teacher = model(x)
            return (student - teacher).square().sum()

        torch.testing.assert_close(gradient(scenario, way), gradient(scenario, plain))


@pytest.mark.parametrize("way", MODES)
def test_probe_between_forward_and_backward_changes_no_gradient(way: Way) -> None:
    def scenario(model: nn.Sequential, x: torch.Tensor, way: Way) -> torch.Tensor:
        drop = inject(model, Dropout(0.5), layers=["0", "2"], schedule=LinearSchedule(4))
        y = way(model, x)
        drop.probe(x.detach(), step=4)
        return y.square().sum()

    assert torch.equal(gradient(scenario, way), gradient(scenario, plain))


@pytest.mark.parametrize("way", MODES)
def test_backward_after_the_sampling_context(way: Way) -> None:
    def scenario(model: nn.Sequential, x: torch.Tensor, way: Way) -> torch.Tensor:
        drop = inject(model.eval(), Dropout(0.5), layers=["0", "2"])
        with drop.sampling():
            y = way(model, x)
        return y.square().sum()

    assert torch.equal(gradient(scenario, way), gradient(scenario, plain))


def test_inject_between_forward_and_backward_warns() -> None:
    model, x = net(), torch.ones(4, 8, requires_grad=True)
    y = reentrant(model, x)
    inject(model, Dropout(0.5), layers="0")
    with pytest.warns(HookdropWarning, match="with an RNG state that none of its forwards had"):
        y.sum().backward()


def test_replace_between_forward_and_backward_warns() -> None:
    model, x = net(), torch.ones(4, 8, requires_grad=True)
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
