"""A layer that is skipped is not computed: `LayerDrop` runs it on the samples that are kept."""

import copy
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookdrop
from hookdrop import Dropout, HookdropWarning, InjectionError, LayerDrop, LayerError, LinearSchedule, find, inject, plan
from hookdrop.recipes import layer_drop
from tests.support.models import toy

X = torch.randn(8, 5, 4, generator=torch.Generator().manual_seed(0))
pytestmark = pytest.mark.filterwarnings("ignore:.*saves no time there")
MODES = pytest.mark.parametrize("mode", ["batch", "row"])


class Mean(hookdrop.Regularizer):
    """The mean of what a layer gets and returns."""

    needs = ("layer_input",)

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.p = p

    def regularize(self, x: Tensor, rate: Any, layer_input: Tensor) -> Tensor:
        return (x + layer_input) / 2


def layer(m: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Notes on how many samples it runs."""
    m.sizes.append(len(x))
    return x + m.fc(x if bias is None else x + bias).relu()


def model(forward: Any = layer, layers: int = 4) -> Any:
    made = [toy(forward, fc=nn.Linear(4, 4), sizes=[]) for _ in range(layers)]
    return toy(lambda m, x, *more: [x := one(x, *more) for one in m.layers][-1], layers=nn.ModuleList(made))


def written_out(m: Any, x: Tensor, p: float, mode: str, bias: Tensor | None = None) -> Tensor:
    """The same model with a loop that skips layers, written by hand."""
    for one in m.layers:
        kept = (torch.rand(len(x) if mode == "row" else 1) >= p).expand(len(x))
        if kept.any():
            y = one(x[kept], None if bias is None else bias[kept] if len(bias) == len(x) else bias)
            x = x.masked_scatter(kept.view(-1, 1, 1).expand_as(x), y)
    return x


@MODES
@pytest.mark.parametrize("bias", [None, torch.randn(8, 5, 4), torch.randn(5, 4), torch.randn(1, 5, 4)])
@pytest.mark.parametrize("checkpointed", [None, True, False])
def test_equals_a_loop_that_skips_layers(mode: str, bias: Tensor | None, checkpointed: bool | None) -> None:
    """Outputs and gradients are equal bit for bit, also with checkpoints, reentrant or not."""
    hooked = model()
    twin, more = copy.deepcopy(hooked), () if bias is None else (bias,)
    inject(hooked, LayerDrop(0.5, mode), layers="layers.*", example_input=(X, *more))
    for seed in range(6):
        x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
        torch.manual_seed(seed)
        found: Any = x
        if checkpointed is None:
            found = hooked(x, *more)
        else:
            for one in hooked.layers:
                found = checkpoint(one, found, *more, use_reentrant=checkpointed)
        torch.manual_seed(seed)
        expected = written_out(twin, y, 0.5, mode, bias)
        assert torch.equal(found, expected)
        for run, start in ((found, x), (expected, y)):
            run.square().sum().backward()
            assert start.grad is not None
        torch.testing.assert_close(x.grad, y.grad)
        for ours, theirs in zip(hooked.parameters(), twin.parameters(), strict=True):
            assert ours.grad is not None, "a skipped layer has gradients of 0"
            torch.testing.assert_close(ours.grad, torch.zeros_like(ours) if theirs.grad is None else theirs.grad)


def test_a_layer_runs_on_the_kept_samples_and_on_one_if_none_is_kept() -> None:
    hooked = model(layers=1)
    inject(hooked, LayerDrop(0.5, "row"), layers="layers.*")
    for _ in range(30):
        changed = int((hooked(X) != X).flatten(1).any(1).sum())
        assert hooked.layers[0].sizes[-1] == max(changed, 1)
    inject(hooked, LayerDrop(0.5), layers="layers.*", on_existing="replace")
    hooked.layers[0].sizes.clear()
    skipped = [torch.equal(hooked(X), X) for _ in range(30)]
    assert hooked.layers[0].sizes == [1 if one else 8 for one in skipped]
    assert 0 < sum(skipped) < 30


@MODES
def test_each_sample_is_skipped_with_probability_p(mode: str) -> None:
    """Within 5 standard errors of 4,000 draws."""
    hooked = model(layers=1)
    inject(hooked, LayerDrop(0.3, mode), layers="layers.*")
    skipped = torch.stack([(hooked(X) == X).flatten(1).all(1) for _ in range(4000)]).double()
    assert (skipped.mean(0) - 0.3).abs().max() < 5 * (0.21 / 4000) ** 0.5
    together = torch.corrcoef(skipped.T)[0, 1].item()
    assert together == pytest.approx(1.0) if mode == "batch" else abs(together) < 5 / 4000**0.5


@MODES
def test_recording_and_probe_count_calls_in_which_all_samples_are_kept(mode: str) -> None:
    hooked = model()
    drop = inject(hooked, LayerDrop(0.25, mode), layers="layers.*")
    with drop.recording() as record:
        outputs = [hooked(X) for _ in range(100)]
    assert record.totals.calls == 400
    assert record.totals.dropped == pytest.approx(0.25, abs=5 * (0.1875 / 400) ** 0.5)
    assert torch.equal(record["layers.3"].after, outputs[-1])


def test_at_rate_0_and_in_eval_mode_the_layer_gets_its_arguments_themselves() -> None:
    seen: list[Tensor] = []
    hooked = model(lambda m, x: (seen.append(x), x + m.fc(x))[1], layers=1)
    drop = inject(hooked, LayerDrop(0.5, "row"), layers="layers.*", schedule=LinearSchedule(10))
    hooked(X)
    drop.seek(10)
    hooked.eval()(X)
    assert all(x is X for x in seen)
    hooked.train()(X)
    assert seen[-1] is not X


def test_a_layer_with_batch_norm_runs_on_all_samples_and_keeps_their_statistics() -> None:
    clean = nn.Sequential(toy(lambda m, x: x + m.norm(x), norm=nn.BatchNorm1d(5)))
    hooked = copy.deepcopy(clean)
    made = plan(hooked, LayerDrop(0.5, "row"), layers="0", example_input=X)
    assert made.sites[0].runs == "on all samples: has a batch norm (norm)"
    inject(hooked, LayerDrop(0.5, "row"), layers="0")
    y, full = hooked(X), clean(X)
    kept = (y != X).flatten(1).any(1)
    assert 0 < kept.sum() < 8
    assert torch.equal(y, torch.where(kept[:, None, None], full, X))
    assert torch.equal(hooked[0].norm.running_mean, clean[0].norm.running_mean)


@pytest.mark.parametrize(
    ("forward", "runs"),
    [
        (lambda m, x: x + m.fc(x), "on kept samples"),
        (lambda m, x: (x + m.fc(x), x.mean(-1)), r"on all samples: also returns (3, 5) float32, which depends on"),
        (lambda m, x: (x + m.fc(x), m.fc.bias.repeat(2 * len(x), 1)), r"on all samples: also returns (6, 4) float32"),
        (lambda m, x: (x + m.fc(x), x), "on kept samples"),
        (lambda m, x: x.add_(m.fc(x)), "on kept samples"),
    ],
    ids=["plain", "returns more", "repeats a table for each sample and head", "returns its input", "in place"],
)
def test_the_plan_says_on_which_samples_a_layer_runs(forward: Any, runs: str) -> None:
    made = plan(nn.Sequential(toy(forward, fc=nn.Linear(4, 4))), LayerDrop(0.5, "row"), layers="0", example_input=X)
    assert made.sites[0].runs.startswith(runs)
    assert runs in repr(made)


@pytest.mark.parametrize("hooked", [0, 3])
def test_a_hook_of_other_code_inside_a_layer_concerns_that_layer_only(hooked: int) -> None:
    made: Any = model()
    hook, expected = made.layers[hooked].fc.register_forward_hook, [index == hooked for index in range(4)]

    def on_all_samples() -> list[bool]:
        [one.sizes.clear() for one in made.layers]
        made(X)
        return [one.sizes == [len(X)] for one in made.layers]

    inside = hook(lambda module, args, output: None)
    planned = plan(made, LayerDrop(0.5, "row"), layers="layers.*", example_input=X).sites
    assert ["on all samples" in site.runs for site in planned] == expected
    inject(made, LayerDrop(0.5, "row"), layers="layers.*")
    with pytest.warns(HookdropWarning, match="hook of other code inside"):
        assert on_all_samples() == expected
    inside.remove()
    assert on_all_samples() == [False] * 4
    hook(lambda module, args, output: None)
    assert on_all_samples() == expected


@pytest.mark.filterwarnings("ignore:TransformerEncoderLayer leaves its fused eval path")
def test_a_batch_on_another_axis_is_skipped_as_a_whole_or_refused() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0), 2, enable_nested_tensor=False)
    with pytest.raises(LayerError, match=r"N on axis 1(.|\n)*LayerDrop\(p=..., mode=\"batch\"\)"):
        inject(encoder, LayerDrop(0.5, "row"), layers="layers.*", example_input=X)
    inject(encoder, LayerDrop(0.999999), layers="layers.*", example_input=X)
    sizes: list[int] = []
    encoder.layers[0].register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    assert torch.equal(encoder(X), X)
    assert sizes == [1]


def test_sites_inside_the_layer_do_not_take_the_kept_samples_for_another_batch() -> None:
    """No guard warns that the rows of two sites differ."""
    hooked = model(lambda m, x: x + m.fc(x))
    inject(hooked, LayerDrop(0.7), layers="layers.*")
    inside = inject(hooked, hookdrop.DropPath(0.3), layers="layers.*.fc")
    for _ in range(30):
        hooked(X)
    assert inside.check() == []


def test_windows_inside_the_layer_have_one_draw_for_each_sample_that_is_kept() -> None:
    fold = toy(lambda m, x: x + m.inner(x.flatten(0, 1)).reshape(x.shape), inner=nn.Identity())
    inject(hooked := nn.Sequential(fold), hookdrop.DropPath(0.5, samples=("", 0, False)), layers="0.inner")
    inject(hooked, LayerDrop(0.5, "row"), layers="0")
    x = torch.rand(4, 4, 3) + 1
    shares = torch.stack([hooked(x) / x for _ in range(50)])
    torch.testing.assert_close(shares, shares[:, :, :1].expand_as(shares))


def test_the_recipe_has_the_mode() -> None:
    blocks = model(lambda m, x: x + m.fc(x))
    drop = inject(blocks, layer_drop(0.5, mode="row"), example_input=X)
    assert {site.regularizer for site in drop.sites} == {"LayerDrop(p=0.5, mode='row')"}
    with pytest.raises(ValueError, match="mode"):
        layer_drop(0.5, mode="subset")


def test_a_cache_of_keys_raises_also_if_nothing_is_skipped() -> None:
    hooked = model(lambda m, x, past_key_values=None: x + m.fc(x), layers=1)
    inject(hooked, LayerDrop(1e-9), layers="layers.*")
    with pytest.raises(InjectionError, match="fills a KV cache"):
        hooked(X, object())


def test_a_regularizer_that_needs_the_input_alone_runs_on_all_samples() -> None:
    hooked = model(lambda m, x: x.add_(m.fc(x)), layers=1)
    inject(hooked, Mean(), layers="layers.*")
    torch.testing.assert_close(hooked(X.clone()), X + hooked.layers[0].fc(X) / 2)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler reads it
@MODES
def test_compiled_code_has_a_graph_before_and_after_the_layer_for_any_number_of_samples(mode: str) -> None:
    hooked = model(lambda m, x: x + m.fc(x).relu(), layers=2)
    inject(hooked, LayerDrop(0.5, mode), layers="layers.*")
    frames: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        frames.append(graph)
        return graph

    torch.compiler.reset()
    fast = torch.compile(copy.deepcopy(hooked), backend=backend)
    for seed in range(60):
        outputs = []
        for run in (fast, hooked):
            torch.manual_seed(seed)
            outputs.append(run(X))
        assert torch.equal(*outputs)
    known = len(frames)
    for seed in range(60, 120):
        torch.manual_seed(seed)
        fast(X)
    assert len(frames) == known
    assert known <= 2 * 3, "for each layer: all samples, some, and one"
    torch.compiler.reset()


def masked(m: Any, x: Tensor, **masks: Tensor) -> Tensor:
    """Attention with a mask of the padding, (N, L), or of the positions, (L, L)."""
    scores = x @ m.fc(x).mT + sum(mask[:, None] if name == "padding" else mask for name, mask in masks.items())
    return x + scores.softmax(-1) @ x


SQUARE = torch.randn(5, 5, 4)
SOMETIMES: dict[str, tuple[Any, Any]] = {  # by what makes samples mix: a layer, and the arguments of call i
    "statistics of a batch in training mode": (
        lambda m, x: x + m.fc(x - (x.mean((0, 1)) if m.training else 0.0)),
        lambda m, i: ((X,), {}),
    ),
    "a gate that is 0 at first": (
        lambda m, x: x + m.fc(x) + m.gate * x.mean(0),
        lambda m, i: (m.gate.data.fill_(float(i > 3)), ((X,), {}))[1],
    ),
    "a factor that is an attribute": (lambda m, x: x + m.fc(x) + m.factor * x.mean(0), lambda m, i: ((X,), {})),
    "a number": (lambda m, x, k=0: x + m.fc(x) + (x.mean(0) if k else 0.0), lambda m, i: ((X, int(i > 3)), {})),
    "the name of an argument": (masked, lambda m, i: ((SQUARE,), {("padding", "bias")[i % 2]: torch.randn(5, 5)})),
}


@pytest.mark.parametrize("mixes", SOMETIMES)
def test_kept_samples_are_right_where_samples_mix_only_sometimes(mixes: str) -> None:
    forward, arguments = SOMETIMES[mixes]
    one = toy(forward, fc=nn.Linear(4, 4), gate=nn.Parameter(torch.zeros(())), factor=torch.tensor(1.0))
    clean, hooked = copy.copy(one), toy(lambda m, *args, **kwargs: m.layer(*args, **kwargs), layer=one)
    for name in ("_forward_hooks", "_forward_pre_hooks"):
        setattr(clean, name, type(getattr(one, name))())
    inject(hooked, LayerDrop(0.5, "row", argument="x"), layers="layer")
    for i in range(40):
        args, kwargs = arguments(one, i)
        found, expected = hooked(*args, **kwargs), clean(*args, **kwargs)
        kept = (found != args[0]).flatten(1).any(1)
        torch.testing.assert_close(found[kept], expected[kept])


def leaves(m: Any, x: Any, where: Any = None) -> Any:
    """Leaves the result in an argument, or its mean in an attribute or a buffer."""
    y = (value := x["x"] if isinstance(x, dict) else x) + m.fc(value)
    if where in ("attribute", "buffer"):
        setattr(*((m, "own", y.mean()) if where == "attribute" else (m, "mean", (m.mean + y.mean((0, 1))).detach())))
    elif where is not None:
        x.update(x=y) if isinstance(x, dict) else where.append(y) if isinstance(where, list) else where.add_(y)
    return x if isinstance(x, dict) else y


@MODES
@pytest.mark.parametrize("where", ["attribute", "buffer", "list", "tensor", "dictionary"])
def test_what_a_layer_leaves_elsewhere_is_that_of_all_samples(where: str, mode: str) -> None:
    """And the caller of a layer that changes a dictionary may read that, or what is returned."""
    one = toy(leaves, fc=nn.Linear(4, 4))
    one.register_buffer("mean", torch.zeros(4))
    hooked, full, seen = toy(lambda m, *args: m.layer(*args), layer=one), one(X).detach(), set[bool]()

    def arguments() -> Any:
        place = {"list": [], "tensor": torch.zeros_like(X)}.get(where, where)
        return {"x": X} if where == "dictionary" else X, place

    settings: Any = {"layers": "layer", "example_input": (given := arguments())}
    assert "on all samples" in plan(hooked, LayerDrop(0.5, mode, argument="x"), **settings).sites[0].runs
    assert len(given[1]) == len(arguments()[1])
    inject(hooked, LayerDrop(0.5, mode, argument="x"), **settings)
    for _ in range(9):
        x, place = arguments()
        y = hooked(x, place)
        found = x["x"] if y is x else y
        kept = (found != X).flatten(1).any(1)
        torch.testing.assert_close(found, torch.where(kept[:, None, None], full, X))
        seen.update(kept.tolist())
        left = one.own if where == "attribute" else place if where == "tensor" else place[0] if where == "list" else 0
        torch.testing.assert_close(
            left, full.mean() if where == "attribute" else full if isinstance(left, Tensor) else 0
        )
    assert seen == {True, False}
    assert where != "buffer" or torch.allclose(one.mean, 9 * full.mean((0, 1)))


@pytest.mark.parametrize(("first", "second"), [(LayerDrop(0.5), Dropout(0.5)), (Dropout(0.5), LayerDrop(0.5))])
def test_a_skipped_layer_is_regularized_at_its_output_in_either_order(first: Any, second: Any) -> None:
    hooked = model()
    inject(hooked, first, layers="layers.0")
    with pytest.raises(InjectionError, match="1 site already carries"):
        inject(hooked, second, layers="layers.0", name="b")
    inject(hooked, second, layers="layers.0", name="b", on_existing="replace")
    assert [drop.name for drop in find(hooked)] == ["b"]


def test_hooks_that_are_hidden_inside_a_forward_put_back_the_rows() -> None:
    """`plan`, `sampling` and `without_hooks` hide hooks."""
    hides: list[bool] = []

    def forward(m: Any, x: Tensor) -> Tensor:
        with hookdrop.without_hooks(hooked) if hides else nullcontext():
            return x + m.fc(x)

    hooked = model(forward)
    inject(hooked, LayerDrop(0.5, "row"), layers="layers.*")
    hooked(X)
    hides.append(True)
    assert hooked(X).shape == X.shape


def test_a_layer_that_is_compiled_alone_runs_on_the_kept_samples() -> None:
    hooked = model(layers=1)
    inject(hooked, LayerDrop(0.5, "row"), layers="layers.*")
    hooked.layers[0].compile(backend="eager")
    with warnings.catch_warnings(action="error", category=HookdropWarning):
        for _ in range(5):
            assert hooked(X).shape == X.shape
    assert min(hooked.layers[0].sizes) < len(X)


def test_what_cannot_be_skipped_by_rows_is_an_error() -> None:
    recursive = model(lambda m, x, again=True: m(x + m.fc(x).relu(), False) if again else x, layers=1)
    inject(recursive, LayerDrop(0.999, "row"), layers="layers.*")
    with pytest.raises(InjectionError, match="calls itself"):
        recursive(X)
    tables = model(lambda m, table, x: x + m.fc(x) * table.mean(0), layers=1)
    tables.forward = tables.layers[0].forward
    inject(tables, LayerDrop(0.5, "row"), layers="layers.*")
    with pytest.raises(InjectionError, match="returns 8 rows, but the first tensor that it gets has 3"):
        for _ in range(9):
            tables.layers[0](torch.randn(3, 5, 4), X)
    twice = model()
    inject(twice, LayerDrop(0.5), layers="layers.*")
    with pytest.raises(InjectionError, match="skips samples of this layer already"):
        inject(twice, LayerDrop(0.5, "row"), layers="layers.0", name="b", on_existing="stack")
    inject(twice, LayerDrop(0.5, "row"), layers="layers.0", on_existing="replace")
