"""The command line: a config file, flags, or flags that override the file."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from comparison.spec.config import Config, validate
from comparison.spec.errors import ConfigError, nearest, suggest

# What is compared without a file and without --arms: recipes choose their own layers.
_DEFAULTS = {"arms": ["dropblock_resnet(p=0.1)", "stochastic_depth(p=0.1)"], "epochs": 20}
_OVERRIDES = ("title", "seeds", "epochs", "batch_size", "timing", "max_steps", "device", "precision", "schedule")


def parse(argv: Sequence[str] | None, description: str) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    add = parser.add_argument
    add("--config", type=Path, help="YAML file, such as benchmarks/configs/quick.yaml; flags override its settings")
    add("--out", type=Path, help="folder for the report and the runs (default: runs/CONFIG_NAME)")
    add("--report", type=Path, metavar="SUMMARY", help="write report.html beside a stored summary.json, and exit")
    what = parser.add_argument_group("what to compare")
    add = what.add_argument
    add("--models", "--model", nargs="+", metavar="NAME", help="timm or torchvision models, such as resnet18")
    add(
        "--data",
        nargs="+",
        metavar="NAME",
        help="digits, digits-noisy, synthetic-cue, cifar10, cifar100, emoji, or a folder with a folder for each class",
    )
    add("--train-sizes", nargs="+", type=int, metavar="N", help="training set sizes")
    add("--layers", nargs="+", metavar="GLOB", help="sites, such as 'layer[34].*.bn2'")
    add(
        "--arms",
        nargs="+",
        metavar="TEXT",
        help="such as 'DropBlock(p=0.1)', a recipe, or 'timm.DropPath(drop_prob=0.1)'",
    )
    add("--only", nargs="+", metavar="ARM", default=[], help="run only these arms, none and the controls")
    add("--schedule", help="LinearSchedule, 'EarlySchedule(cutoff=0.5)', none, ...; a float is a fraction of all steps")
    add("--seeds", type=int, help="number of pairs, fixed before the first run")
    add("--epochs", type=int)
    add("--batch-size", type=int)
    add("--lr", type=float)
    add("--weight-decay", type=float)
    add("--precision", choices=["float32", "bfloat16"])
    add("--compile", action="store_true", default=None, help="train with torch.compile")
    add("--device", help="cpu or cuda")
    add("--max-steps", type=int, metavar="N", help="stop every run after N optimizer steps, for a smoke test")
    add("--title")
    how = parser.add_argument_group("how to run it")
    add = how.add_argument
    add("--engine", choices=["local", "ray"], default="local", help="local processes, or Ray")
    add("--address", help="address of a running Ray cluster; by default Ray starts on this machine")
    add("--workers", type=int, default=os.cpu_count() or 1, help="number of parallel runs, with one thread each")
    add("--timing", type=float, metavar="SECONDS", help="time budget for measuring the cost of a step; 0 skips it")
    add("--dry-run", action="store_true", help="print sites, runs and estimated durations without training")
    add("--retry", action="store_true", help="also retry runs that failed with an error, after fixing its cause")
    add("--amend", metavar="REASON", help="continue in --out with a changed comparison; the report states the reason")
    options = parser.parse_args(argv)
    if options.amend is not None and not options.amend.strip():
        parser.error("--amend requires a reason, which the report will state")
    if options.workers < 1:
        parser.error(f"--workers must be at least 1, got {options.workers}")
    if options.address and options.engine != "ray":
        parser.error("--address requires --engine ray")
    if options.config is None and options.models is None and options.report is None:
        parser.error(
            "nothing to compare: pass --config benchmarks/configs/quick.yaml, or --models, --data, --layers, ..."
        )
    options.out = options.out or Path("runs") / (options.config.stem if options.config else "compare")
    words = list(sys.argv[1:] if argv is None else argv)
    options.whole_command = shlex.join(["python", "benchmarks/compare.py", *words])
    options.command = shlex.join(["python", "benchmarks/compare.py", *_without_only(words)])
    return options


def config_of(options: argparse.Namespace) -> tuple[Config, str]:
    """Return the configuration and its YAML text.

    Raises:
        ConfigError: The file cannot be read, or a setting or flag is invalid.
    """
    text, source, settings = "", "command line", dict[str, Any](_DEFAULTS)
    if options.config:
        source = str(options.config)
        try:
            text = options.config.read_text()
            settings = yaml.safe_load(text)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(_unreadable(options.config, error)) from None
        except (yaml.YAMLError, ValueError) as error:
            raise ConfigError(f"{source}: invalid YAML: {error}\nNothing was trained.") from None
        if not isinstance(settings, dict):
            raise ConfigError(f"{source}: expected a mapping of settings, such as `seeds: 8`.\nNothing was trained.")
    flags = _flags(options, settings)
    config = validate({**settings, **flags}, source)
    if flags:
        text += "\n# overridden by flags: " + ", ".join(f"{name}={value!r}" for name, value in flags.items()) + "\n"
    known = [arm.name for arm in config.all_arms()]
    for name in options.only:
        if name not in known:
            raise ConfigError(f"--only: no arm is named {name!r}.\n{suggest(name, known)}\nNothing was trained.")
    return config, text


def _flags(options: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings given as flags, in the format of the file."""
    given = {
        name: getattr(options, name) for name in (*_OVERRIDES, "models", "layers", "train_sizes", "arms", "compile")
    }
    found = {name: value for name, value in given.items() if value is not None}
    if options.data:
        found["data"] = [{"name": _folder(name)} for name in options.data]
    optimizer = {name: getattr(options, name) for name in ("lr", "weight_decay") if getattr(options, name) is not None}
    if optimizer:
        in_file = settings.get("optimizer")
        found["optimizer"] = {**(in_file if isinstance(in_file, dict) else {}), **optimizer}
    return found


def _folder(name: str) -> str:
    """`imagefolder:PATH` for the path of a folder, other names unchanged."""
    return f"imagefolder:{name.rstrip(os.sep)}" if os.sep in name and Path(name).is_dir() else name


def _without_only(words: Sequence[str]) -> list[str]:
    """The command line without `--only` and `--dry-run`, as the base of the command of each row."""
    kept, skipping = [], False
    for word in words:
        if word.startswith("--only="):
            continue
        skipping = word == "--only" or (skipping and not word.startswith("--"))
        if not skipping and word != "--dry-run":
            kept.append(word)
    return kept


def _unreadable(path: Path, error: Exception) -> str:
    siblings = sorted(str(one) for one in path.parent.glob("*.y*ml")) if path.parent.is_dir() else []
    shipped = sorted(str(one.name) for one in (Path(__file__).parents[2] / "configs").glob("*.yaml"))
    close = nearest(str(path), siblings)
    hint = f"  did you mean: {', '.join(close)}" if close else f"  in benchmarks/configs: {', '.join(shipped)}"
    reason = getattr(error, "strerror", None) or error
    return f"--config: cannot read {path}: {reason}.\n{hint}\nNothing was trained."
