"""Recipe for stochastic depth, validated against the libraries' own, or at rate 1 where they have none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from timm.layers import DropPath as TimmDropPath
from torch import Tensor, nn
from torchvision.models.convnext import CNBlockConfig, ConvNeXt
from torchvision.models.swin_transformer import SwinTransformer
from torchvision.ops import StochasticDepth

from hookdrop import InjectionError, LayerError, ShakeDrop, inject
from hookdrop.recipes import stochastic_depth
from hookdrop.recipes.branches import branch_ends
from hookdrop.recipes.transformer_layers import rows_are_samples
from tests.support.models import randomize_norms
from tests.support.tensors import all_equal
from tests.support.training import train_step

timm = pytest.importorskip("timm")


torchvision = pytest.importorskip("torchvision")


P = 0.3


def float32_scale(name: str, index: int, count: int) -> float:
    """Scale of timm's transformers, whose rates are a float32 `linspace`."""
    return torch.linspace(0, P, count)[index].item() / P


def efficientnet_scale(name: str, index: int, count: int) -> float:
    """Scale of EfficientNets, which never reaches 1."""
    return index / count


TIMM: dict[str, tuple[dict[str, Any], Any]] = {
    "resnet26": ({}, "depth_from_zero"),
    "seresnet50": ({}, "depth_from_zero"),
    "skresnet18": ({}, "depth_from_zero"),
    "rexnet_100": ({}, "depth_from_zero"),
    "xception41": ({}, "depth_from_zero"),
    "convnext_atto": ({}, float32_scale),
    "vit_tiny_patch16_224": ({"img_size": 64}, float32_scale),
    "deit_tiny_patch16_224": ({"img_size": 64}, float32_scale),
    "swin_tiny_patch4_window7_224": ({"img_size": 56}, float32_scale),
    "efficientnet_lite0": ({}, efficientnet_scale),
    "mobilenetv3_small_050": ({}, efficientnet_scale),
}


def tiny_swin(p: float) -> nn.Module:
    return SwinTransformer([4, 4], 12, [2, 2], [2, 2], [7, 7], stochastic_depth_prob=p, num_classes=5)


def tiny_convnext(p: float) -> nn.Module:
    return ConvNeXt([CNBlockConfig(8, 16, 2), CNBlockConfig(16, None, 2)], stochastic_depth_prob=p, num_classes=5)


TORCHVISION: dict[str, tuple[Callable[[float], nn.Module], Any]] = {
    "ConvNeXt": (tiny_convnext, "depth_from_zero"),
    "Swin": (tiny_swin, "depth_from_zero"),
    "EfficientNet": (
        lambda p: torchvision.models.efficientnet_b0(stochastic_depth_prob=p, num_classes=5),
        efficientnet_scale,
    ),
}


def assert_same_training_step(native: nn.Module, clean: nn.Module, x: Tensor, without: Tensor) -> None:
    ours, theirs = train_step(clean, x), train_step(native, x)
    assert all_equal(ours, theirs)
    assert not torch.equal(ours[0], without)


@pytest.mark.parametrize("name", TIMM)
def test_outputs_and_gradients_match_timms_drop_path_rate(name: str) -> None:
    settings, p_scale = TIMM[name]
    torch.manual_seed(0)
    native = randomize_norms(timm.create_model(name, drop_path_rate=P, num_classes=5, **settings))
    clean = timm.create_model(name, drop_path_rate=0.0, num_classes=5, **settings)
    clean.load_state_dict(native.state_dict())
    x = torch.randn(4, 3, settings.get("img_size", 64), settings.get("img_size", 64))
    without = train_step(clean, x)[0]
    clean.load_state_dict(native.state_dict())
    stochastic_depth(clean, p=P, p_scale=p_scale, regularizer=lambda p: TimmDropPath(p))
    assert_same_training_step(native, clean, x, without)


@pytest.mark.parametrize("name", TORCHVISION)
def test_outputs_and_gradients_match_torchvisions_stochastic_depth_prob(name: str) -> None:
    make, p_scale = TORCHVISION[name]
    torch.manual_seed(0)
    native, clean = randomize_norms(make(P)), make(0.0)
    clean.load_state_dict(native.state_dict())
    x = torch.randn(4, 3, 56, 56)
    without = train_step(clean, x)[0]
    clean.load_state_dict(native.state_dict())
    stochastic_depth(clean, p=P, p_scale=p_scale, regularizer=lambda p: StochasticDepth(p, "row"))
    assert_same_training_step(native, clean, x, without)


def test_shake_drop_at_the_rates_of_its_paper() -> None:
    """P l / L for block l of L. Each sample's branch has one factor, and its gradient another one."""
    model, x = torchvision.models.resnet18(num_classes=5), torch.randn(6, 3, 64, 64)
    drop = stochastic_depth(model, p=0.5, p_scale="depth", regularizer=ShakeDrop)
    assert [(site.name, site.p) for site in drop.sites][::3] == [
        ("layer1.0.bn2", 0.0625),
        ("layer2.1.bn2", 0.25),
        ("layer4.0.bn2", 0.4375),
    ]
    end, branch = model.layer4[1].bn2, torch.randn(2000, 512, 1, 1, requires_grad=True)
    with drop.disabled():
        clean = end(branch)
    y = end(branch)
    ratio = (y / clean)[:, :, 0, 0].median(1).values
    torch.testing.assert_close(y, clean * ratio[:, None, None, None], rtol=1e-3, atol=1e-3)
    assert (ratio - 2).abs().lt(1e-3).double().mean().item() == pytest.approx(0.5, abs=4 * 0.5 / 2000**0.5)
    assert not all_equal(train_step(model, x), train_step(model, x))
    assert drop.probe(x).eval_identical


class TestModelsWithoutStochasticDepth:
    """If every branch is dropped, a residual block computes only its skip."""

    def test_torchvision_resnet_reduces_to_its_skips(self) -> None:
        model = torchvision.models.resnet50(num_classes=5).train()
        stochastic_depth(model, p=1.0, p_scale=None)
        x = torch.rand(2, 64, 16, 16)
        for block in (*model.layer1, *model.layer2):
            skip = block.downsample[0](x) if block.downsample else x
            expected = (
                F.relu(F.batch_norm(skip, None, None, *norm_parameters(block), training=True))
                if block.downsample
                else x
            )
            x = block(x)
            torch.testing.assert_close(x, expected)

    def test_torchvision_vit_reduces_to_its_embeddings(self) -> None:
        model = torchvision.models.VisionTransformer(32, 8, 2, 2, 16, 32, num_classes=5).train()
        stochastic_depth(model, p=1.0, p_scale=None)
        x = torch.randn(3, 17, 16)
        assert torch.equal(model.encoder.layers(x), x)

    @pytest.mark.parametrize("kind", ["ViT", "CLIP", "BERT", "T5", "LLaMA", "GPT-2"])
    def test_transformers_layers_reduce_to_their_skips(self, kind: str) -> None:
        transformers = pytest.importorskip("transformers")
        size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
        tokens = {"input_ids": torch.arange(6)[None]}
        if kind == "ViT":
            model = transformers.ViTModel(transformers.ViTConfig(**size, image_size=32, patch_size=8))
            tokens = {"pixel_values": torch.randn(1, 3, 32, 32)}
        elif kind == "CLIP":
            model = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**size, image_size=32, patch_size=8))
            tokens = {"pixel_values": torch.randn(1, 3, 32, 32)}
        elif kind == "BERT":
            model = transformers.BertModel(transformers.BertConfig(**size, vocab_size=50, hidden_dropout_prob=0.0))
        elif kind == "T5":
            sizes = {"d_model": 16, "num_layers": 2, "num_heads": 2, "d_kv": 8, "d_ff": 16, "dropout_rate": 0.0}
            model = transformers.T5EncoderModel(transformers.T5Config(**sizes, vocab_size=50))
        elif kind == "LLaMA":
            model = transformers.LlamaModel(transformers.LlamaConfig(**size, num_key_value_heads=2, vocab_size=50))
        else:
            config = transformers.GPT2Config(
                n_embd=16, n_layer=2, n_head=2, vocab_size=50, embd_pdrop=0.0, resid_pdrop=0.0
            )
            model = transformers.GPT2Model(config)
        plain = model.train()(**tokens, output_hidden_states=True).hidden_states
        stochastic_depth(model, p=1.0, p_scale=None)
        states = model(**tokens, output_hidden_states=True).hidden_states
        if kind == "BERT":  # its norms are on the skip
            layer = model.encoder.layer[0]
            assert torch.equal(states[1], layer.output.LayerNorm(layer.attention.output.LayerNorm(states[0])))
        else:
            assert torch.equal(states[1], states[0])
        assert not torch.equal(plain[1], plain[0])

    @pytest.mark.parametrize("norm_first", [True, False])
    @pytest.mark.parametrize("kind", ["Wav2Vec2", "Hubert", "UniSpeech"])
    def test_audio_encoders_reduce_to_their_skips(self, kind: str, norm_first: bool) -> None:
        transformers = pytest.importorskip("transformers")
        size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
        convolutions = {"conv_dim": (16,), "conv_stride": (4,), "conv_kernel": (4,), "num_conv_pos_embeddings": 4}
        off = {"hidden_dropout": 0.0, "layerdrop": 0.0, "mask_time_prob": 0.0, "feat_proj_dropout": 0.0}
        groups = {"num_conv_pos_embedding_groups": 2, "do_stable_layer_norm": norm_first}
        config = getattr(transformers, f"{kind}Config")(**size, **convolutions, **off, **groups)
        model = getattr(transformers, f"{kind}Model")(config).train()
        drop = stochastic_depth(model, p=1.0, p_scale=None)
        assert [site.name for site in drop.sites][:2] == ["encoder.layers.0.attention", "encoder.layers.0.feed_forward"]
        before, after, _ = model(torch.randn(2, 400), output_hidden_states=True).hidden_states
        if not norm_first:  # its norms are on the skip
            layer = model.encoder.layers[0]
            before = layer.final_layer_norm(layer.layer_norm(before))
        assert torch.equal(after, before)
        with drop.disabled():
            before, after, _ = model(torch.randn(2, 400), output_hidden_states=True).hidden_states
        assert not torch.equal(after, before)

    @staticmethod
    def encoder_decoder(kind: str) -> tuple[nn.Module, dict[str, Tensor]]:
        transformers = pytest.importorskip("transformers")
        size = {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "encoder_layers": 2, "decoder_layers": 2}
        size |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": 50, "dropout": 0.0}
        size |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
        inputs = {"input_ids": torch.arange(3, 9)[None]}
        if kind == "Whisper":
            size |= {"num_mel_bins": 8, "max_source_positions": 10}
            inputs = {"input_features": torch.randn(1, 8, 20)}
        model = getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**size))
        return model, {**inputs, "decoder_input_ids": torch.arange(3, 9)[None]}

    @pytest.mark.parametrize("kind", ["Whisper", "MBart", "Pegasus", "Bart", "Marian"])
    def test_encoder_decoders_reduce_to_their_skips(self, kind: str) -> None:
        model, inputs = self.encoder_decoder(kind)
        drop = stochastic_depth(model.train(), p=1.0, p_scale=None)
        assert len(drop.sites) == 2 * 2 + 2 * 3
        for part, layers in (("encoder", model.encoder.layers), ("decoder", model.decoder.layers)):
            before, after, *_ = model(**inputs, output_hidden_states=True)[f"{part}_hidden_states"]
            if kind in ("Bart", "Marian"):  # their norms are on the skip
                for name in ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"):
                    before = getattr(layers[0], name, nn.Identity())(before)
            assert torch.equal(after, before)
            with drop.disabled():
                before, after, *_ = model(**inputs, output_hidden_states=True)[f"{part}_hidden_states"]
            assert not torch.equal(after, before)

    def test_whisper_drops_whole_branches_for_each_sample(self) -> None:
        model, inputs = self.encoder_decoder("Whisper")
        drop = stochastic_depth(model.train(), p=0.5, p_scale=None)
        samples = {name: value.expand(16, *value.shape[1:]) for name, value in inputs.items()}
        with drop.recording() as seen:
            model(**samples)
        for record in seen.values():
            assert len(record.mask) == 16
            assert (record.mask.flatten(1).all(1) | ~record.mask.flatten(1).any(1)).all()

    @pytest.mark.parametrize(
        "kind",
        [
            "models.opt.modeling_opt.OPTDecoderLayer",
            "models.fsmt.modeling_fsmt.EncoderLayer",
            "models.pegasus_x.modeling_pegasus_x.PegasusXEncoderLayer",
            "models.qwen2_5_omni.modeling_qwen2_5_omni.Qwen2_5OmniAudioEncoderLayer",
        ],
    )
    def test_layers_without_a_leading_batch_axis_are_not_hooked(self, kind: str) -> None:
        """DropPath would drop whole tokens or time steps instead of samples. Pegasus-X calls `fc2` for two branches."""
        pytest.importorskip("transformers")
        module, _, name = kind.rpartition(".")
        library = pytest.importorskip(f"transformers.{module}")
        config: Any = {
            "OPTDecoderLayer": lambda: library.OPTConfig(hidden_size=16, ffn_dim=16, num_attention_heads=2),
            "EncoderLayer": lambda: library.FSMTConfig(d_model=16, encoder_ffn_dim=16, encoder_attention_heads=2),
            "PegasusXEncoderLayer": lambda: library.PegasusXConfig(
                d_model=16, encoder_ffn_dim=16, encoder_attention_heads=2
            ),
            "Qwen2_5OmniAudioEncoderLayer": lambda: library.Qwen2_5OmniAudioEncoderConfig(
                d_model=16, encoder_ffn_dim=16, encoder_attention_heads=2
            ),
        }[name]()
        extra = {"stagger_blocks_this_layer": False} if name.startswith("Pegasus") else {}
        layer = getattr(library, name)(config=config, **extra)
        assert {"self_attn", "self_attn_layer_norm", "fc1", "fc2", "final_layer_norm"} <= set(layer._modules)
        assert branch_ends(layer) is None or not rows_are_samples(layer)


class TestFamiliesOfTransformers:
    """One family for each structure; `benchmarks/transformers_zoo.py` checks all families in the same way."""

    STATUSES: ClassVar[dict[str, str]] = {
        "albert": "passed",
        "bloom": "passed",
        "doge": "passed",
        "falcon_h1": "passed",
        "fnet": "passed",
        "gemma2": "passed",
        "gemma4_text": "passed",
        "glm4": "passed",
        "levit": "passed",
        "mamba": "passed",
        "moonshine": "passed",
        "mpnet": "passed",
        "mpt": "passed",
        "olmo2": "passed",
        "opt": "batch",
        "parakeet_encoder": "passed",
        "pixtral": "batch",
        "rf_detr": "passed",
        "swin": "passed",
        "swinv2": "passed",
    }

    @staticmethod
    def check(name: str) -> dict[str, Any]:
        pytest.importorskip("transformers")
        from families import tiny
        from families.check import RecipeCheck
        from families.layers import find_runs
        from families.recipes import CASES, run_case

        for model in tiny.models(name):
            runs, missing, _ = find_runs(model)
            if not missing:
                return run_case(CASES["stochastic_depth"], RecipeCheck(model, runs))
        raise AssertionError

    @pytest.mark.filterwarnings("ignore")
    @pytest.mark.parametrize("name", STATUSES)
    def test_every_branch_of_every_layer_has_a_site_at_its_end(self, name: str) -> None:
        record = self.check(name)
        assert record["status"] == self.STATUSES[name], record
        assert record["sites"]

    @pytest.mark.filterwarnings("ignore")
    @pytest.mark.parametrize("name", ["muse_spark_text", "deepseek_v4"])
    def test_layers_with_gates_or_several_streams_raise(self, name: str) -> None:
        assert self.check(name)["status"] == "refused"

    def test_packed_images_need_mode_batch(self) -> None:
        pytest.importorskip("transformers")
        from families import tiny

        model = next(tiny.models("qwen3_vl"))
        plan = stochastic_depth.plan(model)
        assert [site.name for site in plan.sites if "visual" in site.name] == []
        assert plan.warnings == [
            "skipped all 2 layers in 'visual.blocks': the first axis of their branches is not the batch. "
            'mode="batch" includes them.'
        ]
        plan = stochastic_depth.plan(model, mode="batch")
        assert sum("visual" in site.name for site in plan.sites) == 4
        assert plan.warnings == []
        with pytest.raises(LayerError, match=r"on the first axis \(mode=\"batch\" accepts other layouts"):
            stochastic_depth(model.visual)


class Attention(nn.Linear):
    is_causal = True


class TestRolesOfChildren:
    """A layer is recognized only if the recipe knows what each of its children is for."""

    class Layer(nn.Module):
        def __init__(self, **extra: nn.Module) -> None:
            super().__init__()
            self.input_layernorm, self.post_attention_layernorm = nn.LayerNorm(4), nn.LayerNorm(4)
            self.self_attn, self.mlp = Attention(4, 4), nn.Linear(4, 4)
            for name, module in extra.items():
                self.add_module(name, module)

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.self_attn(self.input_layernorm(x))
            return x + self.mlp(self.post_attention_layernorm(x))

    class OneAddition(Layer):
        def forward(self, x: Tensor) -> Tensor:
            x = self.self_attn(self.input_layernorm(x))
            return x + self.mlp(self.post_attention_layernorm(x))

    def test_pre_norm_layer(self) -> None:
        assert branch_ends(self.Layer()) == ("self_attn", "mlp")

    @pytest.mark.parametrize("name", ["act_fn", "self_attn_layer_scale", "rotary_emb", "dropout"])
    def test_activations_scales_and_modules_without_parameters_do_not_matter(self, name: str) -> None:
        module = nn.Dropout() if name in ("rotary_emb", "dropout") else nn.PReLU()
        assert branch_ends(self.Layer(**{name: module})) == ("self_attn", "mlp")

    @pytest.mark.parametrize("name", ["adapter", "residual_gate", "attn_conv", "third_norm"])
    def test_unknown_child_is_not_recognized(self, name: str) -> None:
        assert branch_ends(self.Layer(**{name: nn.Linear(4, 4)})) is None

    def test_branch_without_an_addition_is_not_recognized(self) -> None:
        assert branch_ends(self.OneAddition()) is None

    def test_norms_after_the_branches_are_the_sites(self) -> None:
        """A norm would undo the scale of the remaining samples."""
        layer = self.Layer(pre_feedforward_layernorm=nn.LayerNorm(4), post_feedforward_layernorm=nn.LayerNorm(4))
        assert branch_ends(layer) == ("post_attention_layernorm", "post_feedforward_layernorm")

    def test_list_of_unrecognized_layers_warns(self) -> None:
        known, unknown = ([self.Layer(**extra) for _ in range(2)] for extra in ({}, {"gate": nn.Linear(4, 4)}))
        model = nn.ModuleDict({"layers": nn.ModuleList(known), "tower": nn.ModuleList(unknown)})
        assert stochastic_depth.plan(model).warnings == [
            "skipped all 2 layers in 'tower': the recipe does not recognize them."
        ]


def norm_parameters(block: Any) -> tuple[Tensor, Tensor]:
    return block.downsample[1].weight, block.downsample[1].bias


class TestRates:
    def test_rates_grow_from_zero_to_p(self) -> None:
        rates = [site.p for site in stochastic_depth(torchvision.models.resnet18(), p=0.7).sites]
        assert rates == pytest.approx([0.1 * i for i in range(8)])

    def test_depth_scale_of_the_paper_starts_above_zero(self) -> None:
        rates = [site.p for site in stochastic_depth(torchvision.models.resnet18(), p=0.8, p_scale="depth").sites]
        assert rates == pytest.approx([0.1 * i for i in range(1, 9)])

    def test_both_branches_of_a_block_have_the_same_rate(self) -> None:
        drop = stochastic_depth(timm.create_model("vit_tiny_patch16_224"), p=0.11)
        pairs = [(site.name, site.p) for site in drop.sites][2:4]
        assert pairs == [("blocks.1.drop_path1", pytest.approx(0.01)), ("blocks.1.drop_path2", pytest.approx(0.01))]

    def test_blocks_without_a_skip_count_toward_the_depth(self) -> None:
        model = timm.create_model("efficientnet_lite0", drop_path_rate=0.0)
        assert branch_ends(model.blocks[1][0]) == ()  # it changes the resolution
        drop = stochastic_depth(model, p=0.16)
        assert drop.sites[0].name == "blocks.1.1.drop_path"
        assert drop.sites[0].p == pytest.approx(0.16 * 2 / 15)

    def test_mode_batch(self) -> None:
        model = torchvision.models.resnet18(num_classes=5).train()
        drop = stochastic_depth(model, p=0.5, mode="batch", p_scale=None)
        assert "mode='batch'" in drop.sites[0].regularizer

    def test_mode_with_another_regularizer_raises(self) -> None:
        with pytest.raises(ValueError, match="mode='batch' only applies to DropPath"):
            stochastic_depth(torchvision.models.resnet18(), mode="batch", regularizer=TimmDropPath)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: timm.create_model("vit_tiny_patch16_224", drop_path_rate=0.1), "blocks.1.drop_path1"),
        (lambda: timm.create_model("resnet26", drop_path_rate=0.1), "layer1.1.drop_path"),
        (lambda: torchvision.models.convnext_tiny(), "features.1.1.stochastic_depth"),
    ],
)
def test_model_with_stochastic_depth_raises(make: Callable[[], nn.Module], name: str) -> None:
    with pytest.raises(InjectionError, match=rf"already has it: '{name}' is a \w+ at rate 0\.") as excinfo:
        stochastic_depth(make())
    assert "drop_path_rate=0." in str(excinfo.value)
    assert "set_dropout" in str(excinfo.value)


def test_model_with_stochastic_depth_at_0_is_accepted() -> None:
    from hookdrop.recipes import set_dropout

    model = torchvision.models.convnext_tiny()
    inject(model, set_dropout(p={"**.stochastic_depth": 0.0}))
    assert len(stochastic_depth(model).sites) == 18


def test_model_without_residual_branches_raises() -> None:
    with pytest.raises(LayerError, match="found no matching layer"):
        stochastic_depth(timm.create_model("mobilenetv1_100"))


def test_consecutive_convolutions_are_not_a_branch() -> None:
    """As in a U-Net, where dropping their output would drop the whole signal."""
    layers = {
        "conv1": nn.Conv2d(3, 3, 3),
        "bn1": nn.BatchNorm2d(3),
        "conv2": nn.Conv2d(3, 3, 3),
        "bn2": nn.BatchNorm2d(3),
    }
    with pytest.raises(LayerError, match="found no matching layer"):
        stochastic_depth(nn.ModuleDict({"pair": nn.ModuleDict(layers)}))


def test_blocks_inside_a_wrapper_are_found() -> None:
    model = torch.nn.DataParallel(torchvision.models.resnet18())
    assert stochastic_depth(model).sites[0].name == "layer1.0.bn2"


@pytest.mark.filterwarnings("ignore::hookdrop.HookdropWarning")
def test_single_block_needs_another_p_scale() -> None:
    model = nn.Sequential(torchvision.models.resnet18().layer1[0])
    with pytest.raises(ValueError, match="depth_from_zero"):
        stochastic_depth(model)
    assert stochastic_depth(model, p_scale="depth").sites[0].p == pytest.approx(0.1)


class TestCustomBlocks:
    """Blocks of user code: the recipe finds the end of a branch, or skips the block."""

    @staticmethod
    def block(*extra: str, downsample: bool = True) -> nn.Module:
        parts = {
            "conv1": nn.Conv2d(4, 4, 1),
            "bn1": nn.BatchNorm2d(4),
            "conv2": nn.Conv2d(4, 4, 1),
            "bn2": nn.BatchNorm2d(4),
        }
        parts |= {name: nn.Identity() for name in extra}
        module = nn.Module()
        for name, part in parts.items():
            module.add_module(name, part)
        if downsample:
            module.downsample = None
        return module

    def test_gate_ends_the_branch(self) -> None:
        model = nn.ModuleList([self.block("se"), self.block("se")])
        assert [site.name for site in stochastic_depth.plan(model).sites] == ["0.se", "1.se"]

    def test_pre_activation_block_is_not_recognized(self) -> None:
        block = self.block()
        names = ("bn1", "conv1", "bn2", "conv2")
        parts = dict(block.named_children())
        block._modules.clear()
        block._modules.update({name: parts[name] for name in names})
        assert branch_ends(block) is None

    def test_drop_path_number_is_not_a_block(self) -> None:
        """It would count as a block and shift the rates of all other blocks."""
        stages = [nn.Sequential(self.block(), self.block()), nn.Sequential(self.block())]
        for stage in stages:
            stage.drop_path = 0.0
        rates = [site.p for site in stochastic_depth.plan(nn.Sequential(*stages), p=0.2).sites]
        assert rates == pytest.approx([0.0, 0.1, 0.2])

    def test_drop_path_number_above_zero_raises(self) -> None:
        block = self.block()
        block.drop_path = 0.2
        with pytest.raises(InjectionError, match=r"already has it: 1\.drop_path is 0\.2"):
            stochastic_depth(nn.Sequential(self.block(), block))

    def test_shared_module_with_two_rates_raises(self) -> None:
        blocks, shared = [self.block(), self.block()], nn.Identity()
        for block in blocks:
            block.drop_path = shared
        with pytest.raises(LayerError, match=r"'0\.drop_path' and '1\.drop_path' are the same module"):
            stochastic_depth(nn.Sequential(*blocks))

    def test_unrecognized_layers_warn(self) -> None:
        other = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        plan = stochastic_depth.plan(nn.ModuleDict({"layers": nn.ModuleList([self.block(), other, self.block()])}))
        assert plan.warnings == ["skipped 1 of 3 layers in 'layers': the recipe does not recognize 'layers.1'."]

    @pytest.mark.parametrize("library", ["BERT", "GPT-2"])
    def test_cross_attention_is_a_branch(self, library: str) -> None:
        transformers = pytest.importorskip("transformers")
        if library == "BERT":
            size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
            config = transformers.BertConfig(**size, vocab_size=50, is_decoder=True, add_cross_attention=True)
            names = [site.name for site in stochastic_depth.plan(transformers.BertModel(config)).sites]
        else:
            config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=50, add_cross_attention=True)
            names = [site.name for site in stochastic_depth.plan(transformers.GPT2Model(config)).sites]
        assert len(names) == 6
        assert sum("crossattention" in name for name in names) == 2


# --- on a subset of the batch

SUBSETS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "timm": (lambda: timm.create_model("vit_tiny_patch16_224", depth=2, img_size=32, num_classes=5), ["attn", "mlp"]),
    "timm, layer scale": (
        lambda: timm.create_model("vit_small_patch14_dinov2", depth=2, img_size=28, num_classes=5),
        ["attn", "mlp"],
    ),
    "LLaMA": (lambda: tiny_llama(), ["self_attn", "mlp"]),
}


def tiny_llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**size, num_key_value_heads=2, vocab_size=9, use_cache=False)
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("name", SUBSETS)
def test_subset_drops_the_branches_that_row_mode_drops(name: str) -> None:
    """If all but one sample are dropped in all blocks, they leave the blocks unchanged, in both modes."""
    make, branches = SUBSETS[name]
    model = make()
    drop = stochastic_depth(model, p=1.0, mode="subset", p_scale=None)
    assert [site.name.rpartition(".")[2] for site in drop.sites] == branches * 2
    image = 28 if "scale" in name else 32
    x = torch.randint(9, (6, 4)) if name == "LLaMA" else torch.randn(6, 3, image, image)
    inner = [
        module for module in model.modules() if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) == 2
    ]
    blocks = next(module for module in inner if branches[0] in dict(module[0].named_children()))
    before: list[Tensor] = []
    after: list[Tensor] = []
    blocks[0].register_forward_pre_hook(lambda module, args: before.append(args[0]))
    blocks[1].register_forward_hook(lambda module, args, y: after.append(y if isinstance(y, Tensor) else y[0]))
    out = model(x)
    unchanged = (before[0] == after[0]).flatten(1).all(1)
    assert int(unchanged.sum()) >= 6 - 4  # one sample for each of the four branches
    (out if isinstance(out, Tensor) else out.logits).sum().backward()


@pytest.mark.parametrize(
    "make",
    [
        lambda: timm.create_model("swin_tiny_patch4_window7_224", drop_path_rate=0.0),
        lambda: timm.create_model("resnet18"),
        lambda: timm.create_model("vit_relpos_base_patch32_plus_rpn_256"),
    ],
    ids=["windows", "cnn", "norm after the branch"],
)
def test_subset_raises_if_branches_are_not_modules(make: Callable[[], nn.Module]) -> None:
    with torch.device("meta"):
        model = make()
    with pytest.raises(LayerError, match=r"mode='subset' needs branches that are modules(.|\n)*mode=\"row\""):
        stochastic_depth(model, mode="subset")
