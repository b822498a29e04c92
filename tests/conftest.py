"""Shared fixtures. Every test starts from the same RNG state."""

import gc
import os
from collections.abc import Generator

import hypothesis
import pytest
import torch

from hookdrop.guards import progress
from tests.support.models import Small

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch.set_num_threads(1)

if not torch.cuda.is_available():
    # Triton reads this when it is imported: its kernels then run on the CPU.
    os.environ.setdefault("TRITON_INTERPRET", "1")

hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=60, database=None)
hypothesis.settings.load_profile("fixed")


# hookdrop only requires PyTorch: tests that import one of these are skipped if it is not installed.
OPTIONAL = ("timm", "torchvision", "transformers", "accelerate", "lightning", "fastai", "peft", "rich", "IPython")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark each test by the folders that it is in, for `pytest -m compile` and `pytest -m "not distributed"`."""
    marks = {line.partition(":")[0] for line in config.getini("markers")}
    for item in items:
        for folder in marks.intersection(item.path.parts):
            item.add_marker(folder)


def pytest_collection_finish() -> None:
    """Collections of garbage, which took a sixth of the time, then skip the objects of the libraries and are rarer."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(700, 10, 30)


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


@pytest.fixture
def model() -> Small:
    return Small()


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(4, 3, 16, 16)


@pytest.fixture(autouse=True)
def unwatch_injections() -> Generator[None]:
    """Prevent handles that outlive their test from warning in another test that their model is gone."""
    yield
    progress._watched.clear()
