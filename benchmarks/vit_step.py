"""Time a training step of a ViT that computes less: `python benchmarks/vit_step.py`.

Patches are removed, or branches run on a subset of the batch. Times are divided by those of the model without dropping
in the same round; see timing.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

import peers
from hookdrop import inject
from hookdrop.recipes import patch_dropout, stochastic_depth
from terminal import make_console, say
from thresholds import new_table, warn_if_busy
from timing import measure, ratios

CLEAN = "no dropping"
VARIANTS: dict[str, tuple[dict[str, float], Callable[[nn.Module], Any]]] = {
    CLEAN: ({}, lambda model: None),
    "patch_dropout 50 %": (
        {},
        lambda model: inject(model, patch_dropout(p=0.5)),
    ),
    "timm patch_drop_rate=0.5": ({"patch_drop_rate": 0.5}, lambda model: None),
    "patch_dropout 75 %": (
        {},
        lambda model: inject(model, patch_dropout(p=0.75)),
    ),
    "timm patch_drop_rate=0.75": ({"patch_drop_rate": 0.75}, lambda model: None),
    "DropPath 40 %, subset": ({}, lambda model: inject(model, stochastic_depth(p=0.4, mode="subset"), p_scale="equal")),
    "DropPath 40 %, row": ({}, lambda model: inject(model, stochastic_depth(p=0.4), p_scale="equal")),
}
"""The arguments of `timm.create_model`, and what is injected."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and write the results."""
    options = parse_options(argv)
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    console = make_console()
    machine = peers.machine_info(options.device)
    say(console, peers.format_machine(machine) + "\n")
    results: dict[str, Any] = {"machine": machine, "settings": vars(options)}
    table = new_table("A training step: time / time without dropping", "variant", *options.models)
    columns = {}
    for model in options.models:
        samples = measure({name: _step(name, model, options) for name in VARIANTS}, options.rounds, options.device)
        warn_if_busy(console, samples, model)
        of_names = {name: ratios(samples, name, CLEAN) for name in samples}
        columns[model] = [str(ratio) for ratio in of_names.values()]
        results[model] = {name: {"ratio": of_names[name]._asdict(), **samples[name].numbers()} for name in samples}
    for index, name in enumerate(VARIANTS):
        table.add_row(name, *(columns[model][index] for model in options.models))
    console.print(table)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=1, allow_nan=False, default=str))
    return 0


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    on_gpu = torch.cuda.is_available()
    models = ["vit_tiny_patch16_224", "vit_small_patch16_224"]
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if on_gpu else "cpu")
    parser.add_argument("--models", nargs="+", default=models, help=f"ViTs of timm (default: {' '.join(models)})")
    parser.add_argument("--batch", type=int, default=20, help="images (default: 20)")
    parser.add_argument("--rounds", type=int, default=15, help="rounds; slow steps run in every third (default: 15)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="PyTorch threads on a CPU")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    return parser.parse_args(argv)


def _step(name: str, architecture: str, options: argparse.Namespace) -> Callable[[], None]:
    """Create a job that performs one training step."""
    arguments, place = VARIANTS[name]
    model = timm.create_model(architecture, **arguments).to(options.device).train()
    place(model)
    size = model.patch_embed.img_size[0]
    images = torch.randn(options.batch, 3, size, size, device=options.device)
    labels = torch.randint(1000, (options.batch,), device=options.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step() -> None:
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    sys.exit(main())
