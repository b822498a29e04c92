"""`observe.grad_cam` of compiled and wrapped models."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hookdrop.observe import grad_cam
from tests.support.nets import Small

pytest.importorskip("pytorch_grad_cam")


class TestWrappedModels:
    def test_compiled_and_data_parallel_models(self, model: Small, images: torch.Tensor) -> None:
        expected = grad_cam(model.eval(), images, "layer2")
        fast = torch.compile(model, backend="eager")
        fast(images)
        assert torch.equal(grad_cam(fast, images, "layer2"), expected)
        assert torch.equal(grad_cam(nn.DataParallel(model), images, "layer2"), expected)
