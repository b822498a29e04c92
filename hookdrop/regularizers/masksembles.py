"""Masksembles: a fixed set of channel masks, one for each group of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from hookdrop.core.arguments import count, floating, rate
from hookdrop.core.errors import ShapeError
from hookdrop.core.regularizer import Rate, Regularizer, check_axes, describe_map, nhwc_warnings
from hookdrop.kernels.blocks import given_channel_axis
from hookdrop.kernels.fixed_masks import fixed_masks, ones_per_mask

MIN_CHANNELS = 10  # as in the authors' code; masks of fewer channels overlap by chance rather than by `scale`


def masksembles(
    x: Tensor,
    n: int = 4,
    scale: float = 2.0,
    seed: int = 0,
    channel_dim: int | None = None,
    training: bool = True,
    *,
    site: str = "",
) -> Tensor:
    """Mask the channels of each of `n` groups of the batch, with a fixed mask for each group: see `Masksembles`.

    `seed` and `site`, the name of a layer, choose the masks.
    """
    n, scale, seed = mask_settings(n, scale, seed, "masksembles")
    floating(x, "masksembles")
    axis = check_groups(x.shape, n, channel_dim, "masksembles")
    if not training or x.numel() == 0:
        return x
    channels = int(x.shape[axis])
    masks: Tensor = fixed_masks(channels, n, scale, f"{seed} {site}", device=x.device)
    mask_NC = masks.repeat_interleave(x.shape[0] // n, 0)
    shape = [size if at in (0, axis) else 1 for at, size in enumerate(x.shape)]
    # In low precision, apply the scale last: a scaled mask would round it first.
    return x * mask_NC.view(shape).to(x.dtype) * (channels / ones_per_mask(channels, n, scale))


def mask_settings(n: object, scale: object, seed: object, owner: str) -> tuple[int, float, int]:
    # Two masks share about 1 / scale of their channels. The limit is that of the authors' code.
    return count(n, "n", owner, 2), rate(scale, "scale", owner, 6.0, low=1.0), count(seed, "seed", owner, 0)


def check_groups(shape: Sequence[int], n: int, channel_dim: int | None, owner: str) -> int:
    """Return the channel axis. Raise `ShapeError` unless there are enough channels, and `n` equal groups of samples."""
    check_axes(shape, Masksembles.axes, owner)
    if channel_dim is None and len(shape) == 3:
        raise ShapeError(
            f"got {tuple(shape)}: the channels may be axis 1 or 2.\n"
            "  write channel_dim=-1 for tokens (N, L, C), or channel_dim=1 for a sequence (N, C, L)."
        )
    axis = 1 if channel_dim is None else given_channel_axis(shape, channel_dim, owner)
    if 0 in shape:
        return axis
    if shape[axis] < MIN_CHANNELS:
        raise ShapeError(f"got {tuple(shape)}: {owner} needs {MIN_CHANNELS} channels, so that masks differ.")
    if shape[0] % n:
        sizes = " or ".join(str(size) for size in (shape[0] // n * n, (shape[0] // n + 1) * n) if size)
        raise ShapeError(
            f"got {tuple(shape)}: {shape[0]} samples cannot be split into n={n} equal groups, one for each mask.\n"
            f"  use a batch of {sizes} samples; DataLoader(..., drop_last=True) drops a smaller last batch."
        )
    return axis


class Masksembles(Regularizer):
    """Multiply the channels of each of `n` groups of the batch by a fixed binary mask: an ensemble of `n` subnetworks.

    The first N / n samples have the first mask, the next ones the second, and so on. Masks never change: they are a
    function of the settings, the number of channels and the name of the hooked layer, so that they are the same in each
    process, on each rank, after loading and in a resumed run. There is no rate, so a schedule cannot drive it.

    To predict with all subnetworks, call `drop.predict(batch, samples=n)`, which repeats the batch.

    Args:
        n: number of masks, at least 2. The batch size must be a multiple of it.
        scale: in [1, 6]. Two masks share about 1 / scale of their channels: 1 keeps all channels in all masks, and a
            large scale gives almost separate networks of 1 / n of the channels.
        seed: chooses the masks; at least 0. The global RNG has no effect and is not used.
        channel_dim: the channel axis. None means 1 for (N, C), (N, C, H, W) and (N, C, D, H, W); 3-D input requires it.

    Shape: (N, C, ...), N a multiple of `n`, C at least 10. A mask has C / (scale * (1 - (1 - 1 / scale)^n)) ones,
    rounded down, and each channel is in some mask.

    Unlike the paper, kept channels are divided by their fraction and eval mode is the identity, as for dropout. As
    plain layers without a hook, layers with the same settings and channels have the same masks: choose other seeds.

    Example:
        >>> (Masksembles(n=2, scale=2.0)(torch.ones(2, 12)) > 0).int()
        tensor([[1, 0, 1, 1, 1, 0, 1, 1, 0, 0, 1, 1],
                [0, 1, 1, 1, 1, 1, 1, 0, 1, 1, 0, 0]], dtype=torch.int32)

    Reference: Durasov et al. 2021, "Masksembles for uncertainty estimation", arXiv:2012.08334.
    """

    rate: ClassVar[Rate | None] = None
    axes = "N C ..."

    def __init__(self, n: int = 4, scale: float = 2.0, seed: int = 0, channel_dim: int | None = None) -> None:
        super().__init__()
        self.n, self.scale, self.seed = mask_settings(n, scale, seed, self.title)
        self.channel_dim = channel_dim
        self.site = ""

    def for_layer(self, model: nn.Module, name: str, at: str = "output", survey: Any = None) -> Masksembles:
        placed = Masksembles(self.n, self.scale, self.seed, self.channel_dim)
        placed.site = name
        return placed

    @property
    def independent_samples(self) -> int:
        return self.n

    def check(self, shape: Sequence[int]) -> None:
        check_groups(shape, self.n, self.channel_dim, self.title)

    def reading(self, shape: Sequence[int]) -> str:
        return f"N={shape[0]} {describe_map(shape, check_groups(shape, self.n, self.channel_dim, self.title))}"

    def shape_warnings(self, shape: Sequence[int]) -> list[str]:
        axis = check_groups(shape, self.n, self.channel_dim, self.title)
        return nhwc_warnings(shape, "write channel_dim=-1.") if axis == 1 else []

    def regularize(self, x: Tensor, rate: Any) -> Tensor:
        return masksembles(x, self.n, self.scale, self.seed, self.channel_dim, site=self.site)
