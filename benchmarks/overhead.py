"""Measure the overhead of hooks, of placing them, and of `observe.statistics`: `python benchmarks/overhead.py`.

All jobs run in one process, in random order, and are compared within a round (see timing.py). The hooked model and a
control copy without hooks share the weights of the original model. The control shows what the method reports if there
is no difference. The results are medians with 95 % bootstrap intervals. Ratios characterize the code; times also depend
on the machine. Run nothing else at the same time; the script warns if other processes often preempt the jobs.
"""

import argparse
import copy
import gc
import math
import packages  # noqa: F401
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import Any

import numpy as np
import timm
import torch
import torchvision
from torch import Tensor, nn

import hookdrop
import program
from hookdrop import DropBlock, Dropout, LateSchedule, LinearSchedule, observe
from timing import measure, ratios, time_call

MODELS = {"torchvision": torchvision.models.resnet50, "timm": partial(timm.create_model, "resnet50")}
BLOCKS, INPUTS, QUICK_INPUTS = "layer?.*", ((1, 224), (8, 224), (1, 64)), ((1, 32),)
"""Batch size and edge of the images. The cost of a hook is constant, so its share is largest in short forwards."""
PAIRS = (("hooked", "clean"), ("empty hooks", "clean"), ("copy", "clean"), ("hooked", "empty hooks"))
"""The ratios. The last compares hookdrop with empty hooks."""
REGULARIZER = DropBlock(p=0.1, block_size=7)
CALLS, SITE_COUNTS = 1000, (1, 50, 100, 1000, 10_000)
SITES_EVERY = 5
"""Placing thousands of hooks is slow, so it runs once in this many rounds."""
STEPS, NEVER, RESAMPLES = 10, 10**8, 2000
"""Training steps of a job; a step that no measurement reaches; the number of bootstrap samples."""


def report(title: str, digits: int, rows: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Print and return the median of each row, and its 95 % bootstrap interval with a fixed seed."""
    found: dict[str, dict[str, Any]] = {}
    for label, values in rows.items():
        drawn = np.random.default_rng(0).choice(np.asarray(values), (RESAMPLES, len(values)))
        low, high = (float(x) for x in np.quantile(np.median(drawn, axis=1), (0.025, 0.975)))
        found[label] = {"low": low, "median": float(np.median(values)), "high": high, "values": values}
    shown = {label: {key: f"{row[key]:.{digits}f}" for key in list(row)[:3]} for label, row in found.items()}
    program.show(f"{title}, with the 95 % interval of the median", shown)
    return {"title": title, "rows": found}


def forward(options: argparse.Namespace) -> dict[str, Any]:
    """Compare eval forwards with hookdrop, with empty hooks, of a copy without hooks, and of the original model."""
    rows: dict[str, list[float]] = {}
    for library, make in MODELS.items():
        clean = make().eval().to(options.device)
        models = {"clean": clean, **{name: twin(clean) for name in ("hooked", "empty hooks", "copy")}}
        for site in hookdrop.inject(models["hooked"], REGULARIZER, layers=BLOCKS).sites:
            models["empty hooks"].get_submodule(site.name).register_forward_hook(empty)
        for count, edge in QUICK_INPUTS if options.quick else INPUTS:
            x = torch.randn(count, 3, edge, edge, device=options.device)
            for gradients in (False, True) if (count, edge) == INPUTS[-1] else (False,):
                case = f"{library}, {count}x3x{edge}x{edge}{', with gradients' if gradients else ''}"
                with torch.set_grad_enabled(gradients):
                    jobs = {name: partial(one, x) for name, one in models.items()}
                    samples = measure(jobs, options.rounds, options.device, case)
                rows |= {f"{case}: {over} / {under}": ratios(samples, over, under) for over, under in PAIRS}
    return report("Eval forward of a resnet50 with a hook on each of its 16 blocks: ratios of times", 4, rows)


def twin(model: nn.Module) -> nn.Module:
    """Copy the modules and share parameters and buffers, as the memory location of weights affects the time."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


def empty(*_: Any) -> None:
    """An empty hook that is a function."""


def tiny() -> nn.Module:
    """Create an identity with a weight; on a layer without weights, a hook counts its calls and may warn."""
    module = nn.Identity()
    module.weight = nn.Parameter(torch.ones(()))
    return module


def call(options: argparse.Namespace) -> dict[str, Any]:
    """Measure what a hook adds to the call of a module that does nothing."""
    x = torch.ones(1, 4, 8, 8)

    def hooked(**arguments: Any) -> nn.Module:
        module = tiny()
        hookdrop.inject(module, layers=module, **{"regularizer": REGULARIZER, **arguments})
        return module

    cases = {
        "clean": tiny(),
        "another module without a hook": tiny(),
        "an empty function as hook": tiny(),
        "hookdrop, eval": hooked().eval(),
        "hookdrop, training, disabled": (off := hooked()),
        "hookdrop, training, rate 0": (zero := hooked(regularizer=Dropout(p=0.0))),
        # These hooks also check whether the layer is being trained and the schedule advances, or read the RNG state,
        # since a checkpoint may recompute a forward without gradients.
        "hookdrop, training, a schedule waits": (waiting := hooked(schedule=LateSchedule(NEVER))),
        "hookdrop, training without gradients": zero,
    }
    cases["an empty function as hook"].register_forward_hook(empty)
    next(iter(hookdrop.find(off))).enabled = False
    for module in (zero, waiting):
        module(x)  # The first call checks the shape, even at rate 0.
    jobs = {name: partial(_call, module, x, "training, " in name) for name, module in cases.items()}
    seconds = measure(jobs, options.rounds, where="calls").seconds
    added = {name: 1e6 / CALLS * (seconds[name] - seconds["clean"]).dropna() for name in list(cases)[1:]}
    return report("Time added to the call of a layer: microseconds", 2, {name: [*of] for name, of in added.items()})


def _call(module: nn.Module, x: Tensor, gradients: bool) -> None:
    with torch.set_grad_enabled(gradients):
        for _ in repeat(None, CALLS):
            module(x)


def sites(options: argparse.Namespace) -> dict[str, Any]:
    """Inject, step, find and remove at 1 to 10,000 sites with different rates."""
    rows: dict[str, list[float]] = {}
    models = {count: nn.Sequential(*(tiny() for _ in range(count))) for count in SITE_COUNTS}
    for _ in range(max(1, options.rounds // SITES_EVERY)):
        for count, model in models.items():
            schedule = LinearSchedule(NEVER)
            place = partial(hookdrop.inject, model, REGULARIZER, layers="*", p_scale="depth", schedule=schedule)
            seconds = {"inject": time_call(place, 1, "cpu")[0]}
            drop = next(iter(hookdrop.find(model)))
            drop.step()  # the first one is different
            gc.collect()  # a full collection would take longer than the step
            for name, job in {"step": drop.step, "find": partial(hookdrop.find, model), "remove": drop.remove}.items():
                seconds[name] = time_call(job, 1, "cpu")[0]
            for name, time in seconds.items():
                rows.setdefault(f"{name}, {count:,} sites", []).append(1e6 / count * time)
    for name in seconds:  # the exponent of the number of sites in the time: 1 is linear
        most, least = (rows[f"{name}, {count} sites"] for count in ("10,000", "100"))
        slopes = [1 + math.log10(above / below) / 2 for above, below in zip(most, least, strict=True)]
        rows[f"slope of {name}, 100 to 10,000 sites"] = slopes
    return report("1 to 10,000 sites: microseconds per site, and the exponent of their number", 3, rows)


def watch(options: argparse.Namespace) -> dict[str, Any]:
    """Compare training steps with `observe.statistics` of all convolutions, without, and of a copy without."""
    original, edge = torchvision.models.resnet18(), QUICK_INPUTS[0][1] if options.quick else 96
    x = torch.randn(8, 3, edge, edge, device=options.device)
    models = {name: copy.deepcopy(original).to(options.device) for name in ("watched", "clean", "copy")}
    jobs = {name: partial(_train, one, torch.optim.SGD(one.parameters(), 1e-4), x) for name, one in models.items()}
    with observe.statistics(models["watched"], nn.Conv2d, every=STEPS):
        samples = measure(jobs, max(1, options.rounds // SITES_EVERY), options.device)
    rows = {f"{over} / clean": ratios(samples, over, "clean") for over in ("watched", "copy")}
    return report(f"{STEPS} training steps of a resnet18, of which observe.statistics measures one: ratios", 3, rows)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    for _ in range(STEPS):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


PARTS: dict[str, program.Part] = {"forward": forward, "call": call, "sites": sites, "watch": watch}


def main(argv: Sequence[str] | None = None) -> int:
    return program.main(program.parser(__doc__, PARTS, 200, "runs/overhead/results.json").parse_args(argv), PARTS)


if __name__ == "__main__":
    sys.exit(main())
