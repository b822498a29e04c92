"""The recipes' places against timm's own, for every timm architecture: `python benchmarks/placement.py`.

Each architecture is built three times on the meta device: with timm's `drop_path_rate`, with its `drop_block_rate`, and
without either. The recipes are planned on the third. The same names and the same rates as in timm's own modules is
"equal"; where a clean model has no module at the branch's end (ResNets), the number of blocks and their rates count.
"""

from __future__ import annotations

import argparse
import json
import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import timm
import torch
from timm.layers.drop import DropBlock2d, DropPath
from torch import nn

from hookdrop.errors import InjectionError, LayerError
from hookdrop.recipes import stochastic_depth, timm_dropblock

P = 0.1
CLOSE = 1e-6
"""timm rounds its rates to float32."""
SCALES: dict[str, Any] = {
    "i / (n - 1)": "depth_from_zero",
    "i / n": lambda name, index, count: index / count,
    "p everywhere": None,
}
Rates = dict[str, tuple[float, ...]]


def main(argv: Sequence[str] | None = None) -> None:
    """Compare, print what was found, and write it down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--match", default="*", help="a glob over timm's names")
    parser.add_argument("--out", type=Path, default=Path("runs/placement.json"))
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    names = timm.list_models(options.match)
    found = {name: {"stochastic_depth": depth(name), "timm_dropblock": dropblock(name)} for name in names}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(result)}" for name, result in found.items())
    options.out.write_text(f'{{"timm": {json.dumps(timm.__version__)}, "found": {{\n{lines}\n}}}}\n')
    for recipe in ("stochastic_depth", "timm_dropblock"):
        print(recipe)
        for what, count in Counter(re.sub("[:,].*", "", result[recipe]) for result in found.values()).most_common():
            print(f"  {count:5} {what}")
    for name, result in found.items():
        for recipe, what in result.items():
            if not what.startswith(("equal", "unused", "untaken")):
                print(f"{name}, {recipe}: {what}")


def depth(name: str) -> str:
    """Stochastic depth in one architecture."""
    native = build(name, drop_path_rate=P)
    clean = build(name, drop_path_rate=0.0)
    if native is None or clean is None:
        return "untaken"
    ran = called(native)
    places = {site for site in ran if re.search(r"drop_path\d*$", site)}  # rate 0 included: an Identity
    wanted = {site: (native.get_submodule(site).drop_prob,) for site in places if is_on(native.get_submodule(site))}
    if not wanted:
        return "unused"
    reasons = []
    for formula, p_scale in SCALES.items():
        try:
            plan = stochastic_depth.plan(clean, p=P, p_scale=p_scale)
        except (LayerError, InjectionError) as error:
            return f"refused: {str(error).splitlines()[0]}"
        got = {site.name: (site.p,) for site in plan.sites if site.p}
        reasons.append(difference(clean, got, wanted))
        if not reasons[-1]:
            return f"equal, {formula}"
    extra = {site.name for site in plan.sites} - places
    missing = set(wanted) - {site.name for site in plan.sites}
    return f"{'places equal' if not extra and not missing else 'places differ'}: {reasons[0]}"


def dropblock(name: str) -> str:
    """DropBlock of timm in one architecture."""
    native, clean = build(name, drop_block_rate=P), build(name)
    if native is None or clean is None:
        return "untaken"
    blocks = {site: module for site, module in native.named_modules() if isinstance(module, DropBlock2d)}
    if not blocks:
        return "unused"
    wanted = {site: (block.drop_prob, block.block_size, block.gamma_scale) for site, block in blocks.items()}
    seen: list[Mapping[str, float]] = []
    try:
        plan = timm_dropblock.plan(clean, p=P, regularizer=noted(seen))
    except (LayerError, InjectionError) as error:
        return f"refused: {str(error).splitlines()[0]}"
    settings = zip(plan.sites, seen, strict=True)
    got = {site.name: (one["p"], one["block_size"], one["gamma_scale"]) for site, one in settings}
    return "equal" if got == wanted else f"differ: {difference(clean, got, wanted)}"


def build(name: str, **keywords: float) -> nn.Module | None:
    """The architecture without values; None if it does not take these keywords."""
    with suppress(Exception), torch.device("meta"):
        return timm.create_model(name, **keywords)
    return None


def noted(seen: list[Mapping[str, float]]) -> Callable[..., nn.Module]:
    """A factory that notes what it is called with."""

    def make(**settings: float) -> nn.Module:
        seen.append(settings)
        return DropBlock2d(settings["p"], int(settings["block_size"]), settings["gamma_scale"])

    return make


def difference(clean: nn.Module, got: Rates, wanted: Rates) -> str:
    """What is not the same, in a few words; empty if nothing is."""
    if not all(exists(clean, site) for site in wanted):
        got, wanted = ({site.rpartition(".")[0]: rates for site, rates in one.items()} for one in (got, wanted))
    for extra, what in ((set(got) - set(wanted), "not in timm"), (set(wanted) - set(got), "only in timm")):
        if extra:
            return f"{len(extra)} of {len(got)} sites are {what}: {min(extra)}"
    for site in sorted(wanted):
        if any(abs(a - b) > CLOSE for a, b in zip(got[site], wanted[site], strict=True)):
            return f"the rate of {site} is {got[site]}, timm's {wanted[site]}"
    return ""


def is_on(module: nn.Module) -> bool:
    """Whether it drops paths."""
    return isinstance(module, DropPath) and module.drop_prob > 0.0


def called(model: nn.Module) -> set[str]:
    """The modules that a forward calls; all of them if it can't be run on the meta device."""
    seen: set[str] = set()
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda module, args, name=name: seen.add(name))
    try:
        with torch.no_grad(), torch.device("meta"):
            model.eval()(torch.empty(2, *model.default_cfg["input_size"]))
    except Exception:
        return {name for name, _ in model.named_modules()}
    return seen


def exists(model: nn.Module, name: str) -> bool:
    """Whether a module is there."""
    with suppress(AttributeError):
        return isinstance(model.get_submodule(name), nn.Module)
    return False


if __name__ == "__main__":
    main()
