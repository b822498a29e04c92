"""A model to compile, a compiler without state, and measurements of compiled code."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters


class Net(nn.Module):
    """x -> weight * inner(x), where `inner` is the layer to hook."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.weight


def graphs() -> int:
    """The number of graphs that were compiled in this test."""
    return counters["stats"]["unique_graphs"]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Discard compiled code and counters before and after each test."""
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()
