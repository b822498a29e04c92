"""The warning about batch-norm statistics that are collected while hooks drop, and `update_bn`, which collects those without."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import swa_utils
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from hookdrop import Dropout, GaussianNoise, HookdropWarning, LinearSchedule, find, inject, update_bn
from hookdrop.training import checkpointing
from tests.support.models import Small
from tests.support.tensors import all_equal


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


def test_training_with_gradients_does_not_look_at_its_callers(model: Small, images: Tensor, monkeypatch: Any) -> None:
    inject(model, Dropout(0.5), layers="layer1.*")
    calls: list[Any] = []
    monkeypatch.setattr(checkpointing, "collects_statistics", lambda: calls.append(1))
    model(images).sum().backward()
    assert not calls
    train_without_gradients(model, images)
    assert calls


def network(dimensions: int) -> nn.Sequential:
    conv, norm = getattr(nn, f"Conv{dimensions}d"), getattr(nn, f"BatchNorm{dimensions}d")
    return nn.Sequential(conv(3, 4, 3), norm(4, momentum=0.3), nn.ReLU(), conv(4, 4, 3), norm(4, momentum=None))


def statistics(model: nn.Module) -> list[Tensor]:
    return [buffer.clone() for buffer in model.buffers()]


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_statistics_equal_those_of_a_model_without_hooks(dimensions: int) -> None:
    """With hooks on both sides of a batch norm, for PyTorch's average and its function, to the last bit."""
    model = network(dimensions)
    clean = AveragedModel(model)
    inject(model, Dropout(0.5), layers=["0", "1"])
    inject(model, GaussianNoise(1.0), layers="2", at="input")
    hooked, wrong = AveragedModel(model), AveragedModel(model)
    batches = [torch.randn(4, 3, *[8] * dimensions) for _ in range(3)]
    swa_utils.update_bn(batches, clean)
    update_bn(batches, hooked)
    assert all_equal(statistics(hooked), statistics(clean))
    with pytest.warns(HookdropWarning):
        swa_utils.update_bn(batches, wrong)
    assert not all_equal(statistics(wrong), statistics(clean))


@pytest.mark.parametrize("training", [True, False])
def test_hooks_momenta_and_modes_are_as_before(training: bool) -> None:
    model = network(2).train(training)
    drop = inject(model, Dropout(0.5), layers="0")
    images = torch.randn(2, 3, 8, 8)
    with drop.sampling():
        update_bn([images], model)
        assert not torch.equal(model(images), model(images))
    assert (drop.p, model[1].momentum, model[4].momentum) == (0.5, 0.3, None)
    assert {module.training for module in model.modules()} == {training}


def test_other_models(images: Tensor) -> None:
    """Without hooks, without batch norm, and an argument that is no model."""
    clean, linear = network(2), nn.Sequential(nn.Flatten(), nn.Linear(192, 2))
    update_bn([images], clean)
    update_bn([images], linear)
    update_bn(iter([[images, torch.zeros(1)]]), clean, torch.device("cpu"))  # the first of several is the input
    assert clean[1].num_batches_tracked == 1
    with pytest.raises(TypeError):
        update_bn(nn.Linear(2, 2), [images])  # type: ignore[arg-type]
