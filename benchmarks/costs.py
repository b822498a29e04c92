"""Time and memory of a training step with each method, divided by those without: `python benchmarks/costs.py`.

Steps take turns, and ratios are computed within a round, because other processes may run. Memory is what a forward pass
saves for backward. docs/methods/index.md has the results.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import hookdrop as hd
from hookdrop import inject, recipes
from timing import saved_storages

LLAMA = {
    "vocab_size": 1000,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "use_cache": False,
}
BRANCHES = {"layers": "layer*.*.bn2"}
METHODS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor, dict[str, tuple[Any, dict[str, Any]]]]] = {
    "ViT-Tiny of 4 blocks, 16 images of 64 pixels": (
        lambda: timm.create_model("vit_tiny_patch16_224", img_size=64, depth=4),
        torch.randn(16, 3, 64, 64),
        {
            "TokenDropout": (hd.TokenDropout(0.1), {"layers": "pos_drop"}),
            "HeadDropout": (recipes.head_dropout(0.1), {}),
            "DropKey": (recipes.drop_key(0.1), {}),
            "LayerDrop": (recipes.layer_drop(0.1), {}),
            "GaussianDropout": (hd.GaussianDropout(0.1), {"layers": "blocks.*.mlp"}),
            "GaussianNoise": (hd.GaussianNoise(0.1), {"layers": "blocks.*.mlp"}),
            "Mixout": (hd.Mixout(0.7), {"layers": "blocks.*.mlp.fc1"}),
        },
    ),
    "ResNet-10, 8 images of 128 pixels": (
        lambda: timm.create_model("resnet10t", num_classes=10),
        torch.randn(8, 3, 128, 128),
        {
            "ShakeDrop": (hd.ShakeDrop(0.1), BRANCHES),
            "AlphaDropout": (hd.AlphaDropout(0.1), BRANCHES),
            "Cutout": (hd.Cutout(64), {"layers": "conv1", "at": "input"}),
            "DSU": (hd.DSU(0.5), {"layers": ["layer1", "layer2", "layer3", "layer4"]}),
            "Masksembles": (hd.Masksembles(4), BRANCHES),
            "timm_dropblock": (recipes.timm_dropblock(0.1), {}),
        },
    ),
    "DeepLabV3 with MobileNetV3, 4 images of 64 pixels": (
        lambda: torchvision.models.segmentation.deeplabv3_mobilenet_v3_large(
            weights=None, weights_backbone=None, num_classes=3
        ),
        torch.randn(4, 3, 64, 64),
        {"dropblock_unet": (recipes.dropblock_unet(0.1, block_size=3), {})},
    ),
    "LSTM of 128 units, 16 sequences of 32 steps": (
        lambda: nn.Sequential(nn.Embedding(1000, 128), nn.LSTM(128, 128, 2, batch_first=True)),
        torch.randint(1000, (16, 32)),
        {
            "LockedDropout": (hd.LockedDropout(0.1), {"layers": "1"}),
            "WeightDrop": (hd.Dropout(0.5), {"layers": "1", "at": "parameters", "tensor": "weight_hh_*"}),
            "ActivationPenalty": (hd.ActivationPenalty(), {"layers": "1"}),
            "ClipActivationGrad": (hd.ClipActivationGrad(max_norm=1.0), {"layers": "1"}),
            "ClampActivationGrad": (hd.ClampActivationGrad(-1.0, 1.0), {"layers": "1"}),
            "ScaleActivationGrad": (hd.ScaleActivationGrad(-1.0), {"layers": "1"}),
            "NoiseActivationGrad": (hd.NoiseActivationGrad(0.1), {"layers": "1"}),
        },
    ),
    "LLaMA of 2 layers, 8 sequences of 64 tokens": (
        lambda: LlamaForCausalLM(LlamaConfig(**LLAMA)),
        torch.randint(1000, (8, 64)),
        {"NEFTune": (recipes.neftune(5), {}), "residual_dropout": (recipes.residual_dropout(0.1), {})},
    ),
}
"""For each model and its input: what is injected, by the name of the row."""


def main() -> None:
    """Measure all methods, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=101)
    parser.add_argument("--only", default="", help="models whose description contains this text")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/costs.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)  # threads that wait for one another depend on what else runs
    found: dict[str, Any] = {"threads": torch.get_num_threads(), "torch": torch.__version__, "rounds": options.rounds}
    found["methods"] = {
        name: {"model": model} | costs
        for model, (build, data, methods) in METHODS.items()
        if options.only in model
        for name, costs in measure(build, data, methods, options.rounds).items()
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(found, indent=1) + "\n")
    for name, costs in found["methods"].items():
        print(f"{name:20} time {costs['time']:.2f}   memory {costs['memory']:.2f}")


def measure(
    build: Callable[[], nn.Module], data: torch.Tensor, methods: dict[str, tuple[Any, dict[str, Any]]], rounds: int
) -> dict[str, dict[str, float]]:
    """The time and the memory of a step with each method, divided by those of a step without."""
    models = {"": build()} | {name: build() for name in methods}
    for name, (method, settings) in methods.items():
        inject(models[name], method, example_input=data, **settings)
    steps = {name: partial(loss, model, data, "Penalty" in name) for name, model in models.items()}
    saved = {name: sum(saved_storages(step).values()) for name, step in steps.items()}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(rounds + 2):  # two to warm up
        for name in random.sample(list(models), len(models)):
            start = time.perf_counter()
            models[name].zero_grad()
            steps[name]().backward()
            seconds[name].append(time.perf_counter() - start)
    return {
        name: {
            "time": statistics.median(a / b for a, b in zip(seconds[name][2:], seconds[""][2:], strict=True)),
            "memory": saved[name] / saved[""],
        }
        for name in methods
    }


def loss(model: nn.Module, data: torch.Tensor, penalized: bool) -> torch.Tensor:
    """Some loss of the first output."""
    output = model.train()(data)
    output = (
        output if torch.is_tensor(output) else output[0] if isinstance(output, tuple) else next(iter(output.values()))
    )
    return output.square().mean() + (hd.find(model).penalty() if penalized else 0.0)


if __name__ == "__main__":
    main()
