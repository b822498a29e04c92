"""What is compared: hookdrop's functions, those of other libraries, PyTorch's own, and the least that any can cost.

All are asked for the same rate p and the same block; they don't all drop it, so `dropped` says what each really drops.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
import torchvision
from timm.layers.drop import drop_block_2d
from torch import Tensor

import hookdrop
from hookdrop import functional
from hookdrop.kernels import native as kernel

P = 0.1
BLOCK = 7
DRAWS, SHARED_DRAWS = 20, 50
SHAPES = ((32, 256, 28, 28), (32, 1024, 14, 14), (16, 256, 56, 56))

LIMIT, COPY = "x * c", "x.clone()"
BATCH, SAMPLE, EXPECTED = "hookdrop batch", "hookdrop sample", "hookdrop expected"
SHARED, DROPOUT, DROPOUT2D = "hookdrop shared", "hookdrop dropout", "hookdrop dropout2d"
TORCHVISION, TIMM, TIMM_SHARED, MIGUELVR = "torchvision", "timm", "timm shared", "miguelvr shared"
TORCH_DROPOUT, TORCH_DROPOUT2D = "F.dropout", "F.dropout2d"
NO_KERNEL = ", no kernel"

_BLOCKS = (BATCH, SAMPLE, EXPECTED, SHARED)
_COMPILED = (*_BLOCKS, DROPOUT)
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Contestant:
    """A function of tensor to tensor, and whether hookdrop's compiled loops are left out while it runs."""

    name: str
    call: Callable[[Tensor], Tensor]
    no_kernel: bool = False

    @property
    def ours(self) -> bool:
        """Whether it is hookdrop's."""
        return self.name.startswith("hookdrop")

    @property
    def drops_blocks(self) -> bool:
        """Whether it is hookdrop's DropBlock."""
        return self.name.removesuffix(NO_KERNEL) in _BLOCKS

    @property
    def shares(self) -> bool:
        """Whether one mask is for all channels of a sample."""
        return "shared" in self.name

    def around(self) -> AbstractContextManager[None]:
        """What it runs in, forward and backward."""
        return without_kernel() if self.no_kernel else nullcontext()

    def job(self, x: Tensor, grad: Tensor) -> Callable[[], None]:
        """Forward and backward, and what is kept freed again, so that nobody pays for freeing another's memory."""

        def run() -> None:
            with self.around():
                torch.autograd.backward(self.call(x), grad)
            x.grad = None

        return run


def contestants(p: float = P, block: int = BLOCK, device: str = "cpu") -> dict[str, Contestant]:
    """All of them by name; those without the compiled loops only where there are such loops to leave out."""
    found = {name: Contestant(name, call) for name, call in _calls(p, block).items()}
    if device == "cpu" and kernel.available():
        for name in _COMPILED:
            bare = replace(found[name], name=name + NO_KERNEL, no_kernel=True)
            found[bare.name] = bare
    if device != "cpu":
        found[COPY] = Contestant(COPY, torch.clone)
    return found


def _calls(p: float, block: int) -> dict[str, Callable[[Tensor], Tensor]]:
    ours = partial(functional.drop_block, p=p, block_size=block)
    return {
        LIMIT: lambda x: x * 1.25,
        BATCH: ours,
        SAMPLE: partial(ours, normalize="sample"),
        EXPECTED: partial(ours, normalize="expected"),
        SHARED: partial(ours, per_channel=False),
        TORCHVISION: partial(torchvision.ops.drop_block2d, p=p, block_size=block),
        TIMM: partial(drop_block_2d, drop_prob=p, block_size=block, couple_channels=False),
        TIMM_SHARED: partial(drop_block_2d, drop_prob=p, block_size=block, couple_channels=True),
        MIGUELVR: partial(_miguelvr, p=p, block=block),
        TORCH_DROPOUT: partial(F.dropout, p=p),
        TORCH_DROPOUT2D: partial(F.dropout2d, p=p),
        DROPOUT: partial(functional.dropout, p=p),
        DROPOUT2D: partial(functional.dropout2d, p=p),
    }


def _miguelvr(x: Tensor, p: float, block: int) -> Tensor:
    """DropBlock as in github.com/miguelvr/dropblock: seeds anywhere, at p / block^2, one mask for all channels."""
    seeds = (torch.rand(x.shape[0], *x.shape[2:], device=x.device) < p / block**2).float()
    grown = F.max_pool2d(seeds[:, None], block, stride=1, padding=block // 2)
    if block % 2 == 0:
        grown = grown[..., :-1, :-1]
    keep = 1 - grown.squeeze(1)
    return x * keep[:, None] * keep.numel() / keep.sum()


@contextmanager
def without_kernel() -> Iterator[None]:
    """Leave out the compiled loops, as where nothing was compiled: PyTorch's operations alone."""
    library, kernel._library = kernel._library, None
    try:
        yield
    finally:
        kernel._library = library


def make(shape: Shape, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """An input that wants a gradient, and the gradient that comes back."""
    x = torch.randn(shape, device=device, requires_grad=True)
    return x, torch.randn(shape, device=device)


@torch.no_grad()
def dropped(contestant: Contestant, shape: Shape, draws: int = DRAWS, device: str = "cpu") -> float:
    """The fraction of ones that a contestant makes zeros."""
    if contestant.shares:
        # Few blocks in each draw: many draws, of one channel, which tells what the others would.
        shape, draws = (shape[0], 1, *shape[2:]), SHARED_DRAWS * draws
    ones = torch.ones(shape, device=device)
    with contestant.around():
        return zeros(contestant.call, ones, draws)


def zeros(call: Callable[[Tensor], Tensor], ones: Tensor, draws: int) -> float:
    """The fraction of ones that comes back as zero, over some draws."""
    return sum((call(ones) == 0).float().mean().item() for _ in range(draws)) / draws


def named(shape: Shape) -> str:
    """As in `32x256x28x28`."""
    return "x".join(map(str, shape))


def shape(text: str) -> Shape:
    """What `named` wrote."""
    sizes = tuple(map(int, text.split("x")))
    if len(sizes) != 4 or min(sizes) < 1:
        raise ValueError(f"a shape is NxCxHxW, got {text!r}")
    return sizes


def facts(device: str = "cpu") -> dict[str, Any]:
    """The machine and the software that the numbers come from."""
    modules = (hookdrop, torch, torchvision, timm)
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "device": device if device == "cpu" else torch.cuda.get_device_name(),
        "threads": torch.get_num_threads(),
        "kernel": kernel.available(),
        "python": platform.python_version(),
        "versions": {module.__name__: module.__version__ for module in modules},
    }


def in_words(found: dict[str, Any]) -> str:
    """The facts in two lines."""
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    where = "" if found["device"] == "cpu" else f", {found['device']}"
    built = "built and used" if found["kernel"] else "not built, or left out by HOOKDROP_KERNEL=0"
    return (
        f"{found['cpu']}, {found['cores']} cores, {found['threads']} threads{where}; {versions}\n"
        f"hookdrop's compiled kernel: {built}."
    )


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
