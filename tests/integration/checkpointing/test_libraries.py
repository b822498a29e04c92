"""Checkpointing in timm, transformers and PyTorch's wrapper."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

from hookdrop import Dropout, HookdropWarning, LayerError, find, inject
from hookdrop.guards import progress
from hookdrop.guards.progress import UPDATES_BEFORE_WARNING
from tests.integration.checkpointing.test_checkpointing import plain, run
from tests.support.models import toy
from tests.support.regularizers import EVERY, SITES
from tests.support.tensors import all_equal
from tests.support.transformers_models import IDS, llama


def timm_model() -> tuple[Any, torch.Tensor]:
    import timm

    torch.manual_seed(0)
    model = timm.create_model("resnet10t", num_classes=3)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.0  # or a recompute updates the statistics twice
    return model, torch.randn(2, 3, 32, 32)


class TestTimm:
    """After `model.set_grad_checkpointing()`, containers are iterated, so hooks on them do not fire."""

    def test_a_container_is_an_error_or_warns(self) -> None:
        """An error if it is named, a warning if a pattern matches it."""
        model, x = timm_model()
        model.set_grad_checkpointing()
        with pytest.raises(LayerError, match="is not called in the forward pass: a hook on it never fires"):
            inject(model, Dropout(0.3), layers="layer3", example_input=x)
        assert not find(model)
        with pytest.warns(HookdropWarning, match="never called in an eval forward, so the hooks there do not fire"):
            drop = inject(model, Dropout(0.3), layers="layer[34]", example_input=x)
        model(x)
        drop.seek(1)
        assert "never ran" in drop.check()[0]

    def test_called_layers_are_regularized_exactly(self) -> None:
        model, x = timm_model()
        drop = inject(model, Dropout(0.3), layers=["layer3.*", "layer4.0.bn2"], example_input=x)
        results = []
        for on in (False, True):
            model.set_grad_checkpointing(on)
            results.append(run(model, x, plain))
        assert all_equal(*results)
        assert all(site.called for site in drop.sites)
        drop.remove()
        assert not all_equal(run(model, x, plain), results[0])


def checkpointed() -> Any:
    """Like timm: with checkpointing, containers are iterated instead of called."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return checkpoint_sequential(m.blocks, 2, x, use_reentrant=False) if m.on else m.blocks(x)

    return toy(forward, on=False, blocks=nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))


def test_checkpointing_enabled_later_warns_without_a_handle() -> None:
    """Without a schedule, a followed optimizer or a handle, the warning comes after 20 weight updates."""
    model = checkpointed()
    inject(model, Dropout(0.3), layers="block[s]", example_input=torch.ones(2, 8))
    model.on = True
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for update in range(1, UPDATES_BEFORE_WARNING + 2):
        model(torch.ones(2, 8)).sum().backward()
        warns = pytest.warns(HookdropWarning, match="'blocks' never ran, so nothing is dropped there")
        with warns if update == UPDATES_BEFORE_WARNING else nullcontext():
            optimizer.step()


def test_model_is_watched_until_all_sites_have_run() -> None:
    model = checkpointed()
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
