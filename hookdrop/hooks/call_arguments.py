"""What hooks read from the arguments of a layer's call."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hookdrop.errors import InjectionError
from hookdrop.utils.tensor_tree import bind_arguments, first_tensor

_CACHES = ("past_key_values", "past_key_value", "layer_past", "past", "cache", "cache_params")


def hidden_states(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the first floating-point tensor among the arguments, in the order of the signature."""
    return first_tensor(bind_arguments(module, args, kwargs))


def refuse_cache(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], where: str) -> None:
    """Raise `InjectionError` if the call fills a KV cache, which would keep the keys of what is dropped."""
    bound = bind_arguments(module, args, kwargs)
    for name in _CACHES:
        if bound.get(name) is not None:
            raise InjectionError(
                f"{where}: the layer fills a KV cache ({name}), which would hold keys of dropped layers or lack rows.\n"
                "  model.config.use_cache = False   or pass use_cache=False to the model, or to TrainingArguments"
            )
