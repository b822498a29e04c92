"""Image sources, in memory or in files, with optional augmentation."""

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
    """The augmentation of an image of the final size.

    `shift` moves it by -2 to 2 pixels in each direction; `crop-flip` moves it by up to an eighth of the side length
    and flips it horizontally with probability 0.5. New pixels at the edges are `fill`.
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
    """Stack `transform(read(index))` for all indices, each with the random stream of (seed, epoch, index).

    The global generator is restored.
    """
    images = []
    with torch.random.fork_rng(devices=[]):
        for index in indices_B.tolist():
            # torch.manual_seed would also seed the GPU generators, which are not restored here.
            torch.default_generator.manual_seed(seed_of(seed, "augmentation", epoch, index))
            images.append(transform(read(index)))
    return torch.stack(images)


@dataclass(frozen=True, eq=False)
class Stored:
    """A source with all images in one tensor."""

    x_NCHW: Tensor
    """uint8, which is divided by 255 and normalized by `mean` and `std`, or float32, which is used as is."""
    augmentation: Augmentation = "none"
    size: int | None = None
    """Side length in pixels, if it differs from the tensor's."""
    fill: float = 0.0
    """Value of pixels beyond the edges, in the units of the tensor."""
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W)."""
        side = self.size or self.x_NCHW.shape[2]
        return self.x_NCHW.shape[1], side, side

    def images(self, indices_B: Tensor) -> Tensor:
        """Images without augmentation."""
        if self.size is None:
            return self._normalized(self.x_NCHW[indices_B])
        return self._normalized(torch.stack([self._read(index) for index in indices_B.tolist()]))

    def augmented(self, indices_B: Tensor, seed: int, epoch: int) -> Tensor:
        """Images with augmentation."""
        transform = square_transform(self.augmentation, self.shape[1], self.fill)
        if transform is None:
            return self.images(indices_B)
        return self._normalized(transformed(transform, self._read, indices_B, seed, epoch))

    def _read(self, index: int) -> Tensor:
        x_CHW = self.x_NCHW[index]
        if self.size is None:
            return x_CHW
        resized: Tensor = v2.functional.resize(x_CHW, [self.size, self.size], antialias=True)
        return resized

    def _normalized(self, x_BCHW: Tensor) -> Tensor:
        if x_BCHW.dtype != torch.uint8:
            return x_BCHW
        mean, std = torch.tensor(self.mean), torch.tensor(self.std)
        return (x_BCHW / 255 - mean[:, None, None]) / std[:, None, None]


@dataclass(frozen=True, eq=False)
class Files:
    """A source that reads each image from its file on every access."""

    paths: tuple[str, ...]
    side: int
    augmentation: Augmentation

    def images(self, indices_B: Tensor) -> Tensor:
        """Images resized to the shorter side and center-cropped to `side`."""
        return _normalized(torch.stack([self._square(self._read(index)) for index in indices_B.tolist()]))

    def augmented(self, indices_B: Tensor, seed: int, epoch: int) -> Tensor:
        """Images with augmentation; `crop-flip` is RandomResizedCrop with a horizontal flip."""
        if self.augmentation == "none":
            return self.images(indices_B)
        return _normalized(transformed(self._transform(), self._read, indices_B, seed, epoch))

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


def _normalized(x_BCHW: Tensor) -> Tensor:
    normalized: Tensor = v2.functional.normalize(x_BCHW / 255, _MEAN, _STD)
    return normalized
