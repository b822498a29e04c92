"""`observe.edit_parameter_gradients` of compiled models."""

from __future__ import annotations

import torch

from hookdrop.observe import edit_parameter_gradients, scale
from tests.support.nets import Small
from tests.support.parameter_gradients import gradients


def test_compiled_model(model: Small, images: torch.Tensor) -> None:
    fast = torch.compile(model, backend="aot_eager")
    plain = gradients(fast, images)
    with edit_parameter_gradients(fast, "fc.bias", scale(2)):
        assert torch.equal(gradients(fast, images)["_orig_mod.fc.bias"], 2 * plain["_orig_mod.fc.bias"])
    assert torch.equal(gradients(fast, images)["_orig_mod.fc.bias"], plain["_orig_mod.fc.bias"])
