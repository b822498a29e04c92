"""DropKey in compiled code: in one graph, and where a graph breaks inside the attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import _len_torch_function_stack

from hookdrop import DropKey, InjectionError, LinearSchedule, inject
from hookdrop.functional import drop_key
from tests.support.compiling import graphs

P = 0.4
resuming = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
"""Raised by the compiler where it resumes after a graph break."""


class Attention(nn.Module):
    def __init__(self, how: Callable[..., Tensor]) -> None:
        super().__init__()
        self.into, self.how = nn.Linear(16, 48), how

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.into(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return self.how(q, k, v).transpose(1, 2).flatten(2)


class Weights(nn.Module):
    """`nn.MultiheadAttention`, which computes attention in one function."""

    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.inner, self.need_weights = nn.MultiheadAttention(16, 2, batch_first=True), need_weights

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=self.need_weights)[0]


def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / 8**0.5).softmax(-1) @ v


def breaking(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    y = F.scaled_dot_product_attention(q, k, v)
    torch._dynamo.graph_break()
    return y


SDPA = F.scaled_dot_product_attention
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "sdpa": lambda: Attention(SDPA),
    "causal": lambda: Attention(partial(SDPA, is_causal=True)),
    "softmax": lambda: Attention(written_out),
    "nn.MultiheadAttention": lambda: Weights(False),
    "nn.MultiheadAttention with weights": lambda: Weights(True),
}


def hooked(layer: nn.Module, **settings: Any) -> tuple[nn.Sequential, Any]:
    model = nn.Sequential(layer, nn.Tanh())
    return model, inject(model, DropKey(P), layers="0", **settings)


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


@resuming
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_scores_are_regularized_once_if_the_graph_breaks_inside_the_layer(backend: str) -> None:
    model, _ = hooked(Attention(breaking))
    fast = torch.compile(model, backend=backend)
    for _ in range(2):
        torch.testing.assert_close(step(fast, model), step(model, model))
    assert _len_torch_function_stack() == 0


@resuming
def test_a_compiled_function_inside_an_uncompiled_layer() -> None:
    model, _ = hooked(Attention(torch.compile(written_out, backend="eager")))
    twin, _ = hooked(Attention(written_out))
    twin.load_state_dict(model.state_dict())
    torch.testing.assert_close(step(model, model), step(twin, twin))


@resuming
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_nothing_is_left_after_an_error(error: type[BaseException]) -> None:
    fails = [True]

    def failing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        if fails[0]:
            raise error
        return F.scaled_dot_product_attention(q, k, v)

    model, _ = hooked(Attention(failing))
    fast = torch.compile(model, backend="eager")
    with pytest.raises(error):
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


def test_inductor_drops_the_rate_and_keeps_causality() -> None:
    def seen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Values of one-hot positions, so that the output is the weights."""
        return F.scaled_dot_product_attention(q, k, torch.eye(32).expand(2, 2, 32, 32), is_causal=True)

    layer = Attention(seen)
    model = nn.Sequential(layer)
    inject(model, DropKey(P), layers="0")
    fast = torch.compile(model, fullgraph=True)
    weights = fast(torch.randn(2, 32, 16)).unflatten(-1, (2, 32)).transpose(1, 2)
    allowed = torch.ones(32, 32).tril() == 1
    assert not weights[..., ~allowed].any()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 32))
    scores = torch.zeros(400, 32, 32).masked_fill(~allowed, float("-inf"))
    expected = drop_key(scores, P)[:, allowed].isneginf().double().mean().item()
    dropped = (weights[..., allowed] == 0).double()
    assert abs(dropped.mean().item() - expected) < 6.0 * (P * (1 - P) / dropped.numel()) ** 0.5
