"""Parts outside of the core, by name. The core imports no other folder: `hookdrop/__init__.py` registers them here."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any


class Parts(dict[str, Any]):
    """Objects by name, each imported from `"module:name"` when it is first read."""

    def __init__(self, places: Mapping[str, str]) -> None:
        super().__init__()  # with what was read
        self.places = dict(places)

    keys, values, items, get = Mapping.keys, Mapping.values, Mapping.items, Mapping.get  # type: ignore[assignment]

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)

    def __contains__(self, name: object) -> bool:
        return name in self.places

    def __missing__(self, name: str) -> Any:
        module, _, attribute = self.places[name].partition(":")
        self[name] = found = getattr(importlib.import_module(module), attribute)
        return found


KINDS = Parts(dict.fromkeys(("output", "input"), "hookdrop.core.hook:SiteHook"))
"""The class that drives the sites of each kind: where they are (`at`), or what their regularizer needs."""

REGULARIZERS, RECIPES = Parts({}), Parts({})
"""Those of hookdrop, which `parse` knows."""

PARTS = Parts({})
"""What functions of the core delegate to."""
