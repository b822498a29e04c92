"""Penalties: the formula of `ActivationPenalty`, its shapes and settings, and penalties of users."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from hookdrop import ActivationPenalty, Dropout, HookdropWarning, LayerError, Penalty, Rate, ShapeError, inject, plan
from hookdrop.functional import activation_penalty
from hookdrop.testing import check_regularizer
from tests.support.models import toy


def by_hand(h: Tensor, alpha: float, beta: float, time_dim: int = 1) -> Tensor:
    """As in main.py of awd-lstm-lm, where time is axis 0."""
    h = h.transpose(0, time_dim)
    return alpha * h.pow(2).mean() + beta * (h[1:] - h[:-1]).pow(2).mean()


# --- the formula


@pytest.mark.parametrize("time_dim", [0, 1, -2])
@pytest.mark.parametrize(("l2", "slowness"), [(2.0, 1.0), (0.0, 3.0), (0.5, 0.0)])
def test_value_and_gradient_equal_the_formula_of_the_authors(l2: float, slowness: float, time_dim: int) -> None:
    x = torch.randn(5, 7, 3, dtype=torch.float64, requires_grad=True)
    found, expected = activation_penalty(x, l2, slowness, time_dim), by_hand(x, l2, slowness, time_dim)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(term, x)[0] for term in (found, expected)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    """The squares overflow float16, and their sum has no digits left in bfloat16."""
    x = (torch.randn(4, 500, 8) + 300.0).to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        term = activation_penalty(x)
    assert term.dtype == torch.float32
    torch.testing.assert_close(term, by_hand(x.float(), 2.0, 1.0))
    assert torch.autograd.grad(term, x)[0].dtype == dtype


@pytest.mark.parametrize(("shape", "term"), [((0, 5, 3), 0), ((4, 0, 3), 0), ((4, 1, 3), 2)])
def test_few_elements_and_a_single_time_step_without_slowness(shape: tuple[int, ...], term: int) -> None:
    assert activation_penalty(torch.ones(shape)) == term


def test_in_place_layers_after_the_site_change_neither_the_value_nor_the_gradient() -> None:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True)), torch.randn(4, 6, 3)
    expected = torch.autograd.grad(by_hand(model[0](x), 2.0, 1.0), model[0].weight)[0]
    drop = inject(model, ActivationPenalty(), layers="0")
    model(x)
    torch.testing.assert_close(torch.autograd.grad(drop.penalty(), model[0].weight)[0], expected)


# --- settings and shapes


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("batch_first", [False, True])
def test_the_batch_of_a_recurrent_layer_is_not_taken_for_time(kind: type[nn.RNNBase], batch_first: bool) -> None:
    """fastai#1460 had the batch as the time axis."""
    model = nn.Sequential(kind(4, 4, batch_first=batch_first))
    right, wrong = int(batch_first), 1 - int(batch_first)
    with pytest.raises(LayerError, match=rf"batch_first={batch_first}(.|\n)*write time_dim={right}"):
        inject(model, ActivationPenalty(time_dim=wrong), layers="0")
    inject(model, ActivationPenalty(time_dim=wrong, slowness=0), layers="0").remove()
    drop = inject(model, ActivationPenalty(time_dim=right - 3), layers="0")
    output, _ = model(torch.randn(5, 7, 4))
    torch.testing.assert_close(drop.penalty(), by_hand(output, 2.0, 1.0, right))


def test_the_first_tensor_of_an_lstm_or_the_chosen_one_is_penalized() -> None:
    x = torch.randn(2, 5, 3)
    for tensor, factor in ((None, 1), ("extra", 9), ("all", 1 + 4 + 9)):
        model = nn.Sequential(toy(lambda m, x: {"hidden": (x, 2 * x), "extra": 3 * x}))
        drop = inject(model, ActivationPenalty(), layers="0", tensor=tensor)
        model(x)
        torch.testing.assert_close(drop.penalty(), factor * by_hand(x, 2.0, 1.0))


def test_axes_that_are_probably_not_time_warn() -> None:
    model, image = nn.Sequential(nn.Identity()), torch.zeros(2, 3, 8, 8)
    assert "as T=3; for a map use ActivationPenalty(slowness=0)" in "".join(
        plan(model, ActivationPenalty(), layers="0", example_input=image).warnings
    )
    inject(model, ActivationPenalty(time_dim=-1), layers="0")
    with pytest.warns(HookdropWarning, match="reads the last axis of"):
        model(image[0])


def test_packed_sequences_have_a_mean_of_squares_but_no_next_step() -> None:
    model, packed = nn.Sequential(nn.LSTM(4, 4)), pack_padded_sequence(torch.randn(5, 2, 4), [5, 3])
    drop = inject(model, ActivationPenalty(time_dim=0), layers="0")
    with pytest.raises(ShapeError, match=r"PackedSequence(.|\n)*slowness=0"):
        model(packed)
    drop.remove()
    with inject(model, Dropout(0.5, shared=(1,)), layers="0"), pytest.raises(ShapeError):
        model(packed)
    drop = inject(model, ActivationPenalty(slowness=0), layers="0")
    output, _ = model(packed)
    torch.testing.assert_close(drop.penalty(), 2 * output.data.pow(2).mean())


# --- penalties of users


class Sparsity(Penalty):
    rate = Rate("l1", high=1e6, kind="factor")

    def __init__(self, l1: float = 0.01) -> None:
        super().__init__()
        self.l1 = l1

    def penalize(self, x: Tensor, rate: Any) -> Tensor:
        return rate * x.abs().mean()


def test_a_penalty_of_a_user_passes_the_checks() -> None:
    check_regularizer(Sparsity(), expected_failures={"compiled_code_equals_eager_code": "in tests/integration/compile"})


class Returning(Sparsity):
    def __init__(self, term: Any = None) -> None:
        super().__init__()
        self.term = term

    def penalize(self, x: Tensor, rate: Any) -> Tensor:
        return self.term


class Undefined(Penalty):
    rate = None


@pytest.mark.parametrize(
    ("penalty", "error", "says"),
    [
        (
            Returning(torch.ones(3)),
            ShapeError,
            r"at '0': penalize returned a tensor of shape \(3,\), but a loss term is a 0-d",
        ),
        (Returning(None), ShapeError, "at '0': penalize returned NoneType, but a loss term is a 0-d tensor"),
        (Undefined(), NotImplementedError, r"Undefined must define penalize\(self, x, rate\)"),
    ],
)
def test_a_term_that_is_not_a_scalar_raises(penalty: Penalty, error: type[Exception], says: str) -> None:
    model = nn.Sequential(nn.Identity())
    inject(model, penalty, layers="0")
    with pytest.raises(error, match=says):
        model(torch.ones(2))
