"""Runs in processes of this machine."""

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

from comparison.engines.base import EngineError, Job, label, seldom
from comparison.engines.guard import failed, failure_of, guarded, prepare
from comparison.engines.store import Store, StoreError
from comparison.run.record import Failure, Record
from comparison.spec.run_spec import Run

_PR_SET_PDEATHSIG = 1


@dataclass
class Task:
    """A run, and how often it was started."""

    run: Run
    attempts: int = 0
    ended: str = ""
    """How the process ended that had it last."""


class LocalEngine:
    """Processes with one thread each, by default; a killed one costs the run that it had, which is tried again.

    A worker writes its records itself, and ends with the process that started it, even if that is killed.

    Args:
        workers: processes, 1 or more.
        threads: of each, 1 or more.
        attempts: how often a run is started at the most whose worker is killed, 1 or more.

    Raises:
        EngineError: one of them is less than 1.
    """

    def __init__(self, workers: int, threads: int = 1, attempts: int = 2) -> None:
        for name, value in (("workers", workers), ("threads", threads), ("attempts", attempts)):
            if value < 1:
                raise EngineError(f"{name} is {value}; it has to be 1 or more. Nothing was trained.")
        self.workers, self.threads, self.attempts = workers, threads, attempts

    def run(self, runs: Sequence[Run], job: Job, store: Store, scratch: Path) -> Iterator[Record]:
        """See `Engine.run`. A worker that is idle gets the next run before a record is given back."""
        store.forget_beats()
        done_before = [record for record in store.records(run.key for run in runs).values() if record.done]
        yield from done_before
        keys = {record.key for record in done_before}
        waiting = deque(Task(run) for run in runs if run.key not in keys)
        slots = [Slot(self.threads) for _ in range(min(self.workers, len(waiting)))]
        going: dict[Future[Record | None], tuple[Slot, Task]] = {}
        try:
            for slot in slots:
                self._next(waiting, slot, going, (job, store, scratch))
            while going:
                done, _ = wait(going, return_when=FIRST_COMPLETED)
                for future in done:
                    slot, task = going.pop(future)
                    record = self._record(future, slot, task, store)
                    if record is None:
                        waiting.append(task)
                    self._next(waiting, slot, going, (job, store, scratch))
                    if record is not None:
                        yield record
        finally:
            for slot in slots:
                slot.stop()

    def _next(
        self,
        waiting: deque[Task],
        slot: Slot,
        going: dict[Future[Record | None], tuple[Slot, Task]],
        how: tuple[Job, Store, Path],
    ) -> None:
        if waiting:
            task = waiting.popleft()
            task.attempts += 1
            going[slot.start(task.run, *how)] = slot, task

    def _record(self, future: Future[Record | None], slot: Slot, task: Task, store: Store) -> Record | None:
        """What came of an attempt; None if the run has to be tried again."""
        try:
            unkept = future.result()
        except (ProcessExpired, BrokenProcessPool) as error:
            slot.stop()
            task.ended = _ended(error)
            # It may have been killed after its last word.
            if (record := store.get(task.run.key)) is not None and record.done:
                return record
            return None if task.attempts < self.attempts else keep(store, failed(task.run, self._killed(task)))
        except Exception as error:
            return keep(store, failed(task.run, failure_of(error)))
        record = unkept or store.get(task.run.key)
        if record is None:
            raise RuntimeError(f"run {task.run.key} has ended, and {store.path} has no record of it.")
        # An error of the device may spoil all that the process does on it afterwards.
        if not record.done and task.run.device != "cpu":
            slot.stop()
        return keep(store, record) if unkept else record

    def _killed(self, task: Task) -> Failure:
        return Failure(
            "killed",
            f"the process that trained it {task.ended}, in each of {task.attempts} attempts.\n"
            "  The usual cause is the kernel's out-of-memory killer (see `dmesg`): try fewer --workers.\n"
            "The next start of the comparison tries again.",
        )


class Slot:
    """A place for one process, with one run at a time.

    A pool of its own: what a killed process may leave locked or half-written in a pool's pipes is nobody else's.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._pool: ProcessPool | None = None

    def start(self, run: Run, job: Job, store: Store, scratch: Path) -> Future[Record | None]:
        """Give it a run; it has none."""
        if self._pool is None:
            self._pool = ProcessPool(
                max_workers=1,
                initializer=start_worker,
                initargs=(self.threads,),
                context=multiprocessing.get_context("spawn"),
            )
        return self._pool.schedule(work, (run, job, store, scratch))

    def stop(self) -> None:
        """End the process, whatever it does; the next run gets a new one."""
        if self._pool is not None:
            self._pool.stop()  # type: ignore[no-untyped-call]
            self._pool.join()
            self._pool = None


def start_worker(threads: int) -> None:
    """Make this process one that trains, for as long as its parent lives."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    if sys.platform == "linux":
        # The kernel's word reaches a process that is deep in C; the thread below is for other systems.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent.pid:
        os._exit(1)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    prepare(threads)


def _end_with(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)


def work(run: Run, job: Job, store: Store, scratch: Path) -> Record | None:
    """Do one run in a worker; its record if the store could not take it, and None if it is there."""
    name = label(run)

    def beat(step: int, steps: int, loss: float) -> None:
        # It is for those who watch: a full disk fails the run when the record is written.
        with contextlib.suppress(StoreError):
            store.beat(run.key, step, steps, loss, name)

    try:
        store.attempt(run.key, f"process {os.getpid()}")
        store.add(guarded(job, run, seldom(beat), scratch))
    except StoreError as error:
        return failed(run, failure_of(error))
    return None


def keep(store: Store, record: Record) -> Record:
    """Add a record: it as it is in the store, or itself if the store has no room."""
    try:
        store.add(record)
    except StoreError:
        return record
    return store.get(record.key) or record


def _ended(error: BaseException) -> str:
    code = getattr(error, "exitcode", None)
    if code is None:
        return "ended before it began"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
