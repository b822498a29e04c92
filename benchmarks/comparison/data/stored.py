"""Images in memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torchvision.transforms.v2 import functional

from comparison.data import augment


@dataclass(frozen=True, eq=False)
class Stored:
    """A source that has all images in a tensor."""

    x_NCHW: Tensor
    """uint8, which is divided by 255 and normalised by `mean` and `std`, or float32, which is taken as it is."""
    augmentation: augment.Name = "none"
    size: int | None = None
    """Side in pixels, if not that of the tensor."""
    fill: float = 0.0
    """What is beyond the edges, in the tensor's own values."""
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W)."""
        side = self.size or self.x_NCHW.shape[2]
        return self.x_NCHW.shape[1], side, side

    def images(self, indices_B: Tensor) -> Tensor:
        """As they are tested on."""
        if self.size is None:
            return self._normalised(self.x_NCHW[indices_B])
        return self._normalised(torch.stack([self._read(index) for index in indices_B.tolist()]))

    def augmented(self, indices_B: Tensor, seed: int, epoch: int) -> Tensor:
        """As they are trained on."""
        transform = augment.of_square(self.augmentation, self.shape[1], self.fill)
        if transform is None:
            return self.images(indices_B)
        return self._normalised(augment.each(transform, self._read, indices_B, seed, epoch))

    def _read(self, index: int) -> Tensor:
        x_CHW = self.x_NCHW[index]
        if self.size is None:
            return x_CHW
        resized: Tensor = functional.resize(x_CHW, [self.size, self.size], antialias=True)
        return resized

    def _normalised(self, x_BCHW: Tensor) -> Tensor:
        if x_BCHW.dtype != torch.uint8:
            return x_BCHW
        mean, std = torch.tensor(self.mean), torch.tensor(self.std)
        return (x_BCHW / 255 - mean[:, None, None]) / std[:, None, None]
