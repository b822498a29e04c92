"""Selecting layers of wrapped and compiled models."""

from __future__ import annotations

import torch
from torch import nn

from tests.support.names import names
from tests.support.nets import Small


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
