"""scikit-learn's digits: 1,797 handwritten digits of 8x8 pixels."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.nn.functional import interpolate

from comparison.data.sources import stored
from comparison.data.task import Task
from comparison.spec.run_spec import Data

SIZE = 32
TEST = 797
NOISE = 0.2


def load(data: Data) -> Task:
    """Load the digits, enlarged and scaled to [-1, 1]; `digits-noisy` has 20 % wrong training labels."""
    found = load_digits()
    size = data.image_size or SIZE
    x_N1HW = torch.tensor(found.images, dtype=torch.float32)[:, None] / 8 - 1
    x_N1HW = interpolate(x_N1HW, size=(size, size), mode="bilinear", align_corners=False)
    pool, test = train_test_split(torch.arange(len(x_N1HW)), test_size=TEST, stratify=found.target, random_state=0)
    source = stored(x_N1HW, size, data.augmentation, fill=-1.0)
    default = NOISE if data.name == "digits-noisy" else 0.0
    noise = default if data.label_noise is None else data.label_noise
    labels_N = torch.tensor(found.target, dtype=torch.int64)
    return Task(data.name, 10, labels_N, pool.sort().values, test.sort().values, source, noise)
