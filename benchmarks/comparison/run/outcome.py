"""The outcome of a training run: scores, weights, rates, and the footprint check."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from comparison.run import metrics
from comparison.run.footprint_check import changes, digest, digest_of
from comparison.run.record import Outcome, SiteRate
from comparison.run.run_setup import RunSetup
from comparison.spec import arms

CHECKED_IMAGES = 200


def outcome_of(setup: RunSetup, history: Any, measured: Any) -> tuple[Outcome, Mapping[str, Any]]:
    """Score the model after its last epoch, and remove the hooks. Return the outcome and the scores of each image."""
    run, drop, task = setup.run, setup.drop, setup.task
    scored = setup.split.test if run.stage == "final" else setup.split.validation
    logits = setup.logits(scored)
    scores = metrics.score(logits, setup.task.labels_N[scored])
    weights, rate, sites = digest_of(setup.model), setup.rate, len(drop.sites) if drop else 0
    changed = changes(setup.model, drop, setup.images(scored[:CHECKED_IMAGES]), setup.footprint) if drop else None
    # The rate of Cutout is not the fraction that it drops.
    called = [] if measured is None else [site for site in measured.sites.values() if site.calls]
    drops = measured is not None and all(site.drops for site in called)
    has_target = drops and all(site.asks for site in called)
    outcome: Outcome = {
        "call": arms.text_at_rate(run.arm),
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
        "asked": measured.asked if measured and has_target else None,
        "dropped": measured.dropped if measured and drops else None,
        "realised": _site_rates(measured) if measured and has_target else [],
        "changes": changed,
        "accuracy": scores.accuracy,
        "nll": scores.nll,
        "ece": scores.ece,
        "outputs": digest([logits]),
        "data": task.sha256,
        "test_sets": list(task.test_sets) if run.stage == "final" else [],
        "steps": history.steps,
        "train_images": len(setup.split.train),
        "scored_images": len(scored),
        "skipped_images": len(setup.task.skipped),
    }
    if not outcome["test_sets"]:
        return outcome, scores.images
    return outcome, {**scores.images, "test_set": torch.stack(list(task.test_sets.values())).int().argmax(0).numpy()}


def _site_rates(measured: Any) -> list[SiteRate]:
    return [{"name": name, "asked": site.asked, "dropped": site.dropped} for name, site in measured.sites.items()]
