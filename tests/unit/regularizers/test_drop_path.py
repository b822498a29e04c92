"""DropPath on a subset of the batch against DropPath by rows; LayerDrop; HeadDropout against a brute-force loop."""

import copy
import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hookdrop
from hookdrop import DropPath, HeadDropout, InjectionError, LayerDrop, LayerError, ShapeError, inject, plan
from hookdrop.functional import drop_path, head_dropout, layer_drop
from hookdrop.regularizers.samples import SampleRows
from tests.support.models import toy

pytestmark = pytest.mark.filterwarnings("ignore:.*saves no time there")


class Attention(nn.Module):
    """A branch that receives further arguments and returns several values; it records its batch sizes in training."""

    def __init__(self, weights: bool = False) -> None:
        super().__init__()
        self.linear, self.weights, self.sizes = nn.Linear(4, 4), weights, []

    def forward(self, x: torch.Tensor, mask: Any = None, rope: Any = None, bias: Any = None, **others: Any) -> Any:
        if self.training:
            self.sizes.append(len(x))
        y = self.linear(x)
        if mask is not None:
            y = y * mask
        if rope is not None:
            y = y + rope[0]
        if "gates" in others:  # a number for each sample
            y = y * others["gates"][:, None, None]
        if bias is not None:  # (H, 1, L), one for each head
            scores = (y @ y.mT).unsqueeze(1) + bias
            y = (scores.softmax(-1) @ y.unsqueeze(1)).sum(1)
        return y, y.mean(-1) if self.weights else mask


def block(weights: bool = False) -> Any:
    return toy(lambda m, x, **kwargs: x + m.attn(x, **kwargs)[0], attn=Attention(weights))


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


def on_subset(model: Any = None, layers: str = "attn", p: float = 0.5, **settings: Any) -> Any:
    """A model, by default a block, whose branch runs on a subset of the batch."""
    model = block() if model is None else model
    inject(model, DropPath(p, mode="subset", **settings), layers=layers)
    return model


def dropped(model: nn.Module, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """Which samples skipped the branch."""
    return (model(x, **kwargs) == x).flatten(1).all(1)


class TestSubset:
    @pytest.mark.parametrize(("samples", "p"), [(8, 0.5), (8, 0.3), (8, 0.01), (8, 0.99), (1, 0.4), (2, 0.02)])
    def test_the_branch_runs_on_the_kept_samples_only_whose_mean_number_is_exact(self, samples: int, p: float) -> None:
        """Within 5 standard errors over 500 forwards; of no samples, the branch runs on one."""
        model, x = on_subset(p=p), X[:samples]
        kept = [samples - int(dropped(model, x).sum()) for _ in range(500)]
        assert model.attn.sizes == [max(one, 1) for one in kept]
        mean = samples * (1 - p)
        assert {*kept} <= {math.floor(mean), math.ceil(mean)}
        assert abs(sum(kept) / 500 - mean) <= 5 * (mean % 1 * (1 - mean % 1) / 500) ** 0.5

    @pytest.mark.parametrize(("samples", "p", "kept"), [(10, 0.8, 2), (20, 0.9, 2), (100, 0.55, 45), (100, 0.9, 10)])
    def test_rounding_of_1_minus_p_drops_no_further_sample(self, samples: int, p: float, kept: int) -> None:
        assert int(drop_path(torch.ones(samples, 1), p, mode="subset").count_nonzero()) == kept
        in_graph = DropPath(p, mode="subset").regularize(torch.ones(samples, 1), torch.tensor(p, dtype=torch.float64))
        assert int(in_graph.count_nonzero()) == kept

    def test_outputs_that_are_the_same_for_any_samples_are_kept(self) -> None:
        model = nn.Sequential(toy(lambda m, x: (m.fc(x), torch.ones(1, 2, 5, 5), torch.ones(4, 2)), fc=nn.Linear(4, 4)))
        on_subset(model, "0")
        assert [y.shape for y in model(X)] == [(8, 5, 4), (1, 2, 5, 5), (4, 2)]

    def test_outputs_that_depend_on_the_samples_are_those_of_all_samples(self) -> None:
        model = on_subset(block(weights=True))
        with pytest.warns(hookdrop.HookdropWarning, match="also returns"):
            y, weights = model.attn(X)
        assert model.attn.sizes == [8]
        assert int((y == 0).flatten(1).all(1).sum()) == 4
        assert torch.equal(weights, model.attn.linear(X).mean(-1))
        mask = torch.rand(8, 1, 4)
        assert on_subset().attn(X, mask=mask)[1] is mask, "an argument that is returned has all rows"

    def test_no_token_sees_a_later_one_through_a_mask_that_layers_share(self) -> None:
        layers = nn.ModuleList(toy(shared, q=nn.Linear(4, 4), v=nn.Linear(4, 4)) for _ in range(4))
        model = on_subset(toy(decode, layers=layers), "layers.*")
        later = X.clone()
        later[:, -1] += 1.0
        for seed in range(20):
            outputs = []
            for x in (X, later):
                torch.manual_seed(seed)
                outputs.append(model(x)[:, :-1])
            assert torch.equal(*outputs)

    @pytest.mark.parametrize("samples", [4, 5, 8])
    @pytest.mark.parametrize(
        "table",
        [{"mask": torch.rand(5, 4)}, {"bias": torch.rand(4, 1, 5)}, {"rope": (torch.rand(5, 4),)}],
        ids=["mask", "heads", "rope"],
    )
    def test_tables_with_as_many_rows_as_samples_are_passed_on(self, samples: int, table: dict[str, Any]) -> None:
        model, x = block(), X[:samples]
        clean = model(x, **table)
        y = on_subset(model, scale=False)(x, **table)
        same = (y - clean).flatten(1).abs().amax(1) < 1e-6
        assert torch.equal(same, (y != x).flatten(1).any(1))
        assert int(same.sum()) == max(samples // 2, 1)

    def test_output_and_gradients_equal_those_of_row_mode_with_the_same_samples(self) -> None:
        model, twin = block(), block()
        twin.load_state_dict(model.state_dict())
        on_subset(model)
        further = {"mask": torch.rand(8, 1, 4), "rope": (torch.randn(1, 5, 4),), "gates": torch.rand(8) + 1}
        y = model(X, scale=torch.tensor(2.0), **further)
        kept = (y != X).flatten(1).any(1)
        branch = twin.attn(X, **further)[0] * kept[:, None, None] * 2.0
        torch.testing.assert_close(y, X + branch)
        y.square().sum().backward()
        (X + branch).square().sum().backward()
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)

    def test_each_sample_is_dropped_equally_often(self) -> None:
        """Within 5 standard errors over 2,000 forwards."""
        model = on_subset()
        share = torch.stack([dropped(model, X) for _ in range(2000)]).double().mean(0)
        assert (share - 0.5).abs().amax() < 5 * (0.25 / 2000) ** 0.5

    def test_plan_shows_the_number_of_samples(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        shown = plan(model, DropPath(0.5, mode="subset"), layers="*", p_scale="depth", example_input=X)
        assert [site.reading for site in shown.sites] == ["N=8, keeps 6", "N=8, keeps 4"]
        shown = plan(model, DropPath(0.5, mode="subset"), layers="1", example_input=X[:1])
        assert shown.sites[0].reading == "N=1, keeps 0 or 1"

    def test_an_error_in_the_branch_leaves_nothing_behind(self) -> None:
        model = block()
        drop = inject(model, DropPath(0.5, mode="subset"), layers="attn")
        with pytest.raises(RuntimeError):
            model(torch.randn(8, 5, 3))
        drop.enabled = False
        assert not dropped(model, X).any()

    @pytest.mark.parametrize(
        ("branch", "reason"),
        [
            (nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)), "changes an argument in place"),
            (toy(lambda m, x: x - x.mean(0)), "one of them changes the result of others"),
            (toy(lambda m, x: x * 2 if x.sum() > -9e9 else x), "cannot run on some of the samples"),
        ],
        ids=["in place", "mixes samples", "reads values"],
    )
    def test_a_branch_that_needs_all_samples_gets_them(self, branch: nn.Module, reason: str) -> None:
        model = on_subset(toy(lambda m, x: (y := m.branch(x)) + x, branch=branch), "branch")
        with pytest.warns(hookdrop.HookdropWarning, match=reason):
            y = model(X.clone())
        skip = X.clone()
        full = branch.forward(skip)
        kept = (y != skip).flatten(1).any(1)
        assert int(kept.sum()) == 4
        torch.testing.assert_close(y, skip + full * kept[:, None, None] * 2)

    def test_the_first_call_under_autocast_has_gradients(self) -> None:
        model = on_subset()
        with torch.autocast("cpu", torch.bfloat16):
            model(X).sum().backward()
        assert model.attn.linear.weight.grad.abs().sum() > 0


def test_the_first_tensor_of_the_output_is_replaced_by_the_input_which_may_be_a_keyword_argument() -> None:
    layer, x = toy(lambda m, scale, hidden: (m.fc(hidden), 1, m.fc(hidden)), fc=nn.Linear(4, 4)), torch.randn(2, 4)
    inject(model := nn.ModuleList([layer]), LayerDrop(0.5), layers="0")
    outputs = [model[0](scale=torch.ones(4), hidden=x) for _ in range(30)]
    assert all(one == 1 and torch.equal(second, layer.fc(x)) for _, one, second in outputs)
    assert all(torch.equal(first, x) or torch.equal(first, second) for first, _, second in outputs)
    assert {torch.equal(first, x) for first, _, _ in outputs} == {True, False}
    with pytest.raises(InjectionError):
        inject(nn.Sequential(nn.Linear(4, 4)), LayerDrop(0.5), layers="0", at="input")
    with pytest.raises(InjectionError):
        LayerDrop(0.5)(torch.ones(2))
    with pytest.raises(ShapeError):
        layer_drop(torch.ones(2, 6), torch.ones(2, 4), 0.5)
    with pytest.raises(ShapeError, match="LayerDrop at '0' got an output"):
        plan(nn.Sequential(nn.Linear(4, 6)), LayerDrop(0.5), layers="0", example_input=torch.ones(2, 4))


def test_gradients_of_a_skipped_layer_are_zero_not_missing() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4, requires_grad=True)
    drop = inject(model, LayerDrop(0.5), layers="0")
    drop.target_p = 0.999
    torch.manual_seed(0)
    model(x).backward(g := torch.randn(2, 4))
    assert torch.equal(x.grad, g)
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in model.parameters())


def decoder_layer(m: Any, memory: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    x = m.norm(x + m.f(x))
    return x + m.g(memory)


def reversible(m: Any, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    a = a + m.f(b)
    return a, b + m.g(a)


def stack(forward: Any) -> Any:
    """Layers of two arguments; the output of one is the second argument of the next."""
    layers = [toy(forward, f=nn.Linear(4, 4), g=nn.Linear(4, 4), norm=nn.LayerNorm(4)) for _ in range(3)]
    return toy(lambda m, a, x: [x := layer(a, x) for layer in m.layers][-1], layers=nn.ModuleList(layers))


class TestInputOfASkippedLayer:
    def test_is_the_argument_to_which_the_branches_are_added(self) -> None:
        model, memory, x = stack(decoder_layer), torch.randn(2, 3, 4), torch.randn(2, 3, 4)
        drop = inject(model, LayerDrop(0.999999), layers="layers.*", example_input=(memory, x))
        assert {site.regularizer for site in drop.sites} == {"LayerDrop(p=0.999999, mode='batch', argument='x')"}
        assert torch.equal(model(memory, x), x)

    def test_is_unknown_without_an_example_and_can_be_named(self) -> None:
        model, memory, x = stack(decoder_layer), torch.randn(2, 3, 4), torch.randn(2, 3, 4)
        inject(model, LayerDrop(0.999999), layers="layers.*")
        with pytest.raises(InjectionError, match=r"'memory', 'x' have .*\n.*=x\)\n.*argument='memory' or 'x'"):
            model(memory, x)
        inject(model, LayerDrop(0.999999, argument="x"), layers="layers.*", on_existing="replace")
        assert torch.equal(model(memory, x), x)
        inject(model, LayerDrop(0.5, argument="y"), layers="layers.*", on_existing="replace")
        with pytest.raises(InjectionError, match="without a tensor 'y'"):
            model(memory, x)

    @pytest.mark.parametrize("forward", [reversible, lambda m, a, b: (b + m.f(b), b - m.g(b))], ids=["two", "one"])
    def test_two_residual_streams_are_refused(self, forward: Any) -> None:
        model = toy(lambda m, x: sum(m.layer(x, x)), layer=stack(forward).layers[0])
        with pytest.raises(LayerError, match="2 residual streams"):
            inject(model, LayerDrop(0.5), layers="layer", example_input=X)

    @pytest.mark.parametrize("mask", [torch.zeros(1, 3, 3), torch.zeros(2, 3, 3)], ids=["broadcast", "full"])
    def test_is_no_mask_that_is_added_to_attention_weights(self, mask: torch.Tensor) -> None:
        def attend(m: Any, mask: torch.Tensor, x: torch.Tensor) -> Any:
            weights = (m.f(x) @ x.mT + mask).softmax(-1)  # BLOOM returns them too
            return x + m.g(weights @ x), weights

        model = toy(lambda m, mask, x: [x := layer(mask, x)[0] for layer in m.layers][-1], layers=stack(attend).layers)
        x = torch.randn(2, 3, 4)
        inject(model, LayerDrop(0.999999), layers="layers.*", example_input=(mask, x))
        assert torch.equal(model(mask, x), x)

    def test_may_be_given_as_several_arguments(self) -> None:
        """As in Funnel, whose first layer gets its input as query, key and value."""
        model = stack(lambda m, query, key: query + m.f(key) + m.g(query))
        once = toy(lambda m, x: m.layer(x, x), layer=model.layers[0])
        inject(once, LayerDrop(0.999999), layers="layer", example_input=X)
        assert torch.equal(once(X), X)

    def test_two_added_arguments_are_ambiguous(self) -> None:
        model = stack(lambda m, positions, x: positions + x + m.f(x))
        with pytest.raises(LayerError, match="argument='positions'.*arguments: positions, x"):
            inject(model, LayerDrop(0.5), layers="layers.*", example_input=(X, X + 1))


def write_in_place(m: Any, x: torch.Tensor) -> torch.Tensor:
    if not m.fc.bias.requires_grad:
        return x + m.fc(x.relu())
    x[..., :2] += m.fc(x.relu())[..., :2]  # through a view
    return x.add_(m.fc(x.relu()))


class TestLayerThatWritesInPlace:
    @pytest.mark.parametrize("recipe", [True, False])
    def test_is_skipped_in_each_call(self, recipe: bool) -> None:
        layers = [toy(write_in_place, fc=nn.Linear(4, 4)) for _ in range(2)]
        model = nn.Sequential(nn.Linear(4, 4), *layers)
        drop = inject(model, LayerDrop(0.999999), layers="[12]", example_input=X if recipe else None)
        for run in (model, copy.deepcopy(model), torch.func.vmap(model, randomness="different")):
            assert all(torch.equal(run(X), model[0](X)) for _ in range(3))
        assert drop.probe(X).dropped == pytest.approx(1.0)

    @pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler reads it
    @pytest.mark.parametrize("how", ["eager", "compiled", "checkpoint"])
    def test_has_the_gradients_of_one_of_the_choices(self, how: str) -> None:
        model, seen = nn.Sequential(nn.Linear(4, 4), toy(write_in_place, fc=nn.Linear(4, 4))), set()
        clean = copy.deepcopy(model)
        inject(model, LayerDrop(0.5), layers="1")
        run: Any = torch.compile(model, backend="aot_eager") if how == "compiled" else model
        if how == "checkpoint":
            run = lambda x: checkpoint(lambda h: model[1](h.clone()), model[0](x), use_reentrant=False)
        for _ in range(16):
            grads = []
            for outputs in (run(X), clean[0](X), clean(X)):
                weights = [model[0].weight if not grads else clean[0].weight]
                grads.append(torch.autograd.grad(outputs.square().sum(), weights)[0])
            seen.add(tuple(torch.allclose(grads[0], one) for one in grads[1:]))
        assert seen == {(True, False), (False, True)}

    def test_only_in_a_later_call(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), toy(write_in_place, fc=nn.Linear(4, 4)))
        inject(model, LayerDrop(0.999999), layers="1")
        for writes in (False, True):
            model[1].fc.bias.requires_grad = writes
            assert torch.equal(model(X), model[0](X))


def test_a_residual_branch_is_refused() -> None:
    blocks = [toy(lambda m, x: x + m.mlp(x), mlp=nn.Linear(4, 4)) for _ in range(2)]
    model = nn.Sequential(*blocks)
    with pytest.raises(LayerError, match="'0.mlp': this is a residual branch"):
        inject(model, LayerDrop(0.5), layers="*.mlp", example_input=torch.ones(2, 4))
    inject(model, LayerDrop(0.5), layers="*", example_input=torch.ones(2, 4))


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
            (SampleRows(-2), lambda y: y.transpose(0, 1)),
        ],
        ids=["consecutive", "interleaved", "axis 1", "axis -2"],
    )
    def test_each_has_one_draw(self, rows: SampleRows, by_sample: Any, cls: Any) -> None:
        drop = cls(0.5, samples=("" if rows.count else None, rows.axis, rows.interleaved))
        drop.heads = 2
        torch.manual_seed(0)
        y = by_sample(drop.regularize(torch.ones(24, 24, 8), 0.5, samples=rows if rows.count else None))
        y = y.flatten(1, -2)
        assert torch.equal(y, y[:, :1].expand_as(y))
        assert len(y[:, 0].unique(dim=0)) > 1

    def test_wrong_places_and_rows_that_do_not_divide_raise(self) -> None:
        for error, mode, place in ((ValueError, "batch", ("a", 0, False)), (TypeError, "row", ("a", True, False))):
            with pytest.raises(error):
                DropPath(0.5, mode, samples=place)
        with pytest.raises(LayerError):
            inject(nn.Sequential(nn.Identity()), DropPath(0.5, samples=("a", 0, False)), layers="0")
        for axis in (0, 9):
            with pytest.raises(ShapeError):
                DropPath(0.5, samples=("", axis, False)).regularize(
                    torch.ones(5, 2), 0.5, samples=SampleRows(axis, False, 2)
                )


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
