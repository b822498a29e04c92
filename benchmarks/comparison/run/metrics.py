"""Accuracy, negative log-likelihood and calibration of a classifier."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

BINS = 15


@dataclass(frozen=True)
class Scores:
    accuracy: float  # in percent
    nll: float  # mean, in nats
    ece: float  # in percent
    images: Mapping[str, NDArray[np.generic]]  # as in a record


def score(logits_NC: Tensor, y_N: Tensor) -> Scores:
    """Score logits in double precision.

    The ECE uses the stored float32 confidences, so that it can be recomputed from a record.
    """
    if wrong := int((~logits_NC.isfinite()).any(dim=1).sum()):
        raise FloatingPointError(
            f"the logits of {wrong} of {len(logits_NC)} images are not finite. Nothing was scored."
        )
    log_p_NC = logits_NC.detach().double().log_softmax(dim=1).cpu()
    labels_N = y_N.detach().long().cpu()
    nll_N = -log_p_NC.gather(1, labels_N[:, None])[:, 0].numpy()
    top_N, predicted_N = log_p_NC.max(dim=1)
    correct_N = (predicted_N == labels_N).numpy()
    confidence_N = top_N.exp().numpy().astype(np.float32)
    images = {"correct": correct_N, "nll": nll_N.astype(np.float32), "confidence": confidence_N}
    return Scores(100 * float(correct_N.mean()), float(nll_N.mean()), ece(confidence_N, correct_N), images)


def ece(confidence_N: NDArray[np.generic], correct_N: NDArray[np.bool_], bins: int = BINS) -> float:
    """Expected calibration error in percent (Guo et al. 2017, equation 3), with equal-width bins."""
    gaps_N = confidence_N.astype(np.float64) - correct_N
    sums = np.bincount(bin_of(confidence_N, bins), weights=gaps_N, minlength=bins)
    return 100 * float(np.abs(sums).sum()) / len(gaps_N)


def bin_of(confidence_N: NDArray[np.generic], bins: int = BINS) -> NDArray[np.intp]:
    """The bin index of each confidence; bin m of M covers ((m - 1) / M, m / M]."""
    return np.searchsorted(np.arange(1, bins) / bins, confidence_N.astype(np.float64), side="left")
