"""Class activation maps: which regions of an image are evidence for a class, also compared between two models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, isqrt, log
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hookdrop.core import compiling
from hookdrop.core.arguments import floating
from hookdrop.core.errors import LayerError, ShapeError, warn
from hookdrop.core.selection import Entries, select, unwrapped
from hookdrop.core.tables import some
from hookdrop.core.tensor_tree import describe, detached_copy, tensors
from hookdrop.core.torch_internals import graph_task
from hookdrop.extras import needs
from hookdrop.measure.figures import SCALE, as_images, get_figure
from hookdrop.measure.measurement import measured_gradients
from hookdrop.survey.isolation import uncompiled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Target = int | Tensor | Sequence[int] | None
MAX_PREFIX_TOKENS = 8  # class, distillation and register tokens combined


def grad_cam(model: nn.Module, x: Tensor, layer: Entries, target: Target = None) -> Tensor:
    """Compute class activation maps (Grad-CAM) with pytorch-grad-cam (`pip install grad-cam`).

    The model runs in eval mode, uncompiled. Modes, buffers, the random state and the parameters' gradients are
    restored, also after an error. Parameters receive no gradients, so this works under DistributedDataParallel.

    Args:
        model: a classifier from (N, C, H, W) to (N, classes), or to a container whose first tensor has that shape.
        x: the images, (N, C, H, W).
        layer: one layer that returns a tensor, as in `inject`. In a CNN, the last layer with a map (`"layer4"`). In a
            vision transformer, a layer whose patch tokens the model still uses (`"blocks.11.norm1"`: of the last
            block's output it only uses the class token). The last tokens are the patches, in a grid with the aspect
            ratio of the image; up to 8 earlier tokens (class, distillation, registers) are ignored.
        target: the class, one for all or one for each image. None is the predicted class.

    Returns:
        (N, H, W), float32, on the CPU: a map from 0 to 1 for each image. Without positive evidence the map is 0
        everywhere. If the model's output or gradient is not finite, the map is NaN.

    Raises:
        HookdropError: grad-cam is not installed.
        LayerError: `layer` matches no layer, several layers, or a layer that is not called exactly once.
        ShapeError: the layer returns neither a map nor tokens in a grid, or the model not (N, classes).
        ValueError, IndexError, TypeError: an argument is invalid, such as a class that does not exist.

    Example:
        >>> model = timm.create_model("resnet18", pretrained=True)  # doctest: +SKIP
        >>> grad_cam(model, images, layer="layer4", target=281).shape  # doctest: +SKIP
        torch.Size([8, 224, 224])

    Reference: Selvaraju et al. 2016, arXiv:1610.02391.
    """
    return _maps_and_classes(model, x, layer, target)[0]


def _maps_and_classes(model: nn.Module, x: Tensor, layer: Entries, target: Target) -> tuple[Tensor, list[int]]:
    compiling.raise_if_tracing("grad_cam()")
    floating(x, "grad_cam")
    if x.dim() != 4:
        raise ShapeError(f"grad_cam: x must be images (N, C, H, W), got {describe(x)}.")
    found = select(model, layer).layers
    if len(found) > 1:
        names = some([match.name for match in found])
        raise LayerError(f"grad_cam: `layer` must match one layer, but it matches {len(found)}: {names}.")
    name, module = found[0].name, found[0].module
    with needs("observe"):
        import pytorch_grad_cam
    calls = 0

    def to_map(value: Tensor) -> Tensor:
        """Receive the output and then its gradient; the copy is safe from in-place edits."""
        nonlocal calls
        calls += graph_task() == -1  # not in a backward pass
        return as_map(value, x.shape[2:]).detach().float().clone()

    classes: list[int] | None = None
    if target is not None:
        classes = torch.as_tensor(target, device="cpu").expand(len(x)).tolist()
    model = unwrapped(model)
    with measured_gradients(model), uncompiled():
        cam = pytorch_grad_cam.GradCAM(_Classifier(model), [module], reshape_transform=to_map)
        try:
            # Some models modify their input in place, which PyTorch forbids for a leaf that requires gradients.
            images = detached_copy(x).requires_grad_().clone()
            targets = classes and [pytorch_grad_cam.utils.model_targets.ClassifierOutputTarget(i) for i in classes]
            try:
                maps = torch.from_numpy(cam(input_tensor=images, targets=targets))
            except AttributeError:
                if not hasattr(cam, "outputs"):  # the model raised it, and not the library
                    raise
                calls = 0
            if calls != 1:
                raise LayerError(
                    f"grad_cam: {name!r} must be called once in one forward, and the output must depend on it.\n"
                    "  choose another layer, such as the block that contains it"
                )
        finally:
            cam.activations_and_grads.release()
    if not maps.any():
        warn(
            f"the maps at {name!r} are 0 everywhere: no positive evidence for this class at this layer.\n"
            "  use another layer or class; in a vision transformer, a layer whose patch tokens are still used, such as "
            "'blocks.11.norm1'"
        )
    peaks = maps.amax((1, 2), keepdim=True)
    # The library divides by the maximum plus an epsilon, which matters when the gradients are as small.
    return maps / torch.where(peaks > 0.0, peaks, 1.0), classes or cam.outputs.argmax(-1).tolist()


class _Classifier(nn.Module):
    """What the library expects: a model that returns one tensor (N, classes), and whose gradients it may reset."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        out = self.model(x)
        logits = next((x for x in tensors(out) if x.is_floating_point()), None)
        if logits is None or logits.dim() != 2 or len(logits) != len(x):
            raise ShapeError(f"the model must return (N, classes), got {describe(out)} for {len(x)} images.")
        return logits.float()  # NumPy has no bfloat16

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: no parameter gradient is computed."""


def as_map(x: Tensor, image: Sequence[int]) -> Tensor:
    """Convert a map (N, C, h, w) or (N, h, w, C), or tokens (N, L, C) that end with the image's, to (N, C, h, w)."""
    if not isinstance(x, Tensor) or x.dim() not in (3, 4):
        raise ShapeError(f"grad_cam: the layer returns {describe(x)}: expected a map (N, C, H, W) or tokens (N, L, C).")
    height, width = image
    if x.dim() == 4:
        # The channel axis is the one whose removal leaves the aspect ratio closest to the image's.
        unlike = {axis: abs(log(h * width / (w * height))) for axis, (h, w) in ((1, x.shape[2:]), (3, x.shape[1:3]))}
        return x.movedim(min(unlike, key=unlike.__getitem__), 1)
    tokens, common = x.shape[1], gcd(height, width)
    size = isqrt(tokens * common * common // (height * width))
    rows, columns = size * height // common, size * width // common
    if not size or tokens - rows * columns > MAX_PREFIX_TOKENS:
        raise ShapeError(
            f"grad_cam: the layer returns {tokens} tokens, which do not form a grid with the aspect ratio {height} x "
            f"{width}, with or without up to {MAX_PREFIX_TOKENS} prefix tokens."
        )
    return x[:, -rows * columns :].reshape(len(x), rows, columns, -1).movedim(-1, 1)


def compare_cam(before: nn.Module, after: nn.Module, x: Tensor, layer: Entries, target: Target = None) -> CamComparison:
    """Compute `grad_cam` of two models for the same images and classes, as in the DropBlock paper.

    Args:
        before: a model trained without the regularizer, or `copy.deepcopy(model)` from before training.
        after: another model with the same architecture.
        x, layer: as in `grad_cam`; both models have the layer.
        target: as in `grad_cam`; None is the class that `after` predicts, for both.

    Returns:
        The maps of both models, their widths, and a figure; `print` it. Errors as in `grad_cam`.

    Reference: Ghiasi et al. 2018, arXiv:1810.12890, section 4.2, figure 6: a network trained with DropBlock uses
    several regions of an image, and a network trained without it fewer.
    """
    maps_after, classes = _maps_and_classes(after, x, layer, target)
    return CamComparison(x.detach().cpu(), classes, grad_cam(before, x, layer, classes), maps_after)


@dataclass(eq=False)
class CamComparison:
    """The maps of two models."""

    pictures: Tensor  #: (N, C, H, W)
    targets: list[int]
    before: Tensor  #: (N, H, W) from 0 to 1.
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
        """Draw the first `most` images and both maps of each, in a matplotlib `Figure` or `SubFigure` or a new one."""
        pictures = as_images(self.pictures[:most])
        gray = pictures.mean(-1) if pictures.dim() == 4 else pictures  # only the map is colored
        figure = get_figure(figure, 1.4 + 1.35 * max(2, len(pictures)), 4.85)
        table = figure.subplots(3, len(pictures), squeeze=False)
        for column, axes in enumerate(table.T):
            axes[0].imshow(pictures[column].numpy(), cmap="gray")
            axes[0].set_title(f"class {self.targets[column]}", fontsize=8)
            for below, maps in zip(axes[1:], (self.before, self.after), strict=True):
                below.imshow(gray[column].numpy(), cmap="gray")
                drawn = below.imshow(maps[column].numpy(), cmap=SCALE, vmin=0, vmax=1, alpha=0.6)
                below.set_title(f"{_fraction_above_half(maps[column, None]).item():.0%} above half", fontsize=8)
        for axes, label in zip(table[:, 0], ("image", "before", "after"), strict=True):
            axes.set_ylabel(label, fontsize=9)
        for axes in table.flat:
            axes.set(xticks=[], yticks=[])
        bar = figure.colorbar(drawn, ax=table, shrink=0.6)  # next to the maps alone, it would misalign the rows
        bar.set_label("evidence for the class", fontsize=8)
        return figure  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        before, after = (float(wide.mean()) for wide in (self.wide_before, self.wide_after))
        return f"<CamComparison of {len(self.targets)} images: {before:.1%} above half before, {after:.1%} after>"


def _fraction_above_half(maps: Tensor) -> Tensor:
    return (maps > 0.5).float().mean((1, 2))
