"""Train runs on a Ray cluster, or with Ray on this machine."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hookdrop
from comparison.engines import work
from comparison.engines.store import Store
from comparison.run.record import Record
from comparison.spec.run_spec import Run

BENCHMARKS = Path(__file__).parents[2]
# Disable Ray's usage statistics and hints. At its default niceness of 15, workers get no CPU time beside others.
_SETTINGS = {
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}


def train(
    runs: Sequence[Run], job: work.Job, store: Store, workers: int, address: str | None = None
) -> Iterator[Record]:
    """Yield the record of each run when it finishes: a Ray task with one CPU, and one GPU for `cuda`.

    Only this process writes the store. Cluster workers receive the code with the tasks, but not the data, whose folder
    is on a shared file system, or on each node. `address` is that of a cluster, as printed by `ray start`, which uses
    all its CPUs; None starts Ray on this machine with `workers` CPUs.
    """
    try:
        import ray
    except ModuleNotFoundError as error:
        raise work.EngineError(
            "Ray is not installed.\n"
            "  install it: pip install 'hookdrop[cluster]'   or use --engine local\nNothing was trained."
        ) from error
    with _cluster(ray, address, workers):
        # Ray itself would retry without limit after its own out-of-memory killer.
        remote = {gpus: ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0)(_train) for gpus in (0, 1)}
        running = {remote[run.device.startswith("cuda")].remote(run, job, os.getcwd()): run for run in runs}
        while running:
            done, _ = ray.wait(list(running))
            for reference in done:
                yield work.store_record(store, _record(ray, reference, running.pop(reference)))


def _record(ray: Any, reference: Any, run: Run) -> Record:
    try:
        record: Record = ray.get(reference)
    except ray.exceptions.RuntimeEnvSetupError as error:
        raise work.EngineError(f"the cluster cannot run the code: {error}\nFinished runs are in the store.") from error
    except ray.exceptions.RayTaskError as error:
        return work.failed(run, work.failure_of(error))
    except ray.exceptions.RayError as error:
        return work.killed(run, error)
    return record


def _train(run: Run, job: work.Job, folder: str) -> Record:
    """Train one run in a worker, in the driver's working directory if it exists on this node."""
    work.prepare()
    with contextlib.suppress(OSError):
        os.chdir(folder)
    return work.guarded(job, run)


@contextmanager
def _cluster(ray: Any, address: str | None, workers: int) -> Iterator[None]:
    """Connect to the cluster or start Ray."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    settings: dict[str, Any]
    if address is None:
        env: dict[str, Any] = {"env_vars": {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}}
        settings = {"address": "local", "num_cpus": workers, "include_dashboard": False, "runtime_env": env}
    else:
        code = str(Path(hookdrop.__file__).parent)
        env = {"working_dir": str(BENCHMARKS), "excludes": ["results", "**/__pycache__"], "py_modules": [code]}
        settings = {"address": address, "runtime_env": env}
    try:
        host, _, port = (address or "").rpartition("://")[2].rpartition(":")
        if port.isdigit():
            # Fail early: Ray itself retries for minutes.
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        ray.init(logging_level="error", log_to_driver=False, **settings)
    except (ConnectionError, ValueError, RuntimeError, OSError, ray.exceptions.RayError) as error:
        raise work.EngineError(
            f"cannot reach a Ray cluster at {address or 'this machine'}: {error}\n"
            "  check it with `ray status`; if it uses tokens, set RAY_AUTH_MODE=token and the token here too;\n"
            "  or omit --address, or use --engine local.\nNothing was trained."
        ) from error
    try:
        yield
    finally:
        ray.shutdown()
