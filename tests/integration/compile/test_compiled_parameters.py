"""Regularized parameters in compiled code: one graph for all rates, the right rate, and weights as they are in eval mode."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hookdrop import Dropout, InjectionError, LinearSchedule, Mixout, Regularizer, inject
from tests.support.compiling import graphs
from tests.support.models import toy

pytestmark = pytest.mark.filterwarnings("ignore:Skipping serialization:UserWarning")  # raised by PyTorch 2.6 itself


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
