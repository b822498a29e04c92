"""Selecting layers: regular expressions, wrappers, and suggestions for unknown names."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from hookdrop import Dropout, LayerError, plan
from tests.support.names import names
from tests.support.nets import Small


def test_expressions_must_match_the_whole_name(model: Small) -> None:
    assert names(model, re.compile(r"layer\d\.0\.bn\d")) == [
        "layer1.0.bn1", "layer1.0.bn2", "layer2.0.bn1", "layer2.0.bn2",
    ]  # fmt: skip
    with pytest.raises(LayerError, match=re.escape("re.compile('layer')")):
        names(model, re.compile("layer"))


# --- wrappers, by their type


def test_wrappers_are_unwrapped(model: Small) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.optim.swa_utils import AveragedModel

    model.layer1[0] = checkpoint_wrapper(model.layer1[0])
    for wrapped in (model, nn.DataParallel(model), torch.compile(model), AveragedModel(model)):
        assert names(wrapped, "layer1.*") == ["layer1.0", "layer1.1"]
        assert names(wrapped, "layer1.0.bn1") == ["layer1.0.bn1"]
        assert names(wrapped, "layer1.0._checkpoint_wrapped_module.bn1") == ["layer1.0.bn1"]
    assert names(nn.DataParallel(model), "module.layer1.*.bn1") == ["layer1.0.bn1", "layer1.1.bn1"]
    assert names(torch.compile(model), "_orig_mod.layer1.*") == ["layer1.0", "layer1.1"]


@pytest.mark.parametrize(
    ("entry", "hint"),
    [
        ("layer5", "did you mean: 'layer2', 'layer1'"),
        ("layer1.0.bn3", "did you mean: 'layer1.0.bn2', 'layer1.0.bn1'"),
        ("BatchNorm2d", "the class BatchNorm2d itself, not its name as a string (8 modules)"),
        (r"layer\d\.0", r"a regular expression? write re.compile('layer\\d\\.0')"),
        ("Layer1", "did you mean: 'layer1'"),
        ("convv2", "'**.conv2'"),
    ],
)
def test_unknown_names_get_suggestions(model: Small, entry: str, hint: str) -> None:
    with pytest.raises(LayerError, match=re.escape(hint)):
        names(model, entry)


def test_counts_of_each_entry(model: Small) -> None:
    drafted = plan(model, Dropout(0.1), layers=["layer1.*", nn.Linear, re.compile("conv1")])
    assert drafted.counts == {"'layer1.*'": 2, "Linear": 1, "re.compile('conv1')": 1}
