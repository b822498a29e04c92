"""Scores, parameters, loss terms and Grad-CAM in compiled code, and code that recomputes the forward in the backward pass."""

import copy
import functools
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import vmap
from torch.overrides import _len_torch_function_stack
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import hookdrop
from hookdrop import DropBlock, Dropout, DropPath, GaussianDropout, HookdropWarning, LinearSchedule, Mixout, inject
from hookdrop.functional import drop_path
from hookdrop.kernels import random_numbers
from hookdrop.observe import grad_cam
from tests.integration.compile.test_compiled_regularizers import SKIP
from tests.support.compiling import Net, graphs
from tests.support.models import Small, toy
from tests.support.regularizers import OWN, Case
from tests.support.tensors import accelerate, styled, zero_fraction
from tests.support.training import gradients_of
from tests.unit.methods.test_score_hooks import hooked, written_out

# Warnings of PyTorch itself: if a graph takes a tensor with a history or resumes after a break; the other is of 2.6.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf", "ignore:Skipping serialization:UserWarning"
)


# --- attention scores


def attention(how: Callable[..., Tensor]) -> nn.Module:
    def forward(self: Any, x: Tensor) -> Tensor:
        q, k, v = self.into(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return how(q, k, v).transpose(1, 2).flatten(2)

    return toy(forward, into=nn.Linear(16, 48))


def multihead(**settings: bool) -> nn.Module:
    """`nn.MultiheadAttention`, which computes attention in one function."""
    inner = nn.MultiheadAttention(16, 2, batch_first=True)
    return toy(lambda self, x: self.inner(x, x, x, **settings)[0], inner=inner)


def breaking(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    y = F.scaled_dot_product_attention(q, k, v)
    torch._dynamo.graph_break()
    return y


LAYERS: list[Callable[[], nn.Module]] = [
    lambda: attention(partial(F.scaled_dot_product_attention, is_causal=True)),
    lambda: attention(written_out),
    lambda: multihead(need_weights=False),
    lambda: multihead(need_weights=True),
]


def step(call: Callable[[Tensor], Tensor], model: nn.Module) -> list[Tensor]:
    torch.manual_seed(3)
    y = call(torch.randn(2, 7, 16))
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [*model.parameters()])]


def test_one_graph_has_the_masks_and_gradients_of_eager_code_at_all_rates() -> None:
    model = nn.Sequential(*(make() for make in LAYERS), nn.Tanh())
    layers = [str(i) for i in range(len(LAYERS))]
    drop = inject(model, hookdrop.DropKey(0.4, calls=(True,)), layers=layers, schedule=LinearSchedule(4))
    fast = torch.compile(model, backend="aot_eager", fullgraph=True)
    for at in (1, 4):
        drop.seek(at)
        torch.testing.assert_close(step(fast, model), step(model, model))
    assert graphs() == 1
    model.eval()
    torch.testing.assert_close(step(fast, model), step(model, model))
    drop.remove()
    torch.testing.assert_close(step(fast, model), step(model, model))
    assert _len_torch_function_stack() == 0


def test_scores_are_regularized_once_if_the_graph_breaks_inside_the_layer() -> None:
    model = hooked(attention(breaking))
    fast = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        torch.testing.assert_close(step(fast, model), step(model, model))
    assert _len_torch_function_stack() == 0


def test_a_compiled_function_inside_an_uncompiled_layer() -> None:
    model = hooked(attention(torch.compile(written_out, backend="eager")))
    twin = hooked(attention(written_out))
    twin.load_state_dict(model.state_dict())
    torch.testing.assert_close(step(model, model), step(twin, twin))


def test_nothing_is_left_after_an_error() -> None:
    fails = [True]

    def failing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        if fails[0]:
            raise KeyboardInterrupt
        return F.scaled_dot_product_attention(q, k, v)

    model = hooked(attention(failing))
    fast = torch.compile(model, backend="eager")
    with pytest.raises(KeyboardInterrupt):
        fast(torch.randn(2, 7, 16))
    assert (torch.zeros(50, 50).softmax(-1) > 0).all()
    fails[0] = False
    fast(torch.randn(2, 7, 16))
    assert _len_torch_function_stack() == 0


def test_a_layer_without_scores_is_an_error() -> None:
    model = hooked(nn.Linear(16, 16))
    with pytest.raises(hookdrop.InjectionError, match="attention 0 times"):
        torch.compile(model, backend="eager")(torch.randn(2, 7, 16))
    with pytest.raises(Exception, match="attention 0 times"):
        torch.compile(model, backend="eager", fullgraph=True)(torch.randn(2, 7, 16))


class TestParameters:
    def test_compiled_layers_use_regularized_weights(self) -> None:
        """A dropped element of a weight has no gradient; its share is right within 4 standard errors."""
        model = nn.Sequential(nn.Linear(100, 100), nn.Tanh(), nn.Linear(100, 100))
        plain, x = copy.deepcopy(model), torch.randn(8, 100)
        given = {"0": Mixout(p=0.5), "2": Dropout(p=0.5)}
        drop = inject(model, given, at="parameters", schedule=LinearSchedule(10))
        fast = torch.compile(model, fullgraph=True)
        for step in (4, 10):
            drop.seek(step)
            model.zero_grad()
            fast(x).square().sum().backward()
            for layer in (model[0], model[2]):
                assert (layer.weight.grad == 0).float().mean() == pytest.approx(0.05 * step, abs=0.02)
                assert "weight" not in vars(layer)
        assert graphs() == 1
        model.eval()
        torch.testing.assert_close(fast(x), torch.compile(plain)(x), rtol=0, atol=0)

    @pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")  # at every hook on an LSTM
    def test_an_lstm_runs_uncompiled(self) -> None:
        """Dynamo breaks the graph at recurrent layers; the rest is compiled."""
        model = nn.Sequential(nn.LSTM(8, 50))
        inject(model, Dropout(p=0.5), layers="0", at="parameters", tensor="weight_hh_*")
        torch.compile(model, backend="aot_eager")(torch.randn(5, 3, 8))[0].sum().backward()
        assert (model[0].weight_hh_l0.grad == 0).float().mean() == pytest.approx(0.5, abs=0.02)
        assert (model[0].weight_ih_l0.grad == 0).float().mean() < 0.01

    def test_a_forward_that_is_compiled_alone_raises(self) -> None:
        """PyTorch runs the hooks of the outermost module outside of the graph, which would use the parameter as it is."""
        model = toy(lambda net, x: x @ net.weight, weight=nn.Parameter(torch.ones(50, 50)))
        drop = inject(model, Dropout(p=0.5), layers=model, at="parameters", schedule=LinearSchedule(1))
        fast = torch.compile(lambda x: model(x), backend="eager", fullgraph=True)
        for step in (0, 1):
            drop.seek(step)
            assert zero_fraction(fast(torch.eye(50))) == pytest.approx(0.5 * step, abs=0.05)
        with pytest.raises(hookdrop.InjectionError):
            torch.compile(model, backend="eager", fullgraph=True)(torch.eye(50))


# --- loss terms

X = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))


def penalized(**settings: object) -> tuple[nn.Sequential, hookdrop.Injection]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(inplace=True))
    return model, inject(model, hookdrop.ActivationPenalty(), layers=["0", "2"], **settings)


def test_one_graph_serves_all_rates_and_a_second_one_the_accumulation() -> None:
    model, drop = penalized(schedule=LinearSchedule(steps=3))
    fast = torch.compile(model, fullgraph=True)

    def loss(one: Callable[[Tensor], Tensor], forwards: int) -> Tensor:
        return sum((one(X * k).square().mean() for k in range(1, forwards + 1)), torch.zeros(())) + drop.penalty()

    for step in (1, 2, 3):
        drop.seek(step)
        expected = gradients_of(model, lambda: loss(model, 1))
        torch.testing.assert_close(gradients_of(model, lambda: loss(fast, 1)), expected)
        assert graphs() == 1
    for forwards in (2, 3, 1):
        expected = gradients_of(model, lambda n=forwards: loss(model, n))
        torch.testing.assert_close(gradients_of(model, lambda n=forwards: loss(fast, n)), expected)
        assert graphs() == 2


def test_eval_mode_disabled_no_grad_and_rate_0_collect_nothing() -> None:
    model, drop = penalized()
    fast = torch.compile(model, backend="eager", fullgraph=True)
    with drop.disabled():
        fast(X)
    with torch.no_grad():
        fast(X)
    model.eval()
    fast(X)
    model.train()
    drop.target_p = 0.0
    fast(X)
    assert drop.penalty() == 0


def test_a_checkpoint_inside_of_compiled_code_counts_once() -> None:
    """By default, PyTorch runs a checkpoint with side effects outside of the graph; the error names the setting."""
    part, drop = penalized()
    model = toy(lambda self, x: checkpoint(self.part, x, use_reentrant=False), part=part)
    expected = gradients_of(model, lambda: model(X).square().mean() + drop.penalty())
    broken = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(gradients_of(model, lambda: broken(X).square().mean() + drop.penalty()), expected)
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="skip_fwd_side_effects_in_bwd_under_checkpoint = True"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(X)
    with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True):
        whole = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(gradients_of(model, lambda: whole(X).square().mean() + drop.penalty()), expected)
    assert drop.penalty() == 0


def test_the_penalty_is_read_outside_of_the_compiled_function() -> None:
    model, drop = penalized()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(x: Tensor) -> Tensor:
        return model(x).square().mean() + drop.penalty()

    with pytest.raises(Exception, match=r"penalty\(\) cannot run inside a trace"):
        step(X)


# --- Grad-CAM


def test_grad_cam_of_compiled_and_data_parallel_models(model: Small, images: torch.Tensor) -> None:
    pytest.importorskip("pytorch_grad_cam")
    expected = grad_cam(model.eval(), images, "layer2")
    fast = torch.compile(model, backend="eager")
    fast(images)
    assert torch.equal(grad_cam(fast, images, "layer2"), expected)
    assert torch.equal(grad_cam(nn.DataParallel(model), images, "layer2"), expected)


config = torch._functorch.config
region_budget: Any = getattr(torch.autograd.graph, "region_activation_memory_budget", None)
PARTITIONED = "aot_eager_decomp_partition"
"""The fastest backend that recomputes."""

replays = pytest.mark.skipif(torch.__version__ < (2, 11), reason="this PyTorch cannot repeat random operators")

IN_GRAPHS = [case for case in reversed(OWN.values()) if not case.regularizer.graph_break]
ONE_OF_EACH = {type(c.regularizer): c for c in IN_GRAPHS if "output" in c.places or c.acts_on_scores}
CASES = {cls: case for cls, case in ONE_OF_EACH.items() if case.derives}
"""The others: gradient edits draw in the backward pass only, MixStyle and ShakeDrop are tested below."""


def low_budget(budget: float = 0.0) -> Any:
    return config.patch(activation_memory_budget=budget)


class Branches(nn.Module):
    """One branch for each case, so that all regularizers are in one graph.

    Few operations besides theirs, because a budget of 0.5 would recompute those first.
    """

    def __init__(self, cases: list[Case]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(case.layer for case in cases)
        for number, case in enumerate(cases):
            inject(self, case.regularizer, layers=f"branches.{number}", name=str(number))

    def forward(self, inputs: list[Tensor]) -> list[Tensor]:
        return [branch(x).square().sum() for branch, x in zip(self.branches, inputs, strict=True)]


@replays
@pytest.mark.parametrize("budget", [0.5, 0.0])
def test_gradients_match_finite_differences(budget: float) -> None:
    """The derivative along one direction, for the same masks. Float64, relative error at most 1e-6."""
    with low_budget(budget):
        fast = torch.compile(Branches(list(CASES.values())), backend=PARTITIONED, fullgraph=True)
        inputs = [case.input(torch.float64) for case in CASES.values()]
        directions = [torch.randn_like(x) for x in inputs]

        def at(distance: float) -> tuple[list[Tensor], list[Tensor]]:
            torch.manual_seed(11)
            moved = [(x + distance * d).requires_grad_() for x, d in zip(inputs, directions, strict=True)]
            return moved, fast(moved)

        moved, values = at(0.0)
        gradients = torch.autograd.grad(sum(values), moved)
        high, low = at(1e-5)[1], at(-1e-5)[1]
    for cls, gradient, direction, above, below in zip(CASES, gradients, directions, high, low, strict=True):
        expected = (above - below).item() / 2e-5
        assert (gradient * direction).sum().item() == pytest.approx(expected, rel=1e-6), cls
        assert expected, f"{cls}: choose a seed that keeps something"


def site() -> nn.Module:
    """tanh, then a site. The gradient depends on the numbers drawn there."""
    return toy(lambda self, x: self.site(x.tanh()), site=nn.Identity())


def check_gradient(call: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """For a site that multiplies, the gradient of the output's square is a function of the output."""
    x.requires_grad_()
    y = call(x)
    (gradient,) = torch.autograd.grad(y.square().sum(), x)
    t = x.detach().tanh()
    torch.testing.assert_close(gradient, 2 * y.detach() ** 2 * (1 - t * t) / t)


MULTIPLYING = {"DropBlock": DropBlock(0.4, 3), "GaussianDropout": GaussianDropout(0.4)}


@replays
@pytest.mark.filterwarnings("ignore")  # raised by the compiler
def test_one_graph_serves_all_rates_and_shapes() -> None:
    """Memory format and dtype are kept."""
    model = site()
    drop = inject(model, GaussianDropout(0.4), layers="site", schedule=LinearSchedule(4))
    with low_budget():
        fast = torch.compile(model, fullgraph=True, dynamic=True)
        for step in (1, 2, 3):
            drop.seek(step)
            check_gradient(fast, torch.ones(8 + step, 4, 8, 8))
        assert graphs() == 1
        x = torch.ones(4, 4, 8, 8, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
        y = torch.compile(DropBlock(0.4, 3), backend=PARTITIONED, fullgraph=True)(x.requires_grad_())
    assert (y.dtype, y.is_contiguous(memory_format=torch.channels_last)) == (torch.bfloat16, True)


@replays
def test_mixstyle_and_shake_drop() -> None:
    """MixStyle's gradient is the factor of each channel; ShakeDrop keeps the same samples in both passes."""
    model = toy(lambda self, x, ones: (self.mix(x), self.shake(ones)), mix=nn.Identity(), shake=nn.Identity())
    inject(model, {"mix": hookdrop.MixStyle(1.0, alpha=5.0), "shake": hookdrop.ShakeDrop(0.5)})
    x, ones = styled().double().requires_grad_(), torch.ones(1000, 2, requires_grad=True)
    with low_budget():
        y, shaken = torch.compile(model, backend=PARTITIONED, fullgraph=True)(x, ones)
        gradient, backward = torch.autograd.grad(y.sum() + shaken.sum(), (x, ones))
    factor = (y[..., :1, :1] - y[..., 1:2, 1:2]) / (x[..., :1, :1] - x[..., 1:2, 1:2])
    torch.testing.assert_close(gradient, factor.detach().expand_as(x))
    assert 400 < (shaken[:, 0] == 2).sum() < 600
    assert torch.equal(backward == 2, shaken == 2)


@replays
@pytest.mark.skipif(region_budget is None, reason="this PyTorch has no budgets for regions")
@pytest.mark.parametrize("covered", [True, False])
def test_region(covered: bool) -> None:
    """If regions may cover a part of the graph, their budget also applies to what was traced before them."""
    if not covered and not hasattr(config, "activation_memory_budget_require_full_coverage"):
        pytest.skip("in this PyTorch, regions must cover the whole graph")
    model = site()
    inject(model, DropPath(0.5), layers="site")

    def forward(x: Tensor) -> Tensor:
        with region_budget(0.0) if covered else nullcontext():
            y = model(x)
        with region_budget(0.0):
            return y * 1.0

    with nullcontext() if covered else config.patch(activation_memory_budget_require_full_coverage=False):
        check_gradient(torch.compile(forward, backend=PARTITIONED, fullgraph=True), torch.ones(64, 2))


class TestWarningsAndErrors:
    @pytest.mark.parametrize("theirs", [nn.RReLU(), nn.functional.dropout], ids=["module", "function"])
    def test_functions_of_other_libraries_in_the_graph_warn(self, theirs: Any) -> None:
        model = Net()
        inject(model, theirs, layers="inner")
        x = torch.ones(4, 4, requires_grad=True)
        torch.compile(model, backend=PARTITIONED)(x)
        torch.compiler.reset()
        with low_budget(), pytest.warns(HookdropWarning, match="at 'inner': with an activation_memory_budget below 1"):
            torch.compile(model, backend=PARTITIONED)(x)

    @pytest.mark.filterwarnings("ignore:The .grad attribute")  # raised by dynamo
    def test_modules_outside_the_graph_are_right(self) -> None:
        model = site()
        inject(model, nn.Dropout2d(0.5), layers="site")
        with low_budget():
            check_gradient(torch.compile(model, backend=PARTITIONED), torch.ones(8, 8, 2, 2))

    @pytest.mark.filterwarnings("ignore:Dynamo does not know")
    def test_transforms_need_a_budget_of_1(self) -> None:
        def slices(x: Tensor) -> Tensor:
            return vmap(lambda x: drop_path(x, 0.5), randomness="different")(x)

        self.check_unsupported(slices, torch.ones(3, 8, 4))

    @pytest.mark.filterwarnings("ignore:Dynamo does not know", "ignore:The .grad attribute")  # raised by dynamo
    def test_pytorch_before_2_11_needs_a_budget_of_1(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(random_numbers.internals, "can_replay_random_operators", lambda: False)
        model = site()
        inject(model, DropPath(0.5), layers="site")
        self.check_unsupported(model, torch.ones(64, 4))
        check_gradient(torch.compile(model, backend=PARTITIONED), torch.ones(64, 4))

    def check_unsupported(self, call: Callable[[Tensor], Tensor], x: Tensor) -> None:
        """An error that names the setting under fullgraph; otherwise the code runs uncompiled."""
        with low_budget():
            advice = "activation_memory_budget = 1, or remove fullgraph"
            with pytest.raises(torch._dynamo.exc.Unsupported, match=advice):
                torch.compile(call, backend="eager", fullgraph=True)(x)
            assert 0.0 < zero_fraction(torch.compile(call, backend="eager")(x)) < 1.0


def save_draws(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    random = torch.Tag.nondeterministic_seeded in getattr(operation, "tags", ())
    return CheckpointPolicy.MUST_SAVE if random else CheckpointPolicy.PREFER_RECOMPUTE


@replays
@pytest.mark.skipif(not hasattr(torch._dynamo.config, SKIP), reason=f"this PyTorch has no {SKIP}")
@pytest.mark.parametrize(
    ("policy", "budget", "name"),
    [
        (lambda *args, **kwargs: CheckpointPolicy.PREFER_RECOMPUTE, 1.0, "DropBlock"),
        (save_draws, 1.0, "GaussianDropout"),
        (save_draws, 0.0, "DropBlock"),
    ],
)
def test_selective_checkpointing(policy: Any, budget: float, name: str) -> None:
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    forward = lambda self, x: checkpoint(self.inner, x, use_reentrant=False, context_fn=contexts)
    model = toy(forward, inner=site())
    inject(model, MULTIPLYING[name], layers="inner.site")
    with low_budget(budget), torch._dynamo.config.patch({SKIP: True}):
        check_gradient(torch.compile(model, backend=PARTITIONED, fullgraph=True), torch.ones(4, 4, 8, 8))


def test_numbers_that_are_not_fused_have_the_right_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, where fused numbers are faulty in some versions of PyTorch."""
    monkeypatch.setattr(random_numbers, "_must_not_fuse", lambda device: True)
    model, x = nn.Sequential(nn.Identity(), nn.Identity()), torch.ones(64, 64, 12, 12)
    inject(model, {"0": hookdrop.Dropout2d(0.4), "1": hookdrop.UniformNoise(0.4)})
    y = torch.compile(model, backend=PARTITIONED, fullgraph=True)(x)
    assert zero_fraction(y[..., 0, 0]) == pytest.approx(0.4, abs=0.03)
    assert (y[y != 0] * (1 - 0.4)).std().item() * 3**0.5 == pytest.approx(0.4, abs=0.01)


@pytest.mark.skipif(torch.__version__ < (2, 14), reason="PyTorch 2.13 needs a CUDA device for fake CUDA tensors")
@pytest.mark.parametrize("faulty", [True, False])
def test_draws_on_cuda_are_fused_unless_that_is_faulty(faulty: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On fake tensors. If fused numbers are faulty, every regularizer draws by an operator that cannot be fused."""
    monkeypatch.setattr(random_numbers.internals, "has_faulty_random_kernels", lambda: faulty)
    accelerate(monkeypatch, "cuda")
    cases = list(ONE_OF_EACH.values()) if faulty else [ONE_OF_EACH[GaussianDropout]]
    drawing: set[Any] = set()

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        nodes = [node for part in graph.modules() for node in part.graph.nodes]
        drawing.update(node.target for node in nodes if "rand" in str(node.target))
        return graph

    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = [torch.empty(case.shape, device="cuda", requires_grad=True) for case in cases]
        torch.compile(Branches(cases), backend=backend, fullgraph=True)(inputs)
    assert drawing == {torch.ops.hookdrop.random_numbers.default if faulty else torch.randn_like}
