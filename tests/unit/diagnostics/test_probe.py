"""The mistakes that people make, and what they read then; and bad input, after which nothing has changed."""

from __future__ import annotations

import pytest
import torch

from hookdrop import (
    Dropout,
    InjectionError,
    LinearSchedule,
    inject,
)
from tests.support.nets import Small


def test_probe_of_a_model_that_does_not_take_the_input(model: Small, images: torch.Tensor) -> None:
    """Everything is put back after an error too."""
    drop = inject(model, Dropout(0.1), layers="fc", schedule=LinearSchedule(10))
    model.eval()
    with pytest.raises(InjectionError, match=r"does not take this example, \(3, 3\) float32"):
        drop.probe(torch.ones(3, 3), step=5)
    assert (drop.step_count, model.training) == (0, False)
