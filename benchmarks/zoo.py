"""Every timm and torchvision architecture, with hooks and without: `python benchmarks/zoo.py`.

Each model is built with random weights for the smallest input that it takes (at least 32 pixels), on real values:
plan, inject DropBlock or what suits the rank at its normalization layers, one training step, and remove. What must be
equal is compared bit for bit (models/check.py). A model that is too large for memory is planned and hooked on the meta
device, and counted apart.

A whole run takes an hour on two cores, in two shards: `--shard 1/2` and `--shard 2/2`, each in a process of its own.
Every model is written down before it is begun and when it is done, so that an interrupted run goes on behind the
model that it was at: start it again with the same `--out`. Each shard that ends writes zoo.json and zoo.md.
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
from models.sweep import GIB, Journal, checked
from terminal import make_console, say


def main(argv: Sequence[str] | None = None) -> int:
    """Check the models of this shard; 1 if one failed."""
    options = parse_options(argv)
    console = make_console()
    if options.report:
        return conclude(console, options, options.report)
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    journal = Journal(options.out, options.shard)
    if options.fresh:
        journal.path.unlink(missing_ok=True)
    chosen = shard_of(select(options), options.shard)
    journal.note_crash()
    done = journal.done(options.again)
    left = [name for name in chosen if str(name) not in done]
    many = f"{len(chosen)} models in this shard, {len(chosen) - len(left)} of them done"
    say(console, f"{many}; {options.memory:.1f} GiB for all shards")
    for count, name in enumerate(left, 1):
        journal.write({"started": str(name)})
        record = checked(name, options)
        journal.write(record)
        say(console, f"{count}/{len(left)} {in_a_line(record)}")
    return conclude(console, options, [options.out])


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--shard", type=_shard, default=(1, 1), metavar="I/N", help="the I-th of N parts, from 1")
    parser.add_argument(
        "--only",
        type=_expression,
        default="",
        metavar="PATTERN",
        help="names such as timm:resnet18 in which this expression is found",
    )
    parser.add_argument("--library", choices=("timm", "torchvision"))
    parser.add_argument("--limit", type=int, help="at most so many models, before they are sharded")
    parser.add_argument("--memory", type=float, help="GiB for all shards; 3/4 of what is free unless told")
    parser.add_argument("--timeout", type=int, default=900, help="seconds for one model")
    parser.add_argument("--threads", type=int, default=1, help="PyTorch's threads")
    parser.add_argument("--out", type=Path, default=Path("runs/zoo"), help="folder of all that is written; runs/zoo")
    parser.add_argument("--fresh", action="store_true", help="begin this shard anew")
    parser.add_argument("--again", nargs="+", default=(), choices=report.STATUSES, help="what to check once more")
    parser.add_argument("--report", type=Path, nargs="+", metavar="DIR", help="only write zoo.json and zoo.md of these")
    parser.add_argument("--hardware", default="", help="what to call this machine; its CPU unless told")
    options = parser.parse_args(argv)
    if options.memory is None:
        options.memory = 0.75 * available() / GIB
    if options.threads < 1 or options.timeout < 1 or options.memory <= 0:
        parser.error("--threads and --timeout must be at least 1, --memory more than 0")
    if not options.report and not select(options):
        parser.error(f"no model has {options.only!r} in its name, as in timm:resnet18 or torchvision:resnet18")
    if empty := [str(folder) for folder in options.report or () if not report.records([folder])]:
        parser.error(f"--report: {', '.join(empty)} holds no results")
    return options


def _expression(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a regular expression: {error}") from None
    return text


def _shard(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise argparse.ArgumentTypeError(f"a shard is I/N with I from 1 to N, got {text!r}")
    return int(index), int(count)


def available() -> float:
    """Bytes of memory that are free now; 8 GiB where the system does not tell."""
    info = Path("/proc/meminfo")
    found = re.search(r"MemAvailable:\s+(\d+) kB", info.read_text()) if info.exists() else None
    return int(found[1]) * 1024.0 if found else 8.0 * GIB


def select(options: argparse.Namespace) -> list[Name]:
    """The names that were asked for."""
    named = [name for name in catalog.names(options.library) if re.search(options.only, str(name))]
    return named[: options.limit]


def shard_of(names: list[Name], shard: tuple[int, int]) -> list[Name]:
    """Every N-th name: models of one family are alike in size, and lie beside one another."""
    index, count = shard
    return names[index - 1 :: count]


def in_a_line(record: dict[str, Any]) -> str:
    """A record as it is told while running."""
    more = record.get("error") or f"{record.get('input', '')} {record.get('sites', '')}"
    return f"{record['status']:7} {record['name']} {record.get('seconds', 0):.1f} s {more}"


def conclude(console: Console, options: argparse.Namespace, folders: Sequence[Path]) -> int:
    """Write what all shards found so far, and say it in short; 1 if there is a failure."""
    results = report.merge(folders, catalog.names(), options.hardware)
    report.write(options.out, results)
    say(console, report.in_short(results))
    say(console, f"All of it: {options.out / 'zoo.md'} and zoo.json")
    return 1 if any(record["status"] in report.BAD for record in results["models"]) else 0


if __name__ == "__main__":
    sys.exit(main())
