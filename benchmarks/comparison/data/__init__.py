"""The data of a comparison: `load` it, and `check` beforehand that it is enough."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable

from comparison.data import cifar, digits, folder, synthetic
from comparison.data.checking import check_seeds
from comparison.data.errors import DataError
from comparison.data.task import Split, Task
from comparison.spec.run_spec import Data

__all__ = ["DataError", "Split", "Task", "check", "load"]

FOLDER = "imagefolder"
_LOADERS: dict[str, Callable[[Data], Task]] = {
    "digits": digits.load,
    "digits-noisy": digits.load,
    "synthetic-cue": synthetic.load,
    "cifar10": cifar.load,
    "cifar100": cifar.load,
}
NAMES = (*_LOADERS, f"{FOLDER}:PATH")


def load(data: Data) -> Task:
    """The data; what was loaded once is kept for as long as the process lives.

    Raises:
        DataError: its name is not known, or it can't be had.
    """
    return _load(data.model_copy(update={"train_size": None, "validation_size": None, "workers": 0}))


def check(data: Data, seeds: int) -> list[str]:
    """See that the data can be had and has enough images for so many seeds; what to know about it, in sentences.

    CIFAR is downloaded here, in one process, if it is not there.

    Raises:
        DataError: it can't, or it has not.
    """
    return check_seeds(load(data), data.train_size, data.validation_size, seeds)


@functools.lru_cache(maxsize=8)
def _load(data: Data) -> Task:
    kind, _, path = data.name.partition(":")
    if kind == FOLDER and path:
        return folder.load(data)
    if kind == FOLDER:
        raise DataError(f"{data.name!r} does not say which folder.", f"write it as {FOLDER}:PATH")
    if data.name in _LOADERS:
        return _LOADERS[data.name](data)
    near = [NAMES[[*_LOADERS, FOLDER].index(name)] for name in difflib.get_close_matches(kind, [*_LOADERS, FOLDER])]
    raise DataError(
        f"there is no data named {data.name!r}.",
        *([f"did you mean: {', '.join(map(repr, near))}"] if near else []),
        f"there are:    {', '.join(NAMES)}",
    )
