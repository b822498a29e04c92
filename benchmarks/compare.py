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
    add("--workers", type=int, default=os.cpu_count() or 1, help="number of parallel runs, with one thread each")
    add("--dry-run", action="store_true", help="print sites, runs and power without training")
    options = parser.parse_args(argv)
    if options.workers < 1:
        parser.error(f"--workers must be at least 1, got {options.workers}")
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
from comparison.analysis.schema import Summary
from comparison.analysis.summary import Costs, summarize
from comparison.engines.store import Folder, StoreError, replace_file
from comparison.engines.work import Runner, train
from comparison.report import page
from comparison.report.table import WIDTH, table
from comparison.run.record import Record
from comparison.spec.config import read
from comparison.spec.run_spec import ConfigError
from comparison.spec.study import Entry, Study


def main(argv: Sequence[str] | None = None) -> int:
    """Train, compare and report. Return 1 if a run failed or a control does not hold, 2 if the request is invalid."""
    args = parse(argv)
    try:
        if args.report:
            page.write(Summary.model_validate_json(args.report.read_text()), args.report.with_name("report.html"))
            return 0
        return _compare(args)
    except (ConfigError, StoreError) as error:
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
    entries = study.entries(trainer.tune(study.searches()))
    # Seed by seed, so that an interrupted comparison has complete pairs.
    trainer.ensure([entry.runs[seed] for seed in entries[0].runs for entry in entries], "Final runs")
    measured = _costs(entries, trainer.requested, config.timing)
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    info = {"title": config.title, "created": created, "command": args.command, "config": written}
    summary = summarize(entries, trainer.requested, measured, remarks, seeds=config.seeds, **info)
    return _report(summary, folder, time.perf_counter() - started)


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
    """Print the results, write the report, and return the exit status."""
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
