"""DropKey inside layers: attention written out with the same mask, kernels, checkpoints, errors and interrupts."""

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

from hookdrop import DropKey, InjectionError, LinearSchedule, ShapeError, inject, plan
from hookdrop.functional import drop_key
from tests.support.training import seeded

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
    inject(model, DropKey(p, calls=(True,)), layers="0", **settings)
    return model


def tokens(length: int = L) -> Tensor:
    return torch.randn(N, length, H * D, generator=torch.Generator().manual_seed(1))


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
            drop = inject(model, DropKey(P), layers="self_attn", example_input=tokens())
        assert not torch.allclose(model(tokens()), before)
        model.eval()
        torch.testing.assert_close(model(tokens()), before)
        with drop.sampling():
            assert not torch.allclose(model(tokens()), before)

    def test_recording_shows_the_scores_and_the_fraction_of_dropped_ones(self) -> None:
        model = nn.Sequential(Mixer(SDPA))
        for other in (model, nn.Sequential(Mixer(written_out))):
            assert plan(other, DropKey(0.1), layers="0", example_input=tokens(64)).sites[0].shape == (N, H, 64, 64)
        with inject(model, DropKey(0.1), layers="0", example_input=tokens()).recording() as recorded:
            model(tokens(64))
        assert recorded["0"].before.shape == (N, H, 64, 64)
        assert abs(recorded.totals.dropped - 0.1) < 5.0 * math.sqrt(0.09 / (N * H * 64 * 64))
        assert torch.equal(recorded["0"].mask, ~recorded["0"].after.isneginf())
        assert "-" in repr(recorded.totals)


class TestMaskedKeys:
    def test_a_query_keeps_all_keys_if_all_would_be_dropped(self) -> None:
        dropped = drop_key(torch.randn(2000, 1, 2), 0.9).isneginf()
        assert not dropped.all(-1).any()
        kept = (~dropped).all(-1).double().mean().item()
        expected = 0.9**2 + 0.1**2
        assert abs(kept - expected) < 5.0 * math.sqrt(expected * (1 - expected) / 2000)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("low", [-math.inf, -1e4, None])
    def test_a_query_keeps_its_only_allowed_key(self, low: float | None, dtype: torch.dtype) -> None:
        low = torch.finfo(dtype).min if low is None else low
        scores = torch.full((500, 1, 4), low, dtype=dtype)
        scores[..., 0] = 3.0
        weights = drop_key(scores, 0.5).softmax(-1)
        assert torch.equal(weights, torch.eye(4, dtype=dtype)[0].expand_as(weights))
        without = torch.full((50, 4, 4), low, dtype=dtype)
        assert low == -1e4 or torch.equal(drop_key(without, 0.5), without)

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

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, None])
    @pytest.mark.parametrize("kind", ["sdpa", "sdpa, causal", "sdpa, bool mask", "softmax", "nn.Softmax"])
    def test_low_precision_stays_finite(self, kind: str, dtype: torch.dtype | None) -> None:
        """None is autocast."""
        model, x = hooked(Mixer(KINDS[kind][0])), tokens()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is None):
            y = model.to(dtype or torch.float32)(x.to(dtype or torch.float32))
        assert y.isfinite().all()
        y.float().square().sum().backward()
        assert all(one.grad.isfinite().all() for one in model.parameters())


class TestWhatItLeavesAlone:
    def test_eval_mode_and_rate_0_start_no_mode_but_for_the_check_in_the_first_call(self) -> None:
        seen: list[int] = []
        layer = Mixer(lambda *qkv: (seen.append(modes()), SDPA(*qkv))[1])
        model, expected = nn.Sequential(layer), layer(tokens())
        drop = inject(model, DropKey(P, calls=(True,)), layers="0", schedule=LinearSchedule(steps=10))
        torch.testing.assert_close(model(tokens()), expected)  # with a mask of zeros
        assert torch.equal(model(tokens()), expected)
        drop.step(10)
        assert torch.equal(model.eval()(tokens()), expected)
        model.train()(tokens())
        assert seen == [0, 1, 0, 0, 1]

    def test_modes_and_forward_hooks_of_others_see_the_same_calls(self) -> None:
        class Counting(TorchFunctionMode):
            seen = 0

            def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                self.seen += function is SDPA
                return function(*args, **(kwargs or {}))

        model, found = hooked(Mixer(SDPA), 0.9), []
        model[0].register_forward_hook(lambda module, args, y: found.append(y.softmax(-1)))
        with Counting() as outer:
            model(tokens())
            SDPA(*[torch.ones(1, 2, 3)] * 3)
            assert modes() == 1
        assert (outer.seen, modes()) == (2, 0)
        assert (found[0] > 0).all()

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


def flex(*qkv: Tensor) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention(*(x.detach() for x in qkv))  # type: ignore[return-value]


def nested(*qkv: Tensor) -> Tensor:
    one = torch.nested.nested_tensor([torch.ones(1, 3, 4), torch.ones(1, 5, 4)], layout=torch.jagged)
    return SDPA(one, one, one)


REFUSED: dict[str, tuple[Callable[..., Tensor], type[Exception], str]] = {
    "flex attention": (flex, InjectionError, "flash and flex kernels hide scores"),
    "two masks": (partial(SDPA, attn_mask=BOOL, is_causal=True), InjectionError, "is_causal"),
    "nested tensors": (nested, ShapeError, "NestedTensor"),
    "one axis": (lambda q, k, v: drop_key(torch.ones(3), 0.5), ShapeError, r"got \(3,\)"),
    "a checkpoint, which recomputes without the hooks of the layer": (
        lambda *qkv: checkpoint(SDPA, *qkv, use_reentrant=False), InjectionError, "checkpoint inside the layer",
    ),
    "a reentrant one": (lambda *qkv: checkpoint(SDPA, *qkv, use_reentrant=True), InjectionError, "checkpoint inside the layer"),
}  # fmt: skip


class TestErrors:
    @pytest.mark.filterwarnings("ignore:flex_attention called without")
    @pytest.mark.parametrize("name", REFUSED)
    def test_attention_that_cannot_be_masked_raises_and_ends_the_mode(self, name: str) -> None:
        how, error, says = REFUSED[name]
        with pytest.raises(error, match=says):
            hooked(Mixer(how))(tokens())
        assert modes() == 0

    @pytest.mark.parametrize("then", ["another call", "removal"])
    def test_after_a_keyboard_interrupt_nothing_is_dropped_elsewhere(self, then: str) -> None:
        def interrupt(*qkv: Tensor) -> Tensor:
            raise KeyboardInterrupt

        model = nn.Sequential(Mixer(interrupt))
        drop = inject(model, DropKey(P, calls=(True,)), layers="0")
        with pytest.raises(KeyboardInterrupt):
            model(tokens())
        assert modes() == 1  # PyTorch runs no hooks then
        assert (torch.zeros(50, 50).softmax(-1) > 0).all()
        q = torch.randn(1, 20, 8)
        torch.testing.assert_close(SDPA(q, q, q), written_out(q, q, q))
        if then == "removal":
            drop.remove()
        else:
            model[0].how = SDPA
            assert not torch.equal(model(tokens()), model(tokens()))
        assert modes() == 0

    def test_a_module_that_calls_itself_is_refused(self) -> None:
        class Twice(nn.Module):
            depth = 0

            def forward(self, q: Tensor) -> Tensor:
                self.depth += 1
                q = self(q) if self.depth < 2 else q
                return SDPA(q, q, q)

        with pytest.raises(InjectionError):  # its inner scores would be regularized twice
            hooked(Twice())(tokens())
        assert modes() == 0


class TestCheckpoints:
    def test_attention_without_gradients_is_no_checkpoint(self) -> None:
        layer = Mixer(torch.no_grad()(SDPA))
        assert not torch.equal(hooked(layer)(tokens()), layer(tokens()))

    def test_another_mask_in_the_recompute_warns(self) -> None:
        model = hooked(Mixer(SDPA))
        y = checkpoint(model, tokens().requires_grad_(), use_reentrant=False, preserve_rng_state=False)
        with pytest.warns(UserWarning, match="RNG state that none of its forwards had"):
            y.sum().backward()
