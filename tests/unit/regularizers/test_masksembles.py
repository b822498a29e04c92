"""Masksembles: which mask each sample has, at which sites, and predictions with all masks."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from hookdrop import Masksembles, inject
from hookdrop.functional import masksembles
from hookdrop.regularizers.masksembles import fixed_masks, ones_per_mask
from tests.support.tensors import all_equal


def papers_layer(x: Tensor, masks: Tensor) -> Tensor:
    """The batch is split into one part for each mask, and the channels (axis 1) of a part are multiplied by its mask."""
    parts = torch.split(x, len(x) // len(masks))
    return torch.cat([part * mask.view(1, -1, *[1] * (x.dim() - 2)) for part, mask in zip(parts, masks, strict=True)])


class TestMasks:
    @pytest.mark.parametrize(
        ("shape", "channel_dim"),
        [((8, 16), None), ((8, 16, 5, 5), None), ((8, 16, 2, 3, 4), None), ((8, 7, 16), -1), ((8, 16, 7), 1),
         ((8, 5, 5, 16), 3)],
    )  # fmt: skip
    @pytest.mark.parametrize("n", [2, 4, 8])
    def test_matches_the_papers_layer(self, n: int, shape: tuple[int, ...], channel_dim: int | None) -> None:
        """Up to the factor C / (ones per mask), which keeps the mean. Also the gradient."""
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        masks = fixed_masks(16, n, 2.0, "5 ", device=x.device)
        factor = 16 / ones_per_mask(16, n, 2.0)
        expected = factor * papers_layer(x.movedim(channel_dim or 1, 1), masks).movedim(1, channel_dim or 1)
        found = Masksembles(n, seed=5, channel_dim=channel_dim)(x)
        torch.testing.assert_close(found, expected)
        assert torch.equal(found, masksembles(x, n, seed=5, channel_dim=channel_dim))
        weight = torch.randn_like(x)
        for ours, theirs in zip(*(torch.autograd.grad((y * weight).sum(), x) for y in (found, expected)), strict=True):
            torch.testing.assert_close(ours, theirs)


class TestSites:
    """Layers have different masks, which depend on the name of the layer only."""

    def layers(self) -> nn.Sequential:
        return nn.Sequential(nn.Identity(), nn.Identity())

    def masks(self, model: nn.Sequential) -> list[Tensor]:
        return [layer(torch.ones(4, 16)) != 0 for layer in model]

    def test_masks_differ_between_layers(self) -> None:
        model = self.layers()
        inject(model, Masksembles(), layers="*")
        first, second = self.masks(model)
        assert not torch.equal(first, second)

    def test_masks_are_restored_by_injecting_again_and_from_a_spec(self) -> None:
        model = self.layers()
        drop = inject(model, Masksembles(seed=2), layers="*")
        before = self.masks(model)
        assert all_equal(self.masks(copy.deepcopy(model)), before)
        assert all_equal(self.masks(pickle.loads(pickle.dumps(model))), before)
        spec = drop.spec
        drop.remove()
        with inject(model, Masksembles(seed=2), layers=["1"]):
            assert torch.equal(self.masks(model)[1], before[1])
        inject(model, spec)
        assert all_equal(self.masks(model), before)


def test_sampling_predicts_with_each_mask() -> None:
    """A batch repeated n times in eval mode: the k-th repetition has the k-th mask."""
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)).eval()
    drop, x = inject(model, Masksembles(n=4), layers="1"), torch.randn(5, 6)
    clean = model(x)
    with drop.sampling(), torch.no_grad():
        samples = model(x.repeat(4, 1)).unflatten(0, (4, 5))
    assert torch.equal(model(x), clean)
    hidden = model[:2](x)
    masks = fixed_masks(16, 4, 2.0, "0 1", device=x.device)
    for sample, mask in zip(samples, masks, strict=True):
        torch.testing.assert_close(sample, model[2](hidden * mask * 16 / ones_per_mask(16, 4, 2.0)))
    assert (samples.std(0) > 0).all()


def test_measuring_reports_the_dropped_fraction() -> None:
    model = nn.Sequential(nn.Identity())
    drop = inject(model, Masksembles(n=4), layers="0")
    assert drop.probe(torch.ones(8, 64)).dropped == pytest.approx(1 - ones_per_mask(64, 4, 2.0) / 64)
