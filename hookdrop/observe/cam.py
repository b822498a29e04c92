"""Class activation maps: which regions of an image are evidence for a class."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hookdrop.errors import LayerError, ShapeError, did_you_mean, warn
from hookdrop.guards.first_call import without_bookkeeping
from hookdrop.hooks import compiling
from hookdrop.observe.cam_methods import METHODS, CamLayer, LogitsModel, cam_class
from hookdrop.survey.isolation import restored_after, uncompiled
from hookdrop.utils.select import Entries, select
from hookdrop.utils.tables import counted, some
from hookdrop.utils.tensor_tree import describe
from hookdrop.utils.tensors import detached_copy
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
    """Compute class activation maps with pytorch-grad-cam (`pip install grad-cam`).

    A map shows which regions of an image are evidence for a class. The model runs in eval mode, uncompiled. Modes,
    buffers, the random state and the parameters' gradients are restored, also after an error. Parameters receive no
    gradients, so this works under DistributedDataParallel and calls no parameter hook.

    Args:
        model: a classifier from (N, C, H, W) to (N, classes), or to a container whose first tensor has that shape.
        x: the images, (N, C, H, W).
        layer: one layer, as in `inject`. In a CNN, the last layer with a map (`"layer4"`). In a vision transformer, a
            layer whose patch tokens the model still uses (`"blocks.11.norm1"`: of the last block's output it only
            uses the class token).
        target: the class, one for all or one for each image; or functions from an output (classes,) to a number.
            None is the predicted class.
        method: `"gradcam"` (Selvaraju et al. 2016, arXiv:1610.02391), `"gradcam++"`, `"xgradcam"`, `"hirescam"`,
            `"layercam"`, `"eigencam"` (which uses no class), or `"cam"`: class activation mapping (Zhou et al. 2015,
            arXiv:1512.04150), where global average pooling and one linear layer follow `layer`.
        grid: rows and columns of the tokens, if the aspect ratio of the image does not determine them. The last
            rows * columns tokens are the patches; earlier tokens (class, distillation, registers) are ignored.

    Returns:
        (N, H, W), float32, on the CPU: a map from 0 to 1 for each image. Without positive evidence the map is 0
        everywhere. If the model's output or gradient is not finite, the map is NaN, with a warning.

    Raises:
        HookdropError: grad-cam is not installed.
        LayerError: `layer` matches no layer, several layers, or a layer that is not called exactly once.
        ShapeError: the layer returns neither a map nor tokens of a known grid, or the model not (N, classes).
        ValueError: the class, the method or the grid does not exist.
        TypeError: an argument has the wrong type, such as uint8 images.

    Example:
        >>> model = timm.create_model("resnet18", pretrained=True)  # doctest: +SKIP
        >>> grad_cam(model, images, layer="layer4", target=281).shape  # doctest: +SKIP
        torch.Size([8, 224, 224])
    """
    compiling.raise_if_tracing("grad_cam()")
    check_is_model(model, "grad_cam", "model, x, layer")
    if not isinstance(method, str) or method not in METHODS:
        hint = did_you_mean(method, METHODS, 1) if isinstance(method, str) else ""
        raise ValueError(f"grad_cam: unknown method {method!r}.\n  methods: {', '.join(map(repr, METHODS))}{hint}")
    if not isinstance(x, Tensor) or x.dim() != 4 or not x.numel():
        raise ShapeError(f"grad_cam: x must be images (N, C, H, W), got {describe(x)}.")
    floating(x, "grad_cam")
    grid = None if grid is None else _check_grid(grid)
    found = select(model, layer).layers
    if len(found) > 1:
        names = some([match.name for match in found])
        raise LayerError(f"grad_cam: `layer` must match one layer, but it matches {len(found)}: {names}.")
    targets = _targets(target, len(x), method)
    cam_layer = CamLayer(found[0], (x.shape[-2], x.shape[-1]), grid)
    method_class = cam_class(method, cam_layer)
    with _isolated(model) as inner:
        maps = _compute_maps(method_class, inner, cam_layer, x, targets)
    _warn_of_nan(maps, x)
    if not maps.any():
        hint = "use another layer or class: the maps do not show evidence against a class"
        if cam_layer.is_tokens:
            hint = "in a vision transformer, use a layer whose patch tokens are still used, such as 'blocks.11.norm1'"
        warn(
            f"the maps at {cam_layer.name!r} are 0 everywhere: no positive evidence for this class at this layer.\n"
            f"  {hint}"
        )
    peaks = maps.amax((1, 2), keepdim=True)
    # The library divides by the maximum plus an epsilon, which matters when the gradients are as small.
    return maps / torch.where(peaks > 0.0, peaks, 1.0)


def check_is_model(model: object, owner: str, order: str) -> None:
    """Raise `TypeError` if `model` is not a module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{owner}: the model comes first, got {describe(model)}.\n  write: {owner}({order})")


def _check_grid(grid: Any) -> tuple[int, int]:
    if not isinstance(grid, Sequence) or isinstance(grid, str) or len(grid) != 2:
        raise ValueError(f"grad_cam: grid must be (rows, columns), got {grid!r}.\n  for example grid=(14, 14)")
    return count(grid[0], "grid rows", "grad_cam"), count(grid[1], "grid columns", "grad_cam")


def _targets(target: Target, samples: int, method: str) -> list[_TargetOutput] | None:
    """Return the target of each sample; None is the predicted class."""
    if target is None:
        return None
    if isinstance(target, Tensor):
        target = target.tolist()
    listed = list(target) if isinstance(target, Sequence) else [target] * samples
    if len(listed) != samples:
        raise ValueError(f"target must be one class, or one for each of the {samples} images, got {len(listed)}.")
    if method == "cam" and any(map(callable, listed)):
        raise TypeError('method="cam" uses the weights of a class, so target must be a class, not a function.')
    return [_TargetOutput(item if callable(item) else count(item, "target", "grad_cam", 0)) for item in listed]


class _TargetOutput:
    """The logit of one class, or the result of a user's function of the output."""

    def __init__(self, category: Any) -> None:
        self.category = category

    def __call__(self, output: Tensor) -> Tensor:
        if not callable(self.category):
            if self.category >= len(output):
                raise ValueError(f"target: the model has classes 0 to {len(output) - 1}, got {self.category}.")
            return output[self.category]
        value, hint = self.category(output), "\n  for example target=lambda output: output[3] - output[5]"
        if not isinstance(value, Tensor):
            got = f"{value!r} ({type(value).__name__})"
            raise TypeError(f"target must return a tensor with one element, got {got}.{hint}, without .item()")
        if value.numel() != 1:
            raise ShapeError(f"target must return one element, got {describe(value)} for an output (classes,).{hint}")
        return value.reshape(())


@contextmanager
def _isolated(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the model without its wrappers, with gradients enabled and parameters frozen."""
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


def _compute_maps(method_class: Any, model: nn.Module, layer: CamLayer, x: Tensor, targets: Any) -> Tensor:
    place = next((p.device for p in model.parameters()), x.device)
    handle = layer.module.register_forward_hook(layer)
    cam = None
    try:
        cam = method_class(LogitsModel(model), [layer.output], reshape_transform=layer.as_map)
        # Some models modify their input in place, which PyTorch forbids for a leaf that requires gradients.
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
        why = "x is not finite there" if bad else "the model's output or gradient is not finite"
        warn(f"{len(which)} of {counted(len(maps), 'map')} {'is' if len(which) == 1 else 'are'} NaN: {why}.\n"
             f"  images: {', '.join(map(str, which[:8]))}{', ...' if len(which) > 8 else ''}")  # fmt: skip
