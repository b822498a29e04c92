"""Class activation maps of two models side by side, for example with and without a regularizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hookdrop.diagnostics.figures import SCALE, as_images, get_figure
from hookdrop.diagnostics.isolation import call, restored_after, set_eval
from hookdrop.errors import LayerError
from hookdrop.injection.select import Entries
from hookdrop.observe.cam import Target, grad_cam, must_be_model
from hookdrop.observe.read_only_hooks import first_tensor
from hookdrop.utils.tables import html_table, text_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEADER = ("picture", "target", "above half before", "above half after")


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
    """`grad_cam` of two models for the same images and classes.

    Args:
        before: a model trained without the regularizer, or `copy.deepcopy(model)` from before the training.
        after: another model of the same kind.
        x: the images, (N, C, H, W).
        layer: one layer, by a name that both models have.
        target: as in `grad_cam`; None is the class that `after` predicts, for both.
        method: as in `grad_cam`.
        grid: as in `grad_cam`.

    Returns:
        Both maps, their widths, and a figure; `print` it.

    Raises:
        LayerError: one of the models has no such layer; the message says which. Otherwise as in `grad_cam`.

    Reference: DropBlock's paper (arXiv:1810.12890, section 4.3) shows with such maps that a network trained with
    DropBlock uses several regions of an image, and a network trained without it only one.
    """
    for model in (before, after):
        must_be_model(model, "compare_cam", "before, after, x, layer")
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
            error.args = (f"of the model `{which}`: {error}",)
            raise
    listed = target.tolist() if isinstance(target, Tensor) else target
    targets = list(listed) if isinstance(listed, list | tuple) else [listed] * len(x)
    return CamComparison(x.detach().cpu(), targets, *maps)


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
        return _width(self.before)

    @property
    def wide_after(self) -> Tensor:
        """The same for the other model."""
        return _width(self.after)

    def plot(self, most: int = 6, figure: Any = None) -> Figure:
        """Image, map before and map after, a column for each of the first `most` images.

        Args:
            most: how many images at most.
            figure: a matplotlib `Figure` or `SubFigure` to draw in, instead of a new one.
        """
        rows = {"before": self.before, "after": self.after}
        return cams_figure(self.pictures[:most], self.targets, rows, figure)

    def rows(self) -> list[tuple[Any, ...]]:
        """One row for each image, then their mean."""
        wide = torch.stack([self.wide_before, self.wide_after], 1)
        labels = [*enumerate(map(_title, self.targets)), ("mean", "")]
        numbers = torch.cat([wide, wide.mean(0, keepdim=True)]).tolist()
        return [(*label, *(f"{x:.3f}" for x in row)) for label, row in zip(labels, numbers, strict=True)]

    def __repr__(self) -> str:
        return text_table(HEADER, self.rows())

    def _repr_html_(self) -> str:
        return html_table(HEADER, self.rows(), "the fraction of each image in which the map is above half")


def _title(target: Any) -> str:
    return f"class {target}" if isinstance(target, int) else getattr(target, "__name__", repr(target))


def _width(maps: Tensor) -> Tensor:
    return (maps > 0.5).float().mean((1, 2))


def plot_cam(x: Tensor, cam: Tensor, figure: Any = None) -> Figure:
    """The first 6 images and their maps.

    Args:
        x: (N, C, H, W).
        cam: their maps from `grad_cam`, (N, H, W).
        figure: a matplotlib `Figure` or `SubFigure` to draw in, instead of a new one.
    """
    return cams_figure(x[:6], None, {"map": cam}, figure)


def cams_figure(x: Tensor, targets: list[Any] | None, rows: dict[str, Tensor], figure: Any) -> Figure:
    """The images in the first row, with their targets if given, then a row for each set of maps, over the images."""
    pictures = as_images(x)
    grey = pictures.mean(-1) if pictures.dim() == 4 else pictures  # only the map has colors
    figure = get_figure(figure, 1.4 + 1.35 * max(2, len(x)), 0.5 + 1.45 * (1 + len(rows)))
    table = figure.subplots(1 + len(rows), len(x), squeeze=False)
    for column, picture in enumerate(pictures):
        table[0, column].imshow(picture.numpy(), cmap="gray")
        if targets is not None:
            table[0, column].set_title(_title(targets[column]), fontsize=8)
    drawn = None
    for line, (label, maps) in zip(table[1:], rows.items(), strict=True):
        line[0].set_ylabel(label, fontsize=9)
        for axes, under, cam in zip(line, grey, maps, strict=False):
            axes.imshow(under.numpy(), cmap="gray")
            drawn = axes.imshow(cam.numpy(), cmap=SCALE, vmin=0, vmax=1, alpha=0.6)
            if targets is not None:
                axes.set_title(f"{_width(cam[None]).item():.0%} above half", fontsize=8)
    table[0, 0].set_ylabel("picture", fontsize=9)
    for axes in table.flat:
        axes.set(xticks=[], yticks=[])
    bar = figure.colorbar(drawn, ax=table, shrink=0.6)  # on the maps alone, it would move them out of line
    bar.set_label("evidence for the class", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    return figure  # type: ignore[no-any-return]
