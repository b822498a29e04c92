"""Capture and statistics around a training with each trainer, compared with all tensors of its forwards."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hookdrop import observe
from tests.integration.trainers import test_penalties as trainers

pytestmark = trainers.pytestmark


@pytest.mark.parametrize(
    ("fit", "layer"),
    [(trainers.fit_lightning, "0"), (trainers.fit_fastai, "0"), (trainers.fit_transformers, "model.norm")],
)
def test_one_line_around_the_training(fit: Any, layer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as stack:
        entered: list[Any] = []
        training: list[torch.Tensor] = []

        def watch(module: nn.Module) -> list[torch.Tensor]:
            """Called with a layer of the model, before the training."""
            entered.append(stack.enter_context(observe.statistics(module, module, every=1)))
            entered.append(stack.enter_context(observe.capture(module, module, what=("output", "gradient"), last=99)))
            module.register_forward_hook(lambda m, args, y: training.append(y.detach().clone()) if m.training else None)
            return [torch.zeros(1)]

        monkeypatch.setattr(trainers, "keep", watch)
        fit(tmp_path, "no penalty")
    health, seen = entered
    everything = torch.cat([x.flatten() for x in training]).double()
    assert health[""].mean == pytest.approx(everything.mean().item(), rel=1e-5, abs=1e-6)
    assert health[""].std == pytest.approx(everything.std(correction=0).item(), rel=1e-5)
    assert health[""].samples == sum(len(x) for x in training)
    assert health[""].gradient > 0
    assert health[""].update > 0
    gradients = [call.gradient for call in seen.calls("") if call.tensors["gradient"]]
    assert [one.shape for one in gradients] == [x.shape for x in training]
