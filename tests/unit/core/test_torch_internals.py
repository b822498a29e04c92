"""Canary tests for the private PyTorch names that hookdrop uses.

A failing test shows which name changed, and its docstring explains what breaks without it.
"""

import ast
import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint

from hookdrop.core import torch_internals as internals
from tests.support.models import toy
from tests.support.programs import ROOT
from tests.support.tensors import Operations


class Look(torch.autograd.Function):
    """Calls a function with the gradient in the backward pass."""

    @staticmethod
    def forward(ctx, x, look):  # type: ignore[no-untyped-def]
        ctx.look = look
        return x.clone()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        ctx.look(grad)
        return grad, None


class Tagged(torch.Tensor):
    """A subclass that wraps results, as MONAI's MetaTensor."""


def inside(context: AbstractContextManager[Any], look: Callable[[], Any]) -> Any:
    with context:
        return look()


def hides(mode: Any, context: AbstractContextManager[Any]) -> bool:
    with mode, context:
        torch.ones(2)
    return not mode.names


def inside_a_call(look: Callable[[], Any], run: Callable[[Callable[[Tensor], Tensor]], object]) -> Any:
    """Return what `look` returns in the call of a function that `run` runs, with a sum as its result."""
    found: list[Any] = []
    run(lambda x: found.append(look()) or x.sum())
    return found[0]


def inside_backward(look: Callable[[Tensor], Any], **settings: Any) -> Any:
    """Return what `look` returns for the gradient in a backward pass."""
    x, found = torch.ones(3, requires_grad=True), []
    y = Look.apply(x, lambda gradient: found.append(look(gradient)))
    torch.autograd.grad(y, x, torch.eye(3) if settings else torch.ones(3), **settings)
    return found[0]


def checkpointed(function: Callable[[Tensor], Tensor]) -> Tensor:
    return checkpoint(lambda x: function(x).sin(), torch.ones(2), use_reentrant=False)


BATCH_NORMS = [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.LazyBatchNorm2d]
TAGGED = torch.ones(2).as_subclass(Tagged)
CANARIES: dict[str, Callable[[], object]] = {
    # Without it, experiments on a model without values fail.
    "is_fake": lambda: not internals.is_fake(torch.ones(2)) and internals.is_fake(FakeTensorMode().from_tensor(torch.ones(2))),
    # Without it, probes and dry runs change running statistics, and frozen batch norms are not recognized.
    "BatchNorm": lambda: (
        all(issubclass(kind, internals.BatchNorm) for kind in BATCH_NORMS)
        and not issubclass(nn.LayerNorm, internals.BatchNorm)
    ),
    # Without it, a layer that its parent holds under two names is found under only one of them.
    "children_of": lambda: (
        list(internals.children_of(toy(torch.neg, first=(one := nn.Linear(2, 2)), second=one))) == ["first", "second"]
    ),
    # Without it, every step searches for the first trainable weight.
    "parameters_of": lambda: (
        internals.parameters_of(layer := nn.Linear(2, 2, bias=False)) == {"weight": layer.weight, "bias": None}
    ),
    # Without it, a dry run cannot replace buffers by copies and changes the statistics.
    "buffers_of": lambda: (
        internals.buffers_of(norm := nn.BatchNorm1d(2)).update(running_mean=(other := torch.ones(2))) is None
        and norm.running_mean is other
    ),
    # Without it, a guard about per-sample gradients would never warn.
    "full_backward_hooks_of": lambda: (
        [(layer := nn.Linear(2, 2)).register_full_backward_hook(lambda *_: None).id]
        == list(internals.full_backward_hooks_of(layer))
    ),
    # Without it, the native loops write to batched gradients, which have no memory, and crash.
    "has_storage": lambda: (
        internals.has_storage(torch.ones(2)) and not inside_backward(internals.has_storage, is_grads_batched=True)
    ),
    # Without it, the native loops read all-zero gradients, which have no memory.
    "is_zero_tensor": lambda: (
        internals.is_zero_tensor(torch._efficientzerotensor((2,))) and not internals.is_zero_tensor(torch.zeros(2))
    ),
    # Without it, updates of weights, and of buffers in a dry run, go unnoticed.
    "version_of": lambda: internals.version_of(x := torch.ones(2)) + 1 == internals.version_of(x.add_(1)),
    # Without it, a survey does not see that an in-place change of a view changes the tensor.
    "storage_of": lambda: inside(
        internals.fake_tensors(),
        lambda: (at := internals.storage_of)(x := torch.ones(2, 2)) == at(x[0]) != at(torch.ones(2, 2)),
    ),
    # Without them, tensor subclasses are not recognized, and lose their class and metadata.
    "PLAIN_TYPES": lambda: {torch.Tensor, nn.Parameter} <= set(internals.PLAIN_TYPES) and Tagged not in internals.PLAIN_TYPES,
    "wraps_results": lambda: internals.wraps_results(TAGGED) and not internals.wraps_results(torch.ones(2)),
    "on_plain_tensor": lambda: (
        type(internals.on_plain_tensor(lambda x: x + (type(x) is torch.Tensor), TAGGED)) is Tagged
        and internals.on_plain_tensor(lambda x: x + (type(x) is torch.Tensor), TAGGED).sum() == 4
    ),
    # Without it, a survey needs values: time and memory for the activations of the model.
    "fake_tensors": lambda: (
        inside(internals.fake_tensors(), lambda: type(nn.Linear(3, 5)(torch.ones(2, 3))).__name__) == "FakeTensor"
    ),
    # Without it, native loops bypass fake tensors, FLOP counters and traces of `make_fx`.
    "dispatch_modes": lambda: (internals.dispatch_modes(), inside(Operations(), internals.dispatch_modes)) == (0, 1),
    # Without it, rates set under a fake-tensor mode are fake, and selective checkpoints record RNG states.
    "without_dispatch_modes": lambda: hides(Operations(), internals.without_dispatch_modes()),
    # Without these, the survey records operations inside those that it sees, and each reading of a version.
    "without_function_modes": lambda: hides(Seeing(), internals.without_function_modes()),
    "without_dispatch_mode": lambda: hides(Operations(), internals.without_dispatch_mode()),
    # Without it, `torch.jit.trace` silently records a fixed mask.
    "is_tracing": lambda: (
        not internals.is_tracing()
        and inside_a_call(internals.is_tracing, lambda function: torch.jit.trace(function, torch.ones(2), check_trace=False))
    ),
    # Without it, `torch.func` transforms of a regularizer fail, or all slices of a `vmap` share one mask.
    "functorch_stack": lambda: (
        internals.functorch_stack() is None
        and inside_a_call(internals.functorch_stack, lambda function: vmap(function)(torch.ones(2, 2))) is not None
        and inside_a_call(internals.functorch_stack, lambda function: grad(function)(torch.ones(2))) is not None
    ),
    # Without it, forward-mode AD of DropBlock and Dropout fails: their fast autograd functions do not support it.
    "forward_ad_level": lambda: (internals.forward_ad_level(), inside(forward_ad.dual_level(), internals.forward_ad_level)) == (-1, 0),
    # Without it, a `make_fx` graph has a fixed number of seeds: the number drawn during tracing.
    "is_proxy_tracing": lambda: (
        inside_a_call(internals.is_proxy_tracing, lambda function: make_fx(function)(torch.ones(2)))
        and not inside(Operations(), internals.is_proxy_tracing)
    ),
    # Without it, the `randomness` setting of `vmap` is unknown: one mask for all slices, or one each.
    "vmap_randomness": lambda: (
        internals.vmap_randomness(),
        inside_a_call(
            internals.vmap_randomness,
            lambda run: vmap(vmap(grad(run), randomness="same"), randomness="different")(torch.ones(2, 3, 4)),
        ),
    ) == ((), ("different", "same")),
    # Without these, recomputed forwards with equal RNG states but different rates cannot be distinguished.
    "sequence_number": lambda: (
        internals.sequence_number() == internals.node_sequence_number((torch.ones(2, requires_grad=True) * 2).grad_fn)
    ),
    "node_sequence_number": lambda: (
        (number := internals.node_sequence_number)(torch.ones(2, requires_grad=True).exp().grad_fn)
        < number(torch.ones(2, requires_grad=True).exp().grad_fn)
    ),
    "current_node": lambda: inside_backward(lambda _: internals.current_node().name()) == "LookBackward",
    # Without it, a checkpoint's recompute counts as a new forward, at the current rate.
    "graph_task": lambda: internals.graph_task() == -1 != inside_backward(lambda _: internals.graph_task()),
    # Without it, a checkpoint inside a sampled module recomputes without the dropout.
    "at_end_of_backward": lambda: inside_backward(lambda _: internals.at_end_of_backward(list)) is None,
    # Without it (since PyTorch 2.8), every training forward is treated as checkpointed, and its rate is remembered.
    "saved_tensors_hooks": lambda: (
        torch.__version__ < (2, 8)
        if (hooks := internals.saved_tensors_hooks) is None
        else hooks(True) is None and inside_a_call(lambda: hooks(True), checkpointed) is not None
    ),
    # Without it, code that cannot be right compiles, or fails inside PyTorch.
    "can_replay_random_operators": lambda: (
        internals.can_replay_random_operators() == (torch.__version__ >= (2, 11))
        and not vmap(lambda x: x + internals.can_replay_random_operators())(torch.zeros(2)).any()
    ),
    # Without it, the compiler traces into these functions, and fails.
    "constants_of_a_trace": lambda: all(isinstance(one(), bool | tuple) for one in internals.constants_of_a_trace),
}  # fmt: skip


@pytest.mark.parametrize("name", CANARIES)
def test_name(name: str) -> None:
    assert CANARIES[name]()


def test_every_name_has_a_canary_test() -> None:
    names = set()
    for node in ast.parse(Path(internals.__file__).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        for target in getattr(node, "targets", [getattr(node, "target", None)]):
            names |= {target.id} if isinstance(target, ast.Name) else set()
    compiled = ROOT / "tests" / "integration" / "compile" / "test_compiled_models.py"
    tests = Path(__file__).read_text() + compiled.read_text()
    pattern = r'def test_{0}|import .*\b{0}\b|^    "{0}": '
    missing = [name for name in names if name[0] != "_" and not re.search(pattern.format(name), tests, re.M)]
    assert len(names) > 15
    assert not missing, f"write a canary for each name of torch_internals.py: {missing}"


def test_HOOK_TABLES() -> None:
    """Without them, hooks cannot be found on copied or unpickled models, or hidden for an export."""
    layer = nn.Linear(2, 2)
    layer.register_forward_hook(print, with_kwargs=True, always_call=True)
    layer.register_forward_pre_hook(print, with_kwargs=True)
    layer.register_forward_hook(print)
    sizes = {name: len(getattr(layer, name)) for main, more in internals.HOOK_TABLES for name in (main, *more)}
    assert sizes == dict.fromkeys(sizes, 1) | {"_forward_hooks": 2}
    assert {name for name in vars(layer) if name.startswith("_forward_")} == set(sizes)


def test_global_forward_hooks() -> None:
    """Without them, a hook on all modules gets tensors without values, and may keep them."""
    register = nn.modules.module.register_module_forward_pre_hook, nn.modules.module.register_module_forward_hook
    for function, table in zip(register, internals.global_forward_hooks, strict=True):
        with function(print) as handle:
            assert handle.id in table


def test_without_functorch() -> None:
    """Without it, the RNG state cannot be read inside `vmap`."""

    def function(x: Tensor) -> Tensor:
        with internals.without_functorch():
            torch.rand(1)
        with pytest.raises(RuntimeError, match="randomness error mode"):
            torch.rand(1)
        return x

    vmap(function, randomness="error")(torch.ones(2))


# --- the compiler (more in tests/integration/compile/test_compiled_models.py)


def test_recomputes_forward() -> None:
    """Without it, compiled code with a low activation memory budget has wrong gradients."""
    from torch._functorch import config

    assert not internals.recomputes_forward()
    settings = {"activation_memory_budget": 0.9, "activation_memory_budget_require_full_coverage": False}
    for name, value in settings.items():
        if hasattr(config, name):
            with config.patch({name: value}):
                assert internals.recomputes_forward()
    assert hasattr(config, "activation_memory_budget")


@pytest.mark.parametrize(
    ("version", "faulty"), [("2.12.1", False), ("2.13.0+cpu", True), ("2.14.1", True), ("2.15.0", False)]
)
def test_has_faulty_random_kernels(version: str, faulty: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, masks on CUDA repeat, and gradients are those of other masks."""
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    monkeypatch.setitem(sys.modules, "torch._inductor.config", SimpleNamespace())
    assert internals.has_faulty_random_kernels() == faulty


@pytest.mark.skipif(torch.__version__ < (2, 15), reason="since PyTorch 2.15")
def test_setting_of_faulty_random_kernels() -> None:
    """Likewise, if the setting is on."""
    from torch._inductor import config

    assert not internals.has_faulty_random_kernels()
    with config.patch(use_rand4x=True):
        assert internals.has_faulty_random_kernels()


# --- distributed jobs


def test_default_store() -> None:
    """Without it, ranks with equal seeds, which draw identical masks, are not reported."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        internals.default_store().set("hookdrop/test", "note")
        assert internals.default_store().get("hookdrop/test") == b"note"
    finally:
        dist.destroy_process_group()


class Seeing(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(function.__name__)
        return function(*args, **(kwargs or {}))


def test_opened() -> None:
    """Without it, DropKey cannot reach the scores of `nn.MultiheadAttention`."""
    x, weight = torch.randn(4, 2, 8), torch.randn(24, 8)
    rest = (8, 2, weight, None, None, None, False, 0.0, torch.randn(8, 8), None)
    function = nn.functional.multi_head_attention_forward
    with Seeing() as hidden:
        expected = function(x, x, x, *rest)
    with Seeing() as shown:
        found = internals.opened(function)(x, x, x, *rest)
    torch.testing.assert_close(found, expected)
    assert hidden.names == ["multi_head_attention_forward"]
    assert "softmax" in shown.names


def test_remove_function_mode() -> None:
    """Without it, a mode that a KeyboardInterrupt left would stay, or take another one along."""
    below, lost, above = Seeing(), Seeing(), Seeing()
    with below:
        lost.__enter__()
        with above:
            internals.remove_function_mode(lost)
            torch.ones(1).neg()
    assert "neg" in above.names
    assert "neg" in below.names
    assert not lost.names
    internals.remove_function_mode(lost)  # a mode that is not there


def test_skip_frames_of() -> None:
    """Without it, a hook that compiled code calls between two graphs would be compiled alone."""
    found = []

    def alone(x: Tensor) -> Tensor:
        found.append(torch.compiler.is_compiling())
        return x + 1

    def call(x: Tensor) -> Tensor:
        return alone(x)

    internals.skip_frames_of(alone)
    torch.compile(alone, backend="eager")(torch.ones(1))
    assert found == [False]
    assert torch.compile(call, backend="eager", fullgraph=True)(torch.ones(1)) == 2
    assert found[1] is True


def test_runs_compiled_code() -> None:
    """Without it, a forward that is compiled alone ignores the regularized parameters of its module."""
    seen = []

    def hook(*call: object) -> None:
        seen.append(internals.runs_compiled_code())

    model = toy(lambda net, x: net.relu(x), relu=nn.ReLU())
    model.register_forward_pre_hook(hook)
    torch.compile(lambda x: x, backend="eager")(torch.ones(2))
    internals.skip_frames_of(hook, internals.runs_compiled_code)
    model(torch.ones(2))
    torch.compile(model, backend="eager")(torch.ones(2))
    assert seen == [False, True]
