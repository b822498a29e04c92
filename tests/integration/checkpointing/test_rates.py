"""Features together: what each does alone, it does beside the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from hookdrop import Dropout, HookdropWarning, LinearSchedule, inject
from hookdrop.hooks import checkpointing as replay
from tests.support.together import net

Way = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def plain(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x)


def reentrant(model: nn.Module, x: torch.Tensor) -> Any:
    return checkpoint(model, x, use_reentrant=True)


def non_reentrant(model: nn.Module, x: torch.Tensor) -> Any:
    return checkpoint(model, x, use_reentrant=False)


WAYS = [reentrant, non_reentrant]


def gradient(scenario: Callable[[nn.Sequential, torch.Tensor, Way], torch.Tensor], way: Way) -> torch.Tensor:
    model = net()
    x = torch.linspace(-1, 1, 512).view(64, 8).requires_grad_()
    torch.manual_seed(1)
    scenario(model, x, way).backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("way", WAYS)
class TestOneRandomStateTwoRates:
    """Nothing is drawn while off or at rate 0, so that the next forward finds the same random state."""

    def test_a_clean_forward_before_a_noisy_one(self, way: Way) -> None:
        """Consistency training: both wait for one backward."""

        def scenario(model: nn.Sequential, x: torch.Tensor, way: Way) -> torch.Tensor:
            drop = inject(model, Dropout(0.5), layers=["0", "2"])
            with drop.disabled():
                clean = way(model, x)
            return (clean - way(model, x)).square().sum()

        torch.testing.assert_close(gradient(scenario, way), gradient(scenario, plain))

    def test_the_first_step_of_a_ramp_before_the_second(self, way: Way) -> None:
        def scenario(model: nn.Sequential, x: torch.Tensor, way: Way) -> torch.Tensor:
            drop = inject(model, Dropout(0.5), layers=["0", "2"], schedule=LinearSchedule(4))
            first = way(model, x)
            drop.step()
            return (first * way(model, x)).sum()

        torch.testing.assert_close(gradient(scenario, way), gradient(scenario, plain))

    def test_seeded_alike(self, way: Way) -> None:
        def scenario(model: nn.Sequential, x: torch.Tensor, way: Way) -> torch.Tensor:
            drop = inject(model, Dropout(0.5), layers=["0", "2"])
            torch.manual_seed(5)
            first = way(model, x)
            drop.target_p = 0.2
            torch.manual_seed(5)
            return (first * way(model, x)).sum()

        torch.testing.assert_close(gradient(scenario, way), gradient(scenario, plain))

    def test_a_teacher_without_gradients_from_the_same_random_state(self, way: Way) -> None:
        def scenario(model: nn.Sequential, x: torch.Tensor, way: Way) -> torch.Tensor:
            drop = inject(model, Dropout(0.5), layers=["0", "2"])
            with drop.disabled():
                student = way(model, x)
            with torch.random.fork_rng(), torch.no_grad():
                teacher = model(x)
            return (student - teacher).square().sum()

        torch.testing.assert_close(gradient(scenario, way), gradient(scenario, plain))


@pytest.mark.parametrize("way", WAYS)
def test_a_probe_between_forward_and_backward_changes_no_gradient(way: Way) -> None:
    def scenario(model: nn.Sequential, x: torch.Tensor, way: Way) -> torch.Tensor:
        drop = inject(model, Dropout(0.5), layers=["0", "2"], schedule=LinearSchedule(4))
        y = way(model, x)
        drop.probe(x.detach(), step=4)
        return y.square().sum()

    assert torch.equal(gradient(scenario, way), gradient(scenario, plain))


@pytest.mark.parametrize("way", WAYS)
def test_sampling_in_eval_whose_backward_comes_after_the_context(way: Way) -> None:
    def scenario(model: nn.Sequential, x: torch.Tensor, way: Way) -> torch.Tensor:
        drop = inject(model.eval(), Dropout(0.5), layers=["0", "2"])
        with drop.sampling():
            y = way(model, x)
        return y.square().sum()

    assert torch.equal(gradient(scenario, way), gradient(scenario, plain))


def test_injected_between_forward_and_backward_it_is_told() -> None:
    model, x = net(), torch.ones(4, 8, requires_grad=True)
    y = reentrant(model, x)
    inject(model, Dropout(0.5), layers="0")
    with pytest.warns(HookdropWarning, match="from a random state that no forward of it had"):
        y.sum().backward()


def test_replaced_between_forward_and_backward_it_is_told() -> None:
    model, x = net(), torch.ones(4, 8, requires_grad=True)
    inject(model, Dropout(0.5), layers="0")
    y = reentrant(model, x)
    inject(model, Dropout(0.2), layers="0", on_existing="replace")
    with pytest.warns(HookdropWarning, match="from a random state that no forward of it had"):
        y.sum().backward()


def test_a_checkpoints_random_state_is_that_of_the_tensors_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a backward pass the device in use is another one than in the forward. Without a GPU: who is asked, for what."""
    asked: list[Any] = []

    class Cuda:
        @staticmethod
        def get_rng_state(device: Any) -> torch.Tensor:
            asked.append(device)
            return torch.get_rng_state()

    with FakeTensorMode():
        x = torch.empty(2, device="cuda:1")
    monkeypatch.setattr(torch, "get_device_module", lambda device: Cuda)
    replay.random_state((x, None))
    replay.random_state(torch.ones(2))
    assert asked == [torch.device("cuda:1")]
