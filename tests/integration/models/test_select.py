"""Choosing layers: globs, expressions, classes, instances, wrappers, and what is said when nothing matches."""

from __future__ import annotations

from torch import nn

from tests.support.names import names
from tests.support.nets import Small


def test_timms_ema_is_a_wrapper(model: Small) -> None:
    from timm.utils import ModelEmaV3

    assert names(ModelEmaV3(model), "layer1.0.bn1") == ["layer1.0.bn1"]


def test_pefts_wrappers_are_looked_through() -> None:
    from peft import LoraConfig, get_peft_model

    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    wrapped = get_peft_model(model, LoraConfig(target_modules=["0"]))
    assert names(wrapped, "1") == ["1"]
    assert names(wrapped, "base_model.model.1") == ["1"]


def test_facts_layer3_star_is_6_and_double_star_75_on_timm_resnet50() -> None:
    import timm

    model = timm.create_model("resnet50", num_classes=0)
    assert len(names(model, "layer3.*")) == 6
    assert len(names(model, "layer3.**")) == 75
