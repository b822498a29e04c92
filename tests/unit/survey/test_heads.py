"""The heads of attention: which layer gets them, and in which layout."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hookdrop.survey.facts import survey
from hookdrop.survey.heads import Heads, find_heads
from hookdrop.survey.trace import record
from tests.support.models import toy

H, D, L = 4, 3, 5


class Attention(nn.Module):
    """Attention whose layout and projection depend on `kind`."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind, self.qkv, self.mixing = kind, nn.Linear(8, 3 * H * D), nn.Linear(H, H)
        self.outer, self.out = nn.RMSNorm(H * D), nn.Linear(H * D, 8)

    def forward(self, x: Tensor) -> Tensor:
        kind = self.kind
        q, k, v = self.qkv(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
        if kind == "eager":
            y = F.dropout((q @ k.mT).float().softmax(-1).type_as(v), 0.1, self.training) @ v
        elif kind == "folded":  # the heads are rows of the batch
            q, k, v = (t.flatten(0, 1) for t in (q, k, v))
            y = torch.bmm((q @ k.mT).softmax(-1), v).unflatten(0, (-1, H))
        elif kind == "multi-query":  # the queries of all heads in one matrix
            y = F.scaled_dot_product_attention(q.flatten(1, 2), k[:, 0], v[:, 0]).unflatten(1, (H, L))
        else:
            y = F.scaled_dot_product_attention(q, k, v)
        if kind == "differential":  # two maps for each head
            y = y[:, : H // 2] - 0.5 * y[:, H // 2 :]
            y = torch.cat([y, y], -1)
        if kind == "inner norm":
            y = F.rms_norm(y, (D,))
        if kind == "mixed":
            y = self.mixing(y.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        y = (y.permute(0, 2, 3, 1) if kind == "interleaved" else y.transpose(1, 2)).flatten(2)
        if kind == "gate":
            y = y * self.qkv(x)[..., : H * D].sigmoid()
        if kind == "in place":
            y.mul_(2.0)
        if kind == "norm":
            y = self.outer(y)
        if kind == "added":
            y = y + self.qkv(x)[..., : H * D]
        if kind == "convolution":
            return F.conv1d(y.mT, self.out.weight[..., None]).mT
        return F.linear(y, self.out.weight) if kind == "functional" else self.out(y)


def found(model: nn.Module) -> tuple[dict[str, Heads], dict[str, str]]:
    every = find_heads(record(model.eval(), torch.randn(2, L, 8)))
    heads = {name: one for name, one in every.items() if isinstance(one, Heads)}
    return heads, {name: one for name, one in every.items() if isinstance(one, str)}


@pytest.mark.parametrize("kind", ["", "eager", "folded", "multi-query", "inner norm", "gate", "in place"])
def test_heads_side_by_side(kind: str) -> None:
    assert found(nn.Sequential(nn.Identity(), Attention(kind))) == ({"1.out": Heads(H)}, {})


@pytest.mark.parametrize(
    ("kind", "layer", "heads"),
    [
        ("interleaved", "out", Heads(H, interleaved=True)),
        ("mixed", "mixing", Heads(H)),  # a layer that mixes the heads gets them as features
        ("differential", "out", Heads(H // 2)),  # two maps are one head
    ],
)
def test_other_layouts(kind: str, layer: str, heads: Heads) -> None:
    assert found(Attention(kind)) == ({layer: heads}, {})


@pytest.mark.parametrize(
    ("kind", "layer", "reason"),
    [
        ("norm", "out", "single head, or what mixes"),
        ("added", "out", "added to attention"),
        ("functional", "", "without calling a layer"),
        ("convolution", "", "a convolution"),
    ],
)
def test_what_is_refused(kind: str, layer: str, reason: str) -> None:
    heads, refused = found(Attention(kind))
    assert "out" not in heads
    assert list(refused) == [layer]
    assert reason in refused[layer]


def test_multihead_attention_is_refused() -> None:
    model = nn.TransformerEncoderLayer(8, 2, batch_first=True)
    assert found(model) == ({}, {"self_attn": "it computes its projection without calling the layer"})


def test_a_shared_projection_must_get_the_same_heads() -> None:
    first, second = Attention(), Attention("interleaved")
    second.out = first.out
    twice = toy(lambda m, x: m.second(m.first(x)), first=first, second=second)
    assert found(twice) == ({}, {"first.out": "its calls differ in the heads"})


def test_the_search_for_heads_needs_no_values() -> None:
    model = Attention()
    facts = survey(model, torch.randn(2, L, 8))
    assert facts.heads == {"out": Heads(H)}
    assert facts.forwards == 0
