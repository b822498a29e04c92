"""What came out of a training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import hookdrop
from comparison.run import fingerprints, metrics
from comparison.run import footprint_check as unchanged
from comparison.run.record import Mask, Outcome, Realised
from comparison.run.run_setup import Trainee
from comparison.run.scoring import images_of, logits_of

CHECKED_IMAGES = 200


def concluded(trainee: Trainee, history: Any, measured: Any) -> tuple[Outcome, Mapping[str, Any]]:
    """The outcome after the last epoch, whichever was the best, and the scored images' numbers; the hooks come off."""
    run, drop = trainee.run, trainee.drop
    scored = trainee.split.test if run.stage == "final" else trainee.split.validation
    logits = logits_of(trainee, scored)
    scores = metrics.score(logits, trainee.task.labels_N[scored])
    weights, rate, sites = fingerprints.of_model(trainee.model), trainee.rate, len(drop.sites) if drop else 0
    mask, changes = None, None
    checked = images_of(trainee, scored[:CHECKED_IMAGES])
    if drop:
        mask = _mask(trainee, drop, checked[:1])
        changes = unchanged.changes(trainee.model, drop, checked, trainee.face)
    # Of Cutout, what is dropped is not what its rate asks for.
    drops = measured is not None and all(site.drops for site in measured.sites.values())
    asks = measured is not None and drops and all(site.asked_sum is not None for site in measured.sites.values())
    outcome: Outcome = {
        "call": trainee.call,
        "sites": sites,
        "flags": trainee.flags,
        "weights_before": trainee.weights,
        "weights_after": weights,
        "batches": history.batches,
        "first_loss": history.first_loss,
        "train_loss": history.train_loss,
        "validation": history.validation,
        "rates": history.rates,
        "rate_at_end": rate,
        "ramp_end": history.ramp_end,
        "asked": measured.asked if measured and asks else None,
        "dropped": measured.dropped if measured and drops else None,
        "realised": _realised(measured) if measured and asks else [],
        "changes": changes,
        "mask": mask,
        "accuracy": scores.accuracy,
        "nll": scores.nll,
        "ece": scores.ece,
        "outputs": fingerprints.of([logits]),
        "steps": history.steps,
        "train_images": len(trainee.split.train),
        "scored_images": len(scored),
        "skipped_images": len(trainee.task.skipped),
    }
    return outcome, scores.images


def _realised(measured: Any) -> list[Realised]:
    return [{"name": name, "asked": site.asked, "dropped": site.dropped} for name, site in measured.sites.items()]


def _mask(trainee: Trainee, drop: hookdrop.Injection, x_1CHW: Tensor) -> Mask | None:
    """One map of one sample at the first site that has maps, at the final rate; None if nothing is dropped there."""
    if not trainee.rate:
        return None
    trainee.model.eval()
    with drop.sampling(), drop.recording() as recorded, torch.no_grad():
        trainee.model(x_1CHW)
    for site in drop.sites:
        if site.name not in recorded:
            continue  # its rate is 0
        kept = recorded[site.name].mask
        if kept is not None and kept.dim() == 4:
            dropped_somewhere = (~kept[0]).flatten(1).any(1).nonzero()
            channel = int(dropped_somewhere[0]) if len(dropped_somewhere) else 0
            return {"site": site.name, "rows": kept[0, channel].int().cpu().tolist()}
    return None
