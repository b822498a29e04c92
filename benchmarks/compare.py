"""Compare regularizers in paired training runs: `python benchmarks/compare.py --config benchmarks/configs/quick.yaml`.

It can be interrupted at any time. The same command resumes it and trains only the missing runs.
"""

import argparse
import datetime
import os
import packages  # noqa: F401
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--config", type=Path, help="YAML file, such as benchmarks/configs/quick.yaml")
    add("--out", type=Path, help="folder for the report and the runs (default: runs/CONFIG_NAME)")
    add("--report", type=Path, metavar="SUMMARY", help="write report.html beside a stored summary.json, and exit")
    add("--check", type=Path, metavar="SUMMARY", help="train the first seed again, with the settings of a summary.json")
    add("--workers", type=int, default=os.cpu_count() or 1, help="number of parallel runs, with one thread each")
    add("--dry-run", action="store_true", help="print sites, runs and power without training")
    options = parser.parse_args(argv)
    if options.workers < 1:
        parser.error(f"--workers must be at least 1, got {options.workers}")
    if options.check and options.out in (None, options.check.parent):
        parser.error("--check compares new runs with stored ones: pass another folder, such as --out runs/check")
    if not (options.config or options.report):
        parser.error("nothing to compare: pass --config benchmarks/configs/quick.yaml")
    options.out = options.out or Path("runs") / (options.config.stem if options.config else "compare")
    options.command = shlex.join(["python", "benchmarks/compare.py", *(sys.argv[1:] if argv is None else argv)])
    return options


if __name__ == "__main__":
    parse(None)  # before the other imports, so that --help needs no package

from rich.console import Console

from comparison import costs, preview
from comparison.analysis import text
from comparison.analysis.pairs import by_test_set
from comparison.analysis.schema import METRICS, Summary, without_commas
from comparison.analysis.summary import Costs, summarize
from comparison.engines.store import Folder, StoreError, replace_file
from comparison.engines.work import Runner, train
from comparison.report import page
from comparison.report.table import WIDTH, table
from comparison.run.record import Record
from comparison.spec.config import read
from comparison.spec.run_spec import ConfigError, cell_of
from comparison.spec.study import Entry, Study


def main(argv: Sequence[str] | None = None) -> int:
    """Train, compare and report. Return 1 if a run failed or a control does not hold, 2 if the request is invalid."""
    args = parse(argv)
    try:
        if args.report:
            page.write(Summary.model_validate_json(args.report.read_text()), args.report.with_name("report.html"))
            return 0
        return _compare(args)
    except (ConfigError, StoreError, FileNotFoundError) as error:
        print(f"compare.py: {error}")
        return 2
    except KeyboardInterrupt:
        print(f"\nInterrupted. Finished runs are kept in {args.out}; the same command resumes the comparison.")
        return 130


def _compare(args: argparse.Namespace) -> int:
    started = time.perf_counter()
    config, written = read(args.config)
    study = Study(config)
    remarks, plans, sizes = preview.check_study(study)
    for name, planned in plans.items():
        print(f"{name}: {planned}\n")
    for note in dict.fromkeys([*sizes, *(note for notes in remarks.values() for note in notes)]):
        print(f"Note: {note}")
    folder = Folder(args.out)
    if args.dry_run:
        print(f"{preview.outlook(study, folder.store)}\nDry run: nothing was trained.")
        return 0
    folder.claim(config)
    trainer = Runner(folder.store, partial(train, workers=args.workers))
    if args.check:
        return _check(study, Summary.model_validate_json(args.check.read_text()), trainer)
    entries = study.entries(trainer.tune(study.searches()))
    # Seed by seed, so that an interrupted comparison has complete pairs.
    trainer.ensure([entry.runs[seed] for seed in entries[0].runs for entry in entries], "Final runs")
    measured = _costs(entries, trainer.requested, config.timing)
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    info = {"title": config.title, "created": created, "command": args.command, "config": written}
    summary = summarize(entries, trainer.requested, measured, remarks, seeds=config.seeds, **info)
    return _report(summary, folder, time.perf_counter() - started)


def _check(study: Study, stored: Summary, trainer: Runner) -> int:
    """Train the first seed of each variant with its stored settings; return 1 if a result is not the stored one."""
    known = {(cell.title, arm.name): arm for cell in stored.cells for arm in cell.arms}
    cells, first = [cell_of(*both) for both in study.config.cells()], study.seeds[0]
    tunings = {(cell, name): arm.tuning for (title, name), arm in known.items() for cell in cells
               if arm.tuning and title.startswith(without_commas(cell).rstrip(")"))}  # fmt: skip
    entries, differ = study.entries(tunings), 0
    for test_set, scored in by_test_set(trainer.ensure([one.runs[first] for one in entries], "First seeds")).items():
        for entry in entries:
            title = without_commas(", ".join(filter(None, (entry.cell, test_set))))
            old, new = known.get((title, entry.arm.name)), scored[entry.runs[first].key].outcome
            pairs = [(old.values[one][0], new[one]) for one in METRICS] if old and new and old.seeds[0] == first else []
            differ += not pairs or any(a != b for a, b in pairs)
            numbers = ", ".join(f"{a:.6g}" if a == b else f"{a:.6g} is now {b:.6g}" for a, b in pairs)
            print(f"{title}, {entry.arm.name}: {numbers or 'not in both'}")
    print(f"{differ} results differ from the stored ones.")
    return 1 if differ else 0


def _costs(entries: Sequence[Entry], records: Mapping[str, Record], seconds: float) -> Costs:
    """Measure time and memory ratios by cell and arm in a separate process; skip arms without a finished run."""
    if not seconds:
        return {}
    print("Timing training steps in a single process, with no other runs active ...")
    done = {key for key, record in records.items() if record.done}
    entries = [entry for entry in entries if done & {run.key for run in entry.runs.values()}]
    try:
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            return pool.submit(costs.measure, entries, seconds).result()
    except Exception as error:
        # A failure to measure costs must not lose the results of the runs.
        print(f"Timing failed; the report has no costs: {type(error).__name__}: {error}")
        return {}


def _report(summary: Summary, folder: Folder, seconds: float) -> int:
    # Wide enough in a pipe that no row of a table is wrapped.
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
    for cell in summary.cells:
        console.print(table(cell))
        limits = text.sentences(cell, "notes", "controls")
        print(*text.sentences(cell, "cautions"), text.verdict(cell), *limits, "", sep="\n")
    for failure in summary.failures:
        print(f"FAILED: {failure.cell}, {failure.arm}, seed {failure.seed}: {failure.kind}: {failure.message}")
    replace_file(folder.summary, summary.model_dump_json(indent=1).encode())
    page.write(summary, folder.report)
    print(f"Total time: {seconds:.0f} s\nAll numbers: {folder.summary}\nReport: {folder.report.resolve()}")
    return 1 if summary.failures or not all(cell.controls.hold for cell in summary.cells) else 0


if __name__ == "__main__":
    sys.exit(main())
