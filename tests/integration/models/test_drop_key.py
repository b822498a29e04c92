"""DropKey in models of timm, torchvision and transformers, and in a hand-written model."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from hookdrop import LayerError, inject
from hookdrop.recipes import drop_key
from hookdrop.survey.isolation import call
from tests.support.models import toy
from tests.support.transformers_models import IDS, bert, llama, t5

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def vit(**settings: Any) -> nn.Module:
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 4, "num_heads": 2, "num_classes": 4}
    return timm.create_model("vit_tiny_patch16_224", **sizes, **settings)


def heads(self: Any, tokens: Tensor) -> Tensor:
    q, k, v = self.into(tokens).unflatten(-1, (3, 2, 8)).unbind(2)
    weights = self.normalize(torch.einsum("bihd,bjhd->bhij", q, k) / 8**0.5)
    return torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2)


def handwritten() -> nn.Module:
    """Its names and its structure are those of no library; its router has a softmax, too."""

    def forward(self: Any, tokens: Tensor) -> Tensor:
        for one in self.mix:
            tokens = tokens + one(tokens) * self.route(tokens).softmax(-1)[..., :1]
        return tokens

    layers = [toy(heads, into=nn.Linear(16, 48), normalize=nn.Softmax(dim=-1)) for _ in range(2)]
    return toy(forward, mix=nn.ModuleList(layers), route=nn.Linear(16, 2))


TEXT = {"input_ids": IDS}
SITES: dict[str, tuple[Any, Any, list[str]]] = {
    "vit": (vit, IMAGES, [f"blocks.{i}.attn" for i in range(4)]),
    "llama": (llama, TEXT, [f"model.layers.{i}.self_attn" for i in range(2)]),
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
    "handwritten": (handwritten, torch.randn(2, 5, 16), ["mix.0", "mix.1"]),
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
    def test_padding_stays_masked(self, implementation: str) -> None:
        model = bert(kind="Model")
        model.set_attn_implementation(implementation)
        inject(model.train(), drop_key(p=0.5), example_input={"input_ids": IDS})
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        mask = torch.ones_like(IDS)
        mask[:2, -3:] = 0
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


@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_a_kernel_that_hides_scores_is_refused_with_the_argument_that_selects_another() -> None:
    model = llama(attn_implementation="flex_attention")
    with pytest.raises(LayerError, match='attn_implementation="sdpa"'):
        inject(model, drop_key(p=0.1), example_input=IDS)
