"""DropKey in models of timm, torchvision and transformers, and in a hand-written model."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hookdrop import DropKey, LayerError, inject, parse, plan
from hookdrop.recipes import drop_key
from hookdrop.survey.isolation import call
from tests.support.transformers_models import IDS, bart, bert, gpt2, llama, t5

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def vit(**settings: Any) -> nn.Module:
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 4, "num_heads": 2, "num_classes": 4}
    return timm.create_model("vit_tiny_patch16_224", **sizes, **settings)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.normalize = nn.Linear(16, 48), nn.Softmax(dim=-1)

    def forward(self, tokens: Tensor) -> Tensor:
        q, k, v = self.into(tokens).unflatten(-1, (3, 2, 8)).unbind(2)
        weights = self.normalize(torch.einsum("bihd,bjhd->bhij", q, k) / 8**0.5)
        return torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2)


class Handwritten(nn.Module):
    """Its names and its structure are those of no library; its router has a softmax, too."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.ModuleList([Heads(), Heads()])
        self.route = nn.Linear(16, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        for one in self.mix:
            tokens = tokens + one(tokens) * self.route(tokens).softmax(-1)[..., :1]
        return tokens


def swin() -> nn.Module:
    return torchvision.models.SwinTransformer([2, 2], 16, [1, 1], [1, 2], [4, 4], num_classes=4)


TEXT = {"input_ids": IDS}
SITES: dict[str, tuple[Any, Any, list[str]]] = {
    "vit": (vit, IMAGES, [f"blocks.{i}.attn" for i in range(4)]),
    "swin": (swin, IMAGES, ["features.1.0.attn", "features.3.0.attn"]),
    "llama": (llama, TEXT, [f"model.layers.{i}.self_attn" for i in range(2)]),
    "bert": (bert, TEXT, [f"bert.encoder.layer.{i}.attention.self" for i in range(2)]),
    "gpt2": (gpt2, TEXT, [f"transformer.h.{i}.attn" for i in range(2)]),
    "bart": (
        bart,
        TEXT,
        [
            *(f"model.encoder.layers.{i}.self_attn" for i in range(2)),
            *(f"model.decoder.layers.{i}.{kind}_attn" for i in range(2) for kind in ("self", "encoder")),
        ],
    ),
    "t5": (
        t5,
        {**TEXT, "decoder_input_ids": IDS},
        [
            *(f"encoder.block.{i}.layer.0.SelfAttention" for i in range(2)),
            *(f"decoder.block.{i}.layer.{j}.{kind}Attention" for i in range(2) for j, kind in enumerate(("Self", "EncDec"))),
        ],
    ),
    "torch": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 16, batch_first=True), 2),
        torch.randn(2, 5, 16),
        ["layers.0.self_attn", "layers.1.self_attn"],
    ),
    "handwritten": (Handwritten, torch.randn(2, 5, 16), ["mix.0", "mix.1"]),
}  # fmt: skip


@pytest.mark.parametrize("name", SITES)
def test_sites_are_the_layers_that_compute_attention_and_rates_fall_with_depth(name: str) -> None:
    make, example, sites = SITES[name]
    model = make().train()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*fused eval path")
        drop = inject(model, drop_key(p=0.4), example_input=example)
    assert [site.name for site in drop.sites] == sites
    assert [site.p for site in drop.sites] == pytest.approx([0.4 * (1 - i / len(sites)) for i in range(len(sites))])
    with drop.recording() as recorded:
        call(model, example)
    assert list(recorded) == sites
    for site in sites:
        record = recorded[site]
        assert record.before.dim() == 4
        assert 0.0 < record.dropped < 1.0
        assert torch.equal(record.after.isneginf(), record.before.isneginf() | ~record.mask)


def logits(model: nn.Module, ids: Tensor, **settings: Any) -> Tensor:
    torch.manual_seed(0)
    return model(input_ids=ids, **settings)[0]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
class TestTransformers:
    def test_a_causal_model_stays_causal(self, implementation: str) -> None:
        model = llama(attn_implementation=implementation).train()
        inject(model, drop_key(p=0.5), example_input=IDS)
        other = torch.cat([IDS[:, :-1], IDS[:, -1:] + 1], 1)
        found, expected = logits(model, other), logits(model, IDS)
        assert torch.equal(found[:, :-1], expected[:, :-1])
        assert not torch.equal(found[:, -1], expected[:, -1])
        assert not torch.equal(model(IDS)[0], expected)

    @pytest.mark.parametrize("make", [llama, bert])
    def test_padding_stays_masked(self, implementation: str, make: Any) -> None:
        model = make(kind="Model")
        model.set_attn_implementation(implementation)
        inject(model.train(), drop_key(p=0.5), example_input={"input_ids": IDS})
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        mask = torch.ones_like(IDS)
        padded = (slice(None, 2), slice(None, 3)) if make is llama else (slice(None, 2), slice(-3, None))
        mask[padded] = 0
        other = torch.where(mask == 1, IDS, IDS + 1)
        found, expected = (logits(model, ids, attention_mask=mask) for ids in (other, IDS))
        assert torch.equal(found[mask == 1], expected[mask == 1])
        assert expected.isfinite().all()

    def test_both_kernels_draw_the_same_masks(self, implementation: str) -> None:
        model, twin = llama(attn_implementation=implementation), llama(attn_implementation="eager")
        twin.load_state_dict(model.state_dict())
        for one in (model.train(), twin.train()):
            inject(one, drop_key(p=0.5), example_input=IDS)
        torch.testing.assert_close(logits(model, IDS), logits(twin, IDS))

    def test_gradient_checkpointing_has_the_gradients_of_a_run_without(self, implementation: str) -> None:
        model = llama(attn_implementation=implementation).train()
        inject(model, drop_key(p=0.5), example_input=IDS)
        found = []
        for settings in (None, {"use_reentrant": False}, {"use_reentrant": True}):
            model.zero_grad()
            if settings is not None:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", FutureWarning)
                    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
                model.enable_input_require_grads()
            logits(model, IDS).square().mean().backward()
            found.append([one.grad for one in model.parameters()])
        torch.testing.assert_close(found[1:], [found[0]] * 2)


@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_a_kernel_that_hides_scores_is_refused_with_the_argument_that_selects_another() -> None:
    model = llama(attn_implementation="flex_attention")
    with pytest.raises(LayerError, match='attn_implementation="sdpa"'):
        inject(model, drop_key(p=0.1), example_input=IDS)


def test_a_model_without_attention_is_refused() -> None:
    with pytest.raises(LayerError, match="drop_key found no layer of ResNet"):
        plan(timm.create_model("resnet10t"), drop_key(p=0.1), example_input=IMAGES)


def test_timms_fused_and_unfused_attention_draw_the_same_masks() -> None:
    model = vit().train()
    inject(model, DropKey(p=0.5), layers="blocks.*.attn")
    unfused = copy.deepcopy(model)
    for block in unfused.blocks:
        block.attn.fused_attn = False
    found = []
    for one in (model, unfused):
        torch.manual_seed(0)
        found.append(one(IMAGES))
    torch.testing.assert_close(*found)


def test_predictions_and_probes_of_a_vit() -> None:
    model = vit()
    drop = inject(model, parse("drop_key(p=0.3)"), p_scale="equal", example_input=IMAGES)
    measured = drop.probe(IMAGES)
    assert measured.eval_identical
    assert abs(measured.dropped - 0.3) < 5.0 * (0.3 * 0.7 / measured.elements) ** 0.5
    assert drop.predict(IMAGES, samples=4).variance.max() > 0.0


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_blocks_of_a_vit_have_the_gradients_of_a_run_without(reentrant: bool) -> None:
    model = vit().train()
    inject(model, drop_key(p=0.5), example_input=IMAGES)
    found = []
    for uses in (False, True):
        torch.manual_seed(0)
        x = model._pos_embed(model.patch_embed(IMAGES))
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=reentrant) if uses else block(x)
        found.append(torch.autograd.grad(x.square().sum(), model.pos_embed) if not reentrant else _backward(model, x))
    torch.testing.assert_close(*found)


def _backward(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    torch.autograd.backward(x.square().sum())
    return [model.pos_embed.grad.clone()]
