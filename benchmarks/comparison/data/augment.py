"""Training images: shifted, or cropped and flipped, each by a draw of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torchvision.transforms import v2

from comparison.spec.seeds import seed_of

Name = Literal["none", "shift", "crop-flip"]
Transform = Callable[[Tensor], Tensor]
SHIFT = 2


def of_square(name: Name, side: int, fill: float) -> Transform | None:
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


def each(transform: Transform, read: Callable[[int], Tensor], indices_B: Tensor, seed: int, epoch: int) -> Tensor:
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
