"""Newer regularizers on real models: training, copies, config and removal."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hookdrop import LinearSchedule, from_config, inject, parse
from tests.support.tensors import all_equal


def resnet() -> tuple[nn.Module, Tensor]:
    torchvision = pytest.importorskip("torchvision")
    return torchvision.models.resnet18(num_classes=5), torch.randn(4, 3, 32, 32)


def transformer() -> tuple[nn.Module, Tensor]:
    timm = pytest.importorskip("timm")
    settings = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}
    return timm.create_model("vit_tiny_patch16_224", **settings), torch.randn(4, 3, 32, 32)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])


def recurrent() -> tuple[nn.Module, Tensor]:
    return Tagger(), torch.randn(4, 7, 6)


Make = Callable[[], tuple[nn.Module, Tensor]]


GRADS = ["ClipActivationGrad(max_norm=0.01)", "ClipActivationGrad(max_norm=0.01, per_sample=True)",
         "ClampActivationGrad(max=0.0)", "ScaleActivationGrad(-1.0)", "NoiseActivationGrad(0.1)"]  # fmt: skip


CASES: list[tuple[str, Make, str]] = [
    *((text, resnet, "layer2") for text in ("UniformNoise(0.3)", "Cutout(2)", "MixStyle(1.0)", *GRADS)),
    *((text, transformer, "blocks.0") for text in ("UniformNoise(0.3)", "TokenDropout(0.5)", "LockedDropout(0.5)", *GRADS)),
    *((text, recurrent, "lstm") for text in ("UniformNoise(0.3)", "TokenDropout(0.5, prefix=0)", "LockedDropout(0.5)", *GRADS)),
]  # fmt: skip


@pytest.mark.parametrize(("text", "make", "layer"), CASES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_train_copy_pickle_and_remove(text: str, make: Make, layer: str) -> None:
    """Training differs from a clean model, copies train identically, and removal restores clean training."""
    model, x = make()
    state = copy.deepcopy(model.state_dict())

    def trained(model: nn.Module) -> list[Tensor]:
        model.load_state_dict(state)
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        torch.manual_seed(7)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    clean = trained(model)
    regularizer = parse(text)
    schedule = None if regularizer.rate is None else LinearSchedule(2)
    drop = inject(model, text, layers=layer, schedule=schedule, example_input=x)
    drop.seek(2)
    regularized = trained(model)
    assert not all_equal(regularized, clean)
    assert all(p.isfinite().all() for p in regularized)
    assert all_equal(trained(copy.deepcopy(model)), regularized)
    assert all_equal(trained(pickle.loads(pickle.dumps(model))), regularized)
    with drop.disabled():
        assert all_equal(trained(model), clean)
    assert drop.probe(x).eval_identical
    config = drop.config
    drop.remove()
    assert all_equal(trained(model), clean)
    from_config(model, config).seek(2)
    assert all_equal(trained(model), regularized)
