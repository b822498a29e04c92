"""Pages that list what the package has: the reference, docstring examples, the method matrix, the architecture."""

import copy
import doctest
import importlib
import json
import pkgutil
import re
from types import ModuleType

import pytest
import torch
from torch import nn

import hookdrop
from hookdrop import functional, observe, recipes, testing
from hookdrop.core.parts import REGULARIZERS
from tests.support.programs import ROOT
from tests.support.transformers_models import SPEECH, whisper

TEXT = "\n".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
PACKAGES = {"functional", "integrations", "observe", "recipes", "testing"}


@pytest.mark.parametrize("module", [hookdrop, functional, recipes, observe, testing], ids=lambda m: m.__name__)
def test_every_public_name_is_listed_once(module: ModuleType) -> None:
    sections = re.split(r"^\.\. currentmodule:: (.*)$", TEXT, flags=re.M)
    texts = [text for name, text in zip(sections[1::2], sections[2::2], strict=True) if name == module.__name__]
    listed = [name for text in texts for name in re.findall(r"^   (\w+)$", text, re.M)]
    assert sorted(listed) == sorted(set(module.__all__) - PACKAGES)


MODULES = [info.name for info in pkgutil.walk_packages(hookdrop.__path__, "hookdrop.")]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_run(name: str) -> None:
    module = importlib.import_module(name)
    names = {key: getattr(hookdrop, key) for key in hookdrop.__all__}
    assert doctest.testmod(module, extraglobs={"torch": torch, "nn": nn, "copy": copy, **names}).failed == 0


def test_docstrings_contain_examples() -> None:
    finder = doctest.DocTestFinder(exclude_empty=True)
    core = [name for name in MODULES if not name.startswith("hookdrop.integrations.")]  # the others import trainers
    assert sum(len(finder.find(importlib.import_module(name))) for name in core) > 20


METHODS = (ROOT / "docs" / "methods" / "index.md").read_text()
TABLE = [[cell.strip() for cell in line.split(" | ")] for line in METHODS.splitlines() if line.startswith("| ")][1:]
ROWS = {re.findall(r"\[(\w+)\]", row[0])[0]: row for row in TABLE if "](" in row[0]}
ARMS = {
    "digits": ("Dropout", "Dropout2d", "DropBlock", "DropPath", "dropblock_resnet"),
    "finetune": ("UniformNoise", "MixStyle", "stochastic_depth"),
}

COSTS = json.loads((ROOT / "benchmarks" / "results" / "costs.json").read_text())["methods"]


def test_every_regularizer_and_recipe_has_a_row() -> None:
    named = set(re.findall(r"\w+", " ".join(row[0] for row in TABLE)))
    same = {"Dropout1d": "1d", "Dropout3d": "3d"}
    assert {same.get(name, name) for name in REGULARIZERS} <= named
    assert set(recipes.__all__) - {"Recipe", "RecipeSite"} <= set(re.findall(r"\w+", METHODS))


def test_costs_are_those_of_the_committed_results() -> None:
    wanted = {name: [f"{cost[kind]:.2f}" for kind in ("time", "memory")] for name, cost in COSTS.items()}
    for study, names in ARMS.items():
        summary = json.loads((ROOT / "benchmarks" / "results" / study / "summary.json").read_text())
        arms = {arm["name"]: arm for arm in summary["cells"][0]["arms"]}
        wanted |= {name: [f"{arms[name][kind]['median']:.2f}" for kind in ("time", "memory")] for name in names}
    assert {name: [cell.split(";")[0] for cell in ROWS[name][4:6]] for name in wanted} == wanted


@pytest.mark.parametrize(
    ("name", "variant"), [("LayerDrop", "LayerDrop 50 %, row"), ("DropPath", "DropPath 40 %, subset")]
)
def test_times_saved_are_those_of_the_committed_steps(name: str, variant: str) -> None:
    results = ROOT / "benchmarks" / "results" / "intel-xeon" / "skip_step.json"
    (vit, *_) = json.loads(results.read_text())["skip"].values()
    assert ROWS[name][6].split(": ")[-1] == f"{vit['ratios'][f'{variant} / no dropping']['median']:.2f}"


def test_the_readme_links_the_first_eight_methods() -> None:
    methods = (ROOT / "README.md").read_text().partition("28 methods")[2]
    assert re.findall(r"\[(\w+)\]\(docs/methods", methods) == list(ROWS)[:8]


@pytest.mark.parametrize("name", ["Dropout", "TokenDropout", "LayerDrop", "NEFTune", "MixStyle", "DSU"])
def test_samples_are_independent_as_stated(name: str) -> None:
    row, one = ROWS[name], REGULARIZERS[name](0.1)
    assert (row[7] == "yes") is bool(one.independent_samples)
    assert row[3].startswith(f"`{one.rate.attribute}`")


KEYWORDS = {name: row[8].removesuffix(" |").split(", ") for name, row in ROWS.items()}
FOUND = {
    "transformer": "Dropout DropPath TokenDropout HeadDropout DropKey LayerDrop NEFTune Mixout GaussianDropout"
    " stochastic_depth patch_dropout residual_dropout set_dropout",
    "ViT": "Dropout DropPath TokenDropout HeadDropout DropKey LayerDrop stochastic_depth patch_dropout set_dropout",
    "LSTM": "Dropout LockedDropout WeightDrop ClipActivationGrad ClampActivationGrad ActivationPenalty set_dropout",
    "CNN": "Dropout Dropout2d DropBlock DropPath ShakeDrop Cutout AlphaDropout GaussianNoise UniformNoise MixStyle DSU"
    " Masksembles dropblock_resnet dropblock_unet dropblock_detector stochastic_depth set_dropout",
    "audio": "Dropout2d DropBlock HeadDropout DropKey LayerDrop LockedDropout stochastic_depth residual_dropout"
    " set_dropout",
    "uncertainty": "Dropout Dropout2d Masksembles set_dropout",
}
"""What the filter of the matrix has to find. The pages of these methods show them for such models."""
GRADIENT_EDITS = {f"{name}ActivationGrad" for name in ("Clip", "Clamp", "Scale")}


def found(word: str) -> set[str]:
    """The rows that `matrix.js` shows for a word."""
    shown = {name: re.sub(r"\]\([^)]*\)", "", " | ".join(row)).lower() for name, row in ROWS.items()}
    return {name for name, text in shown.items() if word.lower() in text}


@pytest.mark.parametrize(("word", "names"), FOUND.items(), ids=list(FOUND))
def test_the_filter_finds_the_methods_for_a_kind_of_model(word: str, names: str) -> None:
    assert set(names.split()) <= found(word) < set(ROWS)


def test_the_filter_finds_what_saves_time_and_what_reduces_overfitting() -> None:
    assert found("faster") == {name for name, row in ROWS.items() if row[6] != "no"}
    assert found("overfit") == set(ROWS) - {"MixStyle", "DSU", "Masksembles"} - GRADIENT_EDITS


def test_every_row_has_keywords_and_no_keyword_is_misspelled() -> None:
    assert all(KEYWORDS.values())
    every = [word for words in KEYWORDS.values() for word in words]
    assert not {word for word in every if every.count(word) == 1} - {"diffusion", "freeze", "segmentation"}


@pytest.mark.parametrize("name", [name for name in recipes.__all__ if "audio" in KEYWORDS.get(name, ())])
def test_recipes_for_audio_find_sites_in_a_speech_model(name: str) -> None:
    assert hookdrop.plan(whisper(), getattr(recipes, name)(), example_input=SPEECH).sites


_TEXTS = [
    (ROOT / "docs" / f"{name}.md").read_text() for name in ("architecture", "project/extending", "project/decisions")
]
ARCHITECTURE = re.sub(r"^```.*?^```$", "", "\n".join(_TEXTS), flags=re.M | re.S)
FILES = [path for folder in ("hookdrop", "tests", "benchmarks") for path in (ROOT / folder).rglob("*")]


def test_named_files_classes_and_functions_exist() -> None:
    quoted = set(re.findall(r"`([^`\n]+)`", ARCHITECTURE))
    sources = {f"/{path.relative_to(ROOT)}": path.read_text() for path in FILES if path.suffix in (".py", ".c")}
    words = {word for place in sources.items() for text in place for word in re.findall(r"\w+", text)}
    files = {text for text in quoted if re.fullmatch(r"[\w./]+\.(py|c)", text)}
    assert not [text for text in files if not any(path.endswith(f"/{text}") for path in sources)]
    names = {text for text in quoted - files if re.fullmatch(r"[\w.]+\w", text)}
    assert not [name for name in names if name.rpartition(".")[2] not in words]
    assert min(len(files), len(names)) > 8


@pytest.mark.parametrize(("package", "files"), re.findall(r"^\| `(\w+)/` \| [^|]*\| ([^|]*) \|$", ARCHITECTURE, re.M))
def test_main_files_of_a_package_exist(package: str, files: str) -> None:
    for name in re.findall(r"`(\w+)`", re.sub(r"\([^)]*\)", "", files)):
        assert (ROOT / "hookdrop" / package / f"{name}.py").exists(), name
