"""Time a training step of a ResNet-50 with DropBlock, eager and compiled: `python benchmarks/resnet_step.py`.

hookdrop's DropBlock and torchvision's follow every convolution of the last two stages, or `--layers`. Times are divided
by those of the model without DropBlock in the same round; see timing.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import nn

import hookdrop
import peers
from terminal import make_console, say
from thresholds import new_table, warn_if_busy
from timing import measure, ratios

LAYERS = ("layer3.*.conv*", "layer4.*.conv*")
CLEAN = "no DropBlock"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and write the results."""
    options = parse_options(argv)
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    console = make_console()
    machine = peers.machine_info(options.device)
    say(console, peers.format_machine(machine) + "\n")
    results: dict[str, Any] = {"machine": machine, "settings": vars(options)}
    names = [name for name in PLACED if name == CLEAN or name in options.only]
    table = new_table(f"A step of {options.model}: time / time without DropBlock", "mode", *names)
    for mode in options.modes:
        samples = measure({name: _step(name, mode, options) for name in names}, options.rounds, options.device)
        warn_if_busy(console, samples, mode)
        of_names = {name: ratios(samples, name, CLEAN) for name in samples}
        table.add_row(mode, *map(str, of_names.values()))
        results[mode] = {name: {"ratio": of_names[name]._asdict(), **samples[name].numbers()} for name in samples}
    console.print(table)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=1, allow_nan=False, default=str))
    return 0


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if on_gpu else "cpu")
    parser.add_argument("--model", default="resnet50", help="a ResNet of torchvision (default: resnet50)")
    parser.add_argument("--layers", nargs="+", default=LAYERS, help=f"sites (default: {' '.join(LAYERS)})")
    parser.add_argument("--only", nargs="+", choices=[*PLACED], default=[*PLACED], help="what to time (default: all)")
    parser.add_argument("--batch", type=int, default=128, help="images (default: 128)")
    parser.add_argument("--pixels", type=int, default=224, help="size of an image (default: 224)")
    parser.add_argument("--rounds", type=int, default=25, help="rounds (default: 25)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="PyTorch threads on a CPU")
    parser.add_argument("--modes", nargs="+", choices=("eager", "compiled"), default=["eager", "compiled"])
    parser.add_argument("--bfloat16", action="store_true", help="autocast to bfloat16, with channels_last")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    return parser.parse_args(argv)


def _hook_torchvision(model: nn.Module, layers: Sequence[str]) -> None:
    drop = torchvision.ops.DropBlock2d(peers.P, peers.BLOCK)
    for site in hookdrop.plan(model, hookdrop.DropBlock(), layers=layers).sites:
        site.module.register_forward_hook(lambda layer, args, output: drop(output))


def _inject(model: nn.Module, layers: Sequence[str]) -> None:
    hookdrop.inject(model, hookdrop.DropBlock(peers.P, peers.BLOCK), layers=layers)


PLACED: dict[str, Callable[[nn.Module, Sequence[str]], None]] = {
    CLEAN: lambda model, layers: None,
    "hookdrop": _inject,
    "torchvision": _hook_torchvision,
}


def _step(name: str, mode: str, options: argparse.Namespace) -> Callable[[], None]:
    """Create a job that performs one training step."""
    model = torchvision.models.get_model(options.model, weights=None).to(options.device)
    images = torch.randn(options.batch, 3, options.pixels, options.pixels, device=options.device)
    if options.bfloat16:
        model, images = model.to(memory_format=torch.channels_last), images.to(memory_format=torch.channels_last)
    labels = torch.randint(1000, (options.batch,), device=options.device)
    PLACED[name](model, options.layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    forward: Any = torch.compile(model) if mode == "compiled" else model

    def step() -> None:
        with torch.autocast(options.device, torch.bfloat16, enabled=options.bfloat16):
            loss = nn.functional.cross_entropy(forward(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    sys.exit(main())
