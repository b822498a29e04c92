"""`drop.samples`: what the model returns, sample by sample, and the modes and the RNG around the loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookdrop import Dropout, Injection, InjectionError, LinearSchedule, Masksembles, inject
from tests.support.models import toy

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def detect(m: Any, images: list[Tensor]) -> list[dict[str, Tensor]]:
    """Takes a list of images, and returns a dict for each, as torchvision's detectors do."""
    m.seen.append((m.training, torch.is_grad_enabled()))
    return [
        {"scores": row[row > 0], "boxes": torch.zeros(int((row > 0).sum()), 4)}
        for row in m.backbone(torch.stack(images))
    ]


class Writer(nn.Sequential):
    """A language model with a `generate` that samples tokens."""

    def generate(self, tokens: Tensor, length: int = 3) -> Tensor:
        for _ in range(length):
            tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], 1)
        return tokens


@pytest.fixture
def detector() -> Iterator[tuple[Any, Injection]]:
    torch.manual_seed(0)
    model = toy(detect, backbone=nn.Linear(8, 8), seen=[])
    with inject(model, Dropout(0.5), layers="backbone", at="input") as drop:
        yield model, drop


def test_outputs_are_those_of_the_model_inside_sampling(detector: tuple[Any, Injection]) -> None:
    model, drop = detector
    torch.manual_seed(1)
    found = list(drop.samples(list(X), 5))
    torch.manual_seed(1)
    model.eval()
    with drop.sampling(), torch.no_grad():
        expected = [model(list(X)) for _ in range(5)]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert len({tuple(len(image["boxes"]) for image in sample) for sample in found}) > 1


def test_leaving_the_loop_leaves_the_model_as_it_was(detector: tuple[Any, Injection]) -> None:
    """Between the samples, too, the caller's code runs with its own modes."""
    model, drop = detector
    model.train()
    for number, _ in enumerate(drop.samples(list(X), 5)):
        assert model.training
        assert torch.is_grad_enabled()
        torch.testing.assert_close(model.eval().backbone(X), X @ model.backbone.weight.T + model.backbone.bias)
        model.train()
        if number == 1:
            break
    assert model.seen == [(False, False)] * 2
    assert model.training


def test_generated_tokens_and_their_arguments() -> None:
    torch.manual_seed(0)
    model = Writer(nn.Embedding(9, 8), nn.Linear(8, 9))
    drop, tokens = inject(model, Dropout(0.5), layers="0"), torch.tensor([[1], [2]])
    found = [*drop.samples({"tokens": tokens, "length": 6}, 8, call=model.generate)]
    assert {one.shape for one in found} == {(2, 7)}
    assert any(not torch.equal(one, found[0]) for one in found)
    settings: dict[str, Any] = {"call": model.generate, "consistent": True}
    together = torch.stack([*drop.samples(tokens, 8, **settings)])
    alone = [torch.stack([*drop.samples(row, 8, **settings)]) for row in tokens.split(1)]
    assert torch.equal(together, torch.cat(alone, 1))
    assert torch.equal(together, torch.stack([*drop.samples((tokens,), 8, **settings)]))


def test_rate_and_errors() -> None:
    model = nn.Sequential(nn.Identity())
    drop = inject(model, Dropout(0.5), layers="0", schedule=LinearSchedule(10))
    with pytest.raises(InjectionError, match="sampling at rate 0"):
        next(drop.samples(X))
    (all_dropped,) = drop.samples(X, 1, p=1.0)
    assert not all_dropped.any()
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        drop.samples(X, 0)
    masks = inject(_wide := nn.Sequential(nn.Linear(8, 16)), Masksembles(n=2), layers="0")
    with pytest.raises(ValueError, match=r"2 fixed masks, so samples must (.|\n)*drop.predict\(x, samples=2\)"):
        next(masks.samples(X))
    with pytest.raises(RuntimeError):
        next(inject(_model := nn.Sequential(nn.Linear(8, 3)), Dropout(0.5), layers="0").samples(X[:, :3]))
    assert torch.equal(model.eval()(X), X)
