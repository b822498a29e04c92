"""Dropout for self-normalizing networks."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from hookdrop import in_graph
from hookdrop.functional.channels import check_channels
from hookdrop.functional.rates import checked_rate
from hookdrop.utils.validation import floating


def alpha_dropout(x: Tensor, p: float | Tensor, training: bool = True) -> Tensor:
    """Set elements to SELU's negative saturation value, keeping mean and variance.

    Reference: Klambauer et al. 2017, "Self-normalizing neural networks", arXiv:1706.02515, section 3.
    """
    floating(x, "alpha_dropout")
    p = checked_rate(p, owner="alpha_dropout")
    if isinstance(p, Tensor):
        return in_graph.alpha_dropout(x, p) if training else x
    return F.alpha_dropout(x, p, True) if training and p > 0.0 else x


def feature_alpha_dropout(x: Tensor, p: float | Tensor, training: bool = True) -> Tensor:
    """`alpha_dropout` of whole channels of (N, C, ...)."""
    floating(x, "feature_alpha_dropout")
    p = checked_rate(p, owner="feature_alpha_dropout")
    check_channels(x.shape, "feature_alpha_dropout")
    if isinstance(p, Tensor):
        return in_graph.feature_alpha_dropout(x, p) if training else x
    return F.feature_alpha_dropout(x, p, True) if training and p > 0.0 else x
