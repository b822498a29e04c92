"""Train a run in a worker process. Failures become records, so that the other runs continue."""

from __future__ import annotations

import errno
import gc
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch

import hookdrop
from comparison.run.environment import environment
from comparison.run.record import Failure, Kind, Record
from comparison.spec.run_spec import Run

Job = Callable[[Run, Path], Record]
"""Trains one run, with a folder for its checkpoints; must be picklable."""

FRAMES = 4
LONGEST = 2000
_NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "cannot allocate memory")
# `torch.save` raises the last two without the cause.
_NO_ROOM = ("no space left on device", "failed writing file", "unexpected pos ")
_DISK_CODES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class EngineError(Exception):
    """The engine cannot run; nothing was trained."""


def prepare() -> None:
    """Prepare a worker process: one thread, and warnings of hookdrop are errors."""
    torch.set_num_threads(1)
    warnings.simplefilter("error", hookdrop.HookdropWarning)


def guarded(job: Job, run: Run, scratch: Path) -> Record:
    """Run the job; return a failed record if it raises. KeyboardInterrupt is not caught."""
    started, clock = datetime.now(UTC).isoformat(timespec="seconds"), time.perf_counter()
    try:
        return job(run, scratch)
    except (Exception, SystemExit) as error:
        failure = failure_of(error)
    # Free the memory that the traceback kept alive.
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
    return replace(failed(run, failure), started=started, seconds=time.perf_counter() - clock)


def failed(run: Run, failure: Failure) -> Record:
    """A failed record."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return Record(run.key, run.model_dump(mode="json"), failure=failure, environment=environment(), started=now)


def killed(run: Run, how: object) -> Record:
    """The record of a run whose worker process ended."""
    return failed(
        run,
        Failure(
            "killed",
            f"the worker process ended: {how}.\n"
            "  The usual cause is too little memory (see `dmesg`): use fewer --workers.\n"
            "The next start of the comparison retries the run.",
        ),
    )


def failure_of(error: BaseException) -> Failure:
    """Classify an exception by the first known kind in its chain of causes; the message ends with stack frames."""
    chain = list(_chain(error))
    kinds = [kind for each in chain if (kind := _kind(each)) != "error"]
    frames = traceback.extract_tb(chain[-1].__traceback__)[-FRAMES:]
    where = "".join(f"\n  {'/'.join(Path(at.filename).parts[-2:])}:{at.lineno} in {at.name}" for at in frames)
    text = "\nfrom ".join(f"{type(each).__name__}: {each}"[:LONGEST] for each in chain)
    return Failure(kinds[0] if kinds else "error", text + where)


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
    if isinstance(error, RuntimeError) and any(words in text for words in _NO_MEMORY):
        return "memory"
    if number in _DISK_CODES or any(words in text for words in _NO_ROOM):
        return "disk"
    if isinstance(error, RuntimeError) and "dataloader worker" in text:
        return "killed"
    return "error"
