"""Modules that wrap a model (DistributedDataParallel, torch.compile, an EMA, ...), known by their type."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache

from torch import nn

# The attribute that holds what is wrapped, by the wrapper's class. None of these is imported: where a module was not
# loaded there can be no instance of its classes.
_WRAPPERS = {
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": "_fsdp_wrapped_module",
    "torch.optim.swa_utils.AveragedModel": "module",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.CheckpointWrapper": "_checkpoint_wrapped_module",
    "timm.utils.model_ema.ModelEmaV2": "module",
    "timm.utils.model_ema.ModelEmaV3": "module",
    "peft.peft_model.PeftModel": "base_model",
    "peft.tuners.tuners_utils.BaseTuner": "model",
}

SEGMENTS = set(_WRAPPERS.values())
"""The attributes that hold what is wrapped."""


def _attribute_of(cls: type) -> str | None:
    """The attribute in which instances of a wrapper class hold what they wrap; None for other classes."""
    for name, attribute in _WRAPPERS.items():
        module, _, class_name = name.rpartition(".")
        wrapper = getattr(sys.modules.get(module), class_name, None)
        if wrapper is not None and issubclass(cls, wrapper):
            return attribute
    return None


attribute_of: Callable[[type], str | None] = lru_cache(maxsize=1024)(_attribute_of)


def unwrapped(module: nn.Module) -> nn.Module:
    """What is inside all wrappers around `module`."""
    inner: object = module
    while isinstance(inner, nn.Module):
        module = inner
        attribute = attribute_of(type(module))
        inner = getattr(module, attribute, None) if attribute else None
    return module
