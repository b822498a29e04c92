"""Sources of images, in memory or in files; training images may be shifted, or cropped and flipped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from comparison.spec.seeds import seed_of

Augmentation = Literal["none", "shift", "crop-flip"]
Transform = Callable[[Tensor], Tensor]
SHIFT = 2
_MEAN, _STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def square_transform(name: Augmentation, side: int, fill: float) -> Transform | None:
    """What is done to an image that is as large as it should be.

    `shift` is by -2 to 2 pixels each way; `crop-flip` by up to an eighth of the side, and a flip from left to right
    half of the time. What comes in at the edges is `fill`.
    """
    if name == "shift":
        crop: Transform = v2.RandomCrop(side, padding=SHIFT, fill=fill)
        return crop
    if name == "crop-flip":
        both: Transform = v2.Compose(
            [v2.RandomCrop(side, padding=max(1, side // 8), fill=fill), v2.RandomHorizontalFlip()]
        )
        return both
    return None


def transformed(
    transform: Transform, read: Callable[[int], Tensor], indices_B: Tensor, seed: int, epoch: int
) -> Tensor:
    """`transform(read(index))` of each index, stacked; drawn from the stream of (seed, epoch, index).

    The global generator is as it was before.
    """
    images = []
    with torch.random.fork_rng(devices=[]):
        for index in indices_B.tolist():
            # torch.manual_seed would seed the generators of GPUs as well, which are not put back here.
            torch.default_generator.manual_seed(seed_of(seed, "augmentation", epoch, index))
            images.append(transform(read(index)))
    return torch.stack(images)


@dataclass(frozen=True, eq=False)
class Stored:
    """A source that has all images in a tensor."""

    x_NCHW: Tensor
    """uint8, which is divided by 255 and normalised by `mean` and `std`, or float32, which is taken as it is."""
    augmentation: Augmentation = "none"
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
        transform = square_transform(self.augmentation, self.shape[1], self.fill)
        if transform is None:
            return self.images(indices_B)
        return self._normalised(transformed(transform, self._read, indices_B, seed, epoch))

    def _read(self, index: int) -> Tensor:
        x_CHW = self.x_NCHW[index]
        if self.size is None:
            return x_CHW
        resized: Tensor = v2.functional.resize(x_CHW, [self.size, self.size], antialias=True)
        return resized

    def _normalised(self, x_BCHW: Tensor) -> Tensor:
        if x_BCHW.dtype != torch.uint8:
            return x_BCHW
        mean, std = torch.tensor(self.mean), torch.tensor(self.std)
        return (x_BCHW / 255 - mean[:, None, None]) / std[:, None, None]


@dataclass(frozen=True, eq=False)
class Files:
    """A source that reads each image from its file whenever it is asked for."""

    paths: tuple[str, ...]
    side: int
    augmentation: Augmentation

    def images(self, indices_B: Tensor) -> Tensor:
        """The middle square of each, its shorter side made `side`."""
        return _normalised(torch.stack([self._square(self._read(index)) for index in indices_B.tolist()]))

    def augmented(self, indices_B: Tensor, seed: int, epoch: int) -> Tensor:
        """As they are trained on; `crop-flip` is RandomResizedCrop and a flip, as usual for photographs."""
        if self.augmentation == "none":
            return self.images(indices_B)
        return _normalised(transformed(self._transform(), self._read, indices_B, seed, epoch))

    def _transform(self) -> Transform:
        if self.augmentation == "crop-flip":
            both: Transform = v2.Compose([v2.RandomResizedCrop(self.side), v2.RandomHorizontalFlip()])
            return both
        shift = square_transform(self.augmentation, self.side, fill=0)
        assert shift is not None
        then: Transform = v2.Compose([self._square, shift])
        return then

    def _square(self, x_CHW: Tensor) -> Tensor:
        resized = v2.functional.resize(x_CHW, [self.side], antialias=True)
        middle: Tensor = v2.functional.center_crop(resized, [self.side, self.side])
        return middle

    def _read(self, index: int) -> Tensor:
        with Image.open(self.paths[index]) as image:
            x_CHW: Tensor = v2.functional.pil_to_tensor(image.convert("RGB"))
        return x_CHW


def _normalised(x_BCHW: Tensor) -> Tensor:
    normalised: Tensor = v2.functional.normalize(x_BCHW / 255, _MEAN, _STD)
    return normalised
