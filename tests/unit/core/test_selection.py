"""Selection of layers by names, patterns, classes and functions, and of the tensor in the inputs or outputs of a layer."""

import dataclasses
import re
from collections import OrderedDict, defaultdict, namedtuple
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import nn

from hookdrop import Dropout, LayerError, ShapeError, inject, plan
from hookdrop.core.selection import named_layers
from tests.support.models import Small, names, toy

Pair = namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass(frozen=True)
class Frozen:
    score: torch.Tensor
    label: str


def regularized_output(value: Any, tensor: Any = None) -> Any:
    """Return `value` after a Dropout with p = 1."""
    result = value() if callable(value) else value
    model = nn.Sequential(toy(lambda m, x: result)).train()
    inject(model, Dropout(p=1.0), layers="0", tensor=tensor)
    return model(None)


def model_output(**fields: Any) -> Any:
    """Return a function that creates a transformers output."""

    def make() -> Any:
        from transformers.modeling_outputs import BaseModelOutput

        return BaseModelOutput(**fields)

    return make


pytestmark = pytest.mark.filterwarnings("ignore:the rate of:hookdrop.HookdropWarning")  # p=1 shows what is dropped

ONES, INTEGERS, SCALAR, ZEROS = torch.ones(3), torch.arange(3), torch.tensor(2.0), torch.zeros(3)
TWO = 2 * ONES


def leaves(value: Any) -> list[Any]:
    """What a container holds, in nested containers too."""
    if dataclasses.is_dataclass(value):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    parts = list(value.values()) if isinstance(value, dict) else value
    return [leaf for part in parts for leaf in leaves(part)] if isinstance(parts, list | tuple) else [parts]


@pytest.mark.parametrize(
    ("value", "tensor", "get"),
    [
        (ONES, None, lambda out: out),
        ((ONES, INTEGERS), None, lambda out: out[0]),
        ([INTEGERS, ONES], None, lambda out: out[1]),
        ((SCALAR, INTEGERS, None, ONES), None, lambda out: out[3]),
        (Pair(INTEGERS, ONES), None, lambda out: out.second),
        ({"ids": INTEGERS, "hidden": ONES, "rest": [ONES]}, None, lambda out: out["hidden"]),
        (OrderedDict(a=SCALAR, b=ONES), None, lambda out: out["b"]),
        (defaultdict(list, a=ONES), None, lambda out: out["a"]),
        (Frozen(ONES, "cat"), None, lambda out: out.score),
        (model_output(last_hidden_state=ONES), None, lambda out: out.last_hidden_state),
        ((INTEGERS, (SCALAR, {"deep": [ONES]})), None, lambda out: out[1][1]["deep"][0]),
        (torch.max(torch.ones(3, 2), dim=1), None, lambda out: out.values),
        (nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)]), None, lambda out: out.data),
        ((TWO, ONES), 1, lambda out: out[1]),
        ((TWO, ONES), -1, lambda out: out[1]),
        ({"a": TWO, "b": ONES}, "b", lambda out: out["b"]),
        ({"a": TWO, "b": ONES}, 1, lambda out: out["b"]),
        ({0: TWO, 1: ONES}, 1, lambda out: out[1]),
        (Pair(TWO, ONES), "second", lambda out: out.second),
        (Frozen(ONES, "cat"), "score", lambda out: out.score),
        (model_output(last_hidden_state=ONES), "last_hidden_state", lambda out: out["last_hidden_state"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_first_floating_point_tensor_an_index_or_a_key_selects_one_tensor(value: Any, tensor: Any, get: Any) -> None:
    value = value() if callable(value) else value
    out = regularized_output(value, tensor)
    assert type(out) is type(value)
    assert torch.equal(get(out), ZEROS)
    assert torch.equal(get(value), ONES), "the container of the layer was modified"
    changed = [new is not old for new, old in zip(leaves(out), leaves(value), strict=True)]
    assert changed.count(True) == 1, "another value was changed"


def test_all_selects_every_floating_point_tensor() -> None:
    out = regularized_output((ONES, INTEGERS, {"x": ONES, "y": SCALAR}, [ONES]), tensor="all")
    assert torch.equal(out[0], ZEROS)
    assert out[1] is INTEGERS
    assert torch.equal(out[2]["x"], ZEROS)
    assert out[2]["y"] is SCALAR
    assert torch.equal(out[3][0], ZEROS)


def test_model_output_attributes_and_items_stay_consistent() -> None:
    out = regularized_output(model_output(last_hidden_state=ONES, hidden_states=(ONES, ONES)))
    assert out.last_hidden_state is out["last_hidden_state"] is out[0]
    vars(given := type("AttrDict", (dict,), {})(y=ONES)).update(y=ONES)
    assert torch.equal(regularized_output(given).y, ZEROS)
    assert torch.equal(out.hidden_states[0], ONES)


@pytest.mark.parametrize(
    ("value", "tensor", "says"),
    [
        (INTEGERS, None, r"Dropout at '0' got \(3,\) int64: no floating-point tensor"),
        (SCALAR, None, "no floating-point tensor with at least one dimension"),
        ((INTEGERS, None), None, r"got tuple\(\(3,\) int64, NoneType\)"),
        (None, None, "got NoneType"),
        ((ONES,), 3, "has no tensor=3: it has 1 item"),
        (ONES, 0, "use tensor=None"),
        ({"a": ONES}, "b", r"has no tensor='b'; its keys are \['a'\]"),
        ((ONES, (ONES, ONES)), 1, r"Dropout at '0': tensor=1 is tuple"),
        ((INTEGERS,), 0, "not a floating-point tensor"),
    ],
)
def test_missing_tensor_is_an_error(value: Any, tensor: Any, says: str) -> None:
    with pytest.raises(ShapeError, match=says):
        regularized_output(value, tensor)


@pytest.mark.parametrize("tensor", [True, 1.5, ["a"], b"a"])
def test_invalid_tensor_argument_is_an_error(tensor: Any) -> None:
    with pytest.raises(TypeError, match="tensor must be an index, a key"):
        regularized_output(ONES, tensor)


def regularized_inputs(*args: Any, tensor: Any = None, **kwargs: Any) -> Any:
    inner = toy(lambda m, ids, hidden=None, *rest, mask=None, **more: (ids, hidden, rest, mask, more))
    model = toy(lambda m, *args, **kwargs: m.inner(*args, **kwargs), inner=inner)
    inject(model, Dropout(p=1.0), layers="inner", at="input", tensor=tensor)
    return model(*args, **kwargs)


@pytest.mark.parametrize(
    ("args", "kwargs", "tensor", "expected"),
    [
        ((ONES,), {}, None, "ids"),
        ((), {"hidden": ONES, "ids": INTEGERS}, None, "hidden"),
        ((), {"mask": ONES, "hidden": ONES, "ids": INTEGERS}, None, "hidden"),
        ((ONES, ONES), {}, "hidden", "hidden"),
        ((ONES,), {"hidden": ONES}, "hidden", "hidden"),
        ((INTEGERS,), {"mask": ONES, "hidden": ONES}, 1, "hidden"),
    ],
    ids=["positional", "keywords", "signature order", "by name", "by name, as a keyword", "by index"],
)
def test_one_input_is_selected(args: Any, kwargs: Any, tensor: Any, expected: str) -> None:
    ids, hidden, _, mask, _ = regularized_inputs(*args, tensor=tensor, **kwargs)
    found = {"ids": ids, "hidden": hidden, "mask": mask}
    given = dict(zip(["ids", "hidden"], args, strict=False)) | kwargs
    assert torch.equal(found[expected], ZEROS)
    assert all(found[name] is value for name, value in given.items() if name != expected)


def test_variadic_inputs() -> None:
    out = regularized_inputs(INTEGERS, None, ONES, extra=ONES, tensor="all")
    assert torch.equal(out[2][0], ZEROS)
    assert torch.equal(out[4]["extra"], ZEROS)


def test_tensor_by_name_uses_a_patched_forward() -> None:
    inner = toy(lambda m, a, b: (a, b))
    inner.forward = lambda b, a: (a, b)  # type: ignore[method-assign]
    model = toy(lambda m, x, y: m.inner(x, y), inner=inner)
    inject(model, Dropout(1.0), layers="inner", at="input", tensor="a")
    a, b = model(torch.ones(3), torch.ones(3))
    assert torch.equal(a, torch.zeros(3))
    assert torch.equal(b, torch.ones(3))


# --- compared with a reference resolver

NAMES = st.sampled_from(["module", "layer1", "layer10", "layer", "bn1", "bn2", "conv", "0", "1", "10", "a"])
CHILDREN = partial(st.dictionaries, NAMES, min_size=1, max_size=4)
TREES = st.recursive(st.just({}), CHILDREN, max_leaves=12).filter(bool)
GLOBS = ["*", "**", "?", "layer*", "layer1", "layer?", "bn[12]", "bn[!1]", "[0-9]", "1*", "module", "a", "[a-c]*"]
SEGMENTS = st.sampled_from([*GLOBS, "conv"])
PATTERNS = st.lists(SEGMENTS, min_size=1, max_size=4).map(".".join)


def build(tree: dict[str, object]) -> nn.Module:
    module = nn.Module()
    module.forward = lambda x: x
    for name, inner in tree.items():
        module.add_module(name, build(inner))
    return module


def reference_matches(pattern: list[str], name: list[str]) -> bool:
    """Match segment by segment; `**` tries every length: one or more at the end, zero or more elsewhere."""
    if not pattern:
        return not name
    head, *rest = pattern
    if head == "**":
        return any(reference_matches(rest, name[k:]) for k in range(0 if rest else 1, len(name) + 1))
    return bool(name) and fnmatchcase(name[0], head) and reference_matches(rest, name[1:])


def reference(model: nn.Module, pattern: str) -> list[str]:
    known = [name for name, _ in model.named_modules() if name]
    if pattern in known:
        return [pattern]
    return [name for name in known if reference_matches(pattern.split("."), name.split("."))]


@given(tree=TREES, patterns=st.lists(PATTERNS, min_size=1, max_size=3), data=st.data())
def test_globs_agree_with_a_reference(tree: dict[str, object], patterns: list[str], data: st.DataObject) -> None:
    model = build(tree)
    known = [name for name, _ in model.named_modules() if name]
    matching = st.sampled_from(["*", "**", "**.1*", *known]).filter(lambda pattern: reference(model, pattern))
    patterns = data.draw(st.sampled_from([patterns[:1], data.draw(st.lists(matching, min_size=1, max_size=3))]))
    excludes = data.draw(st.lists(matching, max_size=2))
    wanted, unwanted = ([reference(model, one) for one in these] for these in (patterns, excludes))
    left = {name for one in wanted for name in one} - {name for one in unwanted for name in one}
    expected = [name for name in known if name in left]
    if expected and all(wanted):
        assert names(model, patterns, excludes) == names(nn.DataParallel(model), patterns, excludes) == expected
    else:
        with pytest.raises(LayerError, match="nothing is left" if all(wanted) else None):
            names(model, patterns, excludes)


@pytest.mark.parametrize("wrapped", [False, True])
def test_functions_and_expressions_get_the_names_of_the_wrapper_if_no_other_matches(wrapped: bool) -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1)))
    around = nn.DataParallel(model)
    listed = {name for name, module in (around if wrapped else model).named_modules() if isinstance(module, nn.Linear)}
    assert names(around, lambda name, module: name in listed) == ["0", "1.0"]
    assert names(around, re.compile("|".join(map(re.escape, listed)))) == ["0", "1.0"]
    assert names(around, re.compile(r"\w+"), [lambda name, module: name in listed]) == ["1"]
    assert names(around, re.compile(r"\w+")) == ["0", "1"]  # not "module.0"


# --- each kind of entry


def test_classes_instances_and_predicates(model: Small) -> None:
    class Special(nn.Linear):
        pass

    model.fc = Special(8, 10)
    assert names(model, nn.Linear) == ["fc"]
    assert len(names(model, nn.modules.batchnorm._BatchNorm)) == 8
    assert names(model, model.layer1[1].bn2) == ["layer1.1.bn2"]
    assert names(model, [model.fc, model.conv1]) == ["conv1", "fc"]
    counts = plan(model, Dropout(0.1), layers=["layer1.*", nn.Linear, re.compile("conv1")]).counts
    assert counts == {"'layer1.*'": 2, "Linear": 1, "re.compile('conv1')": 1}
    wide = names(model, lambda name, module: name.startswith("layer2") and isinstance(module, nn.Conv2d))
    assert wide == ["layer2.0.conv1", "layer2.0.conv2", "layer2.1.conv1", "layer2.1.conv2"]
    assert "" not in names(model, lambda name, module: True)
    lstm = nn.LSTM(3, 4)
    assert names(lstm, lstm) == names(lstm, nn.LSTM) == [""]


def test_shared_module_is_one_site_found_by_any_of_its_names() -> None:
    shared = nn.ReLU()
    model = nn.Sequential(nn.Linear(2, 2), shared, nn.Linear(2, 2), shared)
    assert names(model, "3") == ["1"]
    assert names(model, ["1", "3"]) == ["1"]
    assert names(model, "**", exclude="3") == ["0", "2"]


def test_children_named_module_are_not_wrappers() -> None:
    inner = nn.Module()
    inner.add_module("module", nn.Sequential(nn.Linear(1, 1)))
    assert names(inner, "module.*") == ["module.0"]
    assert names(nn.DataParallel(inner), "module") == ["module"]
    assert names(nn.DataParallel(inner), "module.module.0") == ["module.0"]


def test_named_layers_with_a_module_cycle() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    model.add_module("me", model)
    assert [layer.name for layer in named_layers(model)] == ["", "0"]


# --- error messages


def test_invalid_entries_raise(model: Small) -> None:
    """Also if other entries match."""
    none = lambda name, module: False
    for wrong in ([], "", dict, none, 3, None, 1.5, b"layer1", [["layer1"]], {"layer1.*": 1}, ["layer1.*", "layer9.*"]):
        with pytest.raises((LayerError, TypeError)):
            names(model, wrong)
    for exclude in ("layer9.*", "layer9"):
        with pytest.raises(LayerError, match="`exclude`"):
            names(model, "layer1.*", exclude=exclude)


def test_suggested_patterns_may_add_several_segments() -> None:
    model = nn.ModuleDict({"encoder": nn.ModuleDict({"layer": nn.Sequential(nn.ModuleDict({"key": nn.Linear(1, 1)}))})})
    for entry, pattern in {"encoder.key": "encoder.**.key", "layer.key": "**.layer.*.key"}.items():
        with pytest.raises(LayerError, match=re.escape(f"did you mean: '{pattern}' (1 module)")):
            names(model, entry)


def iterates(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Calls the children of its containers, never a container."""
    for block in m.blocks:
        x = block(x)
    return sum(head(x) for head in m.heads)


def iterating() -> nn.Module:
    blocks = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    return toy(iterates, blocks=blocks, heads=nn.ModuleList([nn.Linear(8, 2), nn.Linear(8, 2)]))


class TestSelection:
    def test_uncalled_container_matched_by_a_pattern_warns(self) -> None:
        drafted = plan(iterating(), Dropout(0.1), layers="*", example_input=torch.ones(2, 8))
        assert [site.name for site in drafted.sites] == ["blocks"]
        assert "skipped 1 module that the model never calls (containers): 'heads'." in drafted.warnings
        assert any("1 site never called in an eval forward" in text for text in drafted.warnings)
        with pytest.raises(LayerError, match="which is never called: a hook on it never fires"):
            plan(iterating(), Dropout(0.1), layers="head*[s]")

    def test_multihead_attention_out_proj_is_never_called(self) -> None:
        """Its parent uses its weights; this is known without an example."""
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 1)
        with pytest.raises(LayerError, match="self_attn.out_proj"):
            inject(model, Dropout(0.1), layers="layers.0.self_attn.out_proj")
        with pytest.raises(LayerError, match="which is never called: a hook on it never fires"):
            inject(model, Dropout(0.1), layers="**.out_proj")


def test_expressions_must_match_the_whole_name(model: Small) -> None:
    assert names(model, re.compile(r"layer\d\.0\.bn\d")) == [
        "layer1.0.bn1", "layer1.0.bn2", "layer2.0.bn1", "layer2.0.bn2",
    ]  # fmt: skip
    with pytest.raises(LayerError, match=re.escape("re.compile('layer')")):
        names(model, re.compile("layer"))


@pytest.mark.parametrize(
    ("entry", "hint"),
    [
        ("layer1.0.bn1.**", "did you mean: 'layer1.0.bn1' (1 module)"),
        ("layer5", "did you mean: 'layer2', 'layer1'"),
        ("layer1.0.bn3", "did you mean: 'layer1.0.bn2', 'layer1.0.bn1'"),
        ("nn.BatchNorm2d", "the class nn.BatchNorm2d itself, not its name as a string (8 modules)"),
        (r"layer\d\.0", r"a regular expression? write re.compile('layer\\d\\.0')"),
        ("convv2", "'**.conv2'"),
        ("layer1.bn2", "'layer1.*.bn2' (2 modules)"),
        ("layer1*bn2", "'layer1.*.bn2' (2 modules)"),
        ("layer?.bn2", "'layer?.*.bn2' (4 modules)"),
        ("*bn2", "'**.*bn2' (4 modules)"),
        (nn.Conv3d, "a class that matches no module of Small"),
    ],
)
def test_unknown_names_get_suggestions(model: Small, entry: Any, hint: str) -> None:
    with pytest.raises(LayerError, match=re.escape(hint)):
        names(model, entry)


@pytest.mark.parametrize("of", [lambda parts: "parts.*", lambda parts: parts[0]])
def test_modules_in_a_plain_list_are_named(of: Any) -> None:
    parts = [nn.Linear(4, 4)]
    with pytest.raises(LayerError, match=r"'0.parts' has modules in a plain list.*use nn.ModuleList"):
        names(nn.Sequential(toy(lambda m, x: x, parts=parts)), of(parts))
