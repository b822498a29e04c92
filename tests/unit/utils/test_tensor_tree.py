"""Selection of the tensor to regularize in the inputs or outputs of a layer."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import pytest
import torch
from torch import nn

from hookdrop import Dropout, ShapeError, inject
from tests.support.models import toy

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
    value = (ONES, INTEGERS, {"x": ONES, "y": SCALAR}, [ONES])
    out = regularized_output(value, tensor="all")
    assert torch.equal(out[0], ZEROS)
    assert out[1] is INTEGERS
    assert torch.equal(out[2]["x"], ZEROS)
    assert out[2]["y"] is SCALAR
    assert torch.equal(out[3][0], ZEROS)


def test_model_output_attributes_and_items_stay_consistent() -> None:
    out = regularized_output(model_output(last_hidden_state=ONES, hidden_states=(ONES, ONES)))
    assert out.last_hidden_state is out["last_hidden_state"] is out[0]
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
