"""The measurements of overhead.py: each gives its rows by name."""

from __future__ import annotations

import argparse
import copy
import gc
import random
import re
from collections.abc import Callable
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
from cost import Samples, measure, once
from hook_costs.rows import (
    CALL_MUST,
    FORWARD_MUST,
    INJECT_MUST,
    PLAN_MUST,
    STEP_MUST,
    Row,
    added,
    milliseconds,
    ratio,
)
from hook_costs.toys import EmptyModule, Tiny, empty, in_a_row, nested, twin
from hookdrop import DropBlock, Dropout, LateSchedule, LinearSchedule
from thresholds import beware

MODELS = {"torchvision": torchvision.models.resnet50, "timm": partial(timm.create_model, "resnet50")}
BLOCKS = "layer?.*"
INPUTS, QUICK_INPUTS = ((1, 224), (8, 224), (1, 64)), ((1, 32),)
"""Images and their edge. A hook costs the same whatever its layer does, so that the shortest forward is the worst."""
PAIRS = (
    ("hooked", "clean", FORWARD_MUST),
    ("empty hooks", "clean", None),
    ("copy", "clean", None),
    ("hooked", "empty hooks", None),
)
"""What is compared, and the must. The last is what a hook costs beyond being one at all."""
LAYERS = ("layer3.*", "**.bn2", "**", nn.BatchNorm2d, re.compile(r"layer\d\.\d+\.conv\d"))
REGULARIZERS = (DropBlock(p=0.1, block_size=7), Dropout(p=0.1))
CALLS, SITES, STEP_SITES = 1000, 1000, 50
PLACED_EVERY = 5
"""Placing a thousand hooks takes long: there is a turn of it in every so many rounds."""
ENDLESS = 10**8
"""A step that no measurement comes to."""
Job = Callable[[], object]


def forward(options: argparse.Namespace, console: Console) -> dict[str, Row]:
    """Eval forwards of a model with our hooks, with empty ones, of a copy without, and of the clean one: ratios."""
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
                where = f"{library}, {peers.named(tuple(x.shape))}{', with gradients' if gradients else ''}"
                with torch.set_grad_enabled(gradients):
                    jobs = {name: partial(model, x) for name, model in models.items()}
                    samples = measure(jobs, options.rounds, options.device)
                beware(console, samples, where)
                rows |= {f"{where}: {over} / {under}": ratio(samples, over, under, must) for over, under, must in PAIRS}
    return rows


class Arm(NamedTuple):
    """A module to call, and the most that its hook may add."""

    module: nn.Module
    must: float | None = None
    gradients: bool = False


def call(options: argparse.Namespace, console: Console) -> dict[str, Row]:
    """What a hook adds to the call of a module that does nothing."""
    x = torch.ones(1, 4, 8, 8)
    arms = {"clean": Arm(Tiny()), **_with_hooks(), **_with_ours(x)}
    jobs = {name: partial(_call, arm, x) for name, arm in arms.items()}
    samples = measure(jobs, options.rounds)
    beware(console, samples, "calls")
    return {name: added(samples, name, "clean", 1e6 / CALLS, arms[name].must) for name in jobs if name != "clean"}


def _with_hooks() -> dict[str, Arm]:
    by_function, by_module = Tiny(), Tiny()
    by_function.register_forward_hook(empty)
    by_module.register_forward_hook(EmptyModule())
    return {
        "another module without a hook": Arm(Tiny()),
        "an empty function as hook": Arm(by_function),
        "an empty module as hook": Arm(by_module),
        "in an nn.Sequential instead": Arm(nn.Sequential(Tiny(), nn.Identity())),
    }


def _with_ours(x: Tensor) -> dict[str, Arm]:
    def hooked(**given: Any) -> nn.Module:
        module = Tiny()
        hookdrop.inject(module, layers=module, **{"regularizer": REGULARIZERS[0], **given})
        return module

    off, zero, waiting = hooked(), hooked(regularizer=Dropout(p=0.0)), hooked(schedule=LateSchedule(ENDLESS))
    hookdrop.find(off)[0].disable()
    for module in (zero, waiting):
        module(x)  # Also at rate 0 the first tensor is looked at.
    return {
        "hookdrop, eval": Arm(hooked().eval(), CALL_MUST),
        "hookdrop, eval, at the input": Arm(hooked(at="input").eval(), CALL_MUST),
        "hookdrop, training, disabled": Arm(off, CALL_MUST, gradients=True),
        "hookdrop, training, rate 0": Arm(zero, CALL_MUST, gradients=True),
        # What is looked at besides: whether somebody trains the layer, until somebody steps or trains it as it should
        # be; and the random state, from which a forward without gradients may be run again.
        "hookdrop, training, a schedule waits": Arm(waiting, gradients=True),
        "hookdrop, training without gradients": Arm(zero),
        "hookdrop, eval with gradients, never trained": Arm(hooked().eval(), gradients=True),
    }


def _call(arm: Arm, x: Tensor) -> None:
    with torch.set_grad_enabled(arm.gradients):
        for _ in repeat(None, CALLS):
            arm.module(x)


def place(options: argparse.Namespace, console: Console) -> dict[str, Row]:
    """Injecting at 1,000 sites, finding them, and removing; garbage is collected as it comes."""
    samples: dict[str, Samples] = {}
    models = {"1,000 in a row": (in_a_row(SITES), "*"), "10 in 10 in 10": (nested(10, 3), "*.*.*")}
    cases = [
        (f"{regularizer.title}, {name}", model, partial(hookdrop.inject, model, regularizer, layers=layers))
        for name, (model, layers) in models.items()
        for regularizer in REGULARIZERS
    ]
    shuffler = random.Random(0)
    for turn in range(-1, max(1, options.rounds // PLACED_EVERY)):
        shuffler.shuffle(cases)
        for name, model, inject in cases:
            gc.collect()
            _note(samples, f"inject, {name}", turn, inject)
            _note(samples, f"find, {name}", turn, partial(hookdrop.find, model))
            _note(samples, f"remove, {name}", turn, hookdrop.find(model)[0].remove)
    beware(console, samples, "placing")
    return milliseconds({name: samples[name] for name in sorted(samples)}, {"inject": INJECT_MUST})


def _note(samples: dict[str, Samples], name: str, turn: int, job: Job) -> None:
    seconds, faults, waits = once(job, 1, "cpu")
    if turn >= 0:  # The first time is another: the compiler is loaded with the first hook.
        found = samples.setdefault(name, Samples())
        found.seconds[turn], found.faults[turn], found.waits[turn] = seconds, faults, waits


def plan(options: argparse.Namespace, console: Console) -> dict[str, Row]:
    """Planning for a resnet50, without an example."""
    jobs: dict[str, Job] = {}
    for library, make in MODELS.items():
        model = make()
        for layers in LAYERS:
            name = layers.__name__ if isinstance(layers, type) else repr(layers)
            jobs[f"plan, {library}, {name}"] = partial(hookdrop.plan, model, REGULARIZERS[0], layers=layers)
    samples = measure(jobs, options.rounds)
    beware(console, samples, "plans")
    return milliseconds(samples, {"plan": PLAN_MUST})


def step(options: argparse.Namespace, console: Console) -> dict[str, Row]:
    """Steps of the schedule with 50 sites of different rates, and what following adds to an optimizer's step."""
    jobs: dict[str, Job] = {"optimizer": _optimizer(in_a_row(STEP_SITES)).step}
    models = []  # A handle does not keep its model.
    for regularizer in REGULARIZERS:
        (model, drop), (other, followed) = _ramp(regularizer), _ramp(regularizer)
        models += [model, other]
        jobs[f"step, {regularizer.title}"] = drop.step
        jobs[f"seek, {regularizer.title}"] = partial(_seek_on, drop)
        optimizer = _optimizer(other)
        followed.follow(optimizer)
        jobs[f"follow, {regularizer.title}"] = optimizer.step
    samples = measure(jobs, options.rounds)
    beware(console, samples, "steps")
    rows = milliseconds(samples, {"step": STEP_MUST, "seek": STEP_MUST})
    following = (name for name in jobs if name.startswith("follow"))
    rows |= {name: added(samples, name, "optimizer", 1e3, STEP_MUST) for name in following}
    return {name: row for name, row in rows.items() if name != "optimizer"}


def _ramp(regularizer: nn.Module) -> tuple[nn.Module, hookdrop.Injection]:
    model = in_a_row(STEP_SITES)
    drop = hookdrop.inject(model, regularizer, layers="*", p_scale="depth", schedule=LinearSchedule(ENDLESS))
    model(torch.ones(1, 4, 8, 8))
    return model, drop


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


def _seek_on(drop: hookdrop.Injection) -> None:
    drop.seek(drop.step_count + 1)


def copies(options: argparse.Namespace, console: Console) -> dict[str, Row]:
    """Copying a resnet50 with hooks and without, as an EMA does."""
    clean = torchvision.models.resnet50()
    hooked = copy.deepcopy(clean)
    hookdrop.inject(hooked, REGULARIZERS[0], layers=BLOCKS)
    jobs = {"without hooks": partial(copy.deepcopy, clean), "with hooks": partial(copy.deepcopy, hooked)}
    samples = measure(jobs, options.rounds)
    beware(console, samples, "copies")
    return milliseconds(samples, {})


PARTS: dict[str, tuple[str, int, Callable[[argparse.Namespace, Console], dict[str, Row]]]] = {
    "forward": ("Eval forward of a resnet50 with a hook on each of its 16 blocks: ratio of times", 4, forward),
    "call": ("What is added to the call of a layer: microseconds", 2, call),
    "place": ("1,000 sites: milliseconds", 1, place),
    "plan": ("plan(resnet50): milliseconds", 2, plan),
    "step": (f"{STEP_SITES} sites: milliseconds", 3, step),
    "copies": ("copy.deepcopy, 16 hooks: ms", 1, copies),
}
"""Title, digits after the point, and what measures it."""
