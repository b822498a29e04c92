"""Image datasets with one folder per class."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from joblib import Memory
from PIL import Image
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import IMG_EXTENSIONS, has_file_allowed_extension

from comparison.data.sources import files
from comparison.data.task import DataError, Task, hold_out
from comparison.spec.run_spec import Data

SIDE, TEST_FRACTION = 224, 0.2


def load(data: Data) -> Task:
    """Load `imagefolder:PATH`.

    PATH has either one folder per class, of which a fixed fifth is used for testing, or the splits `train` and `val`
    or `test` with such folders. With both `val` and `test`, the images of `val` are added to those of `train`, because
    validation images are drawn from all images that are not test images.
    """
    root = Path(data.name.partition(":")[2])
    skipped, parts = _unreadable(root, Path(data.root)), _parts(root)

    def valid(path: str) -> bool:
        return has_file_allowed_extension(path, IMG_EXTENSIONS) and path not in skipped

    try:
        # torchvision names folders that do not exist, and classes without images.
        folders = [ImageFolder(str(part), is_valid_file=valid) for part, _ in parts]
    except OSError as error:
        raise DataError(f"{error}", "expected: one folder of images for each of at least two classes") from None
    classes = folders[0].classes
    if different := [folder for folder in folders if folder.classes != classes]:
        raise DataError(
            f"{different[0].root!r} and {folders[0].root!r} have different classes.",
            f"only in one of them: {', '.join(sorted({*different[0].classes} ^ {*classes}))}",
        )
    if len(classes) < 2:
        raise DataError(f"{folders[0].root!r} has only one class, {classes[0]!r}.", "expected: at least two classes")
    labels_N = torch.tensor([label for folder in folders for label in folder.targets])
    if len(parts) > 1:
        test_N = torch.cat([torch.full((len(one),), held) for one, (_, held) in zip(folders, parts, strict=True)])
        pool, test = (~test_N).nonzero()[:, 0], test_N.nonzero()[:, 0]
    else:
        size = max(1, round(TEST_FRACTION * len(labels_N)))
        pool, test = hold_out(str(root), labels_N, classes, size, "or provide your own train/ and val/ folders")
    paths = tuple(path for folder in folders for path, _ in folder.samples)
    source = files(paths, data.image_size or SIDE, data.augmentation)
    return Task(data.name, len(classes), labels_N, pool, test, source, skipped=skipped)


def _parts(root: Path) -> list[tuple[Path, bool]]:
    """The folders that contain class folders, and whether each is for testing."""
    train, val, test = (root / name for name in ("train", "val", "test"))
    if not train.is_dir():
        return [(root, False)]
    if test.is_dir():
        return [(part, False) for part in (train, val) if part.is_dir()] + [(test, True)]
    if val.is_dir():
        return [(train, False), (val, True)]
    raise DataError(
        f"{str(root)!r} has train/ but neither val/ nor test/.",
        "add one of them with the same class folders,",
        f"or use {str(train)!r}, which reserves a fifth of its images for testing",
    )


def _unreadable(root: Path, cache: Path) -> tuple[str, ...]:
    """The image files that cannot be decoded. All processes share a cache; a changed file is detected."""
    paths = sorted(os.path.join(folder, name) for folder, _, names in os.walk(root, followlinks=True) for name in names)
    images = [path for path in paths if has_file_allowed_extension(path, IMG_EXTENSIONS)]
    versions = [(path, os.stat(path).st_size, os.stat(path).st_mtime_ns) for path in images if os.path.exists(path)]
    decode = Memory(cache / "readable", verbose=0).cache(_not_decoded)
    return (*decode(versions), *(path for path in images if not os.path.exists(path)))


def _not_decoded(versions: list[tuple[str, int, int]]) -> list[str]:
    found = []
    for path, _, _ in versions:
        try:
            with Image.open(path) as image:
                image.load()
        # Decoders raise OSError, SyntaxError, ValueError, struct.error, ... on invalid files.
        except Exception:
            found.append(path)
    return found
