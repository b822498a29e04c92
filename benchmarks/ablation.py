"""Find the models that need each special rule of the survey: `python benchmarks/ablation.py`.

Run each model once on fake tensors. Then switch off one rule at a time, and compare what the recipes choose and warn
about with the choice of all rules. A rule that changes no model is a candidate for removal.

By default, one model for each family of timm, torchvision and transformers; `--all` takes every architecture.
sweep.py says how to resume a run. It writes ablation.json and ablation.md.
"""

import copy
import packages  # noqa: F401
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pkgutil import resolve_name
from typing import Any
from unittest.mock import patch

from torch import nn

import sweep
from families import tiny
from families.layers import find_runs
from hookdrop import InjectionError, LayerError, recipes
from hookdrop.survey.facts import Survey, survey
from models import catalog
from models.check import NotRunnable, first_line
from sweep import Sweep

RESIDUALS, BRANCHES = "hookdrop.survey.residuals", "hookdrop.survey.branches"
LAYERS, CONVS, HEADS = (f"hookdrop.survey.{name}" for name in ("layers", "convs", "heads"))
RULES: dict[str, Callable[..., Any]] = {
    f"{RESIDUALS}._Search._projection": lambda *_: False,
    f"{RESIDUALS}._Search._first_of_two": lambda *_: None,
    f"{RESIDUALS}._Search._computes": lambda *_: True,
    f"{RESIDUALS}._is_projection": lambda *_: True,
    f"{RESIDUALS}._Search._is_joined": lambda *_: False,
    f"{RESIDUALS}._Search._leaks": lambda *_: iter(()),
    f"{BRANCHES}._without_long_skips": lambda _, everything: [one for one in everything if one.ends],
    f"{BRANCHES}._usable_ends": lambda trace, _: {*trace.calls_of} - {""},
    f"{BRANCHES}._home_name": lambda residual: residual.op.call.name if residual.op.call else "",
    f"{RESIDUALS}.is_affine": lambda _: False,
    "hookdrop.survey.trace.Trace.repeated": lambda *_: set(),
    f"{LAYERS}._around_parts": lambda _, names: [*names],
    f"{LAYERS}._kind": lambda _, part, __: part.type,
    f"{LAYERS}._keeps": lambda *_: True,
    f"{CONVS}._outermost": lambda _, paths: [*paths],
    f"{CONVS}._skip_module": lambda *_: "",
    f"{CONVS}._branch": lambda *_: "",
    f"{CONVS}._blocks_without_skip": lambda *_: [],
    f"{CONVS}._dilation": lambda _: 1,
    f"{CONVS}._widens": lambda _: False,
    f"{CONVS}.ConvGraph._is_near": lambda *_: False,
    f"{CONVS}._after_pooling": lambda _: set(),
    f"{CONVS}._backbones": lambda *_: (),
    f"{CONVS}._is_pointwise": lambda _: False,
    f"{HEADS}._are_weights": lambda *_: True,
    f"{HEADS}._has_constant": lambda _: False,
    f"{HEADS}._weighs_positions": lambda *_: True,
    f"{HEADS}._is_routed": lambda _: False,
    "hookdrop.methods.branches._apart": lambda *_: [],
}
"""By its full name, each rule with what stands for it when it is off."""
RECIPES = (
    recipes.stochastic_depth(p=0.1, mode="batch"),
    *(recipes.layer_drop(p=0.1), recipes.residual_dropout(p=0.1), recipes.head_dropout(p=0.1), recipes.drop_key(p=0.1)),
    *(make(p=0.1, block_size=3) for make in (recipes.dropblock_resnet, recipes.dropblock_unet)),
    recipes.dropblock_detector(p=0.1, block_size=3),
)
ABOUT = "Each rule is switched off alone, and the recipes choose again: other sites, groups, warnings, or an error."


def main(argv: Sequence[str] | None = None) -> int:
    """Run the models, and write the report; return 1 if one failed or crashed."""
    parser = sweep.parser(__doc__, out="runs/ablation", memory=8.0, timeout=600)
    parser.add_argument("--all", action="store_true", help="every architecture of timm and torchvision")
    options = parser.parse_args(argv)
    names = catalog.names()
    if not options.all:
        names = [*{catalog.family(name): name for name in reversed(names)}.values()][::-1]
    names += [f"transformers:{name}" for name in tiny.names()]
    command = "python benchmarks/ablation.py" + " --all" * options.all
    about = Sweep("ablation", "Models that need each rule", command, ABOUT, rules=tuple(RULES))
    return sweep.main(options, about, names, check_model)


def check_model(name: str, options: object = None, rules: Collection[str] = tuple(RULES)) -> dict[str, Any]:
    """Return the record of a model: the rules without which recipes choose differently, with these recipes."""
    library, _, bare = name.partition(":")
    if library == "transformers":
        try:
            next(tiny.models(bare), None)
        except Exception as error:
            return {"status": "not built", "error": first_line(error)}
    changed: dict[str, list[str]] = {}
    for model, example in _runs(name):
        known = survey(model, example)
        _ = known.drop_rates  # which no rule changes; copies keep it
        base, again = choices(copy.copy(known)), choices(copy.copy(known))
        # An experiment on random values may end differently.
        stable = [recipe for recipe in base if base[recipe] == again[recipe]]
        for rule in rules:
            with without(rule):
                found = choices(copy.copy(known))
            changed.setdefault(rule, []).extend(recipe for recipe in stable if found[recipe] != base[recipe])
    if not changed:
        raise NotRunnable("no inputs found")
    family = bare if library == "transformers" else catalog.family(name)
    return {"family": family, "status": "passed", "rules": {rule: names for rule, names in changed.items() if names}}


def _runs(name: str) -> Iterator[tuple[nn.Module, Any]]:
    """Yield the model, or of transformers each part that runs alone, with an example."""
    library, _, bare = name.partition(":")
    if library == "transformers":
        runs = next((runs for runs, missing, _ in map(find_runs, tiny.models(bare)) if runs and not missing), [])
        yield from ((run.module, run.inputs) for run in runs)
        return
    skeleton = catalog.skeleton_of(name)
    # Detectors need values, and quantized models have some.
    device = "cpu" if ".detection." in catalog.family(name) else str(next(skeleton.parameters()).device)
    trial = next((one for one in catalog.trials(name, skeleton) if catalog.accepted(one, skeleton)), None)
    if trial is None:
        raise NotRunnable("the model accepts no input size that was tried")
    yield trial.build(device).eval(), trial.example(device).eval


def choices(known: Survey) -> dict[str, str]:
    """Return what each recipe chooses and warns about, or the first line of its error, as text."""
    found = {}
    for recipe in RECIPES:
        try:
            sites = recipe.sites(known.model, known)
            text = repr((sites, recipe.warnings(known.model, known, sites)))
        except (LayerError, InjectionError) as error:
            text = f"refused: {type(error).__name__}"
        except Exception as error:  # a rule may protect another one
            text = f"failed: {type(error).__name__}"
        found[type(recipe).__name__] = text
    return found


@contextmanager
def without(rule: str) -> Iterator[None]:
    """Switch off a rule, also where another file has imported it."""
    place, _, name = rule.rpartition(".")
    original = resolve_name(rule)
    others = [one for key, one in sys.modules.items() if key.startswith("hookdrop.") and key != place]
    with ExitStack() as stack:
        for owner in [resolve_name(place), *(one for one in others if vars(one).get(name) is original)]:
            stack.enter_context(patch.object(owner, name, RULES[rule]))
        yield


if __name__ == "__main__":
    sys.exit(main())
