"""A record as a row of a table, and back."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from comparison.run.record import Failure, Record

COLUMNS = ("key", "done", "spec", "outcome", "images", "kind", "message", "environment", "started", "seconds")


def _json(value: object) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def row_of(record: Record) -> tuple[Any, ...]:
    """The values of `COLUMNS`; ValueError if one in the outcome is not finite."""
    try:
        outcome = None if record.outcome is None else _json(record.outcome)
    except ValueError as error:
        raise ValueError(f"the outcome of run {record.key} can't be kept: {error}. It is a failure: nan.") from error
    kind, message = (record.failure.kind, record.failure.message) if record.failure else (None, None)
    rest = (_pack(record.images), kind, message, _json(record.environment), record.started, record.seconds)
    return (record.key, record.done, _json(record.spec), outcome, *rest)


def record_of(row: tuple[Any, ...]) -> Record:
    """What `row_of` made a row of; tuples in the outcome come back as lists."""
    key, done, spec, outcome, images, kind, message, environment, started, seconds = row
    return Record(
        key=key,
        spec=json.loads(spec),
        outcome=None if outcome is None else json.loads(outcome),
        images=_unpack(images),
        failure=None if done else Failure(kind, message),
        environment=json.loads(environment),
        started=started,
        seconds=seconds,
    )


def _pack(images: Mapping[str, np.ndarray]) -> bytes | None:
    if not images:
        return None
    file = io.BytesIO()
    np.savez_compressed(file, allow_pickle=False, **images)
    return file.getvalue()


def _unpack(packed: bytes | None) -> dict[str, np.ndarray]:
    if packed is None:
        return {}
    with np.load(io.BytesIO(packed), allow_pickle=False) as arrays:
        return dict(arrays)
