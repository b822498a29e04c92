"""`observe.grad_cam` of vision transformers."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import interpolate

from hookdrop.observe import grad_cam

pytest.importorskip("pytorch_grad_cam")
from tests.support.tensors import captured, scale_maps


class TestTransformers:
    def test_vit_tokens_form_a_grid_after_the_prefix_tokens(self) -> None:
        timm = pytest.importorskip("timm")
        model = timm.create_model("vit_tiny_patch16_224", img_size=(64, 96), depth=3, num_classes=5)
        x = torch.randn(2, 3, 64, 96)
        layer = "blocks.2.norm1"
        model.eval()
        with captured(model, layer) as seen:
            model(x)[:, 3].sum().backward()
        model.zero_grad()
        maps, gradients = (
            x[:, 1:].unflatten(1, (4, 6)).permute(0, 3, 1, 2) for x in (seen[layer][0], seen[layer][0].grad)
        )
        expected = (gradients.mean((2, 3), keepdim=True) * maps).sum(1).relu()
        resized = interpolate(scale_maps(expected)[:, None], (64, 96), mode="bilinear", align_corners=False)[:, 0]
        assert torch.allclose(grad_cam(model, x, layer, 3), scale_maps(resized), atol=1e-3)

    def test_swin_maps_are_channels_last(self) -> None:
        timm = pytest.importorskip("timm")
        model = timm.create_model(
            "swin_tiny_patch4_window7_224",
            img_size=64,
            window_size=2,
            depths=(1, 1),
            embed_dim=24,
            num_heads=(1, 2),
            num_classes=5,
        )
        x = torch.randn(2, 3, 64, 64)
        with captured(model.eval(), "layers.1") as seen:
            model(x)[:, 3].sum().backward()
        maps, gradients = (x.permute(0, 3, 1, 2) for x in (seen["layers.1"][0], seen["layers.1"][0].grad))
        expected = (gradients.mean((2, 3), keepdim=True) * maps).sum(1).relu()
        resized = interpolate(scale_maps(expected)[:, None], (64, 64), mode="bilinear", align_corners=False)[:, 0]
        assert torch.allclose(grad_cam(model, x, "layers.1", 3), scale_maps(resized), atol=1e-3)
