"""The command line: a config file, flags, or flags that override the file."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).parents[2] / "configs"
# What is compared without a file and without --arms: recipes choose their own layers.
_DEFAULTS = {"arms": ["dropblock_resnet(p=0.1)", "stochastic_depth(p=0.1)"], "epochs": 20}
_LISTS = {
    "models": "timm models, such as resnet18",
    "data": "digits, synthetic-cue, emoji, or a folder with a folder for each class",
    "layers": "sites, such as 'layer[34].*.bn2'",
    "arms": "such as 'DropBlock(p=0.1)', a recipe, or 'timm.DropPath(drop_prob=0.1)'",
}
_SETTINGS = {
    "schedule": "LinearSchedule, 'EarlySchedule(cutoff=0.5)', none, ...; a float is a fraction of all steps",
    "seeds": "number of pairs, fixed before the first run",
    "epochs": "default: 20 without --config",
    "batch_size": "images per step",
    "device": "cpu or cuda",
    "max_steps": "stop every run after this many optimizer steps, for a smoke test",
    "timing": "seconds for measuring the cost of a step; 0 skips it",
}
"""The settings of a comparison that are also flags, and their help. `Config` converts and checks the values."""


def parse(argv: Sequence[str] | None, description: str | None) -> argparse.Namespace:
    """Parse the command line."""
    example = "example: compare.py --data pictures/ --model resnet18 --arms 'Dropout2d(p=0.1)' --layers 'layer4.*'"
    title = (description or "").partition(":")[0]
    parser = argparse.ArgumentParser(description=title, epilog=example, allow_abbrev=False)
    add = parser.add_argument
    add("--config", type=Path, help="YAML file, such as benchmarks/configs/quick.yaml; flags override its settings")
    add("--out", type=Path, help="folder for the report and the runs (default: runs/CONFIG_NAME)")
    add("--report", type=Path, metavar="SUMMARY", help="write report.html beside a stored summary.json, and exit")
    add = parser.add_argument_group("what to compare").add_argument
    for name, text in {**_LISTS, **_SETTINGS}.items():
        flags = [f"--{name.replace('_', '-')}", *(["--model"] if name == "models" else [])]
        add(*flags, help=text, metavar="VALUE", nargs="+" if name in _LISTS else None)
    add = parser.add_argument_group("how to run it").add_argument
    add("--workers", type=int, default=os.cpu_count() or 1, help="number of parallel runs, with one thread each")
    add("--dry-run", action="store_true", help="print sites, runs and power without training")
    options = parser.parse_args(argv)
    if options.workers < 1:
        parser.error(f"--workers must be at least 1, got {options.workers}")
    if not (options.config or options.models or options.report):
        parser.error("nothing to compare: pass --config benchmarks/configs/quick.yaml, or --models, --data, --layers")
    options.out = options.out or Path("runs") / (options.config.stem if options.config else "compare")
    words = sys.argv[1:] if argv is None else argv
    options.command = shlex.join(["python", "benchmarks/compare.py", *words])
    return options


def config_of(options: argparse.Namespace) -> tuple[Any, str]:
    """Return the `Config` and its YAML text."""
    import yaml  # here, so that `--help` needs no package

    from comparison.spec.config import validate
    from comparison.spec.run_spec import ConfigError, suggest

    text, source, settings = "", "command line", dict[str, Any](_DEFAULTS)
    if options.config:
        source = str(options.config)
        try:
            text = options.config.read_text()
            settings = yaml.safe_load(text)
        except OSError as error:
            known = [str(one) for folder in (options.config.parent, CONFIGS) for one in sorted(folder.glob("*.y*ml"))]
            raise ConfigError(
                f"--config: cannot read {source}: {error.strerror}.\n{suggest(source, known)}\nNothing was trained."
            ) from None
        except (yaml.YAMLError, ValueError) as error:
            raise ConfigError(f"{source}: invalid YAML: {error}\nNothing was trained.") from None
        if not isinstance(settings, dict):
            raise ConfigError(f"{source}: expected a mapping of settings, such as `seeds: 8`.\nNothing was trained.")
    flags = {name: value for name in (*_LISTS, *_SETTINGS) if (value := getattr(options, name)) is not None}
    if options.data:
        flags["data"] = [_folder(name) for name in options.data]
    config = validate({**settings, **flags}, source)
    if flags:
        text += "\n# overridden by flags: " + ", ".join(f"{name}={value!r}" for name, value in flags.items()) + "\n"
    return config, text


def _folder(name: str) -> str:
    """`imagefolder:PATH` for the path of a folder, other names unchanged."""
    return f"imagefolder:{name.rstrip(os.sep)}" if os.sep in name and Path(name).is_dir() else name
