"""Images with two cues to their class, one in a small place and one everywhere; half of the test lacks the first.

It is the situation that DropBlock was made for: a network that has learned the small clear cue alone has learned
too little, and nothing in the training images tells it so.

An image of side S (32 unless another is asked for), one channel, and a class k of 8, all of them equally frequent:

    image = 0.28 * spread + noise, and the glyph put over it

* spread: sin(2 pi * 4 * (x cos a + y sin a) / S + phase), the orientation a = pi k / 8, the phase uniform;
* noise: normal, mean 0 and standard deviation 1, independent in each pixel;
* glyph: the k-th of 8 patterns of 5x5 pixels, 3 where it has ink and -3 elsewhere, at a place drawn uniformly
  from all places inside of the image. It replaces what is under it.

All images of the pool have the glyph; of the test images, every second of each class has none, and nothing in
its place. Both cues are right where they are: none points to another class.

There are 4,000 images in the pool and 1,024 for testing. They are the same always: all is drawn from one stream.
The strength of the spread cue was chosen by the accuracy of a narrow ResNet without any regularizer alone:
after 400 steps on 400 images it is right on 71 to 88 % of the test images, depending on the seed; on 97 to 99 % of
those with the glyph, and on 44 to 76 % of those without.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from comparison.data.sources import Stored
from comparison.data.task import DataError, Task
from comparison.spec.run_spec import Data
from comparison.spec.seeds import generator

CLASSES = 8
SIZE = 32
LEAST = 16
POOL, TEST = 4000, 1024
SPREAD = 0.28
CYCLES = 4
INK = 3.0
SIDE = 5
_GLYPHS = """
    #####  #...#  ..#..  #####  #....  .###.  ..#..  ##.##
    ..#..  .#.#.  ..#..  ....#  #....  #...#  .#.#.  ##.##
    ..#..  ..#..  #####  ...#.  #....  #...#  #...#  .....
    ..#..  .#.#.  ..#..  ..#..  #....  #...#  .#.#.  ##.##
    ..#..  #...#  ..#..  .#...  #####  .###.  ..#..  ##.##
"""


class Cued(NamedTuple):
    """Generated images, and what is in them."""

    x_N1HW: Tensor
    y_N: Tensor
    has_glyph_N: Tensor
    place_N2: Tensor
    """Row and column of the glyph's upper left pixel, or of where it would be."""


def load(data: Data) -> Task:
    """The generated images, with the groups of test images `local cue` and `no local cue`.

    Raises:
        DataError: a glyph does not fit the image size, or `crop-flip`, as the mirror image of a class is another.
    """
    _check(data)
    size = data.image_size or SIZE
    pool, test = generate(POOL, size, "pool", without=False), generate(TEST, size, "test", without=True)
    source = Stored(torch.cat([pool.x_N1HW, test.x_N1HW]), data.augmentation)
    return Task(
        data.name,
        CLASSES,
        source.shape,
        torch.cat([pool.y_N, test.y_N]),
        torch.arange(POOL),
        torch.arange(POOL, POOL + TEST),
        source,
        data.label_noise or 0.0,
        groups={"local cue": test.has_glyph_N, "no local cue": ~test.has_glyph_N},
    )


def glyphs() -> Tensor:
    """The patterns of the small cue, (8, 5, 5), each 3 or -3."""
    rows = [[[INK if dot == "#" else -INK for dot in part] for part in row.split()] for row in _GLYPHS.split("\n")]
    return torch.tensor([row for row in rows if row]).transpose(0, 1)


def gratings(size: int, phase_N: Tensor, y_N: Tensor) -> Tensor:
    """The pattern of the spread cue, (N, 1, size, size), without noise and before it is weakened."""
    angle_N11 = (math.pi / CLASSES * y_N)[:, None, None]
    line = torch.arange(size) / size
    along_NHW = line * angle_N11.cos() + line[:, None] * angle_N11.sin()
    return torch.sin(2 * math.pi * CYCLES * along_NHW + phase_N[:, None, None])[:, None]


def generate(count: int, size: int, stream: str, without: bool) -> Cued:
    """`count` images, a multiple of 16; every second of each class is without its glyph, or none is."""
    draws = generator(0, "synthetic-cue", stream)
    y_N = torch.arange(count) % CLASSES
    phase_N = 2 * math.pi * torch.rand(count, generator=draws)
    place_N2 = torch.randint(size - SIDE + 1, (count, 2), generator=draws)
    x_N1HW = SPREAD * gratings(size, phase_N, y_N) + torch.randn(count, 1, size, size, generator=draws)
    has_N = (torch.arange(count) // CLASSES % 2 == 0) | (not without)
    patterns = glyphs()
    for i in has_N.nonzero()[:, 0].tolist():
        top, left = place_N2[i].tolist()
        x_N1HW[i, 0, top : top + SIDE, left : left + SIDE] = patterns[y_N[i]]
    return Cued(x_N1HW, y_N, has_N, place_N2)


def _check(data: Data) -> None:
    if data.image_size is not None and data.image_size < LEAST:
        raise DataError(f"image_size={data.image_size} is too small for {data.name!r}.", f"allowed: {LEAST} or more")
    if data.augmentation == "crop-flip":
        raise DataError(
            f"augmentation='crop-flip' makes one class of {data.name!r} another: a slanted wave, mirrored, slants "
            "the other way.",
            "use 'shift' or 'none'",
        )
