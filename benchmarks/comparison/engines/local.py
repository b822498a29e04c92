"""Execute runs in local processes."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from pebble import ProcessExpired, ProcessPool

from comparison.engines.base import EngineError, Job, label, throttled
from comparison.engines.guard import failed, failure_of, guarded, prepare
from comparison.engines.store import Store, StoreError
from comparison.run.record import Failure, Record
from comparison.spec.run_spec import Run

_PR_SET_PDEATHSIG = 1


@dataclass
class Task:
    """A run and its attempts."""

    run: Run
    attempts: int = 0
    exit_status: str = ""
    """How the process of its last attempt ended."""


class LocalEngine:
    """Trains runs in a pool of local processes. If a worker is killed, only its run is lost, and it is retried.

    Workers write their own records, and exit with their parent process, even if it is killed.

    Args:
        workers: Number of processes, at least 1.
        threads: Threads per process, at least 1.
        attempts: Maximum attempts for a run whose worker is killed, at least 1.

    Raises:
        EngineError: An argument is less than 1.
    """

    def __init__(self, workers: int, threads: int = 1, attempts: int = 2) -> None:
        for name, value in (("workers", workers), ("threads", threads), ("attempts", attempts)):
            if value < 1:
                raise EngineError(f"{name} must be at least 1, got {value}. Nothing was trained.")
        self.workers, self.threads, self.attempts = workers, threads, attempts

    def run(self, runs: Sequence[Run], job: Job, store: Store, scratch: Path) -> Iterator[Record]:
        """See `Engine.run`. An idle worker gets its next run before a record is yielded."""
        store.forget_beats()
        done_before = [record for record in store.records(run.key for run in runs).values() if record.done]
        yield from done_before
        keys = {record.key for record in done_before}
        waiting = deque(Task(run) for run in runs if run.key not in keys)
        slots = [Slot(self.threads) for _ in range(min(self.workers, len(waiting)))]
        running: dict[Future[Record | None], tuple[Slot, Task]] = {}
        try:
            for slot in slots:
                self._next(waiting, slot, running, (job, store, scratch))
            while running:
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    slot, task = running.pop(future)
                    record = self._record(future, slot, task, store)
                    if record is None:
                        waiting.append(task)
                    self._next(waiting, slot, running, (job, store, scratch))
                    if record is not None:
                        yield record
        finally:
            for slot in slots:
                slot.stop()

    def _next(
        self,
        waiting: deque[Task],
        slot: Slot,
        running: dict[Future[Record | None], tuple[Slot, Task]],
        how: tuple[Job, Store, Path],
    ) -> None:
        if waiting:
            task = waiting.popleft()
            task.attempts += 1
            running[slot.start(task.run, *how)] = slot, task

    def _record(self, future: Future[Record | None], slot: Slot, task: Task, store: Store) -> Record | None:
        """The record of an attempt; None if the run must be retried."""
        try:
            unstored = future.result()
        except (ProcessExpired, BrokenProcessPool) as error:
            slot.stop()
            task.exit_status = _exit_status(error)
            # It may have been killed after it stored its record.
            if (record := store.get(task.run.key)) is not None and record.done:
                return record
            return None if task.attempts < self.attempts else store_record(store, failed(task.run, self._killed(task)))
        except Exception as error:
            return store_record(store, failed(task.run, failure_of(error)))
        record = unstored or store.get(task.run.key)
        if record is None:
            raise RuntimeError(f"run {task.run.key} has finished, but {store.path} has no record of it.")
        # After a device error, the process may not be able to use the device any more.
        if not record.done and task.run.device != "cpu":
            slot.stop()
        return store_record(store, record) if unstored else record

    def _killed(self, task: Task) -> Failure:
        return Failure(
            "killed",
            f"the worker process {task.exit_status} in each of {task.attempts} attempts.\n"
            "  The usual cause is the kernel's out-of-memory killer (see `dmesg`): use fewer --workers.\n"
            "The next start of the comparison retries the run.",
        )


class Slot:
    """One worker process with one run at a time.

    Each has its own pool, so that a killed process cannot leave the pipes of others locked or half-written.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._pool: ProcessPool | None = None

    def start(self, run: Run, job: Job, store: Store, scratch: Path) -> Future[Record | None]:
        """Start a run in the idle process."""
        if self._pool is None:
            self._pool = ProcessPool(
                max_workers=1,
                initializer=start_worker,
                initargs=(self.threads,),
                context=multiprocessing.get_context("spawn"),
            )
        return self._pool.schedule(work, (run, job, store, scratch))

    def stop(self) -> None:
        """Terminate the process; the next run starts a new one."""
        if self._pool is not None:
            self._pool.stop()  # type: ignore[no-untyped-call]
            self._pool.join()
            self._pool = None


def start_worker(threads: int) -> None:
    """Set up a worker process that exits with its parent."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    if sys.platform == "linux":
        # The kernel's signal works even inside C code; the thread below is for other systems.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent.pid:
        os._exit(1)
    threading.Thread(target=_exit_with, args=(parent,), daemon=True).start()
    prepare(threads)


def _exit_with(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)


def work(run: Run, job: Job, store: Store, scratch: Path) -> Record | None:
    """Train one run in a worker. Return its record only if it could not be stored."""
    name = label(run)

    def beat(step: int, steps: int, loss: float) -> None:
        # Progress is optional: a full disk fails the run when its record is written.
        with contextlib.suppress(StoreError):
            store.beat(run.key, step, steps, loss, name)

    try:
        store.attempt(run.key, f"process {os.getpid()}")
        store.add(guarded(job, run, throttled(beat), scratch))
    except StoreError as error:
        return failed(run, failure_of(error))
    return None


def store_record(store: Store, record: Record) -> Record:
    """Add a record and return the stored one, or `record` itself if the disk is full."""
    try:
        store.add(record)
    except StoreError:
        return record
    return store.get(record.key) or record


def _exit_status(error: BaseException) -> str:
    code = getattr(error, "exitcode", None)
    if code is None:
        return "failed to start"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
