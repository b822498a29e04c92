"""Count the kernel launches of a forward on a GPU, and their memory traffic: `python benchmarks/launches.py`.

This needs no GPU: fake CUDA tensors have no values. Every operation counts as one launch, except views and allocations;
hookdrop's count as many as they launch, which tests/unit/accel/test_triton_dropblock.py checks. Bytes are those of
all tensors that an operation reads and writes.
"""

import packages  # noqa: F401
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import peers
from hookdrop import functional
from program import show

SHAPE = (32, 256, 28, 28)
ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
FILLS = ("bernoulli_", "fill_", "normal_", "random_", "uniform_", "zero_")
"""In-place operations that do not read the tensor, like those whose names end in `_like`."""
DRAW = torch.ops.hookdrop.draw_blocks.default
"""PyTorch draws the state, and a kernel writes the mask. Its argument `x` has only the shape and the device."""


class LaunchCounter(TorchDispatchMode):
    """Counts launches on CUDA devices and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.launches, self.bytes = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        read = [] if func is DRAW or name in FILLS or name.endswith("_like") else _on_cuda((args, kwargs))
        written = _on_cuda(out)
        if written and not func.is_view and name not in (*ALLOCATIONS, "detach"):
            self.launches += 2 if func is DRAW else 1
            self.bytes += sum(tensor.nbytes for tensor in (*read, *written))
        return out


def _on_cuda(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.device.type == "cuda"]


def forward(function: peers.Function, shape: tuple[int, ...] = SHAPE, **settings: Any) -> LaunchCounter:
    """Count a forward of a tensor that requires a gradient; the settings are those of `torch.empty`."""
    with FakeTensorMode():
        x = torch.empty(shape, device="cuda", requires_grad=True, **settings)
        with LaunchCounter() as counter:
            function(x)
    return counter


FUNCTIONS = peers.calls() | {
    "hookdrop GaussianNoise": partial(functional.gaussian_noise, std=peers.P),
    "x + p * torch.randn_like(x)": lambda x: x + peers.P * torch.randn_like(x),
    "hookdrop UniformNoise": partial(functional.uniform_noise, beta=peers.P),
    "x * (1 + p * (2 * torch.rand_like(x) - 1))": lambda x: x * (1 + peers.P * (2 * torch.rand_like(x) - 1)),
}


def main() -> None:
    rows, elements = {}, torch.Size(SHAPE).numel()
    for name, function in FUNCTIONS.items():
        counter = forward(function)
        rows[name] = {"launches": counter.launches, "bytes per element": f"{counter.bytes / elements:.2f}"}
    show("A forward at 32x256x28x28, float32", rows)


if __name__ == "__main__":
    main()
