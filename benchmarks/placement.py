"""Compare stochastic_depth's sites with timm's own, for every timm architecture: `python benchmarks/placement.py`.

Build each on the meta device with timm's `drop_path_rate` and without; plan the recipe on the latter. A result is
"equal" if names and rates match those of timm's own modules, or, if the model has no module at the end of a branch
(ResNets), those of blocks.
"""

from __future__ import annotations

import packages  # noqa: F401
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import timm
import torch
from timm.layers.drop import DropPath
from torch import nn

import hookdrop
import sweep
from hookdrop import InjectionError, LayerError
from hookdrop.recipes import stochastic_depth
from sweep import Sweep

P, TOLERANCE = 0.1, 1e-6
"""timm rounds its rates to float32."""
SCALES: dict[str, Any] = {
    "i / (n - 1)": "depth_from_zero",
    "i / n": lambda name, index, count: index / count,
    "p everywhere": "equal",
}

STATUSES = {"equal": "passed", "unused": "no layers", "untaken": "no layers", "refused": "refused"}

Rates = dict[str, float]


def main(argv: Sequence[str] | None = None) -> int:
    """Compare the architectures, and write placement.json and placement.md."""
    options = sweep.parser(__doc__, out="runs/placement", memory=8.0).parse_args(argv)
    about = Sweep("placement", "The sites of stochastic_depth and timm's", "python benchmarks/placement.py")
    return sweep.main(options, about, timm.list_models(), compare)


def compare(name: str, options: object = None) -> dict[str, Any]:
    """Return the record of one architecture."""
    found = depth(name)
    status = STATUSES.get(re.split("[,:]", found)[0], "differs")
    error = {"error": found} if status in ("refused", "differs") else {}
    return {"stochastic_depth": found, "status": status, **error}


def depth(name: str) -> str:
    """Compare stochastic depth in one architecture."""
    native = build(name, drop_path_rate=P)
    clean = build(name, drop_path_rate=0.0)
    if native is None or clean is None:
        return "untaken"
    # Including branches with rate 0, where timm has an Identity.
    branch_ends = {site for site in called_modules(native) if re.search(r"drop_path\d*$", site)}
    modules = {site: native.get_submodule(site) for site in branch_ends}
    expected = {site: one.drop_prob for site, one in modules.items() if isinstance(one, DropPath) and one.drop_prob}
    if not expected:
        return "unused"
    mismatches = []
    for formula, p_scale in SCALES.items():
        try:
            plan = hookdrop.plan(clean, stochastic_depth(p=P), p_scale=p_scale)
        except (LayerError, InjectionError) as error:
            return f"refused: {str(error).splitlines()[0]}"
        got = {site.name: site.p for site in plan.sites if site.p}
        mismatches.append(difference(clean, got, expected))
        if not mismatches[-1]:
            return f"equal, {formula}"
    extra = {site.name for site in plan.sites} - branch_ends
    missing = set(expected) - {site.name for site in plan.sites}
    return f"{'places equal' if not extra and not missing else 'places differ'}: {mismatches[0]}"


def build(name: str, **keywords: float) -> nn.Module | None:
    """Build the architecture on the meta device; return None if it rejects these keywords."""
    with suppress(Exception), torch.device("meta"):
        return timm.create_model(name, **keywords)
    return None


def difference(clean: nn.Module, got: Rates, expected: Rates) -> str:
    """Describe the first difference; return "" if there is none."""
    if not set(expected) <= {name for name, _ in clean.named_modules(remove_duplicate=False)}:
        got, expected = ({site.rpartition(".")[0]: rates for site, rates in one.items()} for one in (got, expected))
    for extra, what in ((set(got) - set(expected), "not in timm"), (set(expected) - set(got), "only in timm")):
        if extra:
            return f"{len(extra)} of {len(got)} sites are {what}: {min(extra)}"
    for site in sorted(expected):
        if abs(got[site] - expected[site]) > TOLERANCE:
            return f"the rate of {site} is {got[site]}, timm's {expected[site]}"
    return ""


def called_modules(model: nn.Module) -> set[str]:
    """Return the names of the modules that a forward calls, or of all modules if it fails on the meta device."""
    called: set[str] = set()
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda module, args, name=name: called.add(name))
    try:
        with torch.no_grad(), torch.device("meta"):
            model.eval()(torch.empty(2, *model.default_cfg["input_size"]))
    except Exception:
        return {name for name, _ in model.named_modules()}
    return called


if __name__ == "__main__":
    sys.exit(main())
