"""TokenDropout in vision transformers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hookdrop import TokenDropout, inject, plan


class TestTokenDropout:
    def test_class_token_of_a_vit_is_kept(self) -> None:
        timm = pytest.importorskip("timm")
        settings = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2}
        model = timm.create_model("vit_tiny_patch16_224", **settings).train()
        seen = plan(model, TokenDropout(0.5), layers="norm_pre", example_input=torch.ones(2, 3, 32, 32)).sites
        assert seen[0].reading == "L=17 (prefix 1) C=32"
        inject(model, TokenDropout(1.0), layers="norm_pre")
        kept: list[Tensor] = []
        model.norm_pre.register_forward_hook(lambda module, args, output: kept.append(output))
        model(torch.randn(2, 3, 32, 32)).sum().backward()
        assert kept[0][:, 0].any()
        assert not kept[0][:, 1:].any()
        assert model.cls_token.grad.any()
        assert not model.patch_embed.proj.weight.grad.any()
