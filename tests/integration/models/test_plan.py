"""Plans of timm and torchvision models."""

from __future__ import annotations

import torch

from hookdrop import (
    Dropout,
    DropPath,
    plan,
)


class TestPlans:
    def test_drop_path_on_a_whole_block_warns(self) -> None:
        """It would drop the skip connection with the branch."""
        import timm

        vit = timm.create_model("vit_tiny_patch16_224", img_size=64)
        x = torch.randn(2, 3, 64, 64)
        drafted = plan(vit, DropPath(0.1), layers="blocks.*", example_input=x)
        assert "DropPath at 'blocks.0': the output includes the input" in drafted.warnings[0]
        assert plan(vit, DropPath(0.1), layers=["blocks.*.attn", "blocks.*.mlp"], example_input=x).warnings == []
        efficient = timm.create_model("efficientnet_b0")
        assert plan(efficient, DropPath(0.1), layers="blocks.*.*.bn3", example_input=x).warnings == []
        resnet = timm.create_model("resnet18")
        assert plan(resnet, DropPath(0.1), layers="layer2.*", example_input=x).warnings
        assert plan(resnet, DropPath(0.1), layers="layer?.*.bn2", example_input=x).warnings == []

    def test_example_input_fills_in_calls_and_shapes(self, images: torch.Tensor) -> None:
        import torchvision

        model = torchvision.models.resnet50(weights=None)
        drafted = plan(model, Dropout(0.1), layers="layer1.0.relu", example_input=images)
        (site,) = drafted.sites
        assert (site.calls, site.shape, site.type) == (3, (4, 256, 4, 4), "ReLU")
