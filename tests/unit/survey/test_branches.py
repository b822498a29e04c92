"""Residual branches are found from the additions of a forward, in models with names of no library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hookdrop import LayerError, plan
from hookdrop.recipes import stochastic_depth
from hookdrop.survey.branches import Branch
from hookdrop.survey.facts import survey
from hookdrop.utils.errors import InjectionError

C = 8


class Base(nn.Module):
    """Two branches, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.p, self.q = nn.LayerNorm(C), nn.LayerNorm(C)
        self.f, self.g = nn.Linear(C, C), nn.Sequential(nn.Linear(C, 2 * C), nn.GELU(), nn.Linear(2 * C, C))
        self.gain = nn.Parameter(torch.full((C,), 0.1))
        self.drop = nn.Dropout(0.1)


class PreNorm(Base):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.f(self.p(x))
        return x + self.g(self.q(x))


class InPlace(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.f(self.p(x))
        y += x
        return self.g(self.q(y)).add_(y)


class PostNorm(Base):
    def forward(self, x: Tensor) -> Tensor:
        x = self.p(x + self.f(x))
        return self.q(x + self.g(x))


class Parallel(Base):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(self.p(x)) + self.g(self.p(x))


class BothBeforeTheSkip(Base):
    """GPT-J."""

    def forward(self, x: Tensor) -> Tensor:
        return self.f(self.p(x)) + self.g(self.p(x)) + x


class Gain(Base):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.gain * self.f(self.p(x))
        return x + 0.5 * self.g(self.q(x))


class Windows(Base):
    """A permutation and windows that are put back between the branch and the sum."""

    def forward(self, x: Tensor) -> Tensor:
        n, length, _ = x.shape
        windows = self.f(self.p(x).view(n * 2, length // 2, C))
        x = x + windows.view(n, length, C).roll(1, 1)
        return x + self.g(self.q(x).transpose(0, 1)).transpose(0, 1)


class SharedDropout(Base):
    """One dropout runs after both branches, and inside one of them: it is the end of none."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.f(self.drop(self.p(x))))
        return x + self.drop(self.g(self.q(x)))


class EndedByDropout(Base):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.f(self.p(x)))
        return x + self.drop(self.g(self.q(x)))


class Output(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(C, C), nn.LayerNorm(C)

    def forward(self, hidden: Tensor, residual: Tensor) -> Tensor:
        return self.norm(self.linear(hidden) + residual)


class SkipAsArgument(nn.Module):
    """BERT: another module adds the residual."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(C, C), Output(), nn.Linear(C, C), Output()

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(self.a(x), residual=x)
        return self.d(self.c(x), residual=x)


class SeveralOutputs(Base):
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(C, C)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            weights = (x @ x.mT).softmax(-1)
            return self.linear(weights @ x), weights

    def __init__(self) -> None:
        super().__init__()
        self.f = self.Attention()  # type: ignore[assignment]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, weights = self.f(self.p(x))
        x = x + y
        return x + self.g(self.q(x)), weights


class Differences(Base):
    def forward(self, x: Tensor) -> Tensor:
        x = x - self.f(self.p(x))
        return torch.rsub(self.g(self.q(x)), x)


class FunctionsThatAdd(Base):
    def forward(self, x: Tensor) -> Tensor:
        x = sum([x, self.f(self.p(x))])  # type: ignore[assignment]
        return torch.add(x, self.g(self.q(x)), alpha=0.5)


class Coupled(Base):
    """RevNet."""

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, 1)
        a = a + self.f(self.p(b))
        b = b + self.g(self.q(a))
        return torch.cat([a, b], 1)


class QueryPositions(Base):
    """A decoder adds positions to the input of its attentions alone, as DETR and Table Transformer do."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(6, C))

    def forward(self, x: Tensor) -> Tensor:
        positions = self.positions.expand(len(x), 6, C)
        x = x + self.f(self.p(x) + positions)
        return x + self.g(self.q(x) + positions)


BOTH = {"f", "g"}
BLOCKS: dict[type[nn.Module], set[str]] = {
    PreNorm: BOTH,
    InPlace: BOTH,
    PostNorm: BOTH,
    Parallel: BOTH,
    BothBeforeTheSkip: BOTH,
    Gain: BOTH,
    Windows: BOTH,
    SharedDropout: BOTH,
    EndedByDropout: {"drop"},
    SkipAsArgument: {"b.linear", "d.linear"},
    SeveralOutputs: BOTH,
    Differences: BOTH,
    FunctionsThatAdd: BOTH,
    Coupled: BOTH,
    QueryPositions: BOTH,
}


def branches(model: nn.Module, example: Any = None) -> tuple[Branch, ...]:
    return survey(model, torch.randn(2, 6, C) if example is None else example).branches


class Stack(nn.Module):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList([block() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            out = part(x)
            x = out[0] if isinstance(out, tuple) else out
        return x


@pytest.mark.parametrize("block", BLOCKS)
def test_ends_of_branches(block: type[nn.Module]) -> None:
    found = branches(Stack(block))
    assert {branch.end for branch in found} == {f"parts.{i}.{end}" for i in range(3) for end in BLOCKS[block]}
    assert list(dict.fromkeys(branch.layer for branch in found)) == ["parts.0", "parts.1", "parts.2"]
    assert {branch.shape[-1] for branch in found} == {C}


@pytest.mark.parametrize("block", BLOCKS)
def test_without_its_branches_a_block_returns_its_skip(block: type[nn.Module]) -> None:
    model = Stack(block).eval()
    for end in {branch.end for branch in branches(model)}:
        model.get_submodule(end).register_forward_hook(
            lambda module, args, out: (torch.zeros_like(out[0]), *out[1:]) if isinstance(out, tuple) else out * 0
        )
    x = torch.randn(2, 6, C)
    expected = x
    part: Any
    for part in model.parts:
        if block is PostNorm:
            expected = part.q(part.p(expected))
        elif block is SkipAsArgument:
            expected = part.d.norm(part.b.norm(expected))
    assert torch.equal(model(x), expected)


def test_layers_of_a_flat_model() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixers = nn.ModuleList([nn.Linear(C, C) for _ in range(2)])
            self.mlps = nn.ModuleList([nn.Linear(C, C) for _ in range(2)])

        def forward(self, x: Tensor) -> Tensor:
            for mixer, mlp in zip(self.mixers, self.mlps, strict=True):
                x = x + mixer(x)
                x = x + mlp(x)
            return x

    found = branches(Flat())
    assert [branch.end for branch in found] == ["mixers.0", "mlps.0", "mixers.1", "mlps.1"]
    assert [branch.layer for branch in found] == [branch.end for branch in found]


class Conv(nn.Module):
    def __init__(self, stride: int = 1, first: bool = False) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3 if first else C, C, 3, stride, 1), nn.Conv2d(C, C, 3, 1, 1)
        self.short = nn.Conv2d(3 if first else C, C, 1, stride) if first or stride > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        skip = x if self.short is None else self.short(x)
        return F.relu(self.two(self.one(x).relu()) + skip)


def test_projections_and_identity_skips() -> None:
    found = branches(nn.Sequential(Conv(first=True), Conv(), Conv(2)), torch.randn(2, 3, 16, 16))
    assert [(one.layer, one.end) for one in found] == [("0", "0.two"), ("1", "1.two"), ("2", "2.two")]


@pytest.mark.parametrize("enlarge", [nn.Upsample(scale_factor=2), nn.ConvTranspose2d(C, C, 2, 2)])
def test_the_levels_of_a_pyramid_are_no_branches(enlarge: nn.Module) -> None:
    class Pyramid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stages = nn.ModuleList([Conv(first=True), Conv(2), Conv(2)])
            self.laterals = nn.ModuleList([nn.Conv2d(C, C, 1) for _ in self.stages])
            self.enlarge = enlarge

        def forward(self, x: Tensor) -> list[Tensor]:
            maps = [x := stage(x) for stage in self.stages]
            levels = [lateral(one) for lateral, one in zip(self.laterals, maps, strict=True)]
            for i in (1, 0):
                levels[i] = levels[i] + self.enlarge(levels[i + 1])
            return levels

    found = branches(Pyramid(), torch.randn(2, 3, 16, 16))
    assert [one.end for one in found] == [f"stages.{i}.two" for i in range(3)]


class Adapter(nn.Module):
    """LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.a, self.b = nn.Linear(C, C), nn.Linear(C, 2), nn.Linear(2, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.b(self.a(x))


def test_adapters_are_no_branches() -> None:
    model = Stack(PreNorm)
    model.parts[0].f = nn.Sequential(Adapter(), nn.GELU(), Adapter())
    assert {branch.end for branch in branches(model)} == {f"parts.{i}.{end}" for i in range(3) for end in "fg"}


class Form(Base):
    """A block with another form of its sum."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


WITHOUT_ENDS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "function": lambda m, x: x + F.relu(m.g(x)),
    "product": lambda m, x: x + torch.mul(m.g(x), m.f(x)),
    "lerp": lambda m, x: torch.lerp(x, m.g(x), 0.3),
    "addcmul": lambda m, x: torch.addcmul(x, m.g(x), m.f(x)),
    "highway": lambda m, x: x * (1 - m.f(x).sigmoid()) + m.g(x) * m.f(x).sigmoid(),
    "stack": lambda m, x: torch.stack([x, m.g(x)]).sum(0),
}


@pytest.mark.parametrize("name", WITHOUT_ENDS)
def test_blocks_whose_branch_has_no_end_are_named(name: str) -> None:
    function = WITHOUT_ENDS[name]
    with pytest.raises(LayerError, match=r"'0', '1'(.|\n)*self.act = nn.ReLU\(\)"):
        plan(nn.Sequential(Form(function), Form(function)), stochastic_depth(), example_input=torch.randn(2, 6, C))
    mixed = plan(
        nn.Sequential(PreNorm(), Form(function), PreNorm()), stochastic_depth(), example_input=torch.randn(2, 6, C)
    )
    assert [site.name for site in mixed.sites] == ["0.f", "0.g", "2.f", "2.g"]
    [warning] = mixed.warnings
    assert "skipped 1 layer, '1'" in warning


SKIPS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "identity": lambda m, x: x + m.g(x),
    "difference": lambda m, x: x - m.g(x),
    "one": lambda m, x: 1.0 * x + m.g(x),
    "back and forth": lambda m, x: x.transpose(0, 1).contiguous().roll(1, 0).roll(-1, 0).transpose(0, 1) + m.g(x),
    "scaled": lambda m, x: 0.5 * x + m.g(x),
    "alpha": lambda m, x: torch.add(m.g(x), x, alpha=0.5),
    "negative": lambda m, x: -x + m.g(x),
    "gain": lambda m, x: x * m.gain + m.g(x),
    "flipped": lambda m, x: x.flip(1) + m.g(x),
    "transposed": lambda m, x: x.transpose(0, 1) + m.g(x),
    "reordered": lambda m, x: x.transpose(0, 1).reshape(x.shape) + m.g(x),
}


@pytest.mark.parametrize("name", SKIPS)
def test_a_layer_can_be_skipped_if_it_returns_its_input_without_its_branch(name: str) -> None:
    model, x = nn.Sequential(Form(SKIPS[name]), Form(SKIPS[name])), torch.randn(6, 6, C)
    found = survey(model, x)
    assert {branch.end for branch in found.branches} == {"0.g", "1.g"}
    model[0].g.register_forward_hook(lambda module, args, out: out * 0)
    assert (found.skippable["0"] == "") == torch.equal(model[0](x), x)


def test_a_batch_norm_on_the_skip_changes_it() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(C, C, 3, 1, 1), nn.BatchNorm2d(C)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x + self.conv(x))

    found = survey(nn.Sequential(Normed(), Normed()), torch.randn(2, C, 4, 4)).skippable
    assert all("does not return it" in reason for reason in found.values())


class NoResidual(nn.Module):
    """Additions of a polynomial, of positions, of a mask, of a U-Net's concatenation, and gates."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.query = nn.Linear(C, C), nn.Linear(2 * C, C), nn.Linear(C, C)
        self.position, self.table = nn.Parameter(torch.randn(6, C)), nn.Embedding(6, C)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.position
        x = x + self.table(torch.arange(6)).expand_as(x)
        y = self.a(x)
        y = y + 0.044715 * y.pow(3)
        y = y * self.query(y).sigmoid()
        scores = self.query(x) @ y.mT
        scores = (scores + torch.zeros_like(scores)).softmax(-1)
        return self.b(torch.cat([x, scores @ y], -1))


def test_other_additions_are_not_residual() -> None:
    assert branches(NoResidual()) == ()


def test_a_skip_around_several_blocks_is_left_out() -> None:
    class Long(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.last = Stack(PreNorm), nn.Linear(C, C)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.last(self.body(x))

    assert {one.layer for one in branches(Long())} == {f"body.parts.{i}" for i in range(3)}


def test_batch_on_the_second_axis_and_pytorchs_own_transformer() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(C, 2, 16, 0.0), 2, enable_nested_tensor=False)
    ends = [branch.end for branch in branches(model, torch.randn(6, 2, C))]
    assert ends == [f"layers.{i}.dropout{n}" for i in range(2) for n in (1, 2)]


class TestSurvey:
    def test_needs_an_example(self) -> None:
        with pytest.raises(InjectionError, match="example_input="):
            survey(Stack(PreNorm))

    def test_assumes_an_image_for_convolutions_of_three_channels(self) -> None:
        found = survey(nn.Sequential(Conv(first=True), Conv()))
        assert "assumed image" in found.example.source
        assert found.forwards == 0

    def test_values_are_used_where_shapes_depend_on_them(self) -> None:
        class Selecting(Base):
            def forward(self, x: Tensor) -> Tensor:
                rows = x[x[:, 0] > 0]
                return rows + self.f(rows)

        assert [one.end for one in branches(Selecting(), torch.randn(6, C))] == ["f"]

    def test_skippable_layers(self) -> None:
        found = survey(Stack(PostNorm), torch.randn(2, 6, C)).skippable
        assert dict(found) == dict.fromkeys(["parts.0", "parts.1", "parts.2"], "")
        found = survey(nn.Sequential(Conv(first=True), Conv()), torch.randn(2, 3, 8, 8)).skippable
        assert "changes the shape" in found["0"]
        assert "not its first input" in found["1"]
