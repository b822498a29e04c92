"""Runs that take all the processes that torchrun started, one run after another."""

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
from torch.distributed.distributed_c10d import Store as Talk
from torch.distributed.rendezvous import rendezvous

from comparison.engines.base import EngineError, Job, label, seldom
from comparison.engines.guard import failed, guarded, prepare
from comparison.engines.local import keep
from comparison.engines.store import Store, StoreError
from comparison.run.record import Beat, Failure, Record
from comparison.spec.run_spec import Run

AGREE_SECONDS = 7 * 86400.0
"""How long one rank waits for another to end a run. A rank that dies does not make it wait: torchrun ends them all."""


class TorchrunEngine:
    """Every rank walks the list of rank 0, whose store alone is read and written; all get all records.

    Each run has a process group of its own: gloo on the CPU, nccl on cuda (with gloo for what is on the CPU). A rank
    that fails leaves the group, at which gloo's others fail too, and then all agree through torchrun's key-value store,
    that no failed run can spoil. With nccl the others notice only after `timeout`, and nccl then ends the process, as
    a killed rank does; torchrun ends the rest, and the next start (or `--max-restarts`) does what is missing.

    Args:
        timeout: of a collective operation within a run, in seconds.
        threads: of each rank, 1 or more.

    Raises:
        EngineError: the program was not started by torchrun.
    """

    def __init__(self, timeout: float = 1800.0, threads: int = 1) -> None:
        if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= set(os.environ):
            raise EngineError(
                "the torchrun engine needs torchrun, and RANK and WORLD_SIZE are not set.\n"
                "  start: torchrun --nproc-per-node=2 benchmarks/compare.py --engine torchrun ...\nNothing was trained."
            )
        self.timeout, self.threads = timedelta(seconds=timeout), threads
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def run(self, runs: Sequence[Run], job: Job, store: Store | None, scratch: Path) -> Iterator[Record]:
        """See `Engine.run`; on other ranks than 0, `runs` and `store` are not looked at.

        Raises:
            EngineError: a run asks for another number of ranks than there are; no rank trained anything.
        """
        prepare(self.threads)
        # The agent's store outlives what happens to the ranks' groups.
        talk, _, _ = next(iter(rendezvous("env://", timeout=self.timeout)))
        talk.set_timeout(timedelta(seconds=AGREE_SECONDS))
        # A second list of runs, such as those after tuning, has another name.
        turn = talk.add(f"comparison/turns/{self.rank}", 1)
        talk = PrefixStore(f"comparison/{turn}", talk)
        todo = self._listed(runs, talk)
        if store is not None and self.rank == 0:
            store.forget_beats()
        for i, run in enumerate(todo):
            yield self._one(run, job, store, scratch, PrefixStore(str(i), talk))

    def _listed(self, runs: Sequence[Run], talk: Talk) -> list[Run]:
        if self.rank == 0:
            _say(talk, "runs", list(runs))
        todo: list[Run] = _hear(talk, "runs")
        for run in todo:
            if run.world != self.world:
                raise EngineError(
                    f"{label(run)} is for {run.world} ranks (`world`), and torchrun started {self.world}.\n"
                    f"  start: torchrun --nproc-per-node={run.world} ...\nNothing was trained."
                )
        return todo

    def _one(self, run: Run, job: Job, store: Store | None, scratch: Path, talk: Talk) -> Record:
        """Do one run with all ranks; what all of them have then is the record that rank 0 kept."""
        first = store if self.rank == 0 else None
        unkept = _noted(first, run)
        if not _agreed(talk, "start", self.rank, self.world, unkept):
            record = self._together(run, job, first, scratch, talk)
            found = _agreed(talk, "end", self.rank, self.world, record.failure)
            _leave()
            if found and self.rank == 0:
                record = replace(record, outcome=None, images={}, failure=_first(found))
        else:
            record = failed(run, unkept or Failure("disk", "rank 0 has no room for its record."))
        if self.rank == 0:
            _say(talk, "record", keep(first, record) if first is not None else record)
        kept: Record = _hear(talk, "record")
        return kept

    def _together(self, run: Run, job: Job, store: Store | None, scratch: Path, talk: Talk) -> Record:
        cuda = run.device.startswith("cuda")
        if cuda:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        group: dict[str, Any] = {"store": PrefixStore("group", talk), "rank": self.rank, "world_size": self.world}
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=self.timeout, **group)
        record = guarded(job, run, seldom(_heard(run, store)), scratch)
        if not record.done:
            # The others may be waiting for this rank.
            _leave()
        return record


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _noted(store: Store | None, run: Run) -> Failure | None:
    """Note the start; without room for that, the run would be for nothing."""
    try:
        if store is not None:
            store.attempt(run.key, f"torchrun, process {os.getpid()}")
    except StoreError as error:
        return Failure("disk" if error.kind == "disk" else "error", str(error))
    return None


def _heard(run: Run, store: Store | None) -> Beat:
    def beat(step: int, steps: int, loss: float) -> None:
        if store is not None:
            try:
                store.beat(run.key, step, steps, loss, label(run))
            except StoreError:
                return  # a full disk fails the run when its record is written

    return beat


def _agreed(talk: Talk, what: str, rank: int, world: int, failure: Failure | None) -> dict[int, Failure]:
    """Say how it went on this rank, wait for all, and hear on which ranks it failed."""
    _say(talk, f"{what}/{rank}", failure)
    said: dict[int, Failure | None] = {each: _hear(talk, f"{what}/{each}") for each in range(world)}
    return {each: failure for each, failure in said.items() if failure is not None}


def _first(found: dict[int, Failure]) -> Failure:
    """What began it: not that a rank lost its connection to one that had failed."""
    lost = ("Connection closed by peer", "Connection reset by peer", "Timed out waiting", "Socket Timeout")
    causes = [rank for rank, failure in found.items() if not any(words in failure.message for words in lost)]
    rank = min(causes or found)
    return Failure(found[rank].kind, f"rank {rank}: {found[rank].message}")


def _say(talk: Talk, key: str, value: object) -> None:
    talk.set(key, pickle.dumps(value))  # type: ignore[arg-type]


def _hear(talk: Talk, key: str) -> Any:
    return pickle.loads(talk.get(key))
