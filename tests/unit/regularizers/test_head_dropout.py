"""HeadDropout against a brute-force loop over draws that are repeated until a head is kept."""

from __future__ import annotations

import math
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hookdrop import HeadDropout, LayerError, ShapeError, inject
from hookdrop.functional import head_dropout


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
    y = head_dropout(x, 0.5, heads=6)
    factor = torch.where(kept(y, 6), 6 / kept(y, 6).sum(1, keepdim=True), 0.0)
    torch.testing.assert_close(y, (x.unflatten(-1, (6, 4)) * factor[:, None, :, None]).flatten(-2))


def test_gradient_is_the_mask() -> None:
    x = torch.ones(8, 5, 24, requires_grad=True)
    y = head_dropout(x, 0.5, heads=6)
    y.sum().backward()
    torch.testing.assert_close(x.grad, y.detach())


def test_samples_of_a_map_of_windows_share_a_mask() -> None:
    """(N, H, W, C): one draw for each row of the first axis."""
    y = head_dropout(torch.ones(64, 3, 4, 8), 0.5, heads=4)
    assert torch.equal(y, y[:, :1, :1].expand_as(y))


class TestNumberOfHeads:
    def model(self, **attributes: object) -> nn.ModuleDict:
        attention = nn.ModuleDict({"o_proj": nn.Linear(12, 12)})
        for name, value in attributes.items():
            setattr(attention, name, value)
        return nn.ModuleDict({"attn": attention})

    @pytest.mark.parametrize("name", ["num_heads", "num_attention_heads", "n_heads"])
    def test_is_read_from_the_module_around_the_projection(self, name: str) -> None:
        drop = inject(self.model(**{name: 3}), HeadDropout(0.2), layers="attn.o_proj")
        assert drop.sites[0].regularizer == "HeadDropout(p=0.2, heads=3)"

    def test_is_read_from_the_config_of_query_heads(self) -> None:
        model = self.model(config=SimpleNamespace(num_attention_heads=6, num_key_value_heads=2))
        assert "heads=6" in inject(model, HeadDropout(0.2), layers="attn.o_proj").sites[0].regularizer

    def test_can_be_given(self) -> None:
        model = self.model(num_heads=3)
        assert "heads=4" in inject(model, HeadDropout(0.2, heads=4), layers="attn.o_proj").sites[0].regularizer

    @pytest.mark.parametrize("name", ["attn.q_proj", "mlp.down_proj", "attn.qkv"])
    def test_other_layers_raise_because_their_input_has_no_heads(self, name: str) -> None:
        parent, _, attribute = name.partition(".")
        model = self.model(num_heads=3)
        model[parent] = model["attn"] if parent == "attn" else nn.ModuleDict()
        model[parent][attribute] = nn.Linear(12, 12)
        with pytest.raises(LayerError, match=rf"'{name}': this is not an output projection(.|\n)*o_proj"):
            inject(model, HeadDropout(0.2), layers=name)
        inject(model, HeadDropout(0.2, heads=3), layers=name)

    def test_unknown_raises_and_asks_for_it(self) -> None:
        with pytest.raises(LayerError, match=r"do not say how many heads there are(.|\n)*heads=12"):
            inject(self.model(), HeadDropout(0.2), layers="attn.o_proj")

    def test_that_does_not_divide_the_features_raises_with_those_that_do(self) -> None:
        with pytest.raises(LayerError, match=r"12 features do not divide into 5 heads(.|\n)*: 4, 6, 3|3, 4, 6"):
            inject(self.model(num_heads=5), HeadDropout(0.2), layers="attn.o_proj")
        with pytest.raises(ShapeError, match="12 features do not divide into 5 heads"):
            head_dropout(torch.ones(2, 3, 12), 0.2, heads=5)

    def test_one_head_raises(self) -> None:
        with pytest.raises(LayerError, match="heads must be at least 2, got 1"):
            inject(self.model(num_heads=1), HeadDropout(0.2), layers="attn.o_proj")


def test_acts_at_the_input_of_the_projection() -> None:
    model = TestNumberOfHeads().model(num_heads=3)
    seen: list[torch.Tensor] = []
    inject(model, HeadDropout(0.5), layers="attn.o_proj")
    model["attn"]["o_proj"].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model["attn"]["o_proj"](torch.ones(64, 1, 12))
    assert torch.equal(kept(seen[0], 3).any(1), torch.ones(64, dtype=torch.bool))
    assert not kept(seen[0], 3).all()


def test_rate_1_raises() -> None:
    with pytest.raises(ValueError, match=r"p must lie in \[0, 1\), got 1"):
        HeadDropout(1.0)
