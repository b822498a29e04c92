"""Synthetic images with a local and a distributed class cue; half of the test images lack the local one.

This is the situation that DropBlock targets: a network can fit the training images with the local cue alone, but does
not generalize to images without it.

An image has side length S (default 32), one channel, and one of 8 equally frequent classes k:

    image = 0.28 * wave + noise, overwritten by the glyph

* wave (distributed cue): sin(2 pi * 4 * (x cos a + y sin a) / S + phase), with orientation a = pi k / 8, uniform phase;
* noise: standard normal, independent for each pixel;
* glyph (local cue): the k-th of 8 patterns of 5x5 pixels, with ink 3 and background -3, at a uniform position inside
  the image. It replaces the pixels below it.

All images of the pool have the glyph; every second test image of each class has none. The cues never contradict. The
amplitude of the wave was tuned for the accuracy of a narrow ResNet without a regularizer.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from comparison.data.task import DataError, Task, stored
from comparison.spec.run_spec import Data, generator

CLASSES, POOL, TEST = 8, 4000, 1024
SIZE, SIDE = 32, 5
AMPLITUDE, CYCLES, INK = 0.28, 4, 3.0
_GLYPHS = """
    #####  #...#  ..#..  #####  #....  .###.  ..#..  ##.##
    ..#..  .#.#.  ..#..  ....#  #....  #...#  .#.#.  ##.##
    ..#..  ..#..  #####  ...#.  #....  #...#  #...#  .....
    ..#..  .#.#.  ..#..  ..#..  #....  #...#  .#.#.  ##.##
    ..#..  #...#  ..#..  .#...  #####  .###.  ..#..  ##.##
"""


class CueImages(NamedTuple):
    x_N1HW: Tensor
    y_N: Tensor
    has_glyph_N: Tensor
    place_N2: Tensor  # row and column of the glyph's top-left pixel, even if the glyph is omitted


def load(data: Data) -> Task:
    size = data.image_size or SIZE
    if data.augmentation == "crop-flip":
        raise DataError(
            f"augmentation='crop-flip' changes the class of {data.name!r} images: the flip mirrors the orientation of "
            "the wave.",
            "use 'none'",
        )
    pool, test = generate(POOL, size, "pool", without=False), generate(TEST, size, "test", without=True)
    source = stored(torch.cat([pool.x_N1HW, test.x_N1HW]), size, data.augmentation)
    labels_N, every = torch.cat([pool.y_N, test.y_N]), torch.arange(POOL + TEST)
    return Task(data.name, CLASSES, labels_N, every[:POOL], every[POOL:], source)


def glyphs() -> Tensor:
    """The patterns of the local cue: (8, 5, 5), with values 3 and -3."""
    rows = [[[INK if dot == "#" else -INK for dot in part] for part in row.split()] for row in _GLYPHS.split("\n")]
    return torch.tensor([row for row in rows if row]).transpose(0, 1)


def gratings(size: int, phase_N: Tensor, y_N: Tensor) -> Tensor:
    """The distributed cue with amplitude 1 and without noise: (N, 1, size, size)."""
    angle_N11 = (math.pi / CLASSES * y_N)[:, None, None]
    line = torch.arange(size) / size
    along_NHW = line * angle_N11.cos() + line[:, None] * angle_N11.sin()
    return torch.sin(2 * math.pi * CYCLES * along_NHW + phase_N[:, None, None])[:, None]


def generate(count: int, size: int, stream: str, without: bool) -> CueImages:
    """Generate `count` images, a multiple of 16; with `without`, every second image of each class has no glyph."""
    draws = generator(0, "synthetic-cue", stream)
    y_N = torch.arange(count) % CLASSES
    phase_N = 2 * math.pi * torch.rand(count, generator=draws)
    place_N2 = torch.randint(size - SIDE + 1, (count, 2), generator=draws)
    x_N1HW = AMPLITUDE * gratings(size, phase_N, y_N) + torch.randn(count, 1, size, size, generator=draws)
    has_N = (torch.arange(count) // CLASSES % 2 == 0) | (not without)
    patterns = glyphs()
    for i in has_N.nonzero()[:, 0].tolist():
        top, left = place_N2[i].tolist()
        x_N1HW[i, 0, top : top + SIDE, left : left + SIDE] = patterns[y_N[i]]
    return CueImages(x_N1HW, y_N, has_N, place_N2)
