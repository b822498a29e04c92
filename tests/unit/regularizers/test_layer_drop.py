"""LayerDrop: its rate, its gradients, the outputs of layers, and what it refuses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from hookdrop import InjectionError, LayerDrop, LayerError, ShapeError, inject
from hookdrop.functional import layer_drop


class Layer(nn.Module):
    """A layer that returns several values, or a dataclass."""

    def __init__(self, wrap: Any = lambda y: y) -> None:
        super().__init__()
        self.linear, self.wrap = nn.Linear(4, 4), wrap

    def forward(self, hidden: torch.Tensor, scale: Any = None, past_key_values: Any = None) -> Any:
        return self.wrap(self.linear(hidden))


@dataclass
class Output:
    hidden: torch.Tensor
    weights: torch.Tensor


def test_returns_the_input_with_probability_p_for_the_whole_batch() -> None:
    """Within 4 standard errors over 4,000 draws; no value in between."""
    x, fx = torch.randn(3, 4), torch.randn(3, 4)
    skipped = [torch.equal(layer_drop(fx, x, 0.3), x) for _ in range(4000)]
    kept = [torch.equal(layer_drop(fx, x, 0.3), fx) for _ in range(200)]
    assert abs(sum(skipped) / 4000 - 0.3) < 4 * math.sqrt(0.3 * 0.7 / 4000)
    assert 0 < sum(kept) < 200


@pytest.mark.parametrize(
    ("wrap", "first"),
    [
        (lambda y: (y, y + 1), lambda out: out[0]),
        (lambda y: [y, None], lambda out: out[0]),
        (lambda y: {"hidden": y, "weights": y + 1}, lambda out: out["hidden"]),
        (lambda y: Output(y, y + 1), lambda out: out.hidden),
    ],
    ids=["tuple", "list", "dict", "dataclass"],
)
def test_replaces_the_first_tensor_of_an_output(wrap: Any, first: Any) -> None:
    model, x = nn.Sequential(Layer(wrap)), torch.randn(2, 4)
    inject(model, LayerDrop(0.5), layers="0")
    clean = model[0].linear(x)
    outputs = [model(x) for _ in range(30)]
    assert all(torch.equal(first(out), x) or torch.equal(first(out), clean) for out in outputs)
    assert len({torch.equal(first(out), x) for out in outputs}) == 2
    assert {type(out) for out in outputs} == {type(wrap(x))}


def test_the_input_may_be_a_keyword_argument() -> None:
    model, x = nn.ModuleList([Layer()]), torch.randn(2, 4)
    inject(model, LayerDrop(0.5), layers="0")
    assert {torch.equal(model[0](scale=torch.ones(2, 4), hidden=x), x) for _ in range(30)} == {True, False}


def test_gradients_of_a_skipped_layer_are_zero_not_missing() -> None:
    model, x = nn.Sequential(Layer()), torch.randn(2, 4, requires_grad=True)
    drop = inject(model, LayerDrop(0.5), layers="0")
    drop.target_p = 0.999
    torch.manual_seed(0)
    model(x).backward(g := torch.randn(2, 4))
    assert torch.equal(x.grad, g)
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in model.parameters())


def test_a_layer_that_changes_the_shape_raises() -> None:
    model = nn.Sequential(nn.Linear(4, 6))
    inject(model, LayerDrop(0.5), layers="0")
    with pytest.raises(ShapeError, match=r"LayerDrop at '0' got an output \(2, 6\) of an input \(2, 4\)"):
        model(torch.randn(2, 4))


def test_a_residual_branch_is_refused() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.mlp(x)

    model = nn.Sequential(Residual(), Residual())
    with pytest.raises(LayerError, match=r"'0.mlp': this is a residual branch(.|\n)*DropPath"):
        inject(model, LayerDrop(0.5), layers="*.mlp", example_input=torch.ones(2, 4))
    inject(model, LayerDrop(0.5), layers="*", example_input=torch.ones(2, 4))


def test_the_input_of_a_layer_is_refused() -> None:
    with pytest.raises(InjectionError, match=r"acts on the output of a layer, got at='input'"):
        inject(nn.Sequential(Layer()), LayerDrop(0.5), layers="0", at="input")


def test_without_an_input_it_tells_how_to_call_it() -> None:
    with pytest.raises(InjectionError, match=r"LayerDrop\(p=...\)\(layer\(x\), layer_input=x\)"):
        LayerDrop(0.5)(torch.ones(2))
