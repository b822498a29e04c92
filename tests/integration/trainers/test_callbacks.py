"""What the callbacks of all trainers refuse."""

from __future__ import annotations

import importlib
from typing import Any

import pytest


@pytest.mark.parametrize("trainer", ["fastai", "lightning", "transformers"])
def test_specs_that_are_malformed_or_missing_are_refused(trainer: str) -> None:
    pytest.importorskip(trainer)
    callback: Any = importlib.import_module(f"hookdrop.integrations.{trainer}").InjectionCallback
    with pytest.raises(TypeError, match=r"no argument 'layer'(?s:.)*layers"):
        callback({"regularizer": "Dropout(p=0.1)", "layer": "1"})
    with pytest.raises(TypeError, match="at least one spec"):
        callback()
    spec = {"regularizer": "Dropout(p=0.1)", "layers": "1"}
    with pytest.raises(TypeError, match=r"InjectionCallback\(\*specs\)"):
        callback([spec, spec])
    for specs in () if trainer == "fastai" else (spec, [spec]):
        assert repr(callback(specs=specs)) == "<InjectionCallback: 1 spec>"
