"""Tensors in, a matplotlib `Figure` out; without pyplot, which would keep figures open and show them twice."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hookdrop.errors import LayerError, ShapeError
from hookdrop.utils.axes import channel_axis
from hookdrop.utils.optional_dependencies import needs
from hookdrop.utils.validation import count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

KEPT, DROPPED = "#d5dde8", "#b2182b"
SCALE = "viridis"
MOST_BLOCKS = 6
"""Layers in one figure, unless more are named."""


def spread(names: Sequence[str]) -> list[str]:
    """At most `MOST_BLOCKS` of the names, evenly from the first to the last."""
    if len(names) <= MOST_BLOCKS:
        return list(names)
    return [names[round(i * (len(names) - 1) / (MOST_BLOCKS - 1))] for i in range(MOST_BLOCKS)]


@dataclass
class Row:
    """One tensor, shown sample by channel."""

    label: str
    tensor: Tensor
    """Numbers, or a mask that is True where an element was kept."""


@dataclass
class Block:
    """The rows of one layer, with one color scale."""

    title: str
    rows: Sequence[Row]


@dataclass
class Panel:
    """One image."""

    title: str
    values: Tensor
    axes: tuple[str, str] | None = None
    """Names of its columns and rows, unless it is a map."""


def blank(figure: Any, width: float, height: float) -> Any:
    """`figure`, or a new one of this size in inches."""
    with needs("observe"):
        from matplotlib.figure import Figure
    return figure if figure is not None else Figure(figsize=(width, height), layout="constrained")


def panels(x: Tensor, sample: int, channels: int, channel_dim: int | None = None) -> list[Panel]:
    """One sample as images.

    Args:
        x: (N, C, H, W) or (N, H, W, C): the first `channels` maps; (N, C, D, H, W): their middle slices; (N, L, C): one
            image of tokens by channels; (N, C) or (N,): one image of all samples.
        sample: index into the batch.
        channels: how many maps at most.
        channel_dim: the axis of the channels of a map; None is the one that the shape suggests.

    Raises:
        ShapeError: there is no such sample, or nothing to show.
    """
    x = _on_cpu(x)
    if not x.dim() or x.dim() > 5 or not x.numel():
        raise ShapeError(f"got {tuple(x.shape)}: it can't be shown as images.")
    if x.dim() < 3:
        return [Panel("", x.reshape(len(x), -1), ("unit", "sample"))]
    if not -len(x) <= sample < len(x):
        raise ShapeError(f"got {tuple(x.shape)}, which has no sample={sample}: it has {len(x)}.")
    if x.dim() == 3:
        return [Panel("", x[sample], ("channel", "token"))]
    axis = channel_axis(x.shape) if channel_dim is None else count(channel_dim, "channel_dim", "pictures", -5)
    if not -x.dim() <= axis < x.dim():
        raise ShapeError(f"got {tuple(x.shape)}: channel_dim={axis} is not one of its axes 1 to {x.dim() - 1}.")
    maps = x.movedim(axis, 1)[sample]
    if maps.dim() == 4:
        maps = maps[:, maps.shape[1] // 2]
    return [Panel(f"channel {index}", one) for index, one in enumerate(maps[:channels])]


def blocks_figure(
    blocks: Sequence[Block],
    *,
    sample: int = 0,
    channels: int = 8,
    channel_dim: int | None = None,
    figure: Any = None,
    there_are: int = 0,
) -> Figure:
    """Blocks from top to bottom, each a grid with a row for each tensor and a column for each channel.

    Args:
        blocks: the layers.
        sample: as in `panels`.
        channels: as in `panels`.
        channel_dim: as in `panels`.
        figure: to draw in, instead of a new one.
        there_are: how many blocks exist; the title says so if not all are given.
    """
    channels, sample = count(channels, "channels", "pictures"), count(sample, "sample", "pictures", -sys.maxsize)
    if not blocks:
        raise LayerError("no layer is named, so there is nothing to show.\n  leave out `layers` for all, or name some")
    shown = [[panels(row.tensor, sample, channels, channel_dim) for row in block.rows] for block in blocks]
    sizes = [_size(rows) for rows in shown]
    heights = [height for _, height in sizes]
    figure = blank(figure, max(5.0, *(width for width, _ in sizes)), sum(heights))
    parts = figure.subfigures(len(blocks), 1, squeeze=False, height_ratios=heights)[:, 0]
    for part, block, rows in zip(parts, blocks, shown, strict=True):
        _draw_block(part, block, rows)
    if there_are > len(blocks):
        parts[0].suptitle(f"{len(blocks)} of {there_are} layers\n{blocks[0].title}", fontsize=10)
    masked = [part for part, block in zip(parts, blocks, strict=True) if any(map(_is_mask, block.rows))]
    if masked:
        _add_legend(masked[-1])
    return figure  # type: ignore[no-any-return]


def _size(rows: list[list[Panel]]) -> tuple[float, float]:
    """Width and height of a block, in inches."""
    columns = len(rows[0])
    return (1.6 + 3.0 * len(rows), 2.6) if columns == 1 else (1.6 + 1.05 * max(2, columns), 0.75 + 1.05 * len(rows))


def _draw_block(part: SubFigure, block: Block, rows: list[list[Panel]]) -> None:
    """A row for each tensor; tensors of one image each are side by side."""
    part.suptitle(block.title, fontsize=10)
    flat = len(rows[0]) == 1
    table = part.subplots(*((1, len(rows)) if flat else (len(rows), len(rows[0]))), squeeze=False)
    if flat:
        table = table.T
    numbers = [p.values for row, ps in zip(block.rows, rows, strict=True) if not _is_mask(row) for p in ps]
    low, high = limits(numbers)
    drawn = None
    for row, line, axes_of_row in zip(block.rows, rows, table, strict=True):
        for index, (panel, axes) in enumerate(zip(line, axes_of_row, strict=True)):
            if _is_mask(row):
                _draw_mask(axes, panel.values)
            else:
                drawn = axes.imshow(panel.values.numpy(), cmap=SCALE, vmin=low, vmax=high, interpolation="nearest")
            _label(axes, panel, row.label, first=index == 0, top=row is block.rows[0] or flat)
    if drawn is not None:
        bar = part.colorbar(drawn, ax=table, shrink=0.8, pad=0.02)
        bar.set_label("value", fontsize=8)
        bar.ax.tick_params(labelsize=7)


def _label(axes: Axes, panel: Panel, label: str, *, first: bool, top: bool) -> None:
    if panel.axes is not None:
        axes.set_aspect("auto")
        axes.locator_params(integer=True)
        axes.set_title(label, fontsize=8)
        axes.set_xlabel(panel.axes[0], fontsize=8)
        axes.set_ylabel(panel.axes[1], fontsize=8)
        axes.tick_params(labelsize=7)
        return
    axes.set_xticks([])
    axes.set_yticks([])
    if top:
        axes.set_title(panel.title, fontsize=8)
    if first:
        axes.set_ylabel(label, fontsize=8)


def _draw_mask(axes: Axes, mask: Tensor) -> None:
    from matplotlib.colors import ListedColormap

    colors = ListedColormap([DROPPED, KEPT])
    axes.imshow(mask.float().numpy(), cmap=colors, vmin=0, vmax=1, interpolation="nearest")


def _add_legend(part: SubFigure) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(color=KEPT, label="kept"), Patch(color=DROPPED, label="dropped")]
    part.legend(handles=patches, loc="outside lower center", ncols=2, fontsize=8, frameon=False)


def limits(values: Sequence[Tensor]) -> tuple[float, float]:
    """The smallest and the largest finite number."""
    finite = torch.cat([torch.empty(0), *(v[v.isfinite()] for v in values)])
    if not finite.numel():
        return 0.0, 1.0
    low, high = float(finite.min()), float(finite.max())
    # For a range of one number matplotlib would give each image another scale.
    return (low, high) if low < high else (low - 0.5, high + 0.5)


def as_pictures(x: Tensor) -> Tensor:
    """Images (N, C, H, W) for `imshow`: (N, H, W, 3) in [0, 1] of three channels, otherwise (N, H, W), their mean.

    Values that are not finite become the smallest finite value.
    """
    x = _on_cpu(x)
    if x.dim() != 4:
        raise ShapeError(f"got {tuple(x.shape)}: pictures are (N, C, H, W).")
    finite = x.isfinite()
    low = x.where(finite, torch.inf).amin((1, 2, 3), keepdim=True).nan_to_num(0.0, 0.0)
    x = x.where(finite, low)
    if x.shape[1] != 3:
        return x.mean(1)
    high = x.amax((1, 2, 3), keepdim=True)
    return ((x - low) / (high - low).clamp_min(1e-12)).movedim(1, -1)


def pixels(figure: Figure) -> Any:
    """The figure as an array (height, width, 3) of bytes, for loggers."""
    with needs("observe"):
        import numpy
        from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    return numpy.asarray(canvas.buffer_rgba())[..., :3].copy()


def _is_mask(row: Row) -> bool:
    return row.tensor.dtype == torch.bool


def _on_cpu(x: Tensor) -> Tensor:
    x = x.detach()
    x = x.full_tensor() if hasattr(x, "full_tensor") else x
    return x.cpu() if x.dtype == torch.bool else x.cpu().float()
