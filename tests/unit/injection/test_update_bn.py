"""`update_bn`: the statistics of an average, as if it had no hooks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.optim import swa_utils
from torch.optim.swa_utils import AveragedModel

from hookdrop import Dropout, GaussianNoise, HookdropWarning, inject, update_bn
from tests.support.tensors import all_equal


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
