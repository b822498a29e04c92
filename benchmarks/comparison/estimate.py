"""Estimate the number of runs, the duration of a comparison, and the differences that it can show."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich import box
from rich.table import Table

from comparison.analysis.inference import LEVEL, detectable, smallest_p
from comparison.analysis.text import plural
from comparison.engines.store import Store
from comparison.run.run_setup import prepare, steps_of
from comparison.run.training import CURVE_POINTS, batch_of, step
from comparison.spec.config import NONE
from comparison.spec.run_spec import Run
from comparison.spec.study import Study

TIMED_STEPS = 3
START_SECONDS = 8.0
"""Start-up time of a worker (imports), in seconds, as measured on two cores."""


@dataclass(frozen=True)
class Batch:
    """Runs that can be trained in parallel; the next batch depends on their results."""

    title: str
    seconds: Sequence[float]
    """Estimated duration of each missing run."""
    done: int = 0
    """Number of runs already in the store."""


def batches(study: Study, store: Store) -> list[Batch]:
    """The tuning and the final runs, with the median duration of finished runs of the arm, or an estimate."""
    known, of_arm, measured = store.records(), dict[tuple[str, str], list[float]](), dict[str, float]()
    for record in known.values():
        if record.done:
            run = Run.model_validate(record.spec)
            of_arm.setdefault((_kind(run), run.arm.name), []).append(record.seconds)

    def seconds(run: Run) -> float:
        if times := of_arm.get((_kind(run), run.arm.name)):
            return statistics.median(times)
        if _kind(run) not in measured:
            measured[_kind(run)] = estimate_seconds(run.model_copy(update={"arm": NONE, "compile": False}))
        return measured[_kind(run)]

    def batch(title: str, runs: Sequence[Run]) -> Batch:
        wanted = {run.key: run for run in runs}
        missing = [run for key, run in wanted.items() if key not in known]
        return Batch(title, [seconds(run) for run in missing], len(wanted) - len(missing))

    tuning = [run for search in study.searches().values() for run in search.runs()]
    finals = [run for entry in study.entries({}) for run in entry.runs.values()]
    timing = Batch("timing", [study.config.timing] if study.config.timing else [])
    return [*([batch("tuning", tuning)] if tuning else []), batch("final runs", finals), timing]


def duration(jobs: Sequence[Batch], workers: int) -> float:
    """The approximate duration in seconds; a batch starts workers, and lasts as long as its longest run or longer."""
    return sum(
        START_SECONDS + max(*batch.seconds, sum(batch.seconds) / workers, 0.0) for batch in jobs if batch.seconds
    )


def table(jobs: Sequence[Batch]) -> Table:
    """The missing runs and their estimated durations."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
    for column in ("", "runs to train", "in the store", "seconds each", "total seconds"):
        shown.add_column(column, justify="left" if not column else "right")
    for batch in jobs:
        each = f"{statistics.fmean(batch.seconds):.1f}" if batch.seconds else "-"
        shown.add_row(batch.title, str(len(batch.seconds)), str(batch.done), each, f"{sum(batch.seconds):.0f}")
    return shown


def outlook(jobs: Sequence[Batch], workers: int, pairs: int, arms: int) -> str:
    """How many runs are missing, how long they take, and which differences this number of pairs can show."""
    runs = sum(len(batch.seconds) for batch in jobs if batch.title != "timing")
    minutes, smallest = duration(jobs, workers) / 60, min(1.0, arms * smallest_p(pairs))
    found = (
        f"{plural(runs, 'run')} to train, about {minutes:.0f} minutes with {plural(workers, 'worker')}.\n"
        f"{plural(pairs, 'pair')} detect differences of {detectable(pairs):.2g} standard deviations of the paired "
        f"differences with 80 % power: {detectable(pairs):.2g} points of accuracy if the pairs vary by 1 point. The "
        f"smallest p after Holm's correction over {plural(arms, 'arm')} is {smallest:.2g}."
    )
    if smallest > LEVEL:
        needed = next(more for more in range(pairs, 100) if arms * smallest_p(more) <= LEVEL)
        found += f" No difference can be significant at 5 %: use --seeds {needed} or more."
    return found


def _kind(run: Run) -> str:
    return f"{run.cell}, {run.epochs} epochs, {run.max_steps}"


def estimate_seconds(run: Run) -> float:
    """Extrapolate the duration of a run from a few steps and one validation."""
    torch.set_num_threads(1)
    setup = prepare(run)
    setup.forward.train()
    batch = batch_of(setup)
    step(setup, *batch)
    started = time.perf_counter()
    for _ in range(TIMED_STEPS):
        step(setup, *batch)
    stepped = time.perf_counter()
    some = setup.split.validation[:256]
    setup.logits(some)
    each = (time.perf_counter() - stepped) / len(some)
    steps = min(run.max_steps or 10**12, steps_of(run, len(setup.split.train)))
    images = CURVE_POINTS * len(setup.split.validation) + len(setup.split.test)
    return (stepped - started) / TIMED_STEPS * steps + each * images
