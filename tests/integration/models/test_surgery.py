"""Module surgery after inject: lost hooks are reported, kept hooks work, moved and copied hooks are found."""

import copy
import gc
import re
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from hookdrop import Dropout, HookdropWarning, Injection, LinearSchedule, find, inject, without_hooks
from hookdrop.core.hook import SiteHook
from tests.support.models import Small
from tests.support.training import optimize

LAYERS = ["conv1", "layer1.*.bn1", "fc"]


@pytest.fixture
def drop(model: Small) -> Injection:
    return inject(model, Dropout(0.5), layers=LAYERS)


def hooked_modules(model: nn.Module) -> list[str]:
    hooks = lambda module: (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return [name for name, module in model.named_modules() for hook in hooks(module) if isinstance(hook, SiteHook)]


def calls_by_site(drop: Injection, model: nn.Module, x: torch.Tensor) -> dict[str, int]:
    with drop.recording(last=0) as m:
        model(x)
    return {name: site.calls for name, site in m.totals.sites.items()}


def replace_head(model: nn.Module) -> None:
    model.fc = nn.Linear(8, 3)


NORMS = ["layer1.0.bn1", "layer1.1.bn1"]

LOSES_HOOKS: dict[str, tuple[Callable[[nn.Module], Any], list[str]]] = {
    "setattr": (replace_head, ["fc"]),
    "convert_sync_batchnorm": (nn.SyncBatchNorm.convert_sync_batchnorm, NORMS),
}


class TestLostHooks:
    @pytest.mark.parametrize("how", LOSES_HOOKS)
    def test_lost_hooks_are_reported(self, model: Small, drop: Injection, images: torch.Tensor, how: str) -> None:
        surgery, lost = LOSES_HOOKS[how]
        with without_hooks(model):
            assert drop.check() == []
        surgery(model)
        with pytest.warns(HookdropWarning, match="lost their hook"):  # in the first training forward
            model(images)
        (problem,) = drop.check()
        assert f"{len(lost)} of 4 sites lost their hook or rate: {', '.join(map(repr, lost))}." in problem
        assert find(model).check() == [problem]
        left = [site for site in ("conv1", *NORMS, "fc") if site not in lost]
        assert hooked_modules(model) == left
        assert [site for site, count in calls_by_site(drop, model, images).items() if count] == left
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", HookdropWarning)  # about frozen batch norms
            again = inject(model, Dropout(0.5), layers=LAYERS, on_existing="replace")
        model(images)
        assert again.check() == []
        assert hooked_modules(model) == ["conv1", *NORMS, "fc"]


def move_to_meta_and_back(model: Small) -> None:
    state = copy.deepcopy(model.state_dict())
    model.to("meta").to_empty(device="cpu").load_state_dict(state)


def fuse_for_qat(model: Small) -> None:
    torch.ao.quantization.fuse_modules_qat(model.layer1, [["0.conv1", "0.bn1"], ["1.conv1", "1.bn1"]], inplace=True)


def quantize_dynamically(model: Small) -> None:
    torch.ao.quantization.quantize_dynamic(model.eval(), {nn.Linear}, inplace=True)
    model.train()


def merge_lora(model: Small) -> None:
    peft = pytest.importorskip("peft")
    assert peft.get_peft_model(model, peft.LoraConfig(target_modules=["fc"], r=2)).merge_and_unload() is model


KEEPS_HOOKS: dict[str, Callable[[Small], Any]] = {
    "parametrize": lambda model: torch.nn.utils.parametrizations.spectral_norm(model.fc),
    "prune": lambda model: prune.l1_unstructured(model.fc, "weight", 0.3),
    "to_empty": move_to_meta_and_back,
    "quantize_dynamic": quantize_dynamically,
    "fuse_modules_qat": fuse_for_qat,
    "peft merge_and_unload": merge_lora,
}


@pytest.mark.filterwarnings("ignore:.*([Qq]uantization|torch.qint8)")  # deprecations
@pytest.mark.parametrize("at", ["output", "input"])
@pytest.mark.parametrize("how", KEEPS_HOOKS)
def test_kept_hooks_work_and_can_be_removed(model: Small, images: torch.Tensor, how: str, at: str) -> None:
    drop = inject(model, Dropout(0.5), layers=LAYERS, at=at, schedule=LinearSchedule(2))
    KEEPS_HOOKS[how](model)
    assert find(model) == drop
    find(model).step(2)
    images.requires_grad_()
    assert calls_by_site(drop, model, images) == dict.fromkeys(["conv1", *NORMS, "fc"], 1)
    assert drop.check() == find(model).check() == []
    assert [site.p for site in drop.sites] == [0.5] * 4
    assert drop.probe(images.detach()).sites["conv1"].dropped == pytest.approx(0.5, abs=0.05)
    drop.remove()
    assert hooked_modules(model) == []
    state = torch.get_rng_state()
    model(images)
    assert torch.equal(torch.get_rng_state(), state), "a hook still draws random numbers"


def sequence() -> nn.Sequential:
    """Return a model to fuse: the first three modules become one, and the others identities."""
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1))


def fuse(model: nn.Sequential) -> nn.Sequential:
    """Fuse in eval mode: the batch norm is folded into a copy of the convolution."""
    return torch.ao.quantization.fuse_modules(model.eval(), [["0", "1", "2"]], inplace=True)


@pytest.mark.filterwarnings("ignore:.*([Qq]uantization|torch.qint8|reduce_range)")
@pytest.mark.parametrize("at", ["output", "input"])
class TestMovedHooks:
    def test_fuse_modules_moves_the_hooks_of_the_last_module(self, images: torch.Tensor, at: str) -> None:
        """The fused module has the output of the last module, whose input is unchanged."""
        model = sequence()
        drop = inject(model, Dropout(0.5), layers=["2", "3"], at=at, schedule=LinearSchedule(4))
        fuse(model)
        assert hooked_modules(model) == (["0", "3"] if at == "output" else ["0.1", "3"])
        drop.step(4)
        with drop.recording(last=0) as m:
            model.train()(images)
        assert {name: round(site.dropped, 1) for name, site in m.totals.sites.items()} == {"2": 0.5, "3": 0.5}
        assert drop.check() == []
        drop.remove()
        assert hooked_modules(model) == []

    def test_fuse_modules_copies_the_hooks_of_the_first_module(self, images: torch.Tensor, at: str) -> None:
        """At the input the original hook moves as well, so the input would be dropped twice."""
        model = sequence()
        drop = inject(model, Dropout(0.5), layers=["0", "3"], at=at, schedule=LinearSchedule(4))
        drop.step(2)
        fuse(model).eval()(images)
        assert hooked_modules(model) == (["0.0", "3"] if at == "output" else ["0", "0.0", "3"])
        assert any("copies of the hooks of '0'" in text for text in drop.check())
        find(model).seek(4)
        assert [site.p for handle in find(model) for site in handle.sites] == [0.5] * len(hooked_modules(model))
        again = inject(model, Dropout(0.5), layers=["0", "3"], at=at, on_existing="replace")
        model.train()(images)
        assert again.check() == []
        again.remove()
        assert hooked_modules(model) == []


class TestCopiedHooks:
    """Copies of hooks in the same model: each has its own step count."""

    def test_peft_modules_to_save(self, model: Small, drop: Injection, images: torch.Tensor) -> None:
        """PEFT trains a copy of the layer and leaves the original in place."""
        peft = pytest.importorskip("peft")
        wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["conv1"], modules_to_save=["fc"], r=2))
        with (
            pytest.warns(HookdropWarning, match="'conv1' moved to 'conv1.base_layer' after inject"),
            pytest.warns(HookdropWarning, match="this model also has copies of the hooks of 'fc'"),
        ):
            wrapped(images)
        drop.remove()
        assert len(hooked_modules(model)) == 1
        find(wrapped).remove()
        assert hooked_modules(model) == []

    def test_copied_layer_is_reported(self, model: Small, drop: Injection, images: torch.Tensor) -> None:
        model.layer2[0] = copy.deepcopy(model.layer1[0])
        with pytest.warns(HookdropWarning, match="copies of the hooks"):
            model(images)
        assert "this model also has copies of the hooks of 'layer1.0.bn1'" in drop.check()[0]
        assert len(find(model).check()) == 2  # of the original and of the copy
        assert find(model.layer1).check() == []
        with pytest.warns(HookdropWarning, match="copies of the hooks"):  # of the other injection
            find(model).remove()
        assert hooked_modules(model) == []

    def test_other_copies_are_not_reported(self, model: Small, drop: Injection, images: torch.Tensor) -> None:
        """For example a teacher or an EMA."""
        part, pair = copy.deepcopy(model.layer1), nn.ModuleList([model, copy.deepcopy(model)])
        part(model.conv1(images))
        model.layer2[0] = model.layer1[0]
        assert calls_by_site(drop, model, images)["layer1.0.bn1"] == 2
        assert find(part).check() == drop.check() == []
        assert len(find(pair).sites) == 8
        part[0].bn1 = nn.BatchNorm2d(8)
        part(model.conv1(images))
        assert "1 of 2 sites lost their hook or rate: 'layer1.0.bn1'" in find(part).check()[0]


class TestMovedModules:
    """PEFT moves an adapted layer into a module that adds its own output to that of the layer."""

    @pytest.mark.parametrize("at", ["output", "input"])
    def test_an_adapter_around_a_hooked_layer_warns(self, model: Small, images: torch.Tensor, at: str) -> None:
        peft = pytest.importorskip("peft")
        drop = inject(model, Dropout(0.5), layers=LAYERS, at=at)
        peft.get_peft_model(model, peft.LoraConfig(target_modules=["fc", "conv1"], r=2))
        with pytest.warns(HookdropWarning, match="'conv1', 'fc' moved to 'conv1.base_layer', 'fc.base_layer'"):
            model(images)
        assert len(drop.check()) == 1
        again = inject(model, Dropout(0.5), layers=LAYERS, at=at, on_existing="replace")
        model(images)
        assert again.check() == []

    @pytest.mark.parametrize(
        ("surgery", "words"),
        [
            (replace_head, "1 of 4 sites lost their hook or rate: 'fc'"),
            (lambda model: setattr(model, "fc", nn.Sequential(nn.Tanh(), model.fc)), "'fc' moved to 'fc.1'"),
        ],
    )
    def test_a_change_during_the_training_is_reported(
        self, model: Small, drop: Injection, images: torch.Tensor, surgery: Callable[[Small], Any], words: str
    ) -> None:
        optimize(model, 3, x=images)
        surgery(model)
        (problem,) = drop.check()
        assert words in problem
        with pytest.warns(HookdropWarning, match=words):
            drop.remove()


class TestFullBackwardHooks:
    """PyTorch attaches them after the forward hooks, so their gradients lack the mask."""

    @pytest.mark.parametrize(("layer", "at"), [("0", "output"), ("0", "input"), ("1", "output")])
    def test_only_outputs_of_layers_with_weights_warn(self, layer: str, at: str) -> None:
        model, warns = layers(), (layer, at) == ("0", "output")
        drop = inject(model, Dropout(0.5), layers=layer, at=at)
        for part in model:
            part.register_full_backward_hook(lambda *_: None)
        x = torch.ones(2, requires_grad=True)
        if warns:
            with pytest.warns(HookdropWarning, match="full backward hooks on '0' get gradients without the mask"):
                model(x)
        model(x)
        assert len(drop.check()) == warns

    def test_hooks_placed_after_a_first_forward_warn_at_the_first_step(self) -> None:
        model = layers()
        inject(model, Dropout(0.5), layers="0")
        model(torch.ones(2))
        model[0].register_full_backward_hook(lambda *_: None)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model(torch.ones(2, requires_grad=True)).sum().backward()
        with pytest.warns(HookdropWarning, match="full backward hooks on '0'"):
            optimizer.step()


def test_lost_hooks_are_garbage_collected(model: Small) -> None:
    """Neither the model nor a removed handle holds the hook of a replaced layer."""
    drop = inject(model, Dropout(0.5), layers=LAYERS)
    hook = weakref.ref(next(hook for hook in model.fc._forward_hooks.values() if isinstance(hook, SiteHook)))
    model.fc = nn.Linear(8, 10)
    gc.collect()
    assert re.match("'dropout': 1 of 4 sites lost their hook", drop.check()[0])
    with pytest.warns(HookdropWarning, match="lost their hook"):
        drop.remove()
    del drop
    gc.collect()
    assert hook() is None


def layers(classes: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, classes))


def test_check_names_a_model_that_was_deleted() -> None:
    """A trainer builds its own model (ultralytics, FX quantization)."""
    drop = inject(layers(), Dropout(0.5), layers="1")
    optimize(layers(), 9)
    gc.collect()
    assert "if your trainer built a new model" in drop.check()[0]


def test_check_names_a_model_that_is_not_the_trained_one() -> None:
    """As in ultralytics, whose checkpoint holds the hooked model."""
    model = layers()
    drop = inject(model, Dropout(0.5), layers="1")
    assert not drop.check()
    optimize(layers(), 9)
    assert "the 9 steps of optimizers since inject trained other models" in drop.check()[0]
    optimize(model, 1)
    assert not drop.check()
