"""Shared by all tests: small models, and every test from the same random state."""

from __future__ import annotations

import os
from collections.abc import Generator

import hypothesis
import pytest
import torch
from torch import nn

from hookdrop.diagnostics import watchdog

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch.set_num_threads(1)

hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=60, database=None)
hypothesis.settings.load_profile("fixed")


# PyTorch is all that hookdrop needs: without these the tests of the core run, and the others say what they lack.
OPTIONAL = ("timm", "torchvision", "transformers", "accelerate", "lightning", "peft", "rich", "IPython")


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, object, object]:
    try:
        return (yield)
    except ModuleNotFoundError as error:
        if error.name in OPTIONAL:
            pytest.skip(f"{error.name} is not installed")
        raise


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


class Block(nn.Module):
    """A residual block."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x))))))


class Small(nn.Module):
    """A small residual network with the names of a ResNet."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, channels, 3, padding=1)
        self.layer1 = nn.Sequential(Block(channels), Block(channels))
        self.layer2 = nn.Sequential(Block(channels), Block(channels))
        self.fc = nn.Linear(channels, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.layer2(self.layer1(self.conv1(x))).mean((2, 3)))


@pytest.fixture
def model() -> Small:
    return Small()


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(4, 3, 16, 16)


@pytest.fixture(autouse=True)
def watches_end_with_their_test() -> Generator[None]:
    """A handle that outlives its test must not warn, in another one, that its model is gone."""
    yield
    for state in watchdog._watched.listed():
        watchdog.forget(state)
