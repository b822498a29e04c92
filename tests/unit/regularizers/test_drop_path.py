"""DropPath on a subset of the batch, against DropPath by rows with the same samples; LayerDrop."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from hookdrop import DropPath, HookdropWarning, InjectionError, LayerDrop, LayerError, ShapeError, inject, plan
from hookdrop.functional import drop_path, layer_drop
from tests.support.models import toy


class Attention(nn.Module):
    """A branch that receives further arguments and returns several values; it records its batch sizes in training."""

    def __init__(self, weights: bool = False) -> None:
        super().__init__()
        self.linear, self.weights, self.sizes = nn.Linear(4, 4), weights, []

    def forward(
        self, x: torch.Tensor, mask: Any = None, rope: Any = None, bias: Any = None, past_key_values: Any = None
    ) -> Any:
        if self.training:
            self.sizes.append(len(x))
        y = self.linear(x)
        if mask is not None:
            y = y * mask
        if rope is not None:
            y = y + rope[0]
        if bias is not None:  # (H, 1, L), one for each head
            scores = (y @ y.mT).unsqueeze(1) + bias
            y = (scores.softmax(-1) @ y.unsqueeze(1)).sum(1)
        return y, y.mean(-1) if self.weights else mask


class Block(nn.Module):
    def __init__(self, weights: bool = False) -> None:
        super().__init__()
        self.attn = Attention(weights)

    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return x + self.attn(x, **kwargs)[0]


def shared(m: Any, x: torch.Tensor, mask: torch.Tensor, bias: Any = None) -> Any:
    """Attention whose first layer returns its bias plus the mask, for later layers: T5 in transformers 4."""
    bias = torch.ones(1, 5, 5) + mask if bias is None else bias
    return (m.q(x) @ x.mT + bias).softmax(-1) @ m.v(x), bias


def decode(m: Any, x: torch.Tensor) -> torch.Tensor:
    mask, bias = torch.full((len(x), 5, 5), -1e9).triu(1), None
    for layer in m.layers:
        y, bias = layer(x, mask, bias)
        x = x + y
    return x


X = torch.randn(8, 5, 4, generator=torch.Generator().manual_seed(0))


def dropped(model: nn.Module, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """Which samples skipped the branch."""
    return (model(x, **kwargs) == x).flatten(1).all(1)


class TestSubset:
    @pytest.mark.parametrize(("p", "kept"), [(0.5, 4), (0.3, 5), (0.99, 1), (0.01, 7)])
    def test_the_branch_runs_on_the_kept_samples_only(self, p: float, kept: int) -> None:
        model = Block()
        inject(model, DropPath(p, mode="subset"), layers="attn")
        assert int(dropped(model, X).sum()) == 8 - kept
        assert model.attn.sizes == [kept]

    @pytest.mark.parametrize(("samples", "p", "kept"), [(10, 0.8, 2), (20, 0.9, 2), (100, 0.55, 45), (100, 0.9, 10)])
    def test_rounding_of_1_minus_p_drops_no_further_sample(self, samples: int, p: float, kept: int) -> None:
        assert int(drop_path(torch.ones(samples, 1), p, mode="subset").count_nonzero()) == kept
        in_graph = DropPath(p, mode="subset").regularize(torch.ones(samples, 1), torch.tensor(p, dtype=torch.float64))
        assert int(in_graph.count_nonzero()) == kept

    def test_outputs_that_are_the_same_for_any_samples_are_kept(self) -> None:
        model = nn.Sequential(toy(lambda m, x: (m.fc(x), torch.ones(1, 2, 5, 5), torch.ones(4, 2)), fc=nn.Linear(4, 4)))
        inject(model, DropPath(0.5, mode="subset"), layers="0")
        assert [y.shape for y in model(X)] == [(8, 5, 4), (1, 2, 5, 5), (4, 2)]

    def test_outputs_that_depend_on_the_samples_are_those_of_all_samples(self) -> None:
        model = Block(weights=True)
        inject(model, DropPath(0.5, mode="subset"), layers="attn")
        with pytest.warns(HookdropWarning, match="also returns"):
            y, weights = model.attn(X)
        assert model.attn.sizes == [8]
        assert int((y == 0).flatten(1).all(1).sum()) == 4
        assert torch.equal(weights, model.attn.linear(X).mean(-1))

    def test_an_argument_that_is_returned_has_all_rows(self) -> None:
        model, mask = Block(), torch.rand(8, 1, 4)
        inject(model, DropPath(0.5, mode="subset"), layers="attn")
        assert model.attn(X, mask=mask)[1] is mask

    @pytest.mark.filterwarnings("ignore:.*also returns")
    def test_no_token_sees_a_later_one_through_a_mask_that_layers_share(self) -> None:
        layers = nn.ModuleList(toy(shared, q=nn.Linear(4, 4), v=nn.Linear(4, 4)) for _ in range(4))
        model = toy(decode, layers=layers)
        inject(model, DropPath(0.5, mode="subset"), layers="layers.*")
        later = X.clone()
        later[:, -1] += 1.0
        for seed in range(20):
            outputs = []
            for x in (X, later):
                torch.manual_seed(seed)
                outputs.append(model(x)[:, :-1])
            assert torch.equal(*outputs)

    @pytest.mark.parametrize("samples", [2, 3, 4, 5, 8])
    @pytest.mark.parametrize(
        "table",
        [{"mask": torch.rand(5, 4)}, {"bias": torch.rand(4, 1, 5)}, {"rope": (torch.rand(5, 4),)}],
        ids=["mask", "heads", "rope"],
    )
    def test_tables_with_as_many_rows_as_samples_are_passed_on(self, samples: int, table: dict[str, Any]) -> None:
        model, x = Block(), X[:samples]
        clean = model(x, **table)
        inject(model, DropPath(0.5, mode="subset", scale=False), layers="attn")
        y = model(x, **table)
        same = (y - clean).flatten(1).abs().amax(1) < 1e-6
        assert torch.equal(same, (y != x).flatten(1).any(1))
        assert int(same.sum()) == max(samples // 2, 1)

    def test_output_and_gradients_equal_those_of_row_mode_with_the_same_samples(self) -> None:
        model, twin = Block(), Block()
        twin.load_state_dict(model.state_dict())
        inject(model, DropPath(0.5, mode="subset"), layers="attn")
        mask, rope = torch.rand(8, 1, 4), (torch.randn(1, 5, 4),)
        y = model(X, mask=mask, rope=rope)
        kept = (y != X).flatten(1).any(1)
        branch = twin.attn(X, mask=mask, rope=rope)[0] * kept[:, None, None] * 2.0
        torch.testing.assert_close(y, X + branch)
        y.square().sum().backward()
        (X + branch).square().sum().backward()
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)

    def test_each_sample_is_dropped_equally_often(self) -> None:
        """Within 5 standard errors over 2,000 forwards."""
        model = Block()
        inject(model, DropPath(0.5, mode="subset"), layers="attn")
        share = torch.stack([dropped(model, X) for _ in range(2000)]).double().mean(0)
        assert (share - 0.5).abs().amax() < 5 * (0.25 / 2000) ** 0.5

    def test_plan_shows_the_actual_rate_of_each_site(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        shown = plan(model, DropPath(0.5, mode="subset"), layers="*", p_scale="depth", example_input=X)
        assert [site.reading for site in shown.sites] == ["N=8, runs on 6 (p=0.25)", "N=8, runs on 4 (p=0.5)"]

    def test_a_cache_of_keys_raises(self) -> None:
        inject(model := Block(), DropPath(0.5, mode="subset"), layers="attn")
        with pytest.raises(InjectionError):
            model(X, past_key_values=object())

    def test_an_error_in_the_branch_leaves_nothing_behind(self) -> None:
        model = Block()
        drop = inject(model, DropPath(0.5, mode="subset"), layers="attn")
        with pytest.raises(RuntimeError):
            model(torch.randn(8, 5, 3))
        drop.enabled = False
        assert not dropped(model, X).any()

    def test_the_first_call_under_autocast_has_gradients(self) -> None:
        model = Block()
        inject(model, DropPath(0.5, mode="subset"), layers="attn")
        with torch.autocast("cpu", torch.bfloat16):
            model(X).sum().backward()
        assert model.attn.linear.weight.grad.abs().sum() > 0


def test_returns_the_input_with_probability_p_for_the_whole_batch() -> None:
    """Within 4 standard errors over 4,000 draws; no value in between."""
    x, fx = torch.randn(3, 4), torch.randn(3, 4)
    skipped = [torch.equal(layer_drop(fx, x, 0.3), x) for _ in range(4000)]
    kept = [torch.equal(layer_drop(fx, x, 0.3), fx) for _ in range(200)]
    assert abs(sum(skipped) / 4000 - 0.3) < 4 * math.sqrt(0.3 * 0.7 / 4000)
    assert 0 < sum(kept) < 200


def test_the_first_tensor_of_the_output_is_replaced_by_the_input_which_may_be_a_keyword_argument() -> None:
    layer, x = toy(lambda m, hidden, scale=None: (m.fc(hidden), 1, m.fc(hidden)), fc=nn.Linear(4, 4)), torch.randn(2, 4)
    inject(model := nn.ModuleList([layer]), LayerDrop(0.5), layers="0")
    outputs = [model[0](scale=torch.ones(2, 4), hidden=x) for _ in range(30)]
    assert all(one == 1 and torch.equal(second, layer.fc(x)) for _, one, second in outputs)
    assert all(torch.equal(first, x) or torch.equal(first, second) for first, _, second in outputs)
    assert {torch.equal(first, x) for first, _, _ in outputs} == {True, False}
    with pytest.raises(InjectionError):
        inject(nn.Sequential(nn.Linear(4, 4)), LayerDrop(0.5), layers="0", at="input")
    with pytest.raises(InjectionError):
        LayerDrop(0.5)(torch.ones(2))
    with pytest.raises(ShapeError):
        layer_drop(torch.ones(2, 6), torch.ones(2, 4), 0.5)


def test_gradients_of_a_skipped_layer_are_zero_not_missing() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4, requires_grad=True)
    drop = inject(model, LayerDrop(0.5), layers="0")
    drop.target_p = 0.999
    torch.manual_seed(0)
    model(x).backward(g := torch.randn(2, 4))
    assert torch.equal(x.grad, g)
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in model.parameters())


def test_a_residual_branch_is_refused() -> None:
    blocks = [toy(lambda m, x: x + m.mlp(x), mlp=nn.Linear(4, 4)) for _ in range(2)]
    model = nn.Sequential(*blocks)
    with pytest.raises(LayerError, match="'0.mlp': this is a residual branch"):
        inject(model, LayerDrop(0.5), layers="*.mlp", example_input=torch.ones(2, 4))
    inject(model, LayerDrop(0.5), layers="*", example_input=torch.ones(2, 4))
