"""The recipes neftune, layer_drop, head_dropout and patch_dropout on models of transformers, timm and torchvision."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hookdrop import DropPath, HeadDropout, InjectionError, LayerError, NEFTune, find, inject, plan
from hookdrop.recipes import head_dropout, layer_drop, neftune, patch_dropout, stochastic_depth
from tests.support.training import train_step
from tests.support.transformers_models import IDS, SEQ2SEQ, SIZE, TEXT, bart, bert, gpt2, llama, t5

timm = pytest.importorskip("timm")
torchvision = pytest.importorskip("torchvision")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # transformers, in PEFT

IMAGE: dict[str, Any] = {"image_size": 32, "patch_size": 8}
MASK = torch.ones(4, 7, dtype=torch.long)
MASK[0, 4:] = MASK[1, :2] = 0
PIXELS = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def vit() -> nn.Module:
    return transformers.ViTForImageClassification(transformers.ViTConfig(**SIZE, **IMAGE))


def timm_vit(img_size: int = 32, **settings: Any) -> nn.Module:
    sizes = {"depth": 2, "embed_dim": 24, "num_classes": 5, "img_size": img_size}
    return timm.create_model("vit_tiny_patch16_224", **(sizes | settings))


def run(model: nn.Module, **kwargs: Any) -> Any:
    if "pixel_values" in kwargs or not hasattr(model, "config"):
        return model(**kwargs) if kwargs else model(PIXELS)
    labels = {"labels": IDS} if "Conditional" in type(model).__name__ or "Causal" in type(model).__name__ else {}
    return model(input_ids=IDS, attention_mask=MASK, **labels, **kwargs)


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

    @pytest.mark.parametrize(
        ("make", "site"),
        [
            (llama, "model.embed_tokens"),
            (gpt2, "transformer.wte"),
            (bert, "bert.embeddings.word_embeddings"),
            (bart, "model.encoder.embed_tokens"),
            (t5, "encoder.embed_tokens"),
        ],
    )
    def test_spares_the_padding_in_the_embedding_that_runs(self, make: Callable[[], nn.Module], site: str) -> None:
        model = make()
        drop = inject(model, neftune(attention_mask=True))
        with drop.recording(last=9) as recording:
            run(model)
        assert [s.name for s in drop.sites] == [site]
        first = recording.calls(site)[0]
        assert torch.equal((first.before != first.after).any(-1), MASK == 1)

    def test_an_encoder_and_a_decoder_that_share_the_embedding_use_their_own_masks(self) -> None:
        model = t5()
        model.encoder.embed_tokens = model.decoder.embed_tokens = model.shared
        drop = inject(model, neftune(attention_mask=True))
        with drop.recording(last=2) as recording:
            model(input_ids=IDS, attention_mask=MASK, decoder_input_ids=IDS[:, :5], decoder_attention_mask=MASK[:, :5])
        masks = [(r.before != r.after).any(-1) for r in recording.calls(drop.sites[0].name)]
        assert torch.equal(masks[0], MASK == 1)
        assert torch.equal(masks[1], MASK[:, :5] == 1)

    def test_transformers_own_neftune_at_the_same_time_raises(self) -> None:
        from transformers.integrations.neftune import activate_neftune

        model = llama()
        activate_neftune(model, 5)
        with pytest.raises(InjectionError, match="own NEFTune is already active at 'model.embed_tokens'"):
            inject(model, neftune())

    @pytest.mark.parametrize("make", [vit, lambda: timm.create_model("resnet10t")])
    def test_a_model_without_a_token_embedding_raises(self, make: Callable[[], nn.Module]) -> None:
        with pytest.raises(LayerError, match=r"looks up the tokens(.|\n)*name the embedding"):
            inject(make(), neftune(), example_input=PIXELS)

    def test_generation_with_inputs_embeds_is_unchanged(self) -> None:
        model = llama()
        clean = model.eval()(IDS).logits
        inject(model, neftune())
        assert torch.equal(model(inputs_embeds=model.get_input_embeddings()(IDS)).logits, clean)


LAYERS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "llama": (llama, ["model.layers.0", "model.layers.1"]),
    "gpt2": (gpt2, ["transformer.h.0", "transformer.h.1"]),
    "bert": (bert, ["bert.encoder.layer.0", "bert.encoder.layer.1"]),
    "t5": (t5, [f"{part}.block.{i}" for part in ("encoder", "decoder") for i in (0, 1)]),
    "bart": (bart, [f"model.{part}.layers.{i}" for part in ("encoder", "decoder") for i in (0, 1)]),
    "timm": (timm_vit, ["blocks.0", "blocks.1"]),
}


class TestLayerDrop:
    @pytest.mark.parametrize("name", LAYERS)
    def test_a_dropped_layer_returns_its_input(self, name: str) -> None:
        """At a rate close to 1: the output equals that of the model whose layers are identities."""
        make, sites = LAYERS[name]
        model = make()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        drop = inject(model, layer_drop(p=0.5))
        assert [site.name for site in drop.sites] == sites
        drop.target_p = 1 - 1e-7
        with drop.recording() as recording:
            y = run(model)
        assert all(recording[site].dropped == 1.0 for site in sites)
        first = y if isinstance(y, torch.Tensor) else y.logits
        first.sum().backward()
        inner = [p.grad for site in sites for p in model.get_submodule(site).parameters()]
        assert all(grad is not None and not grad.any() for grad in inner)

    def test_checkpointed_layers_are_recomputed_as_they_were_dropped(self) -> None:
        gradients = []
        for checkpointing in (False, True):
            torch.manual_seed(0)
            model = llama().train()
            if checkpointing:
                model.gradient_checkpointing_enable()
            inject(model, layer_drop(p=0.5))
            for seed in range(4):
                torch.manual_seed(seed)
                run(model).loss.backward()
            gradients.append([p.grad for p in model.parameters()])
        assert all(map(torch.equal, *gradients))

    def test_a_kv_cache_in_training_raises_and_generation_works(self) -> None:
        model = llama(use_cache=True).train()
        inject(model, layer_drop(p=0.5))
        with pytest.raises(InjectionError, match=r"KV cache(.|\n)*model.config.use_cache = False"):
            model(IDS)
        model.eval().generate(IDS, max_new_tokens=2, do_sample=False, pad_token_id=0)

    def test_a_kv_cache_of_a_decoder_names_its_config(self) -> None:
        model = t5().train()
        model.decoder.config.use_cache = True
        inject(model, layer_drop(p=0.5))
        with pytest.raises(InjectionError, match=r"\n  model.decoder.config.use_cache = False"):
            model(IDS, decoder_input_ids=IDS, use_cache=True)

    def test_a_residual_cnn_raises(self) -> None:
        with pytest.raises(LayerError, match=r"could be skipped(.|\n)*stochastic_depth"):
            inject(timm.create_model("resnet10t"), layer_drop())


def example(model: nn.Module) -> Any:
    """An input of the model."""
    if not hasattr(model, "config"):
        return PIXELS
    if hasattr(model.config, "patch_size"):
        return {"pixel_values": PIXELS}
    inputs = {"input_ids": IDS, "attention_mask": MASK}
    return inputs | ({"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {})


def value_weight(attention: nn.Module) -> torch.Tensor:
    """The rows of the value projection, for each head of the output."""
    for name in ("v_proj", "v", "value", "self.value"):
        if name in dict(attention.named_modules()):
            return attention.get_submodule(name).weight
    return attention.qkv.weight[-attention.qkv.weight.shape[0] // 3 :]


def diffllama() -> nn.Module:
    return transformers.DiffLlamaForCausalLM(transformers.DiffLlamaConfig(**SIZE, **TEXT, num_key_value_heads=4))


def fsmt() -> nn.Module:
    languages = {"langs": ["en", "de"], "src_vocab_size": 99, "tgt_vocab_size": 99}
    return transformers.FSMTForConditionalGeneration(transformers.FSMTConfig(**SEQ2SEQ, **languages, use_cache=False))


def torchvision_vit() -> nn.Module:
    return torchvision.models.VisionTransformer(32, 8, 2, 2, 32, 64)


def torchvision_swin() -> nn.Module:
    return torchvision.models.SwinTransformer([4, 4], 12, [2, 2], [2, 2], [4, 4])


def swin() -> nn.Module:
    sizes = {"img_size": 32, "window_size": 4, "depths": (2, 2), "embed_dim": 24}
    return timm.create_model("swin_tiny_patch4_window7_224", **sizes, num_classes=5)


def nest() -> nn.Module:
    return timm.create_model("nest_tiny", img_size=32, num_classes=5)


# The model, one of its attentions, the projection in it, its heads, and the axis with the samples.
HEADS: dict[str, tuple[Callable[[], nn.Module], str, str, int, int]] = {
    "llama": (llama, "model.layers.1.self_attn", "o_proj", 4, 0),
    "bart": (bart, "model.decoder.layers.1.encoder_attn", "out_proj", 4, 0),
    "t5": (t5, "encoder.block.1.layer.0.SelfAttention", "o", 4, 0),
    "bert": (bert, "bert.encoder.layer.1.attention", "output.dense", 4, 0),
    "vit": (vit, "vit.layers.1.attention", "o_proj", 4, 0),
    "timm vit": (timm_vit, "blocks.1.attn", "proj", 3, 0),
    "swin": (swin, "layers.0.blocks.1.attn", "proj", 3, 0),
    "nest": (nest, "levels.1.transformer_encoder.1.attn", "proj", 6, 0),
    "fsmt": (fsmt, "model.decoder.layers.1.self_attn", "out_proj", 4, 1),
    "diffllama": (diffllama, "model.layers.1.self_attn", "o_proj", 2, 0),
}


class TestHeadDropout:
    @pytest.mark.parametrize("name", HEADS)
    def test_a_head_is_what_its_values_determine(self, name: str) -> None:
        """Without the values of one head, the projection's input is 0 exactly where HeadDropout zeroes that head."""
        make, owner, end, heads, axis = HEADS[name]
        model = make().eval()
        plan_ = plan(model, head_dropout(p=0.5), example_input=example(model))
        site = next(site for site in plan_.sites if site.name == f"{owner}.{end}")
        drop = site.regularizer
        assert isinstance(drop, HeadDropout)
        assert drop.heads == heads
        assert (drop.samples or (None, 0, False))[1] == axis
        weight = value_weight(model.get_submodule(owner))
        groups = 4 if name == "diffllama" else weight.shape[0] * heads // site.module.in_features
        size = weight.shape[0] // groups
        zeroed = [0, 2] if name == "diffllama" else [0]  # the two maps of a head
        seen: list[torch.Tensor] = []
        site.module.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        with torch.no_grad():
            for layer in model.get_submodule(owner).modules():
                if isinstance(layer, nn.Linear) and layer.bias is not None:
                    layer.bias.zero_()
            for head in zeroed:
                weight[head * size : (head + 1) * size] = 0
            inputs = example(model)
            model(**inputs) if isinstance(inputs, dict) else model(inputs)
        x = seen[0].unflatten(-1, (-1, heads)).mT if drop.interleaved else seen[0].unflatten(-1, (heads, -1))
        zero = (x == 0).all(-1).flatten(0, -2).all(0)
        per_group = 1 if name == "diffllama" else heads // groups
        assert zero.tolist() == [True] * per_group + [False] * (heads - per_group)

    @pytest.mark.parametrize(("make", "count"), [(gpt2, 2), (t5, 6)])
    def test_every_attention_is_hooked(self, make: Callable[[], nn.Module], count: int) -> None:
        model = make()
        drop = inject(model, head_dropout(p=0.3), example_input=example(model))
        assert len(drop.sites) == count
        inputs = example(model)
        model(**inputs)
        assert all(site.called for site in drop.sites)

    @pytest.mark.parametrize("make", [torchvision_vit, torchvision_swin])
    def test_models_that_do_not_call_their_projection_raise(self, make: Callable[[], nn.Module]) -> None:
        with pytest.raises(LayerError, match="it computes its projection without calling"):
            inject(make(), head_dropout(), example_input=torch.randn(1, 3, 32, 32))


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


def vit_with(name: str, **settings: Any) -> Callable[[], nn.Module]:
    """A model of transformers on small images."""
    config = getattr(transformers, f"{name}Config")
    kind = f"{name}VisionModel" if name == "Siglip" else f"{name}ForImageClassification"
    return lambda: getattr(transformers, kind)(
        getattr(transformers, f"{name}VisionConfig" if name == "Siglip" else f"{name}Config", config)(
            **SIZE, **IMAGE, **settings
        )
    )


PATCHES: dict[str, tuple[Callable[[], nn.Module], str, int]] = {
    "timm vit": (lambda: timm_vit(64), "pos_drop", 1),
    "timm registers": (lambda: timm_vit(64, reg_tokens=4), "pos_drop", 5),
    "torchvision": (torchvision_vit, "encoder.dropout", 1),
    "DeiT": (vit_with("DeiT"), "deit.embeddings", 2),
    "Siglip": (vit_with("Siglip"), "embeddings", 0),
}


class TestPatchDropout:
    @pytest.mark.parametrize("name", PATCHES)
    def test_half_of_the_patches_reach_the_first_block(self, name: str) -> None:
        make, site, prefix = PATCHES[name]
        model = make().train()
        size = 64 if "timm" in name else 32
        x = torch.randn(2, 3, size, size)
        drop = inject(model, patch_dropout(p=0.5), example_input=x)
        assert (drop.sites[0].name, drop.sites[0].regularizer) == (
            site,
            f"TokenDropout(p=0.5, prefix={prefix}, remove=True)",
        )
        lengths: list[int] = []
        norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
        norms[0].register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[1]))
        with drop.disabled():
            model(x)
        y = model(x)
        patches = lengths[0] - prefix
        assert lengths == [patches + prefix, patches // 2 + prefix]
        first = y if isinstance(y, torch.Tensor) else y[0]
        first.sum().backward()

    def test_a_training_step_equals_that_of_timm_with_patch_drop_rate(self) -> None:
        native, clean = timm_vit(64, patch_drop_rate=0.5), timm_vit(64)
        clean.load_state_dict(native.state_dict())
        x = torch.randn(2, 3, 64, 64)
        inject(clean, patch_dropout(p=0.5), example_input=x)
        assert all(map(torch.equal, train_step(clean, x), train_step(native, x)))

    @pytest.mark.parametrize(
        ("make", "reason"),
        [
            (swin, "no tensor (N, L, C) of image patches"),
            (lambda: timm.create_model("eva02_tiny_patch14_224", depth=1, img_size=56), "depends on the position"),
            (lambda: timm.create_model("vit_relpos_small_patch16_224", depth=1, img_size=32), "tokens"),
            (lambda: transformers.ViTForMaskedImageModeling(transformers.ViTConfig(**SIZE, **IMAGE)), "tokens"),
        ],
        ids=["windows", "rope", "relative", "dense"],
    )
    def test_models_whose_layers_need_all_tokens_raise_with_the_reason(
        self, make: Callable[[], nn.Module], reason: str
    ) -> None:
        model = make()
        x = torch.randn(2, 3, 56, 56) if reason == "depends on the position" else PIXELS
        with pytest.raises(LayerError, match=re.escape(reason)):
            inject(model, patch_dropout(), example_input=x)
        assert not find(model)

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
    @pytest.mark.parametrize("make", [t5, lambda: t5("LongT5", local_radius=3)])
    def test_no_token_sees_a_later_one_or_padding(self, make: Callable[[], nn.Module]) -> None:
        model, later = make().train(), IDS.clone()
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
    losses = []
    for seed in range(12):
        torch.manual_seed(seed)
        losses.append(fast(input_ids=IDS, attention_mask=MASK, labels=IDS).loss.item())
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
        run(model)
    record = recording[noise.sites[0].name]
    assert torch.equal((record.before != record.after).any(-1), MASK == 1)
    assert [site.name.rpartition(".")[2] for site in heads.sites] == ["o_proj"] * 2
    assert all(site.called for site in heads.sites)


def test_three_recipes_on_one_llama_leave_nothing_behind() -> None:
    model = llama()
    clean = model.eval()(IDS).logits
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    twin = copy.deepcopy(model)
    for target in (model, twin):
        inject(target, neftune(attention_mask=True))
        inject(target, layer_drop(p=0.2))
        inject(target, head_dropout(p=0.1))
    assert torch.equal(model(IDS).logits, clean)
    for target in (model, twin):
        run(target.train()).loss.backward()
        find(target).remove()
        assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in target.modules()] == hooks
        assert torch.equal(target.eval()(IDS).logits, clean)
