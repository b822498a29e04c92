"""Residual branches are found from the additions of a forward, and blocks and stages of CNNs, with names of no library."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hookdrop import InjectionError, LayerError, plan
from hookdrop.recipes import dropblock_resnet, residual_dropout, stochastic_depth
from hookdrop.survey.branches import Branch
from hookdrop.survey.facts import survey
from hookdrop.survey.siblings import sibling_warnings
from tests.support.models import toy

C = 8
X = torch.randn(2, 6, C)
Form = Callable[[Any, Tensor], Any]
TRACED: Any = torch.jit.trace(lambda x: x * x.clamp(0, 6) / 6, X)
SUM: Any = torch.jit.trace(lambda x, y: x + y, (X, X))
EMPTY: Any = torch.jit.trace(torch.empty_like, X, check_trace=False)


def kernel(x: Tensor) -> Tensor:
    """A function of another library, which PyTorch only gives memory."""
    out = EMPTY(x)
    with torch._C.DisableTorchFunction():
        out.detach().numpy()[:] = x.detach().numpy()
    return out


def block(form: Form) -> nn.Module:
    """Two branches f and g, norms p and q, a gain, and a dropout."""
    f, g = nn.Linear(C, C), nn.Sequential(nn.Linear(C, 2 * C), nn.GELU(), nn.Linear(2 * C, C))
    gain, positions = nn.Parameter(torch.full((C,), 0.1)), nn.Parameter(torch.randn(6, C))
    norms = {"p": nn.LayerNorm(C), "q": nn.LayerNorm(C)}
    functions = {"drop": nn.Dropout(0.1), "shift": nn.ZeroPad2d((0, 0, 1, -1))}
    return toy(form, **norms, f=f, g=g, gain=gain, positions=positions, **functions)


def in_place(m: Any, x: Tensor) -> Tensor:
    y = m.f(m.p(x))
    y += x
    return m.g(m.q(y)).add_(y)


def windows(m: Any, x: Tensor) -> Tensor:
    """A permutation and windows that are put back between the branch and the sum."""
    n, length, _ = x.shape
    x = x + m.f(m.p(x).view(n * 2, length // 2, C)).view(n, length, C).roll(1, 1)
    return x + m.g(m.q(x).transpose(0, 1)).transpose(0, 1)


def several_outputs(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    y, weights = m.attention(m.p(x))
    return (x := x + y) + m.g(m.q(x)), weights


def coupled(m: Any, x: Tensor) -> Tensor:
    """RevNet."""
    a, b = x.chunk(2, 1)
    return torch.cat([a := a + m.f(m.p(b)), b + m.g(m.q(a))], 1)


def added_to_rows(m: Any, x: Tensor) -> Tensor:
    y = x.index_add(1, torch.arange(3), m.f(m.p(x))[:, :3])
    return y.scatter_add(1, torch.arange(3)[None, :, None].expand(2, 3, C), m.g(m.q(y))[:, :3])


def shifted(m: Any, h: Tensor) -> Tensor:
    """RWKV's mix of each token and the one before."""
    return h * m.gain + m.shift(h) * (1 - m.gain)


FORMS: dict[str, Form] = {
    "pre-norm": lambda m, x: (y := x + m.f(m.p(x))) + m.g(m.q(y)),
    "in place": in_place,
    "post-norm": lambda m, x: m.q((y := m.p(x + m.f(x))) + m.g(y)),
    "parallel": lambda m, x: x + m.f(m.p(x)) + m.g(m.p(x)),
    "both before the skip, as GPT-J": lambda m, x: m.f(m.p(x)) + m.g(m.p(x)) + x,
    "gain": lambda m, x: (y := x + m.gain * m.f(m.p(x))) + 0.5 * m.g(m.q(y)),
    "windows": windows,
    "a dropout inside and after branches": lambda m, x: (y := x + m.drop(m.f(m.drop(m.p(x))))) + m.drop(m.g(m.q(y))),
    "ended by dropout": lambda m, x: (y := x + m.drop(m.f(m.p(x)))) + m.drop(m.g(m.q(y))),
    "differences": lambda m, x: torch.rsub(m.g(m.q(y := x - m.f(m.p(x)))), y),
    "functions that add": lambda m, x: torch.add(y := sum([x, m.f(m.p(x))]), m.g(m.q(y)), alpha=0.5),
    "rows": added_to_rows,
    "a stack": lambda m, x: torch.addcmul(y := torch.stack([x, m.f(m.p(x))]).sum(0), m.gain, m.g(m.q(y))),
    "an overload": lambda m, x: torch.ops.aten.sub.Tensor(y := torch.ops.aten.add.Tensor(x, m.f(m.p(x))), m.g(m.q(y))),
    "token shift": lambda m, x: (y := x + m.f(shifted(m, m.p(x)))) + m.g(shifted(m, m.q(y))),
    "hidden code": lambda m, x: (y := x + m.f(TRACED(m.p(x)))) + m.g(TRACED(m.q(y))),
    "hidden kernels": lambda m, x: (y := x + m.f(kernel(m.p(x)))) + m.g(kernel(m.q(y))),
    "hidden sums": lambda m, x: SUM(y := SUM(x, m.f(m.p(x))), m.g(m.q(y))),
    "coupled": coupled,
    "positions of queries, as DETR": lambda m, x: (y := x + m.f(m.p(x) + m.positions)) + m.g(m.q(y) + m.positions),
}


def attending() -> nn.Module:
    model = block(several_outputs)
    model.attention = toy(lambda m, x: (m.linear((w := (x @ x.mT).softmax(-1)) @ x), w), linear=nn.Linear(C, C))
    return model


def skip_as_argument() -> nn.Module:
    """BERT: another module adds the residual."""

    def output() -> nn.Module:
        forward = lambda m, hidden, residual: m.norm(m.linear(hidden) + residual)
        return toy(forward, linear=nn.Linear(C, C), norm=nn.LayerNorm(C))

    return toy(
        lambda m, x: m.d(m.c(y := m.b(m.a(x), residual=x)), residual=y),
        a=nn.Linear(C, C), b=output(), c=nn.Linear(C, C), d=output(),
    )  # fmt: skip


BLOCKS: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    **{name: (lambda form=form: block(form), {"f", "g"}) for name, form in FORMS.items()},
    "ended by dropout": (lambda: block(FORMS["ended by dropout"]), {"drop"}),
    "several outputs": (attending, {"attention", "g"}),
    "skip as an argument": (skip_as_argument, {"b.linear", "d.linear"}),
}


def branches(model: nn.Module, example: Any = X) -> tuple[Branch, ...]:
    return survey(model, example).branches


def stacked(m: Any, x: Tensor) -> Tensor:
    for part in m.parts:
        out = part(x)
        x = out[0] if isinstance(out, tuple) else out
    return x


def stack(make: Callable[[], nn.Module]) -> Any:
    return toy(stacked, parts=nn.ModuleList([make() for _ in range(3)]))


def pre_norm() -> nn.Module:
    return block(FORMS["pre-norm"])


@pytest.mark.parametrize("name", BLOCKS)
def test_ends_of_branches_without_which_a_block_returns_its_skip(name: str) -> None:
    make, ends = BLOCKS[name]
    found = branches(model := stack(make).eval())
    assert {branch.end for branch in found} == {f"parts.{i}.{end}" for i in range(3) for end in ends}
    assert list(dict.fromkeys(branch.layer for branch in found)) == ["parts.0", "parts.1", "parts.2"]
    assert {branch.shape[-1] for branch in found} == {C}
    for end in {branch.end for branch in found}:
        model.get_submodule(end).register_forward_hook(
            lambda module, args, out: (torch.zeros_like(out[0]), *out[1:]) if isinstance(out, tuple) else out * 0
        )
    expected = X
    for part in model.parts:
        if name == "post-norm":
            expected = part.q(part.p(expected))
        elif name == "skip as an argument":
            expected = part.d.norm(part.b.norm(expected))
    assert torch.equal(model(X), expected)


def test_layers_of_a_flat_model() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        for mixer, mlp in zip(m.mixers, m.mlps, strict=True):
            x = (y := x + mixer(x)) + mlp(y)
        return x

    layers = {name: nn.ModuleList([nn.Linear(C, C) for _ in range(2)]) for name in ("mixers", "mlps")}
    found = branches(toy(forward, **layers))
    assert [(one.layer, one.end) for one in found] == [(f"{kind}.{i}",) * 2 for i in (0, 1) for kind in layers]


def conv(stride: int = 1, first: bool = False) -> nn.Module:
    width = 3 if first else C
    return toy(
        lambda m, x: F.relu(m.two(m.one(x).relu()) + (x if m.short is None else m.short(x))),
        one=nn.Conv2d(width, C, 3, stride, 1), two=nn.Conv2d(C, C, 3, 1, 1),
        short=nn.Conv2d(width, C, 1, stride) if first or stride > 1 else None,
    )  # fmt: skip


@pytest.mark.parametrize("enlarge", [nn.Upsample(scale_factor=2), nn.ConvTranspose2d(C, C, 2, 2)])
@pytest.mark.parametrize("convs", [conv, lambda stride=1, first=False: nn.Conv2d(3 if first else C, C, 3, stride, 1)])
def test_the_levels_of_a_pyramid_or_a_unet_are_no_branches(enlarge: nn.Module, convs: Callable[..., nn.Module]) -> None:
    def forward(m: Any, x: Tensor) -> list[Tensor]:
        maps = [x := stage(x) for stage in m.stages]
        levels = [lateral(one) for lateral, one in zip(m.laterals, maps, strict=True)]
        for i in (1, 0):
            levels[i] = levels[i] + m.enlarge(levels[i + 1])
            x = m.after[i](maps[i] + m.enlarge(x))
        return [*levels, x]

    parts = {"stages": nn.ModuleList([convs(1, True), convs(2), convs(2)]), "after": nn.ModuleList([convs(), convs()])}
    laterals = nn.ModuleList([nn.Conv2d(C, C, 1) for _ in range(3)])
    found = branches(toy(forward, **parts, laterals=laterals, enlarge=enlarge), torch.randn(2, 3, 16, 16))
    expected = {f"{name}.{i}.two" for name in parts for i in range(len(parts[name]))} if convs is conv else set()
    assert {one.end for one in found} == expected


def test_adapters_are_no_branches() -> None:
    def lora() -> nn.Module:
        parts = {"base": nn.Linear(C, C), "a": nn.Linear(C, 2), "b": nn.Linear(2, C)}
        return toy(lambda m, x: m.base(x) + 2.0 * m.b(m.a(x)), **parts)

    model = stack(pre_norm)
    model.parts[0].f = nn.Sequential(lora(), nn.GELU(), lora())
    assert {branch.end for branch in branches(model)} == {f"parts.{i}.{end}" for i in range(3) for end in "fg"}


def exits(m: Any, x: Tensor) -> Any:
    """Deep supervision: the outputs of one head for each block are summed."""
    return sum(head(x := part(x)) for part, head in zip(m.parts, m.heads, strict=True))


def two_sums(inside: Callable[[Any, Tensor], Tensor], update: Callable[..., Any] = lambda x, y: x + y) -> Form:
    """Each layer adds to the stream, and to the output."""

    def forward(m: Any, x: Tensor) -> Any:
        out: Any = 0
        for part, residual, head in zip(m.parts, m.residuals, m.heads, strict=True):
            z = inside(part, x)
            x, out = update(x, residual(z)), out + head(z)
        return out

    return forward


def elmo(m: Any, x: Tensor) -> Any:
    """A weighted sum of the outputs of all layers."""
    return sum([0.5 * x, *(0.5 * (x := part(x)) for part in m.parts)])


def straight_through(m: Any, x: Tensor) -> Tensor:
    for part, head in zip(m.parts, m.heads, strict=True):
        x = (y := part(x)) + (head(y) - y).detach()
    return x


def first_input(m: Any, x: Tensor) -> Tensor:
    """The sums of modded-nanogpt: each layer gets a part of the first input too."""
    first = x
    for part in m.parts:
        x = part(part.gain * x + part.positions * first)
    return x


WAVENET = two_sums(lambda part, x: part(x).tanh())
CONDITIONED = two_sums(lambda part, x: (h := part(x) + part(x[:, :1])).tanh() * h.sigmoid())
OTHER_SUMS: dict[str, tuple[Form, str]] = {
    **{form.__name__: (form, "parts.#.f parts.#.g") for form in (exits, elmo, straight_through, first_input)},
    "a part": (lambda m, x: stacked(m, m.heads[0](x) + m.heads[2](m.heads[1](x[:, :1]).relu())), "parts.#.f parts.#.g"),
    "two towers": (lambda m, x: m.heads[0](x) + stacked(m, x), "parts.#.f parts.#.g"),
    "the other tower last": (lambda m, x: stacked(m, x) + m.heads[0](x), "parts.#.f parts.#.g"),
    "WaveNet": (WAVENET, "residuals.#"),
    "conditioned WaveNet": (CONDITIONED, "residuals.#"),
    "backcasts of N-BEATS": (two_sums(lambda part, x: part(x).relu(), lambda x, y: x - y), "residuals.#"),
}


@pytest.mark.parametrize(("form", "ends"), OTHER_SUMS.values(), ids=OTHER_SUMS)
def test_heads_whose_outputs_are_summed_are_no_branches(form: Form, ends: str) -> None:
    linear = lambda: nn.ModuleList(nn.Linear(C, C) for _ in range(4))
    parts = linear() if ends == "residuals.#" else nn.ModuleList(pre_norm() for _ in range(4))
    found = branches(toy(form, parts=parts, heads=linear(), residuals=linear()))
    assert {one.end for one in found} == {end.replace("#", str(i)) for i in range(4) for end in ends.split()}


@pytest.mark.parametrize("through", [tuple, lambda pair: dict(zip("ab", pair, strict=True)), list])
def test_two_streams_that_pass_through_the_layers_together(through: Callable[[Any], Any]) -> None:
    def reversible(m: Any, pair: Any) -> Any:
        a, b = pair.values() if isinstance(pair, dict) else pair
        return through((a := a + m.f(m.p(b)), b + m.g(m.q(a))))

    def forward(m: Any, x: Tensor) -> Tensor:
        pair = m.parts(through(x.chunk(2, 1)))
        return torch.cat([*(pair.values() if isinstance(pair, dict) else pair)], 1)

    model = toy(forward, parts=nn.Sequential(*(block(reversible) for _ in range(4))))
    assert {one.end for one in branches(model)} == {f"parts.{i}.{end}" for i in range(4) for end in "fg"}
    assert all("several tensors" in reason for reason in survey(model, X).skippable.values())


def test_a_branch_that_is_broadcast_to_its_skip() -> None:
    last = block(lambda m, x: (y := x + m.f(m.p(x)[:, :1])) + m.g(m.q(y)))  # of the first token only
    model = nn.Sequential(pre_norm(), pre_norm(), last)
    assert [one.end for one in branches(model)] == [f"{i}.{end}" for i in range(3) for end in "fg"]
    last.f.register_forward_hook(lambda module, args, out: out * 0)
    last.g.register_forward_hook(lambda module, args, out: out * 0)
    assert torch.equal(last(X), X)
    assert survey(model, X).skippable == {"0": "", "1": "", "2": ""}


@pytest.mark.parametrize(
    "how",
    [
        lambda m, x: torch.cat([m.a(x), m.a(F.pad(x[..., 1:], (0, 1)))], 1) + m.g(m.f(x).relu()),
        lambda m, x: m.b(x) + m.g(m.f(x).relu() * F.interpolate(m.b(x)[..., ::2, ::2], size=8).sigmoid()),
    ],
    ids=["a projection in two halves (Shake-Shake)", "a gate that is enlarged (AirNet)"],
)
def test_the_branch_is_found_beside(how: Form) -> None:
    a, f = nn.Conv2d(C, C, 1), nn.Conv2d(C, 2 * C, 3, 1, 1)
    model = toy(how, a=a, b=nn.Conv2d(C, 2 * C, 1), f=f, g=nn.Conv2d(2 * C, 2 * C, 1))
    assert plan(model, stochastic_depth(), example_input=torch.randn(2, C, 8, 8)).sites[-1].name in "ga"


def test_a_difference_from_a_moving_average_is_no_branch() -> None:
    season = toy(lambda m, x: x - m.pool(x), pool=toy(lambda m, x: F.avg_pool1d(x.mT, 3, 1, 1).mT))
    with pytest.raises(LayerError, match="found no residual branch"):
        plan(nn.Sequential(nn.Linear(C, C), season), stochastic_depth(), example_input=X)


@pytest.mark.parametrize(
    "form", [lambda m, x: m.f(x) + m.g(x), lambda m, x: m.f(x) + m.g(x) + x, lambda m, x: (x - m.g(x)).square()]
)
def test_a_single_sum_around_all_layers_is_named_as_of_two_towers_or_the_error_of_an_autoencoder(form: Form) -> None:
    model = toy(form, f=nn.Linear(C, C), g=nn.Sequential(nn.Linear(C, 3), nn.ReLU(), nn.Linear(3, C)))
    [warning] = plan(model, stochastic_depth(), example_input=X).warnings
    assert "ends a branch of the only residual addition" in warning
    assert not plan(nn.Sequential(nn.Linear(C, C), model), stochastic_depth(), example_input=X).warnings


def test_a_model_that_draws_in_eval_mode_has_the_same_plan_each_time() -> None:
    blocks = nn.Sequential(*(pre_norm() for _ in range(8)))
    model = toy(lambda m, x: m.blocks[: int(torch.randint(1, 9, ()))](x), blocks=blocks)
    assert len({len(plan(model, stochastic_depth(), example_input=X).sites) for _ in range(9)}) == 1


def test_branches_inside_another_are_named() -> None:
    form = lambda m, x: x + m.f(m.inner(m.g(x)))
    outer = [toy(form, f=nn.Linear(C, C), g=nn.Linear(C, C), inner=pre_norm()) for _ in range(2)]
    found = plan(nn.Sequential(*outer), stochastic_depth(), example_input=X)
    assert [site.name for site in found.sites] == ["0.f", "1.f"]
    assert "'0.inner', '1.inner': its residual branches are inside another one" in found.warnings[0]


def test_a_branch_that_is_left_out_beside_a_site_is_named() -> None:
    windows = lambda m, x: (h := x + m.a(x.view(-1, 4)).view_as(x)) + m.b(h)
    with torch.device("meta"):
        model, x = toy(windows, a=nn.Linear(4, 4), b=nn.Linear(8, 8)), torch.ones(4, 8)
    found = plan(model, stochastic_depth(0.1), example_input=x)
    assert [site.name for site in found.sites] == ["b"]
    assert "'a': the samples are unknown there" in found.warnings[0]


def test_a_part_of_a_tensor_that_is_added() -> None:
    """The rest goes on with the sum, as in a ReXNet, or to another sum."""
    joined = block(lambda m, x: torch.cat([(y := m.f(m.p(x)))[..., :4] + x[..., :4], y[..., 4:]], -1))
    assert [one.end for one in branches(nn.Sequential(joined, pre_norm()))] == ["0.f", "1.f", "1.g"]

    def forward(m: Any, x: Tensor) -> Any:
        out: Any = 0
        for part, both in zip(m.parts, m.heads, strict=True):
            more, skip = both(part(x).tanh()).chunk(2, -1)
            x, out = x + more, out + skip
        return out

    both = nn.ModuleList(nn.Linear(C, 2 * C) for _ in range(3))
    shared = toy(forward, parts=nn.ModuleList(nn.Linear(C, C) for _ in both), heads=both)
    with pytest.raises(LayerError, match="does not end with a module"):
        plan(shared, stochastic_depth(), example_input=X)


def test_layers_are_the_innermost_repeated_blocks() -> None:
    """Neither an encoder that adds positions, nor the two parts of a layer, are layers themselves."""
    positions = toy(lambda m, x: stacked(m, x + m.f(x)), f=nn.Linear(C, C), parts=stack(pre_norm).parts)
    model = nn.Sequential(nn.Linear(C, C), positions, nn.Linear(C, C))
    assert [name for name, why in survey(model, X).skippable.items() if not why] == [f"1.parts.{i}" for i in range(3)]

    def sub(*widths: int) -> nn.Module:
        return toy(lambda m, x: x + m.body(x), body=nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths))))

    layers = nn.Sequential(*(nn.Sequential(sub(C, 2 * C, C), sub(C, 3 * C, C)) for _ in range(3)))
    assert [*survey(layers, X).skippable] == ["0", "1", "2"]


def test_equal_modules_with_different_sites_are_named() -> None:
    trace = survey(stack(pre_norm), X).trace
    sites = [f"parts.{i}.{end}" for i in range(3) for end in "fg"]
    assert not sibling_warnings(trace, sites, [])
    [warning] = sibling_warnings(trace, sites[1:], [])
    assert "'parts.0' and 'parts.1', 'parts.2' are layers of one class" in warning
    known = [[f"skipped 1 layer, '{name}': a reason"] for name in ("parts.0", "parts.0.f", "parts.01")]
    assert [bool(sibling_warnings(trace, sites[1:], one)) for one in known] == [False, False, True]
    model = stack(pre_norm)
    assert sibling_warnings(survey(model, X).trace, ["parts.1.drop", "parts.2.drop"], [])
    model.parts[0].drop = nn.Identity()  # as timm writes DropPath(0)
    assert not sibling_warnings(survey(model, X).trace, ["parts.1.drop", "parts.2.drop"], [])
    assert not sibling_warnings(survey(nn.Sequential(conv(2), conv(2)), torch.randn(2, C, 16, 16)).trace, ["0.two"], [])


def test_maps_of_a_one_dimensional_cnn_are_no_tokens() -> None:
    parts = [toy(lambda m, x: x + m.f(x), f=nn.Sequential(nn.Conv1d(6, 6, 1), nn.BatchNorm1d(6))) for _ in range(2)]
    model = nn.Sequential(*parts)
    assert len(plan(model, stochastic_depth(), example_input=X).sites) == 2
    with pytest.raises(LayerError, match="found no transformer layer"):
        plan(model, residual_dropout(), example_input=X)
    mixed = nn.Sequential(*parts, toy(lambda m, x: x + m.f(x), f=nn.Linear(C, C)))
    [warning] = plan(mixed, residual_dropout(), example_input=X).warnings
    assert "skipped 2 layers, '0', '1': no branch is added to tokens there" in warning


@pytest.mark.parametrize("shape", [(2, 6, C), (12, C), (2, 2, 3, C)], ids=["tokens", "packed", "Swin"])
def test_tokens_of_layers_with_attention_may_have_any_shape(shape: tuple[int, ...]) -> None:
    def attend(m: Any, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        return m.f((rows @ rows.mT).softmax(-1) @ rows).view(x.shape)

    def layer() -> nn.Module:
        parts = {"a": toy(attend, f=nn.Linear(C, C)), "g": nn.Linear(C, C)}
        return toy(lambda m, x: (x := x + m.a(x)) + m.g(x), **parts)

    found = plan(nn.Sequential(layer(), layer()), residual_dropout(), example_input=torch.randn(shape))
    assert [site.name for site in found.sites] == ["0.a", "0.g", "1.a", "1.g"]


WITHOUT_ENDS: dict[str, Form] = {
    "function": lambda m, x: x + F.relu(m.g(x)),
    "product": lambda m, x: x + torch.mul(m.g(x), m.f(x)),
    "highway": lambda m, x: x * (1 - m.f(x).sigmoid()) + m.g(x) * m.f(x).sigmoid(),
    "a term computed from the other": lambda m, x: x + (m.f(h := m.p(x)) - h),
    "a term of two": lambda m, x: x + (0.5 * (h := m.p(x)) + 0.5 * m.g(h)),
    "a gated token shift": lambda m, x: x + m.f(h := m.p(x)).sigmoid() * m.g(shifted(m, h)),
    "hidden": lambda m, x: torch.func.vmap(torch.add)(x, m.g(x)),
    "complex numbers": lambda m, x: ((z := torch.fft.fft(x, dim=1)) + torch.fft.fft(m.g(z.real), dim=1)).real,
}


@pytest.mark.parametrize("name", WITHOUT_ENDS)
def test_blocks_whose_branch_has_no_end_are_named(name: str) -> None:
    form = WITHOUT_ENDS[name]
    with pytest.raises(LayerError, match="'0', '1'"):
        plan(nn.Sequential(block(form), block(form)), stochastic_depth(), example_input=X)
    mixed = plan(nn.Sequential(pre_norm(), block(form), pre_norm()), stochastic_depth(), example_input=X)
    assert [site.name for site in mixed.sites] == ["0.f", "0.g", "2.f", "2.g"]
    [warning] = mixed.warnings
    assert "skipped 1 layer, '1'" in warning


def test_a_gate_is_no_branch_without_an_end() -> None:
    gate = block(lambda m, x: x * m.g(x).sigmoid())
    del gate.f  # so that it is no equal of the other block
    assert not plan(nn.Sequential(pre_norm(), gate), stochastic_depth(), example_input=X).warnings


SKIPS: dict[str, Form] = {
    "identity": lambda m, x: x + m.g(x),
    "difference": lambda m, x: x - m.g(x),
    "one": lambda m, x: 1.0 * x + m.g(x),
    "back and forth": lambda m, x: x.transpose(0, 1).contiguous().roll(1, 0).roll(-1, 0).transpose(0, 1) + m.g(x),
    "scaled": lambda m, x: 0.5 * x + m.g(x),
    "alpha": lambda m, x: torch.add(m.g(x), x, alpha=0.5),
    "lerp": lambda m, x: torch.lerp(x, m.g(x), 0.3),
    "negative": lambda m, x: -x + m.g(x),
    "gain": lambda m, x: x * m.gain + m.g(x),
    "flipped": lambda m, x: x.flip(1) + m.g(x),
    "transposed": lambda m, x: x.transpose(0, 1) + m.g(x),
    "reordered": lambda m, x: x.transpose(0, 1).reshape(x.shape) + m.g(x),
}


@pytest.mark.parametrize("name", SKIPS)
def test_a_layer_can_be_skipped_if_it_returns_its_input_without_its_branch(name: str) -> None:
    model, x = nn.Sequential(block(SKIPS[name]), block(SKIPS[name])), torch.randn(6, 6, C)
    found = survey(model, x)
    assert {branch.end for branch in found.branches} == {"0.g", "1.g"}
    model[0].g.register_forward_hook(lambda module, args, out: out * 0)
    assert (found.skippable["0"] == "") == torch.equal(model[0](x), x)


def test_skippable_layers() -> None:
    normed = [toy(lambda m, x: m.n(x + m.conv(x)), conv=nn.Conv2d(C, C, 3, 1, 1), n=nn.BatchNorm2d(C)) for _ in "ab"]
    reasons = survey(nn.Sequential(*normed), torch.randn(2, C, 4, 4)).skippable.values()
    assert all("does not return it" in why for why in reasons)
    assert survey(stack(lambda: block(FORMS["post-norm"])), X).skippable == {f"parts.{i}": "" for i in range(3)}
    first, second = survey(nn.Sequential(conv(first=True), conv()), torch.randn(2, 3, 8, 8)).skippable.values()
    assert ("changes the shape" in first, "not its first input" in second) == (True, True)
    loop = toy(lambda m, x: (y := x + m.all[0](x)) + m.all[1](y), all=nn.ModuleList(nn.Linear(C, C) for _ in "ab"))
    found = survey(nn.Sequential(pre_norm(), loop), X).skippable
    assert found == {"0": "", "1": "it adds the branches of several layers, which are no modules of their own"}


def test_other_additions_are_not_residual() -> None:
    """Additions of a polynomial, of positions, of a mask, of a U-Net's concatenation, and gates."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = x + m.position
        x = x + m.table(torch.arange(6)).expand_as(x)
        y = m.a(x)
        y = y + 0.044715 * y.pow(3)
        y = y * m.query(y).sigmoid()
        scores = m.query(x) @ y.mT
        scores = (scores + torch.zeros_like(scores)).softmax(-1)
        return m.b(torch.cat([x, scores @ y], -1))

    layers = {"a": nn.Linear(C, C), "b": nn.Linear(2 * C, C), "query": nn.Linear(C, C), "table": nn.Embedding(6, C)}
    assert branches(toy(forward, position=nn.Parameter(torch.randn(6, C)), **layers)) == ()


def test_a_skip_around_several_blocks_is_left_out_but_not_one_around_another_branch() -> None:
    """The latter as in Fourier neural operators."""
    long = toy(lambda m, x: x + m.last(m.body(x)), body=stack(pre_norm), last=nn.Linear(C, C))
    assert {one.layer for one in branches(long)} == {f"body.parts.{i}" for i in range(3)}
    for form, ends in ((lambda m, x: x + m.g((x + m.f(x)).relu()), "fg"), (lambda m, x: x + 0.3 * (m.g(x) - x), "g")):
        assert [one.end for one in branches(nn.Sequential(block(form)))] == [f"0.{end}" for end in ends]


def test_batch_on_the_second_axis_and_pytorchs_own_transformer() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(C, 2, 16, 0.0), 2, enable_nested_tensor=False)
    ends = [branch.end for branch in branches(model, torch.randn(6, 2, C))]
    assert ends == [f"layers.{i}.dropout{n}" for i in range(2) for n in (1, 2)]


def test_examples_of_a_survey() -> None:
    with pytest.raises(InjectionError, match="example_input="):
        survey(stack(pre_norm))
    found = survey(nn.Sequential(conv(first=True), conv()))
    assert "assumed image" in found.example.source
    assert found.is_fake
    selecting = block(lambda m, x: (rows := x[x[:, 0] > 0]) + m.f(rows))  # its shapes depend on values
    assert [one.end for one in branches(selecting, torch.randn(6, C))] == ["f"]


WIDTHS = (8, 8, 16, 16, 32)


class Unit(nn.Module):
    """A block with an in-place addition, a gain, a gate, and functions instead of modules."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        stride = 1 if channels == width else 2
        self.alpha, self.beta = nn.Conv2d(channels, width, 3, stride, 1), nn.GroupNorm(2, width)
        self.gamma, self.delta = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.squeeze, self.excite = nn.Conv2d(width, 4, 1), nn.Conv2d(4, width, 1)
        self.gain = nn.Parameter(torch.ones(width, 1, 1))
        self.short = None if stride == 1 else nn.Conv2d(channels, width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.delta(self.gamma(F.relu(self.beta(self.alpha(x)))))
        y = y * torch.sigmoid(self.excite(F.relu(self.squeeze(y.mean((2, 3), keepdim=True)))))
        y = y * self.gain
        y += x if self.short is None else self.short(x)
        return F.relu(y)


def net(block: type[nn.Module]) -> nn.Sequential:
    blocks = (block(a, b) for a, b in pairwise(WIDTHS))
    return nn.Sequential(nn.Conv2d(3, 8, 3), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 2))


def sites(model: nn.Module) -> dict[str, float]:
    planned = plan(model, dropblock_resnet(p=0.4), example_input=torch.zeros(2, 3, 34, 34))
    return {f"{site.name} (skip)" if site.at == "skip" else site.name: site.p for site in planned.sites}


def test_names_do_not_matter() -> None:
    assert sites(net(Unit)) == {
        **dict.fromkeys(("2.beta", "2.delta", "2.short", "3 (skip)", "3.beta", "3.delta"), 0.1),
        **dict.fromkeys(("4.beta", "4.delta", "4.short"), 0.4),
    }


def test_a_skip_of_functions_is_dropped_at_the_input_of_the_block() -> None:
    class Padded(Unit):
        """The shortcut of the ResNets for CIFAR."""

        def __init__(self, channels: int, width: int) -> None:
            super().__init__(channels, width)
            self.width = width
            del self.short
            self.__dict__["short"] = self.pad

        def pad(self, x: Tensor) -> Tensor:
            step = 1 if x.shape[1] == self.width else 2
            return F.pad(x[:, :, ::step, ::step], (0, 0, 0, 0, 0, self.width - x.shape[1]))

    assert {name for name in sites(net(Padded)) if name.startswith("4")} == {"4 (skip)", "4.beta", "4.delta"}


def test_a_wrapper_around_the_branch() -> None:
    def body(width: int) -> nn.Module:
        layers = [nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        branch = nn.Sequential(*layers, nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width))
        return toy(lambda m, x: torch.add(m.body(x), x), body=branch)

    model = nn.Sequential(nn.Conv2d(3, 8, 3), body(8), nn.Conv2d(8, 16, 2, 2), nn.BatchNorm2d(16), body(16))
    assert sites(model) == {
        **dict.fromkeys(("1 (skip)", "1.body.1", "1.body.4"), 0.1),
        **dict.fromkeys(("4 (skip)", "4.body.1", "4.body.4"), 0.4),
    }


def test_an_addition_without_a_module_of_its_own_is_refused() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.first(x)
        for i in (0, 2):
            y = F.relu(m.norms[i](m.units[i](x)))
            x = F.max_pool2d(x + m.norms[i + 1](m.units[i + 1](y)), 2)
        return x

    units = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(4))
    flat = toy(forward, first=nn.Conv2d(3, 8, 3), units=units, norms=nn.ModuleList(nn.BatchNorm2d(8) for _ in units))
    with pytest.raises(InjectionError, match="no hook can reach"):
        sites(flat)
