"""Which tensor of an output or of the arguments is regularized, and that all else stays."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import pytest
import torch
from torch import nn

from hookdrop import Dropout, ShapeError, inject

Pair = namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass(frozen=True)
class Frozen:
    score: torch.Tensor
    label: str


class Gives(nn.Module):
    """Gives back what it was made with."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Any = None) -> Any:
        return self.value


def through(value: Any, tensor: Any = None) -> Any:
    """`value` after a Dropout that zeroes everything."""
    model = nn.Sequential(Gives(value() if callable(value) else value)).train()
    inject(model, Dropout(p=1.0), layers="0", tensor=tensor)
    return model(None)


def model_output(**fields: Any) -> Any:
    """Of transformers, made when it is called."""

    def make() -> Any:
        from transformers.modeling_outputs import BaseModelOutput

        return BaseModelOutput(**fields)

    return make


ONES, INTEGERS, SCALAR, ZEROS = torch.ones(3), torch.arange(3), torch.tensor(2.0), torch.zeros(3)


@pytest.mark.parametrize(
    ("value", "get"),
    [
        (ONES, lambda out: out),
        ((ONES, INTEGERS), lambda out: out[0]),
        ([INTEGERS, ONES], lambda out: out[1]),
        ((SCALAR, INTEGERS, None, ONES), lambda out: out[3]),
        (Pair(INTEGERS, ONES), lambda out: out.second),
        ({"ids": INTEGERS, "hidden": ONES}, lambda out: out["hidden"]),
        (OrderedDict(a=SCALAR, b=ONES), lambda out: out["b"]),
        (defaultdict(list, a=ONES), lambda out: out["a"]),
        (Frozen(ONES, "cat"), lambda out: out.score),
        (model_output(last_hidden_state=ONES), lambda out: out.last_hidden_state),
        ((INTEGERS, (SCALAR, {"deep": [ONES]})), lambda out: out[1][1]["deep"][0]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_first_floating_tensor_that_is_not_0d_is_taken(value: Any, get: Any) -> None:
    value = value() if callable(value) else value
    out = through(value)
    assert type(out) is type(value)
    assert torch.equal(get(out), ZEROS)
    assert torch.equal(get(value), ONES), "the layer's own container was written to"


def test_all_else_in_the_container_is_the_same_object() -> None:
    extra = object()
    value = {"a": ONES, "b": INTEGERS, "c": SCALAR, "d": extra, "e": [ONES]}
    out = through(value)
    assert all(out[key] is value[key] for key in "bcde")
    assert list(out) == list(value)


def test_all_takes_every_tensor_that_fits() -> None:
    value = (ONES, INTEGERS, {"x": ONES, "y": SCALAR}, [ONES])
    out = through(value, tensor="all")
    assert torch.equal(out[0], ZEROS)
    assert out[1] is INTEGERS
    assert torch.equal(out[2]["x"], ZEROS)
    assert out[2]["y"] is SCALAR
    assert torch.equal(out[3][0], ZEROS)


@pytest.mark.parametrize(
    ("value", "tensor", "get"),
    [
        ((ONES, ONES), 1, lambda out: out[1]),
        ((ONES, ONES), -1, lambda out: out[1]),
        ({"a": ONES, "b": ONES}, "b", lambda out: out["b"]),
        ({"a": ONES, "b": ONES}, 1, lambda out: out["b"]),
        ({0: ONES, 1: ONES}, 1, lambda out: out[1]),
        (Pair(ONES, ONES), "second", lambda out: out.second),
        (Frozen(ONES, "cat"), "score", lambda out: out.score),
        (model_output(last_hidden_state=ONES), "last_hidden_state", lambda out: out["last_hidden_state"]),
    ],
)
def test_an_index_or_key_takes_that_one_alone(value: Any, tensor: Any, get: Any) -> None:
    out = through(value, tensor)
    assert torch.equal(get(out), ZEROS)
    flat = out if isinstance(out, tuple) else [getattr(out, "score", None)] if isinstance(out, Frozen) else out.values()
    assert sum(torch.equal(t, ZEROS) for t in flat) == 1


def test_a_model_output_keeps_attribute_and_item_together() -> None:
    out = through(model_output(last_hidden_state=ONES, hidden_states=(ONES, ONES)))
    assert out.last_hidden_state is out["last_hidden_state"] is out[0]
    assert torch.equal(out.hidden_states[0], ONES)


@pytest.mark.parametrize(
    ("value", "tensor", "says"),
    [
        (INTEGERS, None, r"Dropout at '0' got \(3,\) int64: no floating-point tensor"),
        (SCALAR, None, "no floating-point tensor in it that is not 0-d"),
        ((INTEGERS, None), None, r"got tuple\(\(3,\) int64, NoneType\)"),
        (None, None, "got NoneType"),
        ((ONES,), 3, "has no tensor=3: it has 1 parts"),
        (ONES, 0, "leave tensor=None"),
        ({"a": ONES}, "b", r"has no tensor='b'; it has \['a'\]"),
        ((ONES, (ONES, ONES)), 1, r"Dropout at '0': tensor=1 is tuple"),
        ((INTEGERS,), 0, "must be a floating-point tensor"),
    ],
)
def test_a_tensor_that_is_not_there(value: Any, tensor: Any, says: str) -> None:
    with pytest.raises(ShapeError, match=says):
        through(value, tensor)


@pytest.mark.parametrize("tensor", [True, 1.5, ["a"], b"a"])
def test_tensor_of_another_kind(tensor: Any) -> None:
    with pytest.raises(TypeError, match="tensor must be an index, a key"):
        through(ONES, tensor)


class Takes(nn.Module):
    """Hands back the arguments that it got."""

    def forward(self, ids: Any, hidden: Any = None, *rest: Any, mask: Any = None, **more: Any) -> Any:
        return ids, hidden, rest, mask, more


class Owner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Takes()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def into(*args: Any, tensor: Any = None, **kwargs: Any) -> Any:
    model = Owner().train()
    inject(model, Dropout(p=1.0), layers="inner", at="input", tensor=tensor)
    return model(*args, **kwargs)


def test_input_of_a_positional_call() -> None:
    assert torch.equal(into(ONES)[0], ZEROS)


def test_input_of_a_keyword_only_call() -> None:
    ids, hidden, *_ = into(hidden=ONES, ids=INTEGERS)
    assert ids is INTEGERS
    assert torch.equal(hidden, ZEROS)


def test_inputs_are_searched_in_signature_order_not_call_order() -> None:
    _, hidden, _, mask, _ = into(mask=ONES, hidden=ONES, ids=INTEGERS)
    assert torch.equal(hidden, ZEROS)
    assert mask is ONES


def test_input_by_name_however_it_was_passed() -> None:
    assert torch.equal(into(ONES, ONES, tensor="hidden")[1], ZEROS)
    assert torch.equal(into(ONES, hidden=ONES, tensor="hidden")[1], ZEROS)
    assert into(ONES, hidden=ONES, tensor="hidden")[0] is ONES


def test_input_by_index_counts_in_signature_order() -> None:
    out = into(INTEGERS, mask=ONES, hidden=ONES, tensor=1)
    assert torch.equal(out[1], ZEROS)
    assert out[3] is ONES


def test_inputs_beyond_the_signature() -> None:
    out = into(INTEGERS, None, ONES, extra=ONES, tensor="all")
    assert torch.equal(out[2][0], ZEROS)
    assert torch.equal(out[4]["extra"], ZEROS)


def test_the_callers_tensor_is_not_written_to() -> None:
    x = torch.ones(5)
    into(x)
    assert torch.equal(x, torch.ones(5))


def test_input_in_eval_mode_is_the_same_object() -> None:
    model = Owner()
    inject(model, Dropout(p=1.0), layers="inner", at="input")
    model.eval()
    assert model(ONES)[0] is ONES


def test_torch_return_types_keep_their_class() -> None:
    value = torch.max(torch.ones(2, 3), dim=1)
    out = through(value)
    assert type(out) is type(value)
    assert torch.equal(out.values, torch.zeros(2))


def test_packed_sequences_keep_their_class() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(2, 2)])
    out = through(packed)
    assert isinstance(out, nn.utils.rnn.PackedSequence)
    assert torch.equal(out.data, torch.zeros(5, 2))
    assert torch.equal(out.batch_sizes, packed.batch_sizes)
