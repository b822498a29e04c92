"""Time a training step of whole models: `python benchmarks/train_step.py`.

* `resnet`, `compiled`: hookdrop's DropBlock and torchvision's follow every convolution of the last two stages of a
  ResNet-50, or `--layers`; in eager mode and under `torch.compile`.
* `vit`: ViTs that compute less, because patches are removed, or branches run on a subset of the batch.

Times are divided by those of the model without dropping in the same round; see timing.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import timm
import torch
import torchvision
from torch import Tensor, nn

import hookdrop
import peers
import program
from hookdrop import inject
from hookdrop.recipes import patch_dropout, stochastic_depth
from timing import Case, race

CLEAN = "no dropping"
LAYERS = ("layer3.*.conv*", "layer4.*.conv*")
VITS = ("vit_tiny_patch16_224", "vit_small_patch16_224")
RESNETS = (CLEAN, "hookdrop", "torchvision")
VARIANTS: dict[str, tuple[dict[str, float], Callable[[nn.Module], object]]] = {
    CLEAN: ({}, lambda model: None),
    "patch_dropout 50 %": ({}, lambda model: inject(model, patch_dropout(p=0.5))),
    "timm patch_drop_rate=0.5": ({"patch_drop_rate": 0.5}, lambda model: None),
    "patch_dropout 75 %": ({}, lambda model: inject(model, patch_dropout(p=0.75))),
    "timm patch_drop_rate=0.75": ({"patch_drop_rate": 0.75}, lambda model: None),
    "DropPath 40 %, subset": ({}, lambda model: inject(model, stochastic_depth(p=0.4, mode="subset"), p_scale="equal")),
    "DropPath 40 %, row": ({}, lambda model: inject(model, stochastic_depth(p=0.4), p_scale="equal")),
}
"""The arguments of `timm.create_model`, and what is injected."""
Step = Callable[[], None]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and report."""
    parser = program.parser(__doc__, PARTS, rounds=25, out="runs/train_step.json")
    parser.add_argument("--resnet", default="resnet50", help="a ResNet of torchvision (default: resnet50)")
    parser.add_argument("--layers", nargs="+", default=LAYERS, help=f"its sites (default: {' '.join(LAYERS)})")
    parser.add_argument("--vits", nargs="+", default=VITS, help=f"ViTs of timm (default: {' '.join(VITS)})")
    parser.add_argument("--only", nargs="+", default=(*RESNETS, *VARIANTS), help="variants to time (default: all)")
    parser.add_argument("--batch", type=int, default=32, help="images (default: 32)")
    parser.add_argument("--pixels", type=int, default=224, help="size of an image for the ResNet (default: 224)")
    return program.main(parser.parse_args(argv), PARTS)


def compare(part: str, options: argparse.Namespace) -> dict[str, Any]:
    """Time the variants of each model of a part."""
    variants = [name for name in (VARIANTS if part == "vit" else RESNETS) if name in (CLEAN, *options.only)]

    def cases() -> Iterator[Case]:
        for name in options.vits if part == "vit" else [options.resnet]:
            made = partial(_vit_step, name) if part == "vit" else partial(_resnet_step, part)
            yield name, {variant: made(variant, options) for variant in variants}

    pairs = [(variant, CLEAN) for variant in variants if variant != CLEAN]
    return race(f"A training step, {part}", cases(), pairs, options)


def _resnet_step(part: str, name: str, options: argparse.Namespace) -> Step:
    model = torchvision.models.get_model(options.resnet, weights=None).to(options.device)
    images = torch.randn(options.batch, 3, options.pixels, options.pixels, device=options.device)
    if name == "hookdrop":
        inject(model, hookdrop.DropBlock(peers.P, peers.BLOCK), layers=options.layers)
    elif name == "torchvision":
        drop = torchvision.ops.DropBlock2d(peers.P, peers.BLOCK)
        for site in hookdrop.plan(model, hookdrop.DropBlock(), layers=options.layers).sites:
            site.module.register_forward_hook(lambda layer, args, output: drop(output))
    return _step(model, torch.compile(model) if part == "compiled" else model, images, options)


def _vit_step(architecture: str, name: str, options: argparse.Namespace) -> Step:
    arguments, place = VARIANTS[name]
    model = timm.create_model(architecture, **arguments).to(options.device).train()
    place(model)
    size = model.patch_embed.img_size[0]
    return _step(model, model, torch.randn(options.batch, 3, size, size, device=options.device), options)


def _step(model: nn.Module, forward: Any, images: Tensor, options: argparse.Namespace) -> Step:
    """Create a job that performs one training step."""
    labels = torch.randint(1000, (len(images),), device=options.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step() -> None:
        loss = nn.functional.cross_entropy(forward(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


PARTS: dict[str, program.Part] = {part: partial(compare, part) for part in ("resnet", "compiled", "vit")}


if __name__ == "__main__":
    sys.exit(main())
