"""Names of modules: globs, and wrappers around a model, such as DistributedDataParallel, torch.compile and EMA."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import lru_cache

from torch import nn

from hookdrop.core.errors import LayerError


@lru_cache(maxsize=1024)
def glob_expression(pattern: str) -> re.Pattern[str]:
    """Compile a glob over dotted names into a regular expression.

    `*`, `?`, `[12]` and `[!a]` match within one segment. `**.` at the start or in the middle matches zero or more
    segments; `.**` at the end and `**` alone match one or more.

    Example:
        >>> bool(glob_expression("**.bn[12]").fullmatch("layer1.0.bn2"))
        True
    """
    *before, last = pattern.split(".")
    parts = [r"(?:[^.]+\.)*" if segment == "**" else _segment_expression(segment) + r"\." for segment in before]
    try:
        return re.compile("".join(parts) + (r"[^.]+(?:\.[^.]+)*" if last == "**" else _segment_expression(last)))
    except re.error as error:
        raise LayerError(f"cannot parse the glob {pattern!r}: {error}.") from None


def _segment_expression(segment: str) -> str:
    def translated(token: re.Match[str]) -> str:
        negated, inside = token.groups()
        if inside is None:
            return {"*": "[^.]*", "?": "[^.]"}.get(token[0]) or re.escape(token[0])
        escaped = re.sub(r"([\\\[\]^&~|])", r"\\\1", inside)
        return f"(?![.])[{'^' if negated else ''}{escaped}]"

    return re.sub(r"(?s)\[(!|(?!!))(.[^]]*)\]|.", translated, segment)


def check_model(model: object) -> None:
    """Raise `TypeError` if `model` is not a module."""
    if not isinstance(model, nn.Module):
        hint = "\n  for several models: for model in models: inject(model, ...)" * isinstance(
            model, list | tuple | dict
        )
        raise TypeError(f"the model must be a torch.nn.Module, got {type(model).__name__}.{hint}")


# --- wrappers

# The attribute that holds the wrapped module, by the wrapper's class. None of these is imported: if a module was not
# loaded, no instances of its classes exist.
_WRAPPERS = {
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": "_fsdp_wrapped_module",
    "torch.optim.swa_utils.AveragedModel": "module",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.CheckpointWrapper": "_checkpoint_wrapped_module",
    "timm.utils.model_ema.ModelEmaV2": "module",
    "timm.utils.model_ema.ModelEmaV3": "module",
    "timm.task.task.TrainingTask": "trainable_module",
    "lightning.fabric.wrappers._FabricModule": "_original_module",
    "deepspeed.runtime.engine.DeepSpeedEngine": "module",
    "ema_pytorch.ema_pytorch.EMA": "ema_model",
    "opacus.grad_sample.gsm_base.AbstractGradSampleModule": "_module",
    "peft.peft_model.PeftModel": "base_model",
    "peft.tuners.tuners_utils.BaseTuner": "model",
}

WRAPPER_ATTRIBUTES = set(_WRAPPERS.values())  # the attributes that hold a wrapped module


def _wrapped_attribute(cls: type) -> str | None:
    for name, attribute in _WRAPPERS.items():
        module, _, class_name = name.rpartition(".")
        wrapper = getattr(sys.modules.get(module), class_name, None)
        if wrapper is not None and issubclass(cls, wrapper):
            return attribute
    return None


wrapped_attribute: Callable[[type], str | None] = lru_cache(maxsize=1024)(_wrapped_attribute)


def unwrapped(module: nn.Module) -> nn.Module:
    inner: object = module
    while isinstance(inner, nn.Module):
        module = inner
        attribute = wrapped_attribute(type(module))
        inner = getattr(module, attribute, None) if attribute else None
    return module


def module_at(model: nn.Module, name: str) -> nn.Module | None:
    """Return the module of this name, which may be a wrapper; None if a wrapper hides it, or there is none."""
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None
