"""Runs on a Ray cluster."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import hookdrop
from comparison.engines.base import EngineError, Job, label, seldom
from comparison.engines.guard import failed, failure_of, guarded, prepare
from comparison.engines.local import Task, keep
from comparison.engines.store import Store, StoreError
from comparison.run.record import Failure, Record
from comparison.spec.run_spec import Run

BENCHMARKS = Path(__file__).parents[2]
POLL_SECONDS = 0.5
# No report to Ray's makers, and no advice of Ray's among what the comparison prints. At Ray's own niceness of 15 its
# workers stand still while anything else runs.
_SETTINGS = {
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}


class RayEngine:
    """Tasks of one CPU each (and one GPU, for a run on cuda), on a cluster or on this machine.

    Only this process writes the store: SQLite is nothing for the file systems that clusters share. A run whose worker
    or node is lost is given out again by this process and not by Ray, whose retries after its own out-of-memory
    killer are without end. A cluster's workers get the code with the tasks; data and scratch are paths, that have to
    mean the same on all nodes, or the node reads its own.

    Args:
        address: of a cluster, as `ray start` prints it; None starts Ray on this machine.
        workers: runs at the same time; all that the cluster has room for if None. Of a Ray that is started, its CPUs.
        attempts: how often a run is started at the most whose worker is lost, 1 or more.

    Raises:
        EngineError: Ray is not installed, or an argument makes no sense.
    """

    def __init__(self, address: str | None = None, workers: int | None = None, attempts: int = 3) -> None:
        for name, value in (("workers", workers), ("attempts", attempts)):
            if value is not None and value < 1:
                raise EngineError(f"{name} is {value}; it has to be 1 or more. Nothing was trained.")
        self.address, self.workers, self.attempts = address, workers, attempts
        self.ray = _ray()

    def run(self, runs: Sequence[Run], job: Job, store: Store, scratch: Path) -> Iterator[Record]:
        """See `Engine.run`.

        Raises:
            EngineError: no cluster can be reached or started.
        """
        store.forget_beats()
        done = [record for record in store.records(run.key for run in runs).values() if record.done]
        yield from done
        keys = {record.key for record in done}
        if waiting := deque(Task(run) for run in runs if run.key not in keys):
            with self._cluster():
                yield from self._all(waiting, job, store, scratch.absolute())

    def _all(self, waiting: deque[Task], job: Job, store: Store, scratch: Path) -> Iterator[Record]:
        board = self.ray.remote(num_cpus=0)(Board).remote()
        labels = {task.run.key: label(task.run) for task in waiting}
        going: dict[Any, Task] = {}
        while waiting or going:
            while waiting and len(going) < (self.workers or len(labels)):
                task = waiting.popleft()
                task.attempts += 1
                going[self._start(task.run, job, board, scratch)] = task
            done, _ = self.ray.wait(list(going), timeout=POLL_SECONDS)
            # A late word of a run that has ended is no news.
            self._news(board, store, {task.run.key: labels[task.run.key] for task in going.values()})
            for reference in done:
                task = going.pop(reference)
                record = self._record(reference, task)
                if record is None:
                    waiting.append(task)
                else:
                    yield keep(store, record)

    def _start(self, run: Run, job: Job, board: Any, scratch: Path) -> Any:
        remote = self.ray.remote(num_cpus=1, num_gpus=int(run.device.startswith("cuda")), max_retries=0)(work)
        return remote.remote(run, job, board, scratch, os.getcwd())

    def _record(self, reference: Any, task: Task) -> Record | None:
        """What came of an attempt; None if the run has to be tried again."""
        errors = self.ray.exceptions
        try:
            record: Record = self.ray.get(reference)
            return record
        except errors.RuntimeEnvSetupError as error:
            raise EngineError(f"the cluster can't run the code: {error}\nWhat was done is in the store.") from error
        except errors.RayTaskError as error:
            return failed(task.run, failure_of(error))
        except errors.RayError as error:
            return None if task.attempts < self.attempts else failed(task.run, _lost(error, task.attempts))

    def _news(self, board: Any, store: Store, labels: dict[str, str]) -> None:
        """Write down what workers said of their starts and steps."""
        try:
            starts, beats = self.ray.get(board.take.remote(), timeout=60)
        except self.ray.exceptions.RayError:
            return  # its node was lost: runs go on, unseen
        with contextlib.suppress(StoreError):
            for key, worker in starts:
                store.attempt(key, worker)
            for key, (step, steps, loss) in beats.items():
                if key in labels:
                    store.beat(key, step, steps, loss, labels[key])

    @contextmanager
    def _cluster(self) -> Iterator[None]:
        """A connection to the cluster, or one of our own; what was connected before stays so."""
        if self.ray.is_initialized():
            yield
            return
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        try:
            where = self._there(self.address) if self.address else self._here()
            self.ray.init(logging_level="error", log_to_driver=False, **where)
        except (ConnectionError, ValueError, RuntimeError, OSError, self.ray.exceptions.RayError) as error:
            raise EngineError(self._unreached(error)) from error
        try:
            yield
        finally:
            self.ray.shutdown()

    def _here(self) -> dict[str, Any]:
        paths = os.pathsep.join(path for path in sys.path if path)
        return {
            "address": "local",
            "num_cpus": self.workers,
            "include_dashboard": False,
            "runtime_env": {"env_vars": {"PYTHONPATH": paths}},
        }

    def _there(self, address: str) -> dict[str, Any]:
        host, _, port = address.rpartition("://")[2].rpartition(":")
        if port.isdigit():
            # Ray itself would try for minutes.
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        code = str(Path(hookdrop.__file__).parent)
        excluded = ["results", "**/__pycache__"]
        env = {"working_dir": str(BENCHMARKS), "excludes": excluded, "py_modules": [code]}
        return {"address": address, "runtime_env": env}

    def _unreached(self, error: Exception) -> str:
        if not self.address:
            return f"Ray can't be started on this machine: {error}\n  use --engine local.\nNothing was trained."
        return (
            f"no Ray cluster can be reached at {self.address}: {error}\n"
            "  see what runs: ray status   start one: ray start --head   or one on this machine: no --address\n"
            "  one that wants a token needs RAY_AUTH_MODE=token and the token here too\n"
            "Nothing was trained."
        )


class Board:
    """What workers say, until it is taken."""

    def __init__(self) -> None:
        self.starts: list[tuple[str, str]] = []
        self.beats: dict[str, tuple[int, int, float]] = {}

    def start(self, key: str, worker: str) -> None:
        """A worker starts a run."""
        self.starts.append((key, worker))

    def beat(self, key: str, step: int, steps: int, loss: float) -> None:
        """How far it has come."""
        self.beats[key] = step, steps, loss

    def take(self) -> tuple[list[tuple[str, str]], dict[str, tuple[int, int, float]]]:
        """What is new since this was called last."""
        taken = self.starts, self.beats
        self.starts, self.beats = [], {}
        return taken


def work(run: Run, job: Job, board: Any, scratch: Path, folder: str) -> Record:
    """Do one run in a worker, in the folder that the comparison was started in if this node has it."""
    import ray

    prepare(1)
    with contextlib.suppress(OSError):
        os.chdir(folder)
    with contextlib.suppress(ray.exceptions.RayError):
        ray.get(
            board.start.remote(run.key, f"node {ray.get_runtime_context().get_node_id()[:8]} process {os.getpid()}")
        )

    def beat(step: int, steps: int, loss: float) -> None:
        board.beat.remote(run.key, step, steps, loss)

    return guarded(job, run, seldom(beat), _made(scratch))


def _made(scratch: Path) -> Path:
    """The folder, or one of this node's own where it can't be made."""
    try:
        scratch.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="hookdrop-"))
    return scratch


def _lost(error: Exception, attempts: int) -> Failure:
    return Failure(
        "killed",
        f"the Ray worker that trained it was lost in each of {attempts} attempts; the last time:\n{error}\n"
        "  The usual cause is too little memory on a node: try fewer --workers.\n"
        "The next start of the comparison tries again.",
    )


def _ray() -> ModuleType:
    try:
        import ray
    except ModuleNotFoundError as error:
        raise EngineError(
            "Ray is not installed.\n"
            "  install it: pip install 'hookdrop[cluster]'   or use --engine local\nNothing was trained."
        ) from error
    import ray.exceptions

    return ray
