"""Built-in dropout of transformers, and residual dropout for decoders that have none."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookdrop import LayerError, LinearSchedule, inject, plan
from hookdrop.core.tensor_tree import first_tensor, tensors
from hookdrop.measure.prediction import Summary
from hookdrop.recipes import residual_dropout, set_dropout
from hookdrop.survey.isolation import call
from tests.support.tensors import all_equal
from tests.support.transformers_models import SIZE, bart, gpt2, llama

timm = pytest.importorskip("timm")
torchvision = pytest.importorskip("torchvision")
transformers = pytest.importorskip("transformers")
CNBlockConfig = torchvision.models.convnext.CNBlockConfig

TOKENS = {"input_ids": torch.arange(8)[None]}


def lora() -> nn.Module:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"], lora_dropout=0.1))


def resnet() -> nn.Module:
    rates = {"drop_rate": 0.2, "drop_path_rate": 0.2, "drop_block_rate": 0.1}
    sizes = {"channels": (8, 8, 16, 16), "stem_width": 8, "num_classes": 5}
    return timm.create_model("resnet18", zero_init_last=False, **sizes, **rates)


def convnext() -> nn.Module:
    blocks = [CNBlockConfig(8, 16, 2), CNBlockConfig(16, None, 2)]
    return torchvision.models.ConvNeXt(blocks, stochastic_depth_prob=0.3, layer_scale=1.0, num_classes=5)


IMAGES = torch.randn(2, 3, 64, 64)


def wav2vec2() -> nn.Module:
    sizes = {"conv_dim": (16,), "conv_stride": (2,), "conv_kernel": (2,), "apply_spec_augment": False}
    return transformers.Wav2Vec2Model(transformers.Wav2Vec2Config(**SIZE, **sizes, layerdrop=0.2))


SAMPLED: dict[str, tuple[Callable[[], nn.Module], Any, set[str]]] = {
    "timm's ResNet": (resnet, IMAGES, {"DropPath", "DropBlock2d", "ResNet"}),
    "torchvision's DenseNet": (
        lambda: torchvision.models.DenseNet(8, (2, 2), 16, drop_rate=0.3, num_classes=5), IMAGES, {"_DenseLayer"},
    ),
    "BART": (
        lambda: bart("Model", encoder_layerdrop=0.2), TOKENS,
        {f"Bart{part}" for part in ("Encoder", "EncoderLayer", "Decoder", "DecoderLayer", "Attention")},
    ),
    "LLaMA": (lambda: llama("Model", attention_dropout=0.3), TOKENS, {"LlamaAttention"}),
    "Wav2Vec 2.0": (wav2vec2, torch.randn(2, 64), {"Dropout", "Wav2Vec2Attention", "Wav2Vec2Encoder"}),
}  # fmt: skip
"""A model, its input, and the classes whose modules drop in training mode."""
MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "a stack of LSTMs": (lambda: nn.LSTM(16, 16, 2, dropout=0.3), (torch.randn(4, 2, 16),)),
    "a transformer layer": (lambda: nn.TransformerEncoderLayer(16, 2, 16, 0.2), (torch.randn(2, 4, 16),)),
    "timm's ResNet": (resnet, (torch.randn(2, 3, 96, 96),)),
    "torchvision's ConvNeXt": (convnext, (IMAGES,)),
    "BART": (lambda: bart("Model", activation_dropout=0.1), TOKENS),
}


def outputs(model: nn.Module, given: Any, seed: int) -> list[Tensor]:
    """Return the outputs of a forward in training mode, with batch norms in eval mode."""
    model.train()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        return tensors(call(model, given))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore:out of reach")
def test_no_rate_is_missed_and_each_is_read(name: str) -> None:
    """With all rates at 0 the outputs do not depend on the seed; with one rate above 0 they do."""
    torch.manual_seed(0)
    model, given = MODELS[name][0](), MODELS[name][1]
    before = outputs(model, given, 0)
    assert not all_equal(before, outputs(model, given, 1))
    sites = plan(model, set_dropout(), example_input=given).sites
    with inject(model, set_dropout(p=0.0), example_input=given):
        clean = outputs(model, given, 0)
        assert all_equal(clean, outputs(model, given, 1))
    for site in sites:
        if "layerdrop" in site.name:
            continue  # the model has only one layer to drop
        one = set_dropout(p={other.name: 0.6 * (other is site) for other in sites})
        with inject(model, one, example_input=given):
            assert any(not all_equal(outputs(model, given, seed), clean) for seed in (1, 2, 3)), site
    assert all_equal(outputs(model, given, 0), before)


class TestSampling:
    """Monte Carlo dropout with the dropout that models have."""

    @pytest.mark.parametrize("name", SAMPLED)
    def test_predictions_are_those_of_a_loop_by_hand_bit_for_bit(self, name: str) -> None:
        """The loop sets the flags of the modules of these classes alone, so batch norms and all else stay in eval mode."""
        make, given, classes = SAMPLED[name]
        torch.manual_seed(0)
        model = make().eval()
        drop = inject(model, set_dropout(), example_input=given)
        state = {key: x.clone() for key, x in model.state_dict().items()}
        torch.manual_seed(1)
        found = drop.predict(given, samples=6, output=first_tensor)
        assert not any(module.training for module in model.modules())
        for module in model.modules():
            module.training = type(module).__name__ in classes
        summary = Summary("softmax")
        torch.manual_seed(1)
        with torch.no_grad():
            for _ in range(6):
                summary.add(first_tensor(call(model, given)), 1)
        wanted = summary.prediction()
        assert all_equal([found.mean, found.variance], [wanted.mean, wanted.variance])
        assert bool((found.variance > 0).any())
        assert all(torch.equal(state[key], x) for key, x in model.state_dict().items())

    def test_branches_that_need_training_mode_stay_off(self) -> None:
        """GoogLeNet has auxiliary heads in training mode only: their dropout is a site that does not run."""
        model = torchvision.models.googlenet(init_weights=False, num_classes=5).eval()
        found = inject(model, set_dropout(), example_input=IMAGES).predict(IMAGES, samples=3)
        assert found.mean.shape == (2, 5)
        assert bool((found.variance > 0).any())

    @pytest.mark.filterwarnings("ignore")  # of flex attention that is not compiled
    def test_attention_that_takes_no_dropout_is_refused_with_the_reason(self) -> None:
        model = llama("Model", attention_dropout=0.1, attn_implementation="flex_attention").eval()
        with pytest.raises(LayerError, match="functional dropout"):
            inject(model, set_dropout(), example_input=TOKENS)


class TestTransformers:
    @pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
    def test_lora_dropout_is_listed(self) -> None:
        """PEFT calls it as `dropout = self.lora_dropout[name]; dropout(x)`."""
        found = plan(lora(), set_dropout(), example_input=TOKENS)
        names = [site.name for site in found.sites if site.p]
        assert names == [f"model.layers.{i}.self_attn.q_proj.lora_dropout.default" for i in (0, 1)]
        assert found.warnings == []

    @pytest.mark.parametrize(("name", "attention"), [("Llama", "sdpa"), ("Qwen3", "eager")])
    def test_schedule_drives_the_attention_dropout(self, name: str, attention: str) -> None:
        """At each step as in a model that was built with that rate, bit for bit, with the same random numbers."""
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")
        settings = {**SIZE, "num_key_value_heads": 2, "vocab_size": 50, "pad_token_id": 0, "head_dim": 8}
        settings |= {"attn_implementation": attention}
        make = getattr(transformers, f"{name}Model")
        built = {rate: make(config(**settings, attention_dropout=rate)) for rate in (0.0, 0.2, 0.4)}
        model = built[0.0]
        clean = outputs(model, TOKENS, 0)
        drop = inject(model, set_dropout(p=0.4), schedule=LinearSchedule(2), example_input=TOKENS)
        assert [site.name for site in drop.sites] == [f"layers.{i}.self_attn.attention_dropout" for i in (0, 1)]
        for rate, twin in built.items():
            twin.load_state_dict(model.state_dict())
            assert drop.p == rate
            assert all_equal(outputs(model, TOKENS, 1), outputs(twin, TOKENS, 1) if rate else clean)
            drop.step()
        drop.remove()
        assert all_equal(outputs(model, TOKENS, 1), clean)


DECODERS: dict[str, dict[str, Any]] = {"Gemma2": {"num_key_value_heads": 2, "head_dim": 8}, "Phi": {}}
"""With norms before and after each branch, and with parallel branches."""


class TestResidualDropout:
    @pytest.mark.parametrize("name", DECODERS)
    @pytest.mark.filterwarnings("ignore:.*token_id", "ignore:the rate of:hookdrop.HookdropWarning")
    def test_rate_1_drops_exactly_what_a_layer_adds(self, name: str) -> None:
        config = getattr(transformers, f"{name}Config")(**SIZE, vocab_size=50, pad_token_id=0, **DECODERS[name])
        model = getattr(transformers, f"{name}Model")(config).train()
        drop = inject(model, residual_dropout(p=1.0))
        states = model(**TOKENS, output_hidden_states=True).hidden_states
        assert len(drop.sites) == (2 if name == "Phi" else 4)  # Phi calls one dropout for both branches
        assert torch.equal(states[1], states[0])
        drop.remove()
        states = model(**TOKENS, output_hidden_states=True).hidden_states
        assert not torch.equal(states[1], states[0])

    def test_depth_from_zero_raises_the_rate_linearly_with_the_layer(self) -> None:
        """LIMA: from 0 at the first layer to p at the last, the same for both branches of a layer."""
        model = llama("Model", num_hidden_layers=4)
        drop = inject(model, residual_dropout(p=0.3), p_scale="depth_from_zero")
        assert [site.p for site in drop.sites] == pytest.approx([0.0, 0.0, 0.1, 0.1, 0.2, 0.2, 0.3, 0.3])
        measured = drop.probe(torch.randint(0, 50, (8, 64)))
        dropped = [measured.sites[f"layers.{layer}.self_attn"].dropped for layer in range(4)]
        assert dropped == pytest.approx([0.0, 0.1, 0.2, 0.3], abs=0.02)  # of 24,576 elements: 7 standard errors

    @pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
    def test_decoder_inside_a_peft_model_is_found(self) -> None:
        assert inject(lora(), residual_dropout()).sites[0].name.endswith("layers.0.self_attn")

    def test_model_with_dropout_at_0_or_of_attention_is_accepted(self) -> None:
        assert len(inject(gpt2("Model", resid_pdrop=0.0, embd_pdrop=0.0), residual_dropout()).sites) == 4
        assert inject(llama("Model", attention_dropout=0.1), residual_dropout()).sites


@pytest.mark.parametrize("kind", ["WavLM", "Wav2Vec2"])
def test_speech_models_have_all_rates_of_their_default_configs(kind: str) -> None:
    """They also mask time steps with random numbers of NumPy, and have no embedding of a mask that is switched off."""
    rates = ("layerdrop", "hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout")
    convs = {"conv_dim": (16,), "conv_stride": (20,), "conv_kernel": (20,)}
    config = getattr(transformers, f"{kind}Config")(**SIZE, **convs)
    model, inputs = getattr(transformers, f"{kind}Model")(config), {"input_values": torch.randn(2, 2000)}
    for step, name in enumerate(rates):
        assert getattr(config, name) in (0.0, 0.1)
        setattr(config, name, 0.2 + step / 100)
    wanted = sorted(getattr(config, name) for name in rates)
    found = plan(type(model)(config), set_dropout(), example_input=inputs)
    assert sorted({site.p for site in found.sites}) == wanted
    assert any("random numbers of Python, NumPy or compiled code" in text for text in found.warnings)
    default = plan(model, set_dropout(), example_input=inputs)
    assert [site.name for site in default.sites] == [site.name for site in found.sites]
