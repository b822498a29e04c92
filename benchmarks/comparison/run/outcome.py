"""The outcome of a training run: scores, weights, rates, and whether the hooks came off without a trace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import hookdrop
from comparison.run import metrics
from comparison.run.footprint_check import changes, digest, digest_of
from comparison.run.record import Mask, Outcome, Realised
from comparison.run.run_setup import RunSetup

CHECKED_IMAGES = 200


def outcome_of(setup: RunSetup, history: Any, measured: Any) -> tuple[Outcome, Mapping[str, Any]]:
    """The outcome after the last epoch, whichever was the best, and the scored images' numbers; the hooks come off."""
    run, drop = setup.run, setup.drop
    scored = setup.split.test if run.stage == "final" else setup.split.validation
    logits = setup.logits(scored)
    scores = metrics.score(logits, setup.task.labels_N[scored])
    weights, rate, sites = digest_of(setup.model), setup.rate, len(drop.sites) if drop else 0
    mask, left = None, None
    checked = setup.images(scored[:CHECKED_IMAGES])
    if drop:
        mask = _mask(setup, drop, checked[:1])
        left = changes(setup.model, drop, checked, setup.footprint)
    # Of Cutout, what is dropped is not what its rate asks for.
    drops = measured is not None and all(site.drops for site in measured.sites.values())
    asks = measured is not None and drops and all(site.asked_sum is not None for site in measured.sites.values())
    outcome: Outcome = {
        "call": setup.call,
        "sites": sites,
        "flags": setup.flags,
        "weights_before": setup.weights,
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
        "changes": left,
        "mask": mask,
        "accuracy": scores.accuracy,
        "nll": scores.nll,
        "ece": scores.ece,
        "outputs": digest([logits]),
        "steps": history.steps,
        "train_images": len(setup.split.train),
        "scored_images": len(scored),
        "skipped_images": len(setup.task.skipped),
    }
    return outcome, scores.images


def _realised(measured: Any) -> list[Realised]:
    return [{"name": name, "asked": site.asked, "dropped": site.dropped} for name, site in measured.sites.items()]


def _mask(setup: RunSetup, drop: hookdrop.Injection, x_1CHW: Tensor) -> Mask | None:
    """One map of one sample at the first site that has maps, at the final rate; None if nothing is dropped there."""
    if not setup.rate:
        return None
    setup.model.eval()
    with drop.sampling(), drop.recording() as recorded, torch.no_grad():
        setup.model(x_1CHW)
    for site in drop.sites:
        if site.name not in recorded:
            continue  # its rate is 0
        kept = recorded[site.name].mask
        if kept is not None and kept.dim() == 4:
            dropped_somewhere = (~kept[0]).flatten(1).any(1).nonzero()
            channel = int(dropped_somewhere[0]) if len(dropped_somewhere) else 0
            return {"site": site.name, "rows": kept[0, channel].int().cpu().tolist()}
    return None
