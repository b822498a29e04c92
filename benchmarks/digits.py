"""The task: a narrow timm ResNet learns scikit-learn's digits from 100 images."""

from __future__ import annotations

import functools
from typing import NamedTuple

import timm
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate
from torch.utils.data import DataLoader, TensorDataset

SIZE = 32
CLASSES = 10
TRAIN_PER_CLASS = 10
TEST_IMAGES = 797
BATCH = 20
TRAIN_IMAGES = CLASSES * TRAIN_PER_CLASS
STEPS_PER_EPOCH = TRAIN_IMAGES // BATCH
MODEL = {"name": "resnet10t", "channels": (16, 24, 32, 48), "stem_width": 8, "output_stride": 8}
OPTIMIZER = {"lr": 0.01, "weight_decay": 0.05}


class Digits(NamedTuple):
    """All images, and which of them are for training and which for testing."""

    x_N1HW: Tensor
    y_N: Tensor
    pool: Tensor
    """Indices of the images that training sets are drawn from."""
    test: Tensor


@functools.cache
def load() -> Digits:
    """The 8x8 images enlarged to 32x32, between -1 and 1; the test set is the same for every seed."""
    data = load_digits()
    x_N1HW = torch.tensor(data.images, dtype=torch.float32)[:, None] / 8 - 1
    x_N1HW = interpolate(x_N1HW, size=(SIZE, SIZE), mode="bilinear", align_corners=False)
    split = train_test_split(torch.arange(len(x_N1HW)), test_size=TEST_IMAGES, stratify=data.target, random_state=0)
    return Digits(x_N1HW, torch.tensor(data.target), *split)


def test_images() -> Tensor:
    """The images of the test set, (797, 1, 32, 32)."""
    task = load()
    return task.x_N1HW[task.test]


def training_set(seed: int) -> Tensor:
    """Indices of ten images of each class."""
    task = load()
    generator = torch.Generator().manual_seed(seed)
    shuffled = task.pool[torch.randperm(len(task.pool), generator=generator)]
    of_class = [shuffled[task.y_N[shuffled] == label][:TRAIN_PER_CLASS] for label in range(CLASSES)]
    return torch.cat(of_class)


def make_loader(seed: int) -> DataLoader[tuple[Tensor, ...]]:
    """Batches of indices, in an order that the masks' draws cannot change.

    A shuffling loader without a generator of its own draws from the global one, as regularizers do: runs with
    and without a regularizer would see other batches.
    """
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(TensorDataset(training_set(seed)), batch_size=BATCH, shuffle=True, generator=generator)


def make_model() -> nn.Module:
    """The model, initialised from the global generator; the maps of its last two stages are 8x8."""
    model = timm.create_model(MODEL["name"], in_chans=1, num_classes=CLASSES, **_narrowed())
    # As usual for small images: with the pooling the last maps would be 4x4.
    model.maxpool = nn.Identity()
    return model


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer."""
    return torch.optim.AdamW(model.parameters(), **OPTIMIZER)


def evaluate(model: nn.Module) -> tuple[float, float]:
    """Accuracy in per cent and mean negative log-likelihood on the test set; the model is left in eval mode."""
    task = load()
    labels = task.y_N[task.test]
    model.eval()
    with torch.no_grad():
        logits = model(test_images())
    hits = (logits.argmax(1) == labels).double().mean()
    return 100 * hits.item(), cross_entropy(logits, labels).item()


def _narrowed() -> dict[str, object]:
    return {key: value for key, value in MODEL.items() if key != "name"}
