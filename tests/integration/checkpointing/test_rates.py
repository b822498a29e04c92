"""Checkpointed forwards at changing rates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from hookdrop import Dropout, HookdropWarning, Injection, LinearSchedule, inject
from hookdrop.hooks import checkpointing
from tests.support.checkpointing import MODES, Forward, plain, reentrant, run
from tests.support.models import mlp
from tests.support.regularizers import EVERY, REPRESENTATIVE, SITES, Case
from tests.support.tensors import all_equal

ALL_MODES = pytest.mark.parametrize("mode", MODES)
CHANGES: dict[str, Callable[[Injection], object]] = {
    "stepped": lambda drop: drop.step(3),
    "target changed": lambda drop: setattr(drop, "target_p", 0.1),
    "to zero": lambda drop: drop.seek(0),
    "disabled": lambda drop: setattr(drop, "enabled", False),
}


@ALL_MODES
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("case", REPRESENTATIVE.values(), ids=REPRESENTATIVE)
def test_recompute_uses_the_rate_of_the_forward(
    case: Case, change: Callable[[Injection], object], mode: Forward
) -> None:
    """`loss = model(x); drop.step(); loss.backward()`."""
    model, x = case.model(), case.input()
    drop = inject(model, case.regularizer, layers=SITES, schedule=LinearSchedule(4))
    drop.step()
    expected = run(model, x, plain)
    assert all_equal(run(model, x, mode, between=lambda: change(drop)), expected)


@ALL_MODES
def test_recompute_does_not_change_the_current_rate(mode: Forward) -> None:
    model, x = EVERY["Dropout"].model(), EVERY["Dropout"].input()
    drop = inject(model, Dropout(0.4), layers=SITES, schedule=LinearSchedule(4))
    drop.seek(1)
    run(model, x, mode, between=lambda: drop.seek(3))
    assert [site.p for site in drop.sites] == pytest.approx([0.3, 0.3])
    drop.seek(0)
    run(model, x, mode)
    assert torch.equal(model(x), model(x))


@ALL_MODES
def test_measuring_a_recompute_reports_the_rate_of_the_forward(mode: Forward) -> None:
    model, x = EVERY["Dropout"].model(), EVERY["Dropout"].input()
    drop = inject(model, Dropout(0.8), layers=["0"], schedule=LinearSchedule(4))
    drop.seek(1)
    out = mode(model, x.requires_grad_())
    drop.seek(4)
    with drop.recording(last=0) as m:
        out.sum().backward()
    assert [m.totals.asked, m.totals.dropped] == pytest.approx([0.2, 0.2], abs=0.05)


# --- several forwards, and what happens between them and the backward

Scenario = Callable[[nn.Sequential, Tensor, Forward], Tensor]
"""A function that returns the loss of forwards that a `Forward` runs."""


def dropped(model: nn.Module, **settings: Any) -> Injection:
    return inject(model, Dropout(0.5), layers=["0", "2"], **settings)


def one_module_twice_in_a_forward(model: nn.Sequential, x: Tensor, way: Forward) -> Tensor:
    dropped(model)
    return way(model, way(model, x)).square().sum()


def two_rates_before_one_backward(model: nn.Sequential, x: Tensor, way: Forward) -> Tensor:
    """Neither the current rate nor that of the last forward is correct for both."""
    drop, loss = dropped(model, schedule=LinearSchedule(4)), torch.zeros(())
    for step in (1, 3):
        drop.seek(step)
        loss = loss + way(model, x).square().sum()
    drop.seek(4)
    return loss


def the_first_two_steps_of_a_ramp(model: nn.Sequential, x: Tensor, way: Forward) -> Tensor:
    """A forward at rate 0 draws nothing, so the next one starts from the same RNG state."""
    drop = dropped(model, schedule=LinearSchedule(4))
    first = way(model, x)
    drop.step()
    return (first * way(model, x)).sum()


def a_clean_forward_before_a_noisy_one(model: nn.Sequential, x: Tensor, way: Forward) -> Tensor:
    """As in consistency training. A disabled forward draws nothing, either."""
    with dropped(model).disabled():
        clean = way(model, x)
    return (clean - way(model, x)).square().sum()


def equal_seeds_at_two_rates(model: nn.Sequential, x: Tensor, way: Forward) -> Tensor:
    drop = dropped(model)
    torch.manual_seed(5)
    first = way(model, x)
    drop.target_p = 0.2
    torch.manual_seed(5)
    return (first * way(model, x)).sum()


def a_teacher_from_the_same_rng_state(model: nn.Sequential, x: Tensor, way: Forward) -> Tensor:
    with dropped(model).disabled():
        student = way(model, x)
    with torch.random.fork_rng(), torch.no_grad():
        teacher = model(x)
    return (student - teacher).square().sum()


def a_probe_before_the_backward(model: nn.Sequential, x: Tensor, way: Forward) -> Tensor:
    drop = dropped(model, schedule=LinearSchedule(4))
    y = way(model, x)
    drop.probe(x.detach(), step=4)
    return y.square().sum()


def a_backward_after_the_sampling_context(model: nn.Sequential, x: Tensor, way: Forward) -> Tensor:
    with dropped(model.eval()).sampling():
        y = way(model, x)
    return y.square().sum()


SCENARIOS = [
    one_module_twice_in_a_forward,
    two_rates_before_one_backward,
    the_first_two_steps_of_a_ramp,
    a_clean_forward_before_a_noisy_one,
    equal_seeds_at_two_rates,
    a_teacher_from_the_same_rng_state,
    a_probe_before_the_backward,
    a_backward_after_the_sampling_context,
]


def gradient(scenario: Scenario, way: Forward) -> Tensor:
    model = mlp()
    x = torch.linspace(-1, 1, 512).view(64, 8).requires_grad_()
    torch.manual_seed(1)
    scenario(model, x, way).backward()
    assert x.grad is not None
    return x.grad


@ALL_MODES
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_gradients_of_several_forwards_equal_those_without_a_checkpoint(scenario: Scenario, mode: Forward) -> None:
    torch.testing.assert_close(gradient(scenario, mode), gradient(scenario, plain))


@pytest.mark.parametrize("replaced", [False, True])
def test_an_injection_between_forward_and_backward_warns(replaced: bool) -> None:
    model, x = mlp(), torch.ones(4, 8, requires_grad=True)
    if replaced:
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
        def get_rng_state(device: Any) -> Tensor:
            requested.append(device)
            return torch.get_rng_state()

    with FakeTensorMode():
        x = torch.empty(2, device="cuda:1")
    monkeypatch.setattr(torch, "get_device_module", lambda device: Cuda)
    checkpointing.rng_fingerprint((x, None))
    checkpointing.rng_fingerprint(torch.ones(2))
    assert requested == [torch.device("cuda:1")]
