"""Inject, train, evaluate and remove on real models: everything is bit-equal to before."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
from torch import nn

from hookdrop import DropBlock, Dropout, Dropout1d, Dropout2d, HookdropWarning
from hookdrop.survey.isolation import call
from models.check import Behavior
from tests.support.models import from_timm, from_torchvision
from tests.support.transformers_models import llama


def images(size: int = 64) -> torch.Tensor:
    return torch.randn(2, 3, size, size)


def ids() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(99, (2, 12))}


CASES = {
    "timm resnet26": (from_timm("resnet26", num_classes=10, zero_init_last=False), images, DropBlock(0.3, 3), "layer3.*.bn[12]"),
    "timm swin": (
        from_timm("swin_tiny_patch4_window7_224", num_classes=10, img_size=32, window_size=2, drop_path_rate=0.0, depths=(1, 1)),
        lambda: images(32), DropBlock(0.3, 3, channel_dim=-1), "layers.*.blocks.*.attn",
    ),
    "torchvision mobilenet_v3_small": (from_torchvision("mobilenet_v3_small"), images, Dropout2d(0.3), "features.*"),
    "LSTM": (lambda: nn.LSTM(6, 8, 2), lambda: torch.randn(5, 3, 6), Dropout1d(0.3), nn.LSTM),
    "transformers decoder": (llama, ids, Dropout(0.3), ["**.self_attn", "**.mlp"]),
}  # fmt: skip
"""`benchmarks/zoo.py` makes such a round trip with each family of timm; those of detectors are in test_dropblock_detector.py."""


@pytest.mark.parametrize("case", CASES)
def test_round_trip(case: str) -> None:
    """`Behavior` compares all that users can see: names, parameters, buffers, `repr`, hook tables, the random state."""
    make, make_input, regularizer, layers = CASES[case]
    torch.manual_seed(0)
    model = make()
    behavior = Behavior(model, partial(call, model, make_input()))
    with warnings.catch_warnings():
        warnings.simplefilter("error", HookdropWarning)
        found = behavior.inject(model, regularizer, layers=layers)
    assert found.totals.dropped > 0.1
    assert not found.problems
