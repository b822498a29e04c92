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
from tests.support.compiling import graphs
from tests.support.models import toy

resuming = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
"""Raised by the compiler where it resumes after a graph break."""


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


@resuming
def test_scores_are_regularized_once_if_the_graph_breaks_inside_the_layer() -> None:
    model, _ = hooked(attention(breaking))
    fast = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        torch.testing.assert_close(step(fast, model), step(model, model))
    assert _len_torch_function_stack() == 0


@resuming
def test_a_compiled_function_inside_an_uncompiled_layer() -> None:
    model, _ = hooked(attention(torch.compile(written_out, backend="eager")))
    twin, _ = hooked(attention(written_out))
    twin.load_state_dict(model.state_dict())
    torch.testing.assert_close(step(model, model), step(twin, twin))


@resuming
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
