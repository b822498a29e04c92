"""Wrappers of models and optimizers: EMA, averages, PEFT, `torch.compile`, trainers, Lookahead and Accelerate."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from hookdrop import Dropout, InjectionError, find, inject
from hookdrop.utils import names as wrapper_names
from tests.support.injections import half_ramped, scheduled
from tests.support.models import Small, names
from tests.support.training import backward


def ema(model: nn.Module) -> nn.Module:
    return pytest.importorskip("timm").utils.ModelEmaV3(model)


def lora(model: nn.Module) -> nn.Module:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["fc"]))


def fabric(model: nn.Module) -> nn.Module:
    return pytest.importorskip("lightning").Fabric(accelerator="cpu").setup_module(model)


def timm_task(model: nn.Module) -> nn.Module:
    return pytest.importorskip("timm.task").ClassificationTask(model, nn.CrossEntropyLoss())


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
    for name in ("deepspeed.runtime.engine", "ema_pytorch.ema_pytorch", "opacus.grad_sample.gsm_base"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    wrapper_names.wrapped_attribute.cache_clear()  # type: ignore[attr-defined]


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DataParallel": nn.DataParallel,
    "torch.compile": torch.compile,
    "AveragedModel": AveragedModel,
    "timm's EMA": ema,
    "PEFT": lora,
    "Fabric": fabric,
    "timm's TrainingTask": timm_task,
    "DeepSpeed": stand_in("deepspeed.runtime.engine.DeepSpeedEngine", "module"),
    "ema-pytorch": stand_in("ema_pytorch.ema_pytorch.EMA", "ema_model"),
    "Opacus": stand_in("opacus.grad_sample.gsm_base.AbstractGradSampleModule", "_module"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*LeafSpec")
@pytest.mark.parametrize("name", WRAPPERS)
def test_layers_keep_their_names(name: str, model: Small) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model.layer1[0] = checkpoint_wrapper(model.layer1[0])
    wrapped = WRAPPERS[name](model)
    assert names(wrapped, "layer1.*") == ["layer1.0", "layer1.1"]
    assert names(wrapped, "layer1.0.bn1") == ["layer1.0.bn1"]
    assert names(wrapped, "layer1.0._checkpoint_wrapped_module.bn1") == ["layer1.0.bn1"]
    with inject(wrapped, Dropout(0.3), layers="layer1.*") as drop:
        assert [site.name for site in drop.sites] == ["layer1.0", "layer1.1"]
        assert [site.name for site in find(wrapped).sites] == ["layer1.0", "layer1.1"]
    if prefix := {"DataParallel": "module", "torch.compile": "_orig_mod", "PEFT": "base_model.model"}.get(name):
        assert names(wrapped, f"{prefix}.layer1.*.bn1") == ["layer1.0.bn1", "layer1.1.bn1"]
        with inject(wrapped, Dropout(0.3), layers=f"{prefix}.layer1.*") as drop:
            assert find(model) == find(wrapped) == drop


def test_timm_ema_copies_the_injection(model: Small, images: torch.Tensor) -> None:
    """The copy has its own step count: it was made at step 0 and never stepped."""
    drop = half_ramped(model)
    drop.seek(0)
    average = ema(model)
    drop.step(5)
    average.update(model)
    assert torch.equal(average.module(images), average.module(images))
    (own,) = find(average)
    with pytest.raises(InjectionError, match="sampling at rate 0"), own.sampling():
        pass
    own.load_state_dict(drop.state_dict())
    with own.sampling():
        assert own.p == 0.2
        assert not torch.equal(average.module(images), average.module(images))
    own.remove()
    assert drop.p == 0.2
    assert len(find(model)) == 1


def test_follow_through_timm_lookahead() -> None:
    from timm.optim import Lookahead

    model, drop, optimizer = scheduled()
    lookahead = Lookahead(optimizer)
    drop.follow(lookahead)
    drop.follow(optimizer)
    for _ in range(3):
        backward(model)
        lookahead.step()
    assert drop.step_count == 3


def test_follow_through_the_accelerate_wrapper() -> None:
    from accelerate import Accelerator
    from accelerate.state import GradientState

    GradientState._reset_state()  # a loader of another test, at whose end every step synchronizes
    model, drop, optimizer = scheduled()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    prepared, wrapped = accelerator.prepare(model, optimizer)
    drop.follow(wrapped)
    drop.follow(wrapped)
    for _ in range(6):
        with accelerator.accumulate(prepared):
            accelerator.backward(prepared(torch.ones(2, 4)).sum())
            wrapped.step()
            wrapped.zero_grad()
    assert drop.step_count == 3
