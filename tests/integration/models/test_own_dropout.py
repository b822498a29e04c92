"""Monte Carlo dropout with the dropout that models of torchvision, timm and transformers have, against flags set by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookdrop import LayerError, find, inject
from hookdrop.injection.prediction import Summary
from hookdrop.recipes import set_dropout
from tests.support.transformers_models import SIZE, bart, bert, llama

timm = pytest.importorskip("timm")
torchvision = pytest.importorskip("torchvision")
transformers = pytest.importorskip("transformers")

TOKENS = {"input_ids": torch.arange(8)[None]}
IMAGES = {32: torch.randn(2, 3, 32, 32), 64: torch.randn(2, 3, 64, 64)}


def vit() -> nn.Module:
    rates = {"proj_drop_rate": 0.1, "attn_drop_rate": 0.1, "drop_path_rate": 0.2, "drop_rate": 0.1}
    return timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=5, **rates)


def resnet() -> nn.Module:
    rates = {"drop_rate": 0.2, "drop_path_rate": 0.2, "drop_block_rate": 0.1}
    return timm.create_model("resnet18", zero_init_last=False, num_classes=5, **rates)


def densenet() -> nn.Module:
    return torchvision.models.DenseNet(8, (2, 2), 16, drop_rate=0.3, num_classes=5)


def wav2vec2() -> nn.Module:
    sizes = {"conv_dim": (16,), "conv_stride": (2,), "conv_kernel": (2,)}
    return transformers.Wav2Vec2Model(transformers.Wav2Vec2Config(**SIZE, **sizes, layerdrop=0.2))


MODELS: dict[str, tuple[Callable[[], nn.Module], Any, set[str]]] = {
    "timm's ViT": (vit, IMAGES[32], {"Dropout", "DropPath", "Attention"}),
    "timm's ResNet": (resnet, IMAGES[64], {"DropPath", "DropBlock2d", "ResNet"}),
    "torchvision's DenseNet": (densenet, IMAGES[64], {"_DenseLayer"}),
    "BERT": (lambda: bert("Model"), TOKENS, {"Dropout", "BertSelfAttention"}),
    "BART": (
        lambda: bart("Model", encoder_layerdrop=0.2),
        TOKENS,
        {f"Bart{part}" for part in ("Encoder", "EncoderLayer", "Decoder", "DecoderLayer", "Attention")},
    ),
    "LLaMA": (lambda: llama("Model", attention_dropout=0.3), TOKENS, {"LlamaAttention"}),
    "LLaMA, eager": (
        lambda: llama("Model", attention_dropout=0.3, attn_implementation="eager"),
        TOKENS,
        {"LlamaAttention"},
    ),
    "Wav2Vec 2.0": (wav2vec2, torch.randn(2, 64), {"Dropout", "Wav2Vec2Attention", "Wav2Vec2Encoder"}),
}


def first(out: Any) -> Tensor:
    found = out if isinstance(out, Tensor) else out[0]
    assert isinstance(found, Tensor)
    return found


def call(model: nn.Module, given: Any) -> Tensor:
    return first(model(**given) if isinstance(given, dict) else model(given))


@pytest.mark.parametrize("name", MODELS)
def test_predictions_are_those_of_a_loop_by_hand_bit_for_bit(name: str) -> None:
    """The loop sets the flags of the modules of these classes alone, so batch norms and all else stay in eval mode."""
    torch.manual_seed(0)
    model, given, classes = MODELS[name][0]().eval(), MODELS[name][1], MODELS[name][2]
    own = inject(model, set_dropout(), example_input=given)
    state = {key: x.clone() for key, x in model.state_dict().items()}
    torch.manual_seed(1)
    found = own.predict(given, samples=6, output=first)
    assert not any(module.training for module in model.modules())
    for module in model.modules():
        module.training = type(module).__name__ in classes
    summary = Summary("softmax")
    torch.manual_seed(1)
    with torch.no_grad():
        for _ in range(6):
            summary.add(call(model, given), 1)
    wanted = summary.prediction()
    assert torch.equal(found.mean, wanted.mean)
    assert torch.equal(found.variance, wanted.variance)
    assert bool((found.variance > 0).any())
    assert all(torch.equal(state[key], x) for key, x in model.state_dict().items())


@pytest.mark.parametrize("name", MODELS)
def test_recorded_samples_are_equal_and_removal_restores_the_model(name: str) -> None:
    torch.manual_seed(0)
    model, given = MODELS[name][0]().eval(), MODELS[name][1]
    with torch.no_grad():
        clean = call(model, given)
        own, samples = inject(model, set_dropout(), example_input=given), []
        for record in (False, True):
            torch.manual_seed(1)
            if record:
                with own.recording() as r, own.sampling():
                    samples.append(call(model, given))
            else:
                with own.sampling():
                    samples.append(call(model, given))
        assert torch.equal(*samples)
        with own.recording(last=0) as r, own.sampling():  # a sample may be without a layer
            for _ in range(5):
                call(model, given)
        calls = {name: effect.calls for name, effect in r.totals.sites.items()}
        unseen = [site.name for site in own.sites if site.p and not calls[site.name]]
        assert all("layerdrop" in name or "drop_rate" in name for name in unseen)
        own.remove()
        assert torch.equal(call(model, given), clean)
    assert not find(model)


def test_branches_that_need_training_mode_stay_off() -> None:
    """GoogLeNet has auxiliary heads in training mode only: their dropout is a site that does not run."""
    model = torchvision.models.googlenet(init_weights=False, num_classes=5).eval()
    own = inject(model, set_dropout(), example_input=IMAGES[64])
    found = own.predict(IMAGES[64], samples=3)
    assert found.mean.shape == (2, 5)
    assert bool((found.variance > 0).any())


def test_attention_that_takes_no_dropout_is_refused_with_the_reason() -> None:
    model = llama("Model", attention_dropout=0.1, attn_implementation="flex_attention").eval()
    with pytest.raises(LayerError, match="functional dropout"):
        inject(model, set_dropout(), example_input=TOKENS)


def test_logits_of_a_classifier_have_uncertainty() -> None:
    config = transformers.BertConfig(**SIZE, num_labels=3)
    model = transformers.BertForSequenceClassification(config).eval()
    found = inject(model, set_dropout()).predict(TOKENS, samples=8)
    assert found.mean.shape == (1, 3)
    assert bool((found.mutual_information > 0).all())
