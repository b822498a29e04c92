"""Masksembles: its masks against the algorithm of the paper, which mask each sample has, and predictions with all."""

from __future__ import annotations

import copy
import pickle
import random
from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from hookdrop import Masksembles, inject
from hookdrop.functional import masksembles
from hookdrop.regularizers.masksembles import draw_masks, fixed_masks, ones_per_mask
from tests.support.tensors import all_equal


def papers_layer(x: Tensor, masks: Tensor) -> Tensor:
    """The batch is split into one part for each mask, and the channels (axis 1) of a part are multiplied by its mask."""
    parts = torch.split(x, len(x) // len(masks))
    return torch.cat([part * mask.view(1, -1, *[1] * (x.dim() - 2)) for part, mask in zip(parts, masks, strict=True)])


@pytest.mark.parametrize(
    ("shape", "channel_dim"),
    [((8, 16), None), ((8, 16, 5, 5), None), ((8, 16, 2, 3, 4), None), ((8, 7, 16), -1), ((8, 16, 7), 1), ((8, 5, 5, 16), 3)],
)  # fmt: skip
@pytest.mark.parametrize("n", [2, 4, 8])
def test_matches_the_papers_layer(n: int, shape: tuple[int, ...], channel_dim: int | None) -> None:
    """Up to the factor C / (ones per mask), which keeps the mean. Also the gradient."""
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    masks = fixed_masks(16, n, 2.0, "5 ", device=x.device)
    factor = 16 / ones_per_mask(16, n, 2.0)
    expected = factor * papers_layer(x.movedim(channel_dim or 1, 1), masks).movedim(1, channel_dim or 1)
    found = Masksembles(n, seed=5, channel_dim=channel_dim)(x)
    torch.testing.assert_close(found, expected)
    assert torch.equal(found, masksembles(x, n, seed=5, channel_dim=channel_dim))
    weight = torch.randn_like(x)
    gradients = [torch.autograd.grad((y * weight).sum(), x)[0] for y in (found, expected)]
    torch.testing.assert_close(*gradients)


def test_masks_depend_on_the_name_of_the_layer_only() -> None:
    def masks(model: nn.Module) -> list[Tensor]:
        return [layer(torch.ones(4, 16)) != 0 for layer in model.children()]

    model = nn.Sequential(nn.Identity(), nn.Identity())
    drop = inject(model, Masksembles(seed=2), layers="*")
    before = masks(model)
    assert not torch.equal(*before)
    assert all_equal(masks(copy.deepcopy(model)), before)
    assert all_equal(masks(pickle.loads(pickle.dumps(model))), before)
    spec = drop.spec
    drop.remove()
    with inject(model, Masksembles(seed=2), layers=["1"]):
        assert torch.equal(masks(model)[1], before[1])
    drop = inject(model, spec)
    assert all_equal(masks(model), before)
    assert drop.probe(torch.ones(4, 16)).dropped == pytest.approx(1 - ones_per_mask(16, 4, 2.0) / 16)


CPU = torch.device("cpu")
SETTINGS = [(2, 1.5), (4, 1.0), (4, 1.7), (4, 2.0), (4, 6.0), (8, 1.5), (30, 2.0), (30, 6.0)]


def papers_masks(channels: int, count: int, scale: float) -> Tensor:
    """The algorithm of the paper: random masks with m ones among m * scale positions, without the unused ones.

    As in the authors' code, the number of positions is varied, and masks are drawn again, until `channels` are left.
    """
    ones = int(channels / (scale * (1 - (1 - 1 / scale) ** count)))
    while True:
        positions = int(ones * random.uniform(0.8 * scale, 1.2 * scale))
        if positions < ones:
            continue
        masks = torch.zeros(count, positions, dtype=torch.bool)
        for mask in masks:
            mask[torch.randperm(positions)[:ones]] = True
        masks = masks[:, masks.any(0)]
        if masks.shape[1] == channels:
            return masks


def overlaps(masks: Tensor) -> tuple[int, ...]:
    """The number of channels that each pair of masks shares, sorted."""
    shared = masks.int() @ masks.int().T
    return tuple(sorted(shared[i, j].item() for i in range(len(masks)) for j in range(i)))


@pytest.mark.parametrize("channels", [10, 11, 16, 23, 64, 257])
@pytest.mark.parametrize(("count", "scale"), SETTINGS)
def test_masks_have_the_papers_number_of_ones_and_cover_all_channels(channels: int, count: int, scale: float) -> None:
    masks = fixed_masks(channels, count, scale, "0", device=CPU)
    assert masks.shape == (count, channels)
    ones = ones_per_mask(channels, count, scale)
    assert masks.sum(1).tolist() == [ones] * count
    assert masks.any(0).all()
    papers = int(channels / (scale * (1 - (1 - 1 / scale) ** count)))
    assert ones == papers or (papers * count < channels <= ones * count)
    assert scale > 1.0 or masks.all()


@pytest.mark.parametrize("scale", [1.3, 2.0, 3.0, 6.0])
def test_two_masks_share_1_in_scale_of_their_channels(scale: float) -> None:
    """The fraction that the paper's positions have on average, within 3 % for 2,000 channels."""
    ones = ones_per_mask(2000, 4, scale)
    found = overlaps(fixed_masks(2000, 4, scale, "0", device=CPU))
    assert sum(found) / len(found) / ones == pytest.approx(1 / scale, rel=0.03)


@pytest.mark.parametrize(("channels", "count", "scale"), [(12, 3, 2.0), (10, 4, 1.5), (14, 2, 3.0)])
def test_overlaps_follow_the_papers_algorithm(channels: int, count: int, scale: float) -> None:
    """A chi-squared test of 2,000 sets of masks each at 0.001, and of the channels in each mask."""
    stats = pytest.importorskip("scipy.stats")
    draws = 2000
    random.seed(1)
    torch.manual_seed(1)
    theirs = [papers_masks(channels, count, scale) for _ in range(draws)]
    ours = [torch.tensor(draw_masks(channels, count, scale, str(seed))) for seed in range(draws)]
    counts = [Counter(map(overlaps, masks)) for masks in (ours, theirs)]
    common = [key for key in {*counts[0], *counts[1]} if counts[0][key] + counts[1][key] >= 10]
    if len(common) > 1:
        assert stats.chi2_contingency([[c[key] for key in common] for c in counts]).pvalue > 0.001
    assert sum(c[key] for c in counts for key in common) > 0.95 * 2 * draws
    # Each channel is equally likely in each mask.
    used = torch.stack(ours).double().mean(0)
    expected = ones_per_mask(channels, count, scale) / channels
    assert (used - expected).abs().max() < 5 * (expected * (1 - expected) / draws) ** 0.5


def test_global_generators_are_neither_used_nor_changed() -> None:
    states = random.getstate(), torch.get_rng_state()
    first = draw_masks(16, 4, 2.0, "7")
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])
    random.seed(3)
    torch.manual_seed(3)
    assert draw_masks(16, 4, 2.0, "7") == first


def test_each_setting_changes_the_masks() -> None:
    settings = [(16, 4, 2.0, "0"), (16, 4, 2.0, "1"), (16, 4, 2.1, "0"), (17, 4, 2.0, "0"), (16, 5, 2.0, "0")]
    assert len({str([row[:16] for row in draw_masks(*each)[:4]]) for each in settings}) == len(settings)


@pytest.mark.parametrize("context", [torch.inference_mode, lambda: torch.device("meta")])
def test_masks_made_in_a_context_work_outside_and_may_be_modified(context: object) -> None:
    seed = f"in {context}"
    with context():
        fixed_masks(16, 4, 2.0, seed, device=CPU)
    x = torch.ones(4, 16, requires_grad=True)
    (x * (masks := fixed_masks(16, 4, 2.0, seed, device=CPU))).sum().backward()
    assert x.grad.sum() == 4 * ones_per_mask(16, 4, 2.0)
    before = masks.clone()
    masks.zero_()
    assert torch.equal(fixed_masks(16, 4, 2.0, seed, device=CPU), before)
