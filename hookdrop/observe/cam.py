"""Class activation maps: which regions of an image are evidence for a class."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hookdrop.errors import LayerError, ShapeError, warn
from hookdrop.guards.problems import without_bookkeeping
from hookdrop.hooks import compiling
from hookdrop.hooks.checkpointing import is_recomputing
from hookdrop.observe.read_only_hooks import first_tensor
from hookdrop.survey.isolation import restored_after, uncompiled
from hookdrop.utils.axes import as_map
from hookdrop.utils.captures import detached_copy
from hookdrop.utils.names import unwrapped
from hookdrop.utils.optional import needs
from hookdrop.utils.select import Entries, Layer, select
from hookdrop.utils.tables import counted, some
from hookdrop.utils.tensor_tree import describe, map_tensor
from hookdrop.utils.validation import count, floating, one_of

Target = int | Tensor | Sequence[Any] | Callable[[Tensor], Tensor] | None
METHODS = {
    "gradcam": "GradCAM",
    "gradcam++": "GradCAMPlusPlus",
    "xgradcam": "XGradCAM",
    "hirescam": "HiResCAM",
    "layercam": "LayerCAM",
    "eigencam": "EigenCAM",
}
"""Class of the library by method."""


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
            `"layercam"`, or `"eigencam"` (which uses no class).
        grid: rows and columns of the tokens, if the aspect ratio of the image does not determine them. The last
            rows * columns tokens are the patches; earlier tokens (class, distillation, registers) are ignored.

    Returns:
        (N, H, W), float32, on the CPU: a map from 0 to 1 for each image. Without positive evidence the map is 0
        everywhere. If the model's output or gradient is not finite, the map is NaN, with a warning.

    Raises:
        HookdropError: grad-cam is not installed.
        LayerError: `layer` matches no layer, several layers, or a layer that is not called exactly once.
        ShapeError: the layer returns neither a map nor tokens of a known grid, or the model not (N, classes).
        ValueError, IndexError: the method or the class does not exist.
        TypeError: an argument has the wrong type, such as uint8 images.

    Example:
        >>> model = timm.create_model("resnet18", pretrained=True)  # doctest: +SKIP
        >>> grad_cam(model, images, layer="layer4", target=281).shape  # doctest: +SKIP
        torch.Size([8, 224, 224])
    """
    compiling.raise_if_tracing("grad_cam()")
    one_of(method, "method", "grad_cam", tuple(METHODS))
    if not isinstance(x, Tensor) or x.dim() != 4 or not x.numel():
        raise ShapeError(f"grad_cam: x must be images (N, C, H, W), got {describe(x)}.")
    floating(x, "grad_cam")
    found = select(model, layer).layers
    if len(found) > 1:
        names = some([match.name for match in found])
        raise LayerError(f"grad_cam: `layer` must match one layer, but it matches {len(found)}: {names}.")
    if grid is not None:
        grid = count(grid[0], "grid rows", "grad_cam"), count(grid[1], "grid columns", "grad_cam")
    watched = _WatchedLayer(found[0], (x.shape[-2], x.shape[-1]), grid)
    with needs("observe"):
        import pytorch_grad_cam
    with _isolated(model) as inner:
        maps = _compute_maps(getattr(pytorch_grad_cam, METHODS[method]), inner, watched, x, _targets(target, len(x)))
    _warn_if_empty(maps, watched)
    peaks = maps.amax((1, 2), keepdim=True)
    # The library divides by the maximum plus an epsilon, which matters when the gradients are as small.
    return maps / torch.where(peaks > 0.0, peaks, 1.0)


def _targets(target: Target, samples: int) -> list[Any] | None:
    """Return a function of the output for each sample; None is the predicted class."""
    if target is None:
        return None
    if isinstance(target, Tensor):
        target = target.tolist()
    listed = list(target) if isinstance(target, Sequence) else [target] * samples
    if len(listed) != samples:
        raise ValueError(f"target must be one class, or one for each of the {samples} images, got {len(listed)}.")
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    return [each if callable(each) else ClassifierOutputTarget(count(each, "target", "grad_cam", 0)) for each in listed]


class _Classifier(nn.Module):
    """What the library expects: a model that returns one tensor (N, classes), and whose gradients it may reset."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        out = self.model(x)
        logits = first_tensor(out)
        if logits is None or logits.dim() != 2 or len(logits) != len(x):
            raise ShapeError(f"the model must return (N, classes), got {describe(out)} for {len(x)} images.")
        return logits.float()  # NumPy has no bfloat16

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: no parameter gradient is computed."""


class _WatchedLayer:
    """The forward hook of the layer. It passes the output through the module `output`, which the library hooks."""

    def __init__(self, layer: Layer, image: tuple[int, int], grid: tuple[int, int] | None) -> None:
        self.name, self.module = layer.name, layer.module
        self.output, self.calls = nn.Identity(), 0
        self._image, self._grid = image, grid

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if is_recomputing():
            return None
        self.calls += 1
        if self.calls > 1:  # the library would use the first call
            raise LayerError(
                f"{self.name!r} was called 2 times in one forward; a map needs one call.\n"
                "  choose a layer that is called once, such as the block that contains it"
            )
        return map_tensor(output, None, self.output)

    def as_map(self, x: Tensor) -> Tensor:
        """Convert an output or its gradient to (N, C, h, w), as a copy that is safe from in-place edits."""
        try:
            return as_map(x, self._image, self._grid).detach().float().clone()
        except ShapeError as error:
            error.args = (f"{self.name!r} {error}",)
            raise


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


def _compute_maps(cam_class: Any, model: nn.Module, layer: _WatchedLayer, x: Tensor, targets: Any) -> Tensor:
    device = next((parameter.device for parameter in model.parameters()), x.device)
    handle = layer.module.register_forward_hook(layer)
    cam = None
    try:
        cam = cam_class(_Classifier(model), [layer.output], reshape_transform=layer.as_map)
        # Some models modify their input in place, which PyTorch forbids for a leaf that requires gradients.
        maps = torch.from_numpy(cam(input_tensor=detached_copy(x, device).requires_grad_().clone(), targets=targets))
    except AttributeError as error:  # what the library raises without an activation or a gradient
        if not hasattr(cam, "outputs"):  # the model raised it
            raise
        if layer.calls == 0:
            raise LayerError(f"{layer.name!r} was called 0 times in one forward; a map needs one call.") from error
        raise LayerError(f"no gradient flows from the model's output to {layer.name!r}.") from error
    finally:
        handle.remove()
        if cam is not None:
            cam.activations_and_grads.release()
    return maps


def _warn_if_empty(maps: Tensor, layer: _WatchedLayer) -> None:
    if bad := maps.isnan().flatten(1).any(1).nonzero().flatten().tolist():
        warn(f"NaN in {len(bad)} of {counted(len(maps), 'map')}: x, the output or the gradient is not finite.\n"
             f"  images: {some(bad)}")  # fmt: skip
    if not maps.any():
        warn(
            f"the maps at {layer.name!r} are 0 everywhere: no positive evidence for this class at this layer.\n"
            "  use another layer or class; in a vision transformer, a layer whose patch tokens are still used, such as "
            "'blocks.11.norm1'"
        )
