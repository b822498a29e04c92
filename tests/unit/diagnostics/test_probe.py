"""`probe` with invalid inputs."""

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


def test_probe_with_an_invalid_input_restores_the_model(model: Small, images: torch.Tensor) -> None:
    """The step and the mode are restored after an error."""
    drop = inject(model, Dropout(0.1), layers="fc", schedule=LinearSchedule(10))
    model.eval()
    with pytest.raises(InjectionError, match=r"does not accept this example, \(3, 3\) float32"):
        drop.probe(torch.ones(3, 3), step=5)
    assert (drop.step_count, model.training) == (0, False)
