"""Which softmax has scores of attention, in modules of no library: all scores are counted just before each softmax."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hookdrop import DropKey, InjectionError, LayerError, inject, plan, recipes
from tests.support.models import toy

X = torch.randn(16, 12, 8, generator=torch.Generator().manual_seed(0))


class Masked(TorchFunctionMode):
    """Collects the fraction of masked scores of each softmax and each fused attention."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[float] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.softmax, Tensor.softmax, F.softmax):
            self.found.append(args[0].isneginf().float().mean().item())
        if function is F.scaled_dot_product_attention:
            self.found.append(0.0 if len(args) < 4 or args[3] is None else args[3].isneginf().float().mean().item())
        return function(*args, **(kwargs or {}))


def mixer(forward: Callable[..., Tensor]) -> nn.Module:
    parts = {"qkv": nn.Linear(8, 24), "one": nn.Linear(8, 1), "gate": nn.Linear(8, 4), "mix": nn.Conv2d(2, 2, 1)}
    grouped = nn.Conv1d(24, 24, 3, padding=1, groups=24)
    experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
    return toy(forward, memory=nn.Embedding(5, 8), experts=experts, grouped=grouped, sink=nn.Linear(8, 2), **parts)


def attend(q: Tensor, k: Tensor, v: Tensor, then: Callable[[Tensor], Tensor] = lambda weights: weights) -> Tensor:
    return then((q @ k.mT).softmax(-1)) @ v


SHOWN, FUSED = (torch.jit.trace(how, (X, X, X)) for how in (attend, F.scaled_dot_product_attention))


def qkv(m: Any, x: Tensor) -> list[Tensor]:
    return list(m.qkv(x).chunk(3, -1))


def heads(m: Any, x: Tensor) -> Any:
    return m.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)


def with_sink(m: Any, x: Tensor) -> Tensor:
    q, k, v = heads(m, x)
    return torch.cat([q @ k.mT, m.sink(x).mT.unsqueeze(-1)], -1).softmax(-1)[..., :-1] @ v


def routed(m: Any, x: Tensor) -> Tensor:
    x = F.scaled_dot_product_attention(*qkv(m, x))
    return (m.gate(x).softmax(-1).unsqueeze(-2) @ torch.stack([one(x) for one in m.experts], -2)).squeeze(-2)


def between_blocks(m: Any, x: Tensor) -> Tensor:
    """Attention between two outputs at each position, as in Inkling 2: the second has sorted its rows by expert."""
    order = (rows := x.flatten(0, 1))[:, 0].argsort()
    rows = (rows[order] * m.memory.weight[0])[order.argsort()]
    return (m.sink(x).softmax(-1).unsqueeze(-2) @ torch.stack([x, rows.view_as(x)], -2)).squeeze(-2)


def restored(m: Any, x: Tensor) -> Tensor:
    """Attention between channels, whose values a depthwise convolution has just changed."""
    return attend(*m.grouped(m.qkv(x).mT).chunk(3, 1)).mT


def soft_moe(m: Any, x: Tensor) -> Tensor:
    weights = m.qkv(x)[..., :8]  # those of a router, for two slots of each expert
    slots = (weights.softmax(1).mT @ x).unflatten(1, (4, 2))
    return weights.softmax(-1) @ torch.cat([one(slots[:, i]) for i, one in enumerate(m.experts)], 1)


def induced(m: Any, x: Tensor) -> Tensor:
    h = m.experts[0](attend(m.memory.weight, m.experts[1](x), x))
    return attend(m.experts[2](x), m.experts[3](h), h)


KINDS: dict[str, tuple[Callable[..., Tensor], list[bool]]] = {
    "class probabilities after attention": (lambda m, x: m.gate(attend(*qkv(m, x)).mean(1)).softmax(-1), [True, False]),
    "router of experts as a product": (routed, [True, False]),
    "between blocks of experts": (between_blocks, [False]),
    "gate of tokens": (lambda m, x: attend(*qkv(m, x * m.one(x).mT.softmax(-1).mT)), [False, True]),
    "attention pooling of the input": (lambda m, x: m.one(x).mT.softmax(-1) @ x, [True]),
    "values on the left": (lambda m, x: qkv(m, x)[0].mT @ (x @ x.mT).softmax(-1).mT, [True]),
    "einsum": (lambda m, x: torch.einsum("nhij,nhjd->nihd", nn.Softmax(-1)(heads(m, x)[0] @ heads(m, x)[1].mT), heads(m, x)[2]), [True]),
    "mixed heads, with a bias": (lambda m, x: attend(*heads(m, x), m.mix), [True]),
    "normalized again after a mask": (lambda m, x: attend(*qkv(m, x), lambda w: (y := w * (x[..., 0] > 0).float()[:, None]) / y.sum(-1, keepdim=True)), [True]),
    "masked after the softmax (CPM-Ant)": (lambda m, x: attend(*qkv(m, x), lambda w: w.masked_fill((x[..., 0] < 0)[:, None], 0.0)), [True]),
    "sink": (with_sink, [True]),
    "another axis, a vector": (lambda m, x: attend(*qkv(m, x)) * x.softmax(1) * x.softmax(0) * x[0, 0].softmax(-1), [True, *[False] * 3]),
    "features (Shen et al.)": (lambda m, x: qkv(m, x)[0].softmax(-1) @ (x.softmax(-2).mT @ x), [False, False]),
    "features, normalized by a constant": (lambda m, x: x.softmax(-1) @ (x.softmax(-2).mT @ x) / (x.softmax(-1) @ x.softmax(-2).sum(-2).unsqueeze(-1)), [False] * 4),
    "multiplied and summed": (lambda m, x: (x.unsqueeze(1) * (x @ x.mT).softmax(-1).unsqueeze(-1)).sum(2), [False]),
    "windows, with padding": (lambda m, x: F.pad((x @ x.mT).softmax(-1), (0, 2)) @ F.pad(x, (0, 0, 0, 2)), [True]),
    "channels (XCA)": (lambda m, x: attend(*(y.mT for y in heads(m, x))), [False]),
    "channels (XCA), fused": (lambda m, x: F.scaled_dot_product_attention(*(y.mT for y in heads(m, x))), [False]),
    "channels after a depthwise convolution": (restored, [False]),
    "slots of experts (Soft MoE)": (soft_moe, [False, False]),
    "induced points (Set Transformer)": (induced, [True, True]),
    "hidden code": (lambda m, x: SHOWN(*qkv(m, x)) + FUSED(*qkv(m, x)), []),
    "codebook": (lambda m, x: (x @ m.memory.weight.T).softmax(-1) @ m.memory.weight, [False]),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_attention_weighs_positions_by_a_product_and_nothing_else_is_dropped(kind: str) -> None:
    how, expected = KINDS[kind]
    model = nn.Sequential(mixer(how))
    if any(expected):
        inject(model, recipes.drop_key(p=0.5), example_input=X)
    else:
        with pytest.raises(LayerError, match="skips '0': its softmax is inside" if not expected else "found no layer"):
            plan(model, recipes.drop_key(p=0.5), example_input=X)
    with Masked() as mode:
        model(X)
    assert [fraction > 0 for fraction in mode.found] == expected


def test_attention_around_attention_drops_each_score_once() -> None:
    """The model pools by attention around its blocks, as CCT does. No warning claims a higher rate."""
    block = mixer(lambda m, x: x + attend(*qkv(m, x)))
    other = toy(lambda m, x: x + m.inner(x, x, x)[0] * m.one(x).mT.softmax(-1).mT, inner=nn.MultiheadAttention(8, 2, batch_first=True), one=nn.Linear(8, 1))  # fmt: skip
    model = nn.Sequential(toy(lambda m, x: m.one(x := m.b(m.a(x))).mT.softmax(-1) @ x, a=block, b=other, one=nn.Linear(8, 1)))  # fmt: skip
    drop = inject(model, recipes.drop_key(p=0.3), example_input=X, p_scale="equal")
    assert [site.name for site in drop.sites] == ["0.a", "0.b.inner", "0"]
    sizes = [16 * 12 * 12, 16 * 2 * 12 * 12, 0, 16 * 12]
    with Masked() as mode:
        torch.manual_seed(0)
        model(X)
    for fraction, size in zip(mode.found, sizes, strict=True):
        assert abs(fraction - 0.3 * bool(size)) <= 5.0 * (0.21 / max(size, 1)) ** 0.5 * bool(size)


def test_scores_belong_to_the_module_that_computes_them() -> None:
    """Not to the model that multiplies them by the values, as in GMA."""
    weigh = toy(lambda m, x: (m.q(x) @ x.mT).softmax(-1), q=nn.Linear(8, 8))
    model = toy(lambda m, x: m.two(m.one(x) @ x) @ x, one=weigh, two=copy.deepcopy(weigh))
    assert [site.name for site in plan(model, recipes.drop_key(p=0.5), example_input=X).sites] == ["one", "two"]


def test_head_dropout_names_attention_that_is_multiplied_and_summed() -> None:
    parts = {"qkv": nn.Linear(8, 24), "proj": nn.Linear(8, 8)}
    project = toy(lambda m, x: m.proj(attend(*heads(m, x)).transpose(1, 2).flatten(2)), **parts)
    model = nn.Sequential(project, mixer(KINDS["multiplied and summed"][0]))
    found = plan(model, recipes.head_dropout(p=0.5), example_input=X)
    assert [site.name for site in found.sites] == ["0.proj"]
    assert found.warnings == [
        "head_dropout skips '1': its weights are multiplied and summed, not in a product of matrices."
    ]


@pytest.mark.parametrize("kind", ["linear", "sigmoid"])
def test_layers_of_a_hybrid_model_without_softmax_attention_are_named(kind: str) -> None:
    def other(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (F.elu(q) + 1) @ ((F.elu(k) + 1).mT @ v) if kind == "linear" else (q @ k.mT).sigmoid() @ v

    def layer(form: Callable[..., Tensor], **more: nn.Module) -> nn.Module:
        mix = toy(lambda m, x: m.proj(form(*heads(m, x)).transpose(1, 2).flatten(2)), qkv=nn.Linear(8, 24), **more)
        return toy(lambda m, x: m.mlp(m.mix(x)), mix=mix, mlp=nn.Linear(8, 8))

    model = nn.Sequential(layer(attend, proj=nn.Linear(8, 8)), layer(other, proj=nn.Linear(8, 8, bias=False)))
    for recipe in (recipes.drop_key(p=0.5), recipes.head_dropout(p=0.5)):
        model.append(copy.deepcopy(model[0]))  # a recipe compares sites if it has two
        [warning] = plan(model, recipe, example_input=X).warnings
        assert re.match(r"\w+: '1' and '0', '2'.* are layers of one class, but their sites differ", warning)


def test_a_layer_without_an_example_or_with_attention_only_inside_it_is_refused() -> None:
    model = nn.Sequential(nn.Sequential(mixer(lambda m, x: attend(*qkv(m, x)))))
    with pytest.raises(InjectionError, match="example_input=x"):
        inject(model, DropKey(0.5), layers="0.0")
    with pytest.raises(LayerError, match=r"layers that do: '0\.0'"):
        inject(model, DropKey(0.5), layers="0", example_input=X)


@pytest.mark.parametrize("times", [1, 3])
def test_a_call_with_another_number_of_softmaxes_is_refused(times: int) -> None:
    model = nn.Sequential(mixer(lambda m, x: [attend(*qkv(m, x)) for _ in range(len(x) - 13)][-1]))
    inject(model, DropKey(0.5), layers="0", example_input=X[:15])
    with pytest.raises(InjectionError, match="it is unknown which of them have scores"):
        model(X[: 13 + times])
