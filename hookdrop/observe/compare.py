"""Class activation maps of two models side by side: before and after a regularizer, say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hookdrop.diagnostics.figures import SCALE, as_pictures, blank
from hookdrop.diagnostics.isolation import call, preserved, set_eval
from hookdrop.errors import LayerError
from hookdrop.injection.select import Entries
from hookdrop.observe.cam import Target, grad_cam, must_be_model
from hookdrop.observe.taps import first_tensor
from hookdrop.utils.tables import html_table, text_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_Line = tuple[str, Tensor, Tensor | None]
"""Label, maps, and how wide each is."""

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
    """`grad_cam` of two models for the same pictures and classes.

    Args:
        before: a model: trained without, or `copy.deepcopy(model)` from before the training.
        after: another of the same kind.
        x: the pictures, (N, C, H, W).
        layer: one layer, by a name that both have.
        target: as in `grad_cam`; None is the class that `after` says, for both.
        method: as in `grad_cam`.
        grid: as in `grad_cam`.

    Returns:
        Both maps, how wide they are, and a picture; `print` it.

    Raises:
        LayerError: one of the models has no such layer; the text says which. All else as `grad_cam`.

    Reference: DropBlock's paper (arXiv:1810.12890, section 4.3) shows by such maps that a network trained with it looks
    at several regions, where one without is content with one.
    """
    for model in (before, after):
        must_be_model(model, "compare_cam", "before, after, x, layer")
    if target is None:
        with preserved(after), torch.no_grad():
            set_eval(after)
            said = first_tensor(call(after, x))
        target = None if said is None else said.argmax(-1)
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
        """(N,): the part of each picture in which the map is above half of its largest value."""
        return _width(self.before)

    @property
    def wide_after(self) -> Tensor:
        """The same of the other model."""
        return _width(self.after)

    def plot(self, most: int = 6, figure: Any = None) -> Figure:
        """Picture, map before and map after, a column for each of the first `most` pictures.

        Args:
            most: how many pictures at most.
            figure: a matplotlib `Figure` or `SubFigure` to draw in, instead of a new one.
        """
        rows: list[_Line] = [("before", self.before, self.wide_before), ("after", self.after, self.wide_after)]
        return cams_figure(self.pictures[:most], self.targets, rows, figure)

    def rows(self) -> list[tuple[Any, ...]]:
        """One row a picture, then their mean."""
        wide = [(f"{b:.3f}", f"{a:.3f}") for b, a in zip(self.wide_before, self.wide_after, strict=True)]
        names = map(_title, self.targets)
        mean = ("mean", "", f"{self.wide_before.mean():.3f}", f"{self.wide_after.mean():.3f}")
        return [*((i, name, *both) for i, (name, both) in enumerate(zip(names, wide, strict=True))), mean]

    def __repr__(self) -> str:
        return text_table(HEADER, self.rows())

    def _repr_html_(self) -> str:
        return html_table(HEADER, self.rows(), "the part of each picture in which the map is above half")


def _title(target: Any) -> str:
    return f"class {target}" if isinstance(target, int) else getattr(target, "__name__", repr(target))


def _width(maps: Tensor) -> Tensor:
    return (maps > 0.5).float().mean((1, 2))


def plot_cam(x: Tensor, cam: Tensor, figure: Any = None) -> Figure:
    """Pictures and their maps: the first 6.

    Args:
        x: (N, C, H, W).
        cam: what `grad_cam` gave for them, (N, H, W).
        figure: a matplotlib `Figure` or `SubFigure` to draw in, instead of a new one.
    """
    return cams_figure(x[:6], None, [("map", cam, None)], figure)


def cams_figure(x: Tensor, targets: list[Any] | None, rows: list[_Line], figure: Any) -> Figure:
    """The pictures in the first row, then a row for each set of maps, laid over the pictures."""
    pictures = as_pictures(x)
    grey = pictures.mean(-1) if pictures.dim() == 4 else pictures  # the map is the one thing in colour
    figure = blank(figure, 1.4 + 1.35 * max(2, len(x)), 0.5 + 1.45 * (1 + len(rows)))
    table = figure.subplots(1 + len(rows), len(x), squeeze=False)
    for column, picture in enumerate(pictures):
        table[0, column].imshow(picture.numpy(), cmap="gray")
        if targets is not None:
            table[0, column].set_title(_title(targets[column]), fontsize=8)
    drawn = None
    for line, (label, maps, wide) in zip(table[1:], rows, strict=True):
        line[0].set_ylabel(label, fontsize=9)
        for column, axes in enumerate(line[: len(x)]):
            axes.imshow(grey[column].numpy(), cmap="gray")
            drawn = axes.imshow(maps[column].numpy(), cmap=SCALE, vmin=0, vmax=1, alpha=0.6)
            if wide is not None:
                axes.set_title(f"{wide[column]:.0%} above half", fontsize=8)
    table[0, 0].set_ylabel("picture", fontsize=9)
    for axes in table.flat:
        axes.set_xticks([])
        axes.set_yticks([])
    bar = figure.colorbar(drawn, ax=table, shrink=0.6)  # of the maps alone it would move them from under the pictures
    bar.set_label("what speaks for the class", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    return figure  # type: ignore[no-any-return]
