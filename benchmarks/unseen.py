"""Check the sites of the recipes in models of libraries that hookdrop was not written for: `python unseen.py`.

unseen.yaml has the models, each with the sites that the source of its forward implies. The script compares the plan of
each recipe with them, and finds out by experiment whether a site does what it should: two layers are the same site if
their outputs have the same values; a skipped model equals one whose layers return their input; every softmax of
attention is masked once. Libraries that are not installed are left out. Results: unseen.json and unseen.md.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import hookdrop
from hookdrop import HookdropError, recipes

HERE = Path(__file__).parent
P = 0.3
RECIPES: dict[str, Callable[[], Any]] = {
    "stochastic_depth": lambda: recipes.stochastic_depth(p=P),
    "residual_dropout": lambda: recipes.residual_dropout(p=P),
    "layer_drop": lambda: recipes.layer_drop(p=0.9999999),
    "head_dropout": lambda: recipes.head_dropout(p=P),
    "drop_key": lambda: recipes.drop_key(p=P),
    "dropblock_resnet": lambda: recipes.dropblock_resnet(p=P, block_size=3),
    "dropblock_unet": lambda: recipes.dropblock_unet(p=P, block_size=3),
}
ALWAYS = tuple(RECIPES)[:5]
"""The recipes of every model: without an entry, no site is right. The others are checked where the file names sites."""
VERDICTS = ("right", "refused", "named", "wrong", "failed")


def floats(*shape: int) -> Tensor:
    """Random numbers."""
    return torch.randn(shape)


def ints(*shape: int, below: int = 8) -> Tensor:
    """Random tokens."""
    return torch.randint(below, shape)


def main() -> int:
    """Check the libraries that are installed; return 1 if a model has wrong sites that no warning names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=(), metavar="NAME", help="libraries or models; all if left out")
    parser.add_argument("--out", type=Path, default=HERE / "results/unseen")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    records: dict[str, dict[str, Any]] = {}
    for library, about in yaml.safe_load((HERE / "unseen.yaml").read_text()).items():
        for name, model in about["models"].items():
            if not options.only or {library, name} & {*options.only}:
                records[f"{library}/{name}"] = record = check(library, about["imports"], model)
                print(f"{library}/{name}", *(f"\n  {key}: {text(one)}" for key, one in record.items()), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "unseen.json").write_text(json.dumps(records, indent=1) + "\n")
    (options.out / "unseen.md").write_text(page(records))
    return int(any(one["verdict"] == "wrong" for record in records.values() for one in record.values()))


def text(one: Mapping[str, Any]) -> str:
    """Return a verdict in one line, with what differs."""
    return " ".join([one["verdict"], *(f"{key}={one[key]}" for key in one if key != "verdict" and one[key])])


def check(library: str, imports: str, about: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Check all recipes on one model, and return a record for each."""
    try:
        version = importlib.metadata.version(library)
        scope: dict[str, Any] = {"torch": torch, "nn": nn, "floats": floats, "ints": ints}
        exec(imports, scope)
    except ImportError as error:
        return {"library": {"verdict": "failed", "reason": f"not installed: {error}"}}

    def build() -> nn.Module:
        torch.manual_seed(0)
        model: nn.Module = eval(about["build"], scope)
        for weight in model.parameters():  # no branch is 0 at first, and no weight is uninitialized
            weight.data = weight.data.nan_to_num(0, 0, 0).clamp(-3, 3) + 0.05 * torch.randn_like(weight)
        for module in model.modules():  # residual_dropout is for models without it
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return model.eval()

    try:
        example, model = eval(about["input"], scope), build()
        values = fingerprints(model, example)
    except Exception as error:
        return {"model": {"verdict": "failed", "reason": f"{type(error).__name__}: {error}"[:200]}}
    kinds = [kind for kind in RECIPES if kind in ALWAYS or kind in about]
    return {
        kind: {**compare(model, example, RECIPES[kind](), str(about.get(kind, "")), values), "version": version}
        for kind in kinds
    }


def compare(
    model: nn.Module, example: Any, recipe: Any, expected: str, values: Mapping[tuple[str, str], Any]
) -> dict[str, Any]:
    """Compare the sites of a recipe with those expected, and what they do."""
    known = [name for name, _ in model.named_modules()]
    right = {name for glob in expected.split() if glob[0] != "?" for name in matches(glob, known)}
    optional = {name for glob in expected.split() if glob[0] == "?" for name in matches(glob[1:], known)}
    kind, said, refused = type(recipe).__name__, "", False
    try:
        plan = hookdrop.plan(model, recipe, example_input=example)
        found, said = {site.name for site in plan.sites}, "\n".join(plan.warnings)
    except HookdropError as error:
        found, said, refused = set(), str(error), True
    except Exception as error:
        return {"verdict": "failed", "reason": f"{type(error).__name__}: {error}"[:200]}
    place = "input" if kind == "head_dropout" else "output"

    def calls(names: set[str]) -> set[Any]:
        return {call for name in names for call in values.get((name, place), (name,))}

    missing = sorted(name for name in right if not calls({name}) <= calls(found))
    extra = sorted(name for name in found if not calls({name}) <= calls(right | optional))
    verdict = "right"
    if extra:
        verdict = "wrong"
    elif missing:
        verdict = "refused" if refused else "named" if all(is_named(name, said) for name in missing) else "wrong"
    effect = "" if not found else effects(kind, model, example, recipe, right or found)
    return {
        "verdict": "wrong" if effect and verdict == "right" else verdict,
        "effect": effect,
        "missing": missing,
        "extra": extra,
        "reason": said if verdict != "right" else "",
        "sites": len(found),
    }


def matches(glob: str, names: list[str]) -> list[str]:
    """Return the names that a glob with `*` for one part of a name, and `{a,b}`, matches; at least one."""
    pattern = re.escape(glob).replace(r"\*", r"[^.]+").replace(r"\{", "(").replace(r"\}", ")").replace(",", "|")
    found = [name for name in names if re.fullmatch(pattern, name)]
    if not found:
        raise ValueError(f"{glob!r} of unseen.yaml matches no layer")
    return found


def is_named(name: str, said: str) -> bool:
    """Whether a warning quotes the layer, one around it, or one like these with other numbers."""
    parts = re.sub(r"\d+", "#", name).split(".")
    around = {".".join(parts[: end + 1]) for end in range(len(parts))}
    return any(re.sub(r"\d+", "#", quoted) in around for quoted in re.findall(r"'([^']+)'", said))


def fingerprints(model: nn.Module, example: Any) -> dict[tuple[str, str], tuple[Any, ...]]:
    """Return what each layer takes and returns, apart from scale and order: equal for two that are one site."""
    seen: dict[tuple[str, str], list[Any]] = {}

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            for place, value in (("input", args), ("output", output)):
                if (x := next(leaves(value), None)) is not None:
                    x = x.detach().double().flatten().sort().values
                    ranks = (x / x.norm().clamp(1e-30))[torch.linspace(0, len(x) - 1, 9).long()]
                    seen.setdefault((name, place), []).append((len(x), *ranks.mul(1e4).round().tolist()))

        return hook

    with ExitStack() as stack:
        for name, module in model.named_modules():
            handle = module.register_forward_hook(watch(name))
            stack.callback(handle.remove)
        run(model, example)
    return {place: tuple(calls) for place, calls in seen.items()}


class Outputs:
    """Copies of what layers return, until `stop`."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.seen, self.handles = model, {}, []

    def watch(self, names: Iterable[str]) -> Outputs:
        for name in names:
            self.handles.append(self.model.get_submodule(name).register_forward_hook(partial(self._add, name)))
        return self

    def _add(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        self.seen.setdefault(name, []).append(next(leaves(output)).clone())

    def stop(self) -> dict[str, list[Tensor]]:
        for handle in self.handles:
            handle.remove()
        return self.seen


def changed_first(value: Any) -> Any:
    """Return an example whose first sample has other numbers."""
    if isinstance(value, Mapping | list | tuple):
        kind = type(value)
        return kind((k, changed_first(x)) for k, x in value.items()) if isinstance(value, Mapping) else kind(map(changed_first, value))
    if isinstance(value, Tensor) and value.dim() and value.dtype != torch.bool:
        other = value.flip(-1) if not value.is_floating_point() else value + torch.randn_like(value)
        return torch.cat([other[:1], value[1:]])
    return value


def leaves(value: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors of a nested value."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping | list | tuple):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from leaves(one)


def run(model: nn.Module, example: Any) -> list[Tensor]:
    """Return the tensors of a forward."""
    torch.manual_seed(1)
    args, kwargs = ((), example) if isinstance(example, dict) else (example, {})
    with torch.no_grad():
        return [x.clone() for x in leaves(model(*(args if isinstance(args, tuple) else (args,)), **kwargs))]


class Scores(TorchFunctionMode):
    """Record how many of the scores of each softmax are masked."""

    def __init__(self) -> None:
        super().__init__()
        self.masked: list[float] = []

    def __torch_function__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(f, "__name__", "")
        scores = args[0] if name == "softmax" else (kwargs or {}).get("attn_mask", (*args, None, None, None, None)[3])
        if name in ("softmax", "scaled_dot_product_attention") and isinstance(scores, Tensor):
            low = scores == 0 if scores.dtype == torch.bool else scores < -1e30
            self.masked.append(low.double().mean().item())
        elif name == "scaled_dot_product_attention":
            query, key = (*args, *(kwargs or {}).values())[:2]
            causal = torch.ones(query.shape[-2], key.shape[-2]).triu(1)
            self.masked.append(causal.mean().item() * bool((kwargs or {}).get("is_causal")))
        return f(*args, **(kwargs or {}))


def effects(kind: str, model: nn.Module, example: Any, recipe: Any, names: set[str]) -> str:
    """Return how the model differs from one in which the sites do what they should; empty if it does not."""
    try:
        effect: Callable[..., str] = {
            "layer_drop": skips_layers, "drop_key": masks_scores, "stochastic_depth": drops_samples
        }.get(kind, lambda *_: "")  # fmt: skip
        return effect(model, example, recipe, names)
    except Exception as error:
        return f"{type(error).__name__}: {error} {traceback.extract_tb(error.__traceback__)[-1]}"[:300]


def dropped(model: nn.Module, example: Any, recipe: Any) -> list[Tensor]:
    """Return the output of the model with the recipe, at one rate everywhere."""
    drop = hookdrop.inject(model, recipe, example_input=example, p_scale="equal")
    try:
        with drop.sampling():
            return run(model, example)
    finally:
        drop.remove()


def skips_layers(model: nn.Module, example: Any, recipe: Any, names: set[str]) -> str:
    """Whether the model equals one whose layers return their input."""
    output = dropped(model, example, recipe)
    with ExitStack() as stack:
        for name in names:
            handle = model.get_submodule(name).register_forward_hook(returns_input, with_kwargs=True)
            stack.callback(handle.remove)
        same = all(map(torch.equal, output, run(model, example)))
    return "" if same else "the model differs from one whose layers return their input"


def masks_scores(model: nn.Module, example: Any, recipe: Any, names: set[str]) -> str:
    """Whether no score is masked twice, and some are."""
    before, after = Scores(), Scores()
    with before:
        run(model, example)
    with after:
        dropped(model, example, recipe)
    own = before.masked if len(before.masked) == len(after.masked) else [0.0] * len(after.masked)  # fused before
    rates = [(now - then) / (1 - then) for then, now in zip(own, after.masked, strict=True)]
    return "" if 0 < max(rates, default=0) < 0.6 else f"masked: {[round(rate, 2) for rate in rates]}"


def drops_samples(model: nn.Module, example: Any, recipe: Any, names: set[str]) -> str:
    """Whether each site drops all or nothing of the first sample, which is what changes with its input."""
    sites = [site.name for site in hookdrop.plan(model, recipe, example_input=example).sites]
    own, changed = Outputs(model).watch(sites), Outputs(model)
    run(model, example)
    own.stop()
    changed.watch(sites)
    run(model, changed_first(example))
    changed.stop()
    before = Outputs(model).watch(sites)
    drop = hookdrop.inject(model, recipe, example_input=example, p_scale="equal")
    after = Outputs(model).watch(sites)
    before.seen.clear()  # the forwards of the survey
    with drop.sampling():
        run(model, example)
    drop.remove()
    seen = [one.stop() for one in (own, changed, before, after)]
    partly = [
        name
        for name in sites
        for x, y, kept, left in zip(*(one[name] for one in seen), strict=True)
        if len({*(left != 0)[(kept != 0) & ((x - y).abs() > 0.1 * x.std())].tolist()}) > 1
    ]
    return f"a part of a sample is dropped at {partly[:2]}" if partly else ""


def returns_input(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    """Return the first input in place of the first output."""
    x = next(leaves((args, kwargs)))
    return x if isinstance(output, Tensor) else type(output)([x, *output[1:]])


def page(records: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the counts by library, and what is not right."""
    counts: dict[str, Counter[str]] = {}
    for name, record in records.items():
        counts.setdefault(name.split("/")[0], Counter()).update(["models", *(one["verdict"] for one in record.values())])
    heads = ("models", *VERDICTS)
    lines = ["| library | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    total = sum(counts.values(), Counter())
    for library, count in {**counts, "all": total}.items():
        lines.append(f"| {library} | " + " | ".join(str(count[head]) for head in heads) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
