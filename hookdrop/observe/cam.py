"""Class activation maps: which regions of an image are evidence for a class, also compared between two models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hookdrop.guards.problems import without_bookkeeping
from hookdrop.hooks import compiling
from hookdrop.hooks.checkpointing import is_recomputing
from hookdrop.injection.figures import SCALE, as_images, get_figure
from hookdrop.observe.read_only_hooks import first_tensor
from hookdrop.survey.isolation import call, restored_after, set_eval, uncompiled
from hookdrop.utils.axes import as_map
from hookdrop.utils.captures import detached_copy
from hookdrop.utils.errors import LayerError, ShapeError, warn
from hookdrop.utils.names import unwrapped
from hookdrop.utils.optional import needs
from hookdrop.utils.select import Entries, Layer, select
from hookdrop.utils.tables import counted, some, text_table
from hookdrop.utils.tensor_tree import describe, map_tensor
from hookdrop.utils.validation import count, floating, one_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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

    The model runs in eval mode, uncompiled. Modes, buffers, the random state and the parameters' gradients are
    restored, also after an error. Parameters receive no gradients, so this works under DistributedDataParallel.

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
        ValueError, IndexError, TypeError: an argument is invalid, such as a class that does not exist.

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
    maps = _compute_maps(getattr(pytorch_grad_cam, METHODS[method]), unwrapped(model), watched, x, target)
    if bad := maps.isnan().flatten(1).any(1).nonzero().flatten().tolist():
        what = f"NaN in {len(bad)} of {counted(len(maps), 'map')}"
        warn(f"{what}: x, the output or the gradient is not finite.\n  images: {some(bad)}")
    if not maps.any():
        warn(
            f"the maps at {watched.name!r} are 0 everywhere: no positive evidence for this class at this layer.\n"
            "  use another layer or class; in a vision transformer, a layer whose patch tokens are still used, such as "
            "'blocks.11.norm1'"
        )
    peaks = maps.amax((1, 2), keepdim=True)
    # The library divides by the maximum plus an epsilon, which matters when the gradients are as small.
    return maps / torch.where(peaks > 0.0, peaks, 1.0)


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


def _compute_maps(cam_class: Any, model: nn.Module, layer: _WatchedLayer, x: Tensor, target: Target) -> Tensor:
    """Call the library, with gradients enabled and parameters frozen."""
    targets = _targets(target, len(x))
    device = next((parameter.device for parameter in model.parameters()), x.device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    cam: Any = None
    grad, hook = torch.enable_grad(), layer.module.register_forward_hook(layer)
    with hook, torch.inference_mode(False), grad, without_bookkeeping(model), restored_after(model), uncompiled():
        try:
            model.requires_grad_(False)
            cam = cam_class(_Classifier(model), [layer.output], reshape_transform=layer.as_map)
            # Some models modify their input in place, which PyTorch forbids for a leaf that requires gradients.
            images = detached_copy(x, device).requires_grad_().clone()
            return torch.from_numpy(cam(input_tensor=images, targets=targets))
        except AttributeError as error:  # what the library raises without an activation or a gradient
            if not hasattr(cam, "outputs"):  # the model raised it
                raise
            if layer.calls == 0:
                raise LayerError(f"{layer.name!r} was called 0 times in one forward; a map needs one call.") from error
            raise LayerError(f"no gradient flows from the model's output to {layer.name!r}.") from error
        finally:
            if cam is not None:
                cam.activations_and_grads.release()
            for parameter in trained:
                parameter.requires_grad_(True)


def _targets(target: Target, samples: int) -> list[Any] | None:
    """Return a function of the output for each sample; None is the predicted class."""
    if target is None:
        return None
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    listed = _as_list(target, samples)
    if len(listed) != samples:
        raise ValueError(f"target must be one class, or one for each of the {samples} images, got {len(listed)}.")
    return [each if callable(each) else ClassifierOutputTarget(count(each, "target", "grad_cam", 0)) for each in listed]


def _as_list(target: Target, samples: int) -> list[Any]:
    given = target.tolist() if isinstance(target, Tensor) else target
    return list(given) if isinstance(given, Sequence) else [given] * samples


def compare_cam(
    before: nn.Module,
    after: nn.Module,
    x: Tensor,
    layer: Entries,
    target: Target = None,
    method: str = "gradcam",
    *,
    grid: tuple[int, int] | None = None,
) -> CamComparison:
    """Compute `grad_cam` of two models for the same images and classes, as in the DropBlock paper.

    Args:
        before: a model trained without the regularizer, or `copy.deepcopy(model)` from before training.
        after: another model with the same architecture.
        x, layer, method, grid: as in `grad_cam`; both models have the layer.
        target: as in `grad_cam`; None is the class that `after` predicts, for both.

    Returns:
        The maps of both models, their widths, and a figure; `print` it. Errors as in `grad_cam`.

    Reference: Ghiasi et al. 2018, arXiv:1810.12890, section 4.2, figure 6: a network trained with DropBlock uses
    several regions of an image, and a network trained without it fewer.
    """
    if target is None:
        with restored_after(after), torch.no_grad():
            set_eval(after)
            logits = first_tensor(call(after, x))
        target = None if logits is None else logits.argmax(-1)
    maps = []
    for which, model in (("before", before), ("after", after)):
        try:
            maps.append(grad_cam(model, x, layer, target, method, grid=grid))
        except LayerError as error:
            error.args = (f"in the model `{which}`: {error}",)
            raise
    return CamComparison(x.detach().cpu(), _as_list(target, len(x)), *maps)


@dataclass(eq=False)
class CamComparison:
    """The maps of two models."""

    pictures: Tensor
    """(N, C, H, W)"""
    targets: list[Any]
    before: Tensor
    """(N, H, W) from 0 to 1."""
    after: Tensor

    @property
    def wide_before(self) -> Tensor:
        """(N,): the fraction of each image in which the map is above half of its maximum."""
        return _fraction_above_half(self.before)

    @property
    def wide_after(self) -> Tensor:
        """(N,): the same fraction for the other model."""
        return _fraction_above_half(self.after)

    def plot(self, most: int = 6, figure: Any = None) -> Figure:
        """Draw image, map before and map after, one column for each of the first `most` images.

        Args:
            most: maximum number of images.
            figure: a matplotlib `Figure` or `SubFigure` to draw in, instead of a new one.
        """
        rows = {"before": self.before, "after": self.after}
        return _draw_maps(self.pictures[:most], self.targets, rows, figure)

    def __repr__(self) -> str:
        wide = torch.stack([self.wide_before, self.wide_after], 1)
        labels = [*enumerate(map(_title, self.targets)), ("mean", "")]
        numbers = torch.cat([wide, wide.mean(0, keepdim=True)]).tolist()
        rows = [(*label, *(f"{x:.3f}" for x in row)) for label, row in zip(labels, numbers, strict=True)]
        return text_table(("image", "target", "above half before", "above half after"), rows)


def _title(target: Any) -> str:
    return f"class {target}" if isinstance(target, int) else getattr(target, "__name__", repr(target))


def _fraction_above_half(maps: Tensor) -> Tensor:
    return (maps > 0.5).float().mean((1, 2))


def plot_cam(x: Tensor, cam: Tensor, figure: Any = None) -> Figure:
    """Draw the first 6 images and their maps.

    Args:
        x: (N, C, H, W).
        cam: their maps from `grad_cam`, (N, H, W).
        figure: a matplotlib `Figure` or `SubFigure` to draw in, instead of a new one.
    """
    return _draw_maps(x[:6], None, {"map": cam}, figure)


def _draw_maps(x: Tensor, targets: list[Any] | None, rows: dict[str, Tensor], figure: Any) -> Figure:
    """Draw the images, with their targets if given, in the first row, then a row of overlays for each set of maps."""
    pictures = as_images(x)
    gray = pictures.mean(-1) if pictures.dim() == 4 else pictures  # only the map is colored
    figure = get_figure(figure, 1.4 + 1.35 * max(2, len(x)), 0.5 + 1.45 * (1 + len(rows)))
    table = figure.subplots(1 + len(rows), len(x), squeeze=False)
    drawn = None
    for column, axes in enumerate(table.T):
        axes[0].imshow(pictures[column].numpy(), cmap="gray")
        if targets is not None:
            axes[0].set_title(_title(targets[column]), fontsize=8)
        for below, maps in zip(axes[1:], rows.values(), strict=True):
            below.imshow(gray[column].numpy(), cmap="gray")
            drawn = below.imshow(maps[column].numpy(), cmap=SCALE, vmin=0, vmax=1, alpha=0.6)
            if targets is not None:
                below.set_title(f"{_fraction_above_half(maps[column, None]).item():.0%} above half", fontsize=8)
    for axes, label in zip(table[:, 0], ("image", *rows), strict=True):
        axes.set_ylabel(label, fontsize=9)
    for axes in table.flat:
        axes.set(xticks=[], yticks=[])
    bar = figure.colorbar(drawn, ax=table, shrink=0.6)  # next to the maps alone, it would misalign the rows
    bar.set_label("evidence for the class", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    return figure  # type: ignore[no-any-return]
