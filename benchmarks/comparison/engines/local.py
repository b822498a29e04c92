"""Train runs in a pool of local processes."""

import multiprocessing
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, as_completed
from multiprocessing.process import BaseProcess

from pebble import ProcessExpired, ProcessPool

from comparison.engines import work
from comparison.engines.store import Store
from comparison.engines.work import store_record
from comparison.run.record import Record
from comparison.spec.run_spec import Run


def train(runs: Sequence[Run], job: work.Job, store: Store, workers: int) -> Iterator[Record]:
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
                lost = work.killed(run, f"exit code {error.exitcode}")
                yield stored if stored and stored.done else store_record(store, lost)
            except Exception as error:
                yield store_record(store, work.failed(run, work.failure_of(error)))
            else:
                yield unstored or store.records([run.key])[run.key]
    finally:
        pool.stop()  # type: ignore[no-untyped-call]
        pool.join()


def _train(run: Run, job: work.Job, store: Store) -> Record | None:
    """Train and store one run in a worker. Return a record only if it could not be stored."""
    record = work.guarded(job, run)
    stored = store_record(store, record)
    if record.failure and run.device != "cpu":
        # After a device error, the process may not be able to use the device any more.
        os._exit(1)
    return None if stored is record else stored


def _start_worker() -> None:
    """Set up a worker process that exits with its parent."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_exit_with, args=(parent,), daemon=True).start()
    work.prepare()


def _exit_with(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)
