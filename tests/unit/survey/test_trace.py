"""A trace records every value of every tensor, also after in-place operations, and restores the model."""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hookdrop.survey.trace import record
from tests.support.models import toy


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.cache: dict[str, Tensor] = {}
        self.seen: Tensor | None = None

    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        y = self.linear(x)
        self.cache["y"], self.seen = y, y
        y += x
        F.relu(y, inplace=True)
        return {"sum": y * scale, "mask": y > 0}


def test_in_place_operations_give_a_tensor_a_new_node() -> None:
    trace = record(Block(), torch.randn(2, 4))
    assert [op.name for op in trace.ops] == ["linear", "add", "relu", "mul", "gt"]
    linear, add, relu, mul, gt = trace.ops
    (x,) = trace.calls[0].inputs
    assert add.inputs == (linear.outputs[0], x)
    assert relu.inputs == tuple(add.outputs)
    assert mul.inputs == gt.inputs == tuple(relu.outputs)
    assert trace.users[x] == [linear, add]


def test_changes_through_a_view_are_seen() -> None:
    trace = record(toy(lambda m, x: ((y := x * 2).view(-1).add_(1), y.T)[1]), torch.randn(2, 4))
    assert [op.name for op in trace.ops] == ["mul", "view", "add", "alias", "T"]
    assert trace.ops[2].outputs[0] in trace.ops[3].inputs


def test_calls_have_arguments_outputs_and_a_stack() -> None:
    model = nn.Sequential(Block())
    model.forward = lambda x: model[0](scale=2.0, x=x)  # type: ignore[method-assign]
    trace = record(model, torch.randn(2, 4))
    outer, block, linear = trace.calls
    assert [call.name for call in linear.around()] == ["0.linear", "0", ""]
    assert block.arguments == {"x": outer.inputs[0], "scale": 2.0}
    assert list(block.output) == ["sum", "mask"]
    assert block.outputs == outer.outputs
    assert outer.start < block.start < linear.start < trace.ops[0].index < linear.end < block.end < outer.end


def test_leaves_say_what_they_are() -> None:
    trace = record(Block(), torch.randn(2, 4))
    assert [node.leaf for node in trace.ops[0].inputs] == ["input", "weight", "weight"]
    assert trace.ops[0].outputs[0].is_data
    assert trace.ops[0].outputs[0].has_weights


def test_the_model_is_restored_and_not_kept_alive() -> None:
    model = Block().train()
    trace = record(model, torch.randn(2, 4))
    assert model.training
    assert model.cache == {}
    assert model.seen is None
    assert not model._forward_hooks
    assert not model.linear._forward_pre_hooks
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None
    assert trace.ops


def test_values_and_shapes_alone_give_the_same_trace() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    fake, real = (record(layer, torch.randn(2, 5, 8), fake=fake) for fake in (True, False))
    assert [op.name for op in fake.ops] == [op.name for op in real.ops]
    assert {"add", "layer_norm"} <= {op.name for op in fake.ops}


def test_a_cache_of_a_function_keeps_no_fake_tensor() -> None:
    positions = functools.lru_cache(torch.arange)
    model = toy(lambda m, x: x + positions(x.shape[1]))
    record(model, torch.zeros(2, 3))
    assert model(torch.zeros(2, 3)).tolist() == [[0, 1, 2], [0, 1, 2]]
