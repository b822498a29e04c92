"""`hookdrop.observe` and `drop.recording()` with compiled models."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hookdrop.observe import grad_cam
from tests.support.models import Small


def test_grad_cam_of_compiled_and_data_parallel_models(model: Small, images: torch.Tensor) -> None:
    pytest.importorskip("pytorch_grad_cam")
    expected = grad_cam(model.eval(), images, "layer2")
    fast = torch.compile(model, backend="eager")
    fast(images)
    assert torch.equal(grad_cam(fast, images, "layer2"), expected)
    assert torch.equal(grad_cam(nn.DataParallel(model), images, "layer2"), expected)
