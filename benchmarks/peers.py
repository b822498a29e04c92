"""The implementations to compare: hookdrop, other libraries and PyTorch, and `x * c` as the lower limit of the cost.

All get the same p and block size. Not all of them drop the fraction p; `dropped_fraction` measures what each drops.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
import torchvision
from timm.layers.drop import drop_block_2d, drop_path
from torch import Tensor, nn

from hookdrop import functional
from hookdrop.accel import native
from hookdrop.kernels.accelerators import ACCELERATORS, Accelerator

P, BLOCK = 0.1, 7
DRAWS, SHARED_DRAWS = 20, 50
SHAPES = ("32x256x28x28", "32x1024x14x14", "16x256x56x56")
GPU_SHAPES = (*SHAPES, "32x2048x7x7", "16x64x112x112")

LIMIT = "x * c"
BATCH, SAMPLE, EXPECTED = "hookdrop batch", "hookdrop sample", "hookdrop expected"
SHARED, DROPOUT, DROPOUT2D = "hookdrop shared", "hookdrop dropout", "hookdrop dropout2d"
TORCHVISION, TIMM, TIMM_SHARED = "torchvision", "timm", "timm shared"
TORCH_DROPOUT, TORCH_DROPOUT2D = "F.dropout", "F.dropout2d"
DROP_PATH, TIMM_DROP_PATH = "hookdrop drop_path", "timm drop_path"
CPU = torch.device("cpu")
NO_KERNEL = ", no kernel"

BLOCKS = (BATCH, SAMPLE, EXPECTED, SHARED)
Function = Callable[[Tensor], Tensor]


def calls(p: float = P, block: int = BLOCK) -> dict[str, Function]:
    """Return the functions of hookdrop, of other libraries and of PyTorch, by name."""
    drop_block = partial(functional.drop_block, p=p, block_size=block)
    return {
        LIMIT: lambda x: x * 1.25,
        BATCH: drop_block,
        SAMPLE: partial(drop_block, normalize="sample"),
        EXPECTED: partial(drop_block, normalize="expected"),
        SHARED: partial(drop_block, per_channel=False),
        TORCHVISION: partial(torchvision.ops.drop_block2d, p=p, block_size=block),
        TIMM: partial(drop_block_2d, drop_prob=p, block_size=block, couple_channels=False),
        TIMM_SHARED: partial(drop_block_2d, drop_prob=p, block_size=block, couple_channels=True),
        TORCH_DROPOUT: partial(F.dropout, p=p),
        TORCH_DROPOUT2D: partial(F.dropout2d, p=p),
        DROPOUT: partial(functional.dropout, p=p),
        DROPOUT2D: partial(functional.dropout2d, p=p),
        DROP_PATH: partial(functional.drop_path, p=p),
        TIMM_DROP_PATH: partial(drop_path, drop_prob=p, training=True),
    }


def implementations(p: float = P, block: int = BLOCK, device: str = "cpu") -> dict[str, Function]:
    """Return all functions by name; those that use the compiled kernel, if it is available, also without it."""
    found = calls(p, block)
    if device == "cpu" and native.available():
        found |= {name + NO_KERNEL: found[name] for name in (*BLOCKS, DROPOUT)}
    return found


def kernel_of(name: str) -> AbstractContextManager[Any]:
    """Disable the compiled kernel if the name says so: hookdrop then uses PyTorch operations only."""
    return patch.dict(ACCELERATORS, {CPU: Accelerator()} if name.endswith(NO_KERNEL) else {})


def job(name: str, function: Function, x: Tensor, grad: Tensor) -> Callable[[], None]:
    """Create a job that runs forward and backward, and frees its own memory within its turn."""

    def run() -> None:
        with kernel_of(name):
            torch.autograd.backward(function(x), grad)
        x.grad = None

    return run


def make_inputs(shape: str, device: str) -> tuple[Tensor, Tensor]:
    """Create an input such as `32x256x28x28` that requires a gradient, and the gradient of the output."""
    x = torch.randn([*map(int, shape.split("x"))], device=device, requires_grad=True)
    return x, torch.randn_like(x)


@torch.no_grad()
def dropped_fraction(name: str, one: Function, shape: Sequence[int], draws: int = DRAWS, device: str = "cpu") -> float:
    if "shared" in name:
        # A shared mask has few blocks, so draw more often; one channel suffices.
        shape, draws = (shape[0], 1, *shape[2:]), SHARED_DRAWS * draws
    ones = torch.ones(shape, device=device)
    with kernel_of(name):
        return sum((one(ones) == 0).float().mean().item() for _ in range(draws)) / draws


class SkippedLayers(nn.Sequential):
    """A list of layers whose loop skips each with probability 0.5, as one would write it by hand."""

    def __iter__(self) -> Iterator[nn.Module]:
        return (layer for layer in super().__iter__() if not self.training or torch.rand(()) >= 0.5)


def skip_layers(model: nn.Module) -> None:
    """Put the loop in the place of the layers of a ViT of timm or a LLaMA of transformers."""
    owner, name = (model, "blocks") if hasattr(model, "blocks") else (model.model, "layers")
    setattr(owner, name, SkippedLayers(*getattr(owner, name)))
