"""Time and memory of a training step with each method, divided by those without: `python benchmarks/costs.py`.

Memory is what a forward pass saves for backward. docs/methods/index.md has the results.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import hookdrop
import timing

LLAMA: Any = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
    "ViT-Tiny of 4 blocks, 16 images of 64 pixels": (
        lambda: timm.create_model("vit_tiny_patch16_224", img_size=64, depth=4),
        torch.randn(16, 3, 64, 64),
    ),
    "ResNet-10, 8 images of 128 pixels": (
        lambda: timm.create_model("resnet10t", num_classes=10),
        torch.randn(8, 3, 128, 128),
    ),
    "DeepLabV3 with MobileNetV3, 4 images of 64 pixels": (
        lambda: torchvision.models.get_model("deeplabv3_mobilenet_v3_large", weights=None, weights_backbone=None),
        torch.randn(4, 3, 64, 64),
    ),
    "LSTM of 128 units, 16 sequences of 32 steps": (
        lambda: nn.Sequential(nn.Embedding(1000, 128), nn.LSTM(128, 128, 2, batch_first=True)),
        torch.randint(1000, (16, 32)),
    ),
    "LLaMA of 2 layers, 8 sequences of 64 tokens": (
        lambda: LlamaForCausalLM(LlamaConfig(vocab_size=1000, use_cache=False, **LLAMA)),
        torch.randint(1000, (8, 64)),
    ),
}
METHODS: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {  # by model: what is injected, by the name of the row
    "ViT": {
        "TokenDropout": ("TokenDropout(p=0.1)", {"layers": "pos_drop"}),
        "HeadDropout": ("head_dropout(p=0.1)", {}),
        "DropKey": ("drop_key(p=0.1)", {}),
        "LayerDrop": ("layer_drop(p=0.1)", {}),
        "GaussianDropout": ("GaussianDropout(p=0.1)", {"layers": "blocks.*.mlp"}),
        "GaussianNoise": ("GaussianNoise(std=0.1)", {"layers": "blocks.*.mlp"}),
        "Mixout": ("Mixout(p=0.7)", {"layers": "blocks.*.mlp.fc1"}),
    },
    "ResNet": {
        "ShakeDrop": ("ShakeDrop(p=0.1)", {"layers": "layer*.*.bn2"}),
        "AlphaDropout": ("AlphaDropout(p=0.1)", {"layers": "layer*.*.bn2"}),
        "Cutout": ("Cutout(size=64)", {"layers": "conv1", "at": "input"}),
        "DSU": ("DSU(p=0.5)", {"layers": ["layer1", "layer2", "layer3", "layer4"]}),
        "Masksembles": ("Masksembles(4)", {"layers": "layer*.*.bn2"}),
        "timm_dropblock": ("timm_dropblock(p=0.1)", {}),
    },
    "DeepLabV3": {"dropblock_unet": ("dropblock_unet(p=0.1, block_size=3)", {})},
    "LSTM": {
        "LockedDropout": ("LockedDropout(p=0.1)", {"layers": "1"}),
        "WeightDrop": ("Dropout(p=0.5)", {"layers": "1", "at": "parameters", "tensor": "weight_hh_*"}),
        "ActivationPenalty": ("ActivationPenalty()", {"layers": "1"}),
        "ClipActivationGrad": ("ClipActivationGrad(max_norm=1.0)", {"layers": "1"}),
        "ClampActivationGrad": ("ClampActivationGrad(min=-1.0, max=1.0)", {"layers": "1"}),
        "ScaleActivationGrad": ("ScaleActivationGrad(factor=-1.0)", {"layers": "1"}),
        "NoiseActivationGrad": ("NoiseActivationGrad(std=0.1)", {"layers": "1"}),
    },
    "LLaMA": {"NEFTune": ("neftune(alpha=5)", {}), "residual_dropout": ("residual_dropout(p=0.1)", {})},
}


def main() -> None:
    """Measure all methods, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=101)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/costs.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)  # threads that wait for one another depend on what else runs
    costs = {name: cost for model in MODELS for name, cost in measure(model, options.rounds).items()}
    found = {"threads": 1, "torch": torch.__version__, "rounds": options.rounds, "methods": costs}
    options.json.write_text(json.dumps(found, indent=1) + "\n")


def measure(model: str, rounds: int) -> dict[str, dict[str, Any]]:
    """The time and the memory of a step of a model with each method, divided by those of a step without."""
    build, data = MODELS[model]
    methods = METHODS[model.partition("-")[0].split()[0]]
    steps = {"none": partial(_step, build(), data, False)}
    for name, (text, settings) in methods.items():
        hooked = build()
        hookdrop.inject(hooked, hookdrop.parse(text), example_input=data, **settings)
        steps[name] = partial(_step, hooked, data, "Penalty" in text)
    saved = {name: sum(timing.saved_storages(step).values()) for name, step in steps.items()}
    samples = timing.measure(steps, rounds)
    median = {name: timing.Quartiles.of(timing.ratios(samples, name, "none")).median for name in methods}
    return {name: {"model": model, "time": median[name], "memory": saved[name] / saved["none"]} for name in methods}


def _step(model: nn.Module, data: torch.Tensor, penalized: bool) -> None:
    output = model.train()(data)
    first = (
        output if torch.is_tensor(output) else output[0] if isinstance(output, tuple) else next(iter(output.values()))
    )
    loss = first.square().mean() + (hookdrop.find(model).penalty() if penalized else 0.0)
    model.zero_grad()
    loss.backward()


if __name__ == "__main__":
    main()
