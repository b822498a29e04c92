"""Compare the class activation maps of two models, for example with and without a regularizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hookdrop.errors import LayerError
from hookdrop.injection.figures import SCALE, as_images, get_figure
from hookdrop.observe.cam import Target, grad_cam
from hookdrop.observe.read_only_hooks import first_tensor
from hookdrop.survey.isolation import call, restored_after, set_eval
from hookdrop.utils.select import Entries
from hookdrop.utils.tables import html_table, text_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEADER = ("image", "target", "above half before", "above half after")


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
    """Compute `grad_cam` of two models for the same images and classes.

    Args:
        before: a model trained without the regularizer, or `copy.deepcopy(model)` from before training.
        after: another model with the same architecture.
        x: the images, (N, C, H, W).
        layer: one layer, by a name that exists in both models.
        target: as in `grad_cam`; None is the class that `after` predicts, for both.
        method: as in `grad_cam`.
        grid: as in `grad_cam`.

    Returns:
        The maps of both models, their widths, and a figure; `print` it.

    Raises:
        LayerError: one of the models has no such layer. Other errors as in `grad_cam`.

    Reference: the DropBlock paper (arXiv:1810.12890, section 4.2, figure 6) uses such maps to show that a network
    trained with DropBlock uses several regions of an image, and a network trained without it fewer.
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
        return cams_figure(self.pictures[:most], self.targets, rows, figure)

    def rows(self) -> list[tuple[Any, ...]]:
        """Return one row for each image, then their mean."""
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


def _fraction_above_half(maps: Tensor) -> Tensor:
    return (maps > 0.5).float().mean((1, 2))


def plot_cam(x: Tensor, cam: Tensor, figure: Any = None) -> Figure:
    """Draw the first 6 images and their maps.

    Args:
        x: (N, C, H, W).
        cam: their maps from `grad_cam`, (N, H, W).
        figure: a matplotlib `Figure` or `SubFigure` to draw in, instead of a new one.
    """
    return cams_figure(x[:6], None, {"map": cam}, figure)


def cams_figure(x: Tensor, targets: list[Any] | None, rows: dict[str, Tensor], figure: Any) -> Figure:
    """Draw the images, with their targets if given, in the first row, then a row of overlays for each set of maps."""
    pictures = as_images(x)
    gray = pictures.mean(-1) if pictures.dim() == 4 else pictures  # only the map is colored
    figure = get_figure(figure, 1.4 + 1.35 * max(2, len(x)), 0.5 + 1.45 * (1 + len(rows)))
    table = figure.subplots(1 + len(rows), len(x), squeeze=False)
    for column, picture in enumerate(pictures):
        table[0, column].imshow(picture.numpy(), cmap="gray")
        if targets is not None:
            table[0, column].set_title(_title(targets[column]), fontsize=8)
    drawn = None
    for line, (label, maps) in zip(table[1:], rows.items(), strict=True):
        line[0].set_ylabel(label, fontsize=9)
        for axes, under, cam in zip(line, gray, maps, strict=False):
            axes.imshow(under.numpy(), cmap="gray")
            drawn = axes.imshow(cam.numpy(), cmap=SCALE, vmin=0, vmax=1, alpha=0.6)
            if targets is not None:
                axes.set_title(f"{_fraction_above_half(cam[None]).item():.0%} above half", fontsize=8)
    table[0, 0].set_ylabel("image", fontsize=9)
    for axes in table.flat:
        axes.set(xticks=[], yticks=[])
    bar = figure.colorbar(drawn, ax=table, shrink=0.6)  # next to the maps alone, it would misalign the rows
    bar.set_label("evidence for the class", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    return figure  # type: ignore[no-any-return]
