"""Activation checkpointing: a recompute draws the same masks as its forward, or warns."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointError,
    CheckpointPolicy,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from hookdrop import (
    Dropout,
    DropPath,
    HookdropWarning,
    Injection,
    LayerError,
    LinearSchedule,
    find,
    inject,
)
from hookdrop.guards import progress
from hookdrop.guards.progress import UPDATES_BEFORE_WARNING
from hookdrop.hooks import checkpointing
from hookdrop.hooks.checkpointing import is_recomputing
from tests.support.checkpointing import MODES, Forward, non_reentrant, plain, reentrant, run
from tests.support.regularizers import EVERY, REPRESENTATIVE, SITES, Case
from tests.support.tensors import all_equal


def nested(way: Callable[..., torch.Tensor], model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    return way(lambda x: way(model[2:], way(model[:2], x)), x)


def save_tanh(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """A policy for selective checkpointing."""
    saved = operation is torch.ops.aten.tanh.default
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def selective(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return non_reentrant(model, x, context_fn=functools.partial(create_selective_checkpoint_contexts, save_tanh))


def offloaded(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        return model(x)


WAYS: dict[str, Forward] = {
    "reentrant": reentrant,
    "non-reentrant": non_reentrant,
    "nested reentrant": functools.partial(nested, reentrant),
    "nested non-reentrant": functools.partial(nested, non_reentrant),
    "sequential reentrant": lambda model, x: checkpoint_sequential(model, 2, x, use_reentrant=True),
    "sequential non-reentrant": lambda model, x: checkpoint_sequential(model, 2, x, use_reentrant=False),
    "selective": selective,
    "offloaded": offloaded,
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # nested reentrant checkpoints
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("case", REPRESENTATIVE.values(), ids=REPRESENTATIVE)
def test_gradients_are_bit_identical_with_and_without_checkpointing(case: Case, way: Forward) -> None:
    model, x = case.model(), case.input()
    clean = run(model, x, plain)
    inject(model, case.regularizer, layers=SITES)
    expected = run(model, x, plain)
    assert not all_equal(expected, clean)
    assert all_equal(run(model, x, way), expected)


@pytest.mark.parametrize("mode", MODES)
def test_recompute_at_inputs_draws_the_same_masks(mode: Forward) -> None:
    case = EVERY["DropBlock (sparse)"]
    model, x = case.model(), case.input()
    inject(model, case.regularizer, layers=SITES, at="input")
    assert all_equal(run(model, x, mode), run(model, x, plain))


@pytest.mark.parametrize("mode", MODES)
def test_module_checkpointed_twice_in_one_forward(mode: Forward) -> None:
    model = EVERY["Dropout"].model()
    inject(model, Dropout(0.3), layers=SITES)

    def twice(way: Forward) -> list[Any]:
        return run(model, torch.randn(EVERY["Dropout"].shape), lambda model, x: way(model, way(model, x)))

    torch.manual_seed(0)
    expected = twice(plain)
    torch.manual_seed(0)
    assert all_equal(twice(mode), expected)


@pytest.mark.parametrize("mode", MODES)
def test_several_forwards_before_one_backward(mode: Forward) -> None:
    """The losses of two micro-batches are summed, and each has its own mask."""
    model = EVERY["Dropout"].model()
    inject(model, Dropout(0.3), layers=SITES)

    def both(way: Forward) -> list[torch.Tensor]:
        torch.manual_seed(1)
        inputs = [torch.randn(EVERY["Dropout"].shape).requires_grad_() for _ in range(2)]
        sum(way(model, x).square().sum() for x in inputs).backward()
        return [x.grad for x in inputs]

    assert all_equal(both(mode), both(plain))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["Dropout", "DropBlock (sparse)", "DropPath", "GaussianDropout"])
def test_under_autocast(name: str, dtype: torch.dtype, mode: Forward) -> None:
    model = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.Tanh(), nn.Conv2d(6, 6, 3, padding=1), nn.Sigmoid())
    inject(model, EVERY[name].regularizer, layers=SITES)

    def autocast(way: Forward) -> Forward:
        def forward(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype):
                return way(model, x)

        return forward

    x = EVERY[name].input()
    assert all_equal(run(model, x, autocast(mode)), run(model, x, autocast(plain)))


def test_inputs_without_requires_grad() -> None:
    """A reentrant checkpoint computes no gradients, with a warning from PyTorch; a non-reentrant one is exact."""
    case = EVERY["DropBlock (sparse)"]
    model, x = case.model(), case.input()
    inject(model, case.regularizer, layers=SITES)

    def of_weights(way: Forward) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model.zero_grad()
        way(model, x).square().sum().backward()
        return [p.grad for p in model.parameters()]

    assert all_equal(of_weights(non_reentrant), of_weights(plain))
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True"):
        assert not reentrant(model, x).requires_grad


class TestRngStateNotPreserved:
    """`preserve_rng_state=False`: the recompute has another mask and the gradients are wrong; PyTorch does not warn."""

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("name", REPRESENTATIVE)
    def test_warns_once(self, name: str, mode: Forward) -> None:
        model, x = EVERY[name].model(), EVERY[name].input()
        inject(model, EVERY[name].regularizer, layers=SITES)

        def run_unpreserved() -> None:
            with suppress(CheckpointError):  # PyTorch detects a different number of blocks
                run(model, x, functools.partial(mode, preserve_rng_state=False))

        with pytest.warns(HookdropWarning, match="remove preserve_rng_state=False") as caught:
            run_unpreserved()
        assert len(caught) == 1
        run_unpreserved()

    @pytest.mark.parametrize("mode", MODES)
    def test_warns_for_the_last_layer(self, mode: Forward) -> None:
        """There, an exception stops the recompute as soon as the mask is saved."""
        model, x = nn.Sequential(nn.Linear(8, 8), nn.Identity()), torch.ones(4, 8)
        inject(model, Dropout(0.5), layers="1")
        with pytest.warns(HookdropWarning, match="remove preserve_rng_state=False"):
            run(model, x, functools.partial(mode, preserve_rng_state=False))

    @pytest.mark.parametrize("mode", MODES)
    def test_no_warning_if_nothing_is_drawn(self, mode: Forward) -> None:
        model, x = EVERY["Dropout"].model(), EVERY["Dropout"].input()
        drop = inject(model, Dropout(0.3), layers=SITES, schedule=LinearSchedule(4))
        inject(model, torch.tanh, layers=SITES, on_existing="stack", name="no random function")
        unpreserved = functools.partial(mode, preserve_rng_state=False)
        run(model, x, unpreserved)
        drop.seek(4)
        drop.enabled = False
        run(model, x, unpreserved)
        run(model.eval(), x, unpreserved)

    def test_number_of_remembered_forwards_is_bounded(self) -> None:
        """Forwards without gradients look like checkpointed ones, but may never be recomputed."""
        model = nn.Sequential(nn.Identity())
        inject(model, Dropout(0.3), layers="0")
        (hook,) = model[0]._forward_hooks.values()
        with pytest.MonkeyPatch.context() as patch, torch.no_grad():
            patch.setattr(checkpointing, "CAPACITY", 10)
            for _ in range(30):
                model(torch.ones(2))
        assert len(hook.state.live.checkpointed) == 10
        assert not hook.state.live.checkpointed.complete


# --- checkpointing in other libraries


class Checkpointed(nn.Module):
    """Like timm: with checkpointing, containers are iterated instead of called."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.grad_checkpointing = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (
            checkpoint_sequential(self.blocks, 2, x, use_reentrant=False) if self.grad_checkpointing else self.blocks(x)
        )


# family: name, size, containers that are never called once checkpointing is on, what to hook instead
FAMILIES = {
    "resnet": ("resnet18", 32, ["layer3", "layer[34]"], ["layer3.*", "layer4.0.bn2"]),
    "vit": ("test_vit", 160, ["blocks", "block[s]"], ["blocks.1", "blocks.*.mlp"]),
    "convnext": ("test_convnext", 64, ["stages.2.blocks", "stages.*.blocks"], ["stages.2", "stages.*.blocks.0"]),
    "swin": (
        "swin_tiny_patch4_window7_224", 64, ["layers.2.blocks", "layers.[23].blocks"], ["layers.2", "layers.*.blocks.0"],
    ),
    "efficientnet": ("test_efficientnet", 64, ["blocks.2", "blocks.*"], ["blocks.2.0", "blocks.*.*.bn2"]),
}  # fmt: skip


def timm_model(family: str) -> tuple[Any, torch.Tensor]:
    import timm

    name, size, _, _ = FAMILIES[family]
    more: dict[str, Any] = {"img_size": 64, "window_size": 2, "drop_path_rate": 0.0} if family == "swin" else {}
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=3, **more)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.0  # or a recompute updates the statistics twice
    return model, torch.randn(2, 3, size, size)


@pytest.mark.parametrize("family", FAMILIES)
class TestTimm:
    """After `model.set_grad_checkpointing()`, containers are iterated, so hooks on them do not fire."""

    def test_container_named_exactly_is_an_error(self, family: str) -> None:
        model, x = timm_model(family)
        model.set_grad_checkpointing()
        with pytest.raises(LayerError, match="is not called in the forward pass: a hook on it never fires"):
            inject(model, Dropout(0.3), layers=FAMILIES[family][2][0], example_input=x)
        assert not find(model)

    def test_container_matched_by_a_pattern_warns(self, family: str) -> None:
        model, x = timm_model(family)
        model.set_grad_checkpointing()
        with pytest.warns(HookdropWarning, match="never called in an eval forward, so the hooks there do not fire"):
            drop = inject(model, Dropout(0.3), layers=FAMILIES[family][2][1], example_input=x)
        model(x)
        assert not any(site.called for site in drop.sites)
        drop.seek(1)
        assert "never ran" in drop.check()[0]

    def test_checkpointing_enabled_later_warns_after_10_steps(self, family: str) -> None:
        """After the tenth step of the schedule, or of the followed optimizer."""
        model, x = timm_model(family)
        drop = inject(model, Dropout(0.3), layers=FAMILIES[family][2][1], example_input=x)
        model.set_grad_checkpointing()
        model(x)
        drop.seek(9)
        for _ in range(8):
            drop.step()
        with pytest.warns(HookdropWarning, match="never ran, so nothing is dropped there"):
            drop.step()

    def test_called_layers_are_regularized_exactly(self, family: str) -> None:
        model, x = timm_model(family)
        regularizer = DropPath(0.3) if family == "vit" else Dropout(0.3)
        for layers in FAMILIES[family][3]:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="(.|\n)*a whole residual block")
                drop = inject(model, regularizer, layers=layers, example_input=x)
            results = []
            for on in (False, True):
                model.set_grad_checkpointing(on)
                results.append(run(model, x, plain))
            assert all_equal(*results)
            assert all(site.called for site in drop.sites)
            drop.remove()
            model.set_grad_checkpointing(False)
            assert not all_equal(run(model, x, plain), results[0])


def test_checkpointing_enabled_later_warns_without_a_handle() -> None:
    """Without a schedule, a followed optimizer or a handle, the warning comes after 20 weight updates."""
    model = Checkpointed()
    inject(model, Dropout(0.3), layers="block[s]", example_input=torch.ones(2, 8))
    model.grad_checkpointing = True
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def update() -> None:
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(UPDATES_BEFORE_WARNING - 1):
        update()
    with pytest.warns(HookdropWarning, match="'blocks' never ran, so nothing is dropped there"):
        update()
    update()


def test_model_is_watched_until_all_sites_have_run() -> None:
    model = Checkpointed()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    drop = inject(model, Dropout(0.3), layers="blocks.*")
    optimizer.step()
    assert id(drop._states[0]) in progress._watched
    model(torch.ones(2, 8))
    optimizer.step()
    assert id(drop._states[0]) not in progress._watched


@pytest.mark.parametrize("mode", [True, False])
def test_transformers_gradient_checkpointing(mode: bool) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 32}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=99, num_hidden_layers=2, use_cache=False, **sizes))
    model.train()
    drop = inject(model, Dropout(0.3), layers=["**.mlp", "**.self_attn"])
    ids = torch.randint(99, (2, 12))

    def gradients() -> list[torch.Tensor]:
        torch.manual_seed(1)
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = gradients()
    # The new name comes first, because the old one is deprecated.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": mode})
    if mode:
        model.enable_input_require_grads()
    assert all_equal(gradients(), expected)
    drop.remove()
    assert not all_equal(gradients(), expected)


def test_pytorch_checkpoint_wrapper() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    case = EVERY["DropBlock (sparse)"]
    model, x = case.model(), case.input()
    drop = inject(model, case.regularizer, layers=SITES)
    expected = run(model, x, plain)
    drop.remove()
    apply_activation_checkpointing(model, check_fn=lambda module: type(module).__name__ == "Affine")
    drop = inject(model, case.regularizer, layers=SITES)
    assert [site.name for site in drop.sites] == SITES
    assert all_equal(run(model, x, plain), expected)


class TestOtherThreads:
    """A recompute uses its own rate and does not affect forwards in other threads."""

    @staticmethod
    def recompute_while(during: Callable[[nn.Module, Injection], object]) -> tuple[list[Any], list[Any], Injection]:
        """Return the gradients of a step at rate 0.25, whose recompute runs at rate 0.5 with `during`, and the expected."""
        model, x = EVERY["Dropout"].model(), EVERY["Dropout"].input()
        drop = inject(model, Dropout(0.5), layers=SITES, schedule=LinearSchedule(4))
        drop.seek(2)
        expected = run(model, x, plain)

        def hold(module: nn.Module, args: Any, output: Any) -> None:
            if is_recomputing():
                thread = threading.Thread(target=during, args=(model, drop))
                thread.start()
                thread.join()

        handles = [module.register_forward_hook(hold, prepend=True) for module in model]
        found = run(model, x, non_reentrant, between=lambda: drop.seek(4))
        for handle in handles:
            handle.remove()
        return found, expected, drop

    def test_forward_in_another_thread_uses_the_current_rate(self) -> None:
        rates = []

        def forward(model: nn.Module, drop: Injection) -> None:
            state = torch.get_rng_state()
            with torch.no_grad(), drop.recording(last=0) as measured:
                model(EVERY["Dropout"].input())
            torch.set_rng_state(state)
            rates.append(measured.totals.asked)

        found, expected, _ = self.recompute_while(forward)
        assert all_equal(found, expected)
        assert rates
        assert rates == pytest.approx([0.5] * len(rates))

    def test_seek_in_another_thread_takes_effect_and_lasts(self) -> None:
        found, expected, drop = self.recompute_while(lambda model, drop: drop.seek(0))
        assert all_equal(found, expected)
        assert drop.p == 0.0
        assert [site.p for site in drop.sites] == [0.0, 0.0]
        model = nn.Sequential(nn.Identity())
        assert torch.equal(model(torch.ones(9)), torch.ones(9))


class TestBeforePyTorch28:
    """PyTorch 2.6 and 2.7 do not report saved-tensors hooks, so checkpoints are recognized on the call stack."""

    @pytest.fixture(autouse=True)
    def without_saved_tensors_hooks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(checkpointing.internals, "saved_tensors_hooks", None)

    def test_ordinary_forwards_are_not_remembered(self) -> None:
        model, x = EVERY["Dropout"].model(), EVERY["Dropout"].input()
        drop = inject(model, Dropout(0.3), layers=SITES)
        run(model, x, plain)
        assert not drop._states[0].live.checkpointed

    @pytest.mark.parametrize("mode", MODES)
    def test_checkpointed_forwards_are_remembered(self, mode: Forward) -> None:
        model, x = EVERY["Dropout"].model(), EVERY["Dropout"].input()
        drop = inject(model, Dropout(0.3), layers=SITES, schedule=LinearSchedule(4))
        drop.step()
        expected = run(model, x, plain)
        assert all_equal(run(model, x, mode, between=drop.step), expected)

    @pytest.mark.parametrize("mode", MODES)
    def test_warns_if_the_rng_state_is_not_preserved(self, mode: Forward) -> None:
        model, x = EVERY["Dropout"].model(), EVERY["Dropout"].input()
        inject(model, Dropout(0.3), layers=SITES)
        with pytest.warns(HookdropWarning, match="remove preserve_rng_state=False"), suppress(CheckpointError):
            run(model, x, functools.partial(mode, preserve_rng_state=False))
