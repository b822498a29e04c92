"""Check every timm and torchvision architecture with hookdrop: `python benchmarks/zoo.py`.

Build each model with random weights for its smallest valid input (at least 32 pixels), plan, inject DropBlock (or
Dropout, depending on the rank) at its normalization layers, run one training step, and remove the hooks.
models/check.py compares states and outputs bit for bit. Models that do not fit in memory are planned and hooked on the
meta device, and counted separately; `--again meta --workers 1 --memory GIB` checks them with more memory.

With `--recipe NAME`, the sites are those of a DropBlock recipe. Models that it refuses are counted separately.
With `--workers 2`, a full run takes two hours; sweep.py says how to resume it. It writes zoo.json and zoo.md.
"""

import argparse
import os
import packages  # noqa: F401
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import hookdrop
import sweep
from hookdrop import recipes
from hookdrop.recipes import Recipe
from models import catalog
from models.catalog import Trial
from models.check import BLOCK, NotRunnable, P, check
from sweep import Sweep

MARGIN = 1.5 * sweep.GIB
"""For activations, the interpreter and its libraries."""
RECIPES = ("dropblock_resnet", "dropblock_unet", "dropblock_detector")
ABOUT = (
    "Each model runs on real values at its smallest valid input. `plan` and `inject` add hooks and change nothing "
    "else; eval output is bit-identical with hooks; every site fires; a training step drops the requested fraction "
    "within five standard errors plus five blocks, and the same parameters have gradients as without hooks; `remove` "
    "leaves no hook and changes no bit of parameters, buffers or eval output."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Check the models; return 1 if a model failed or crashed."""
    parser = sweep.parser(__doc__, out="runs/zoo")
    parser.add_argument("--recipe", choices=RECIPES, default="", help="check this recipe instead of all norms")
    options = parser.parse_args(argv)
    if options.memory is None:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / sweep.GIB
        options.memory = 0.5 * total / max(options.workers, 1)
    title = f"{options.recipe} in timm and torchvision" if options.recipe else "Every timm and torchvision model"
    command = f"python benchmarks/zoo.py --recipe {options.recipe}".removesuffix(" --recipe ")
    return sweep.main(options, Sweep("zoo", title, command, ABOUT, options.recipe), catalog.names(), check_model)


def check_model(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Check the first trial of a model that runs without hookdrop, and return its record."""
    skeleton = catalog.skeleton_of(name)
    parameters = sum(p.numel() for p in skeleton.parameters())
    record: dict[str, Any] = {"family": catalog.family(name), "parameters": parameters}
    recipe = getattr(recipes, options.recipe)(p=P, block_size=BLOCK) if options.recipe else None
    trials = (trial for trial in catalog.trials(name, skeleton) if catalog.accepted(trial, skeleton))
    # Of a training step without momentum: weights, gradients, buffers and a margin.
    tensors = (*skeleton.buffers(), *skeleton.parameters(), *skeleton.parameters())
    if (need := (MARGIN + sum(x.nbytes for x in tensors)) / sweep.GIB) <= options.memory:
        return record | check_first_runnable(trials, "cpu", recipe)
    record |= check_first_runnable(trials, "meta", recipe)
    reason = f"needs about {need:.1f} GiB, the limit is {options.memory:.1f} GiB"
    return record | ({"status": "meta", "error": reason} if record["status"] == "passed" else {})


def check_first_runnable(trials: Iterator[Trial], device: str, recipe: Recipe | None = None) -> dict[str, Any]:
    reason = "the model accepts no input size that was tried"
    for trial in trials:
        try:
            return trial.about() | check(trial.build(device), trial.example(device), recipe)
        except NotRunnable as error:
            reason = f"{error} [{trial.about()['input']}]"
        except (hookdrop.LayerError, hookdrop.InjectionError) as error:
            if recipe is None:
                raise
            return trial.about() | {"status": "refused", "error": str(error).splitlines()[0]}
    raise NotRunnable(reason)


if __name__ == "__main__":
    sys.exit(main())
