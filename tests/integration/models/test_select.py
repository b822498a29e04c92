"""Selecting layers of timm and PEFT models."""

from __future__ import annotations

from torch import nn

from tests.support.names import names
from tests.support.nets import Small


def test_timm_ema_is_a_wrapper(model: Small) -> None:
    from timm.utils import ModelEmaV3

    assert names(ModelEmaV3(model), "layer1.0.bn1") == ["layer1.0.bn1"]


def test_names_inside_peft_wrappers() -> None:
    from peft import LoraConfig, get_peft_model

    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    wrapped = get_peft_model(model, LoraConfig(target_modules=["0"]))
    assert names(wrapped, "1") == ["1"]
    assert names(wrapped, "base_model.model.1") == ["1"]


def test_glob_counts_on_timm_resnet50() -> None:
    import timm

    model = timm.create_model("resnet50", num_classes=0)
    assert len(names(model, "layer3.*")) == 6
    assert len(names(model, "layer3.**")) == 75
