"""Inject, train, evaluate and remove on real models: everything is bit-equal to before."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from hookdrop import DropBlock, Dropout, Dropout1d, Dropout2d, HookdropWarning, inject, without_hooks
from hookdrop.survey.isolation import call
from hookdrop.utils.tensor_tree import tensors
from tests.support.models import from_timm, from_torchvision
from tests.support.tensors import all_equal
from tests.support.transformers_models import llama

HOOK_DICTS = [name for name in vars(nn.Module()) if "hooks" in name]


def footprint(model: nn.Module) -> dict[str, Any]:
    """Everything that users can see of a model."""
    return {
        "class": type(model),
        "repr": repr(model),
        "modules": [(name, id(module)) for name, module in model.named_modules()],
        "parameters": [(name, id(parameter)) for name, parameter in model.named_parameters()],
        "buffers": [(name, id(buffer)) for name, buffer in model.named_buffers()],
        "keys": list(model.state_dict()),
        "flags": [module.training for module in model.modules()],
    }


def hook_dicts(model: nn.Module) -> list[dict[int, Any]]:
    return [dict(getattr(module, name)) for module in model.modules() for name in HOOK_DICTS]


def forward(model: nn.Module, x: Any) -> list[torch.Tensor]:
    """Return the tensors of an eval forward."""
    model.eval()
    torch.manual_seed(3)
    with torch.no_grad():
        out = call(model, x)
    return [t.clone() for t in tensors(out)]


def train_step(model: nn.Module, x: Any) -> float:
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    torch.manual_seed(4)
    out = call(model, x)
    loss = sum(t.float().pow(2).mean() for t in tensors(out) if t.is_floating_point() and t.requires_grad)
    loss.backward()
    optimizer.step()
    return loss.item()


def images(size: int = 64) -> torch.Tensor:
    return torch.randn(2, 3, size, size)


def detection_input() -> tuple[Any, Any]:
    boxes = torch.tensor([[4.0, 4.0, 40.0, 40.0]])
    target = {"boxes": boxes, "labels": torch.tensor([1])}
    return [torch.rand(3, 64, 64)] * 2, [dict(target), dict(target)]


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def ids() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(99, (2, 12))}


CASES = {
    "timm resnet26": (from_timm("resnet26", num_classes=10, zero_init_last=False), images, DropBlock(0.3, 3), "layer3.*.bn[12]"),
    "timm swin": (
        from_timm("swin_tiny_patch4_window7_224", num_classes=10, img_size=32, window_size=2, drop_path_rate=0.0, depths=(1, 1)),
        lambda: images(32), DropBlock(0.3, 3, channel_dim=-1), "layers.*.blocks.*.attn",
    ),
    "torchvision mobilenet_v3_small": (from_torchvision("mobilenet_v3_small"), images, Dropout2d(0.3), "features.*"),
    "detection": (
        from_torchvision("fasterrcnn_mobilenet_v3_large_320_fpn", weights_backbone=None), detection_input,
        DropBlock(0.3, 3), "backbone.fpn.layer_blocks.*",
    ),
    "LSTM": (lambda: nn.LSTM(6, 8, 2), lambda: torch.randn(5, 3, 6), Dropout1d(0.3), nn.LSTM),
    "TransformerEncoder": (encoder, lambda: torch.randn(3, 7, 16), Dropout(0.3), "layers.*.linear2"),
    "transformers decoder": (llama, ids, Dropout(0.3), ["**.self_attn", "**.mlp"]),
}  # fmt: skip
"""One for each kind of input and output; `benchmarks/zoo.py` makes such a round trip with each family of timm."""


# With hooks, these leave PyTorch's fused eval path.
FUSED = {"TransformerEncoder"}


@pytest.mark.parametrize("case", CASES)
def test_round_trip(case: str) -> None:
    make, make_input, regularizer, layers = CASES[case]
    torch.manual_seed(0)
    model, x = make(), make_input()
    clean = copy.deepcopy(model)
    before, dicts_before, out_before = footprint(model), hook_dicts(model), forward(model, x)
    model.train()
    assert footprint(model) == before

    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if case in FUSED else "error", HookdropWarning)
        drop = inject(model, regularizer, layers=layers)
    assert footprint(model) == before
    hooked = forward(model, x)
    if case in FUSED:
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(hooked, out_before, strict=True))
    else:
        assert all_equal(hooked, out_before)

    regularized, plain = train_step(model, x), train_step(clean, x)
    assert regularized != plain, "nothing was dropped"
    assert all(site.called for site in drop.sites)
    clean.load_state_dict(model.state_dict())

    trained = forward(clean, x)
    hooked = forward(model, x)
    if case not in FUSED:
        assert all_equal(hooked, trained)
    with without_hooks(model):
        assert all_equal(forward(model, x), trained)

    model.train()
    drop.remove()
    assert footprint(model) == before
    assert hook_dicts(model) == dicts_before
    assert all_equal(forward(model, x), trained)
