"""Accuracy, negative log-likelihood and calibration of a classifier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from comparison.analysis.schema import Bin, Metric

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


def reliability(confidence_N: NDArray[np.generic], correct_N: NDArray[np.generic], bins: int = BINS) -> list[Bin]:
    """Mean confidence and fraction right of the predictions in each bin that has any, in order."""
    confidences, places = confidence_N.astype(np.float64), bin_of(confidence_N, bins)
    counts, confident, right = (
        np.bincount(places, weights=weights, minlength=bins) for weights in (None, confidences, correct_N)
    )
    return [
        Bin(confidence=confident[i] / counts[i], accuracy=right[i] / counts[i], count=int(counts[i]))
        for i in np.flatnonzero(counts)
    ]


def bin_of(confidence_N: NDArray[np.generic], bins: int = BINS) -> NDArray[np.intp]:
    """The bin of each confidence: the m-th of M has those above (m - 1) / M, up to and with m / M."""
    return np.searchsorted(np.arange(1, bins) / bins, confidence_N.astype(np.float64), side="left")


def resampled(
    images: Mapping[str, NDArray[np.generic]], counts_BN: NDArray[np.uint8]
) -> dict[Metric, NDArray[np.float64]]:
    """Each metric on each of B resamples of the images.

    Args:
        images: as in `Scores`.
        counts_BN: (B, N), how often each image is in each resample.
    """
    confidence_N, correct_N = (images[name].astype(np.float64) for name in ("confidence", "correct"))
    size = len(correct_N)
    gaps_NM = np.zeros((size, BINS))
    gaps_NM[np.arange(size), bin_of(confidence_N)] = confidence_N - correct_N
    columns = np.column_stack([correct_N, images["nll"].astype(np.float64), gaps_NM])
    blocks = np.array_split(counts_BN, max(1, counts_BN.size // 2_000_000))
    means = np.concatenate([block.astype(np.float64) @ columns for block in blocks]) / size
    return {"accuracy": 100 * means[:, 0], "nll": means[:, 1], "ece": 100 * np.abs(means[:, 2:]).sum(axis=1)}


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
