"""Layers of timm, torchvision and transformers models: patterns, shapes, numbers of calls, and warnings."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import nn

from hookdrop import Dropout, DropPath, HookdropWarning, LayerError, inject, plan
from tests.support.models import from_timm, toy


def test_drop_path_on_a_whole_block_warns() -> None:
    """It would drop the skip connection with the branch."""
    vit, resnet = from_timm("vit_tiny_patch16_224", **NARROW)(), from_timm("resnet18", channels=(8,) * 4)()
    for model, blocks, branches in ((vit, "blocks.*", "blocks.*.[am]*"), (resnet, "layer2.*", "layer?.*.bn2")):
        (text,) = plan(model, DropPath(0.1), layers=blocks, example_input=square(32)).warnings
        assert "the output includes the input" in text
        assert plan(model, DropPath(0.1), layers=branches, example_input=square(32)).warnings == []


def direct() -> nn.Module:
    """Calls `forward` of a submodule directly."""
    return toy(lambda self, x: self.fc.forward(x), fc=nn.Linear(8, 8))


def square(size: int) -> torch.Tensor:
    return torch.randn(1, 3, size, size)


NARROW = {"img_size": 32, "depth": 1, "embed_dim": 32, "num_heads": 2}


def tiny_swin() -> nn.Module:
    return pytest.importorskip("torchvision").models.SwinTransformer([4, 4], 12, [1, 1], [2, 2], [4, 4])


def tiny_bottlenecks() -> nn.Module:
    resnet = pytest.importorskip("torchvision").models.resnet
    return resnet.ResNet(resnet.Bottleneck, [1, 1, 1, 1], width_per_group=8)


NEVER = {
    "called by .forward()": (direct, torch.ones(2, 8), "fc", "f?"),
    "torchvision swin attn.qkv": (tiny_swin, square(32), "features.1.0.attn.qkv", "**.attn.qkv"),
    "timm attn_drop under fused attention": (
        from_timm("vit_tiny_patch16_224", **NARROW), square(32), "blocks.0.attn.attn_drop", "**.attn_drop",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", NEVER.values(), ids=NEVER)
def test_never_called(case: tuple[Callable[[], nn.Module], torch.Tensor, str, str]) -> None:
    """Weights used directly or branches not taken: named sites raise, matched sites warn, without an example later."""
    make, x, name, pattern = case
    model = make()
    with pytest.raises(LayerError, match="is not called in the forward pass: a hook on it never fires"):
        inject(model, Dropout(0.3), layers=name, example_input=x)
    with pytest.warns(HookdropWarning, match=r"sites? never called in an eval forward, so the hooks there do not fire"):
        inject(model, Dropout(0.3), layers=pattern, example_input=x).remove()
    drop = inject(model, Dropout(0.3), layers=name)
    model(torch.cat([x, x]))
    drop.seek(1)
    assert [text.partition("\n")[0] for text in drop.check()] == [
        f"'dropout': {name!r} never ran, so nothing is dropped there."
    ]


OFTEN = {
    "torchvision Bottleneck relu": (tiny_bottlenecks, "layer1.0.relu", 3),
    "timm cait drop_path": (from_timm("cait_xxs24_224", img_size=32, depth=1), "blocks.0.drop_path", 2),
}


@pytest.mark.parametrize("case", OFTEN.values(), ids=OFTEN)
def test_called_more_than_once(case: tuple[Callable[[], nn.Module], str, int]) -> None:
    """The plan counts the calls, and each call draws its own mask."""
    make, name, calls = case
    model, x = make(), square(32)
    (site,) = plan(model, Dropout(0.3), layers=name, example_input=x).sites
    assert site.calls == calls
    drop = inject(model, Dropout(0.3), layers=name)
    outputs: list[torch.Tensor] = []
    model.get_submodule(name).register_forward_hook(lambda module, args, output: outputs.append(output))
    with drop.recording(last=0) as m:
        model(torch.cat([x, x]))
    assert m.totals.calls == len(outputs) == calls
    assert m.totals.dropped == pytest.approx(0.3, abs=0.02)
    for first, second in itertools.pairwise(outputs):
        if first.shape == second.shape:
            assert not torch.equal(first == 0, second == 0)
