"""The recipes neftune, layer_drop, head_dropout, patch_dropout and drop_key on models of transformers, timm and torchvision."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookdrop import DropPath, InjectionError, LayerError, NEFTune, inject, plan
from hookdrop.recipes import (
    drop_key,
    head_dropout,
    layer_drop,
    neftune,
    patch_dropout,
    residual_dropout,
    set_dropout,
    stochastic_depth,
)  # fmt: skip
from hookdrop.survey.isolation import call
from tests.support.training import train_step
from tests.support.transformers_models import IDS, bert, llama, t5

timm = pytest.importorskip("timm")
torchvision = pytest.importorskip("torchvision")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # transformers, in PEFT

MASK = torch.ones(4, 7, dtype=torch.long)
MASK[0, 4:] = MASK[1, :2] = 0
PIXELS = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def timm_vit(img_size: int = 32, **settings: Any) -> nn.Module:
    sizes = {"depth": 2, "embed_dim": 24, "num_classes": 5, "img_size": img_size}
    return timm.create_model("vit_tiny_patch16_224", **(sizes | settings))


@pytest.mark.parametrize(
    "recipe",
    [drop_key(0.1), head_dropout(0.1), layer_drop(0.1), neftune(5), patch_dropout(0.1), residual_dropout(0.1),
     set_dropout(), stochastic_depth(0.1)],
    ids=str,
)  # fmt: skip
def test_the_default_device_does_not_matter_to_a_model_on_another(recipe: Any) -> None:
    """The default device is "meta", whose numbers cannot be read, and this model creates no tensors."""
    found = []
    for device in ("cpu", "meta"):
        torch.manual_seed(0)
        model, x = (bert(), IDS) if recipe == neftune(5) else (timm_vit(64), torch.randn(2, 3, 64, 64))
        with torch.device(device):
            found.append(str(plan(model, recipe, example_input=x)))
    assert found[0] == found[1]


class TestNEFTune:
    @pytest.mark.parametrize(("alpha", "dtype"), [(5, torch.float32), (10.5, torch.bfloat16)])
    def test_equals_the_hook_of_transformers_bit_for_bit(self, alpha: float, dtype: torch.dtype) -> None:
        from transformers.integrations.neftune import activate_neftune

        ours, theirs = nn.Embedding(99, 32, dtype=dtype), nn.Embedding(99, 32, dtype=dtype)
        theirs.load_state_dict(ours.state_dict())
        theirs.get_input_embeddings = lambda: theirs
        activate_neftune(theirs, alpha)
        model = nn.ModuleDict({"embed": ours})
        inject(model, NEFTune(alpha), layers="embed")
        for seed in range(3):
            torch.manual_seed(seed)
            wanted = theirs(IDS)
            torch.manual_seed(seed)
            assert torch.equal(ours(IDS), wanted)

    def test_an_encoder_and_a_decoder_that_share_the_embedding_use_their_own_masks(self) -> None:
        model = t5()
        model.encoder.embed_tokens = model.decoder.embed_tokens = model.shared
        drop = inject(model, neftune(attention_mask=True))
        with drop.recording(last=2) as recording:
            model(input_ids=IDS, attention_mask=MASK, decoder_input_ids=IDS[:, :5], decoder_attention_mask=MASK[:, :5])
        masks = [(r.before != r.after).any(-1) for r in recording.calls(drop.sites[0].name)]
        assert torch.equal(masks[0], MASK == 1)
        assert torch.equal(masks[1], MASK[:, :5] == 1)


def test_a_kv_cache_in_training_raises_with_its_config_and_generation_works() -> None:
    models = {"model.config": llama(use_cache=True), "model.decoder.config": t5()}
    models["model.decoder.config"].decoder.config.use_cache = True
    for config, model in models.items():
        inject(model.train(), layer_drop(p=0.5))
        inputs = {"decoder_input_ids": IDS, "use_cache": True} if "decoder" in config else {}
        with pytest.raises(InjectionError, match=rf"KV cache(.|\n)*\n  {config}.use_cache = False"):
            model(IDS, **inputs)
    models["model.config"].eval().generate(IDS, max_new_tokens=2, do_sample=False, pad_token_id=0)


def swin() -> nn.Module:
    sizes = {"img_size": 32, "window_size": 4, "depths": (2, 2), "embed_dim": 24}
    return timm.create_model("swin_tiny_patch4_window7_224", **sizes, num_classes=5)


def nest() -> nn.Module:
    return timm.models.nest.Nest(32, embed_dims=(24, 48, 96), num_heads=(3, 6, 12), depths=(1, 1, 2), num_classes=5)


@pytest.mark.parametrize(
    ("recipe", "make", "size"),
    [
        ("head_dropout", timm_vit, 32),
        ("head_dropout", nest, 32),
        ("layer_drop", timm_vit, 32),
        ("patch_dropout", lambda: timm_vit(64, reg_tokens=4), 64),
        ("patch_dropout", lambda: torchvision.models.VisionTransformer(32, 8, 2, 2, 32, 64), 32),
    ],
)
def test_sites_in_models_of_timm_and_torchvision(recipe: str, make: Callable[[], nn.Module], size: int) -> None:
    """The checks of `benchmarks/transformers_zoo.py`; test_stochastic_depth.py makes them with models of transformers."""
    from families.inputs import BATCH
    from families.layers import Run
    from families.recipes import CASES, run_case

    model = make()
    record = run_case(CASES[recipe], model, [Run("", model, {"x": torch.randn(BATCH, 3, size, size)})])
    assert record["status"] == "passed", record


def test_models_that_do_not_call_their_projection_raise() -> None:
    model = torchvision.models.SwinTransformer([4, 4], 12, [2, 2], [2, 2], [4, 4])
    with pytest.raises(LayerError, match="it computes its projection without calling"):
        inject(model, head_dropout(), example_input=torch.randn(1, 3, 32, 32))


@pytest.mark.parametrize("recipe", [head_dropout(p=0.5), DropPath(0.5)])
def test_a_sample_is_dropped_in_all_of_its_windows_or_in_none(recipe: Any) -> None:
    model = swin().train()
    layers = None if recipe == head_dropout(p=0.5) else "layers.0.*.0.attn"
    drop = inject(model, recipe, layers=layers, example_input=PIXELS)
    with drop.recording(last=9) as recording:
        model(PIXELS)
        model(PIXELS[:3])
    for site in drop.sites[:2]:
        for record, batch in zip(recording.calls(site.name), (4, 3), strict=True):
            kept = (record.after != 0).unflatten(-1, (3, -1)).any(-1).any(1).view(batch, -1, 3)
            assert torch.equal(kept, kept[:, :1].expand_as(kept))


class TestPatchDropout:
    def test_a_training_step_equals_that_of_timm_with_patch_drop_rate(self) -> None:
        native, clean = timm_vit(64, patch_drop_rate=0.5), timm_vit(64)
        clean.load_state_dict(native.state_dict())
        x = torch.randn(2, 3, 64, 64)
        inject(clean, patch_dropout(p=0.5), example_input=x)
        assert all(map(torch.equal, train_step(clean, x), train_step(native, x)))

    def test_a_model_that_already_removes_patches_raises(self) -> None:
        with pytest.raises(InjectionError, match=r"already has it(.|\n)*patch_drop_rate=0.0"):
            inject(timm_vit(64, patch_drop_rate=0.2), patch_dropout(), example_input=torch.randn(1, 3, 64, 64))

    @pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler reads it
    def test_compiled_models_break_the_graph_once_and_remove_the_right_number(self) -> None:
        torch.compiler.reset()
        model = timm_vit(64, depth=1).train()
        drop = inject(model, patch_dropout(p=0.5), example_input=torch.randn(2, 3, 64, 64))
        fast = torch.compile(model, backend="eager")
        lengths: list[int] = []
        model.blocks[0].register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[1]))
        for p in (0.5, 0.25, 0.75):
            drop.target_p = p
            fast(torch.randn(2, 3, 64, 64))
        assert lengths == [9, 13, 5]


@pytest.mark.parametrize(("samples", "length"), [(4, 7), (7, 7), (8, 8)])
def test_kept_samples_are_those_of_the_whole_batch(samples: int, length: int) -> None:
    """With a position for each sample, also where the batch, the length or the width of a head (8) are equal."""
    model = llama(num_hidden_layers=1)
    ids = torch.randint(5, 90, (samples, length))
    positions = torch.arange(length) + torch.arange(samples)[:, None]
    clean = model(ids, position_ids=positions).logits
    inject(model.train(), DropPath(0.5, mode="subset", scale=False), layers="**.self_attn")
    equal = (model(ids, position_ids=positions).logits - clean).abs().flatten(1).amax(1) < 1e-5
    assert int(equal.sum()) == samples // 2


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler reads it
def test_layer_drop_in_compiled_code() -> None:
    torch.compiler.reset()
    model = llama()
    inject(model, layer_drop(p=0.5))
    fast = torch.compile(model, backend="eager")
    losses = [fast(input_ids=IDS, labels=IDS).loss.item() for _ in range(12)]
    assert 1 < len({round(loss, 5) for loss in losses}) <= 4, "two layers, each dropped or not"


def test_recipes_find_their_sites_under_peft() -> None:
    """Also with an adapter around the projection that head_dropout hooks."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["o_proj"], task_type="CAUSAL_LM")).train()
    noise = inject(model, neftune(attention_mask=True))
    heads = inject(model, head_dropout(p=0.3), example_input={"input_ids": IDS})
    with noise.recording() as recording:
        model(input_ids=IDS, attention_mask=MASK)
    record = recording[noise.sites[0].name]
    assert torch.equal((record.before != record.after).any(-1), MASK == 1)
    assert [site.name.rpartition(".")[2] for site in heads.sites] == ["o_proj"] * 2
    assert all(site.called for site in heads.sites)


SITES: dict[str, tuple[Any, Any, list[str]]] = {
    "vit": (lambda: timm_vit(64, depth=4), torch.randn(2, 3, 64, 64), [f"blocks.{i}.attn" for i in range(4)]),
    "t5": (
        t5, {"input_ids": IDS, "decoder_input_ids": IDS},
        [*(f"encoder.block.{i}.layer.0.SelfAttention" for i in (0, 1)),
         *(f"decoder.block.{i}.layer.{part}Attention" for i in (0, 1) for part in ("0.Self", "1.EncDec"))],
    ),
    "torch": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 16, batch_first=True), 2),
        torch.randn(2, 5, 16), ["layers.0.self_attn", "layers.1.self_attn"],
    ),
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
