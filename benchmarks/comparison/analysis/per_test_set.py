"""Results on each of several test sets, from the scores of the individual images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from comparison.run.metrics import ece
from comparison.run.record import Outcome, Record

TEST_SET = "test_set"
"""The array in `Record.images` with the index of each image's test set."""


def by_test_set(records: Mapping[str, Record]) -> Mapping[str, Mapping[str, Record]]:
    """The records for each test set, with the metrics on its images; `{"": records}` if there is only one."""
    scored = [record.outcome["test_sets"] for record in records.values() if record.outcome]
    names = list(dict.fromkeys(name for names in scored for name in names))
    if not names:
        return {"": records}
    return {name: {key: _on(name, record) for key, record in records.items()} for name in names}


def _on(name: str, record: Record) -> Record:
    """The record with only the images of one test set; records without test sets, as of tuning, are unchanged."""
    if record.outcome is None or name not in record.outcome["test_sets"]:
        return record
    chosen = record.images[TEST_SET] == record.outcome["test_sets"].index(name)
    images = {key: values[chosen] for key, values in record.images.items()}
    outcome: Outcome = {
        **record.outcome,
        "accuracy": 100 * float(images["correct"].mean()),
        "nll": float(images["nll"].mean(dtype=np.float64)),
        "ece": ece(images["confidence"], images["correct"]),
        "scored_images": int(chosen.sum()),
    }
    return replace(record, outcome=outcome, images=images)
