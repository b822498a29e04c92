"""Run a model on other inputs, or with changed outputs of some layers, and see what changes where."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from hookdrop.survey.isolation import Training, call, hooked, restored_after, restored_objects, set_modes

Edit = Callable[[Any], Any]
Watch = Callable[[str, str, Any], object]


def experiment(
    model: nn.Module,
    example: Any,
    watch: Watch,
    edits: Mapping[str, Edit],
    training: Training = False,
    *,
    weights: dict[str, Tensor] | None = None,
) -> None:
    """Call a model without wrappers and without gradients, and restore it.

    Args:
        model, example, training: as for `record`.
        watch: called with the name of a layer, `"input"` or `"output"`, and what the layer gets or returns.
        edits: functions that change the output of layers, by name; `watch` sees the output before.
        weights: what some parameters are meanwhile, by name; None: `random_weights`.
    """

    def before(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        watch(name, "input", (args, kwargs))

    def after(name: str, module: nn.Module, args: Any, output: Any) -> Any:
        watch(name, "output", output)
        return edits[name](output) if name in edits else None

    changes = (
        restored_after(model, trains=bool(training)),
        restored_objects(model, example),
        hooked(model, before, after),
    )
    with changes[0], changes[1], torch.no_grad(), changes[2]:
        set_modes(model, training)
        values = random_weights(model) if weights is None else weights
        call((lambda *args, **kwargs: functional_call(model, values, args, kwargs)) if values else model, example)


def random_weights(model: nn.Module, *, everywhere: bool = False) -> dict[str, Tensor]:
    """Return random numbers for the parameters that are almost 0, by name; `everywhere`, noise is added to all others.

    They hide what depends on them: a position bias, the last layer of a branch or its scale are often 0 at
    initialization, gains are 1 and weights small, and no longer after some updates. The parameters themselves are not
    written to. Those that are parts of something else are left alone: sharded and quantized ones, which have a type of
    their own, and those without values, on the meta device.
    """
    generator = torch.Generator().manual_seed(0)
    plain = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    found: dict[str, Tensor] = {}
    for name, x in model.named_parameters():
        usable = type(x) is nn.Parameter and x.dtype in plain and not x.is_meta and x.numel()
        if usable and (everywhere or torch.linalg.vector_norm(x.detach(), torch.inf) < _ALMOST_0):
            # Of a square matrix, 1 / sqrt(inputs), which keeps the size of what passes.
            noise = torch.randn(x.shape, generator=generator, device="cpu") * x.numel() ** -0.25
            found[name] = nn.Parameter(x.detach() * everywhere + noise.to(x), requires_grad=False)
    return found


_ALMOST_0 = 1e-3  # above the usual layer scales, 1e-4 to 1e-6


def changes(x: Tensor, y: Tensor, tolerance: float) -> Tensor:
    """Return where two tensors differ by more than `tolerance` times the largest number of the row of the first.

    The order of a sum changes its rounding, so that equal sums are not equal bit for bit.
    """
    x, y = x.nan_to_num(), y.nan_to_num()
    return (x - y).abs() > tolerance * x.abs().amax(-1, keepdim=True).clamp(min=1e-6)
