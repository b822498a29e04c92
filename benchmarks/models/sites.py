"""Where hooks go in a model that nobody looked at, and which regularizer suits the rank there.

Every normalization layer that is called is a site, or every convolution and linear layer if there is no normalization.
Maps and clips get DropBlock, tokens and vectors Dropout.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from torch import nn
from torch.nn.modules.conv import _ConvNd

import hookdrop

P = 0.1
BLOCK = 3
# Norms of queries and keys: their 4-D tensors are (samples, heads, tokens, channels).
_HEADS = re.compile(r".*\b([qkv]|query|key|value)_?(norm|ln)|.*\bnorm_?[qkv]\b")


Chooser = Callable[[hookdrop.Plan], dict[str, hookdrop.Regularizer]]


def regularizers(plan: hookdrop.Plan) -> dict[str, hookdrop.Regularizer]:
    """What goes where, by the names of the layers."""
    called = [site for site in plan.sites if site.name and site.calls and site.shape]
    chosen = [site for site in called if _is_norm(site.module)]
    chosen = chosen or [site for site in called if isinstance(site.module, _ConvNd | nn.Linear)]
    return {site.name: _suiting(site.name, site.module, site.shape or ()) for site in chosen}


def _is_norm(module: nn.Module) -> bool:
    """Whether it is a normalization, and not a block with one in it."""
    inside = any(True for child in module.children() for _ in child.parameters())
    return "norm" in type(module).__name__.lower() and not inside


def _suiting(name: str, module: nn.Module, shape: tuple[int, ...]) -> hookdrop.Regularizer:
    if len(shape) not in (4, 5) or _HEADS.fullmatch(name):
        return hookdrop.Dropout(P)
    # Norms over the last axis; those of timm that take NCHW maps have it in their names. Its GlobalResponseNorm tells.
    over_last = hasattr(module, "normalized_shape") and "2d" not in type(module).__name__.lower()
    last = over_last or getattr(module, "channel_dim", 1) == -1
    return hookdrop.DropBlock(P, BLOCK, channel_dim=-1) if last else hookdrop.DropBlock(P, BLOCK)


def label(regularizer: hookdrop.Regularizer) -> str:
    """Its class, and whether it reads the channels from the last axis."""
    last = " NHWC" if getattr(regularizer, "channel_dim", None) == -1 else ""
    return type(regularizer).__name__ + last
