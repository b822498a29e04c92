"""Surgery after inject: what loses hooks is told, what keeps them still works, what moves or copies them is known."""

from __future__ import annotations

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
from torch.nn.utils import parametrize, prune

from hookdrop import Dropout, HookdropWarning, Injection, LinearSchedule, eject, find, inject, without_hooks
from hookdrop.hooks.hook import SiteHook
from tests.support.nets import Small

LAYERS = ["conv1", "layer1.*.bn1", "fc"]


@pytest.fixture
def drop(model: Small) -> Injection:
    return inject(model, Dropout(0.5), layers=LAYERS)


def places(model: nn.Module) -> list[str]:
    """Where our hooks sit now, by the names that the modules have now."""
    return [
        name
        for name, module in model.named_modules()
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        if isinstance(hook, SiteHook)
    ]


def calls(drop: Injection, model: nn.Module, x: torch.Tensor) -> dict[str, int]:
    with drop.measuring() as m:
        model(x)
    return {name: site.calls for name, site in m.sites.items()}


class Quantized(nn.Module):
    """A linear layer of another class, as torchao's `quantize_` and others put in the place of one."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


def quantize_(module: nn.Module) -> None:
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, Quantized(child))
        else:
            quantize_(child)


def timms_freeze(model: nn.Module) -> None:
    from timm.layers import freeze_batch_norm_2d

    freeze_batch_norm_2d(model.layer1)


def timms_sync_batch_norm(model: nn.Module) -> None:
    from timm.layers import convert_sync_batchnorm

    convert_sync_batchnorm(model)


def timms_reparameterization(model: nn.Module) -> None:
    from timm.utils.model import reparameterize_model

    model.fc.fuse = lambda: nn.Linear(8, 10)  # type: ignore[operator, union-attr]
    reparameterize_model(model, inplace=True)


def a_new_head(model: nn.Module) -> None:
    model.fc = nn.Linear(8, 3)


def no_head(model: nn.Module) -> None:
    del model.fc
    model.fc = nn.Identity()


NORMS = ["layer1.0.bn1", "layer1.1.bn1"]


LOSE: dict[str, tuple[Callable[[nn.Module], Any], list[str]]] = {
    "setattr": (a_new_head, ["fc"]),
    "delattr": (no_head, ["fc"]),
    "quantize_": (quantize_, ["fc"]),
    "convert_sync_batchnorm": (nn.SyncBatchNorm.convert_sync_batchnorm, NORMS),
    "timm convert_sync_batchnorm": (timms_sync_batch_norm, NORMS),
    "timm freeze_batch_norm_2d": (timms_freeze, NORMS),
    "timm reparameterize_model": (timms_reparameterization, ["fc"]),
}


class TestLost:
    @pytest.mark.parametrize("how", LOSE)
    def test_lost_hooks_are_told_with_what_to_do(
        self, model: Small, drop: Injection, images: torch.Tensor, how: str
    ) -> None:
        surgery, lost = LOSE[how]
        surgery(model)
        model(images)
        assert drop.check() == [
            f"'dropout': {len(lost)} of 4 sites no longer have a hook: {', '.join(map(repr, lost))}.\n"
            "  something replaced these modules after inject (reset_classifier, convert_sync_batchnorm, ...): "
            'inject again with on_existing="replace".'
        ]
        assert find(model).check() == drop.check()
        left = [site for site in ("conv1", *NORMS, "fc") if site not in lost]
        assert places(model) == left
        assert [site for site, count in calls(drop, model, images).items() if count] == left
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", HookdropWarning)  # frozen layers, here
            again = inject(model, Dropout(0.5), layers=LAYERS, on_existing="replace")
        model(images)
        assert again.check() == []
        assert places(model) == ["conv1", *NORMS, "fc"]

    @pytest.mark.parametrize("ask", ["summary", "remove"])
    @pytest.mark.parametrize("how", LOSE)
    def test_lost_hooks_are_told_without_being_asked(self, model: Small, drop: Injection, how: str, ask: str) -> None:
        LOSE[how][0](model)
        with pytest.warns(HookdropWarning, match="of 4 sites no longer have a hook"):
            getattr(drop, ask)()
        drop.remove()
        assert places(model) == []

    def test_timms_reset_classifier(self, images: torch.Tensor) -> None:
        timm = pytest.importorskip("timm")
        model = timm.create_model("resnet10t", num_classes=10)
        drop = inject(model, Dropout(0.5), layers=["fc", "layer1.*.bn1"])
        model.reset_classifier(3)
        model(images)
        (problem,) = drop.check()
        assert problem.startswith("'dropout': 1 of 2 sites no longer have a hook: 'fc'.")

    def test_all_hooks_lost(self, model: Small, images: torch.Tensor) -> None:
        """Nothing of hookdrop is on the model then: the handle alone knows."""
        drop = inject(model, Dropout(0.5), layers="fc")
        quantize_(model)
        assert find(model) == ()
        with pytest.warns(HookdropWarning, match="1 of 1 sites no longer have a hook: 'fc'"):
            drop.remove()
        model(images)

    @pytest.mark.parametrize("before", [0, 3, 15, 20])
    @pytest.mark.parametrize("how", ["step", "seek", "follow"])
    def test_lost_hooks_are_told_within_ten_steps(self, how: str, before: int) -> None:
        """Whenever they were lost, and once."""
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        drop = inject(model, Dropout(0.5), layers="*", schedule=LinearSchedule(1000))
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        if how == "follow":
            drop.follow(optimizer)

        def steps(count: int) -> None:
            for _ in range(count):
                model(torch.ones(2)).sum().backward()
                optimizer.step()
                if how == "step":
                    drop.step()
                if how == "seek":
                    drop.seek(drop.step_count + 1)

        steps(before)
        model[1] = nn.Linear(2, 2)
        with pytest.warns(HookdropWarning, match="1 of 2 sites no longer have a hook: '1'"):
            steps(10)
        steps(20)

    def test_what_to_do_says_where_the_schedule_stands(self, model: Small, images: torch.Tensor) -> None:
        """A new injection starts at step 0."""
        drop = inject(model, Dropout(0.5), layers=LAYERS, schedule=LinearSchedule(10))
        drop.seek(7)
        model(images)
        model.fc = nn.Linear(8, 10)
        assert drop.check()[0].endswith('inject again with on_existing="replace", then drop.seek(7).')

    def test_a_handle_found_again_knows_too_though_the_old_layer_is_still_there(
        self, model: Small, drop: Injection, images: torch.Tensor
    ) -> None:
        old = model.fc
        model.fc = nn.Linear(8, 10)
        model(images)
        wrapped = nn.DataParallel(model)
        for handle in (drop, *find(model), *find(wrapped)):
            (problem,) = handle.check()
            assert "1 of 4 sites no longer have a hook: 'fc'" in problem
        assert find(model.layer1).check() == []
        assert old._forward_hooks

    def test_hooks_that_are_off_for_a_while_are_not_lost(
        self, model: Small, drop: Injection, images: torch.Tensor
    ) -> None:
        model(images)
        with without_hooks(model):
            assert drop.check() == []
        assert drop.check() == []


class Double(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def parametrized(model: Small) -> None:
    parametrize.register_parametrization(model.fc, "weight", Double())
    assert type(model.fc) is not nn.Linear


def parametrized_and_back(model: Small) -> None:
    parametrized(model)
    parametrize.remove_parametrizations(model.fc, "weight")


def pruned_for_good(model: Small) -> None:
    prune.l1_unstructured(model.fc, "weight", 0.3)
    prune.remove(model.fc, "weight")


def new_norms(model: Small) -> None:
    torch.nn.utils.parametrizations.weight_norm(model.fc)
    torch.nn.utils.parametrizations.spectral_norm(model.conv1)


def old_norms(model: Small) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        torch.nn.utils.weight_norm(model.fc)
    torch.nn.utils.spectral_norm(model.conv1)


def there_and_back(model: Small) -> None:
    model.double().float().to(memory_format=torch.channels_last)


def emptied(model: Small) -> None:
    state = copy.deepcopy(model.state_dict())
    model.to("meta").to_empty(device="cpu").load_state_dict(state)


def swapped(model: Small) -> None:
    for mine, other in zip(model.parameters(), Small().parameters(), strict=True):
        torch.utils.swap_tensors(mine, other)


def swapped_on_conversion(model: Small) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        there_and_back(model)
        model.load_state_dict(Small().state_dict())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def of_another_class(model: Small) -> None:
    """As FSDP2 does it."""
    model.fc.__class__ = type("FSDPLinear", (nn.Linear,), {})


def fused_for_quantization_aware_training(model: Small) -> None:
    torch.ao.quantization.fuse_modules_qat(model.layer1, [["0.conv1", "0.bn1"], ["1.conv1", "1.bn1"]], inplace=True)


def quantized_dynamically(model: Small) -> None:
    torch.ao.quantization.quantize_dynamic(model.eval(), {nn.Linear}, inplace=True)
    model.train()


def low_rank(model: Small) -> None:
    peft = pytest.importorskip("peft")
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["fc", "conv1"], r=2))
    assert type(model.fc) is not nn.Linear


def low_rank_and_merged(model: Small) -> None:
    peft = pytest.importorskip("peft")
    assert peft.get_peft_model(model, peft.LoraConfig(target_modules=["fc"], r=2)).merge_and_unload() is model


def one_level_deeper(model: Small) -> None:
    model.fc = nn.Sequential(nn.Tanh(), model.fc)


KEEP: dict[str, Callable[[Small], Any]] = {
    "parametrize": parametrized,
    "remove_parametrizations": parametrized_and_back,
    "prune": lambda model: prune.l1_unstructured(model.fc, "weight", 0.3),
    "prune.remove": pruned_for_good,
    "parametrizations.weight_norm, spectral_norm": new_norms,
    "weight_norm, spectral_norm": old_norms,
    "to": there_and_back,
    "to_empty": emptied,
    "swap_tensors": swapped,
    "set_swap_module_params_on_conversion": swapped_on_conversion,
    "load_state_dict(assign=True)": lambda model: model.load_state_dict(Small().state_dict(), assign=True),
    "__class__": of_another_class,
    "quantize_dynamic": quantized_dynamically,
    "fuse_modules_qat": fused_for_quantization_aware_training,
    "peft": low_rank,
    "peft merge_and_unload": low_rank_and_merged,
    "a layer one level deeper": one_level_deeper,
}


class TestKept:
    @pytest.mark.filterwarnings("ignore:.*([Qq]uantization|torch.qint8)")  # that it will be moved
    @pytest.mark.parametrize("at", ["output", "input"])
    @pytest.mark.parametrize("how", KEEP)
    def test_kept_hooks_work_on_and_come_off(self, model: Small, images: torch.Tensor, how: str, at: str) -> None:
        drop = inject(model, Dropout(0.5), layers=LAYERS, at=at, schedule=LinearSchedule(2))
        KEEP[how](model)
        assert find(model) == (drop,)
        find(model).step(2)
        images.requires_grad_()
        assert calls(drop, model, images) == dict.fromkeys(["conv1", *NORMS, "fc"], 1)
        assert drop.check() == find(model).check() == []
        assert [site.p for site in drop.sites] == [0.5] * 4
        assert drop.probe(images.detach()).sites["conv1"].dropped == pytest.approx(0.5, abs=0.05)
        drop.remove()
        assert places(model) == []
        state = torch.get_rng_state()
        model(images)
        assert torch.equal(torch.get_rng_state(), state), "something still draws"


def sequence() -> nn.Sequential:
    """What is fused: three modules become the first, the others identities."""
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1))


def fused(model: nn.Sequential) -> nn.Sequential:
    """In eval mode: the convolution is copied, its batch norm folded into the copy."""
    return torch.ao.quantization.fuse_modules(model.eval(), [["0", "1", "2"]], inplace=True)


@pytest.mark.filterwarnings("ignore:.*([Qq]uantization|torch.qint8|reduce_range)")
class TestMoved:
    @pytest.mark.parametrize("at", ["output", "input"])
    def test_fuse_modules_moves_the_last_ones_hooks(self, images: torch.Tensor, at: str) -> None:
        """What the last of the fused gave is what the fused one gives; its input is what it was."""
        model = sequence()
        drop = inject(model, Dropout(0.5), layers=["2", "3"], at=at, schedule=LinearSchedule(4))
        fused(model)
        assert places(model) == (["0", "3"] if at == "output" else ["0.1", "3"])
        drop.step(4)
        model.train()
        assert calls(drop, model, images) == {"2": 1, "3": 1}
        assert drop.check() == []
        assert find(model) == (drop,)
        with drop.measuring() as m:
            model(images)
        assert {name: round(site.dropped, 1) for name, site in m.sites.items()} == {"2": 0.5, "3": 0.5}
        drop.remove()
        assert places(model) == []

    def test_fuse_modules_loses_the_middle_ones_hooks(self, images: torch.Tensor) -> None:
        model = sequence()
        drop = inject(model, Dropout(0.5), layers=["1", "3"])
        fused(model)(images)
        assert "1 of 2 sites no longer have a hook: '1'" in drop.check()[0]
        assert places(model) == ["3"]

    def test_what_is_fused_in_training_loses_its_inner_hooks_when_it_is_prepared(self, images: torch.Tensor) -> None:
        model = sequence().train()
        drop = inject(model, Dropout(0.5), layers=["0", "2", "3"])
        torch.ao.quantization.fuse_modules_qat(model, [["0", "1", "2"]], inplace=True)
        model.qconfig = torch.ao.quantization.get_default_qat_qconfig("x86")
        torch.ao.quantization.prepare_qat(model, inplace=True)
        assert calls(drop, model, images) == {"0": 0, "2": 1, "3": 1}
        for handle in (drop, *find(model)):
            assert "1 of 3 sites no longer have a hook: '0'" in handle.check()[0]
        with pytest.warns(HookdropWarning, match="no longer have a hook"):
            drop.remove()
        assert places(model) == []

    @pytest.mark.parametrize("at", ["output", "input"])
    def test_fuse_modules_copies_the_firsts_hooks_and_it_is_told(self, images: torch.Tensor, at: str) -> None:
        """At the input the original moves, too, so that the input would be dropped twice."""
        model = sequence()
        drop = inject(model, Dropout(0.5), layers=["0", "3"], at=at, schedule=LinearSchedule(4))
        drop.step(2)
        fused(model)(images)
        assert places(model) == (["0.0", "3"] if at == "output" else ["0", "0.0", "3"])
        (problem,) = [text for text in drop.check() if "copies" in text]
        assert problem == (
            "'dropout': this model also has copies of its hooks, at '0'.\n"
            "  fuse_modules, PEFT's modules_to_save or a copied layer created them. This handle neither steps nor removes "
            'them: use find(model) for all hooks, or inject again with on_existing="replace", then drop.seek(2).'
        )
        with pytest.warns(HookdropWarning) as caught:
            drop.summary()
        assert problem in [str(warning.message) for warning in caught]
        find(model).seek(4)
        assert [site.p for handle in find(model) for site in handle.sites] == [0.5] * len(places(model))
        again = inject(model, Dropout(0.5), layers=["0", "3"], at=at, on_existing="replace")
        model.train()(images)
        assert again.check() == []
        again.remove()
        assert places(model) == []


class TestCopied:
    """Copies of hooks in the same model: each has a count of its own."""

    def test_pefts_modules_to_save(self, model: Small, drop: Injection, images: torch.Tensor) -> None:
        """It trains a copy of the layer, and leaves the original in its place."""
        peft = pytest.importorskip("peft")
        wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["conv1"], modules_to_save=["fc"], r=2))
        wrapped(images)
        assert "this model also has copies of its hooks, at 'fc'" in drop.check()[0]
        with pytest.warns(HookdropWarning, match="this model also has copies of its hooks"):
            drop.remove()
        assert len(places(model)) == 1
        assert eject(wrapped) == 1
        assert places(model) == []

    def test_a_copied_layer(self, model: Small, drop: Injection, images: torch.Tensor) -> None:
        model.layer2[0] = copy.deepcopy(model.layer1[0])
        model(images)
        assert "this model also has copies of its hooks, at 'layer1.0.bn1'" in drop.check()[0]
        assert [len(handle.check()) for handle in find(model)] == [1, 1]
        assert find(model.layer1).check() == []
        with pytest.warns(HookdropWarning, match="copies of its hooks"):
            find(model).remove()
        assert places(model) == []

    def test_a_copy_of_a_part_misses_nothing(self, model: Small, drop: Injection) -> None:
        part = copy.deepcopy(model.layer1)
        part(torch.randn(2, 8, 8, 8))
        (own,) = find(part)
        assert own.check() == []
        own.remove()
        part = copy.deepcopy(model.layer1)
        part[0].bn1 = nn.BatchNorm2d(8)
        part(torch.randn(2, 8, 8, 8))
        assert "1 of 2 sites no longer have a hook: 'layer1.0.bn1'" in find(part)[0].check()[0]

    def test_a_copy_of_the_model_beside_it_is_no_copy_within(self, model: Small, drop: Injection) -> None:
        """A teacher, an EMA."""
        pair = nn.ModuleList([model, copy.deepcopy(model)])
        model(torch.randn(2, 3, 8, 8))
        assert drop.check() == []
        assert len(find(pair)) == 2

    def test_two_injections_of_one_name_are_no_copies(self, model: Small, images: torch.Tensor) -> None:
        inject(model.layer1, Dropout(0.5), layers="0")
        inject(model.layer2, Dropout(0.5), layers="0")
        model(images)
        assert find(model).check() == []

    def test_a_layer_in_two_places_is_one(self, model: Small, drop: Injection, images: torch.Tensor) -> None:
        model.layer2[0] = model.layer1[0]
        assert calls(drop, model, images)["layer1.0.bn1"] == 2
        assert drop.check() == []


class TestFunctional:
    def test_functional_call_and_stacked_models(self, images: torch.Tensor) -> None:
        """torch.func on a copy on the meta device, for an ensemble."""
        models = [Small(), Small()]
        for model in models:
            inject(model, Dropout(0.5), layers="fc")
        parameters, buffers = torch.func.stack_module_state(models)
        base = copy.deepcopy(models[0]).to("meta")

        def call(p: Any, b: Any) -> Any:
            return torch.func.functional_call(base, (p, b), (images,))

        out = torch.vmap(call, randomness="different")(parameters, buffers)
        assert (out == 0).float().mean() == pytest.approx(0.5, abs=0.2)
        assert find(base).check() == []


def test_surgery_leaves_no_hook_alive(model: Small) -> None:
    """Neither the model nor a handle that was removed holds the hook of a layer that is gone."""
    drop = inject(model, Dropout(0.5), layers=LAYERS)
    hook = weakref.ref(next(hook for hook in model.fc._forward_hooks.values() if isinstance(hook, SiteHook)))
    model.fc = nn.Linear(8, 10)
    gc.collect()
    assert re.match("'dropout': 1 of 4 sites no longer have a hook", drop.check()[0])
    with pytest.warns(HookdropWarning, match="no longer have a hook"):
        drop.remove()
    del drop
    gc.collect()
    assert hook() is None


class TestDiscarded:
    """A trainer that builds a model of its own (ultralytics, FX quantization): the hooked one is gone."""

    @staticmethod
    def train(model: nn.Module, steps: int = 9) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(steps):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()

    @staticmethod
    def layers() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def test_training_another_model_is_warned_about_once(self) -> None:
        drop = inject(self.layers(), Dropout(0.5), layers="1")
        with pytest.warns(HookdropWarning, match="your trainer builds a new model") as caught:
            self.train(self.layers())
        assert len(caught) == 1
        (problem,) = drop.check()
        assert problem == str(caught[0].message)
        assert "is gone and never ran in training mode" in problem

    def test_a_model_that_was_trained_may_go(self) -> None:
        model = self.layers()
        drop = inject(model, Dropout(0.5), layers="1")
        self.train(model)
        del model
        self.train(self.layers())
        assert "is gone" in drop.check()[0]

    def test_a_model_that_lives_on_in_a_copy_is_not_discarded(self) -> None:
        model = self.layers()
        drop = inject(model, Dropout(0.5), layers="1")
        model = copy.deepcopy(model)
        self.train(model)
        assert len(find(model)) == len(drop.check()) == 1

    def test_nothing_is_said_where_no_handle_is_held_or_the_new_model_has_hooks(self) -> None:
        inject(self.layers(), Dropout(0.5), layers="1")
        self.train(self.layers())
        held = inject(self.layers(), Dropout(0.5), layers="1")
        model = self.layers()
        inject(model, Dropout(0.5), layers="1")
        self.train(model)
        assert held.check()
