"""DropBlock as a module."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hookdrop.dropblock import block_edges, block_sizes, channel_axis, drop_block
from hookdrop.kernels.drawing import NORMALIZE
from hookdrop.kernels.seed_rate import GAMMA
from hookdrop.regularizers.base import Regularizer, map_reading, nhwc_doubt
from hookdrop.utils.validation import count, drop_rate, one_of


class DropBlock(Regularizer):
    """Zero blocks of the map: `p` of its elements in expectation, whatever its size.

    Args:
        p: expected fraction of zeroed elements, in [0, 1]; 0.1 if neither it nor `keep_prob` is given.
        block_size: edge of a block in elements, one for all axes or one each; clamped to the map.
        keep_prob: 1 - p, instead of `p`.
        per_channel: a mask of its own for every channel (Algorithm 1), or one for all channels of a sample.
        gamma: `"exact"` solves for the seed rate whose blocks cover p; `"paper"` is the paper's formula, which
            drops less than it is asked for.
        normalize: what keeps the mean: `"batch"` count / kept count (Algorithm 1), `"sample"` the same for
            each sample, `"expected"` 1 / (1 - p), or None.
        channel_dim: the channels' axis; None means 1 for 4-D and 5-D input. 3-D must say it.

    Shape: (N, C, L) with `channel_dim`, (N, C, H, W), (N, C, D, H, W), or with the channels where
    `channel_dim` says.

    Raises:
        ShapeError: in forward, if the input has no map.

    Example:
        >>> _ = torch.manual_seed(3)
        >>> DropBlock(p=0.3, block_size=3, per_channel=False, normalize=None)(torch.ones(1, 1, 5, 7))
        tensor([[[[1., 0., 0., 0., 0., 0., 1.],
                  [0., 0., 0., 0., 0., 0., 1.],
                  [0., 0., 0., 0., 0., 0., 1.],
                  [0., 0., 0., 0., 0., 1., 1.],
                  [0., 0., 0., 1., 1., 1., 1.]]]])

    Reference: Ghiasi, Lin, Le 2018, "DropBlock: A regularization method for convolutional networks",
    arXiv:1810.12890.
    """

    def __init__(
        self,
        p: float | None = None,
        block_size: int | tuple[int, ...] = 7,
        *,
        keep_prob: float | None = None,
        per_channel: bool = True,
        gamma: str = "exact",
        normalize: str | None = "batch",
        channel_dim: int | None = None,
    ) -> None:
        super().__init__()
        self.p = drop_rate(p, keep_prob, self.title, default=0.1)
        self.block_size = block_edges(block_size)
        self.per_channel: bool = one_of(per_channel, "per_channel", self.title, (True, False))
        self.gamma: str = one_of(gamma, "gamma", self.title, GAMMA)
        self.normalize: str | None = one_of(normalize, "normalize", self.title, NORMALIZE)
        self.channel_dim = None if channel_dim is None else count(channel_dim, "channel_dim", self.title, -4)

    def check(self, shape: Sequence[int]) -> None:
        block_sizes(self.block_size, self._map(shape))

    def reading(self, shape: Sequence[int]) -> str:
        return map_reading(shape, channel_axis(shape, self.channel_dim))

    def doubts(self, shape: Sequence[int]) -> list[str]:
        instead = "DropBlock(..., channel_dim=-1) reads it as such."
        found = [] if self.channel_dim else nhwc_doubt(shape, 1, instead)
        sizes = self._map(shape)
        if block_sizes(self.block_size, sizes) == tuple(sizes):
            block = "x".join(map(str, block_sizes(self.block_size, sizes)))
            covers = "Dropout2d" if self.per_channel else "DropPath"
            found.append(
                f"block_size={self.block_size} covers the whole {'x'.join(map(str, sizes))} map: DropBlock drops "
                f"blocks of {block} there, which is {covers}."
            )
        return found

    def regularize_at(self, x: Tensor, rate: float | Tensor) -> Tensor:
        return drop_block(
            x,
            rate,
            self.block_size,
            per_channel=self.per_channel,
            gamma=self.gamma,
            normalize=self.normalize,
            channel_dim=self.channel_dim,
        )

    def _map(self, shape: Sequence[int]) -> list[int]:
        channel = channel_axis(shape, self.channel_dim)
        return [size for axis, size in enumerate(shape) if axis != 0 and axis != channel]
