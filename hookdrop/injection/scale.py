"""The factor of each site's rate: by depth, by pattern or by a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from hookdrop.errors import LayerError
from hookdrop.injection.select import Layer, as_entries, entry_text, match_names

PScale: TypeAlias = str | Mapping[Any, float] | Callable[[str, int, int], float]


def factors(layers: list[Layer], p_scale: PScale) -> list[float]:
    """The factor of each layer, in their order."""
    count = len(layers)
    if p_scale == "depth":
        return [(index + 1) / count for index in range(count)]
    if p_scale == "depth_from_zero":
        if count == 1:
            raise ValueError("p_scale='depth_from_zero' gives its one site the factor 0; use 'depth' or leave it out.")
        return [index / (count - 1) for index in range(count)]
    if isinstance(p_scale, Mapping):
        return _factors_by_pattern({layer.name: layer for layer in layers}, p_scale)
    if callable(p_scale):
        return [p_scale(layer.name, index, count) for index, layer in enumerate(layers)]
    hint = "\n  one factor for all sites? multiply p by it." if isinstance(p_scale, int | float) else ""
    raise ValueError(
        f"p_scale must be 'depth', 'depth_from_zero', a mapping of patterns to factors or a function of "
        f"(name, index, count), got {p_scale!r}.{hint}"
    )


def _factors_by_pattern(layers: dict[str, Layer], p_scale: Mapping[Any, float]) -> list[float]:
    factors: dict[str, tuple[str, float]] = {}
    for pattern, factor in p_scale.items():
        names = [name for entry in as_entries(pattern, "p_scale") for name in match_names(layers, entry)]
        if not names:
            raise LayerError(
                f"p_scale has {entry_text(pattern)}, which matches none of the {len(layers)} chosen layers.\n"
                f"  they are: {', '.join(map(repr, list(layers)[:6]))}{', ...' if len(layers) > 6 else ''}"
            )
        for name in names:
            if name in factors:
                raise LayerError(
                    f"p_scale matches {name!r} twice, by {factors[name][0]} and {entry_text(pattern)}: which factor?"
                )
            factors[name] = (entry_text(pattern), factor)
    return [factors[name][1] if name in factors else 1.0 for name in layers]
