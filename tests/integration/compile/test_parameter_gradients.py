"""`observe.edit_parameter_gradients`: patterns and compiled models."""

from __future__ import annotations

import re

import pytest
import torch

from hookdrop import LayerError
from hookdrop.observe import edit_parameter_gradients, scale, zero
from tests.support.nets import Small
from tests.support.parameter_gradients import gradients


@pytest.mark.parametrize(
    "params", ["layer1.**", re.compile(r"layer1\..*"), ["layer1.0.**", "layer1.1.**", "layer1.0.bn1.bias"]], ids=str
)
def test_globs_and_regular_expressions(model: Small, params: object) -> None:
    with edit_parameter_gradients(model, params, zero) as edit:
        assert sorted(edit.names) == sorted(n for n, _ in model.named_parameters() if n.startswith("layer1."))


class TestPatternErrors:
    @pytest.mark.parametrize(
        ("params", "said"),
        [
            ("fc.biass", "asked for:    'fc.biass'\n  did you mean: 'fc.bias'"),
            ("bn1.bias", "did you mean: '**.bn1.bias'"),
            ("fc", "did you mean: 'fc.\\*'"),
            ("layer1", "did you mean: 'layer1.**'"),
            ("bn1", "did you mean: '**.bn1.\\*'"),
            (re.compile("fc.baias"), r"asked for:    re.compile\('fc.baias'\)\n  did you mean: 'fc.bias'"),
            (["fc.bias", "nothing*"], "asked for:    'nothing\\*'\n  see all: "),
        ],
    )
    def test_unmatched_pattern_suggests_names(self, model: Small, params: object, said: str) -> None:
        with pytest.raises(LayerError, match=said.replace("**", r"\*\*")):
            edit_parameter_gradients(model, params, zero)
        assert not any(p._backward_hooks for p in model.parameters())


def test_a_compiled_model(model: Small, images: torch.Tensor) -> None:
    fast = torch.compile(model, backend="aot_eager")
    plain = gradients(fast, images)
    with edit_parameter_gradients(fast, "fc.bias", scale(2)):
        assert torch.equal(gradients(fast, images)["_orig_mod.fc.bias"], 2 * plain["_orig_mod.fc.bias"])
    assert torch.equal(gradients(fast, images)["_orig_mod.fc.bias"], plain["_orig_mod.fc.bias"])
