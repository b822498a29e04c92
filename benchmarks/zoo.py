"""Check every timm and torchvision architecture with hookdrop: `python benchmarks/zoo.py`.

Build each model with random weights for its smallest valid input (at least 32 pixels), plan, inject DropBlock (or
Dropout, depending on the rank) at its normalization layers, run one training step, and remove the hooks.
models/check.py compares states and outputs bit for bit. Models that do not fit in memory are planned and hooked on the
meta device, and counted separately.

With `--recipe NAME`, the sites are those of a DropBlock recipe. Models that it refuses are counted separately.

A full run takes an hour on two cores with two shards, `--shard 1/2` and `--shard 2/2`, each in its own process. A
journal records when each model starts and ends. To resume an interrupted run, start it again with the same `--out`: it
continues with the next model. Each shard writes zoo.json and zoo.md when it ends.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from models import catalog, report
from models.catalog import Name
from models.sweep import GIB, Journal, check_model
from terminal import make_console, say

_RECIPES = ("dropblock_resnet", "dropblock_unet", "dropblock_detector")


def main(argv: Sequence[str] | None = None) -> int:
    """Check the models of this shard; return 1 if a model failed or crashed."""
    options = parse_options(argv)
    console = make_console()
    if options.report:
        return write_report(console, options, options.report)
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    journal = Journal(options.out, options.shard)
    if options.fresh:
        journal.path.unlink(missing_ok=True)
    selected = shard_of(select_models(options), options.shard)
    journal.record_crash()
    done = journal.done(options.again)
    pending = [name for name in selected if str(name) not in done]
    progress = f"{len(selected)} models in this shard, {len(selected) - len(pending)} done"
    say(console, f"{progress}; memory limit of all shards: {options.memory:.1f} GiB")
    for count, name in enumerate(pending, 1):
        journal.write({"started": str(name)})
        record = check_model(name, options)
        journal.write(record)
        say(console, f"{count}/{len(pending)} {one_line(record)}")
    return write_report(console, options, [options.out])


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--shard", type=_shard, default=(1, 1), metavar="I/N", help="check part I of N; I starts at 1")
    parser.add_argument(
        "--only",
        type=_regular_expression,
        default="",
        metavar="PATTERN",
        help="regular expression to search in names such as timm:resnet18",
    )
    parser.add_argument("--library", choices=("timm", "torchvision"))
    parser.add_argument("--recipe", choices=_RECIPES, default="", help="check this recipe instead of all norms")
    parser.add_argument("--limit", type=int, help="maximum number of models, before sharding")
    parser.add_argument("--memory", type=float, help="limit of all shards in GiB (default: 3/4 of free memory)")
    parser.add_argument("--timeout", type=int, default=900, help="seconds per model (default: 900)")
    parser.add_argument("--threads", type=int, default=1, help="PyTorch threads (default: 1)")
    parser.add_argument("--out", type=Path, default=Path("runs/zoo"), help="output folder (default: runs/zoo)")
    parser.add_argument("--fresh", action="store_true", help="discard the results of this shard")
    parser.add_argument("--again", nargs="+", default=(), choices=report.STATUSES, help="statuses to check again")
    parser.add_argument(
        "--report", type=Path, nargs="+", metavar="DIR", help="only merge these folders into zoo.json and zoo.md"
    )
    parser.add_argument("--hardware", default="", help="machine name in the report (default: its CPU)")
    options = parser.parse_args(argv)
    if options.memory is None:
        options.memory = 0.75 * available_memory() / GIB
    if options.threads < 1 or options.timeout < 1 or options.memory <= 0:
        parser.error("--threads and --timeout must be at least 1, and --memory must be positive")
    if not options.report and not select_models(options):
        parser.error(f"no model name matches {options.only!r}; names look like timm:resnet18 or torchvision:resnet18")
    if empty := [str(folder) for folder in options.report or () if not report.records([folder])]:
        parser.error(f"--report: no results in {', '.join(empty)}")
    return options


def _regular_expression(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a regular expression: {error}") from None
    return text


def _shard(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise argparse.ArgumentTypeError(f"expected I/N with 1 <= I <= N, got {text!r}")
    return int(index), int(count)


def available_memory() -> float:
    """Return the free memory in bytes, or 8 GiB where the system does not report it."""
    info = Path("/proc/meminfo")
    found = re.search(r"MemAvailable:\s+(\d+) kB", info.read_text()) if info.exists() else None
    return int(found[1]) * 1024.0 if found else 8.0 * GIB


def select_models(options: argparse.Namespace) -> list[Name]:
    """Return the names selected by --library, --only and --limit."""
    named = [name for name in catalog.names(options.library) if re.search(options.only, str(name))]
    return named[: options.limit]


def shard_of(names: list[Name], shard: tuple[int, int]) -> list[Name]:
    """Take every N-th name: neighbors belong to one family and have similar sizes, so the shards are balanced."""
    index, count = shard
    return names[index - 1 :: count]


def one_line(record: dict[str, Any]) -> str:
    """Format a record for the progress output."""
    details = record.get("error") or f"{record.get('input', '')} {record.get('sites', '')}"
    return f"{record['status']:7} {record['name']} {record.get('seconds', 0):.1f} s {details}"


def write_report(console: Console, options: argparse.Namespace, folders: Sequence[Path]) -> int:
    """Write the results of all shards so far and print a summary; return 1 if there is a failure."""
    results = report.merge(folders, catalog.names(), options.hardware, options.recipe)
    report.write(options.out, results)
    say(console, report.summary(results))
    say(console, f"Full report: {options.out / 'zoo.md'} and zoo.json")
    return 1 if any(record["status"] in report.FAILURES for record in results["models"]) else 0


if __name__ == "__main__":
    sys.exit(main())
