"""Fixtures of the tests that compile models."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.utils import counters


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Discard compiled code and counters before and after each test."""
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()
