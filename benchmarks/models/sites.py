"""Choose the sites of an arbitrary model, and a regularizer that fits the rank of each.

The sites are all normalization layers that run or, without any, all convolution and linear layers. 2-D and 3-D maps
get DropBlock; tokens and vectors get Dropout.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from torch import nn
from torch.nn.modules.conv import _ConvNd

import hookdrop

P = 0.1
BLOCK = 3
# Query and key norms: their 4-D tensors are (samples, heads, tokens, channels).
_HEADS = re.compile(r".*\b([qkv]|query|key|value)_?(norm|ln)|.*\bnorm_?[qkv]\b")

SiteChooser = Callable[[hookdrop.Plan], dict[str, hookdrop.Regularizer]]


def choose_regularizers(plan: hookdrop.Plan) -> dict[str, hookdrop.Regularizer]:
    """Return the regularizer of each chosen layer, by layer name."""
    called = [site for site in plan.sites if site.name and site.calls and site.shape]
    chosen = [site for site in called if _is_norm(site.module)]
    chosen = chosen or [site for site in called if isinstance(site.module, _ConvNd | nn.Linear)]
    return {site.name: _regularizer_for(site.name, site.module, site.shape or ()) for site in chosen}


def _is_norm(module: nn.Module) -> bool:
    """Return whether `module` is a normalization layer itself, not a block that contains one."""
    has_submodules = any(True for child in module.children() for _ in child.parameters())
    return "norm" in type(module).__name__.lower() and not has_submodules


def _regularizer_for(name: str, module: nn.Module, shape: tuple[int, ...]) -> hookdrop.Regularizer:
    if len(shape) not in (4, 5) or _HEADS.fullmatch(name):
        return hookdrop.Dropout(P)
    # Layer norms normalize the last axis, except timm's "2d" classes (NCHW). GlobalResponseNorm states its axis.
    normalizes_last = hasattr(module, "normalized_shape") and "2d" not in type(module).__name__.lower()
    channels_last = normalizes_last or getattr(module, "channel_dim", 1) == -1
    return hookdrop.DropBlock(P, BLOCK, channel_dim=-1) if channels_last else hookdrop.DropBlock(P, BLOCK)


def label(regularizer: hookdrop.Regularizer) -> str:
    """Return the class name, with " NHWC" if the channels are the last axis."""
    layout = " NHWC" if getattr(regularizer, "channel_dim", None) == -1 else ""
    return type(regularizer).__name__ + layout
