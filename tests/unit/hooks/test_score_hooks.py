"""DropKey inside layers: attention written out with the same mask, kernels, checkpoints, errors and interrupts."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _len_torch_function_stack
from torch.utils.checkpoint import checkpoint

from hookdrop import DropKey, Dropout, InjectionError, LayerError, LinearSchedule, ShapeError, inject, plan
from hookdrop.functional import drop_key

N, H, L, D = 2, 3, 5, 8
P = 0.4


class Mixer(nn.Module):
    """Hand-written attention. `how` computes heads (N, H, L, D) from queries, keys and values."""

    def __init__(self, how: Callable[..., Tensor], kv_heads: int = H) -> None:
        super().__init__()
        self.sizes = [H * D, kv_heads * D, kv_heads * D]
        self.into, self.out, self.how = nn.Linear(H * D, sum(self.sizes)), nn.Linear(H * D, H * D), how

    def project(self, x: Tensor) -> list[Tensor]:
        return [part.unflatten(-1, (-1, D)).transpose(-3, -2) for part in self.into(x).split(self.sizes, -1)]

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.how(*self.project(x)).transpose(-3, -2).flatten(-2))


def written_out(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | float = 0.0, scale: float = D**-0.5) -> Tensor:
    return (q @ k.mT * scale + mask).softmax(-1) @ v


def lowest_mask(q: Tensor, k: Tensor, v: Tensor, low: float) -> Tensor:
    """A causal mask that is not infinite, as in transformers."""
    return written_out(q, k, v, torch.full((L, L), low).triu(1))


BOOL = torch.rand(N, 1, L, L, generator=torch.Generator().manual_seed(0)) < 0.7
BOOL[..., 0] = True
ADDED = torch.randn(H, L, L, generator=torch.Generator().manual_seed(0))
CAUSAL = torch.zeros(L, L).masked_fill(torch.ones(L, L).triu(1) == 1, -math.inf)
SDPA = F.scaled_dot_product_attention
KINDS: dict[str, tuple[Callable[..., Tensor], Any]] = {
    "sdpa": (SDPA, 0.0),
    "sdpa, causal": (partial(SDPA, is_causal=True), CAUSAL),
    "sdpa, bool mask": (partial(SDPA, attn_mask=BOOL), torch.zeros(BOOL.shape).masked_fill(~BOOL, -math.inf)),
    "sdpa, added mask": (partial(SDPA, attn_mask=ADDED), ADDED),
    "softmax": (written_out, 0.0),
    "softmax of F": (lambda q, k, v: F.softmax(q @ k.mT / D**0.5, dim=-1, dtype=torch.float64).float() @ v, 0.0),
    "softmax, causal": (partial(written_out, mask=CAUSAL), CAUSAL),
    "nn.Softmax": (lambda q, k, v: nn.Softmax(3)(torch.einsum("nhld,nhsd->nhls", q, k) / D**0.5) @ v, 0.0),
}
EXACT = ("softmax", "softmax, causal")


def modes() -> int:
    """The number of modes of this thread that see calls of PyTorch."""
    return _len_torch_function_stack()


def hooked(layer: nn.Module, p: float = P, **settings: Any) -> nn.Sequential:
    model = nn.Sequential(layer)
    inject(model, DropKey(p), layers="0", **settings)
    return model


def tokens(length: int = L) -> Tensor:
    return torch.randn(N, length, H * D, generator=torch.Generator().manual_seed(1))


def seeded(function: Callable[..., Any], *args: Any, **settings: Any) -> Any:
    torch.manual_seed(3)
    return function(*args, **settings)


def drawn(scores: Tensor, p: float = P) -> Tensor:
    """What DropKey adds to these scores from the seed: 0 or -inf."""
    kept = seeded(drop_key, scores, p)
    return torch.zeros_like(scores).masked_fill(kept.isneginf() & ~scores.isneginf(), -math.inf)


def step(model: Callable[[Tensor], Tensor], x: Tensor, weights: list[nn.Parameter]) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = seeded(model, x)
    for weight in weights:
        weight.grad = None
    torch.autograd.backward(y.square().sum())
    return [y.detach(), *(one.grad for one in (x, *weights) if one.grad is not None)]


class TestAgainstAttentionWrittenOut:
    @pytest.mark.parametrize("kind", KINDS)
    def test_output_and_gradients_equal_those_with_the_same_mask(self, kind: str) -> None:
        how, mask = KINDS[kind]
        layer = Mixer(how)
        with_mask = copy.deepcopy(layer)
        dropped = drawn(torch.zeros(N, H, L, L) + mask)
        assert dropped.isneginf().any()
        with_mask.how = partial(written_out, mask=mask + dropped)
        found = step(hooked(layer), tokens(), [*layer.parameters()])
        expected = step(with_mask, tokens(), [*with_mask.parameters()])
        tolerance = {"rtol": 0.0, "atol": 0.0} if kind in EXACT else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(found, expected, **tolerance)
        assert modes() == 0

    def test_grouped_queries_have_a_draw_for_each_head(self) -> None:
        layer = Mixer(partial(SDPA, enable_gqa=True), kv_heads=1)
        q, k, v = layer.project(tokens())
        heads = written_out(q, k, v, drawn(torch.zeros(N, H, L, L)))
        torch.testing.assert_close(seeded(hooked(layer), tokens()), layer.out(heads.transpose(1, 2).flatten(2)))

    @pytest.mark.parametrize("batch_first", [True, False])
    def test_multihead_attention_drops_weights_and_its_rows_sum_to_1(self, batch_first: bool) -> None:
        layer = nn.MultiheadAttention(H * D, H, batch_first=batch_first)
        model, x = hooked(layer)[0], tokens() if batch_first else tokens().transpose(0, 1)
        y, weights = seeded(model, x, x, x, average_attn_weights=False)
        torch.testing.assert_close(weights.sum(-1), torch.ones(N, H, L))
        assert torch.equal(weights == 0, drawn(torch.zeros(N, H, L, L)).isneginf())
        torch.testing.assert_close(seeded(model, x, x, x, need_weights=False)[0], y)

    def test_multihead_attention_with_masks_and_a_bias_of_keys(self) -> None:
        layer = nn.MultiheadAttention(H * D, H, batch_first=True, add_bias_kv=True, add_zero_attn=True)
        padding = torch.zeros(N, L, dtype=torch.bool)
        padding[1, 3:] = True
        masks = {"key_padding_mask": padding, "attn_mask": CAUSAL.isneginf()}
        _, weights = seeded(hooked(layer)[0], *[tokens()] * 3, average_attn_weights=False, **masks)
        masked = padding[:, None, None] | CAUSAL.isneginf()
        assert not weights[..., :L][masked.expand(N, H, L, L)].any()
        assert weights[..., :L].gt(0).sum() < H * (~masked).sum()
        torch.testing.assert_close(weights.sum(-1), torch.ones(N, H, L))

    def test_transformer_encoder_layer_through_its_attention(self) -> None:
        model = nn.TransformerEncoderLayer(H * D, H, 8, dropout=0.0, batch_first=True)
        before = model(tokens())
        with pytest.warns(UserWarning, match="fused"):
            drop = inject(model, DropKey(P), layers="self_attn")
        assert not torch.allclose(model(tokens()), before)
        model.eval()
        torch.testing.assert_close(model(tokens()), before)
        with drop.sampling():
            assert not torch.allclose(model(tokens()), before)

    @pytest.mark.parametrize("p", [0.1, 0.5])
    def test_the_fraction_of_dropped_scores_is_p(self, p: float) -> None:
        model = nn.Sequential(Mixer(SDPA))
        drop = inject(model, DropKey(p), layers="0")
        with drop.recording() as recorded:
            model(tokens(64))
        effect, error = recorded.totals, math.sqrt(p * (1 - p) / (N * H * 64 * 64))
        assert abs(effect.dropped - p) < 5.0 * error
        assert recorded["0"].before.shape == (N, H, 64, 64)
        assert torch.equal(recorded["0"].mask, ~recorded["0"].after.isneginf())
        assert "-" in repr(effect)


class TestMaskedKeys:
    def test_a_query_keeps_all_keys_if_all_would_be_dropped(self) -> None:
        scores = torch.randn(2000, 1, 2)
        dropped = drop_key(scores, 0.9).isneginf()
        assert not dropped.all(-1).any()
        kept = (~dropped).all(-1).double().mean().item()
        expected = 0.9**2 + 0.1**2
        assert abs(kept - expected) < 5.0 * math.sqrt(expected * (1 - expected) / 2000)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("low", [-math.inf, -1e4, None])
    def test_a_query_with_one_allowed_key_keeps_it(self, low: float | None, dtype: torch.dtype) -> None:
        low = torch.finfo(dtype).min if low is None else low
        scores = torch.full((500, 1, 4), low, dtype=dtype)
        scores[..., 0] = 3.0
        weights = drop_key(scores, 0.5).softmax(-1)
        assert torch.equal(weights, torch.eye(4, dtype=dtype)[0].expand_as(weights))

    @pytest.mark.parametrize("low", [-math.inf, torch.finfo(torch.float32).min])
    def test_a_query_without_allowed_keys_stays_as_it_is(self, low: float) -> None:
        scores = torch.full((50, 4, 4), low)
        assert torch.equal(drop_key(scores, 0.5), scores)

    @pytest.mark.parametrize(
        "how",
        [partial(SDPA, is_causal=True), *[partial(lowest_mask, low=low) for low in (-1e4, -3.4e38, -math.inf)]],
        ids=["sdpa", "-10,000", "lowest", "-inf"],
    )
    def test_causal_attention_stays_causal(self, how: Callable[..., Tensor]) -> None:
        model, x = hooked(Mixer(how), 0.7), tokens()
        other = torch.cat([x[:, :-1], x[:, -1:] + 1.0], 1)
        found, expected = seeded(model, other), seeded(model, x)
        assert torch.equal(found[:, :-1], expected[:, :-1])
        assert not torch.equal(found[:, -1], expected[:, -1])

    def test_a_learned_mask_gets_its_gradient(self) -> None:
        bias = nn.Parameter(ADDED.clone())
        layer = Mixer(lambda q, k, v: SDPA(q, k, v, attn_mask=bias))
        hooked(layer)(tokens()).square().sum().backward()
        assert bias.grad is not None
        assert bias.grad.any()

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, None])
    def test_low_precision_stays_finite(self, kind: str, dtype: torch.dtype | None) -> None:
        if kind == "softmax of F" or (kind == "sdpa, added mask" and dtype is not None):
            return  # these have a dtype of their own
        model, x = hooked(Mixer(KINDS[kind][0])), tokens()
        if dtype is None:
            with torch.autocast("cpu", torch.bfloat16):
                y = model(x)
        else:
            mask = KINDS[kind][1]
            model[0].how = partial(written_out, mask=mask.to(dtype)) if kind == "softmax, causal" else model[0].how
            y = model.to(dtype)(x.to(dtype))
        assert y.isfinite().all()
        y.float().square().sum().backward()
        assert all(one.grad.isfinite().all() for one in model.parameters())


class TestWhatItLeavesAlone:
    def test_eval_mode_and_rate_0_start_no_mode(self) -> None:
        seen: list[int] = []
        layer = Mixer(lambda *qkv: (seen.append(modes()), SDPA(*qkv))[1])
        model, expected = nn.Sequential(layer), layer(tokens())
        seen.clear()
        drop = inject(model, DropKey(P), layers="0", schedule=LinearSchedule(steps=10))
        assert torch.equal(model(tokens()), expected)  # the first call checks the layer
        assert torch.equal(model(tokens()), expected)
        drop.step(10)
        assert torch.equal(model.eval()(tokens()), expected)
        model.train()(tokens())
        assert seen == [1, 0, 0, 1]

    def test_a_softmax_over_another_axis_or_of_a_vector_is_not_of_scores(self) -> None:
        class Gated(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x.softmax(1) + x.softmax(0) + x[0, 0].softmax(-1) + 0.0 * (x @ x.mT).softmax(-1) @ x

        x = tokens()
        torch.testing.assert_close(hooked(Gated())(x), Gated()(x))

    def test_forward_hooks_of_others_run_outside(self) -> None:
        model, found = hooked(Mixer(SDPA), 0.9), []
        model[0].register_forward_hook(lambda module, args, y: found.append(y.softmax(-1)))
        model(tokens())
        assert (found[0] > 0).all()

    def test_modes_of_others_stay_in_their_order(self) -> None:
        class Counting(TorchFunctionMode):
            seen = 0

            def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                self.seen += function is SDPA
                return function(*args, **(kwargs or {}))

        with Counting() as outer:
            hooked(Mixer(SDPA))(tokens())
            SDPA(*[torch.ones(1, 2, 3)] * 3)
            assert modes() == 1
        assert outer.seen == 2
        assert modes() == 0

    def test_other_threads_are_not_affected(self) -> None:
        inside, done, found = threading.Event(), threading.Event(), []

        def wait(*qkv: Tensor) -> Tensor:
            inside.set()
            assert done.wait(20.0)
            return SDPA(*qkv)

        model = hooked(Mixer(wait))
        other = threading.Thread(target=lambda: found.append(seeded(model, tokens())))
        other.start()
        assert inside.wait(20.0)
        assert modes() == 0
        assert (torch.zeros(50, 50).softmax(-1) > 0).all()
        done.set()
        other.join()
        torch.testing.assert_close(found[0], seeded(model, tokens()))


class Failing(Mixer):
    def __init__(self, error: BaseException, inner: Callable[..., Tensor] = SDPA) -> None:
        def fail(*qkv: Tensor) -> Tensor:
            if self.error is not None:
                raise self.error
            return inner(*qkv)

        super().__init__(fail)
        self.error: BaseException | None = error


class TestErrors:
    @pytest.mark.parametrize("error", [ValueError("wrong"), InjectionError("wrong")])
    def test_an_error_in_the_layer_ends_the_mode(self, error: Exception) -> None:
        with pytest.raises(type(error), match="^wrong$"):
            hooked(Failing(error))(tokens())
        assert modes() == 0

    def test_after_a_keyboard_interrupt_nothing_is_dropped_elsewhere(self) -> None:
        layer = Failing(KeyboardInterrupt())
        model = hooked(layer)
        with pytest.raises(KeyboardInterrupt):
            model(tokens())
        assert modes() == 1  # PyTorch runs no hooks then
        layer.error = None
        assert (torch.zeros(50, 50).softmax(-1) > 0).all()
        q = torch.randn(1, 20, 8)
        torch.testing.assert_close(SDPA(q, q, q), written_out(q, q, q))
        assert not torch.equal(model(tokens()), model(tokens()))
        assert modes() == 0

    def test_a_layer_without_scores_raises_in_its_first_call(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4))
        inject(model, DropKey(P), layers="0", schedule=LinearSchedule(steps=10))
        with pytest.raises(InjectionError, match='computed no scores(.|\n)*attn_implementation="sdpa"'):
            model(torch.ones(2, 4))
        assert modes() == 0

    @pytest.mark.filterwarnings("ignore:flex_attention called without")
    def test_flex_attention_is_refused(self) -> None:
        from torch.nn.attention.flex_attention import flex_attention

        layer = Mixer(lambda q, k, v: flex_attention(q, k, v))
        with torch.no_grad(), pytest.raises(InjectionError, match="flash and flex kernels hide them"):
            hooked(layer)(tokens())
        assert modes() == 0

    def test_an_example_shows_layers_without_attention(self) -> None:
        model = nn.Sequential(nn.Linear(H * D, H * D), Mixer(SDPA), nn.Sequential(Mixer(written_out)))
        with pytest.raises(LayerError, match="'0': it computes no attention(.|\n)*'1', '2.0'"):
            inject(model, DropKey(P), layers="0", example_input=tokens())
        assert plan(model, DropKey(P), layers=["1", "2"], example_input=tokens()).sites[1].shape == (N, H, L, L)

    @pytest.mark.parametrize("settings", [{"at": "input"}, {"tensor": 0}])
    def test_arguments_that_select_another_tensor_are_refused(self, settings: dict[str, Any]) -> None:
        with pytest.raises(InjectionError, match="scores(.|\n)*remove (at|tensor)="):
            inject(nn.Sequential(Mixer(SDPA)), DropKey(P), layers="0", **settings)

    def test_two_masks_at_once_are_the_error_of_pytorch(self) -> None:
        with pytest.raises(RuntimeError, match="is_causal"):
            hooked(Mixer(partial(SDPA, attn_mask=BOOL, is_causal=True)))(tokens())

    def test_nested_tensors_are_refused(self) -> None:
        nested = torch.nested.nested_tensor([torch.ones(1, 3, 4), torch.ones(1, 5, 4)], layout=torch.jagged)
        layer = Mixer(lambda *qkv: SDPA(nested, nested, nested))
        with pytest.raises(ShapeError, match="NestedTensor"):
            hooked(layer)(tokens())

    def test_scores_need_two_axes(self) -> None:
        with pytest.raises(ShapeError, match=r"got \(3,\)"):
            drop_key(torch.ones(3), 0.5)


class TestCheckpoints:
    @pytest.mark.parametrize("reentrant", [True, False])
    @pytest.mark.parametrize("kind", ["sdpa", "sdpa, causal", "softmax"])
    def test_recompute_has_the_mask_of_the_forward(self, kind: str, reentrant: bool) -> None:
        model = nn.Sequential(Mixer(KINDS[kind][0]), nn.Tanh(), Mixer(KINDS[kind][0]))
        inject(model, DropKey(P), layers=["0", "2"])
        weights = [*model.parameters()]
        expected = step(model, tokens(), weights)
        for part in (partial(checkpoint, model), lambda x, **how: checkpoint(model[2], model[1](model[0](x)), **how)):
            torch.testing.assert_close(step(partial(part, use_reentrant=reentrant), tokens(), weights), expected)
        assert modes() == 0

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_a_checkpoint_inside_the_layer_is_refused(self, reentrant: bool) -> None:
        """It recomputes the attention without the layer, so without its hooks."""
        layer = Mixer(lambda *qkv: checkpoint(SDPA, *qkv, use_reentrant=reentrant))
        with pytest.raises(InjectionError, match="checkpoint inside the layer"):
            hooked(layer)(tokens())
        assert modes() == 0

    def test_attention_without_gradients_is_no_checkpoint(self) -> None:
        layer = Mixer(torch.no_grad()(SDPA))
        assert not torch.equal(hooked(layer)(tokens()), layer(tokens()))

    def test_another_mask_in_the_recompute_warns(self) -> None:
        model = hooked(Mixer(SDPA))
        y = checkpoint(model, tokens().requires_grad_(), use_reentrant=False, preserve_rng_state=False)
        with pytest.warns(UserWarning, match="RNG state that none of its forwards had"):
            y.sum().backward()


class TestCopies:
    def test_a_copy_draws_the_same_and_is_removed_alone(self) -> None:
        model = hooked(Mixer(SDPA))
        twin = copy.deepcopy(model)
        assert torch.equal(seeded(twin, tokens()), seeded(model, tokens()))
        inject(twin, DropKey(0.0), layers="0", on_existing="replace")
        assert not torch.equal(seeded(twin, tokens()), seeded(model, tokens()))

    def test_another_injection_at_the_output_of_the_same_layer(self) -> None:
        model = hooked(Mixer(SDPA))
        drop = inject(model, Dropout(1.0), layers="0")
        assert not model(tokens()).any()
        drop.remove()
        assert model(tokens()).any()

    def test_a_module_that_calls_itself(self) -> None:
        class Twice(nn.Module):
            depth = 0

            def forward(self, q: Tensor) -> Tensor:
                self.depth += 1
                q = self(q) if self.depth < 2 else q
                return SDPA(q, q, q)

        with pytest.raises(InjectionError):  # its inner scores would be regularized twice
            hooked(Twice())(tokens())
        assert modes() == 0
