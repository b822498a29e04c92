"""Check a recipe in every family of transformers: `python benchmarks/transformers_zoo.py`.

Build a tiny model of each family with random weights, find inputs that call all of its layers, inject the recipe, run
one training step, and remove the hooks (models/check.py). families/depth.py and families/units.py check what each
site means, such as the end of a residual branch. Nothing is downloaded.

A run takes 10 minutes on two cores with `--workers 2`; sweep.py says how to resume it. Results: RECIPE.json, RECIPE.md.
"""

import argparse
import os
import packages  # noqa: F401
import sys
from collections.abc import Sequence
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import transformers

import sweep
from families import tiny
from families.layers import attentions, find_runs, stacks
from families.recipes import CASES, run_case
from models.check import NotRunnable, first_line
from sweep import Sweep

_STUBS = {
    "clvp": "it indexes an embedding with what its decoder generates",
    "mra": "without its CUDA kernel, the attention returns zeros",
}
"""Families that do not compute anything meaningful with random weights or on a CPU."""


def main(argv: Sequence[str] | None = None) -> int:
    """Check the families; return 1 if one failed or crashed."""
    parser = sweep.parser(__doc__, out="runs/transformers", memory=6.0, timeout=90)
    parser.add_argument("--recipe", choices=CASES, default="stochastic_depth")
    options = parser.parse_args(argv)
    command = f"python benchmarks/transformers_zoo.py --recipe {options.recipe}"
    about = Sweep(options.recipe, f"`{options.recipe}` in every family of transformers", command, recipe=options.recipe)
    return sweep.main(options, about, tiny.names(), check_family)


def check_family(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Check the recipe in one family, and return the record."""
    transformers.logging.set_verbosity_error()
    reason = _STUBS.get(name, "")
    models = iter(() if reason else tiny.models(name))
    while True:
        try:
            model = next(models, None)
        except Exception as error:  # whatever the config or the model raises
            return {"status": "not built", "error": first_line(error)}
        if model is None:
            raise NotRunnable(reason)
        record: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters())}
        if not list(stacks(model)):
            if classes := attentions(model):  # XLM: one list of attentions, one of norms, one of MLPs
                error = f"{', '.join(sorted(classes))}: no module is a whole layer"
                return record | {"status": "refused", "error": error}
            return record | {"status": "no layers"}
        runs, missing, first_error = find_runs(model)
        if not missing:
            return record | {"runs": [run.name for run in runs]} | run_case(CASES[options.recipe], model, runs)
        reason = reason or f"no inputs found for {', '.join(missing)}: {first_error}"


if __name__ == "__main__":
    sys.exit(main())
