"""Train the runs that are not in the store, in processes. Failures become records, so that the other runs continue."""

import gc
import multiprocessing
import os
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from pebble import ProcessExpired, ProcessPool

import hookdrop
from comparison.engines.store import Store
from comparison.run.record import Failure, Record, environment
from comparison.run.training import execute
from comparison.spec.run_spec import Run
from comparison.spec.study import Tunings
from comparison.spec.tuning import Search

Job = Callable[[Run], Record]
"""Trains one run; must be picklable."""
Engine = Callable[[Sequence[Run], Job, Store], Iterator[Record]]
"""Trains runs with a job, and yields the record of each when it finishes, including failed runs."""
FRAMES, LONGEST, LINES = 4, 2000, 10
KILLED = """the worker process ended: exit code {}.
  The usual cause is too little memory (see `dmesg`): use fewer --workers.
The next start of the comparison retries the run."""


@dataclass
class Runner:
    """Trains missing runs, and collects the records of all requested ones, including tuning."""

    store: Store
    engine: Engine
    requested: dict[str, Record] = field(default_factory=dict)

    def ensure(self, runs: Sequence[Run], title: str) -> Mapping[str, Record]:
        """Train the missing runs, and return the record of each run by its key."""
        wanted = {run.key: run for run in runs}
        found = self.store.records(wanted)
        for again in (False, True):
            missing = [run for key, run in wanted.items() if _is_missing(found.get(key), again)]
            if not missing:
                continue
            advance = progress(len(missing), f"{title}, once more after a kill" if again else title)
            for record in self.engine(missing, execute, self.store):
                found[record.key] = record
                advance(record)
        self.requested |= found
        return found

    def tune(self, searches: Mapping[tuple[str, str], Search]) -> Tunings:
        records = self.ensure([run for search in searches.values() for run in search.runs()], "Tuning")
        losses = {key: record.outcome["nll"] if record.outcome else None for key, record in records.items()}
        return {arm: search.result(losses) for arm, search in searches.items()}


def progress(total: int, title: str) -> Callable[[Record], None]:
    """Return a callback for finished runs, which prints a line for every 10 % of the runs."""
    print(f"{title}: {total} runs", flush=True)
    finished, started = list[Record](), time.perf_counter()

    def advance(record: Record) -> None:
        finished.append(record)
        done, failed = len(finished), sum(not one.done for one in finished)
        if done * LINES // total > (done - 1) * LINES // total:  # 10 % need not be an integer number of runs
            note, minutes = f" ({failed} failed)" if failed else "", (time.perf_counter() - started) / 60
            print(f"{done} of {total} runs{note} after {minutes:.1f} minutes", flush=True)

    return advance


def _is_missing(record: Record | None, again: bool) -> bool:
    if record is None or record.failure is None:
        return record is None
    return record.failure.kind == "killed" if again else record.failure.kind != "nan"


def train(runs: Sequence[Run], job: Job, store: Store, workers: int) -> Iterator[Record]:
    """Yield the record of each run when it finishes. Workers store their own records.

    If a worker is killed, only its run fails, and a new one replaces it. They exit with this process, even if killed.
    """
    context = multiprocessing.get_context("spawn")
    pool = ProcessPool(min(workers, len(runs)) or 1, initializer=_start_worker, context=context)
    futures: dict[Future[Record | None], Run] = {pool.schedule(_train, (run, job, store)): run for run in runs}
    try:
        for future in as_completed(futures):
            run = futures[future]
            try:
                unstored = future.result()
            except ProcessExpired as error:
                # It may have been killed after it stored its record.
                stored = store.records([run.key]).get(run.key)
                lost = failed(run, Failure("killed", KILLED.format(error.exitcode)))
                yield stored if stored and stored.done else store_record(store, lost)
            except Exception as error:
                yield store_record(store, failed(run, failure_of(error)))
            else:
                yield unstored or store.records([run.key])[run.key]
    finally:
        pool.stop()  # type: ignore[no-untyped-call]
        pool.join()


def _train(run: Run, job: Job, store: Store) -> Record | None:
    """Train, time and store one run in a worker. Return a record only if it could not be stored."""
    started, clock = datetime.now(UTC).isoformat(timespec="seconds"), time.perf_counter()
    try:
        record = job(run)
    except (Exception, SystemExit) as error:
        record = failed(run, failure_of(error))
    record = replace(record, started=started, seconds=time.perf_counter() - clock)
    stored = store_record(store, record)
    if record.failure and run.device != "cpu":
        # After a device error, the process may not be able to use the device any more.
        os._exit(1)
    if record.failure:
        gc.collect()  # the memory that the traceback kept alive
    return None if stored is record else stored


def _start_worker() -> None:
    """Set up a worker process: it exits with its parent, has one thread, and warnings of hookdrop are errors."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_exit_with, args=(parent,), daemon=True).start()
    torch.set_num_threads(1)
    warnings.simplefilter("error", hookdrop.HookdropWarning)


def _exit_with(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)


def failed(run: Run, failure: Failure) -> Record:
    return Record(run.key, run.model_dump(mode="json"), failure=failure, environment=environment())


def store_record(store: Store, record: Record) -> Record:
    """Store a record and return it, or return a failed record if that is not possible."""
    try:
        store.add(record)
    except (OSError, ValueError) as error:
        return failed(Run.model_validate(record.spec), failure_of(error))
    return record


def failure_of(error: BaseException) -> Failure:
    """The failure that an exception with its causes stands for; the message ends with stack frames."""
    chain = [error]
    while cause := chain[-1].__cause__ or chain[-1].__context__:
        chain.append(cause)
    frames = traceback.extract_tb(chain[-1].__traceback__)[-FRAMES:]
    where = "".join(f"\n  {'/'.join(Path(at.filename).parts[-2:])}:{at.lineno} in {at.name}" for at in frames)
    text = "\nfrom ".join(f"{type(each).__name__}: {each}"[:LONGEST] for each in chain)
    is_nan = any(isinstance(each, FloatingPointError) for each in chain)
    return Failure("nan" if is_nan else "error", text + where)
