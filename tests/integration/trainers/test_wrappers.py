"""Layers keep their names inside the wrappers of trainers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

import pytest
from torch import nn

from hookdrop import Dropout, find, inject
from hookdrop.utils import names


def fabric(model: nn.Module) -> nn.Module:
    lightning = pytest.importorskip("lightning")
    wrapped: nn.Module = lightning.Fabric(accelerator="cpu").setup_module(model)
    return wrapped


def timm_task(model: nn.Module) -> nn.Module:
    pytest.importorskip("timm")
    task = pytest.importorskip("timm.task")
    wrapped: nn.Module = task.ClassificationTask(model, nn.CrossEntropyLoss())
    return wrapped


def stand_in(name: str, attribute: str) -> Callable[[nn.Module], nn.Module]:
    """A class with the name and the attribute of a wrapper whose library is not a test dependency."""

    def wrap(model: nn.Module) -> nn.Module:
        module, _, class_name = name.rpartition(".")
        cls = type(class_name, (nn.Module,), {})
        sys.modules[module] = ModuleType(module)
        setattr(sys.modules[module], class_name, cls)
        wrapped: nn.Module = cls()
        setattr(wrapped, attribute, model)
        return wrapped

    return wrap


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("deepspeed.runtime.engine", "ema_pytorch.ema_pytorch"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    names.wrapped_attribute.cache_clear()  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*LeafSpec")
@pytest.mark.parametrize(
    "wrap",
    [
        fabric,
        timm_task,
        stand_in("deepspeed.runtime.engine.DeepSpeedEngine", "module"),
        stand_in("ema_pytorch.ema_pytorch.EMA", "ema_model"),
    ],
    ids=["Fabric", "timm's TrainingTask", "DeepSpeed", "ema-pytorch"],
)
def test_layers_keep_their_names(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    wrapped = wrap(model)
    drop = inject(wrapped, Dropout(0.1), layers="0")
    assert [site.name for site in next(iter(find(wrapped))).sites] == [site.name for site in drop.sites] == ["0"]
    assert len(find(model)) == 1
