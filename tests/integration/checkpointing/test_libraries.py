"""Checkpointing in timm, transformers and PyTorch's wrapper."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

from hookdrop import Dropout, DropPath, HookdropWarning, LayerError, find, inject
from hookdrop.guards import progress
from hookdrop.guards.progress import UPDATES_BEFORE_WARNING
from tests.support.checkpointing import plain, run
from tests.support.regularizers import EVERY, SITES
from tests.support.tensors import all_equal
from tests.support.transformers_models import IDS, llama

# family: name, size, containers that are never called once checkpointing is on, what to hook instead
FAMILIES = {
    "resnet": ("resnet10t", 32, ["layer3", "layer[34]"], ["layer3.*", "layer4.0.bn2"]),
    "vit": ("test_vit", 160, ["blocks", "block[s]"], ["blocks.1", "blocks.*.mlp"]),
    "efficientnet": ("test_efficientnet", 64, ["blocks.2", "blocks.*"], ["blocks.2.0", "blocks.*.*.bn2"]),
}


def timm_model(family: str) -> tuple[Any, torch.Tensor]:
    import timm

    name, size, _, _ = FAMILIES[family]
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=3)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.0  # or a recompute updates the statistics twice
    return model, torch.randn(2, 3, size, size)


@pytest.mark.parametrize("family", FAMILIES)
class TestTimm:
    """After `model.set_grad_checkpointing()`, containers are iterated, so hooks on them do not fire."""

    def test_a_container_is_an_error_or_warns(self, family: str) -> None:
        """An error if it is named, a warning if a pattern matches it."""
        model, x = timm_model(family)
        model.set_grad_checkpointing()
        name, pattern = FAMILIES[family][2]
        with pytest.raises(LayerError, match="is not called in the forward pass: a hook on it never fires"):
            inject(model, Dropout(0.3), layers=name, example_input=x)
        assert not find(model)
        with pytest.warns(HookdropWarning, match="never called in an eval forward, so the hooks there do not fire"):
            drop = inject(model, Dropout(0.3), layers=pattern, example_input=x)
        model(x)
        drop.seek(1)
        assert "never ran" in drop.check()[0]

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
    model = llama().train()
    drop = inject(model, Dropout(0.3), layers=["**.mlp", "**.self_attn"])

    def gradients() -> list[torch.Tensor]:
        torch.manual_seed(1)
        model.zero_grad()
        model(input_ids=IDS, labels=IDS).loss.backward()
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
