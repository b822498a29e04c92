"""Check the recipes in models of libraries that hookdrop was not written for: `python benchmarks/unseen.py`.

unseen.yaml names the sites that the source of each model implies. The script compares the plans with them, and the
effect of the sites with what it should be. Two layers are one site if what they return has the same values.
Needs the libraries of unseen.yaml. Results: unseen.json and unseen.md.
"""

import argparse
import importlib.metadata
import json
import packages  # noqa: F401
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

import hookdrop
from hookdrop import HookdropError, recipes

HERE = Path(__file__).parent
TOKENS = ("stochastic_depth", "residual_dropout", "layer_drop", "head_dropout", "drop_key")
IMAGES = ("dropblock_resnet", "dropblock_unet")
VERDICTS = ("right", "refused", "named", "wrong", "failed")


def main() -> int:
    """Check the models; return 1 if one has wrong sites that no warning names."""
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
                records[f"{library}/{name}"] = record = check(about["imports"], model)
                print(f"{library}/{name}", *(f"\n  {kind}: {one}" for kind, one in record.items()), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "unseen.json").write_text(json.dumps(records, indent=1) + "\n")
    (options.out / "unseen.md").write_text(table(records))
    return int(any(one["verdict"] == "wrong" for record in records.values() for one in record.values()))


def table(records: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the verdicts by library."""
    counts: dict[str, Counter[str]] = {}
    for name, record in records.items():
        library = name.split("/")[0]
        for key in (f"{library} {importlib.metadata.version(library)}", "total"):
            counts.setdefault(key, Counter()).update(["models", *(one["verdict"] for one in record.values())])
    counts["total"] = counts.pop("total")  # the last row
    heads = ("models", *VERDICTS)
    rows = [("library", *heads), ("---",) * 7, *((key, *map(count.get, heads)) for key, count in counts.items())]
    return "".join("| " + " | ".join(str(cell or 0) for cell in row) + " |\n" for row in rows)


def check(imports: str, about: Mapping[str, str]) -> dict[str, Any]:
    """Check the recipes on one model; DropBlock's only where unseen.yaml has sites for them."""
    scope: dict[str, Any] = {"torch": torch, "nn": nn, "floats": lambda *shape: torch.randn(shape)}
    scope["ints"] = lambda *shape, below=8: torch.randint(below, shape)
    try:
        torch.manual_seed(0)
        exec(imports, scope)
        model, example = prepared(eval(about["build"], scope)), eval(about["input"], scope)
        with suppress(HookdropError):  # before the first forward with values, as users do
            hookdrop.plan(model, recipes.stochastic_depth(p=0.3), example_input=example)
        tensors = watched(model, [name for name, _ in model.named_modules()], example)
        values = {place: [*map(fingerprint, calls)] for place, calls in tensors.items()}
        kinds = [*TOKENS, *(kind for kind in IMAGES if kind in about)]
        return {kind: compare(model, example, getattr(recipes, kind), about.get(kind, ""), values) for kind in kinds}
    except Exception as error:
        return {"model": {"verdict": "failed", "reason": f"{type(error).__name__}: {error}"[:200]}}


def prepared(model: nn.Module) -> nn.Module:
    """Give all weights other values, as some branches are 0 at first; remove dropout, for `residual_dropout`."""
    for weight in model.parameters():
        if weight.is_complex():
            weight.data = weight.data + 0.05 * torch.randn_like(weight)
            continue
        weight.data = weight.data.nan_to_num(0, 0, 0).clamp(-3, 3) + 0.05 * torch.randn_like(weight)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.eval()


def compare(model: nn.Module, example: Any, recipe: Any, expected: str, values: Mapping[Any, Any]) -> dict[str, Any]:
    """Compare the sites of a recipe with those expected, and their effect with what it should be."""
    layers = [name for name, _ in model.named_modules()]
    right = {name for glob in expected.split() if glob[0] != "?" for name in matches(glob, layers)}
    allowed = right | {name for glob in expected.split() for name in matches(glob.removeprefix("?"), layers)}
    found, said, effect, refused = set[str](), "", "", False
    try:
        plan = hookdrop.plan(model, recipe(p=0.3), example_input=example)
        found, said = {site.name for site in plan.sites}, "\n".join(plan.warnings)
        effect = EFFECTS[recipe.__name__](model, example, found) if recipe.__name__ in EFFECTS else ""
    except HookdropError as error:
        found, said, refused = set(), str(error), True

    def calls(names: Iterable[str]) -> set[Any]:
        place = "input" if recipe is recipes.head_dropout else "output"
        return {call for name in names for call in values.get((name, place), (name,))}

    missing = sorted(name for name in right if not calls([name]) <= calls(found))
    extra = sorted(name for name in found if not calls([name]) <= calls(allowed))
    plain = re.findall(r"'([^']+)'", re.sub(r"\d+", "#", said))  # a warning names some of several like layers
    named = all(any(re.sub(r"\d+", "#", f"{name}.").startswith(f"{one}.") for one in plain) for name in missing)
    verdict = "wrong" if extra or effect or not (named or refused) else "refused" if refused else "named"
    if not (missing or extra or effect):
        return {"verdict": "right", "sites": len(found)}
    return {"verdict": verdict, "missing": missing, "extra": extra, "effect": effect, "reason": said}


def matches(glob: str, names: list[str]) -> list[str]:
    """Return the names that a glob with `*` for one part of a name, and `{a,b}`, matches; itself if there are none."""
    pattern = re.escape(glob).replace(r"\*", r"[^.]+").replace(r"\{", "(").replace(r"\}", ")").replace(",", "|")
    return [name for name in names if re.fullmatch(pattern, name)] or [glob]


def watched(model: nn.Module, names: Iterable[str], example: Any) -> dict[tuple[str, str], list[Tensor]]:
    """Run the model, and return what each call of some layers takes and returns."""
    seen: dict[tuple[str, str], list[Tensor]] = {}

    def keep(name: str, module: nn.Module, args: Any, output: Any) -> None:
        for place, value in (("input", args), ("output", output)):
            seen.setdefault((name, place), []).extend(x.clone() for x in floating(value)[:1])

    hooks = [model.get_submodule(name).register_forward_hook(partial(keep, name)) for name in names]
    run(model, example)
    for hook in hooks:
        hook.remove()
    return seen


def fingerprint(x: Tensor) -> tuple[float, ...]:
    """Return some of the values of a tensor, apart from scale and order."""
    x = x.double().flatten().sort().values
    ranks = (x / x.norm().clamp(1e-30))[torch.linspace(0, len(x) - 1, 9).long()]
    return (len(x), *ranks.mul(1e4).round().tolist())


def floating(value: Any) -> list[Tensor]:
    return [x for x in tree_leaves(value) if isinstance(x, Tensor) and x.is_floating_point()]


@torch.no_grad()
def run(model: nn.Module, example: Any) -> list[Tensor]:
    torch.manual_seed(1)
    return [x.clone() for x in floating(model(*(example if isinstance(example, tuple) else (example,))))]


@contextmanager
def dropping(model: nn.Module, example: Any, recipe: Any) -> Iterator[hookdrop.Injection]:
    """Inject the recipe at one rate everywhere, and drop in eval mode."""
    drop = hookdrop.inject(model, recipe, example_input=example, p_scale="equal")
    with drop.sampling():
        yield drop
    drop.remove()


def skips_layers(model: nn.Module, example: Any, names: set[str]) -> str:
    """Check that the model equals one whose layers return their input."""

    def skip(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        x = floating((args, kwargs))[0]
        if isinstance(output, Mapping):  # a ModelOutput of transformers
            return type(output)(**{**output, next(iter(output)): x})
        return x if isinstance(output, Tensor) else type(output)([x, *output[1:]])

    with dropping(model, example, recipes.layer_drop(p=0.9999999)):
        output = run(model, example)
    hooks = [model.get_submodule(name).register_forward_hook(skip, with_kwargs=True) for name in names]
    same = all(map(torch.equal, output, run(model, example)))
    for hook in hooks:
        hook.remove()
    return "" if same else "the model differs from one whose layers return their input"


def drops_samples(model: nn.Module, example: Any, names: set[str]) -> str:
    """Check that each site drops all or nothing of the first sample, which is what changes with its input."""

    def changed(x: Any) -> Any:
        return torch.cat([x[:1].flip(-1), x[1:]]) if isinstance(x, Tensor) else x

    own, other = watched(model, names, example), watched(model, names, tree_map(changed, example))
    with dropping(model, example, recipes.stochastic_depth(p=0.5)) as drop, drop.recording(last=99) as records:
        run(model, example)
    for name in sorted(names):
        for x, y, record in zip(own[name, "output"], other[name, "output"], records.calls(name), strict=True):
            if len({*record.mask[(x - y).abs() > 0.1 * x.std()].tolist()}) > 1:
                return f"a part of a sample is dropped at {name!r}"
    return ""


class Scores(TorchFunctionMode):
    """Record which fraction of the scores of each softmax is masked."""

    masked: list[float]

    def __torch_function__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        mask = (kwargs or {}).get("attn_mask", (*args, None, None, None, None)[3])
        name = getattr(f, "__name__", "")
        scores = args[0] if name == "softmax" else mask if name == "scaled_dot_product_attention" else None
        if isinstance(scores, Tensor):
            masked = ~scores if scores.dtype == torch.bool else scores < -1e30
            self.masked.append(masked.double().mean().item())
        return f(*args, **(kwargs or {}))


def masks_scores(model: nn.Module, example: Any, names: set[str]) -> str:
    """Check that scores are masked, and none twice: compare with a rate of nearly 0."""
    rates = []
    for p in (1e-9, 0.3):
        with dropping(model, example, recipes.drop_key(p=p)), Scores() as scores:
            scores.masked = []
            run(model, example)
        rates.append(torch.tensor(scores.masked))
    masked = (rates[1] - rates[0]) / (1 - rates[0])
    return "" if 0 < masked.max() < 0.5 else f"masked: {masked.tolist()}"


EFFECTS = {"stochastic_depth": drops_samples, "layer_drop": skips_layers, "drop_key": masks_scores}

if __name__ == "__main__":
    sys.exit(main())
