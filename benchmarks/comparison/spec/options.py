"""The command line: a config file, or flags, or flags that overrule the file."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from comparison.spec.config import Config, check
from comparison.spec.errors import ConfigError, nearest, or_nearest
from comparison.spec.yaml_lines import Lines, load

_OVERRULING = ("title", "seeds", "epochs", "batch_size", "timing", "max_steps", "device", "precision", "schedule")


def parse(argv: Sequence[str] | None, description: str) -> argparse.Namespace:
    """The command line as it was typed."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    add = parser.add_argument
    add("--config", type=Path, help="YAML file, as benchmarks/configs/quick.yaml; flags overrule what it says")
    add("--out", type=Path, help="folder of the report and of the database of runs (runs/ and the config's name)")
    what = parser.add_argument_group("what is compared")
    add = what.add_argument
    add("--models", nargs="+", metavar="NAME", help="of timm or torchvision, as resnet18 or torchvision:resnet18")
    add(
        "--data",
        nargs="+",
        metavar="NAME",
        help="digits, digits-noisy, synthetic-cue, cifar10, cifar100, imagefolder:PATH",
    )
    add("--train-sizes", nargs="+", type=int, metavar="N", help="training images")
    add("--layers", nargs="+", metavar="GLOB", help="the sites, as 'layer[34].*.bn2'")
    add("--arms", nargs="+", metavar="TEXT", help="regularizers, as 'DropBlock(p=0.1, block_size=3)'")
    add("--recipes", nargs="+", metavar="TEXT", help="recipes, as 'dropblock_resnet(p=0.1, block_size=3)'")
    add(
        "--peers",
        nargs="+",
        metavar="TEXT",
        help="as 'timm.DropBlock2d(drop_prob=0.1, block_size=3)', at equal p and fraction",
    )
    add("--only", nargs="+", metavar="ARM", default=[], help="leave out all other arms but none and the controls")
    add("--schedule", help="LinearSchedule, 'EarlySchedule(cutoff=0.5)', none, ...; fractions are of all steps")
    add("--seeds", type=int, help="pairs of runs, fixed before the first")
    add("--epochs", type=int)
    add("--batch-size", type=int)
    add("--lr", type=float)
    add("--weight-decay", type=float)
    add("--precision", choices=["float32", "bfloat16"])
    add("--compile", action="store_true", default=None, help="train under torch.compile")
    add("--device", help="cpu or cuda")
    add("--strict", action="store_true", default=None, help="an unreadable image is an error")
    add("--max-steps", type=int, metavar="N", help="stop every run after N optimizer steps, to see that it works")
    add("--title")
    how = parser.add_argument_group("how")
    add = how.add_argument
    add("--engine", choices=["local", "ray"], default="local", help="processes of this machine, or Ray's")
    add("--address", help="of a Ray cluster that is running; one is started on this machine without it")
    add("--workers", type=int, default=os.cpu_count() or 1, help="runs at a time, one thread each")
    add("--timing", type=float, metavar="SECONDS", help="for measuring what a step costs; 0 leaves it out")
    add("--dry-run", action="store_true", help="print the sites, the runs and what they take, and train nothing")
    add("--retry", action="store_true", help="try runs again that failed with an error, now that its cause is mended")
    add(
        "--amend",
        metavar="REASON",
        help="go on in --out although the comparison is another one now; the report says so",
    )
    options = parser.parse_args(argv)
    if options.amend is not None and not options.amend.strip():
        parser.error("--amend wants a reason, which the report will say")
    if options.workers < 1:
        parser.error(f"--workers must be at least 1, got {options.workers}")
    if options.address and options.engine != "ray":
        parser.error("--address is of a Ray cluster: add --engine ray")
    if options.config is None and options.models is None:
        parser.error(
            "what is to be compared? --config benchmarks/configs/quick.yaml, or --models, --data, --layers ..."
        )
    options.out = options.out or Path("runs") / (options.config.stem if options.config else "compare")
    words = list(sys.argv[1:] if argv is None else argv)
    options.whole_command = shlex.join(["python", "benchmarks/compare.py", *words])
    options.command = shlex.join(["python", "benchmarks/compare.py", *_without_only(words)])
    return options


def config_of(options: argparse.Namespace) -> tuple[Config, Lines, str]:
    """The comparison, where its parts were written, and the YAML text.

    Raises:
        ConfigError: the file can't be read, or something in it or in the flags is wrong.
    """
    text, lines = "", Lines("command line")
    settings: dict[str, Any] = {}
    if options.config:
        try:
            text = options.config.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(_unreadable(options.config, error)) from None
        settings, lines = load(text, str(options.config))
    flags = _flags(options, settings)
    config = check({**settings, **flags}, lines)
    if flags:
        text += "\n# overruled by flags: " + ", ".join(f"{name}={value!r}" for name, value in flags.items()) + "\n"
    known = [arm.name for arm in config.all_arms()]
    for name in options.only:
        if name not in known:
            raise ConfigError(f"--only: no arm is called {name!r}.\n{or_nearest(name, known)}\nNothing was trained.")
    return config, lines, text


def _flags(options: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Any]:
    """What flags say, in the form of the file."""
    said = {name: getattr(options, name) for name in ("models", "layers", "train_sizes", *_OVERRULING, "compile")}
    found = {name: value for name, value in said.items() if value is not None}
    if options.data or options.strict:
        names = options.data or settings.get("data") or []
        data = [
            {"name": one} if isinstance(one, str) else one for one in (names if isinstance(names, list) else [names])
        ]
        strict = {"strict": True} if options.strict else {}
        found["data"] = [{**one, **strict} if isinstance(one, dict) else one for one in data]
    arms = [*(options.arms or []), *({"recipe": text} for text in options.recipes or [])]
    for text in options.peers or []:
        arms += [{"peer": text, "equal": "p"}, {"peer": text, "equal": "fraction"}]
    if arms:
        found["arms"] = arms
    optimizer = {name: getattr(options, name) for name in ("lr", "weight_decay") if getattr(options, name) is not None}
    if optimizer:
        there = settings.get("optimizer")
        found["optimizer"] = {**(there if isinstance(there, dict) else {}), **optimizer}
    return found


def _without_only(words: Sequence[str]) -> list[str]:
    """The command line without what differs between the rows of a report."""
    kept, leaving = [], False
    for word in words:
        if word.startswith("--only="):
            continue
        leaving = word == "--only" or (leaving and not word.startswith("--"))
        if not leaving and word != "--dry-run":
            kept.append(word)
    return kept


def _unreadable(path: Path, error: Exception) -> str:
    beside = sorted(str(one) for one in path.parent.glob("*.y*ml")) if path.parent.is_dir() else []
    ours = sorted(str(one.name) for one in (Path(__file__).parents[2] / "configs").glob("*.yaml"))
    close = nearest(str(path), beside)
    offer = f"  did you mean: {', '.join(close)}" if close else f"  in benchmarks/configs there are: {', '.join(ours)}"
    return f"--config: can't read {path}: {getattr(error, 'strerror', None) or error}.\n{offer}\nNothing was trained."
