"""Accuracy, negative log-likelihood and calibration of a classifier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

BINS = 15


@dataclass(frozen=True)
class Scores:
    """How a model did on the images that it was scored on."""

    accuracy: float
    """Per cent."""
    nll: float
    """Mean, in nats."""
    ece: float
    """Per cent."""
    images: Mapping[str, NDArray[np.generic]]
    """`correct` (bool), `nll` and `confidence` (float32), each (N,): what a record keeps."""


def score(logits_NC: Tensor, y_N: Tensor) -> Scores:
    """Score logits in double precision.

    The ECE is that of the confidences as they are kept, so that a record gives it again.

    Args:
        logits_NC: (N, C), finite.
        y_N: (N,), classes from 0 to C - 1.

    Raises:
        ValueError: the shapes do not fit, there is no image, or a label is no class.
        FloatingPointError: a logit is infinite or not a number.
    """
    _check(logits_NC, y_N)
    log_p_NC = logits_NC.detach().double().log_softmax(dim=1).cpu()
    labels_N = y_N.detach().long().cpu()
    nll_N = -log_p_NC.gather(1, labels_N[:, None])[:, 0].numpy()
    top_N, predicted_N = log_p_NC.max(dim=1)
    correct_N = (predicted_N == labels_N).numpy()
    confidence_N = top_N.exp().numpy().astype(np.float32)
    images = {"correct": correct_N, "nll": nll_N.astype(np.float32), "confidence": confidence_N}
    return Scores(100 * float(correct_N.mean()), float(nll_N.mean()), ece(confidence_N, correct_N), images)


def ece(confidence_N: NDArray[np.generic], correct_N: NDArray[np.bool_], bins: int = BINS) -> float:
    """Expected calibration error in per cent (Guo et al. 2017, equation 3), over bins of equal width."""
    gaps_N = confidence_N.astype(np.float64) - correct_N
    sums = np.bincount(bin_of(confidence_N, bins), weights=gaps_N, minlength=bins)
    return 100 * float(np.abs(sums).sum()) / len(gaps_N)


def bin_of(confidence_N: NDArray[np.generic], bins: int = BINS) -> NDArray[np.intp]:
    """The bin of each confidence: the m-th of M has those above (m - 1) / M, up to and with m / M."""
    return np.searchsorted(np.arange(1, bins) / bins, confidence_N.astype(np.float64), side="left")


def _check(logits_NC: Tensor, y_N: Tensor) -> None:
    if logits_NC.ndim != 2 or y_N.shape != logits_NC.shape[:1] or not logits_NC.numel():
        raise ValueError(
            f"logits have the shape {tuple(logits_NC.shape)} and labels {tuple(y_N.shape)}; "
            "(N, C) and (N,) are needed, with one image or more. Nothing was scored."
        )
    if y_N.min() < 0 or y_N.max() >= logits_NC.shape[1]:
        raise ValueError(
            f"labels go from {int(y_N.min())} to {int(y_N.max())}; the model knows the classes "
            f"0 to {logits_NC.shape[1] - 1}. Nothing was scored."
        )
    if wrong := int((~logits_NC.isfinite()).any(dim=1).sum()):
        raise FloatingPointError(f"the logits of {wrong} of {len(logits_NC)} images are not finite; none was scored.")
