"""What a survey finds of image patches, token embeddings, samples and the heads of attention."""

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hookdrop import InjectionError, LayerError, TokenDropout, inject, plan
from hookdrop.core.tensor_tree import tensors
from hookdrop.core.torch_internals import is_fake
from hookdrop.recipes import neftune, stochastic_depth
from hookdrop.survey.experiment import experiment
from hookdrop.survey.facts import survey
from hookdrop.survey.heads import Heads, find_heads
from hookdrop.survey.isolation import call
from hookdrop.survey.record import record
from hookdrop.survey.samples import Samples
from hookdrop.survey.tokens import Patches
from tests.support.models import toy

X = torch.randn(2, 3, 8, 8)
Form = Callable[[Tensor], Tensor]


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    seen: list[Any] = []  # the examples of forwards with values

    def counted(model: Any, example: Any) -> Any:
        seen.extend([] if any(map(is_fake, tensors(example))) else [example])
        return call(model, example)

    monkeypatch.setattr("hookdrop.survey.record.call", counted)
    monkeypatch.setattr("hookdrop.survey.experiment.call", counted)
    return seen


class Transformer(nn.Module):
    """A vision transformer with patches of 2 x 2, and one attention that depends on `kind`."""

    def __init__(self, kind: str = "", prefix: int = 1, last: bool = False, width: int = 4) -> None:
        super().__init__()
        self.kind, self.last, self.embed, self.drop = kind, last, nn.Conv2d(3, width, 2, 2), nn.Dropout(0.1)
        self.norm, self.mixing = nn.LayerNorm(width), nn.Linear(16 + prefix, 16 + prefix)
        self.bias = nn.Parameter(torch.zeros(16 + prefix, 16 + prefix))  # of relative positions
        self.gain, self.last_layer = nn.Parameter(torch.ones(16 + prefix, 1)), nn.Identity()
        self.prefix, self.positions = (nn.Parameter(torch.randn(1, n, width)) for n in (prefix, 16 + prefix))

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.prefix.expand(len(x), -1, -1), self.embed(x).flatten(2).mT]
        x = self.drop(torch.cat(parts[::-1] if self.last else parts, 1) + self.positions)
        y = self.norm(x)
        if self.kind == "rotary":
            y = y * torch.arange(y.shape[1]).cos()[:, None]
        if self.kind == "grid":
            y = y + 0 * y[:, 1:].reshape(len(y), 16, 4).sum(1, keepdim=True)
        if self.kind == "mixer":
            y = self.mixing(y.mT).mT
        if self.kind == "dense in training" and self.training:
            return F.avg_pool1d(y.mT, 3, 1, 1)
        # LayerScale, which makes the branch almost invisible in the output.
        bias = self.bias[: y.shape[1], : y.shape[1]] if self.kind == "bias" else None
        x = x + 1e-6 * self.norm(F.scaled_dot_product_attention(y, y, y, bias))
        if self.kind == "gain":
            x = self.last_layer(x * self.gain[: x.shape[1]])
        return x.sum(1) / {"sum": 1, "count": self.gain.shape[0]}.get(self.kind, x.shape[1])


@pytest.mark.parametrize("prefix", [0, 1, 3])
def test_patches_and_their_prefix(prefix: int) -> None:
    for width in (4, 16 + prefix):  # as many channels or classes as tokens
        model = nn.Sequential(Transformer(prefix=prefix, width=width), nn.Linear(width, 16 + prefix))
        assert survey(model, X).patches == Patches("0.drop", prefix)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Transformer("rotary"), "'norm' depends on the position"),
        (Transformer("grid"), "do not run with fewer tokens"),
        (Transformer("mixer"), "'mixing' depends on the position"),
        (Transformer("mixer", width=17), "'mixing' depends on the position"),
        (Transformer("bias"), "'norm' depends on the position"),
        (Transformer("gain"), "'last_layer' depends on the position"),
        (Transformer("dense in training"), "depends on the position"),
        (Transformer("sum"), "depends on the number of tokens"),
        (Transformer("count"), "depends on the number of tokens"),
        (toy(lambda m, x: SimpleNamespace(y=m.part(x)), part=Transformer()), "it returns no tensor"),
        (Transformer(last=True), "are not the first ones"),
        (nn.Conv2d(3, 3, 2), "no tensor (N, L, C) of image patches"),
    ],
)
def test_models_that_need_all_patches(model: nn.Module, reason: str, forwards: Any) -> None:
    facts = survey(model, X)
    for _ in range(2):
        assert reason in str(facts.patches)
    assert len(forwards) <= 4


def test_text_tokens_among_the_patches_are_not_patches() -> None:
    model = toy(
        lambda m, ids, x: F.scaled_dot_product_attention(y := m.join(torch.cat([m.words(ids), m.embed(x).flatten(2).mT], 1)), y, y),
        words=nn.Embedding(9, 4), embed=nn.Conv2d(3, 4, 2, 2), join=nn.Identity(),
    )  # fmt: skip
    facts = survey(model, (torch.tensor([[1, 2], [3, 4]]), X))
    assert isinstance(facts.patches, str)
    assert facts.token_embeddings == ["words"]


WORDS = torch.tensor([[3, 1, 4, 1, 5], [2, 7, 1, 8, 2]])
GIVEN: dict[str, tuple[Form, Any, list[str]]] = {
    "computed positions": (lambda m, ids: m.a(torch.arange(5)) + m.b(ids.clamp(min=0)), WORDS, ["b"]),
    "given positions": (lambda m, at, ids: m.a(at) + m.b(ids), (torch.arange(5).repeat(2, 1), WORDS), ["b"]),
    "mask": (lambda m, mask, ids: m.a(mask) + m.b(ids), (WORDS % 2, WORDS), ["b"]),
    "languages": (lambda m, at, ids: m.a(at) + m.b(ids), (WORDS[:, :1].repeat(1, 5), WORDS), ["b"]),
    "codebooks": (lambda m, ids: m.a(ids[..., 0]) + m.b(ids[..., 1]), torch.stack([WORDS, WORDS + 1], -1), ["a", "b"]),
    "one sample": (lambda m, at, ids: m.a(at) + m.b(ids), (torch.arange(5)[None], WORDS[:1]), ["a", "b"]),
    "equal words": (lambda m, ids: m.b(ids), torch.ones(2, 5, dtype=torch.long), ["b"]),
    "encoder and decoder": (lambda m, ids, more: m.b(ids).sum(1, keepdim=True) + m.a(more), (WORDS, WORDS + 1), ["b"]),
    "without a layer": (lambda m, ids: F.embedding(ids, m.a.weight) + m.b(ids), WORDS, ["", "b"]),
    "no integers": (lambda m, x: x, torch.ones(2, 3), []),
}


@pytest.mark.parametrize(("forward", "example", "expected"), GIVEN.values(), ids=GIVEN)
def test_the_embeddings_of_tokens(forward: Any, example: Any, expected: list[str]) -> None:
    model = toy(forward, a=nn.Embedding(10, 4), b=nn.Embedding(10, 4))
    assert survey(model, example).token_embeddings == expected
    with nullcontext() if any(expected[:1]) else pytest.raises(LayerError, match="found no layer"):
        made = plan(model, neftune(), example_input=example)
        assert [site.name for site in made.sites] == expected[:1]
        assert ["looked up in 'b'" in text for text in made.warnings] == [True] * len(expected[1:])


def around(before: Form) -> nn.Module:
    """A linear layer on a rearranged tensor (8, 6) per sample, with a tensor of another batch before it."""
    return toy(lambda m, x: m.layer(before(x)).sum(), layer=nn.Linear(6, 6))


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        (lambda x: x, Samples()),
        (lambda x: x.transpose(0, 1), Samples(axis=1)),
        (lambda x: x.flatten(0, 1), Samples(per_sample=8, module="")),
        (lambda x: x.unflatten(1, (2, 4)).flatten(0, 1), Samples(per_sample=2, module="")),
        (lambda x: x.transpose(0, 1).flatten(0, 1), Samples(per_sample=8, interleaved=True, module="")),
        (lambda x: x.reshape(1, -1, 6), Samples(axis=1, per_sample=8, module="")),
    ],
    ids=["plain", "sequence first", "tokens", "windows", "time first", "packed"],
)
@pytest.mark.parametrize("at", ["input", "output"])
@pytest.mark.parametrize("batch", [1, 2])
def test_rows_of_samples(before: Form, expected: Samples, at: str, batch: int, forwards: Any) -> None:
    model = around(before)
    facts = survey(model, torch.zeros(batch, 8, 6))
    assert facts.samples("layer", at) == expected
    assert len(forwards) == 2


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        (lambda x: x.mean(0), "not one axis grows with the batch"),
        (lambda x: torch.cat([x, x[:1]]), "does not grow in proportion"),
        (lambda x: x.flatten(0, 1).sort(0).values, "depend on several samples"),
    ],
    ids=["mean", "one more", "sorted"],
)
def test_rows_of_unknown_samples(before: Form, reason: str) -> None:
    model = around(before)
    assert reason in str(survey(model, torch.zeros(2, 8, 6)).samples("layer"))


def attention(batch_first: bool = False, zero: bool = False) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=batch_first)
    for parameter in layer.self_attn.out_proj.parameters() if zero else ():
        nn.init.zeros_(parameter)
    return nn.Sequential(layer)


IDS = torch.zeros(5, 4, dtype=torch.long)
TIME_FIRST = torch.randn(5, 4, 8)
EDGES = torch.stack([torch.arange(5), torch.arange(5).roll(1)])
MASKED = toy(lambda m, x, pad: m.t(x, src_key_padding_mask=pad), t=attention()[0])
GRAPH = toy(lambda m, x, e: x.index_add(0, e[1], m.f(x)[e[0]]), f=nn.Linear(8, 8))
AXES: dict[str, tuple[nn.Module, object, int | None, int]] = {
    "encoder": (attention(), TIME_FIRST, 1, 4),
    "batch first": (attention(batch_first=True), TIME_FIRST, 0, 2),
    "zero": (attention(zero=True), TIME_FIRST, 1, 4),
    "pooled": (toy(lambda m, x: m.t(x).mean(0), t=attention()), TIME_FIRST, 1, 4),
    "steps": (toy(lambda m, x: m.head(x).mean(0), head=nn.Linear(8, 2)), TIME_FIRST, 1, 4),
    "LSTM": (nn.Sequential(nn.Embedding(9, 8), nn.LSTM(8, 8)), IDS, 1, 4),
    "two inputs": (nn.TransformerDecoderLayer(8, 2, 16), (TIME_FIRST, torch.randn(6, 4, 8)), 1, 4),
    "mask": (MASKED, (TIME_FIRST, IDS.mT > 0), 1, 4),
    "by token": (nn.Linear(8, 8), TIME_FIRST, 0, 2),
    "conv": (nn.Conv1d(4, 4, 2), TIME_FIRST, 0, 0),
    "bag": (toy(lambda m, x: m.conv(x).mean(-1)[None].mean(1), conv=nn.Conv1d(4, 4, 2)), TIME_FIRST, None, 0),
    "no batch": (attention(batch_first=True), TIME_FIRST[0], None, 2),
    "graph": (GRAPH, (TIME_FIRST[:, 0], EDGES), None, 2),
}


@pytest.mark.parametrize(("model", "example", "axis", "most"), AXES.values(), ids=AXES)
def test_the_batch_axis(model: nn.Module, example: Any, axis: int | None, most: int, forwards: Any) -> None:
    """No batch: one sequence without a batch axis, and the nodes of a graph, which lead to one another."""
    facts = survey(model, example)
    assert isinstance(facts.batch_axis, str) if axis is None else facts.batch_axis == axis
    assert len(forwards) <= most


@pytest.mark.filterwarnings("ignore:.*fused eval path")
def test_stochastic_depth_has_one_draw_for_each_sample_where_time_is_first() -> None:
    model, seen = attention(), list[Tensor]()
    settings = {"example_input": TIME_FIRST, "p_scale": "equal"}
    assert {site.reading for site in plan(model, stochastic_depth(p=0.5), **settings).sites} == {"N=4 on axis 1"}
    inject(model, stochastic_depth(p=0.5), **settings)
    model[0].dropout2.register_forward_hook(lambda module, args, y: seen.append((y == 0).all(-1)))
    for _ in range(8):
        model(TIME_FIRST)
    dropped = torch.stack(seen)
    assert torch.equal(dropped.all(1), dropped.any(1))
    assert 0 < dropped.sum() < dropped.numel()


def test_regularizers_by_row_are_refused_where_rows_are_no_samples() -> None:
    with pytest.raises(LayerError, match="takes each row of axis 0 for a sample, which is wrong: N on axis 1"):
        inject(attention(), TokenDropout(p=0.5), layers="0", example_input=TIME_FIRST)
    with pytest.raises(LayerError, match="no axis of the example has independent samples"):
        plan(attention(batch_first=True), stochastic_depth(), example_input=TIME_FIRST[0])


@pytest.mark.parametrize("fails", [False, True])
def test_parameters_that_are_0_are_random_in_an_experiment_and_then_as_before(fails: bool) -> None:
    model = attention(zero=True)
    before = [(p, p.detach().clone(), p._version) for p in model.parameters()]
    seen: list[Tensor] = []

    def edit(output: Tensor) -> Tensor:
        seen.append(model[0].self_attn.out_proj.weight.clone())
        return output[:, :, :1] if fails else output

    whole, calls = nn.Sequential(model, nn.Linear(8, 8)), []
    run = lambda: experiment(whole, TIME_FIRST, lambda *call: calls.append(call[:2]), {"0.0": edit})
    if fails:
        with pytest.raises(InjectionError):
            run()
    else:
        run()
        assert ("0.0", "output") in calls
    assert seen[0].all()
    for (old, values, version), new in zip(before, model.parameters(), strict=True):
        assert new is old
        assert torch.equal(new, values)
        assert new._version == version


def test_a_layer_that_does_not_run_has_no_samples() -> None:
    model = around(lambda x: x)
    model.other = nn.Linear(6, 6)
    assert survey(model, torch.zeros(2, 8, 6)).samples("other") == "it is never called with the example"


def test_the_module_with_the_batch_is_the_innermost() -> None:
    model = nn.Sequential(nn.Identity(), nn.Sequential(around(lambda x: x.flatten(0, 1))))
    found = survey(model, torch.zeros(2, 8, 6)).samples("1.0.layer")
    assert isinstance(found, Samples)
    assert found.argument == ("1.0", 0, False)


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
        elif kind == "grouped":  # those of two heads each
            y = (q.unflatten(1, (2, 2)).flatten(2, 3) @ k[:, :2].mT).softmax(-1) @ v[:, :2]
            y = y.unflatten(2, (2, L)).flatten(1, 2)
        elif kind == "rows":  # beside each other, with keys on an axis before them
            y = torch.einsum("nhqk,nkhd->nqhd", (q @ k.mT).softmax(-1), v.transpose(1, 2)).transpose(1, 2)
        else:
            y = F.scaled_dot_product_attention(q, k, v)
        if kind == "differential":  # two maps for each head
            y = y[:, : H // 2] - 0.5 * y[:, H // 2 :]
            y = torch.cat([y, y], -1)
        if kind == "inner norm":
            y = F.rms_norm(y, (D,))
        if kind == "mixed":
            y = self.mixing(y.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        y = y.permute(0, 2, 3, 1) if kind == "interleaved" else y.transpose(1, 2)
        # Fused attention has a layout that permits the view.
        like = self.qkv(x)[..., : H * D] if kind == "gate" else y.flatten(2)
        y = y.view(len(x), L, H * D) if kind == "view" else y.contiguous().view_as(like)
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


SIDE_BY_SIDE = ("", "view", "eager", "folded", "multi-query", "grouped", "rows", "inner norm", "gate", "in place")


@pytest.mark.parametrize(
    ("kind", "layer", "heads"),
    [
        *((kind, "out", Heads(H)) for kind in SIDE_BY_SIDE),
        ("interleaved", "out", Heads(H, interleaved=True)),
        ("mixed", "mixing", Heads(H)),  # a layer that mixes the heads gets them as features
        ("differential", "out", Heads(H // 2)),  # two maps are one head
    ],
)
def test_layouts_of_heads(kind: str, layer: str, heads: Heads) -> None:
    assert found(nn.Sequential(nn.Identity(), Attention(kind))) == ({f"1.{layer}": heads}, {})


@pytest.mark.parametrize(
    ("model", "layer", "reason"),
    [
        (Attention("norm"), "out", "single head, or what mixes"),
        (Attention("added"), "out", "added to attention"),
        (Attention("functional"), "", "without calling a layer"),
        (Attention("convolution"), "", "a convolution"),
        (nn.TransformerEncoderLayer(8, 2, batch_first=True), "self_attn", "projection without calling the layer"),
    ],
)
def test_what_is_refused(model: nn.Module, layer: str, reason: str) -> None:
    heads, refused = found(model)
    assert heads == {}
    assert list(refused) == [layer]
    assert reason in refused[layer]


@pytest.mark.parametrize(("kind", "size"), [("positions", 8 * L), ("learned", 24), ("channels", 8)])
def test_queries_of_one_head_and_channels_of_a_danet_are_no_heads(kind: str, size: int) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.embed(x)
        if kind == "channels":
            return m.out(((x.mT @ x).softmax(-1) @ x.mT).mT)
        q = m.query(x) if kind == "positions" else m.query.weight[None, :3]
        return m.out(((q @ x.mT).softmax(-1) @ x).flatten(1))

    model = toy(forward, embed=nn.Linear(8, 8), query=nn.Linear(8, 8), out=nn.Linear(size, 2))
    assert found(model) == ({}, {"out": "it has a single head, or what mixes the heads comes before it"})


def test_a_shared_projection_must_get_the_same_heads() -> None:
    first, second = Attention(), Attention("interleaved")
    second.out = first.out
    twice = toy(lambda m, x: m.second(m.first(x)), first=first, second=second)
    assert found(twice) == ({}, {"first.out": "its calls differ in the heads"})
