"""Turn failures of a run into failed records."""

from __future__ import annotations

import errno
import gc
import json
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hookdrop
from comparison.engines.base import Job
from comparison.engines.store import StoreError
from comparison.run.environment import environment
from comparison.run.record import Beat, Failure, Kind, Record
from comparison.spec.run_spec import Run

FRAMES = 4
LONGEST = 2000
_NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "cannot allocate memory")
# The last two are raised by torch.save, without the cause.
_NO_ROOM = ("database or disk is full", "no space left on device", "failed writing file", "unexpected pos ")
_KILLED = ("is killed by signal", "exited unexpectedly")
_DISK_CODES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def prepare(threads: int) -> None:
    """Prepare a worker process: set the number of threads, and turn hookdrop's warnings into errors."""
    torch.set_num_threads(threads)
    warnings.simplefilter("error", hookdrop.HookdropWarning)


def guarded(job: Job, run: Run, beat: Beat, scratch: Path) -> Record:
    """Run the job; return a failed record if it raises or its record has a number that is not finite.

    KeyboardInterrupt is not caught.
    """
    started, clock = datetime.now(UTC).isoformat(timespec="seconds"), time.perf_counter()
    try:
        record = job(run, beat, scratch)
        bad = not_finite(record)
        failure = Failure("nan", f"not finite: {', '.join(bad)}") if bad else None
    except (Exception, SystemExit) as error:
        record, failure = None, failure_of(error)
    if record is not None and failure is None:
        return record
    # Free the memory that the traceback kept alive.
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
    return replace(failed(run, failure), started=started, seconds=time.perf_counter() - clock)  # type: ignore[arg-type]


def failed(run: Run, failure: Failure) -> Record:
    """A failed record."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return Record(run.key, run.model_dump(mode="json"), failure=failure, environment=environment(), started=now)


def failure_of(error: BaseException) -> Failure:
    """Classify an exception by the first known kind in its chain of causes; the message ends with stack frames."""
    chain = list(_chain(error))
    kinds: list[Kind] = [kind for each in chain if (kind := _kind(each)) != "error"]
    frames = traceback.extract_tb(chain[-1].__traceback__)[-FRAMES:]
    where = "".join(f"\n  {'/'.join(Path(at.filename).parts[-2:])}:{at.lineno} in {at.name}" for at in frames)
    text = "\nfrom ".join(f"{type(each).__name__}: {each}"[:LONGEST] for each in chain)
    return Failure(kinds[0] if kinds else "error", text + where)


def not_finite(record: Record) -> list[str]:
    """Names of the values of a record that are NaN or infinite."""
    outcome = [name for name, value in (record.outcome or {}).items() if not _finite(value)]
    return outcome + [f"images' {name}" for name, array in record.images.items() if not np.isfinite(array).all()]


def _finite(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return False
    return True


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)


def _kind(error: BaseException) -> Kind:
    text = str(error).lower()
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, FloatingPointError):
        return "nan"
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or number == errno.ENOMEM:
        return "memory"
    if number in _DISK_CODES or (isinstance(error, StoreError) and error.kind == "disk"):
        return "disk"
    if isinstance(error, RuntimeError) and any(words in text for words in _NO_MEMORY):
        return "memory"
    if any(words in text for words in _NO_ROOM):
        return "disk"
    if isinstance(error, RuntimeError) and "dataloader worker" in text and any(words in text for words in _KILLED):
        return "killed"
    return "error"
