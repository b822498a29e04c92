"""Image datasets with one folder per class."""

from pathlib import Path

import torch
from torchvision.datasets import ImageFolder

from comparison.data.sources import files
from comparison.data.task import DataError, Task, hold_out
from comparison.spec.run_spec import Data

SIDE, TEST_FRACTION = 224, 0.2


def load(data: Data) -> Task:
    """Load `imagefolder:PATH`, a folder with one folder per class; a fixed fifth of the images is for testing."""
    root = Path(data.name.partition(":")[2])
    try:
        # torchvision names folders that do not exist, and classes without images.
        folder = ImageFolder(str(root))
    except OSError as error:
        raise DataError(f"{error}", "expected: one folder of images for each of at least two classes") from None
    if len(folder.classes) < 2:
        raise DataError(f"{str(root)!r} has only one class, {folder.classes[0]!r}.", "expected: at least two classes")
    labels_N, paths = torch.tensor(folder.targets), tuple(path for path, _ in folder.samples)
    pool, test = hold_out(str(root), labels_N, folder.classes, max(1, round(TEST_FRACTION * len(paths))))
    source = files(paths, data.image_size or SIDE, data.augmentation)
    return Task(data.name, len(folder.classes), labels_N, pool, test, source)
