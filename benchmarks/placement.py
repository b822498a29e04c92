"""Compare stochastic_depth's sites with those of timm and torchvision: `python benchmarks/placement.py`.

Build each architecture on the meta device with the library's own stochastic depth and without; plan the recipe on the
latter. A result is "equal" if names and rates match those of the library's own modules, or, if the model has no module
at the end of a branch (ResNets), those of blocks. Every recipe has to treat equal blocks equally.
"""

import packages  # noqa: F401
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import timm
import torch
import torchvision
from torch import nn

import hookdrop
import sweep
from hookdrop import InjectionError, LayerError, recipes
from hookdrop.recipes import stochastic_depth
from models import equal
from sweep import Sweep

P, TOLERANCE = 0.1, 1e-6
"""timm rounds its rates to float32."""
SCALES: dict[str, Any] = {
    "i / (n - 1)": "depth_from_zero",
    "i / n": lambda name, index, count: index / count,
    "p everywhere": "equal",
}

STATUSES = {"equal": "passed", "unused": "no layers", "untaken": "no layers", "refused": "refused"}
EVERY = (
    *(make(p=P) for make in (recipes.layer_drop, recipes.residual_dropout, recipes.head_dropout, recipes.drop_key)),
    *(stochastic_depth(p=P), recipes.dropblock_resnet(p=P, block_size=3)),
)
Rates = dict[str, float]


def main(argv: Sequence[str] | None = None) -> int:
    """Compare the architectures, and write placement.json and placement.md."""
    options = sweep.parser(__doc__, out="runs/placement", memory=8.0).parse_args(argv)
    about = Sweep("placement", "The sites of stochastic_depth and the libraries'", "python benchmarks/placement.py")
    names = [f"torchvision:{name}" for name in torchvision.models.list_models(torchvision.models)]
    return sweep.main(options, about, [*timm.list_models(), *names], compare)


def compare(name: str, options: object = None) -> dict[str, Any]:
    found, others = depth(name), unequal(name)
    status = "differs" if others else STATUSES.get(re.split("[,:]", found)[0], "differs")
    error = {"error": "; ".join([found, *others])} if status in ("refused", "differs") else {}
    return {"stochastic_depth": found, "status": status, **error}


def depth(name: str) -> str:
    """Compare stochastic depth in one architecture."""
    rate = "stochastic_depth_prob" if ":" in name else "drop_path_rate"
    native, clean = build(name, **{rate: P}), build(name, **{rate: 0.0})
    if native is None or clean is None:
        return "untaken"
    # Including branches with rate 0, where timm has an Identity.
    branch_ends = {site for site in called_modules(native) if re.search(r"(drop_path\d*|stochastic_depth)$", site)}
    modules = {site: native.get_submodule(site) for site in branch_ends}
    rates = {site: getattr(one, "drop_prob", getattr(one, "p", 0.0)) for site, one in modules.items()}
    expected = {site: rate for site, rate in rates.items() if rate}
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
        library, _, bare = name.rpartition(":")
        return torchvision.models.get_model(bare, **keywords) if library else timm.create_model(name, **keywords)
    return None


def unequal(name: str) -> list[str]:
    """Return what differs between equal blocks of an architecture, the first difference or error of each recipe."""
    clean, found = build(name, stochastic_depth_prob=0.0) or build(name), []
    for recipe in EVERY if clean else ():
        try:
            texts = [*equal.differences(hookdrop.plan(clean, recipe))]
        except (LayerError, InjectionError):
            continue
        except RuntimeError as error:
            texts = [str(error)]
        found += [f"{type(recipe).__name__}: {text}" for text in texts[:1]]
    return found


def difference(clean: nn.Module, got: Rates, expected: Rates) -> str:
    """Describe the first difference from the library's own sites; return "" if there is none."""
    if not set(expected) <= {name for name, _ in clean.named_modules(remove_duplicate=False)}:
        got, expected = ({site.rpartition(".")[0]: rates for site, rates in one.items()} for one in (got, expected))
    for extra, where in ((set(got) - set(expected), "not"), (set(expected) - set(got), "only")):
        if extra:
            return f"{len(extra)} of {len(got)} sites are {where} in the library: {min(extra)}"
    for site in sorted(expected):
        if abs(got[site] - expected[site]) > TOLERANCE:
            return f"the rate of {site} is {got[site]}, the library's {expected[site]}"
    return ""


def called_modules(model: nn.Module) -> set[str]:
    """Return the names of the modules that a forward calls, or of all modules if it fails on the meta device."""
    called: set[str] = set()
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda module, args, name=name: called.add(name))
    try:
        with torch.no_grad(), torch.device("meta"):
            model.eval()(torch.empty(2, *getattr(model, "default_cfg", {}).get("input_size", (3, 224, 224))))
    except Exception:
        return {name for name, _ in model.named_modules()}
    return called


if __name__ == "__main__":
    sys.exit(main())
