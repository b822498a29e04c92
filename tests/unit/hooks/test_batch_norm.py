"""The warning about batch-norm statistics that are collected while hooks drop."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import swa_utils
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from hookdrop import Dropout, HookdropWarning, LinearSchedule, find, inject
from hookdrop.hooks import hook
from tests.support.models import Small


@torch.no_grad()
def update_bn_stats(model: nn.Module, batches: Iterable[Tensor]) -> None:
    """A function as in fvcore."""
    model.train()
    for batch in batches:
        model(batch)


@pytest.mark.parametrize(
    "collect",
    [lambda model, batches: swa_utils.update_bn(batches, model), update_bn_stats],
    ids=["torch.optim.swa_utils.update_bn", "a function of another library"],
)
@pytest.mark.parametrize("average", [AveragedModel, lambda model: model], ids=["average", "model"])
@pytest.mark.parametrize("at", ["output", "input"])
def test_collecting_statistics_while_dropping_warns_once(
    model: Small, images: Tensor, collect: Callable[..., None], average: Callable[..., nn.Module], at: str
) -> None:
    inject(model, Dropout(0.5), layers="layer1.*.bn1", at=at)
    averaged = average(model)
    with pytest.warns(HookdropWarning, match="statistics are collected") as caught:
        collect(averaged, [images] * 2)
    assert len(caught) == 1
    collect(averaged, [images])


def train_with_reentrant_checkpoints(model: Small, images: Tensor) -> None:
    checkpoint(model, images.requires_grad_(), use_reentrant=True).sum().backward()


def train_without_gradients(model: Small, images: Tensor) -> None:
    """As a momentum encoder."""
    with torch.no_grad():
        model(images)


def collect_at_rate_0(model: Small, images: Tensor) -> None:
    find(model).remove()
    inject(model, Dropout(0.5), layers="layer1.*", schedule=LinearSchedule(10))
    swa_utils.update_bn([images], model)


def collect_while_disabled(model: Small, images: Tensor) -> None:
    with find(model).disabled():
        swa_utils.update_bn([images], model)


def sample(model: Small, images: Tensor) -> None:
    model.eval()
    with torch.no_grad(), find(model).sampling():
        model(images)


@pytest.mark.parametrize(
    "use",
    [train_with_reentrant_checkpoints, train_without_gradients, collect_at_rate_0, collect_while_disabled, sample],
)
def test_no_warning(model: Small, images: Tensor, use: Callable[[Small, Tensor], None]) -> None:
    inject(model, Dropout(0.5), layers="layer1.*")
    use(model, images)


def test_a_forward_without_gradients_warns_once_the_model_is_trained(model: Small, images: Tensor) -> None:
    """A reference pass of DPO or a rollout; the recompute of a reentrant checkpoint, sampling and `probe` are none."""
    drop = inject(model, Dropout(0.5), layers="layer1.*")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)  # does not increment the version of the weights
    train_without_gradients(model, images)
    for _ in range(2):
        train_with_reentrant_checkpoints(model, images)
        optimizer.step()
    with drop.disabled():
        train_without_gradients(model, images)
    drop.disabled()(train_without_gradients)(model, images)
    sample(model.train(), images)
    model.train()
    drop.probe(images)
    with pytest.warns(HookdropWarning, match="drops in a forward in training mode without gradients") as caught:
        train_without_gradients(model, images)
    assert len(caught) == 1
    train_without_gradients(model, images)


def test_training_with_gradients_does_not_look_at_its_callers(
    model: Small, images: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    inject(model, Dropout(0.5), layers="layer1.*")
    calls: list[Any] = []
    monkeypatch.setattr(hook, "collects_statistics", lambda: calls.append(1))
    model(images).sum().backward()
    assert not calls
    train_without_gradients(model, images)
    assert calls
