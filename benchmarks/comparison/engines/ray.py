"""Execute runs on a Ray cluster."""

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
from comparison.engines.base import EngineError, Job, label, throttled
from comparison.engines.guard import failed, failure_of, guarded, prepare
from comparison.engines.local import Task, store_record
from comparison.engines.store import Store, StoreError
from comparison.run.record import Failure, Record
from comparison.spec.run_spec import Run

BENCHMARKS = Path(__file__).parents[2]
POLL_SECONDS = 0.5
# Disable Ray's usage statistics and hints. At Ray's default niceness of 15, its workers get no CPU time while other
# processes run.
_SETTINGS = {
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}


class RayEngine:
    """Trains runs as Ray tasks with one CPU each (and one GPU for `cuda`), on a cluster or on this machine.

    Only this process writes the store, because SQLite does not work on network file systems. This process, not Ray,
    retries a run whose worker or node is lost: Ray retries without limit after its own out-of-memory killer. Cluster
    workers receive the code with the tasks. Data and scratch are paths, so either they refer to a shared file system,
    or each node uses its own files.

    Args:
        address: Address of a cluster, as printed by `ray start`; None starts Ray on this machine.
        workers: Maximum number of parallel runs, and the CPUs of a Ray started here; None uses all CPUs.
        attempts: Maximum attempts for a run whose worker is lost, at least 1.

    Raises:
        EngineError: Ray is not installed, or an argument is less than 1.
    """

    def __init__(self, address: str | None = None, workers: int | None = None, attempts: int = 3) -> None:
        for name, value in (("workers", workers), ("attempts", attempts)):
            if value is not None and value < 1:
                raise EngineError(f"{name} must be at least 1, got {value}. Nothing was trained.")
        self.address, self.workers, self.attempts = address, workers, attempts
        self.ray = _ray()

    def run(self, runs: Sequence[Run], job: Job, store: Store, scratch: Path) -> Iterator[Record]:
        """See `Engine.run`.

        Raises:
            EngineError: The cluster cannot be reached or started.
        """
        store.forget_beats()
        done = [record for record in store.records(run.key for run in runs).values() if record.done]
        yield from done
        keys = {record.key for record in done}
        if waiting := deque(Task(run) for run in runs if run.key not in keys):
            with self._cluster():
                yield from self._all(waiting, job, store, scratch.absolute())

    def _all(self, waiting: deque[Task], job: Job, store: Store, scratch: Path) -> Iterator[Record]:
        board = self.ray.remote(num_cpus=0)(ProgressBoard).remote()
        labels = {task.run.key: label(task.run) for task in waiting}
        running: dict[Any, Task] = {}
        while waiting or running:
            while waiting and len(running) < (self.workers or len(labels)):
                task = waiting.popleft()
                task.attempts += 1
                running[self._start(task.run, job, board, scratch)] = task
            done, _ = self.ray.wait(list(running), timeout=POLL_SECONDS)
            # Late messages of finished runs are ignored.
            self._store_progress(board, store, {task.run.key: labels[task.run.key] for task in running.values()})
            for reference in done:
                task = running.pop(reference)
                record = self._record(reference, task)
                if record is None:
                    waiting.append(task)
                else:
                    yield store_record(store, record)

    def _start(self, run: Run, job: Job, board: Any, scratch: Path) -> Any:
        remote = self.ray.remote(num_cpus=1, num_gpus=int(run.device.startswith("cuda")), max_retries=0)(work)
        return remote.remote(run, job, board, scratch, os.getcwd())

    def _record(self, reference: Any, task: Task) -> Record | None:
        """The record of an attempt; None if the run must be retried."""
        errors = self.ray.exceptions
        try:
            record: Record = self.ray.get(reference)
            return record
        except errors.RuntimeEnvSetupError as error:
            raise EngineError(f"the cluster cannot run the code: {error}\nFinished runs are in the store.") from error
        except errors.RayTaskError as error:
            return failed(task.run, failure_of(error))
        except errors.RayError as error:
            return None if task.attempts < self.attempts else failed(task.run, _worker_lost(error, task.attempts))

    def _store_progress(self, board: Any, store: Store, labels: dict[str, str]) -> None:
        """Store the starts and progress that workers reported."""
        try:
            starts, beats = self.ray.get(board.take.remote(), timeout=60)
        except self.ray.exceptions.RayError:
            return  # the node of the board was lost: runs continue without progress
        with contextlib.suppress(StoreError):
            for key, worker in starts:
                store.attempt(key, worker)
            for key, (step, steps, loss) in beats.items():
                if key in labels:
                    store.beat(key, step, steps, loss, labels[key])

    @contextmanager
    def _cluster(self) -> Iterator[None]:
        """Connect to the cluster or start Ray; keep an existing connection."""
        if self.ray.is_initialized():
            yield
            return
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        try:
            settings = self._cluster_settings(self.address) if self.address else self._local_settings()
            self.ray.init(logging_level="error", log_to_driver=False, **settings)
        except (ConnectionError, ValueError, RuntimeError, OSError, self.ray.exceptions.RayError) as error:
            raise EngineError(self._connection_error(error)) from error
        try:
            yield
        finally:
            self.ray.shutdown()

    def _local_settings(self) -> dict[str, Any]:
        paths = os.pathsep.join(path for path in sys.path if path)
        return {
            "address": "local",
            "num_cpus": self.workers,
            "include_dashboard": False,
            "runtime_env": {"env_vars": {"PYTHONPATH": paths}},
        }

    def _cluster_settings(self, address: str) -> dict[str, Any]:
        host, _, port = address.rpartition("://")[2].rpartition(":")
        if port.isdigit():
            # Fail early: Ray itself retries for minutes.
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        code = str(Path(hookdrop.__file__).parent)
        excluded = ["results", "**/__pycache__"]
        env = {"working_dir": str(BENCHMARKS), "excludes": excluded, "py_modules": [code]}
        return {"address": address, "runtime_env": env}

    def _connection_error(self, error: Exception) -> str:
        if not self.address:
            return f"cannot start Ray on this machine: {error}\n  use --engine local.\nNothing was trained."
        return (
            f"cannot reach a Ray cluster at {self.address}: {error}\n"
            "  check its status:          ray status\n"
            "  start a cluster:           ray start --head\n"
            "  use this machine instead:  omit --address\n"
            "  If the cluster uses token authentication, set RAY_AUTH_MODE=token and the token here too.\n"
            "Nothing was trained."
        )


class ProgressBoard:
    """A Ray actor that collects the progress of workers."""

    def __init__(self) -> None:
        self.starts: list[tuple[str, str]] = []
        self.beats: dict[str, tuple[int, int, float]] = {}

    def start(self, key: str, worker: str) -> None:
        """Record that a worker starts a run."""
        self.starts.append((key, worker))

    def beat(self, key: str, step: int, steps: int, loss: float) -> None:
        """Record the progress of a run."""
        self.beats[key] = step, steps, loss

    def take(self) -> tuple[list[tuple[str, str]], dict[str, tuple[int, int, float]]]:
        """Return and clear the reports since the last call."""
        taken = self.starts, self.beats
        self.starts, self.beats = [], {}
        return taken


def work(run: Run, job: Job, board: Any, scratch: Path, folder: str) -> Record:
    """Train one run in a worker, in the driver's working directory if it exists on this node."""
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

    return guarded(job, run, throttled(beat), _make_scratch(scratch))


def _make_scratch(scratch: Path) -> Path:
    """Create the folder, or a temporary one if that fails on this node."""
    try:
        scratch.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="hookdrop-"))
    return scratch


def _worker_lost(error: Exception, attempts: int) -> Failure:
    return Failure(
        "killed",
        f"the Ray worker was lost in each of {attempts} attempts; the last error was:\n{error}\n"
        "  The usual cause is too little memory on a node: use fewer --workers.\n"
        "The next start of the comparison retries the run.",
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
