"""HeadDropout against a brute-force loop over draws that are repeated until a head is kept."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from hookdrop import DropPath, HeadDropout, LayerError, ShapeError, inject, plan
from hookdrop.functional import head_dropout
from hookdrop.regularizers.samples import SampleRows
from tests.support.models import toy


def kept(y: torch.Tensor, heads: int) -> torch.Tensor:
    """Which heads of each sample are kept."""
    return (y.unflatten(-1, (heads, -1)) != 0).all(-1).all(1)


@pytest.mark.parametrize(("p", "heads"), [(0.1, 12), (0.5, 2), (0.5, 4), (0.9, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks_have_the_distribution_of_repeated_draws(p: float, heads: int, dtype: torch.dtype) -> None:
    """P(mask) = p^dropped (1 - p)^kept / (1 - p^H) for all masks, each within 5 standard errors of 100,000 draws."""
    found = kept(HeadDropout(p, heads)(torch.ones(100_000, 1, 2 * heads, dtype=dtype)), heads)
    if heads > 4:
        expected = (p - p**heads) / (1 - p**heads)
        assert abs((~found).double().mean() - expected) < 5 * math.sqrt(p * (1 - p) / 1e5 / heads)
        return
    for mask in product([False, True], repeat=heads):
        chance = p ** mask.count(False) * (1 - p) ** mask.count(True) / (1 - p**heads) if any(mask) else 0.0
        share = (found == torch.tensor(mask)).all(1).double().mean().item()
        assert abs(share - chance) <= 5 * math.sqrt(chance * (1 - chance) / 1e5)


def test_kept_heads_are_scaled_by_the_number_of_heads_over_the_kept() -> None:
    x = torch.rand(64, 5, 24) + 1
    y = head_dropout(x.unflatten(1, (1, 5)), 0.5, heads=6).flatten(1, 2)  # also of a map of windows (N, H, W, C)
    factor = torch.where(kept(y, 6), 6 / kept(y, 6).sum(1, keepdim=True), 0.0)
    torch.testing.assert_close(y, (x.unflatten(-1, (6, 4)) * factor[:, None, :, None]).flatten(-2))


def test_interleaved_heads() -> None:
    y = head_dropout(torch.ones(64, 2, 12), 0.5, heads=3, interleaved=True)
    assert torch.equal(y, y[..., :3].repeat(1, 1, 4))
    assert {tuple(row) for row in (y[:, 0, :3] > 0).tolist()} > {(True, False, True)}


class TestSamples:
    """Where each sample has several rows, or the batch is on another axis."""

    @pytest.mark.parametrize("cls", [HeadDropout, DropPath])
    @pytest.mark.parametrize(
        ("rows", "by_sample"),
        [
            (SampleRows(0, False, 4), lambda y: y.unflatten(0, (4, 6))),
            (SampleRows(0, True, 4), lambda y: y.unflatten(0, (6, 4)).transpose(0, 1)),
            (SampleRows(1), lambda y: y.transpose(0, 1)),
        ],
        ids=["consecutive", "interleaved", "axis 1"],
    )
    def test_each_has_one_draw(self, rows: SampleRows, by_sample: Any, cls: Any) -> None:
        drop = cls(0.5, samples=("" if rows.count else None, rows.axis, rows.interleaved))
        drop.heads = 2
        torch.manual_seed(0)
        y = by_sample(drop.regularize(torch.ones(24, 24, 8), 0.5, samples=rows if rows.count else None))
        y = y.flatten(1, -2)
        assert torch.equal(y, y[:, :1].expand_as(y))
        assert len(y[:, 0].unique(dim=0)) > 1

    def test_rows_that_do_not_divide_raise(self) -> None:
        with pytest.raises(ValueError):
            DropPath(0.5, "batch", samples=("a", 0, False))
        with pytest.raises(ShapeError):
            DropPath(0.5, samples=("", 0, False)).regularize(torch.ones(5, 2), 0.5, samples=SampleRows(0, False, 2))


def attend(m: Any, x: torch.Tensor) -> torch.Tensor:
    q, k, v = m.qkv(x).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
    return m.o_proj(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def attention() -> Any:
    return toy(attend, qkv=nn.Linear(12, 36), o_proj=nn.Linear(12, 12))


EXAMPLE = torch.ones(2, 5, 12)


class TestNumberOfHeads:
    @pytest.mark.parametrize(("heads", "example"), [(None, EXAMPLE), (3, None), (3, EXAMPLE)])
    def test_is_given_or_found_by_running_the_model(self, heads: Any, example: Any) -> None:
        drop = inject(attention(), HeadDropout(0.2, heads), layers="o_proj", example_input=example)
        assert drop.sites[0].regularizer == "HeadDropout(p=0.2, heads=3)"

    @pytest.mark.parametrize("layer", ["qkv", "o_proj"])
    def test_acts_at_the_input_for_both_places(self, layer: str) -> None:
        for at in ("input", "output"):
            assert plan(attention(), HeadDropout(0.2, heads=3), layers=layer, at=at).sites[0].at == "input"

    @pytest.mark.parametrize(
        ("regularizer", "layer", "example"),
        [
            (HeadDropout(0.2, heads=4), "o_proj", EXAMPLE),  # the model has 3
            (HeadDropout(0.2, heads=3, interleaved=True), "o_proj", EXAMPLE),
            (HeadDropout(0.2), "qkv", EXAMPLE),  # whose input has no heads
            (HeadDropout(0.2, heads=3), "qkv", EXAMPLE),
            (HeadDropout(0.2), "o_proj", None),
        ],
        ids=str,
    )
    def test_that_differs_from_the_model_or_is_unknown_raises(self, regularizer: Any, layer: str, example: Any) -> None:
        with pytest.raises(LayerError):
            inject(attention(), regularizer, layers=layer, example_input=example)


def test_acts_at_the_input_of_the_projection() -> None:
    model = attention()
    seen: list[torch.Tensor] = []
    inject(model, HeadDropout(0.5, heads=3), layers="o_proj")
    model.o_proj.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model.o_proj(torch.ones(64, 1, 12))
    assert torch.equal(kept(seen[0], 3).any(1), torch.ones(64, dtype=torch.bool))
    assert not kept(seen[0], 3).all()
