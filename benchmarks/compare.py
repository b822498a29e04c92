"""Regularizers compared in paired training runs: `python benchmarks/compare.py --config benchmarks/configs/quick.yaml`.

Interrupt it whenever you like: started again with the same command, it makes only the runs that are missing.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from multiprocessing import get_context

from rich.console import Console

from comparison import checks, costs, estimate
from comparison.analysis.schema import Controls, Spread, Summary
from comparison.analysis.summary import About, summarise
from comparison.engines import laboratory
from comparison.engines.base import Engine, EngineError
from comparison.engines.folder import Folder, replace_text
from comparison.engines.store import Store, StoreError
from comparison.report import page
from comparison.report.progress import watch
from comparison.report.table import table
from comparison.run.ranks import launched_rank, launched_world
from comparison.run.record import Record
from comparison.spec import options
from comparison.spec.errors import ConfigError
from comparison.spec.study import Entry, Study
from comparison.spec.yaml_lines import Lines
from terminal import make_console, say


def main(argv: Sequence[str] | None = None) -> int:
    """Compare and report; 1 if runs failed or a control did not hold, 2 if what was asked for can't be done."""
    asked = options.parse(argv, (__doc__ or "").partition(":")[0])
    console = make_console() if launched_rank() == 0 else Console(quiet=True)
    try:
        return _compare(asked, console)
    except (ConfigError, StoreError, EngineError) as error:
        say(console, f"compare.py: {error}")
        return 2
    except KeyboardInterrupt:
        say(console, f"\nInterrupted. What is finished is in {asked.out}; the same command goes on from there.")
        return 130


def _compare(asked: argparse.Namespace, console: Console) -> int:
    started = time.perf_counter()
    config, lines, text = options.config_of(asked)
    study = Study(config, asked.only, launched_world(), asked.command)
    remarks = _look(study, lines, console)
    engine = laboratory.choose_engine(asked.engine, asked.workers, asked.address)
    if launched_rank() != 0:
        return laboratory.follow(engine, asked.out / "checkpoints")
    with Folder(asked.out) as folder:
        if asked.dry_run:
            console.print(estimate.table(estimate.batches(study, folder.store), asked.workers))
            say(console, "Nothing was trained: this was a dry run.")
            return 0
        amendments = folder.claim(config, asked.amend)
        entries, seen = _run(study, engine, folder, console, asked.retry)
        spent, held = _costs(entries, seen, folder, console, config.timing)
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        part = _left_out(study)
        about = About(config.title, now, asked.whole_command, text, config.seeds, amendments, part, remarks)
        summary = summarise(entries, seen, about, spent, held)
        return _report(summary, folder, console, bool(part), time.perf_counter() - started)


def _run(
    study: Study, engine: Engine, folder: Folder, console: Console, again: bool
) -> tuple[list[Entry], Mapping[str, Record]]:
    """Make all runs that are missing; the arms, and the records of everything that was asked for."""
    shown = partial(_watch, console, folder.store)
    lab = laboratory.Laboratory(folder.store, engine, folder.checkpoints, shown, again=again)
    entries = study.entries(lab.tune(study.searches()))
    # Seed by seed: what is interrupted has whole pairs.
    runs = [entry.runs[seed] for seed in entries[0].runs for entry in entries]
    lab.demand(runs, "Final runs")
    laboratory.dismiss(engine)
    return entries, lab.seen


def _watch(console: Console, store: Store, total: int, title: str) -> AbstractContextManager[Callable[[Record], None]]:
    say(console, f"{title}: {total} runs")
    return watch(console, total, store)


def _left_out(study: Study) -> list[str]:
    """What a part of a comparison has to say of the whole."""
    left = [arm.name for arm in study.config.all_arms() if study.only and arm.name not in study.only]
    if not left:
        return []
    return [
        f"This is a part of a comparison: {', '.join(left)} are left out, and Holm's correction is over what is shown "
        "alone. Don't pick arms by it: the whole one corrects for all of them."
    ]


def _look(study: Study, lines: Lines, console: Console) -> Mapping[str, list[str]]:
    """Say where the hooks will be, or what is wrong.

    Raises:
        ConfigError: something is.
    """
    found = checks.look(study, lines)
    if found.errors:
        raise ConfigError("\n\n".join([*found.errors, "Nothing was trained."]))
    for name, planned in found.plans.items():
        say(console, f"{name}: {planned}\n")
    for note in dict.fromkeys(note for notes in found.remarks.values() for note in notes):
        say(console, f"Note: {note}")
    return found.remarks


Costs = dict[tuple[str, str], Spread]


def _costs(
    entries: Sequence[Entry], seen: Mapping[str, Record], folder: Folder, console: Console, seconds: float
) -> tuple[Costs, Costs]:
    """Ratios of time and of memory by cell and arm, from a process of its own; of arms that can be trained at all."""
    if not seconds:
        return {}, {}
    say(console, "Timing training steps, in one process with no run beside it ...")
    entries = [entry for entry in entries if any(seen[run.key].done for run in entry.runs.values() if run.key in seen)]
    try:
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            found = pool.submit(costs.measured, entries, seconds, folder.costs).result()
    except Exception as error:
        # What the runs found is not lost with it.
        say(console, f"Nothing was timed, and the report says so: {type(error).__name__}: {error}")
        return {}, {}
    return {key: spent for key, (spent, _) in found.items()}, {key: held for key, (_, held) in found.items()}


def _report(summary: Summary, folder: Folder, console: Console, part: bool, seconds: float) -> int:
    """Print what was found and write the page; the exit status."""
    for cell in summary.cells:
        console.print(table(cell))
        for sentence in cell.words:
            say(console, sentence)
        say(console, "")
    for failure in summary.failures:
        say(console, f"FAILED: {failure.cell}, {failure.arm}, seed {failure.seed}: {failure.kind}: {failure.message}")
    # A part of the arms is not to take the place of the report of all.
    html, numbers = (path.with_stem(f"{path.stem}-only") if part else path for path in (folder.report, folder.summary))
    try:
        replace_text(numbers, summary.model_dump_json(indent=1))
        page.write(summary, html)
    except OSError as error:
        say(
            console,
            f"compare.py: the report can't be written: {error}.\n  The runs are kept: the same command makes it.",
        )
        return 2
    say(console, f"Total time: {seconds:.0f} s\nAll numbers: {numbers}\nReport: {html.resolve()}")
    return 1 if summary.failures or not all(_sound(cell.controls) for cell in summary.cells) else 0


def _sound(controls: Controls) -> bool:
    """Whether what has to hold did; that none against none excludes 0 happens once in 20 times."""
    equal = controls.aa_equal == controls.aa_seeds
    return equal and controls.paired and controls.unchanged == controls.hooked


if __name__ == "__main__":
    sys.exit(main())
