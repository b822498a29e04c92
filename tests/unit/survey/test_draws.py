"""`find_draws` names the lines of code whose random numbers change what a model returns."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookdrop.survey.draws import find_draws
from tests.support.models import toy

X = torch.rand(6, 8) + 1
SCRIPTED: Any = torch.jit.CompilationUnit("def add(x, scale: float):\n    return x + scale * torch.randn_like(x)\n").add
DRAWS: dict[str, Callable[..., Any]] = {
    "bernoulli": lambda m, x: x * torch.bernoulli(torch.full_like(x, 0.5)),
    "randperm": lambda m, x: x[torch.randperm(len(x))[:3]],
    "rarely": lambda m, x: x if torch.rand(1) < 0.1 else x + 1,
    "randn": lambda m, x: x[torch.randn(len(x)).argsort()[:3]],  # as timm and open_clip drop patches
    "scaled_dot_product_attention": lambda m, x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
    "two": lambda m, x: F.dropout(torch.rand_like(x) * x, 0.5),
    "Python": lambda m, x: x if random.random() < 0.5 else x * 2,
    "hidden code": lambda m, x: SCRIPTED(x, 0.5),
    "NumPy": lambda m, x: x * torch.from_numpy((np.random.rand(8) < 0.5).astype("float32")),
}
NOTHING: dict[str, Callable[..., Any]] = {
    "a draw that decides nothing": lambda m, x: x if torch.rand([]) < 0.0 else x + 1,
    "draws outside of PyTorch that decide nothing": lambda m, x: x + 0 * random.random() + 0 * np.random.rand(),
    "hidden code that adds nothing": lambda m, x: SCRIPTED(x, 0.0),
    "eval mode": lambda m, x: F.dropout(x, 0.5, m.training),
}


def differs(model: nn.Module) -> bool:
    """Two passes, without our code."""
    outputs = []
    for seed in range(20):
        torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)
        outputs.append(model(X))
    return not all(torch.equal(one, outputs[0]) for one in outputs)


@pytest.mark.parametrize("name", [*DRAWS, *NOTHING])
def test_line_and_module_of_each_draw_that_changes_the_output(name: str) -> None:
    forward = {**DRAWS, **NOTHING}[name]
    model = nn.Sequential(nn.Linear(8, 8), toy(forward)).eval()
    found = find_draws(model, X, ())
    assert bool(found) == (name in DRAWS) == differs(model)
    if name in ("Python", "NumPy", "hidden code"):
        return
    first, lines = forward.__code__.co_firstlineno, {line.number for line in found}
    assert all(first <= number <= first + 3 for number in lines)
    assert all(names == ["1"] for names in found.values())
    assert len(found) == (0 if name in NOTHING else 2 if name == "two" else 1)


def test_a_choice_between_equal_numbers_is_found_though_other_weights_would_decide_it() -> None:
    """As the experts that PhiMoE draws."""

    def choose(m: Any, x: torch.Tensor) -> torch.Tensor:
        scores = 1e6 * m.router(x)
        return x * (1 + (scores - torch.empty_like(scores).exponential_().log()).argmax(-1, keepdim=True))

    router = nn.Linear(8, 4)
    nn.init.zeros_(router.weight), nn.init.zeros_(router.bias)
    model = nn.Sequential(nn.Linear(8, 8), toy(choose, router=router))
    assert [line.function for line in find_draws(model, X, True)] == ["exponential"]


def test_draws_of_modules_are_named_at_the_line_that_calls_them() -> None:
    model = nn.Sequential(nn.Dropout(0.5), toy(lambda m, x: m.drop(x), drop=nn.Dropout(0.5)), nn.Dropout(0.0))
    found = find_draws(model, X, True)
    assert sorted(name for names in found.values() for name in names) == ["0", "1.drop"]


def test_random_states_and_the_model_are_as_before() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), toy(DRAWS["NumPy"]))
    states = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    before = {name: x.clone() for name, x in model.state_dict().items()}
    find_draws(model, X, True)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), str(np.random.get_state())) == states[1:]
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert model.training
