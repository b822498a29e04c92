"""`observe.grad_cam` of vision transformers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from hookdrop.observe import grad_cam
from tests.support.tensors import captured, scale_maps

pytest.importorskip("pytorch_grad_cam")
timm = pytest.importorskip("timm")

VIT = {"img_size": (64, 96), "depth": 3, "embed_dim": 24, "num_classes": 5}
SWIN = {"img_size": 64, "window_size": 2, "depths": (1, 1), "embed_dim": 24, "num_heads": (1, 2), "num_classes": 5}


@pytest.mark.parametrize(
    ("name", "settings", "layer", "maps_of"),
    [
        ("vit_tiny_patch16_224", VIT, "blocks.2.norm1", lambda x: x[:, 1:].unflatten(1, (4, 6)).permute(0, 3, 1, 2)),
        ("swin_tiny_patch4_window7_224", SWIN, "layers.1", lambda x: x.permute(0, 3, 1, 2)),
    ],
    ids=["a grid after the prefix token", "channels last"],
)
def test_tokens_form_maps(
    name: str, settings: dict[str, object], layer: str, maps_of: Callable[[Tensor], Tensor]
) -> None:
    model, size = timm.create_model(name, **settings).eval(), (64, 96) if "vit" in name else (64, 64)
    x = torch.randn(2, 3, *size)
    with captured(model, layer) as seen:
        model(x)[:, 3].sum().backward()
    model.zero_grad()
    maps, gradients = maps_of(seen[layer][0]), maps_of(seen[layer][0].grad)
    expected = (gradients.mean((2, 3), keepdim=True) * maps).sum(1).relu()
    resized = interpolate(scale_maps(expected)[:, None], size, mode="bilinear", align_corners=False)[:, 0]
    assert torch.allclose(grad_cam(model, x, layer, 3), scale_maps(resized), atol=1e-3)
