"""Draw tensors into a matplotlib `Figure`, without pyplot, which keeps figures open and displays them twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from hookdrop.core.errors import ShapeError
from hookdrop.extras import needs

if TYPE_CHECKING:
    from matplotlib.figure import Figure, SubFigure

Rows: TypeAlias = Mapping[str, Tensor]
"""The tensors of one layer by label: values, or masks that are True where an element was kept."""

KEPT, DROPPED = "#d5dde8", "#b2182b"
SCALE = "viridis"


def get_figure(figure: Any, width: float, height: float) -> Any:
    """Return `figure`, or a new figure of this size in inches."""
    with needs("observe"):
        from matplotlib.figure import Figure
    return figure if figure is not None else Figure(figsize=(width, height), layout="constrained")


def channel_axis(shape: Sequence[int]) -> int:
    """Return 1 for maps (N, C, H, W), and the last axis for (N, H, W, C) with H = W != C, (N, L, C) and (N, C)."""
    if len(shape) == 4 and shape[1] == shape[2] != shape[3]:
        return 3
    return len(shape) - 1 if len(shape) < 4 else 1


def images_of(x: Tensor, sample: int, channels: int) -> list[Tensor]:
    """Convert one sample to images.

    Maps (N, C, H, W) or (N, H, W, C) give their first `channels`, volumes (N, C, D, H, W) the middle slices of these,
    tokens (N, L, C) one image of tokens x channels, and features (N, C) or (N,) one image of all samples.
    """
    x = _on_cpu(x)
    if not x.dim() or x.dim() > 5 or not x.numel():
        raise ShapeError(f"got {tuple(x.shape)}: it cannot be shown as images.")
    if x.dim() < 3:
        return [x.reshape(len(x), -1)]
    if not -len(x) <= sample < len(x):
        raise ShapeError(f"got {tuple(x.shape)}, which has no sample {sample}: the batch size is {len(x)}.")
    if x.dim() == 3:
        return [x[sample]]
    maps = x.movedim(channel_axis(x.shape), 1)[sample]
    return list((maps if maps.dim() == 3 else maps[:, maps.shape[1] // 2])[:channels])


def blocks_figure(blocks: Mapping[str, Rows], sample: int = 0, channels: int = 8, figure: Any = None) -> Figure:
    """Draw blocks from top to bottom, each with a row per tensor and a column per channel."""
    shown = [[images_of(x, sample, channels) for x in rows.values()] for rows in blocks.values()]
    columns = [max(map(len, rows)) for rows in shown]
    heights = [0.75 + 1.05 * len(rows) * (2 if count == 1 else 1) for rows, count in zip(shown, columns, strict=True)]
    width = max(5.0, *(1.6 + 1.05 * count for count in columns))
    figure = get_figure(figure, width, sum(heights))
    parts = figure.subfigures(len(blocks), 1, squeeze=False, height_ratios=heights)[:, 0]
    for part, (title, rows), images in zip(parts, blocks.items(), shown, strict=True):
        part.suptitle(title, fontsize=10)
        _draw_block(part, rows, images)
    if masked := [part for part, images in zip(parts, shown, strict=True) if any(_is_mask(row[0]) for row in images)]:
        from matplotlib.patches import Patch

        patches = [Patch(color=KEPT, label="kept"), Patch(color=DROPPED, label="dropped")]
        masked[-1].legend(handles=patches, loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    return figure  # type: ignore[no-any-return]


def _draw_block(part: SubFigure, tensors: Rows, rows: list[list[Tensor]]) -> None:
    """Draw one row per tensor, with one color scale for all but the masks."""
    from matplotlib.colors import ListedColormap

    table = part.subplots(len(rows), max(map(len, rows)), squeeze=False)
    values = torch.cat(
        [
            torch.empty(0, device="cpu"),
            *(image[image.isfinite()] for row in rows for image in row if not _is_mask(image)),
        ]
    )
    low, high = (float(values.min()), float(values.max())) if values.numel() else (0.0, 1.0)
    if low == high:  # matplotlib would scale each image differently
        low, high = low - 0.5, high + 0.5
    scale: dict[str, Any] = {"cmap": SCALE, "vmin": low, "vmax": high, "interpolation": "nearest"}
    of_mask = scale | {"cmap": ListedColormap([DROPPED, KEPT]), "vmin": 0, "vmax": 1}
    drawn = None
    for (label, x), row, line in zip(tensors.items(), rows, table, strict=True):
        for axes in line[len(row) :]:
            axes.set_axis_off()
        for index, (image, axes) in enumerate(zip(row, line, strict=False)):
            one = axes.imshow(
                image.numpy(), aspect="equal" if x.dim() > 3 else "auto", **of_mask if _is_mask(image) else scale
            )
            drawn = drawn if _is_mask(image) else one
            axes.set(xticks=[], yticks=[])
            if row is rows[0] and x.dim() > 3:
                axes.set_title(f"channel {index}", fontsize=8)
        line[0].set_ylabel(label, fontsize=8)
        if x.dim() < 4:
            line[0].set_xlabel("tokens x channels" if x.dim() == 3 else "samples x units", fontsize=8)
    if drawn is not None:
        part.colorbar(drawn, ax=table, shrink=0.8, pad=0.02, label="value").ax.tick_params(labelsize=7)


def as_images(x: Tensor) -> Tensor:
    """Convert (N, C, H, W) for `imshow`: to (N, H, W, 3) in [0, 1] for 3 channels, else to the channel mean."""
    x = _on_cpu(x)
    if x.shape[1] != 3:
        return x.mean(1)
    low, high = x.amin((1, 2, 3), keepdim=True), x.amax((1, 2, 3), keepdim=True)
    return ((x - low) / (high - low).clamp_min(1e-12)).movedim(1, -1)


def _is_mask(image: Tensor) -> bool:
    return image.dtype == torch.bool


def _on_cpu(x: Tensor) -> Tensor:
    x = x.detach()
    x = x.full_tensor() if hasattr(x, "full_tensor") else x
    return x.cpu() if x.dtype == torch.bool else x.cpu().float()
