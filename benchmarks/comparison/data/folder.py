"""Images in folders, one folder a class."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from comparison.data import augment, strata
from comparison.data.errors import DataError
from comparison.data.layout import Found, find
from comparison.data.readable import notes_of
from comparison.data.task import Task
from comparison.spec.run_spec import Data
from comparison.spec.seeds import generator

SIDE = 224
TEST_FRACTION = 0.2
_MEAN, _STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


@dataclass(frozen=True, eq=False)
class Files:
    """A source that reads each image from its file whenever it is asked for."""

    paths: tuple[str, ...]
    side: int
    augmentation: augment.Name

    def images(self, indices_B: Tensor) -> Tensor:
        """The middle square of each, its shorter side made `side`."""
        return _normalised(torch.stack([self._square(self._read(index)) for index in indices_B.tolist()]))

    def augmented(self, indices_B: Tensor, seed: int, epoch: int) -> Tensor:
        """As they are trained on; `crop-flip` is RandomResizedCrop and a flip, as usual for photographs."""
        if self.augmentation == "none":
            return self.images(indices_B)
        return _normalised(augment.each(self._transform(), self._read, indices_B, seed, epoch))

    def _transform(self) -> augment.Transform:
        if self.augmentation == "crop-flip":
            both: augment.Transform = v2.Compose([v2.RandomResizedCrop(self.side), v2.RandomHorizontalFlip()])
            return both
        shift = augment.of_square(self.augmentation, self.side, fill=0)
        assert shift is not None
        then: augment.Transform = v2.Compose([self._square, shift])
        return then

    def _square(self, x_CHW: Tensor) -> Tensor:
        resized = v2.functional.resize(x_CHW, [self.side], antialias=True)
        middle: Tensor = v2.functional.center_crop(resized, [self.side, self.side])
        return middle

    def _read(self, index: int) -> Tensor:
        with Image.open(self.paths[index]) as image:
            x_CHW: Tensor = v2.functional.pil_to_tensor(image.convert("RGB"))
        return x_CHW


def load(data: Data) -> Task:
    """The images of `imagefolder:PATH`.

    PATH has either a folder of each class, and a fifth of each class's images is for testing, the same fifth
    always; or `train` and `val` or `test` with folders of the same classes. With both `val` and `test`, the
    images of `val` are added to those of `train`: validation images are drawn from all that are not for testing.
    All images are read once beforehand; which could be read is noted in the folder `data.root`.

    Raises:
        DataError: there is no such folder, there are no images or no two classes, or `strict` and an unreadable image.
    """
    path = Path(data.name.partition(":")[2])
    found = find(path, data.strict, notes_of(path, Path(data.root)))
    labels_N = torch.tensor(found.labels)
    pool, test = _parts(found, labels_N)
    source = Files(found.paths, data.image_size or SIDE, data.augmentation)
    return Task(
        data.name,
        len(found.classes),
        (3, source.side, source.side),
        labels_N,
        pool,
        test,
        source,
        data.label_noise or 0.0,
        found.skipped,
    )


def _parts(found: Found, labels_N: Tensor) -> tuple[Tensor, Tensor]:
    every = torch.arange(len(labels_N))
    if found.for_test is not None:
        test = torch.tensor(found.for_test)
        return every[~test], every[test]
    available = strata.per_class(every, labels_N, len(found.classes))
    if min(available) < 2:
        alone = ", ".join(repr(name) for name, have in zip(found.classes, available, strict=True) if have < 2)
        raise DataError(
            f"{str(found.root)!r} has one image only of {alone}: it can't be both trained on and tested on.",
            "add images, take the class away, or have folders train/ and val/ of your own",
        )
    counts = strata.proportional(available, max(1, round(TEST_FRACTION * len(every))))
    test = strata.drawn(every, labels_N, counts, generator(0, "test"))
    return strata.without(every, test), test


def _normalised(x_BCHW: Tensor) -> Tensor:
    normalised: Tensor = v2.functional.normalize(x_BCHW / 255, _MEAN, _STD)
    return normalised
