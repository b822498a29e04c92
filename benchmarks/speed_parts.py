"""Parts of speed.py: cost by block size and tensor size, under torch.compile, and per optimizer step."""

from __future__ import annotations

import argparse
import math
import os
import time
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

import figures
import hookdrop
import peers
from hookdrop.kernels.blocks import gamma_for
from terminal import say
from thresholds import BLOCKS_MAX, COMPILED_MAX, STEP_MAX, Threshold, new_table, verdict, warn_if_busy
from timing import Quartiles, Samples, measure, ratios, three_digits

SIZES = (7, 13, 21)
GROWTH_NAMES = (peers.LIMIT, peers.BATCH, peers.TORCHVISION, peers.TIMM, peers.TORCH_DROPOUT)
MAP, SMALL_MAP = (28, 28), (14, 14)
"""The maps of the growth part, from 1e4 elements and below."""
MAX_SECONDS = 2.0
"""Implementations with a slower call are not run on larger tensors."""
BYTES_PER_ELEMENT = 64
"""Peak memory of the largest consumer: float32 input, gradients, output and masks, and int64 pooling indices."""
SMALL_SHAPES, SMALL_BLOCK = ((4, 16, 7, 7), (16, 8, 7, 7), (8, 64, 7, 7), (8, 64, 14, 14)), 3
"""From 3,000 elements; 1,000 to 100 million are in the growth part."""
SMALL = (
    Threshold(peers.BATCH, peers.TORCHVISION, must=1.0, aim=0.8),
    Threshold(peers.DROPOUT, peers.TORCH_DROPOUT, must=1.1, aim=1.0),
    Threshold(peers.DROPOUT2D, peers.TORCH_DROPOUT2D, must=1.1, aim=1.0),
    Threshold(peers.DROP_PATH, peers.TIMM_DROP_PATH, must=1.1, aim=1.0),
)
MIN_ROUNDS = 3
"""Minimum number of rounds per size."""
PAIRS = (("compiled", "eager"), ("eager", "clean eager"), ("compiled", "clean compiled"))
SITES = 50


def small(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Compare the regularizers with their peers on small tensors, where the calls of operations are the cost."""
    heads = [f"{one.over}\n/ {one.under}\n{one.text(one.must)}" for one in SMALL]
    shown = new_table("\nSmall tensors: ratios of times, and the required ratio", "shape", *heads)
    found = {}
    for shape in SMALL_SHAPES:
        x, grad = peers.make_inputs(shape, options.device)
        implementations = peers.implementations(block=SMALL_BLOCK, device=options.device) | peers.drop_paths()
        jobs = {name: implementations[name].job(x, grad) for threshold in SMALL for name in threshold.pair}
        samples = measure(jobs, options.rounds, options.device)
        warn_if_busy(console, samples, peers.format_shape(shape))
        evaluated = [threshold.evaluate(samples) for threshold in SMALL]
        found[peers.format_shape(shape)] = {
            "contestants": {name: times.numbers() for name, times in samples.items()},
            "demands": evaluated,
        }
        shown.add_row(peers.format_shape(shape), *(str(Quartiles(**one["ratio"])) for one in evaluated))
    console.print(shown)
    return found


def blocks(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure the cost of larger blocks relative to blocks of 7, at the last shape."""
    shape = options.shapes[-1]
    x, grad = peers.make_inputs(shape, options.device)
    implementations = peers.implementations(device=options.device)
    names = [name for name in implementations if name.removesuffix(peers.NO_KERNEL) == peers.BATCH]
    jobs = {
        f"{name}, {size}": peers.implementations(block=size, device=options.device)[name].job(x, grad)
        for name in names
        for size in SIZES
    }
    samples = measure(jobs, options.rounds, options.device)
    warn_if_busy(console, samples, "block sizes")
    title = f"Block sizes at {peers.format_shape(shape)}: time / time with block_size = {SIZES[0]}"
    shown = new_table(title, "regularizer", *map(str, SIZES), "slowest / fastest", "required", "verdict")
    found = {}
    for name in names:
        of_sizes = {size: ratios(samples, f"{name}, {size}", f"{name}, {SIZES[0]}") for size in SIZES}
        medians = [ratio.median for ratio in of_sizes.values()]
        spread = max(medians) / min(medians)
        found[name] = {"ratios": {size: ratio._asdict() for size, ratio in of_sizes.items()}, "apart": spread}
        found[name]["holds"] = spread <= BLOCKS_MAX
        cells = *map(str, of_sizes.values()), three_digits(spread), f"<= {BLOCKS_MAX}", verdict(spread <= BLOCKS_MAX)
        shown.add_row(name, *cells)
    console.print(shown)
    return found


def growth(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure the cost by tensor size."""
    names, found = list(GROWTH_NAMES), {}
    shown = new_table(
        f"\nTensor sizes, maps of 28x28 (14x14 below 1e4): time / ({peers.LIMIT})", "elements", *names[1:]
    )
    for shape in _growth_shapes(options.elements, options.device):
        x, grad = peers.make_inputs(shape, options.device)
        implementations = peers.implementations(device=options.device)
        jobs = {name: implementations[name].job(x, grad) for name in names}
        samples = measure(jobs, max(MIN_ROUNDS, options.rounds // 3), options.device)
        warn_if_busy(console, samples, f"growth, {x.numel():.1e} elements")
        found[x.numel()] = {name: times.numbers() for name, times in samples.items()}
        cells = (str(ratios(samples, name, peers.LIMIT)) if name in samples else "-" for name in GROWTH_NAMES[1:])
        shown.add_row(f"{x.numel():.1e}", *cells)
        names = [name for name in names if _slowest(samples[name]) <= MAX_SECONDS]
        if peers.LIMIT not in names:
            break
    console.print(shown)
    figures.draw_growth(options.out / "growth.png", found)
    say(console, f"Figure: {options.out / 'growth.png'}\n")
    return {str(elements): numbers for elements, numbers in found.items()}


def compiled(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Compare an injected model under torch.compile with the same model in eager mode."""
    # The two models have different classes: for modules of one class PyTorch may reuse compiled code without checking
    # the hooks.
    clean = _Scale().to(options.device)
    injected = nn.Sequential(nn.Identity(), _Scale()).to(options.device)
    hookdrop.inject(injected, hookdrop.DropBlock(p=peers.P, block_size=peers.BLOCK), layers="0")
    title = f"\nAn injected model under torch.compile(fullgraph=True, backend={options.backend!r}): ratios of times"
    shown = new_table(title, "shape", *(" / ".join(pair) for pair in PAIRS), "dropped", "required (first)", "verdict")
    found = {}
    for shape in options.shapes:
        numbers = _compiled_at(shape, clean, injected, options, console)
        found[peers.format_shape(shape)] = numbers
        quartiles = (str(Quartiles(**ratio)) for ratio in numbers["ratios"].values())
        cells = f"{numbers['dropped']:.3f}", f"<= {COMPILED_MAX}", verdict(numbers["holds"])
        shown.add_row(peers.format_shape(shape), *quartiles, *cells)
    torch.compiler.reset()
    console.print(shown)
    return found


def _compiled_at(
    shape: peers.Shape, clean: nn.Module, injected: nn.Module, options: argparse.Namespace, console: Console
) -> dict[str, Any]:
    torch.compiler.reset()
    x, grad = peers.make_inputs(shape, options.device)
    models: dict[str, Any] = {"eager": injected, "clean eager": clean}
    for name, model in (("compiled", injected), ("clean compiled", clean)):
        models[name] = torch.compile(model, fullgraph=True, backend=options.backend)
    jobs = {name: _ForwardBackward(model, x, grad) for name, model in models.items()}
    samples = measure(jobs, options.rounds, options.device)
    warn_if_busy(console, samples, f"torch.compile, {peers.format_shape(shape)}")
    of_pairs = {" / ".join(pair): ratios(samples, *pair) for pair in PAIRS}
    return {
        "ratios": {pair: ratio._asdict() for pair, ratio in of_pairs.items()},
        "holds": ratios(samples, *PAIRS[0]).median <= COMPILED_MAX,
        # Shows that the timed code is that of the injected model.
        "dropped": peers.zero_fraction(models["compiled"], torch.ones_like(x, requires_grad=True), peers.DRAWS),
        "models": {name: times.numbers() for name, times in samples.items()},
    }


class _Scale(nn.Module):
    """Multiply by a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class _ForwardBackward:
    """A job that runs forward and backward of a model."""

    def __init__(self, model: Any, x: Tensor, grad: Tensor) -> None:
        self.model, self.x, self.grad = model, x, grad

    def __call__(self) -> None:
        self.model(self.x).backward(self.grad)
        self.x.grad = None
        self.model.zero_grad()


def steps(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure what an optimizer step costs per site: `Injection.step()`, and solving for the new seed rate."""
    count = 10 * options.rounds
    shown = new_table(
        f"\nAn optimizer step with {SITES} sites of different rates: microseconds per site",
        *("map", "Injection.step()", "gamma_for", "sum", "required", "verdict"),
    )
    found = {}
    for sizes in dict.fromkeys(shape[2:] for shape in options.shapes):
        stepping, solving = _step_costs(sizes, count)
        both = Quartiles.of([a + b for a, b in zip(stepping, solving, strict=True)])
        quartiles = Quartiles.of(stepping), Quartiles.of(solving), both
        holds = both.median <= STEP_MAX
        found[peers.format_shape(sizes)] = {
            "microseconds_a_site": dict(
                zip(("step", "gamma_for", "sum"), (q._asdict() for q in quartiles), strict=True)
            ),
            "holds": holds,
        }
        shown.add_row(peers.format_shape(sizes), *map(str, quartiles), f"<= {STEP_MAX:g}", verdict(holds))
    console.print(shown)
    return found


def _step_costs(sizes: tuple[int, ...], count: int) -> tuple[list[float], list[float]]:
    """Return the microseconds per site of `count` steps within the ramp, where each step changes all rates."""
    model = nn.Sequential(*(nn.Identity() for _ in range(SITES)))
    schedule = hookdrop.LinearSchedule(steps=10 * count)
    regularizer = hookdrop.DropBlock(p=peers.P, block_size=peers.BLOCK)
    drop = hookdrop.inject(model, regularizer, layers="*", p_scale="depth", schedule=schedule)
    # Without a forward, `step` would warn that nothing was ever dropped.
    model(torch.ones(1, 1, *sizes))
    edges = tuple(min(peers.BLOCK, size) for size in sizes)
    stepping, solving = [], []
    for _ in range(count):
        step_start = time.perf_counter()
        drop.step()
        step_end = time.perf_counter()
        rates = [site.p or 0.0 for site in drop.sites]
        solve_start = time.perf_counter()
        for rate in rates:
            gamma_for(sizes, edges, rate)
        stepping.append(1e6 * (step_end - step_start) / SITES)
        solving.append(1e6 * (time.perf_counter() - solve_start) / SITES)
    return stepping, solving


def _growth_shapes(limit: float, device: str) -> list[peers.Shape]:
    """Return shapes from 1e3 elements, about tripling, up to `limit` or the available memory."""
    free = (
        torch.cuda.mem_get_info()[0] if device != "cpu" else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    )
    most = min(limit, free / BYTES_PER_ELEMENT)
    powers = [10 ** (half / 2) for half in range(6, 1 + math.floor(2 * math.log10(max(most, 1e4)) + 1e-9))]
    maps = [SMALL_MAP if elements < 1e4 else MAP for elements in powers]
    return [
        (4, max(1, round(elements / 4 / math.prod(sizes))), *sizes)
        for elements, sizes in zip(powers, maps, strict=True)
    ]


def _slowest(samples: Samples) -> float:
    return max(samples.seconds.values())
