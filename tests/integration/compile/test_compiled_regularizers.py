"""Regularizers in compiled code: what every one does, and what only some do."""

import copy
import math
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.func import grad, vmap
from torch.utils.checkpoint import checkpoint

import hookdrop
from hookdrop import DropBlock, Dropout, HookdropWarning, LinearSchedule, NEFTune, ScaleActivationGrad, inject, parse
from hookdrop.core.regularizer import at_rate
from hookdrop.functional import drop_block
from hookdrop.testing import regularizer_checks
from tests.support.compiling import Net, graphs
from tests.support.models import toy
from tests.support.regularizers import EVERY
from tests.support.tensors import zero_fraction
from tests.unit.core.test_hook import IDS, MASK, TokenModel, windowed
from tests.unit.regularizers.test_gradients import NON_FINITE, G, doubling
from tests.unit.regularizers.test_gradients import gradient as gradient_through
from tests.unit.testing.test_regularizers import TOKENS, Zeroing

# Warnings of PyTorch itself: the compiler of 2.13 and older instantiates autograd functions; the other is of 2.6.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*Function.*should not be instantiated:DeprecationWarning", "ignore:Skipping serialization:UserWarning"
)

X = torch.ones(64, 64, 12, 12)
FEW = {"Dropout": X, "DropBlock": X, "DropPath": torch.ones(4096, 9), "UniformNoise": X}
"""One for each way to draw, with an input that shows the rate. `test_compiled_code_equals_eager_code` has all regularizers."""
TEXTS = {name: f"{name}(0.4)" for name in FEW} | {"DropBlock": "DropBlock(0.4, 3, normalize=None)"}


def measured_rate(name: str, y: Tensor) -> float:
    """The rate measured from the output for ones: the fraction below 1, or the variance of noise."""
    if name == "UniformNoise":
        return y.detach().double().std().item() * 3**0.5
    return (y < 0.999).double().mean().item()


def bound(name: str, p: float = 0.4) -> float:
    """Five standard errors of `measured_rate`, from the number of units that are dropped together."""
    units = {"Dropout": X.numel(), "DropBlock": X.numel() / 9, "DropPath": 4096}
    return 0.01 if name not in units else 5 * (p * (1 - p) / units[name]) ** 0.5 + 1 / units[name]


def hooked(names: Iterable[str], rate: float = 0.4, steps: int = 0) -> tuple[nn.Module, hookdrop.Injection]:
    """A layer for each regularizer, so that all of them are in one graph."""
    forward = lambda m, inputs: {name: site(inputs[name]) for name, site in m.sites.items()}
    model = toy(forward, sites=nn.ModuleDict({name: nn.Identity() for name in names}))
    given = {f"sites.{name}": at_rate(parse(TEXTS[name]), rate) for name in names}
    return model, inject(model, given, schedule=LinearSchedule(steps) if steps else None)


def inputs_of(names: Iterable[str], **settings: Any) -> dict[str, Tensor]:
    return {name: FEW[name].clone().to(**settings).requires_grad_() for name in names}


def compiled(call: Callable[..., Any], **settings: object) -> Callable[..., Any]:
    return torch.compile(call, **{"backend": "aot_eager", "fullgraph": True, **settings})


def test_three_graphs_serve_all_steps_and_eval() -> None:
    """Training at rate 0, training above it, and eval. With fullgraph, a graph break would be an error."""
    model, drop = hooked(FEW, steps=50)
    fast = compiled(lambda inputs: [y * 2.0 for y in model(inputs).values()])
    inputs = {name: x.detach()[:2].requires_grad_() for name, x in inputs_of(FEW).items()}
    for step in range(51):
        drop.seek(step)
        sum(y.sum() for y in fast(inputs)).backward()
    model.eval()
    assert all(map(torch.equal, fast(inputs), [x * 2.0 for x in inputs.values()]))
    model.train()
    fast(inputs)
    assert graphs() == 3


def test_rates_are_right_in_code_from_the_cache_of_inductor() -> None:
    """A rate compiled in as a constant would reappear from the cache. Backward uses the mask of forward."""
    for target in (0.4, 0.2):
        torch.compiler.reset()
        model, drop = hooked(FEW, target, steps=4)
        fast, inputs = torch.compile(model, fullgraph=True), inputs_of(FEW)
        for step in (0, 1, 4):
            drop.seek(step)
            outputs = fast(inputs)
            drop.seek(4)  # between forward and backward
            gradients = torch.autograd.grad(sum(y.sum() for y in outputs.values()), list(inputs.values()))
            for (name, y), gradient in zip(outputs.items(), gradients, strict=True):
                assert measured_rate(name, y) == pytest.approx(target * step / 4, abs=bound(name)), (name, step)
                assert name == "UniformNoise" or step == 0 or torch.equal(gradient == 0, y < 0.999), (name, step)
    assert any("cache_hit" in name for part in ("aot_autograd", "inductor") for name in counters[part])


@pytest.mark.filterwarnings("ignore:the rate of:hookdrop.HookdropWarning")
@pytest.mark.parametrize(
    ("p", "dtype"), [(1.0, torch.float16), (1e-4, torch.bfloat16), (1e-4, torch.float16), (0.999, torch.bfloat16)]
)
def test_extreme_rates_and_low_precision(p: float, dtype: torch.dtype) -> None:
    names = ["Dropout", "DropBlock", "DropPath"]
    model, _ = hooked(names, p)
    for name, y in compiled(model)(inputs_of(names, dtype=dtype)).items():
        assert y.dtype == dtype, name
        assert torch.isfinite(y).all(), name
        assert measured_rate(name, y) == pytest.approx(p, abs=bound(name, p)), name


def test_dynamic_shapes_and_memory_format() -> None:
    """With `dynamic=True` and changing sizes, the rates stay right."""
    model, _ = hooked(FEW)
    fast = compiled(model, dynamic=True)
    for batch in (57, 48):  # not 64, the number of channels, which PyTorch would take for the same size
        inputs = {name: x[: len(x) * batch // 64] for name, x in FEW.items()}
        inputs |= {name: x.to(memory_format=torch.channels_last) for name, x in inputs.items() if x.dim() == 4}
        for name, y in fast(inputs).items():
            assert measured_rate(name, y) == pytest.approx(0.4, abs=1.5 * bound(name)), name
            assert y.dim() < 4 or y.is_contiguous(memory_format=torch.channels_last), name
    assert graphs() == 1


def blocks(use_reentrant: bool) -> tuple[nn.Module, hookdrop.Injection]:
    """A checkpoint around a site that draws by an operator of hookdrop, and one that draws by an operator of PyTorch."""
    inner = nn.Sequential(nn.Identity(), nn.Hardtanh(-9, 9), nn.Identity())
    model = toy(lambda m, x: checkpoint(m.inner, x, use_reentrant=use_reentrant), inner=inner)
    given = {"inner.0": TEXTS["DropBlock"], "inner.2": TEXTS["DropPath"]}
    return model, inject(model, given, schedule=LinearSchedule(4))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_replays_the_mask(use_reentrant: bool) -> None:
    """The gradient is the multiplier of the forward, although the block is recomputed."""
    model, drop = blocks(use_reentrant)
    fast = compiled(model, fullgraph=False)
    for step in (1, 3):
        drop.seek(step)
        y = fast(x := X.clone().requires_grad_())
        y.sum().backward()
        torch.testing.assert_close(x.grad, y)


SKIP = "skip_fwd_side_effects_in_bwd_under_checkpoint"


@pytest.mark.skipif(not hasattr(torch._dynamo.config, SKIP), reason=f"this PyTorch has no {SKIP}")
def test_checkpointing_inside_one_graph() -> None:
    """A hook records that it ran, a side effect that PyTorch must be allowed to skip in the recomputation."""
    with torch._dynamo.config.patch({SKIP: True}):
        (model, drop), x = blocks(use_reentrant=False), X.clone().requires_grad_()
        drop.seek(4)
        y = compiled(model)(x)
        torch.testing.assert_close(*torch.autograd.grad(y.sum(), x), y)


@pytest.mark.parametrize("regularizer", ["DropBlock(0.4, 3)", nn.Dropout(0.4)], ids=str)
def test_eval_graph_equals_that_of_the_clean_model(regularizer: Any) -> None:
    clean = nn.Sequential(nn.Identity(), nn.ReLU(), nn.Identity()).eval()
    hooked = copy.deepcopy(clean)
    inject(hooked, regularizer, layers="*", schedule=LinearSchedule(20))
    counts: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        counts.append(sum(node.op.startswith("call") for node in graph.graph.nodes))
        return graph.forward

    for model in (clean, hooked):
        torch.compiler.reset()
        torch.compile(model, backend=backend, fullgraph=True)(X)
    assert counts == [counts[0]] * 2


FOREIGN: list[tuple[Callable[[], nn.Module], str]] = [
    (lambda: nn.Dropout2d(0.4), "hookdrop.Dropout2d(p=0.4), which compiles without a graph break"),
    (
        lambda: pytest.importorskip("torchvision.ops").StochasticDepth(0.4, "row"),
        "hookdrop.DropPath(p=0.4, mode='row'),",
    ),
    (lambda: pytest.importorskip("timm.layers").DropBlock2d(0.4, 3), "hookdrop.DropBlock(p=0.4, block_size=3), which"),
]


@pytest.mark.parametrize(("theirs", "instead"), FOREIGN)
@pytest.mark.skipif(torch.__version__ < (2, 8), reason="this PyTorch does not report the reason")
def test_fullgraph_error_names_the_compilable_alternative(theirs: Callable[[], nn.Module], instead: str) -> None:
    inject(model := Net(), theirs(), layers="inner")
    with pytest.raises(torch._dynamo.exc.Unsupported) as error:
        compiled(model)(X)
    assert f"use {instead}" in str(error.value)
    assert "as a Python float, which compiled code treats as a constant" in str(error.value)


def test_a_foreign_module_without_a_rate_is_part_of_the_graph() -> None:
    """Nothing could become a constant."""
    inject(model := Net(), nn.RReLU(), layers="inner")
    compiled(model)(X)


def test_rates_of_foreign_modules_are_right_after_a_graph_break() -> None:
    """One graph break and no recompilation, because the rate is never compiled in."""
    model = Net()
    drop = inject(model, nn.Dropout(0.4), layers="inner", schedule=LinearSchedule(30))
    fast = compiled(model, fullgraph=False)
    for step in range(0, 31, 3):
        drop.seek(step)
        assert zero_fraction(fast(X)) == pytest.approx(0.4 * step / 30, abs=0.005)
    assert len(counters["graph_break"]) == 1


def test_standalone_layer_follows_its_rate() -> None:
    """It is recompiled for each rate, but always right."""
    fast = compiled(layer := Dropout(0.4))
    for layer.p in (0.4, 0.2):
        assert zero_fraction(fast(X)) == pytest.approx(layer.p, abs=0.01)


class TestRecording:
    def test_recording_runs_compiled_code_uncompiled(self) -> None:
        model = Net()
        drop = inject(model, Dropout(0.4), layers="inner")
        fast = compiled(model)
        fast(X)
        before = graphs()
        with drop.recording() as m:
            y = fast(X.clone().requires_grad_())
            y.sum().backward()
        assert torch.equal(m["inner"].after, y)
        assert m.totals.requested == pytest.approx(0.4)
        assert m.totals.dropped == pytest.approx(0.4, abs=bound("Dropout"))
        assert zero_fraction(fast(X)) == pytest.approx(0.4, abs=bound("Dropout"))
        assert graphs() == before

    def test_recording_inside_compiled_code_breaks_the_graph(self) -> None:
        drop = inject(model := Net(), Dropout(0.4), layers="inner")

        def step(x: Tensor) -> tuple[Tensor, float]:
            with drop.recording(last=0) as m:
                y: Tensor = model(x)
            return y, m.totals.dropped

        y, dropped = torch.compile(step)(X)
        assert zero_fraction(y) == pytest.approx(dropped)
        assert dropped == pytest.approx(0.4, abs=bound("Dropout"))
        before = graphs()
        compiled(model)(X)
        assert graphs() > before, "compiled as before"

    def test_first_import_of_the_compiler_inside_recording_breaks_the_graph(self) -> None:
        """Then `recording()` could not tell the compiler to stand back. Here the stance is set back instead."""
        drop = inject(model := Net(), Dropout(0.4), layers="inner")
        with drop.recording() as m, torch.compiler.set_stance("default"):
            y = compiled(model, fullgraph=False)(X)
        assert torch.equal(m["inner"].after, y)


@pytest.mark.parametrize("clean_first", [True, False])
def test_hooked_and_clean_models_of_one_class_do_not_share_code(clean_first: bool) -> None:
    """A teacher and a student of one class: by default PyTorch ignores hooks when it looks up compiled code."""
    clean, hooked = Net(), Net()
    inject(hooked, Dropout(0.4), layers="inner")
    calls = [(torch.compile(model, backend="eager"), rate) for model, rate in ((clean, 0.0), (hooked, 0.4))]
    for call, rate in 3 * (calls if clean_first else calls[::-1]):
        assert zero_fraction(call(X)) == pytest.approx(rate, abs=0.03)


def test_a_container_that_never_runs_warns_without_a_graph_break() -> None:
    """As with timm's `set_grad_checkpointing`, which iterates over the blocks of a stage. It warns after ten steps."""

    def forward(self: Any, x: Tensor) -> Tensor:
        for block in self.stage:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    model = toy(forward, stage=nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    drop = inject(model, Dropout(0.4), layers="stage", schedule=LinearSchedule(100))
    fast = compiled(model)
    for _ in range(9):
        fast(torch.ones(2, 4)).sum().backward()
        drop.step()
    with pytest.warns(HookdropWarning, match="'stage' never ran"):
        drop.step()
    assert graphs() == 1


CHECK = "compiled_code_equals_eager_code"


@pytest.mark.parametrize("name", EVERY)
def test_compiled_code_equals_eager_code(name: str) -> None:
    checks = dict(regularizer_checks(EVERY[name].regularizer, EVERY[name].example))
    if name in ("torch.nn.Dropout2d", "LayerDrop"):  # breaks the graph
        assert CHECK not in checks
    else:
        checks[CHECK]()


class ReadsItsRateInTheGraph(Zeroing):
    def regularize(self, x: Tensor, rate: Any) -> Tensor:
        return super().regularize(x, self.p if torch.compiler.is_compiling() else rate)


def test_a_broken_regularizer_fails() -> None:
    dict(regularizer_checks(Zeroing(), TOKENS))[CHECK]()
    with pytest.raises(AssertionError, match=CHECK):
        dict(regularizer_checks(ReadsItsRateInTheGraph(), TOKENS))[CHECK]()


class TestDropBlock:
    def test_compiled_matches_eager_with_the_same_seed(self) -> None:
        """Forward and gradient, for each way to normalize, to share masks and to draw: with sparse and with dense seeds."""
        variants = list(product(["batch", "sample", "expected", None], [(0.1, True), (0.1, False), (0.97, True)]))
        drops = [DropBlock(p, 5, normalize=normalize, per_channel=own) for normalize, (p, own) in variants]
        model = toy(lambda self, x: [site(x) for site in self.sites], sites=nn.ModuleList(nn.Identity() for _ in drops))
        inject(model, {f"sites.{i}": drop for i, drop in enumerate(drops)})
        x = torch.randn(8, 16, 20, 20).requires_grad_()

        def outputs_and_gradients(call: Callable[[Tensor], list[Tensor]]) -> list[Tensor]:
            torch.manual_seed(3)
            outputs = call(x)
            return [*outputs, *(torch.autograd.grad(y.square().sum(), x, retain_graph=True)[0] for y in outputs)]

        found = outputs_and_gradients(torch.compile(model, backend="aot_eager", fullgraph=True))
        torch.testing.assert_close(found, outputs_and_gradients(model))

    def test_vmap_draws_a_mask_for_each_slice(self) -> None:
        cases = [("batch", 0.3), ("batch", 0.97), ("sample", 0.3), ("expected", 0.3)]

        def slices(x: Tensor) -> list[Tensor]:
            return [vmap(lambda x: drop_block(x, p, 3, normalize=n), randomness="different")(x) for n, p in cases]  # noqa: B023

        outputs = torch.compile(slices, backend="aot_eager", fullgraph=True)(torch.ones(5, 4, 8, 20, 20))
        for (normalize, _), y in zip(cases, outputs, strict=True):
            assert len(torch.unique(y == 0, dim=0)) == 5
            if normalize == "batch":
                torch.testing.assert_close(y.mean((1, 2, 3, 4)), torch.ones(5))

    @pytest.mark.skipif(torch.__version__ < (2, 14), reason="PyTorch 2.13 and older refuse it")
    @pytest.mark.filterwarnings("ignore")  # raised by dynamo
    @pytest.mark.parametrize("p", [0.3, 0.97])
    def test_per_slice_gradients_drop_at_p(self, p: float) -> None:
        """PyTorch breaks the graph at `torch.func` transforms and traces what runs inside them."""
        each = vmap(grad(lambda x: drop_block(x, p, 3).sum()), randomness="different")
        y = torch.compile(lambda x: each(x), backend="aot_eager")(torch.ones(5, 4, 8, 20, 20))
        assert zero_fraction(y) == pytest.approx(p, abs=0.04)
        torch.testing.assert_close(y.mean((1, 2, 3, 4)), torch.ones(5))

    def test_unsupported_shape_raises(self) -> None:
        model = nn.Sequential(nn.Identity())
        inject(model, DropBlock(0.3, 3), layers="0")
        with pytest.raises(hookdrop.ShapeError):
            torch.compile(model, backend="eager")(torch.ones(2, 5, 8))

    def test_shape_warnings_are_raised_at_the_next_step(self) -> None:
        """Warnings cannot be raised from inside a compiled graph."""
        model = nn.Sequential(nn.Identity())
        drop = inject(model, DropBlock(0.3, 7), layers="0", schedule=LinearSchedule(10))
        fast = torch.compile(model, backend="aot_eager", fullgraph=True)
        fast(torch.ones(2, 5, 7, 7))
        assert "covers the whole 7x7 map" in "".join(drop.check())
        with pytest.warns(HookdropWarning, match="covers the whole 7x7 map"):
            drop.step()
        fast(torch.ones(2, 5, 7, 7))
        drop.step()
        assert not drop.check()


class TestSamplesAndMasks:
    def test_compiled_masksembles_equals_eager(self) -> None:
        """Two graphs: the first batch size and all others. In eval mode, the result is the input."""
        inject(model := nn.Sequential(nn.Identity()), hookdrop.Masksembles(n=4), layers="0")
        fast = torch.compile(model, backend="aot_eager", fullgraph=True)
        for size in (8, 12, 32):
            results = []
            x = torch.randn(size, 12, 5, 5, requires_grad=True)
            for call in (model, fast, copy.deepcopy(model)):
                y = call(x)
                results.append([y, *torch.autograd.grad(y.square().sum(), x)])
            assert not torch.equal(results[0][0], x)
            torch.testing.assert_close(results[1:], [results[0]] * 2)
        assert graphs() == 2
        model.eval()
        assert torch.equal(fast(x), x)

    @pytest.mark.parametrize("part", ["model", "embed"])
    def test_the_attention_mask_reaches_a_compiled_embedding(self, part: str) -> None:
        """In the graph, or from the eager model around it; a call without a mask has no padding."""
        model = TokenModel()
        inject(model, NEFTune(5, attention_mask=True), layers="embed")
        clean = model.embed.weight[IDS]
        if part == "embed":
            model.embed.compile(backend="aot_eager", fullgraph=True)
            fast: Any = model
        else:
            fast = torch.compile(model, backend="aot_eager", fullgraph=True)
        for mask in (MASK, 1 - MASK):
            assert torch.equal((fast(IDS, mask) != clean).any(-1), mask == 1)
        assert (fast(IDS) != clean).any(-1).all()
        if part == "embed":
            assert (model.embed(IDS) != clean).any(-1).all()

    def test_the_number_of_samples_reaches_a_compiled_layer(self) -> None:
        model = windowed()
        inject(model, Spread(samples=("", 0, False)), layers="inner")
        fast = torch.compile(model, backend="aot_eager", fullgraph=True)
        for samples in (3, 5, 7):
            assert fast(torch.zeros(samples, 8)).tolist() == [[samples] * 4] * (2 * samples)
        assert graphs() <= 2, "one more for a dynamic batch size"


class Spread(hookdrop.Regularizer):
    """Returns the number of samples."""

    needs = ("samples",)

    def __init__(self, p: float = 0.5, samples: Any = None) -> None:
        super().__init__()
        self.p, self.samples = p, samples

    def regularize(self, x: torch.Tensor, rate: Any, samples: Any = None) -> torch.Tensor:
        return torch.full_like(x, samples.count)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler reads it
def test_a_compiled_branch_runs_on_the_samples_of_eager_code_from_its_first_call() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(8, 4)
    inject(model, hookdrop.DropPath(0.5, mode="subset"), layers="0")
    outputs = []
    for run in (torch.compile(copy.deepcopy(model), backend="aot_eager"), model):
        torch.manual_seed(0)
        outputs.append(run(x))
    torch.testing.assert_close(*outputs)
    assert int((outputs[0] == 0).all(1).sum()) >= 4


class TestGradientEdits:
    def test_edits_in_code_of_inductor(self) -> None:
        """Norms that overflow float32, the factor 0 of non-finite gradients at the first step of a ramp, and noise."""
        edits = [hookdrop.ClipActivationGrad(max_norm=1.0), ScaleActivationGrad(-1), hookdrop.NoiseActivationGrad(1.0)]
        shapes = [(4, 4), (4,), (100_000,)]
        forward = lambda self, inputs: [site(x * 2.0) for site, x in zip(self.sites, inputs, strict=True)]
        model = toy(forward, sites=nn.ModuleList(nn.Identity() for _ in edits))
        drops = [inject(model, edit, layers=f"sites.{i}") for i, edit in enumerate(edits)]
        fast = torch.compile(model, fullgraph=True)

        def gradients(clip: float) -> list[Tensor]:
            inputs = [torch.rand(shape, requires_grad=True) for shape in shapes]
            given = [torch.full((4, 4), clip), NON_FINITE, torch.ones(100_000)]
            return list(torch.autograd.grad(fast(inputs), inputs, given))

        clipped, scaled, noisy = gradients(3e30)
        assert clipped.norm().item() == pytest.approx(2)
        torch.testing.assert_close(scaled, -2 * NON_FINITE, equal_nan=True)
        assert (noisy / 2).std().item() == pytest.approx(1, rel=4 / math.sqrt(2e5))
        assert gradients(math.inf)[0].isnan().all()
        assert graphs() == 1
        drops[1].target_p = 0.0
        assert torch.equal(gradients(1.0)[1], torch.zeros(4))

    @pytest.mark.parametrize("use_reentrant", [True, False])
    def test_compiled_checkpointing(self, use_reentrant: bool) -> None:
        model = doubling()
        inject(model, ScaleActivationGrad(-1), layers="inner")
        fast = torch.compile(lambda x: checkpoint(model, x, use_reentrant=use_reentrant), backend="aot_eager")
        torch.testing.assert_close(gradient_through(fast), -2 * G)
