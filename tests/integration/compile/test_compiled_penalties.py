"""Loss terms of compiled models."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hookdrop import ActivationPenalty, Injection, LinearSchedule, inject
from tests.support.compiling import graphs
from tests.support.models import toy

# PyTorch emits and hides this warning if a graph takes a tensor with a history.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

X = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))


def penalized(**settings: object) -> tuple[nn.Sequential, Injection]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(inplace=True))
    return model, inject(model, ActivationPenalty(), layers=["0", "2"], **settings)


def gradients(model: nn.Module, loss: Callable[[], Tensor]) -> list[Tensor]:
    model.zero_grad()
    loss().backward()
    return [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_graph_serves_all_rates_and_a_second_one_the_accumulation(backend: str) -> None:
    model, drop = penalized(schedule=LinearSchedule(steps=3))
    fast = torch.compile(model, backend=backend, fullgraph=True)

    def loss(one: Callable[[Tensor], Tensor], forwards: int) -> Tensor:
        return sum((one(X * k).square().mean() for k in range(1, forwards + 1)), torch.zeros(())) + drop.penalty()

    for step in (1, 2, 3):
        drop.seek(step)
        expected = gradients(model, lambda: loss(model, 1))
        torch.testing.assert_close(gradients(model, lambda: loss(fast, 1)), expected)
        assert graphs() == 1
    for forwards in (2, 3, 1):
        expected = gradients(model, lambda n=forwards: loss(model, n))
        torch.testing.assert_close(gradients(model, lambda n=forwards: loss(fast, n)), expected)
        assert graphs() == 2


def test_eval_mode_disabled_no_grad_and_rate_0_collect_nothing() -> None:
    model, drop = penalized()
    fast = torch.compile(model, backend="aot_eager", fullgraph=True)
    with drop.disabled():
        fast(X)
    with torch.no_grad():
        fast(X)
    model.eval()
    fast(X)
    model.train()
    drop.target_p = 0.0
    fast(X)
    assert drop.penalty() == 0


def checkpointed(part: nn.Module) -> nn.Module:
    return toy(lambda self, x: checkpoint(self.part, x, use_reentrant=False), part=part)


def test_a_checkpoint_inside_of_compiled_code_counts_once() -> None:
    """By default, PyTorch runs a checkpoint with side effects outside of the graph; a setting allows them."""
    part, drop = penalized()
    model = checkpointed(part)
    expected = gradients(model, lambda: model(X).square().mean() + drop.penalty())
    broken = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(gradients(model, lambda: broken(X).square().mean() + drop.penalty()), expected)
    with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True):
        whole = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(gradients(model, lambda: whole(X).square().mean() + drop.penalty()), expected)
    assert drop.penalty() == 0


def test_a_compiled_checkpoint_whole_graph_names_the_setting() -> None:
    part, _ = penalized()
    model = torch.compile(checkpointed(part), backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="skip_fwd_side_effects_in_bwd_under_checkpoint = True"):
        model(X)


def test_the_penalty_is_read_outside_of_the_compiled_function() -> None:
    model, drop = penalized()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(x: Tensor) -> Tensor:
        return model(x).square().mean() + drop.penalty()

    with pytest.raises(Exception, match=r"penalty\(\) cannot run inside a trace"):
        step(X)
