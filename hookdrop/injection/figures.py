"""Draw tensors into a matplotlib `Figure`, without pyplot, which keeps figures open and displays them twice."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from hookdrop.utils.errors import LayerError, ShapeError
from hookdrop.utils.optional import needs
from hookdrop.utils.validation import count, given_channel_axis

if TYPE_CHECKING:
    from matplotlib.figure import Figure, SubFigure

Rows: TypeAlias = Mapping[str, Tensor]
"""The tensors of one layer by label: values, or masks that are True where an element was kept."""

KEPT, DROPPED = "#d5dde8", "#b2182b"
SCALE = "viridis"
MAX_BLOCKS = 6
"""The number of layers in one figure, unless more are named."""


def evenly_spaced(names: Sequence[str]) -> list[str]:
    """Select at most `MAX_BLOCKS` names, evenly spaced from the first to the last."""
    if len(names) <= MAX_BLOCKS:
        return list(names)
    return [names[round(i * (len(names) - 1) / (MAX_BLOCKS - 1))] for i in range(MAX_BLOCKS)]


class Panel(NamedTuple):
    """One image."""

    title: str
    image: Tensor
    axes: tuple[str, str] | None = None
    """The names of its columns and rows; None for a feature map."""


def get_figure(figure: Any, width: float, height: float) -> Any:
    """Return `figure`, or a new figure of this size in inches."""
    with needs("observe"):
        from matplotlib.figure import Figure
    return figure if figure is not None else Figure(figsize=(width, height), layout="constrained")


def channel_axis(shape: Sequence[int]) -> int:
    """Infer the channel axis from a shape.

    It is axis 1 of a map (N, C, H, W), and the last axis of (N, H, W, C), recognized by H = W != C, of tokens
    (N, L, C) and of features (N, C).

    Example:
        >>> channel_axis((8, 64, 14, 14)), channel_axis((8, 7, 7, 768)), channel_axis((8, 197, 384))
        (1, 3, 2)
    """
    if len(shape) == 4 and shape[1] == shape[2] != shape[3]:
        return 3
    return len(shape) - 1 if len(shape) < 4 else 1


def panels(x: Tensor, sample: int, channels: int, channel_dim: int | None = None) -> list[Panel]:
    """Convert one sample to images.

    Maps (N, C, H, W) or (N, H, W, C) give their first `channels`, volumes (N, C, D, H, W) the middle slices of these,
    tokens (N, L, C) one image of tokens x channels, and features (N, C) or (N,) one image of all samples.
    """
    x = _on_cpu(x)
    if not x.dim() or x.dim() > 5 or not x.numel():
        raise ShapeError(f"got {tuple(x.shape)}: it cannot be shown as images.")
    if x.dim() < 3:
        return [Panel("", x.reshape(len(x), -1), ("unit", "sample"))]
    if not -len(x) <= sample < len(x):
        raise ShapeError(f"got {tuple(x.shape)}, which has no sample={sample}: the batch size is {len(x)}.")
    if x.dim() == 3:
        return [Panel("", x[sample], ("channel", "token"))]
    axis = channel_axis(x.shape) if channel_dim is None else given_channel_axis(x.shape, channel_dim, "plot")
    maps = x.movedim(axis, 1)[sample]
    if maps.dim() == 4:
        maps = maps[:, maps.shape[1] // 2]
    return [Panel(f"channel {index}", one) for index, one in enumerate(maps[:channels])]


def blocks_figure(
    blocks: Mapping[str, Rows],
    *,
    sample: int = 0,
    channels: int = 8,
    channel_dim: int | None = None,
    figure: Any = None,
    total: int = 0,
) -> Figure:
    """Draw blocks from top to bottom, each with a row per tensor and a column per channel.

    `total` is the number of existing blocks, for the title.
    """
    channels, sample = count(channels, "channels", "plot"), count(sample, "sample", "plot", -sys.maxsize)
    if not blocks:
        raise LayerError(
            "`layers` is empty, so there is nothing to plot.\n  omit `layers` to plot all layers, or name some."
        )
    shown = [[panels(x, sample, channels, channel_dim) for x in rows.values()] for rows in blocks.values()]
    widths, heights = zip(*map(_size, shown), strict=True)
    figure = get_figure(figure, max(5.0, *widths), sum(heights))
    parts = figure.subfigures(len(blocks), 1, squeeze=False, height_ratios=heights)[:, 0]
    for part, (title, rows), images in zip(parts, blocks.items(), shown, strict=True):
        _draw_block(part, title, list(rows), images)
    if total > len(blocks):
        parts[0].suptitle(f"{len(blocks)} of {total} layers\n{next(iter(blocks))}", fontsize=10)
    masked = [part for part, images in zip(parts, shown, strict=True) if any(_is_mask(row[0]) for row in images)]
    if masked:
        from matplotlib.patches import Patch

        patches = [Patch(color=KEPT, label="kept"), Patch(color=DROPPED, label="dropped")]
        masked[-1].legend(handles=patches, loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    return figure  # type: ignore[no-any-return]


def _size(rows: list[list[Panel]]) -> tuple[float, float]:
    """Return the width and height of a block in inches."""
    columns = len(rows[0])
    return (1.6 + 3.0 * len(rows), 2.6) if columns == 1 else (1.6 + 1.05 * max(2, columns), 0.75 + 1.05 * len(rows))


def _draw_block(part: SubFigure, title: str, labels: list[str], rows: list[list[Panel]]) -> None:
    """Draw one row per tensor, or one row in total if each tensor is a single image."""
    from matplotlib.colors import ListedColormap

    part.suptitle(title, fontsize=10)
    flat = len(rows[0]) == 1
    table = part.subplots(*((1, len(rows)) if flat else (len(rows), len(rows[0]))), squeeze=False)
    values = [panel.image for row in rows for panel in row if not _is_mask(panel)]
    finite = torch.cat([torch.empty(0), *(value[value.isfinite()] for value in values)])
    low, high = (float(finite.min()), float(finite.max())) if finite.numel() else (0.0, 1.0)
    if low == high:  # matplotlib would scale each image differently
        low, high = low - 0.5, high + 0.5
    scale: dict[str, Any] = {"cmap": SCALE, "vmin": low, "vmax": high, "interpolation": "nearest"}
    of_mask = scale | {"cmap": ListedColormap([DROPPED, KEPT]), "vmin": 0, "vmax": 1}
    drawn = None
    for label, row, line in zip(labels, rows, table.T if flat else table, strict=True):
        for panel, axes in zip(row, line, strict=True):
            image = axes.imshow(panel.image.numpy(), **of_mask if _is_mask(panel) else scale)
            drawn = drawn if _is_mask(panel) else image
            if panel.axes is None:
                axes.set(xticks=[], yticks=[], title=panel.title if row is rows[0] else "")
                axes.set_ylabel(label if panel is row[0] else "")
            else:
                axes.set(aspect="auto", title=label, xlabel=panel.axes[0], ylabel=panel.axes[1])
                axes.locator_params(integer=True)
            axes.tick_params(labelsize=7)
            for text in (axes.title, axes.xaxis.label, axes.yaxis.label):
                text.set_fontsize(8)
    if drawn is not None:
        part.colorbar(drawn, ax=table, shrink=0.8, pad=0.02, label="value").ax.tick_params(labelsize=7)


def as_images(x: Tensor) -> Tensor:
    """Convert (N, C, H, W) for `imshow`: to (N, H, W, 3) in [0, 1] for 3 channels, else to the channel mean (N, H, W).

    Non-finite values are replaced by the smallest finite value.
    """
    x = _on_cpu(x)
    if x.dim() != 4:
        raise ShapeError(f"got {tuple(x.shape)}: expected images (N, C, H, W).")
    low = x.where(x.isfinite(), torch.inf).amin((1, 2, 3), keepdim=True).nan_to_num(0.0, 0.0)
    x = x.where(x.isfinite(), low)
    if x.shape[1] != 3:
        return x.mean(1)
    high = x.amax((1, 2, 3), keepdim=True)
    return ((x - low) / (high - low).clamp_min(1e-12)).movedim(1, -1)


def pixels(figure: Figure) -> Any:
    """Render the figure to a uint8 array (height, width, 3), for loggers."""
    with needs("observe"):
        import numpy
        from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    return numpy.asarray(canvas.buffer_rgba())[..., :3].copy()


def _is_mask(panel: Panel) -> bool:
    return panel.image.dtype == torch.bool


def _on_cpu(x: Tensor) -> Tensor:
    x = x.detach()
    x = x.full_tensor() if hasattr(x, "full_tensor") else x
    return x.cpu() if x.dtype == torch.bool else x.cpu().float()
