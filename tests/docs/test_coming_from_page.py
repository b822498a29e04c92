"""Every line in the right column of a table of `docs/start/coming_from.md` runs, and the hooked model accepts its input."""

from __future__ import annotations

import re

import pytest
import timm
import torch
import torchvision
from torch import nn

import hookdrop
from hookdrop import find, functional, recipes
from tests.support.programs import ROOT

PAGE = (ROOT / "docs" / "start" / "coming_from.md").read_text()
LINES = re.findall(r"^\| .+ \| `([^`]+)` \|$", PAGE, re.M)


@pytest.fixture(scope="module")
def names() -> dict[str, object]:
    """The names that the page defines, and a model for each."""
    model = timm.create_model("resnet18", num_classes=10)
    public = {name: getattr(hookdrop, name) for name in hookdrop.__all__}
    return public | {name: getattr(recipes, name) for name in recipes.__all__} | {
        "functional": functional,
        "nn": nn,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), 0.1),
        "vit": timm.create_model("test_vit", img_size=128),
        "tv_vit": torchvision.models.VisionTransformer(32, 16, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=16),
        "rnn": nn.Sequential(nn.LSTM(8, 8, batch_first=True)),
        "conv1d": nn.Sequential(nn.Conv1d(5, 8, 3), nn.SELU()),
        "conv3d": nn.Sequential(nn.Conv3d(1, 4, 3)),
        "images": torch.randn(2, 3, 128, 128),
        "x": torch.randn(2, 3, 16, 16),
    }  # fmt: skip


INPUTS = {
    "model": (2, 3, 128, 128),
    "vit": (2, 3, 128, 128),
    "tv_vit": (2, 3, 32, 32),
    "rnn": (2, 5, 8),
    "conv1d": (2, 5, 8),
    "conv3d": (2, 1, 8, 8, 8),
}


@pytest.mark.parametrize("line", LINES)
def test_the_line_of_hookdrop_runs(names: dict[str, object], line: str) -> None:
    exec(line, dict(names))
    for name, shape in INPUTS.items():
        model = names[name]
        assert isinstance(model, nn.Module)
        if find(model):
            model.train()(torch.randn(shape))
            find(model).remove()


def test_every_row_has_a_line_of_hookdrop() -> None:
    rows = re.findall(r"^\| (?!there|--).*", PAGE, re.M)
    assert len(LINES) == len(rows) > 30
