"""Choosing layers: globs, expressions, classes, instances, wrappers, and what is said when nothing matches."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

import hypothesis.strategies as st
import pytest
import torch
from conftest import Small
from hypothesis import assume, given
from torch import nn

from hookdrop import Dropout, InjectionError, LayerError, plan
from hookdrop.injection.select import select, walk


def names(model: nn.Module, layers: object, exclude: object = ()) -> list[str]:
    return [layer.name for layer in select(model, layers, exclude).layers]


# --- against a plain reference resolver

NAMES = st.sampled_from(["module", "layer1", "layer10", "layer", "bn1", "bn2", "conv", "0", "1", "10", "a"])
TREES = st.recursive(
    st.just({}), lambda inner: st.dictionaries(NAMES, inner, min_size=1, max_size=4), max_leaves=12
).filter(bool)
SEGMENTS = st.sampled_from(
    ["*", "**", "?", "layer*", "layer1", "layer?", "bn[12]", "bn[!1]", "[0-9]", "1*", "module", "conv", "a", "[a-c]*"]
)
PATTERNS = st.lists(SEGMENTS, min_size=1, max_size=4).map(".".join)


def build(tree: dict[str, object]) -> nn.Module:
    module = nn.Module()
    module.forward = lambda x: x
    for name, inner in tree.items():
        module.add_module(name, build(inner))
    return module


def reference_matches(pattern: list[str], name: list[str]) -> bool:
    """Segment by segment, `**` by trying every length: one or more at the end, zero or more elsewhere."""
    if not pattern:
        return not name
    head, *rest = pattern
    if head == "**":
        shortest = 0 if rest else 1
        return any(reference_matches(rest, name[k:]) for k in range(shortest, len(name) + 1))
    return bool(name) and fnmatchcase(name[0], head) and reference_matches(rest, name[1:])


def reference(model: nn.Module, pattern: str) -> list[str]:
    known = [name for name, _ in model.named_modules() if name]
    if pattern in known:
        return [pattern]
    return [name for name in known if reference_matches(pattern.split("."), name.split("."))]


@given(tree=TREES, pattern=PATTERNS)
def test_globs_match_what_a_plain_resolver_matches(tree: dict[str, object], pattern: str) -> None:
    model = build(tree)
    expected = reference(model, pattern)
    if expected:
        assert names(model, pattern) == expected
    else:
        with pytest.raises(LayerError):
            names(model, pattern)


@given(data=st.data(), tree=TREES)
def test_lists_are_unions_and_excludes_are_taken_away(data: st.DataObject, tree: dict[str, object]) -> None:
    model = build(tree)
    known = [name for name, _ in model.named_modules() if name]
    matching = st.sampled_from(["*", "**", "**.1*", *known]).filter(lambda pattern: reference(model, pattern))
    patterns = data.draw(st.lists(matching, min_size=1, max_size=3))
    excludes = data.draw(st.lists(matching, max_size=2))
    wanted = {name for p in patterns for name in reference(model, p)}
    unwanted = {name for p in excludes for name in reference(model, p)}
    expected = [name for name, _ in model.named_modules() if name in wanted - unwanted]
    if expected:
        assert names(model, patterns, excludes) == expected
    else:
        with pytest.raises(LayerError, match="nothing is left"):
            names(model, patterns, excludes)


@given(tree=TREES, pattern=PATTERNS)
def test_a_wrapper_changes_no_match(tree: dict[str, object], pattern: str) -> None:
    model = build(tree)
    assume(reference(model, pattern))
    assert names(nn.DataParallel(model), pattern) == reference(model, pattern)


@given(tree=TREES)
def test_both_spellings_of_a_wrapped_name_are_accepted(tree: dict[str, object]) -> None:
    model = build(tree)
    wrapped = nn.DataParallel(model)
    for name, _ in wrapped.named_modules():
        plain = name.removeprefix("module").removeprefix(".")
        if plain and name not in dict(model.named_modules()):
            assert names(wrapped, name) == [plain]


# --- each kind of entry


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("layer2.0.bn2", ["layer2.0.bn2"]),
        ("layer2.*", ["layer2.0", "layer2.1"]),
        ("layer2.*.bn[12]", ["layer2.0.bn1", "layer2.0.bn2", "layer2.1.bn1", "layer2.1.bn2"]),
        ("**.bn2", ["layer1.0.bn2", "layer1.1.bn2", "layer2.0.bn2", "layer2.1.bn2"]),
        ("**.conv1", ["conv1", "layer1.0.conv1", "layer1.1.conv1", "layer2.0.conv1", "layer2.1.conv1"]),
        ("layer?.1.conv[!1]", ["layer1.1.conv2", "layer2.1.conv2"]),
        ("*", ["conv1", "layer1", "layer2", "fc"]),
    ],
)
def test_glob(model: Small, pattern: str, expected: list[str]) -> None:
    assert names(model, pattern) == expected


def test_double_star_alone_is_every_module_but_the_root(model: Small) -> None:
    assert names(model, "**") == [name for name, _ in model.named_modules() if name]


def test_an_exact_name_wins_over_its_reading_as_a_glob() -> None:
    model = nn.ModuleDict({"a*": nn.Linear(1, 1), "ab": nn.Linear(1, 1)})
    assert names(model, "a*") == ["a*"]


def test_expressions_must_match_the_whole_name(model: Small) -> None:
    assert names(model, re.compile(r"layer\d\.0\.bn\d")) == [
        "layer1.0.bn1", "layer1.0.bn2", "layer2.0.bn1", "layer2.0.bn2",
    ]  # fmt: skip
    with pytest.raises(LayerError, match=re.escape("re.compile('layer')")):
        names(model, re.compile("layer"))


def test_a_class_matches_by_isinstance(model: Small) -> None:
    class Special(nn.Linear):
        pass

    model.fc = Special(8, 10)
    assert names(model, nn.Linear) == ["fc"]
    assert len(names(model, nn.modules.batchnorm._BatchNorm)) == 8


def test_an_instance_is_itself_alone(model: Small) -> None:
    assert names(model, model.layer1[1].bn2) == ["layer1.1.bn2"]
    assert names(model, [model.fc, model.conv1]) == ["conv1", "fc"]


def test_the_model_itself_by_instance_or_class() -> None:
    lstm = nn.LSTM(3, 4)
    assert names(lstm, lstm) == [""]
    assert names(lstm, nn.LSTM) == [""]


def test_a_predicate_sees_name_and_module(model: Small) -> None:
    wide = names(model, lambda name, module: name.startswith("layer2") and isinstance(module, nn.Conv2d))
    assert wide == ["layer2.0.conv1", "layer2.0.conv2", "layer2.1.conv1", "layer2.1.conv2"]
    assert "" not in names(model, lambda name, module: True)


def test_a_shared_module_is_one_site_under_its_first_name_found_by_any() -> None:
    shared = nn.ReLU()
    model = nn.Sequential(nn.Linear(2, 2), shared, nn.Linear(2, 2), shared)
    assert names(model, "3") == ["1"]
    assert names(model, ["1", "3"]) == ["1"]
    assert names(model, "**", exclude="3") == ["0", "2"]


# --- wrappers, by their type


def test_wrappers_are_looked_through(model: Small) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.optim.swa_utils import AveragedModel

    model.layer1[0] = checkpoint_wrapper(model.layer1[0])
    for wrapped in (model, nn.DataParallel(model), torch.compile(model), AveragedModel(model)):
        assert names(wrapped, "layer1.*") == ["layer1.0", "layer1.1"]
        assert names(wrapped, "layer1.0.bn1") == ["layer1.0.bn1"]
        assert names(wrapped, "layer1.0._checkpoint_wrapped_module.bn1") == ["layer1.0.bn1"]
    assert names(nn.DataParallel(model), "module.layer1.*.bn1") == ["layer1.0.bn1", "layer1.1.bn1"]
    assert names(torch.compile(model), "_orig_mod.layer1.*") == ["layer1.0", "layer1.1"]


def test_children_named_module_are_not_taken_for_wrappers() -> None:
    inner = nn.Module()
    inner.add_module("module", nn.Sequential(nn.Linear(1, 1)))
    assert names(inner, "module.*") == ["module.0"]
    assert names(nn.DataParallel(inner), "module") == ["module"]
    assert names(nn.DataParallel(inner), "module.module.0") == ["module.0"]


def test_timms_ema_is_a_wrapper(model: Small) -> None:
    from timm.utils import ModelEmaV3

    assert names(ModelEmaV3(model), "layer1.0.bn1") == ["layer1.0.bn1"]


def test_pefts_wrappers_are_looked_through() -> None:
    from peft import LoraConfig, get_peft_model

    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    wrapped = get_peft_model(model, LoraConfig(target_modules=["0"]))
    assert names(wrapped, "1") == ["1"]
    assert names(wrapped, "base_model.model.1") == ["1"]


def test_walk_survives_a_module_cycle() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    model.add_module("me", model)
    assert [layer.name for layer in walk(model)] == ["", "0"]


# --- what a person reads


def test_the_issue_of_peft_style_suffixes(model: Small) -> None:
    with pytest.raises(LayerError) as error:
        names(model, "bn2")
    assert str(error.value).splitlines() == [
        "`layers` names a module that Small does not have.",
        "  asked for:    'bn2'",
        "  did you mean: '**.bn2' (4 modules)",
        '  see all:      print(hookdrop.plan(model, layers="**"))',
    ]
    with pytest.raises(LayerError, match=re.escape("'**.0.bn2' (2 modules)")):
        names(model, "0.bn2")


@pytest.mark.parametrize(
    ("entry", "hint"),
    [
        ("layer5", "did you mean: 'layer2', 'layer1'"),
        ("layer1.0.bn3", "did you mean: 'layer1.0.bn2', 'layer1.0.bn1'"),
        ("BatchNorm2d", "the class BatchNorm2d itself, not its name as a text (8 modules)"),
        (r"layer\d\.0", r"an expression? write re.compile('layer\\d\\.0')"),
        ("Layer1", "did you mean: 'layer1'"),
        ("convv2", "'**.conv2'"),
    ],
)
def test_a_name_that_is_not_there_gets_the_nearest(model: Small, entry: str, hint: str) -> None:
    with pytest.raises(LayerError, match=re.escape(hint)):
        names(model, entry)


def test_an_entry_without_match_is_an_error_even_if_others_match(model: Small) -> None:
    with pytest.raises(LayerError, match=re.escape("did you mean: 'layer2.*', 'layer1.*'")):
        names(model, ["layer1.*", "layer9.*"])
    with pytest.raises(LayerError, match="`exclude` names"):
        names(model, "layer1.*", exclude="layer9.*")


def test_a_class_without_match_lists_the_classes_there(model: Small) -> None:
    with pytest.raises(LayerError, match=r"asked for:    Conv3d\n  there are:    BatchNorm2d, Block, Conv2d"):
        names(model, nn.Conv3d)


def test_a_module_of_another_model_is_no_layer_of_this(model: Small) -> None:
    with pytest.raises(LayerError, match="a Conv2d in it that is not part of this Small"):
        names(model, Small().conv1)


def test_a_predicate_without_match(model: Small) -> None:
    with pytest.raises(LayerError, match="an entry in it that matches no module"):
        names(model, lambda name, module: False)


def test_empty_layers(model: Small) -> None:
    for empty in ([], ()):
        with pytest.raises(LayerError, match="`layers` is empty"):
            names(model, empty)
    with pytest.raises(LayerError, match="an empty name"):
        names(model, "")


@pytest.mark.parametrize("entry", [3, None, 1.5, b"layer1", [["layer1"]]])
def test_entries_of_other_kinds(model: Small, entry: object) -> None:
    with pytest.raises(LayerError, match="use a name, a glob"):
        names(model, [entry])


def test_a_class_that_is_no_module(model: Small) -> None:
    with pytest.raises(LayerError, match="the class dict in it, which is not a torch.nn.Module"):
        names(model, dict)


def test_a_mapping_as_layers(model: Small) -> None:
    with pytest.raises(TypeError, match="is a mapping"):
        names(model, {"layer1.*": 1})


def test_no_exclude_may_be_none(model: Small) -> None:
    assert names(model, "fc", exclude=None) == ["fc"]


def test_excluded_to_nothing(model: Small) -> None:
    with pytest.raises(LayerError, match="nothing is left"):
        names(model, "layer1.*", exclude="**")


def test_script_modules_are_refused(model: Small) -> None:
    with pytest.raises(InjectionError, match="ScriptModule can't carry Python hooks"):
        names(torch.jit.script(nn.Sequential(nn.ReLU())), "0")


def test_something_else_than_a_model() -> None:
    with pytest.raises(TypeError, match=r"must be a torch.nn.Module, got str"):
        names("resnet50", "layer1")


def test_facts_layer3_star_is_6_and_double_star_75_on_timm_resnet50() -> None:
    import timm

    model = timm.create_model("resnet50", num_classes=0)
    assert len(names(model, "layer3.*")) == 6
    assert len(names(model, "layer3.**")) == 75


def test_counts_say_what_each_entry_matched(model: Small) -> None:
    drafted = plan(model, Dropout(0.1), layers=["layer1.*", nn.Linear, re.compile("conv1")])
    assert drafted.counts == {"'layer1.*'": 2, "Linear": 1, "re.compile('conv1')": 1}
