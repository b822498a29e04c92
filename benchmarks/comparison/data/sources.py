"""Images in memory or in files, with optional augmentation."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torchvision.datasets.folder import default_loader
from torchvision.transforms import v2

from comparison.spec.run_spec import seed_of

Augmentation = Literal["none", "crop-flip"]
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@dataclass(frozen=True, eq=False)
class Source:
    """The images of a dataset. Its methods do not affect the global random generators."""

    read: Callable[[int], Tensor]  # an image in its own size: uint8, or float32, which is used as is
    shape: tuple[int, int, int]  # (C, H, W) of the images
    fit: Any  # the transform to this size
    augment: Any = None  # the transform for training, from an image as it is read; None uses `fit`
    statistics: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())
    """Mean and standard deviation of the channels, for pixels in [0, 1]; for uint8."""

    def images(self, indices_B: Tensor) -> Tensor:
        """Images without augmentation: (B, C, H, W), float32, normalized."""
        return self._normalized(torch.stack([self.fit(self.read(index)) for index in indices_B.tolist()]))

    def augmented(self, indices_B: Tensor, seed: int, epoch: int) -> Tensor:
        """Images with augmentation, which depends only on seed, epoch and the index of each image."""
        if self.augment is None:
            return self.images(indices_B)
        images = []
        with torch.random.fork_rng(devices=[]):
            for index in indices_B.tolist():
                # torch.manual_seed would also seed the GPU generators, which are not restored here.
                torch.default_generator.manual_seed(seed_of(seed, "augmentation", epoch, index))
                images.append(self.augment(self.read(index)))
        return self._normalized(torch.stack(images))

    def _normalized(self, x_BCHW: Tensor) -> Tensor:
        if x_BCHW.dtype != torch.uint8:
            return x_BCHW
        mean, std = map(torch.tensor, self.statistics)
        return (x_BCHW / 255 - mean[:, None, None]) / std[:, None, None]


def stored(x_NCHW: Tensor, side: int, augmentation: Augmentation, fill: float = 0.0, **more: Any) -> Source:
    """Images in one tensor, resized to `side`; pixels beyond the edges are `fill`, in the units of the tensor.

    `crop-flip` moves an image by up to an eighth of its side, and flips it or not.
    """
    channels, own = x_NCHW.shape[1:3]
    fit = v2.Identity() if side == own else v2.Resize([side, side], antialias=True)
    moved = [v2.RandomCrop(side, padding=max(1, side // 8), fill=fill), v2.RandomHorizontalFlip()]
    augment = None if augmentation == "none" else v2.Compose([fit, *moved])
    return Source(x_NCHW.__getitem__, (channels, side, side), fit, augment, **more)


def files(paths: tuple[str, ...], side: int, augmentation: Augmentation) -> Source:
    """Images read from their files on every access, resized to the shorter side and center-cropped.

    `crop-flip` is RandomResizedCrop with a horizontal flip.
    """
    fit = v2.Compose([v2.Resize([side], antialias=True), v2.CenterCrop(side)])
    moved = v2.Compose([v2.RandomResizedCrop(side), v2.RandomHorizontalFlip()])
    augment = None if augmentation == "none" else moved

    def read(index: int) -> Tensor:
        x_CHW: Tensor = v2.functional.pil_to_tensor(default_loader(paths[index]))
        return x_CHW

    return Source(read, (3, side, side), fit, augment, IMAGENET)
