"""Class activation maps: which part of a picture a class is read from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hookdrop.diagnostics.first_call import without_bookkeeping
from hookdrop.diagnostics.isolation import preserved
from hookdrop.errors import LayerError, ShapeError, nearest, warn
from hookdrop.hooks import compiling
from hookdrop.injection.select import Entries, Layer, select
from hookdrop.observe.cam_methods import METHODS, Logits, Spot, library_class
from hookdrop.utils.tables import counted, some
from hookdrop.utils.tensor_copies import copied
from hookdrop.utils.tensor_tree import describe
from hookdrop.utils.validation import count, floating
from hookdrop.utils.wrappers import unwrapped

Target = int | Tensor | Sequence[Any] | Callable[[Tensor], Tensor] | None


def grad_cam(
    model: nn.Module,
    x: Tensor,
    layer: Entries,
    target: Target = None,
    method: str = "gradcam",
    *,
    grid: tuple[int, int] | None = None,
) -> Tensor:
    """Which part of each picture speaks for a class, by pytorch-grad-cam (`pip install grad-cam`).

    The model runs in eval mode, uncompiled; modes, buffers, the random state and the parameters' gradients are what
    they were before, after an error too. Parameters get no gradients at all, so that it works under
    DistributedDataParallel, and no hook on them is called.

    Args:
        model: a classifier, from (N, C, H, W) to (N, classes), or to something with such a tensor first in it.
        x: the pictures, (N, C, H, W).
        layer: one layer, as `inject` names it. Of a CNN the last that still has a map (`"layer4"`); of a vision
            transformer one whose patch tokens are still used (`"blocks.11.norm1"`: what comes out of the last block is
            read at the class token alone).
        target: the class, one for all or one for each picture; or functions from an output (classes,) to a number.
            None is the class that the model says.
        method: `"gradcam"` (Selvaraju et al. 2016, arXiv:1610.02391), `"gradcam++"`, `"xgradcam"`, `"hirescam"`,
            `"layercam"`, `"eigencam"` (which knows no class), or `"cam"`: class activation mapping itself (Zhou et al.
            2015, arXiv:1512.04150), where global average pooling and one linear layer follow `layer`.
        grid: rows and columns of the tokens, where the picture's proportions do not tell. The last rows * columns
            tokens are the picture's; those before (class, distillation, registers) are left out.

    Returns:
        (N, H, W), float32, on the CPU: each picture's map from 0 to 1; 0 everywhere where nothing speaks for the class,
        and NaN, with a warning, where the model's numbers are not finite.

    Raises:
        HookdropError: grad-cam is not installed.
        LayerError: no such layer, more than one, or one that is not called just once.
        ShapeError: the layer gives neither a map nor tokens of a known grid; or the model gives no (N, classes).
        ValueError: no such class, no such method, or no such grid.
        TypeError: an argument of another kind, such as pictures of bytes.

    Example:
        >>> model = timm.create_model("resnet18", pretrained=True)  # doctest: +SKIP
        >>> grad_cam(model, images, layer="layer4", target=281).shape  # doctest: +SKIP
        torch.Size([8, 224, 224])
    """
    compiling.not_while_tracing("grad_cam()")
    must_be_model(model, "grad_cam", "model, x, layer")
    if not isinstance(method, str) or method not in METHODS:
        known = ", ".join(map(repr, METHODS))
        raise ValueError(f"there is no method {method!r}.\n  there are: {known}{_near(method)}")
    if not isinstance(x, Tensor) or x.dim() != 4 or not x.numel():
        raise ShapeError(f"x are pictures (N, C, H, W), got {describe(x)}.")
    floating(x, "grad_cam")
    grid = None if grid is None else _checked(grid)
    chosen = _one(model, layer)
    targets = _targets(target, len(x), method)
    spot = Spot(chosen, (x.shape[-2], x.shape[-1]), grid)
    method_class = library_class(method, spot)
    with _alone(model) as inner:
        maps = _run(method_class, inner, spot, x, targets)
    _tell_of_no_numbers(maps, x)
    _tell_of_empty(maps, spot)
    peaks = maps.amax((1, 2), keepdim=True)
    # The library adds a small number to what it divides by, which matters where gradients are as small.
    return maps / torch.where(peaks > 0.0, peaks, 1.0)


def must_be_model(model: object, owner: str, order: str) -> None:
    """Raise `TypeError` for what is no module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{owner}: the model comes first, got {describe(model)}.\n  write {owner}({order})")


def _checked(grid: Any) -> tuple[int, int]:
    if not isinstance(grid, Sequence) or isinstance(grid, str) or len(grid) != 2:
        raise ValueError(f"grad_cam: grid must be (rows, columns), got {grid!r}.\n  as in grid=(14, 14)")
    return count(grid[0], "grid's rows", "grad_cam"), count(grid[1], "grid's columns", "grad_cam")


def _near(method: object) -> str:
    if not isinstance(method, str):
        return ""
    near = nearest(method, METHODS, 1)
    return f"\n  did you mean: {near[0]!r}" if near else ""


def _one(model: nn.Module, layer: Entries) -> Layer:
    found = select(model, layer).layers
    if len(found) > 1:
        names = some([one.name for one in found])
        raise LayerError(f"a class activation map is of one layer, got {len(found)}: {names}.")
    return found[0]


def _targets(target: Target, samples: int, method: str) -> list[_Class | Callable[[Tensor], Tensor]] | None:
    """What is explained of each sample; None is the class that the model says."""
    if target is None:
        return None
    if isinstance(target, Tensor):
        target = target.tolist()
    listed = list(target) if isinstance(target, Sequence) else [target] * samples
    if len(listed) != samples:
        raise ValueError(f"target: give one class, or one for each of the {samples} pictures, got {len(listed)}.")
    if method == "cam" and any(map(callable, listed)):
        raise TypeError('method="cam" reads the weights of a class: target is a class, not a function.')
    return [_Function(one) if callable(one) else _Class(count(one, "target", "grad_cam", 0)) for one in listed]


class _Class:
    """The logit of one class."""

    def __init__(self, category: int) -> None:
        self.category = category

    def __call__(self, output: Tensor) -> Tensor:
        if self.category >= len(output):
            raise ValueError(f"target: the model has classes 0 to {len(output) - 1}, got {self.category}.")
        return output[self.category]


class _Function:
    """What somebody's function makes of an output."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self._function = function

    def __call__(self, output: Tensor) -> Tensor:
        value: Any = self._function(output)
        if not isinstance(value, Tensor):
            raise TypeError(
                f"target must return a tensor of one number, got {value!r} ({type(value).__name__}).\n"
                "  as in target=lambda output: output[3] - output[5], without .item()"
            )
        if value.numel() != 1:
            raise ShapeError(
                f"target must return one number, got {describe(value)} of an output (classes,).\n"
                "  as in target=lambda output: output[3] - output[5]"
            )
        return value.reshape(())


@contextmanager
def _alone(model: nn.Module) -> Iterator[nn.Module]:
    """The model without wrappers, to be run with gradients but without any of the parameters'."""
    inner = unwrapped(model)
    trained = [parameter for parameter in inner.parameters() if parameter.requires_grad]
    stance = torch.compiler.set_stance("force_eager")
    with torch.inference_mode(False), torch.enable_grad(), without_bookkeeping(inner), preserved(inner), stance:
        try:
            for parameter in trained:
                parameter.requires_grad_(False)
            yield inner
        finally:
            for parameter in trained:
                parameter.requires_grad_(True)


def _run(method_class: Any, model: nn.Module, spot: Spot, x: Tensor, targets: Any) -> Tensor:
    place = next((p.device for p in model.parameters()), x.device)
    handle = spot.module.register_forward_hook(spot)
    cam = None
    try:
        cam = method_class(Logits(model), [spot.tensor], reshape_transform=spot.as_map)
        # A leaf that wants gradients must not be written to, as some models do with what they are given.
        maps = cam(input_tensor=copied(x, place).requires_grad_().clone(), targets=targets)
    finally:
        handle.remove()
        if cam is not None:
            cam.activations_and_grads.release()
    return torch.from_numpy(maps)


def _tell_of_no_numbers(maps: Tensor, x: Tensor) -> None:
    which = maps.isnan().flatten(1).any(1).nonzero().flatten().tolist()
    if which:
        bad = not x[which].isfinite().all()
        why = "x is not finite there" if bad else "what the model computes, or its gradient, is not finite"
        warn(f"{counted(len(which), 'map')} of {len(maps)} {'is' if len(which) == 1 else 'are'} NaN: {why}.\n"
             f"  pictures: {', '.join(map(str, which[:8]))}{', ...' if len(which) > 8 else ''}")  # fmt: skip


def _tell_of_empty(maps: Tensor, spot: Spot) -> None:
    if not maps.any():
        instead = (
            "of a vision transformer take a layer whose patch tokens are used after it, such as 'blocks.11.norm1'"
            if spot.of_tokens
            else "take another layer, or another class: what speaks against one is not shown"
        )
        warn(f"the maps at {spot.name!r} are 0 everywhere: nothing there speaks for the class.\n  {instead}")
