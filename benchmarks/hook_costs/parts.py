"""The parts of overhead.py. Each function returns its rows by name."""

from __future__ import annotations

import argparse
import copy
import gc
import math
import random
import re
from collections.abc import Callable, Mapping
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple

import timm
import torch
import torchvision
from rich.console import Console
from torch import Tensor, nn

import hookdrop
import peers
from hook_costs.rows import (
    CALL_MAX,
    FORWARD_MAX,
    INJECT_MAX,
    PLAN_MAX,
    STEP_MAX,
    Row,
    added,
    milliseconds,
    ratio,
)
from hook_costs.toy_models import EmptyModule, Tiny, empty, nested, sequence, twin
from hookdrop import DropBlock, Dropout, LateSchedule, LinearSchedule
from thresholds import warn_if_busy
from timing import Samples, measure, time_call

MODELS = {"torchvision": torchvision.models.resnet50, "timm": partial(timm.create_model, "resnet50")}
BLOCKS = "layer?.*"
INPUTS, QUICK_INPUTS = ((1, 224), (8, 224), (1, 64)), ((1, 32),)
"""Batch size and edge of the images. The cost of a hook is constant, so its share is largest in short forwards."""
PAIRS = (
    ("hooked", "clean", FORWARD_MAX),
    ("empty hooks", "clean", None),
    ("copy", "clean", None),
    ("hooked", "empty hooks", None),
)
"""The ratios and their upper bounds. The last compares hookdrop with empty hooks."""
LAYERS = ("layer3.*", "**.bn2", "**", nn.BatchNorm2d, re.compile(r"layer\d\.\d+\.conv\d"))
REGULARIZERS = (DropBlock(p=0.1, block_size=7), Dropout(p=0.1))
CALLS, SITES, STEP_SITES = 1000, 1000, 50
SITE_JOBS, SITE_COUNTS = ("inject", "step", "find", "remove"), (1, 10, 100, 1000, 10_000)
PLACE_EVERY = 5
"""Placing a thousand hooks is slow, so it runs once in this many rounds."""
NEVER = 10**8
"""A step that no measurement reaches."""
Job = Callable[[], object]


def forward(options: argparse.Namespace, console: Console) -> dict[str, Row]:
    """Compare eval forwards with hookdrop, with empty hooks, of a copy without hooks, and of the original model."""
    rows = {}
    for library, make in MODELS.items():
        clean = make().eval().to(options.device)
        models = {"clean": clean, "hooked": twin(clean), "empty hooks": twin(clean), "copy": twin(clean)}
        drop = hookdrop.inject(models["hooked"], REGULARIZERS[0], layers=BLOCKS)
        for site in drop.sites:
            models["empty hooks"].get_submodule(site.name).register_forward_hook(empty)
        for count, edge in QUICK_INPUTS if options.quick else INPUTS:
            x = torch.randn(count, 3, edge, edge, device=options.device)
            for gradients in (False, True) if (count, edge) == INPUTS[-1] else (False,):
                case = f"{library}, {peers.format_shape(tuple(x.shape))}{', with gradients' if gradients else ''}"
                with torch.set_grad_enabled(gradients):
                    jobs = {name: partial(model, x) for name, model in models.items()}
                    samples = measure(jobs, options.rounds, options.device)
                warn_if_busy(console, samples, case)
                rows |= {
                    f"{case}: {over} / {under}": ratio(samples, over, under, bound) for over, under, bound in PAIRS
                }
    return rows


class Case(NamedTuple):
    """A module to call, and the upper bound on the microseconds that its hook adds."""

    module: nn.Module
    bound: float | None = None
    gradients: bool = False


def call(options: argparse.Namespace, console: Console) -> dict[str, Row]:
    """Measure what a hook adds to the call of a module that does nothing."""
    x = torch.ones(1, 4, 8, 8)
    cases = {"clean": Case(Tiny()), **_cases_without_hookdrop(), **_cases_with_hookdrop(x)}
    jobs = {name: partial(_call, case, x) for name, case in cases.items()}
    samples = measure(jobs, options.rounds)
    warn_if_busy(console, samples, "calls")
    return {name: added(samples, name, "clean", 1e6 / CALLS, cases[name].bound) for name in jobs if name != "clean"}


def _cases_without_hookdrop() -> dict[str, Case]:
    by_function, by_module = Tiny(), Tiny()
    by_function.register_forward_hook(empty)
    by_module.register_forward_hook(EmptyModule())
    return {
        "another module without a hook": Case(Tiny()),
        "an empty function as hook": Case(by_function),
        "an empty module as hook": Case(by_module),
        "in an nn.Sequential instead": Case(nn.Sequential(Tiny(), nn.Identity())),
    }


def _cases_with_hookdrop(x: Tensor) -> dict[str, Case]:
    def hooked(**arguments: Any) -> nn.Module:
        module = Tiny()
        hookdrop.inject(module, layers=module, **{"regularizer": REGULARIZERS[0], **arguments})
        return module

    off, zero, waiting = hooked(), hooked(regularizer=Dropout(p=0.0)), hooked(schedule=LateSchedule(NEVER))
    next(iter(hookdrop.find(off))).enabled = False
    for module in (zero, waiting):
        module(x)  # The first call checks the shape, even at rate 0.
    return {
        "hookdrop, eval": Case(hooked().eval(), CALL_MAX),
        "hookdrop, eval, at the input": Case(hooked(at="input").eval(), CALL_MAX),
        "hookdrop, training, disabled": Case(off, CALL_MAX, gradients=True),
        "hookdrop, training, rate 0": Case(zero, CALL_MAX, gradients=True),
        # Without a bound: these hooks also check whether the layer is being trained and the schedule advances, or
        # read the RNG state, since a checkpoint may recompute a forward without gradients.
        "hookdrop, training, a schedule waits": Case(waiting, gradients=True),
        "hookdrop, training without gradients": Case(zero),
        "hookdrop, eval with gradients, never trained": Case(hooked().eval(), gradients=True),
    }


def _call(case: Case, x: Tensor) -> None:
    with torch.set_grad_enabled(case.gradients):
        for _ in repeat(None, CALLS):
            case.module(x)


def place(options: argparse.Namespace, console: Console) -> dict[str, Row]:
    """Inject at 1,000 sites, find the injection, and remove it, with garbage collection enabled."""
    samples: dict[str, Samples] = {}
    models = {"1,000 in a row": (sequence(SITES), "*"), "10 in 10 in 10": (nested(10, 3), "*.*.*")}
    cases = [
        (f"{regularizer.title}, {name}", model, partial(hookdrop.inject, model, regularizer, layers=layers))
        for name, (model, layers) in models.items()
        for regularizer in REGULARIZERS
    ]
    shuffler = random.Random(0)
    for turn in range(-1, max(1, options.rounds // PLACE_EVERY)):
        shuffler.shuffle(cases)
        for name, model, inject in cases:
            gc.collect()
            _time(samples, f"inject, {name}", turn, inject)
            _time(samples, f"find, {name}", turn, partial(hookdrop.find, model))
            _time(samples, f"remove, {name}", turn, next(iter(hookdrop.find(model))).remove)
    warn_if_busy(console, samples, "placing")
    return milliseconds({name: samples[name] for name in sorted(samples)}, {"inject": INJECT_MAX})


def scaling(options: argparse.Namespace, console: Console) -> dict[str, Row]:
    """Inject, step, find and remove at 1 to 10,000 sites with different rates: microseconds per site."""
    samples: dict[str, Samples] = {}
    models = {count: sequence(count) for count in SITE_COUNTS}
    inject = partial(
        hookdrop.inject, regularizer=REGULARIZERS[0], layers="*", p_scale="depth", schedule=LinearSchedule(NEVER)
    )
    for turn in range(-1, max(1, options.rounds // PLACE_EVERY)):
        for count, model in models.items():
            gc.collect()
            _time(samples, f"inject, {count:,} sites", turn, partial(inject, model))
            drop = next(iter(hookdrop.find(model)))
            drop.step()  # the first one is different
            gc.collect()  # a full collection would take longer than the step
            _time(samples, f"step, {count:,} sites", turn, drop.step)
            _time(samples, f"find, {count:,} sites", turn, partial(hookdrop.find, model))
            _time(samples, f"remove, {count:,} sites", turn, drop.remove)
    warn_if_busy(console, samples, "scaling")
    per_site = {f"{job}, {count:,} sites": 1e6 / count for job in SITE_JOBS for count in SITE_COUNTS}
    rows = {name: Row([scale * time for time in samples[name].seconds.values()]) for name, scale in per_site.items()}
    return rows | {f"slope of {job}, 100 to 10,000 sites": _slope(samples, job) for job in SITE_JOBS}


def _slope(samples: Mapping[str, Samples], job: str) -> Row:
    """The exponent of the number of sites in the time of a job: 1 is linear."""
    most, least = samples[f"{job}, 10,000 sites"].seconds, samples[f"{job}, 100 sites"].seconds
    return Row([math.log10(most[turn] / least[turn]) / 2 for turn in most])


def _time(samples: dict[str, Samples], name: str, turn: int, job: Job) -> None:
    seconds, faults, switches = time_call(job, 1, "cpu")
    if turn >= 0:  # Turn -1 is the warm-up.
        found = samples.setdefault(name, Samples())
        found.seconds[turn], found.faults[turn], found.switches[turn] = seconds, faults, switches


def plan(options: argparse.Namespace, console: Console) -> dict[str, Row]:
    """Plan for a resnet50, without an example."""
    jobs: dict[str, Job] = {}
    for library, make in MODELS.items():
        model = make()
        for layers in LAYERS:
            name = layers.__name__ if isinstance(layers, type) else repr(layers)
            jobs[f"plan, {library}, {name}"] = partial(hookdrop.plan, model, REGULARIZERS[0], layers=layers)
    samples = measure(jobs, options.rounds)
    warn_if_busy(console, samples, "plans")
    return milliseconds(samples, {"plan": PLAN_MAX})


def step(options: argparse.Namespace, console: Console) -> dict[str, Row]:
    """Measure steps of a schedule with 50 sites of different rates, and what `follow` adds to an optimizer step."""
    jobs: dict[str, Job] = {"optimizer": _optimizer(sequence(STEP_SITES)).step}
    models = []  # Keeps the models alive; an injection does not.
    for regularizer in REGULARIZERS:
        (model, drop), (other, followed) = _inject_ramp(regularizer), _inject_ramp(regularizer)
        models += [model, other]
        jobs[f"step, {regularizer.title}"] = drop.step
        jobs[f"seek, {regularizer.title}"] = partial(_seek_next, drop)
        optimizer = _optimizer(other)
        followed.follow(optimizer)
        jobs[f"follow, {regularizer.title}"] = optimizer.step
    samples = measure(jobs, options.rounds)
    warn_if_busy(console, samples, "steps")
    rows = milliseconds(samples, {"step": STEP_MAX, "seek": STEP_MAX})
    following = (name for name in jobs if name.startswith("follow"))
    rows |= {name: added(samples, name, "optimizer", 1e3, STEP_MAX) for name in following}
    return {name: row for name, row in rows.items() if name != "optimizer"}


def _inject_ramp(regularizer: nn.Module) -> tuple[nn.Module, hookdrop.Injection]:
    model = sequence(STEP_SITES)
    drop = hookdrop.inject(model, regularizer, layers="*", p_scale="depth", schedule=LinearSchedule(NEVER))
    model(torch.ones(1, 4, 8, 8))
    return model, drop


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


def _seek_next(drop: hookdrop.Injection) -> None:
    drop.seek(drop.step_count + 1)


def copies(options: argparse.Namespace, console: Console) -> dict[str, Row]:
    """Deep-copy a resnet50 with and without hooks, as an EMA does."""
    clean = torchvision.models.resnet50()
    hooked = copy.deepcopy(clean)
    hookdrop.inject(hooked, REGULARIZERS[0], layers=BLOCKS)
    jobs = {"without hooks": partial(copy.deepcopy, clean), "with hooks": partial(copy.deepcopy, hooked)}
    samples = measure(jobs, options.rounds)
    warn_if_busy(console, samples, "copies")
    return milliseconds(samples, {})


PARTS: dict[str, tuple[str, int, Callable[[argparse.Namespace, Console], dict[str, Row]]]] = {
    "forward": ("Eval forward of a resnet50 with a hook on each of its 16 blocks: ratios of times", 4, forward),
    "call": ("Time added to the call of a layer: microseconds", 2, call),
    "place": ("inject, find and remove at 1,000 sites: milliseconds", 1, place),
    "scaling": ("1 to 10,000 sites: microseconds per site, and the exponent of their number", 3, scaling),
    "plan": ("plan(resnet50): milliseconds", 2, plan),
    "step": (f"step, seek and follow with {STEP_SITES} sites: milliseconds", 3, step),
    "copies": ("copy.deepcopy(resnet50), 16 hooks: milliseconds", 1, copies),
}
"""By name: the title, the number of decimals, and the function that measures."""
