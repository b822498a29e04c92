"""Callbacks for trainers, imported on first use: `hookdrop.integrations.lightning`, `.transformers`, `.fastai`."""

import importlib
from typing import Any

_TRAINERS = ("fastai", "lightning", "transformers")


def __getattr__(name: str) -> Any:
    if name in _TRAINERS:
        return importlib.import_module(f"hookdrop.integrations.{name}")
    raise AttributeError(f"module 'hookdrop.integrations' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_TRAINERS})
