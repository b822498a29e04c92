"""`observe.grad_cam` and `compare_cam`: the maps are the papers', and nothing is left behind."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hookdrop.observe import grad_cam
from tests.support.nets import Small

pytest.importorskip("pytorch_grad_cam")


class TestNothingIsLeft:
    def test_a_compiled_and_a_wrapped_model(self, model: Small, images: torch.Tensor) -> None:
        expected = grad_cam(model.eval(), images, "layer2")
        torch.compiler.reset()
        fast = torch.compile(model, backend="eager")
        fast(images)
        assert torch.equal(grad_cam(fast, images, "layer2"), expected)
        torch.compiler.reset()
        assert torch.equal(grad_cam(nn.DataParallel(model), images, "layer2"), expected)
