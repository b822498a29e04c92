"""Compare regularizers in paired training runs: `python benchmarks/compare.py --config benchmarks/configs/quick.yaml`.

It can be interrupted at any time. The same command resumes it and trains only the missing runs.
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

try:
    from rich.console import Console

    from comparison import checks, costs, estimate
    from comparison.analysis.schema import Controls, Spread, Summary
    from comparison.analysis.summary import About, summarize
    from comparison.analysis.text import join
    from comparison.engines import runner
    from comparison.engines.folder import Folder
    from comparison.engines.store import StoreError, replace_file
    from comparison.engines.work import EngineError
    from comparison.report import page
    from comparison.report.progress import watch
    from comparison.report.table import table
    from comparison.run.record import Record
    from comparison.spec import options
    from comparison.spec.errors import ConfigError
    from comparison.spec.study import Entry, Study
    from terminal import make_console, say
except ModuleNotFoundError as error:
    raise SystemExit(
        f"compare.py: {error.name} is not installed.\n  install what it needs: pip install -e '.[compare]'\n"
        "Nothing was trained."
    ) from None


def main(argv: Sequence[str] | None = None) -> int:
    """Train, compare and report. Return 1 if a run failed or a control does not hold, 2 if the request is invalid."""
    args = options.parse(argv, (__doc__ or "").partition(":")[0])
    console = make_console()
    try:
        if args.report:
            page.write(Summary.model_validate_json(args.report.read_text()), args.report.with_name("report.html"))
            return 0
        return _compare(args, console)
    except (ConfigError, StoreError, EngineError) as error:
        say(console, f"compare.py: {error}")
        return 2
    except KeyboardInterrupt:
        say(console, f"\nInterrupted. Finished runs are kept in {args.out}; the same command resumes the comparison.")
        return 130


def _compare(args: argparse.Namespace, console: Console) -> int:
    started = time.perf_counter()
    config, text = options.config_of(args)
    study = Study(config, args.only, args.command)
    remarks = _check(study, console)
    with Folder(args.out) as folder:
        if args.dry_run:
            jobs = estimate.batches(study, folder.store)
            console.print(estimate.table(jobs))
            compared = sum(arm.kind not in ("none", "probe") for arm in study.arms)
            say(console, estimate.outlook(jobs, args.workers, config.seeds, compared))
            say(console, "Dry run: nothing was trained.")
            return 0
        amendments = folder.claim(config, args.amend)
        entries, records = _run(study, folder, console, args)
        time_ratios, memory_ratios = _costs(entries, records, folder, console, config.timing)
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        partial_note = _partial_note(study)
        about = About(config.title, now, args.whole_command, text, config.seeds, amendments, partial_note, remarks)
        summary = summarize(entries, records, about, time_ratios, memory_ratios)
        return _report(summary, folder, console, bool(partial_note), time.perf_counter() - started)


def _run(
    study: Study, folder: Folder, console: Console, args: argparse.Namespace
) -> tuple[list[Entry], Mapping[str, Record]]:
    """Train all missing runs. Return the arms and the records of all requested runs."""
    engine = runner.choose_engine(args.engine, args.workers, args.address)
    trainer = runner.Runner(folder.store, engine, folder.checkpoints, partial(_watch, console), args.retry)
    entries = study.entries(trainer.tune(study.searches()))
    # Seed by seed, so that an interrupted comparison has complete pairs.
    trainer.ensure([entry.runs[seed] for seed in entries[0].runs for entry in entries], "Final runs")
    return entries, trainer.requested


def _watch(console: Console, total: int, title: str) -> AbstractContextManager[Callable[[Record], None]]:
    say(console, f"{title}: {total} runs")
    return watch(console, total)


def _partial_note(study: Study) -> list[str]:
    """A note for the report if `--only` excludes arms."""
    excluded = [arm.name for arm in study.config.all_arms() if study.only and arm.name not in study.only]
    if not excluded:
        return []
    return [
        f"This is a partial comparison without {join(excluded)}. Holm's correction covers only the arms shown. "
        "Use the complete comparison, which corrects for all arms, to choose between them."
    ]


def _check(study: Study, console: Console) -> Mapping[str, list[str]]:
    """Check the study, print the plan of each arm, and return the notes on the data by cell.

    Raises:
        ConfigError: The study has errors.
    """
    found = checks.check_study(study)
    if found.errors:
        raise ConfigError("\n\n".join([*found.errors, "Nothing was trained."]))
    for name, planned in found.plans.items():
        say(console, f"{name}: {planned}\n")
    for note in dict.fromkeys(note for notes in found.remarks.values() for note in notes):
        say(console, f"Note: {note}")
    return found.remarks


Costs = dict[tuple[str, str], Spread]


def _costs(
    entries: Sequence[Entry], records: Mapping[str, Record], folder: Folder, console: Console, seconds: float
) -> tuple[Costs, Costs]:
    """Measure time and memory ratios by cell and arm in a separate process; skip arms without a finished run."""
    if not seconds:
        return {}, {}
    say(console, "Timing training steps in a single process, with no other runs active ...")
    entries = [
        entry for entry in entries if any(records[run.key].done for run in entry.runs.values() if run.key in records)
    ]
    try:
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            found = pool.submit(costs.measure, entries, seconds, folder.costs).result()
    except Exception as error:
        # A failure to measure costs must not lose the results of the runs.
        say(console, f"Timing failed; the report has no costs: {type(error).__name__}: {error}")
        return {}, {}
    return {key: time for key, (time, _) in found.items()}, {key: memory for key, (_, memory) in found.items()}


def _report(summary: Summary, folder: Folder, console: Console, partial: bool, seconds: float) -> int:
    """Print the results, write the report, and return the exit status."""
    for note in (*summary.notes, *summary.amendments):
        say(console, f"Note: {note}")
    for cell in summary.cells:
        console.print(table(cell))
        for sentence in cell.words:
            say(console, sentence)
        say(console, "")
    for failure in summary.failures:
        say(console, f"FAILED: {failure.cell}, {failure.arm}, seed {failure.seed}: {failure.kind}: {failure.message}")
    # A partial comparison must not overwrite the complete report.
    html, numbers = (
        path.with_stem(f"{path.stem}-only") if partial else path for path in (folder.report, folder.summary)
    )
    try:
        replace_file(numbers, summary.model_dump_json(indent=1).encode())
        page.write(summary, html)
    except OSError as error:
        say(
            console,
            f"compare.py: cannot write the report: {error}.\n"
            "  All runs are kept; run the same command again to write it.",
        )
        return 2
    say(console, f"Total time: {seconds:.0f} s\nAll numbers: {numbers}\nReport: {html.resolve()}")
    return 1 if summary.failures or not all(_controls_hold(cell.controls) for cell in summary.cells) else 0


def _controls_hold(controls: Controls) -> bool:
    """Whether all deterministic controls hold; the interval of none against none excludes 0 once in 20 times."""
    equal = controls.aa_equal == controls.aa_seeds
    return equal and controls.paired and controls.unchanged == controls.hooked


if __name__ == "__main__":
    sys.exit(main())
