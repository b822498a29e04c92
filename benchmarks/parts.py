"""How the cost depends on the block's size and on the tensor's, on torch.compile, and what an optimizer step adds."""

from __future__ import annotations

import argparse
import math
import os
import time
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

import bars
import hookdrop
import peers
from cost import Samples, Spread, digits, measure, ratios
from hookdrop.kernels.seed_rate import gamma_for
from terminal import say
from thresholds import BLOCKS_MUST, COMPILED_MUST, STEP_MUST, beware, new_table, word

SIZES = (7, 13, 21)
GROWING = (peers.LIMIT, peers.BATCH, peers.TORCHVISION, peers.TIMM, peers.TORCH_DROPOUT)
MAP = (28, 28)
TOO_LONG = 2.0
"""Whoever once needs more seconds for a call doesn't get a larger tensor."""
BYTES_PER_ELEMENT = 64
"""At the peak of the greediest: float32 input, gradients, output and masks, and int64 indices of a pooling."""
QUICKEST = 3
"""Rounds of each size, at least."""
PAIRS = (("compiled", "eager"), ("eager", "clean eager"), ("compiled", "clean compiled"))
SITES = 50


def blocks(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """The cost of larger blocks, against that of 7, on the last of the shapes."""
    shape = options.shapes[-1]
    x, grad = peers.make(shape, options.device)
    names = [
        name for name in peers.contestants(device=options.device) if name.removesuffix(peers.NO_KERNEL) == peers.BATCH
    ]
    jobs = {
        f"{name}, {size}": peers.contestants(block=size, device=options.device)[name].job(x, grad)
        for name in names
        for size in SIZES
    }
    samples = measure(jobs, options.rounds, options.device)
    beware(console, samples, "block sizes")
    title = f"Block sizes at {peers.named(shape)}: time / that of blocks of {SIZES[0]}"
    shown = new_table(title, "regularizer", *map(str, SIZES), "slowest / fastest", "must", "verdict")
    found = {}
    for name in names:
        of_sizes = {size: ratios(samples, f"{name}, {size}", f"{name}, {SIZES[0]}") for size in SIZES}
        medians = [ratio.median for ratio in of_sizes.values()]
        apart = max(medians) / min(medians)
        found[name] = {"ratios": {size: ratio._asdict() for size, ratio in of_sizes.items()}, "apart": apart}
        found[name]["holds"] = apart <= BLOCKS_MUST
        cells = *map(str, of_sizes.values()), digits(apart), f"<= {BLOCKS_MUST}", word(apart <= BLOCKS_MUST)
        shown.add_row(name, *cells)
    console.print(shown)
    return found


def growth(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """The cost of more and more elements."""
    racing, found = list(GROWING), {}
    shown = new_table(f"\nGrowth, maps of {MAP[0]}x{MAP[1]}: time / ({peers.LIMIT})", "elements", *racing[1:])
    for shape in _growing(options.elements, options.device):
        x, grad = peers.make(shape, options.device)
        contestants = peers.contestants(device=options.device)
        jobs = {name: contestants[name].job(x, grad) for name in racing}
        samples = measure(jobs, max(QUICKEST, options.rounds // 3), options.device)
        beware(console, samples, f"growth, {x.numel():.1e} elements")
        found[x.numel()] = {name: of_name.numbers() for name, of_name in samples.items()}
        cells = (str(ratios(samples, name, peers.LIMIT)) if name in samples else "-" for name in GROWING[1:])
        shown.add_row(f"{x.numel():.1e}", *cells)
        racing = [name for name in racing if _slowest(samples[name]) <= TOO_LONG]
        if peers.LIMIT not in racing:
            break
    console.print(shown)
    bars.draw_growth(options.out / "growth.png", found)
    say(console, f"Picture: {options.out / 'growth.png'}\n")
    return {str(elements): numbers for elements, numbers in found.items()}


def compiled(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """An injected model under torch.compile, against the same in eager mode."""
    # The clean model is none of the injected one's class: PyTorch would run the code compiled for one for the other,
    # as it does not look at hooks when it looks for compiled code.
    clean = _Scale().to(options.device)
    injected = nn.Sequential(nn.Identity(), _Scale()).to(options.device)
    hookdrop.inject(injected, hookdrop.DropBlock(p=peers.P, block_size=peers.BLOCK), layers="0")
    title = f"\nAn injected model under torch.compile(fullgraph=True, backend={options.backend!r}): ratios of times"
    shown = new_table(title, "shape", *(" / ".join(pair) for pair in PAIRS), "dropped", "must (first)", "verdict")
    found = {}
    for shape in options.shapes:
        numbers = _compiled_at(shape, clean, injected, options, console)
        found[peers.named(shape)] = numbers
        spreads = (str(Spread(**ratio)) for ratio in numbers["ratios"].values())
        verdict = f"{numbers['dropped']:.3f}", f"<= {COMPILED_MUST}", word(numbers["holds"])
        shown.add_row(peers.named(shape), *spreads, *verdict)
    torch.compiler.reset()
    console.print(shown)
    return found


def _compiled_at(
    shape: peers.Shape, clean: nn.Module, injected: nn.Module, options: argparse.Namespace, console: Console
) -> dict[str, Any]:
    torch.compiler.reset()
    x, grad = peers.make(shape, options.device)
    models: dict[str, Any] = {"eager": injected, "clean eager": clean}
    for name, model in (("compiled", injected), ("clean compiled", clean)):
        models[name] = torch.compile(model, fullgraph=True, backend=options.backend)
    jobs = {name: _Step(model, x, grad) for name, model in models.items()}
    samples = measure(jobs, options.rounds, options.device)
    beware(console, samples, f"torch.compile, {peers.named(shape)}")
    of_pairs = {" / ".join(pair): ratios(samples, *pair) for pair in PAIRS}
    return {
        "ratios": {pair: ratio._asdict() for pair, ratio in of_pairs.items()},
        "holds": ratios(samples, *PAIRS[0]).median <= COMPILED_MUST,
        # Of the code that was timed, and after the others ran: it must not be theirs.
        "dropped": peers.zeros(models["compiled"], torch.ones_like(x, requires_grad=True), peers.DRAWS),
        "models": {name: of_name.numbers() for name, of_name in samples.items()},
    }


class _Scale(nn.Module):
    """A multiplication by a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class _Step:
    """Forward and backward of a model."""

    def __init__(self, model: Any, x: Tensor, grad: Tensor) -> None:
        self.model, self.x, self.grad = model, x, grad

    def __call__(self) -> None:
        self.model(self.x).backward(self.grad)
        self.x.grad = None
        self.model.zero_grad()


def steps(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """What an optimizer step costs each site: counting it, and the seed rate for the rate that comes of it."""
    count = 10 * options.rounds
    shown = new_table(
        f"\nAn optimizer step with {SITES} sites of different rates: microseconds a site",
        *("map", "Injection.step()", "gamma_for", "sum", "must", "verdict"),
    )
    found = {}
    for sizes in dict.fromkeys(shape[2:] for shape in options.shapes):
        counting, solving = _step_costs(sizes, count)
        both = Spread.of([a + b for a, b in zip(counting, solving, strict=True)])
        spreads = Spread.of(counting), Spread.of(solving), both
        holds = both.median <= STEP_MUST
        found[peers.named(sizes)] = {
            "microseconds_a_site": dict(zip(("step", "gamma_for", "sum"), (s._asdict() for s in spreads), strict=True)),
            "holds": holds,
        }
        shown.add_row(peers.named(sizes), *map(str, spreads), f"<= {STEP_MUST:g}", word(holds))
    console.print(shown)
    return found


def _step_costs(sizes: tuple[int, ...], count: int) -> tuple[list[float], list[float]]:
    """Microseconds a site of `count` steps, all in the ramp of the schedule, where every rate is new."""
    model = nn.Sequential(*(nn.Identity() for _ in range(SITES)))
    schedule = hookdrop.LinearSchedule(steps=10 * count)
    regularizer = hookdrop.DropBlock(p=peers.P, block_size=peers.BLOCK)
    drop = hookdrop.inject(model, regularizer, layers="*", p_scale="depth", schedule=schedule)
    # One call each, without which a step would warn that nothing was ever dropped.
    model(torch.ones(1, 1, *sizes))
    edges = tuple(min(peers.BLOCK, size) for size in sizes)
    counting, solving = [], []
    for _ in range(count):
        started = time.perf_counter()
        drop.step()
        counted = time.perf_counter()
        rates = [site.p or 0.0 for site in drop.sites]
        rated = time.perf_counter()
        for rate in rates:
            gamma_for(sizes, edges, rate)
        counting.append(1e6 * (counted - started) / SITES)
        solving.append(1e6 * (time.perf_counter() - rated) / SITES)
    return counting, solving


def _growing(limit: float, device: str) -> list[peers.Shape]:
    """Shapes of 1e4 elements, then about three times as many each, up to the limit or what there is memory for."""
    free = (
        torch.cuda.mem_get_info()[0] if device != "cpu" else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    )
    most = min(limit, free / BYTES_PER_ELEMENT)
    powers = [10 ** (half / 2) for half in range(8, 1 + math.floor(2 * math.log10(max(most, 1e4)) + 1e-9))]
    return [(4, max(1, round(elements / 4 / math.prod(MAP))), *MAP) for elements in powers]


def _slowest(samples: Samples) -> float:
    return max(samples.seconds.values())
