"""`predict(..., consistent=True)`: in sample s, every row of every batch has the masks of a batch with this row alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookdrop import (
    DSU,
    Dropout,
    DropPath,
    Injection,
    InjectionError,
    LockedDropout,
    Masksembles,
    Mixout,
    MixStyle,
    NEFTune,
    ShapeError,
    find,
    inject,
)
from tests.support.models import toy
from tests.support.regularizers import FORWARD

IMAGES = torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def segmenter(regularizer: Any = None) -> tuple[nn.Sequential, Injection]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1))
    return model, inject(model, regularizer or Dropout(0.3), layers=["0", "2"])


def outputs(drop: Injection, x: Any, n: int = 6) -> Tensor:
    return torch.stack(list(drop.samples(x, n, consistent=True)))


@pytest.mark.parametrize(
    "name", [name for name, case in FORWARD.items() if case.draws and not case.mixes and name != "Mixout"]
)
def test_a_batch_gives_what_its_rows_give_alone(name: str) -> None:
    """The tolerance is that of layers which round differently for another batch size."""
    case = FORWARD[name]
    torch.manual_seed(0)
    model, x = case.model(), case.input()
    layer = "1" if "input" in case.places else "0"
    drop = inject(model, case.regularizer, layers=layer)
    found = outputs(drop, x)
    alone = torch.cat([outputs(drop, row) for row in x.split(1)], 1)
    torch.testing.assert_close(found, alone)
    torch.testing.assert_close(outputs(drop, x[:3]), found[:, :3])
    assert (found[1:] != found[0]).any()


def test_tiles_of_different_batches_fit_together() -> None:
    """A 1x1 convolution of a constant image: all tiles, in any batch and call, must be equal."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 2, 1))
    drop = inject(model, Dropout(0.4, shared=(2, 3)), layers="1")
    batches = [torch.ones(rows, 3, 8, 8) for rows in (3, 1, 2)]
    found = drop.predict(batches, samples=8, activation=None, consistent=True)
    assert torch.equal(found.mean, drop.predict(batches, samples=8, activation=None, consistent=True).mean)
    torch.testing.assert_close(found.mean, found.mean[:1].expand_as(found.mean))
    assert found.variance.min() > 0
    different = drop.predict(batches, samples=8, activation=None)
    assert (different.mean - different.mean[:1]).abs().max() > 0.01


def test_masks_change_with_the_seed_only_and_the_rng_is_untouched() -> None:
    _, drop = segmenter()
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = outputs(drop, IMAGES)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.initial_seed() == 1
    torch.rand(3)
    assert torch.equal(outputs(drop, IMAGES), first)
    torch.manual_seed(2)
    assert not torch.equal(outputs(drop, IMAGES), first)


def test_each_call_of_a_layer_has_its_own_mask() -> None:
    twice = toy(lambda m, x: torch.stack([m.drop(x), m.drop(x)], 1), drop=nn.Identity())
    drop = inject(twice, Dropout(0.5), layers="drop")
    found = outputs(drop, torch.ones(3, 40))
    assert not torch.equal(found[:, :, 0], found[:, :, 1])


def test_attention_masks_stay_with_their_rows() -> None:
    """NEFTune scales the noise by the length of each sequence, and adds none to its padding."""
    embeds = toy(lambda m, tokens, attention_mask: m.embedding(tokens), embedding=nn.Embedding(9, 4))
    tokens, mask = torch.randint(9, (3, 5)), torch.ones(3, 5).tril(2)
    drop = inject(embeds, NEFTune(5, attention_mask=True), layers="embedding")
    found = outputs(drop, (tokens, mask))
    rows = [outputs(drop, (tokens[i : i + 1], mask[i : i + 1])) for i in range(3)]
    assert torch.equal(found, torch.cat(rows, 1))


def test_one_input_at_a_time_may_have_any_layout() -> None:
    """Time steps first: a batch of one passes, others are refused, since axis 0 is not the batch."""
    torch.manual_seed(0)
    tagger = toy(lambda m, x_NTC: m.lstm(x_NTC.transpose(0, 1))[0].transpose(0, 1), lstm=nn.LSTM(4, 6))
    drop, x = inject(tagger, LockedDropout(0.5, 0), layers="lstm"), torch.randn(3, 7, 4)
    with pytest.raises(ShapeError, match=r"'lstm' got \(7, 3, 6\): consistent=True needs one row (.|\n)*batch_size=1"):
        drop.predict(x, consistent=True)
    dropped = torch.cat([outputs(drop, row) for row in x.split(1)], 1) == 0
    assert torch.equal(dropped, dropped[:, :1, :1].expand_as(dropped))


@pytest.mark.parametrize("regularizer", [MixStyle(0.5), DSU(0.5), DropPath(0.5, mode="subset")])
def test_regularizers_that_need_several_samples_are_refused(regularizer: nn.Module) -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1))
    drop = inject(model, regularizer, layers="0")
    with pytest.raises(InjectionError, match=r"consistent=True: \w+ at '0' needs several samples"):
        drop.predict(IMAGES, consistent=True)
    assert drop.predict(IMAGES, samples=8, activation=None).mean.shape == IMAGES.shape


def test_fixed_masks_are_consistent_already() -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 1), nn.Conv2d(16, 4, 1))
    drop = inject(model, Masksembles(n=2), layers="0")
    expected = drop.predict(IMAGES, samples=2)
    assert torch.equal(drop.predict(IMAGES, samples=2, consistent=True).mean, expected.mean)


def test_recording_and_unclear_rows_are_refused() -> None:
    model, drop = segmenter()
    with drop.recording(), pytest.raises(InjectionError, match=r"consistent=True cannot be used inside recording\(\)"):
        drop.predict(IMAGES, consistent=True)
    with pytest.raises(InjectionError, match="draws for a batch of one row, but the arguments are not tensors"):
        drop.predict(({"x": IMAGES},), consistent=True)
    assert torch.equal(model.eval()(IMAGES), model(IMAGES))


def test_error_restores_the_hooks() -> None:
    model, drop = segmenter()
    with pytest.raises(RuntimeError):
        drop.predict(torch.ones(2, 5, 8, 8), consistent=True)
    assert model.training
    assert find(model).probe(IMAGES).dropped > 0.2
    assert torch.equal(model.eval()(IMAGES), model(IMAGES))


def test_compiled_model_runs_uncompiled() -> None:
    model, drop = segmenter()
    model.eval()
    expected = outputs(drop, IMAGES)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    compiled(IMAGES)
    assert torch.equal(outputs(find(compiled), IMAGES), expected)
    torch.compiler.reset()


@pytest.mark.parametrize("regularizer", [Dropout(0.3), Mixout(0.3)])
def test_a_sample_has_the_same_regularized_weights_in_every_batch(regularizer: nn.Module) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(5, 8)
    drop = inject(model, regularizer, layers="0", at="parameters", tensor="weight")
    nn.init.normal_(model[0].weight)
    found = outputs(drop, x)
    torch.testing.assert_close(outputs(drop, x[1:3]), found[:, 1:3])
    assert (found[1:] != found[0]).any()
