"""`hookdrop.observe` and `drop.recording()` with compiled models."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hookdrop.observe import grad_cam, stats
from tests.support.models import Small


@pytest.mark.parametrize("fullgraph", [True, False])
def test_statistics_after_compiling(fullgraph: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    fast = torch.compile(model, backend="eager", fullgraph=fullgraph)
    x = torch.randn(2, 4)
    fast(x)
    counted = torch._dynamo.utils.counters
    compiled_before = counted["frames"]["ok"]
    with stats(fast) as seen:
        for _ in range(12):
            fast(x).sum().backward()
    assert seen["0"].activation.mean == pytest.approx(model[0](x).mean().item())
    assert [layer.gradient.parts for layer in seen.values()] == [12, 12]
    fast(x)
    assert counted["frames"]["ok"] == compiled_before  # observing caused no compilation


def test_grad_cam_of_compiled_and_data_parallel_models(model: Small, images: torch.Tensor) -> None:
    pytest.importorskip("pytorch_grad_cam")
    expected = grad_cam(model.eval(), images, "layer2")
    fast = torch.compile(model, backend="eager")
    fast(images)
    assert torch.equal(grad_cam(fast, images, "layer2"), expected)
    assert torch.equal(grad_cam(nn.DataParallel(model), images, "layer2"), expected)
