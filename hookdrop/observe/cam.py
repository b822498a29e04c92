"""Class activation maps: which part of an image is evidence for a class."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hookdrop.diagnostics.first_call import without_bookkeeping
from hookdrop.diagnostics.isolation import restored_after, uncompiled
from hookdrop.errors import LayerError, ShapeError, did_you_mean, warn
from hookdrop.hooks import compiling
from hookdrop.injection.select import Entries, select
from hookdrop.observe.cam_methods import METHODS, Logits, WatchedLayer, library_class
from hookdrop.utils.tables import counted, some
from hookdrop.utils.tensor_copies import detached_copy
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
    """Which part of each image is evidence for a class, by pytorch-grad-cam (`pip install grad-cam`).

    The model runs in eval mode, uncompiled. Modes, buffers, the random state and the parameters' gradients are restored
    afterwards, also after an error. Parameters get no gradients at all, so this works under DistributedDataParallel and
    calls no parameter hook.

    Args:
        model: a classifier from (N, C, H, W) to (N, classes), or to a container whose first tensor this is.
        x: the images, (N, C, H, W).
        layer: one layer, as in `inject`. In a CNN the last with a map (`"layer4"`); in a vision transformer one whose
            patch tokens are still used (`"blocks.11.norm1"`: only the class token of the last block's output is read).
        target: the class, one for all or one for each image; or functions from an output (classes,) to a number.
            None is the predicted class.
        method: `"gradcam"` (Selvaraju et al. 2016, arXiv:1610.02391), `"gradcam++"`, `"xgradcam"`, `"hirescam"`,
            `"layercam"`, `"eigencam"` (which uses no class), or `"cam"`: class activation mapping (Zhou et al. 2015,
            arXiv:1512.04150), where global average pooling and one linear layer follow `layer`.
        grid: rows and columns of the tokens, where the image's proportions do not determine them. The last
            rows * columns tokens are the image's; those before (class, distillation, registers) are ignored.

    Returns:
        (N, H, W), float32, on the CPU: each image's map from 0 to 1; 0 everywhere without positive evidence, and NaN,
        with a warning, where the model's numbers are not finite.

    Raises:
        HookdropError: grad-cam is not installed.
        LayerError: no such layer, more than one, or one that is not called exactly once.
        ShapeError: the layer returns neither a map nor tokens of a known grid; or the model returns no (N, classes).
        ValueError: no such class, no such method, or no such grid.
        TypeError: an argument of another type, such as images of bytes.

    Example:
        >>> model = timm.create_model("resnet18", pretrained=True)  # doctest: +SKIP
        >>> grad_cam(model, images, layer="layer4", target=281).shape  # doctest: +SKIP
        torch.Size([8, 224, 224])
    """
    compiling.raise_if_tracing("grad_cam()")
    must_be_model(model, "grad_cam", "model, x, layer")
    if not isinstance(method, str) or method not in METHODS:
        hint = did_you_mean(method, METHODS, 1) if isinstance(method, str) else ""
        raise ValueError(f"there is no method {method!r}.\n  there are: {', '.join(map(repr, METHODS))}{hint}")
    if not isinstance(x, Tensor) or x.dim() != 4 or not x.numel():
        raise ShapeError(f"x must be images (N, C, H, W), got {describe(x)}.")
    floating(x, "grad_cam")
    grid = None if grid is None else _checked(grid)
    found = select(model, layer).layers
    if len(found) > 1:
        names = some([one.name for one in found])
        raise LayerError(f"a class activation map is of one layer, got {len(found)}: {names}.")
    targets = _targets(target, len(x), method)
    watched = WatchedLayer(found[0], (x.shape[-2], x.shape[-1]), grid)
    method_class = library_class(method, watched)
    with _isolated(model) as inner:
        maps = _run(method_class, inner, watched, x, targets)
    _warn_of_nan(maps, x)
    if not maps.any():
        instead = "use another layer, or another class: evidence against a class is not shown"
        if watched.of_tokens:
            instead = (
                "in a vision transformer use a layer whose patch tokens are used after it, such as 'blocks.11.norm1'"
            )
        warn(f"the maps at {watched.name!r} are 0 everywhere: no positive evidence for the class there.\n  {instead}")
    peaks = maps.amax((1, 2), keepdim=True)
    # The library adds a small number to its divisor, which matters where gradients are as small.
    return maps / torch.where(peaks > 0.0, peaks, 1.0)


def must_be_model(model: object, owner: str, order: str) -> None:
    """Raise `TypeError` for anything but a module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{owner}: the model comes first, got {describe(model)}.\n  write {owner}({order})")


def _checked(grid: Any) -> tuple[int, int]:
    if not isinstance(grid, Sequence) or isinstance(grid, str) or len(grid) != 2:
        raise ValueError(f"grad_cam: grid must be (rows, columns), got {grid!r}.\n  as in grid=(14, 14)")
    return count(grid[0], "grid's rows", "grad_cam"), count(grid[1], "grid's columns", "grad_cam")


def _targets(target: Target, samples: int, method: str) -> list[_Explained] | None:
    """What is explained for each sample; None is the predicted class."""
    if target is None:
        return None
    if isinstance(target, Tensor):
        target = target.tolist()
    listed = list(target) if isinstance(target, Sequence) else [target] * samples
    if len(listed) != samples:
        raise ValueError(f"target: give one class, or one for each of the {samples} images, got {len(listed)}.")
    if method == "cam" and any(map(callable, listed)):
        raise TypeError('method="cam" reads the weights of a class: target is a class, not a function.')
    return [_Explained(one if callable(one) else count(one, "target", "grad_cam", 0)) for one in listed]


class _Explained:
    """The logit of one class, or the result of the user's function of an output."""

    def __init__(self, category: Any) -> None:
        self.category = category

    def __call__(self, output: Tensor) -> Tensor:
        if not callable(self.category):
            if self.category >= len(output):
                raise ValueError(f"target: the model has classes 0 to {len(output) - 1}, got {self.category}.")
            return output[self.category]
        value, hint = self.category(output), "\n  as in target=lambda output: output[3] - output[5]"
        if not isinstance(value, Tensor):
            got = f"{value!r} ({type(value).__name__})"
            raise TypeError(f"target must return a tensor of one number, got {got}.{hint}, without .item()")
        if value.numel() != 1:
            raise ShapeError(f"target must return one number, got {describe(value)} of an output (classes,).{hint}")
        return value.reshape(())


@contextmanager
def _isolated(model: nn.Module) -> Iterator[nn.Module]:
    """The model without wrappers, to be run with gradients but with frozen parameters."""
    inner = unwrapped(model)
    trained = [parameter for parameter in inner.parameters() if parameter.requires_grad]
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        without_bookkeeping(inner),
        restored_after(inner),
        uncompiled(),
    ):
        try:
            inner.requires_grad_(False)
            yield inner
        finally:
            for parameter in trained:
                parameter.requires_grad_(True)


def _run(method_class: Any, model: nn.Module, watched: WatchedLayer, x: Tensor, targets: Any) -> Tensor:
    place = next((p.device for p in model.parameters()), x.device)
    handle = watched.module.register_forward_hook(watched)
    cam = None
    try:
        cam = method_class(Logits(model), [watched.tensor], reshape_transform=watched.as_map)
        # Some models modify their input in place, which a leaf that requires gradients does not allow.
        maps = cam(input_tensor=detached_copy(x, place).requires_grad_().clone(), targets=targets)
    finally:
        handle.remove()
        if cam is not None:
            cam.activations_and_grads.release()
    return torch.from_numpy(maps)


def _warn_of_nan(maps: Tensor, x: Tensor) -> None:
    which = maps.isnan().flatten(1).any(1).nonzero().flatten().tolist()
    if which:
        bad = not x[which].isfinite().all()
        why = "x is not finite there" if bad else "what the model computes, or its gradient, is not finite"
        warn(f"{counted(len(which), 'map')} of {len(maps)} {'is' if len(which) == 1 else 'are'} NaN: {why}.\n"
             f"  images: {', '.join(map(str, which[:8]))}{', ...' if len(which) > 8 else ''}")  # fmt: skip
