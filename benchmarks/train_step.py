"""Time a training step of whole models: `python benchmarks/train_step.py`.

* `resnet`, `compiled`: hookdrop's DropBlock and torchvision's follow every convolution of the last two stages of a
  ResNet-50, or `--layers`; in eager mode and under `torch.compile`.
* `vit`: ViTs that compute less, because patches are removed, or branches run on a subset of the batch.
* `skip`: a LLaMA and a ViT of 8 layers whose layers or branches are skipped; also the memory saved for backward.
* `methods`: small models with each method, without updates of the weights; also the memory saved for backward.
Times are divided by those of the model without dropping in the same round; see timing.py.
"""

import argparse
import packages  # noqa: F401
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision
import yaml
from torch import Tensor, nn

import hookdrop
import peers
import program
from hookdrop.core.tensor_tree import first_tensor
from timing import Case, race, saved_storages

CLEAN = "no dropping"
VITS = ("vit_tiny_patch16_224", "vit_small_patch16_224")
LAYERS = ("layer3.*.conv*", "layer4.*.conv*")
VARIANTS: dict[str, dict[str, dict[str, Any]]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())


def llama(layers: int = 2, width: int = 128) -> nn.Module:
    """Build a LLaMA. Only this model needs transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: Any = {"hidden_size": width, "intermediate_size": 2 * width, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=1000, use_cache=False, num_hidden_layers=layers, **sizes))


def lstm() -> nn.Module:
    return nn.Sequential(nn.Embedding(1000, 128), nn.LSTM(128, 128, 2, batch_first=True))


TINY_VIT = partial(timm.create_model, "vit_tiny_patch16_224", img_size=64, depth=4)
RESNET10 = partial(timm.create_model, "resnet10t", num_classes=10)
DEEPLAB = partial(torchvision.models.get_model, "deeplabv3_mobilenet_v3_large", weights=None, weights_backbone=None)
MODELS: dict[str, tuple[Callable[..., nn.Module], Tensor]] = {
    "ViT-Tiny of 4 blocks, 16 images of 64 pixels": (TINY_VIT, torch.randn(16, 3, 64, 64)),
    "ResNet-10, 8 images of 128 pixels": (RESNET10, torch.randn(8, 3, 128, 128)),
    "DeepLabV3 with MobileNetV3, 4 images of 64 pixels": (DEEPLAB, torch.randn(4, 3, 64, 64)),
    "LSTM of 128 units, 16 sequences of 32 steps": (lstm, torch.randint(1000, (16, 32))),
    "LLaMA of 2 layers, 8 sequences of 64 tokens": (llama, torch.randint(1000, (8, 64))),
}
"""Of the part `methods`."""
DEEP: dict[str, tuple[Callable[..., nn.Module], Tensor]] = {
    "ViT-Tiny of 8 blocks, 32 images of 128 pixels": (
        partial(TINY_VIT, img_size=128, depth=8),
        torch.randn(32, 3, 128, 128),
    ),
    "LLaMA of 8 layers, 16 sequences of 64 tokens": (partial(llama, 8, 256), torch.randint(1000, (16, 64))),
}
"""Of the part `skip`."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = program.parser(__doc__, PARTS, rounds=25, out="runs/train_step.json")
    parser.add_argument("--resnet", default="resnet50", help="a ResNet of torchvision (default: resnet50)")
    parser.add_argument("--layers", nargs="+", default=LAYERS, help=f"its sites (default: {' '.join(LAYERS)})")
    parser.add_argument("--vits", nargs="+", default=VITS, help=f"ViTs of timm (default: {' '.join(VITS)})")
    parser.add_argument("--only", nargs="+", default=(), help="variants to time (default: all)")
    parser.add_argument("--batch", type=int, default=32, help="images, except of the methods (default: 32)")
    parser.add_argument("--pixels", type=int, default=224, help="size of an image (default: 224)")
    return program.main(parser.parse_args(argv), PARTS)


def cases(part: str, options: argparse.Namespace) -> Iterator[Case]:
    """Yield the steps of each model of a part, by variant."""
    models: Any = DEEP if part == "skip" else MODELS
    if part not in ("methods", "skip"):
        images = torch.randn(options.batch, 3, options.pixels, options.pixels)
        make = timm.create_model if part == "vit" else partial(torchvision.models.get_model, weights=None)
        models = {name: (partial(make, name), images) for name in (options.vits if part == "vit" else [options.resnet])}
    for title, (build, data) in models.items():
        variants = VARIANTS[title if part == "methods" else part]
        chosen = {name: one for name, one in variants.items() if not options.only or name in options.only}
        if chosen:
            steps = {CLEAN: step(part, build(), data, options)}
            for name, variant in chosen.items():
                settings = dict(variant)
                steps[name] = step(part, build(**settings.pop("build", {})), data, options, **settings)
            yield title, steps


def compare(part: str, options: argparse.Namespace) -> dict[str, Any]:
    pairs = [(name, CLEAN) for name in VARIANTS[part]]
    return race(f"A training step, {part}", cases(part, options), pairs, options)


def skip(options: argparse.Namespace) -> dict[str, Any]:
    """Time the variants that skip layers, and add the memory, divided by that without."""
    found = compare("skip", options)
    for title, steps in cases("skip", options):
        # Of eight calls, because it depends on what is skipped.
        sizes = {name: sum(sum(saved_storages(job).values()) for _ in range(8)) for name, job in steps.items()}
        found[title]["memory"] = {name: size / sizes[CLEAN] for name, size in sizes.items()}
    memory = {title: one["memory"] for title, one in found.items()}
    program.show("Memory saved for backward, divided by that without dropping", memory)
    return found


def methods(options: argparse.Namespace) -> dict[str, Any]:
    """Measure time and memory with each method, divided by those without."""
    costs = {}
    for title, steps in cases("methods", options):
        saved = {name: sum(saved_storages(job).values()) for name, job in steps.items()}
        pairs = [(name, CLEAN) for name in steps if name != CLEAN]
        (found,) = race(title, [(title, steps)], pairs, options).values()
        for name, _ in pairs:
            time = found["ratios"][f"{name} / {CLEAN}"]["median"]
            costs[name] = {"model": title, "time": time, "memory": saved[name] / saved[CLEAN]}
    return costs


def step(
    part: str, model: nn.Module, data: Tensor, options: argparse.Namespace, regularizer: str = "", **settings: Any
) -> Callable[[], None]:
    """Create a job that performs one training step."""
    model, data = model.to(options.device).train(), data.to(options.device)
    if part in ("resnet", "compiled"):
        settings["layers"] = options.layers
    if regularizer == "torchvision":  # with a plain hook
        drop = torchvision.ops.DropBlock2d(peers.P, peers.BLOCK)
        for site in hookdrop.plan(model, hookdrop.DropBlock(), **settings).sites:
            site.module.register_forward_hook(lambda layer, args, output: drop(output))
    elif regularizer == "loop":
        peers.skip_layers(model)
    elif regularizer:
        hookdrop.inject(model, hookdrop.parse(regularizer), example_input=data, **settings)
    forward = torch.compile(model) if part == "compiled" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def run() -> None:
        loss = first_tensor(forward(data)).square().mean()
        if "Penalty" in regularizer:
            loss = loss + hookdrop.find(model).penalty()
        optimizer.zero_grad()
        loss.backward()
        if part != "methods":
            optimizer.step()

    return run


PARTS: dict[str, program.Part] = {part: partial(compare, part) for part in ("resnet", "compiled", "vit")}
PARTS |= {"skip": skip, "methods": methods}


if __name__ == "__main__":
    sys.exit(main())
