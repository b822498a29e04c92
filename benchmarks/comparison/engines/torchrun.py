"""Execute runs one at a time on all processes that torchrun started."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import Store as KeyValueStore
from torch.distributed.rendezvous import rendezvous

from comparison.engines.base import EngineError, Job, label, throttled
from comparison.engines.guard import failed, guarded, prepare
from comparison.engines.local import store_record
from comparison.engines.store import Store, StoreError
from comparison.run.record import Beat, Failure, Record
from comparison.spec.run_spec import Run

AGREE_SECONDS = 7 * 86400.0
"""How long a rank waits for the others to finish a run. If a rank dies, torchrun terminates all ranks."""


class TorchrunEngine:
    """All ranks train the runs of rank 0 together. Only rank 0 uses the store; every rank gets all records.

    Each run has its own process group: gloo on the CPU, nccl on CUDA (with gloo for CPU tensors). A rank that fails
    leaves the group, which makes the other gloo ranks fail too. All ranks then synchronize through torchrun's
    key-value store, which a failed run cannot affect. With nccl, the other ranks notice only after `timeout`, and nccl
    then terminates the process, like a killed rank: torchrun terminates the rest, and the next start (or
    `--max-restarts`) trains the missing runs.

    Args:
        timeout: Timeout of a collective operation within a run, in seconds.
        threads: Threads per rank, at least 1.

    Raises:
        EngineError: The program was not started by torchrun.
    """

    def __init__(self, timeout: float = 1800.0, threads: int = 1) -> None:
        if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= set(os.environ):
            raise EngineError(
                "the torchrun engine requires torchrun: RANK and WORLD_SIZE are not set.\n"
                "  start it with: torchrun --nproc-per-node=2 benchmarks/compare.py ...\nNothing was trained."
            )
        self.timeout, self.threads = timedelta(seconds=timeout), threads
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def run(self, runs: Sequence[Run], job: Job, store: Store | None, scratch: Path) -> Iterator[Record]:
        """See `Engine.run`; ranks other than 0 ignore `runs` and `store`.

        Raises:
            EngineError: A run requires another number of ranks; no rank trained anything.
        """
        prepare(self.threads)
        # The agent's store is not affected when a process group fails.
        kv, _, _ = next(iter(rendezvous("env://", timeout=self.timeout)))
        kv.set_timeout(timedelta(seconds=AGREE_SECONDS))
        # Each list of runs (tuning rounds, final runs) uses its own prefix.
        turn = kv.add(f"comparison/turns/{self.rank}", 1)
        kv = PrefixStore(f"comparison/{turn}", kv)
        todo = self._broadcast_runs(runs, kv)
        if store is not None and self.rank == 0:
            store.forget_beats()
        for i, run in enumerate(todo):
            yield self._run_one(run, job, store, scratch, PrefixStore(str(i), kv))

    def _broadcast_runs(self, runs: Sequence[Run], kv: KeyValueStore) -> list[Run]:
        if self.rank == 0:
            _send(kv, "runs", list(runs))
        todo: list[Run] = _receive(kv, "runs")
        for run in todo:
            if run.world != self.world:
                raise EngineError(
                    f"{label(run)} requires {run.world} ranks (`world`), but torchrun started {self.world}.\n"
                    f"  start it with: torchrun --nproc-per-node={run.world} ...\nNothing was trained."
                )
        return todo

    def _run_one(self, run: Run, job: Job, store: Store | None, scratch: Path, kv: KeyValueStore) -> Record:
        """Train one run on all ranks; all of them return the record that rank 0 stored."""
        own_store = store if self.rank == 0 else None
        failure = _note_start(own_store, run)
        if not _gather_failures(kv, "start", self.rank, self.world, failure):
            record = self._train(run, job, own_store, scratch, kv)
            failures = _gather_failures(kv, "end", self.rank, self.world, record.failure)
            _leave()
            if failures and self.rank == 0:
                record = replace(record, outcome=None, images={}, failure=_root_cause(failures))
        else:
            record = failed(run, failure or Failure("disk", "rank 0 cannot store the record: the disk is full."))
        if self.rank == 0:
            _send(kv, "record", store_record(own_store, record) if own_store is not None else record)
        stored: Record = _receive(kv, "record")
        return stored

    def _train(self, run: Run, job: Job, store: Store | None, scratch: Path, kv: KeyValueStore) -> Record:
        cuda = run.device.startswith("cuda")
        if cuda:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        group: dict[str, Any] = {"store": PrefixStore("group", kv), "rank": self.rank, "world_size": self.world}
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=self.timeout, **group)
        record = guarded(job, run, throttled(_progress(run, store)), scratch)
        if not record.done:
            # Other ranks may be waiting for this one.
            _leave()
        return record


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _note_start(store: Store | None, run: Run) -> Failure | None:
    """Store the start of a run; if the disk is full, do not train it."""
    try:
        if store is not None:
            store.attempt(run.key, f"torchrun, process {os.getpid()}")
    except StoreError as error:
        return Failure("disk" if error.kind == "disk" else "error", str(error))
    return None


def _progress(run: Run, store: Store | None) -> Beat:
    def beat(step: int, steps: int, loss: float) -> None:
        if store is not None:
            try:
                store.beat(run.key, step, steps, loss, label(run))
            except StoreError:
                return  # a full disk fails the run when its record is written

    return beat


def _gather_failures(
    kv: KeyValueStore, what: str, rank: int, world: int, failure: Failure | None
) -> dict[int, Failure]:
    """Wait for all ranks, and return the failures by rank."""
    _send(kv, f"{what}/{rank}", failure)
    gathered: dict[int, Failure | None] = {each: _receive(kv, f"{what}/{each}") for each in range(world)}
    return {each: failure for each, failure in gathered.items() if failure is not None}


def _root_cause(failures: dict[int, Failure]) -> Failure:
    """The first failure that is not a lost connection to another failed rank."""
    lost = ("Connection closed by peer", "Connection reset by peer", "Timed out waiting", "Socket Timeout")
    causes = [rank for rank, failure in failures.items() if not any(words in failure.message for words in lost)]
    rank = min(causes or failures)
    return Failure(failures[rank].kind, f"rank {rank}: {failures[rank].message}")


def _send(kv: KeyValueStore, key: str, value: object) -> None:
    kv.set(key, pickle.dumps(value))  # type: ignore[arg-type]


def _receive(kv: KeyValueStore, key: str) -> Any:
    return pickle.loads(kv.get(key))
