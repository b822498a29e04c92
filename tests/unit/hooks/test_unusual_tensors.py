"""What breaks hooks elsewhere, and has no file of its own: odd tensors, operations in place, layers that are not called."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from hookdrop import (
    DropBlock,
    Dropout,
    DropPath,
    GaussianNoise,
    ShapeError,
    inject,
)
from tests.support.every import DERIVING, EVERY, FORWARD, Case

ALL = pytest.mark.parametrize("case", EVERY.values(), ids=EVERY)


AT = pytest.mark.parametrize("at", ["output", "input"])


def hooked(regularizer: nn.Module) -> nn.Sequential:
    model = nn.Sequential(nn.Identity())
    inject(model, regularizer, layers="0")
    return model


# --- in place

ACTIVATIONS = [
    nn.ReLU(inplace=True),
    nn.SiLU(inplace=True),
    nn.Hardswish(inplace=True),
    nn.Sigmoid(),
    nn.Softmax(1),
    nn.Tanh(),
]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda module: type(module).__name__)
@AT
@pytest.mark.parametrize("case", DERIVING.values(), ids=DERIVING)
def test_before_and_after_activations_that_write_in_place_or_keep_their_output(
    case: Case, at: str, activation: nn.Module
) -> None:
    """`mul_` breaks the backward pass of what keeps its output; backward hooks break before what writes in place."""
    case = Case(case.regularizer, (2, *case.shape[1:]))
    model = nn.Sequential(nn.Softplus(), copy.deepcopy(activation), nn.Identity(), copy.deepcopy(activation))
    drop = inject(model, case.regularizer, layers="*", at=at)

    def run(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        return model(x)

    x = case.input(torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(run, x, fast_mode=True)
    with drop.measuring():
        run(x).sum().backward()


@pytest.mark.parametrize("case", FORWARD.values(), ids=FORWARD)
@AT
def test_nobody_elses_tensor_is_written_to(case: Case, at: str) -> None:
    """Neither the layer's own output, which it may keep, nor what the caller passes, by position or by name."""

    class Keeps(nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            self.kept = hidden
            return hidden

    class Owner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Keeps()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(hidden=x)

    model, x = Owner(), case.input()
    inject(model, case.regularizer, layers="inner", at=at)
    before = x.clone()
    assert not all(torch.equal(model(x), before) for _ in range(20))
    assert torch.equal(x, before)
    assert (model.inner.kept is x) == (at == "output")


# --- odd tensors


@ALL
@pytest.mark.parametrize("empty", [0, 1, -1])
def test_empty_tensors_stay_empty(case: Case, empty: int) -> None:
    """No samples, no channels, no width."""
    shape = list(case.shape)
    shape[empty] = 0
    x = torch.ones(shape, requires_grad=True)
    y = hooked(case.regularizer)(x)
    y.sum().backward()
    assert y.shape == x.grad.shape == x.shape


def expanded(x: torch.Tensor) -> torch.Tensor:
    return x[:1].expand_as(x)


def every_second(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x, x], -1)[..., 0]


def overlapping(x: torch.Tensor) -> torch.Tensor:
    return torch.randn(x.numel()).as_strided(x.shape, [2**axis for axis in range(x.dim())][::-1])


def one_number(x: torch.Tensor) -> torch.Tensor:
    return torch.ones(()).expand_as(x)


@ALL
@pytest.mark.parametrize("make", [expanded, every_second, overlapping, one_number])
def test_what_lies_oddly_in_memory_is_regularized_as_its_copy(
    case: Case, make: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    model, x = hooked(case.regularizer), make(case.input())
    results = []
    for t in (x.clone(memory_format=torch.contiguous_format), x):
        t = t.detach().requires_grad_()
        torch.manual_seed(0)
        y = model(t)
        results.append((y, torch.autograd.grad(y, t, torch.ones(x.shape))[0]))
    for plain, odd in zip(*results, strict=True):
        torch.testing.assert_close(odd, plain)


class Sub(torch.Tensor):
    """A subclass that does nothing."""


@ALL
def test_subclasses_keep_their_class(case: Case) -> None:
    x = case.input().as_subclass(Sub)
    y = hooked(case.regularizer)(x.requires_grad_())
    assert type(y) is Sub
    y.sum().backward()
    assert x.grad is not None


@ALL
def test_subclasses_that_wrap_tensors(case: Case) -> None:
    """As quantized or distributed ones do, without memory of their own."""
    y = hooked(case.regularizer)(TwoTensor(case.input(), case.input()))
    assert type(y) is TwoTensor
    assert y.shape == case.shape


@ALL
def test_a_parameter_as_output(case: Case) -> None:
    """As of a position embedding: what comes out is no parameter, and its gradient arrives."""

    class Embedding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(case.input())

        def forward(self) -> torch.Tensor:
            return self.weight

    model = nn.ModuleDict({"embedding": Embedding()})
    inject(model, case.regularizer, layers="embedding")
    y = model["embedding"]()
    assert type(y) is torch.Tensor
    y.sum().backward()
    assert model["embedding"].weight.grad is not None


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (torch.ones(2, 3, dtype=torch.complex64), r"got \(2, 3\) complex64: no floating-point tensor"),
        (torch.ones(2, 3, dtype=torch.bool), r"got \(2, 3\) bool: no floating-point tensor"),
        (torch.tensor(1.0), r"got \(\) float32: no floating-point tensor in it that is not 0-d"),
        (torch.ones(2, 3).to_sparse(), "pass x.to_dense"),
        (torch.ones(2, 3).to(torch.float8_e5m2), "pass x.to.torch.bfloat16."),
    ],
)
def test_outputs_that_can_not_be_regularized_are_told(value: torch.Tensor, says: str) -> None:
    with pytest.raises((ShapeError, TypeError), match=says) as error:
        hooked(Dropout(0.3))(value)
    assert "'0'" in str(error.value) + "".join(getattr(error.value, "__notes__", []))


@ALL
def test_without_gradients_nothing_is_asked_of_them(case: Case) -> None:
    y = hooked(case.regularizer)(case.input())
    assert not y.requires_grad
    with torch.no_grad():
        x = case.input().requires_grad_()
        y = hooked(case.regularizer)(x)
    assert y is x or not y.requires_grad


# --- outputs of several tensors


def test_multihead_attention_gives_a_pair() -> None:
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2, batch_first=True)})
    inject(model, Dropout(1.0), layers="attention")
    x = torch.randn(2, 5, 8)
    out, weights = model["attention"](x, x, x)
    assert not out.any()
    assert weights.any()
    assert model["attention"](x, x, x, need_weights=False)[1] is None


@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_networks_give_a_state_that_is_left_alone(cell: type[nn.RNNBase]) -> None:
    model = nn.ModuleDict({"cell": cell(4, 8, batch_first=True)})
    inject(model, Dropout(1.0), layers="cell")
    out, state = model["cell"](torch.randn(2, 5, 4))
    assert not out.any()
    assert all(part.any() for part in (state if cell is nn.LSTM else [state]))


# --- what a copy of PyTorch's own would get wrong


def test_noise_that_is_stacked_on_a_mask_does_not_fill_it() -> None:
    """Hooks run in the order in which they were placed."""
    model = nn.Sequential(nn.Identity())
    inject(model, GaussianNoise(0.1), layers="0")
    inject(model, DropBlock(0.5, 3), layers="0", on_existing="stack")
    assert (model(torch.ones(4, 8, 12, 12)) == 0).float().mean() == pytest.approx(0.5, abs=0.1)


def test_drop_path_of_a_branch_keeps_the_shortcut() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branch = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.branch(x)

    model, x = Residual(), torch.randn(4, 8)
    inject(model, DropPath(1.0), layers="branch")
    assert torch.equal(model(x), x)


def test_warnings_are_said_once_for_a_thousand_calls() -> None:
    """Whatever the filters are: a training's log is not for reading the same line."""
    model = hooked(DropBlock(0.3, 7))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(1000):
            model(torch.ones(1, 2, 5, 5))
    assert len(caught) == 1
