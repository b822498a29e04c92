"""The command line: a config file, and how to run it."""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).parents[2] / "configs"


def parse(argv: Sequence[str] | None, description: str | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(description or "").partition(":")[0], allow_abbrev=False)
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


def config_of(path: Path) -> tuple[Any, str]:
    """Return the `Config` of a file, and its text."""
    import yaml  # here, so that `--help` needs no package

    from comparison.spec.config import validate
    from comparison.spec.run_spec import ConfigError, suggest

    try:
        settings = yaml.safe_load(text := path.read_text())
    except OSError as error:
        known = [str(one) for folder in (path.parent, CONFIGS) for one in sorted(folder.glob("*.y*ml"))]
        raise ConfigError(
            f"--config: cannot read {path}: {error.strerror}.\n{suggest(str(path), known)}\nNothing was trained."
        ) from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path}: invalid YAML: {error}\nNothing was trained.") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: expected a mapping of settings, such as `seeds: 8`.\nNothing was trained.")
    return validate(settings, str(path)), text
