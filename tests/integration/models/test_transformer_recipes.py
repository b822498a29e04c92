"""The recipes neftune, layer_drop, head_dropout and patch_dropout on models of transformers, timm and torchvision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hookdrop import DropPath, InjectionError, LayerError, NEFTune, find, inject
from hookdrop.recipes import head_dropout, layer_drop, neftune, patch_dropout, stochastic_depth
from tests.support.training import train_step
from tests.support.transformers_models import IDS, llama, t5

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


class TestLayerDrop:
    def test_a_kv_cache_in_training_raises_with_its_config_and_generation_works(self) -> None:
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
    return timm.create_model("nest_tiny", img_size=32, num_classes=5)


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


class TestSamplesInWindows:
    @pytest.mark.parametrize("recipe", [head_dropout(p=0.5), DropPath(0.5)])
    def test_a_sample_is_dropped_in_all_of_its_windows_or_in_none(self, recipe: Any) -> None:
        model = swin().train()
        layers = None if recipe == head_dropout(p=0.5) else "layers.0.*.0.attn"
        drop = inject(model, recipe, layers=layers, example_input=PIXELS)
        with drop.recording(last=9) as recording:
            model(PIXELS)
            model(PIXELS[:3])
        for site in drop.sites[:2]:
            for call, batch in zip(recording.calls(site.name), (4, 3), strict=True):
                kept = (call.after != 0).unflatten(-1, (3, -1)).any(-1).any(1).view(batch, -1, 3)
                assert torch.equal(kept, kept[:, :1].expand_as(kept))


class TestPatchDropout:
    @pytest.mark.parametrize("settings", [{}, {"reg_tokens": 4}])
    def test_half_of_the_patches_reach_the_first_block(self, settings: dict[str, int]) -> None:
        model, x, prefix = (
            timm_vit(64, **settings).train(),
            torch.randn(2, 3, 64, 64),
            1 + settings.get("reg_tokens", 0),
        )
        drop = inject(model, patch_dropout(p=0.5), example_input=x)
        assert [site.regularizer for site in drop.sites] == [f"TokenDropout(p=0.5, prefix={prefix}, remove=True)"]
        lengths: list[int] = []
        model.blocks[0].register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[1]))
        with drop.disabled():
            model(x)
        model(x)
        assert lengths == [16 + prefix, 8 + prefix]

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


class TestSubsets:
    @pytest.mark.filterwarnings("ignore:.*also returns")
    def test_no_token_sees_a_later_one_or_padding(self) -> None:
        model, later = t5().train(), IDS.clone()
        later[:, -1] += 1
        tokens = [
            {"input_ids": IDS, "decoder_input_ids": IDS},
            {"input_ids": IDS + 1 - MASK, "decoder_input_ids": later},
        ]
        inject(model, stochastic_depth(p=0.5, mode="subset"), p_scale="equal", example_input=tokens[0])
        for seed in range(10):
            logits = []
            for ids in tokens:
                torch.manual_seed(seed)
                logits.append(model(**ids, attention_mask=MASK).logits[:, :-1])
            assert torch.equal(*logits)

    @pytest.mark.parametrize(("samples", "length"), [(4, 7), (7, 7), (8, 8)])
    def test_kept_samples_are_those_of_the_whole_batch(self, samples: int, length: int) -> None:
        """With a position for each sample, also where the batch, the length or the width of a head (8) are equal."""
        model = llama(num_hidden_layers=1)
        ids = torch.randint(5, 90, (samples, length))
        positions = torch.arange(length) + torch.arange(samples)[:, None]
        clean = model(ids, position_ids=positions).logits
        drop = DropPath(0.5, mode="subset", scale=False)
        inject(model.train(), drop, layers="**.self_attn")
        equal = (model(ids, position_ids=positions).logits - clean).abs().flatten(1).amax(1) < 1e-5
        assert int(equal.sum()) == samples // 2


def test_recipes_are_part_of_a_compiled_graph() -> None:
    torch.compiler.reset()
    model = llama()
    inject(model, neftune(attention_mask=True))
    inject(model, layer_drop(p=0.5))
    fast = torch.compile(model, backend="eager", fullgraph=True)
    losses = [fast(input_ids=IDS, attention_mask=MASK, labels=IDS).loss.item() for _ in range(12)]
    assert len(set(losses)) == 12, "each draws other noise"
    find(model)["neftune"].remove()
    losses = [fast(input_ids=IDS, attention_mask=MASK, labels=IDS).loss.item() for _ in range(12)]
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
