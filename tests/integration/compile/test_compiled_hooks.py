"""Attention scores, regularized parameters and loss terms in compiled code, and Grad-CAM of compiled models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import _len_torch_function_stack
from torch.utils.checkpoint import checkpoint

from hookdrop import (
    ActivationPenalty,
    DropKey,
    Dropout,
    Injection,
    InjectionError,
    LinearSchedule,
    Mixout,
    Regularizer,
    inject,
)
from hookdrop.observe import grad_cam
from tests.support.compiling import graphs
from tests.support.models import Small, toy

# Warnings of PyTorch itself: if a graph takes a tensor with a history or resumes after a break; the other is of 2.6.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf", "ignore:Skipping serialization:UserWarning"
)


# --- attention scores


def attention(how: Callable[..., Tensor]) -> nn.Module:
    def forward(self: Any, x: Tensor) -> Tensor:
        q, k, v = self.into(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return how(q, k, v).transpose(1, 2).flatten(2)

    return toy(forward, into=nn.Linear(16, 48))


def multihead(**settings: bool) -> nn.Module:
    """`nn.MultiheadAttention`, which computes attention in one function."""
    inner = nn.MultiheadAttention(16, 2, batch_first=True)
    return toy(lambda self, x: self.inner(x, x, x, **settings)[0], inner=inner)


def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / 8**0.5).softmax(-1) @ v


def breaking(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    y = F.scaled_dot_product_attention(q, k, v)
    torch._dynamo.graph_break()
    return y


SDPA = F.scaled_dot_product_attention
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "causal sdpa": lambda: attention(partial(SDPA, is_causal=True)),
    "softmax": lambda: attention(written_out),
    "nn.MultiheadAttention": lambda: multihead(need_weights=False),
    "nn.MultiheadAttention with weights": lambda: multihead(need_weights=True),
}


def hooked(layer: nn.Module, **settings: Any) -> tuple[nn.Sequential, Any]:
    model = nn.Sequential(layer, nn.Tanh())
    return model, inject(model, DropKey(0.4), layers="0", **settings)


def step(call: Callable[[Tensor], Tensor], model: nn.Module) -> list[Tensor]:
    torch.manual_seed(3)
    y = call(torch.randn(2, 7, 16))
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [*model.parameters()])]


@pytest.mark.parametrize("kind", LAYERS)
def test_one_graph_has_the_masks_and_gradients_of_eager_code_at_all_rates(kind: str) -> None:
    model, drop = hooked(LAYERS[kind](), schedule=LinearSchedule(4))
    fast = torch.compile(model, backend="aot_eager", fullgraph=True)
    for at in (1, 4):
        drop.seek(at)
        torch.testing.assert_close(step(fast, model), step(model, model))
    assert graphs() == 1
    model.eval()
    torch.testing.assert_close(step(fast, model), step(model, model))
    drop.remove()
    torch.testing.assert_close(step(fast, model), step(model, model))
    assert _len_torch_function_stack() == 0


def test_scores_are_regularized_once_if_the_graph_breaks_inside_the_layer() -> None:
    model, _ = hooked(attention(breaking))
    fast = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        torch.testing.assert_close(step(fast, model), step(model, model))
    assert _len_torch_function_stack() == 0


def test_a_compiled_function_inside_an_uncompiled_layer() -> None:
    model, _ = hooked(attention(torch.compile(written_out, backend="eager")))
    twin, _ = hooked(attention(written_out))
    twin.load_state_dict(model.state_dict())
    torch.testing.assert_close(step(model, model), step(twin, twin))


def test_nothing_is_left_after_an_error() -> None:
    fails = [True]

    def failing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        if fails[0]:
            raise KeyboardInterrupt
        return F.scaled_dot_product_attention(q, k, v)

    model, _ = hooked(attention(failing))
    fast = torch.compile(model, backend="eager")
    with pytest.raises(KeyboardInterrupt):
        fast(torch.randn(2, 7, 16))
    assert (torch.zeros(50, 50).softmax(-1) > 0).all()
    fails[0] = False
    fast(torch.randn(2, 7, 16))
    assert _len_torch_function_stack() == 0


def test_a_layer_without_scores_is_an_error() -> None:
    model, _ = hooked(nn.Linear(16, 16))
    with pytest.raises(InjectionError, match="computed no scores"):
        torch.compile(model, backend="eager")(torch.randn(2, 7, 16))
    with pytest.raises(Exception, match="computed no scores"):
        torch.compile(model, backend="eager", fullgraph=True)(torch.randn(2, 7, 16))


# --- regularized parameters


@pytest.mark.parametrize(
    ("regularizer", "backend"),
    [(Mixout(p=0.5), "inductor"), (Dropout(p=0.5), "aot_eager")],
)
def test_compiled_layers_use_regularized_weights(regularizer: Regularizer, backend: str) -> None:
    """A dropped element of a weight has no gradient; its share is right within 4 standard errors."""
    model = nn.Sequential(nn.Linear(100, 100), nn.Tanh(), nn.Linear(100, 100))
    plain, x = copy.deepcopy(model), torch.randn(8, 100)
    drop = inject(model, regularizer, layers=nn.Linear, at="parameters", schedule=LinearSchedule(10))
    fast = torch.compile(model, backend=backend, fullgraph=True)
    for step in (4, 10):
        drop.seek(step)
        model.zero_grad()
        fast(x).square().sum().backward()
        for layer in (model[0], model[2]):
            assert (layer.weight.grad == 0).float().mean() == pytest.approx(0.05 * step, abs=0.02)
            assert "weight" not in vars(layer)
    assert graphs() == 1
    model.eval()
    torch.testing.assert_close(fast(x), torch.compile(plain, backend=backend)(x), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")  # at every hook on an LSTM
def test_an_lstm_runs_uncompiled() -> None:
    """Dynamo breaks the graph at recurrent layers; the rest is compiled."""
    model = nn.Sequential(nn.LSTM(8, 50))
    inject(model, Dropout(p=0.5), layers="0", at="parameters", tensor="weight_hh_*")
    fast = torch.compile(model, backend="aot_eager")
    fast(torch.randn(5, 3, 8))[0].sum().backward()
    assert (model[0].weight_hh_l0.grad == 0).float().mean() == pytest.approx(0.5, abs=0.02)
    assert (model[0].weight_ih_l0.grad == 0).float().mean() < 0.01


@pytest.mark.parametrize("compiled", [lambda model: model, lambda model: lambda x: model(x)], ids=["model", "function"])
def test_a_forward_that_is_compiled_alone_raises(compiled: Callable[[nn.Module], Any]) -> None:
    """PyTorch runs the hooks of the outermost module outside of the graph, which would use the parameter as it is."""
    model = toy(lambda net, x: x @ net.weight, weight=nn.Parameter(torch.ones(50, 50)))
    drop = inject(model, Dropout(p=0.5), layers=model, at="parameters", schedule=LinearSchedule(1))
    fast = torch.compile(compiled(model), backend="eager", fullgraph=True)
    if compiled(model) is model:
        with pytest.raises(InjectionError):
            fast(torch.eye(50))
    else:
        for step in (0, 1):
            drop.seek(step)
            assert (fast(torch.eye(50)) == 0).float().mean() == pytest.approx(0.5 * step, abs=0.05)


# --- loss terms

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


# --- Grad-CAM


def test_grad_cam_of_compiled_and_data_parallel_models(model: Small, images: torch.Tensor) -> None:
    pytest.importorskip("pytorch_grad_cam")
    expected = grad_cam(model.eval(), images, "layer2")
    fast = torch.compile(model, backend="eager")
    fast(images)
    assert torch.equal(grad_cam(fast, images, "layer2"), expected)
    assert torch.equal(grad_cam(nn.DataParallel(model), images, "layer2"), expected)
