"""Canary tests for the private PyTorch names that hookdrop uses.

A failing test shows which name changed, and its docstring explains what breaks without it.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from hookdrop.utils import torch_internals as internals
from tests.support.programs import ROOT


class RecordingMode(TorchDispatchMode):
    """Records the operations that it intercepts."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_every_name_has_a_canary_test() -> None:
    names = set()
    for node in ast.parse(Path(internals.__file__).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        for target in getattr(node, "targets", [getattr(node, "target", None)]):
            names |= {target.id} if isinstance(target, ast.Name) else set()
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_torch_internals.py"))
    missing = [
        name
        for name in names
        if not name.startswith("_") and not re.search(rf"def test_{name}|import .*\b{name}\b", tests)
    ]
    assert len(names) > 15
    assert not missing, f"write a canary for each name of torch_internals.py: {missing}"


# --- modules


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.LazyBatchNorm2d])
def test_BatchNorm(kind: type[nn.Module]) -> None:
    """Without it, probes and dry runs change running statistics, and frozen batch norms are not recognized."""
    assert issubclass(kind, internals.BatchNorm)
    assert not issubclass(nn.LayerNorm, internals.BatchNorm)


def test_children_of() -> None:
    """Without it, a layer that its parent holds under two names is found under only one of them."""
    parent, shared = nn.Module(), nn.Linear(2, 2)
    parent.first, parent.second, parent.third = shared, shared, None
    assert list(internals.children_of(parent).items()) == [("first", shared), ("second", shared)]
    assert [name for name, _ in parent.named_children()] == ["first"]


def test_parameters_of() -> None:
    """Without it, every step searches for the first trainable weight."""
    layer = nn.Linear(2, 2, bias=False)
    assert internals.parameters_of(layer) == {"weight": layer.weight, "bias": None}


def test_buffers_of() -> None:
    """Without it, a dry run cannot replace buffers by copies and changes the statistics."""
    norm, other = nn.BatchNorm1d(2), torch.ones(2)
    internals.buffers_of(norm)["running_mean"] = other
    assert norm.running_mean is other
    assert list(internals.buffers_of(norm)) == ["running_mean", "running_var", "num_batches_tracked"]


def test_full_backward_hooks_of() -> None:
    """A guard about per-sample gradients would never warn."""
    layer = nn.Linear(2, 2)
    handle = layer.register_full_backward_hook(lambda *_: None)
    assert list(internals.full_backward_hooks_of(layer)) == [handle.id]


def test_HOOK_TABLES() -> None:
    """Without them, hooks cannot be found on copied or unpickled models, or hidden for an export."""
    layer = nn.Linear(2, 2)
    layer.register_forward_hook(print, with_kwargs=True, always_call=True)
    layer.register_forward_pre_hook(print, with_kwargs=True)
    layer.register_forward_hook(print)
    sizes = {name: len(getattr(layer, name)) for main, more in internals.HOOK_TABLES for name in (main, *more)}
    assert sizes == {
        "_forward_hooks": 2,
        "_forward_hooks_with_kwargs": 1,
        "_forward_hooks_always_called": 1,
        "_forward_pre_hooks": 1,
        "_forward_pre_hooks_with_kwargs": 1,
    }
    assert {name for name in vars(layer) if name.startswith("_forward_")} == set(sizes)


# --- tensors


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


def test_has_storage() -> None:
    """Without it, the native loops write to batched gradients, which have no memory, and crash."""
    found: list[bool] = []
    x = torch.ones(3, requires_grad=True)
    y = Look.apply(x, lambda grad: found.append(internals.has_storage(grad)))
    torch.autograd.grad(y, x, torch.eye(3), is_grads_batched=True)
    assert internals.has_storage(torch.ones(2))
    assert found == [False]


def test_is_zero_tensor() -> None:
    """Without it, the native loops read all-zero gradients, which have no memory."""
    zero = torch._efficientzerotensor((2,))
    assert internals.is_zero_tensor(zero)
    assert not internals.is_zero_tensor(torch.zeros(2))


def test_version_of() -> None:
    """Without it, updates of weights, and of buffers in a dry run, go unnoticed."""
    x = torch.ones(2)
    before = internals.version_of(x)
    x.add_(1)
    assert internals.version_of(x) == before + 1


def test_storage_of() -> None:
    """Without it, a survey does not see that an in-place change of a view changes the tensor."""
    with internals.fake_tensors():
        x, other = torch.ones(2, 2), torch.ones(2, 2)
        assert internals.storage_of(x) == internals.storage_of(x[0]) != internals.storage_of(other)


# --- modes and transforms that intercept operations


class Tagged(torch.Tensor):
    """A subclass that wraps results, as MONAI's MetaTensor."""


TAGGED = torch.ones(2).as_subclass(Tagged)


def test_PLAIN_TYPES() -> None:
    assert {torch.Tensor, nn.Parameter} <= set(internals.PLAIN_TYPES)
    assert Tagged not in internals.PLAIN_TYPES


def test_wraps_results() -> None:
    assert internals.wraps_results(TAGGED)
    assert not internals.wraps_results(torch.ones(2))


def test_on_plain_tensor() -> None:
    """The function gets a plain tensor, and the subclass wraps the result."""
    seen = []
    y = internals.on_plain_tensor(lambda x: seen.append(type(x)) or x + 1, TAGGED)
    assert (seen, type(y)) == ([torch.Tensor], Tagged)


def test_fake_tensors() -> None:
    """Without it, a survey needs values: time and memory for the activations of the model."""
    layer = nn.Linear(3, 5)
    with internals.fake_tensors() as mode, torch.no_grad():
        y = layer(mode.from_tensor(torch.ones(2, 3)))
    assert y.shape == (2, 5)
    assert internals.version_of(y) == 0


def test_dispatch_modes() -> None:
    """Without it, native loops bypass fake tensors, FLOP counters and traces of `make_fx`."""
    assert internals.dispatch_modes() == 0
    with RecordingMode():
        assert internals.dispatch_modes() == 1


def looked(look: Callable[[], object], run: Callable[[Callable[[Tensor], Tensor]], object]) -> list[object]:
    """Return what `look` returns in each call of a function that `run` runs, with a sum as its result."""
    found: list[object] = []
    run(lambda x: found.append(look()) or x.sum())
    return found


def test_is_tracing() -> None:
    """Without it, `torch.jit.trace` silently records a fixed mask."""
    trace = lambda function: torch.jit.trace(function, torch.ones(2), check_trace=False)  # noqa: E731
    assert not internals.is_tracing()
    assert looked(internals.is_tracing, trace) == [True]


def test_functorch_stack() -> None:
    """Without it, `torch.func` transforms of a regularizer fail, or all slices of a `vmap` share one mask."""
    assert internals.functorch_stack() is None
    for run in (lambda function: vmap(function)(torch.ones(2, 2)), lambda function: grad(function)(torch.ones(2))):
        assert None not in looked(internals.functorch_stack, run)


def test_without_dispatch_modes() -> None:
    """Without it, rates set under a fake-tensor mode are fake, and selective checkpoints record RNG states."""
    with RecordingMode() as watching, internals.without_dispatch_modes():
        torch.ones(2).mul(2)
    assert watching.seen == []


def test_without_functorch() -> None:
    """Without it, the RNG state cannot be read inside `vmap`."""

    def function(x: Tensor) -> Tensor:
        with internals.without_functorch():
            torch.rand(1)
        with pytest.raises(RuntimeError, match="randomness error mode"):
            torch.rand(1)
        return x

    vmap(function, randomness="error")(torch.ones(2))


def test_forward_ad_level() -> None:
    """Without it, forward-mode AD of DropBlock and Dropout fails: their fast autograd functions do not support it."""
    assert internals.forward_ad_level() == -1
    with forward_ad.dual_level():
        assert internals.forward_ad_level() == 0
    assert internals.forward_ad_level() == -1


def test_is_proxy_tracing() -> None:
    """Without it, a `make_fx` graph has a fixed number of seeds: the number drawn during tracing."""
    assert looked(internals.is_proxy_tracing, lambda function: make_fx(function)(torch.ones(2))) == [True]
    with RecordingMode():
        assert not internals.is_proxy_tracing()


def test_vmap_randomness() -> None:
    """Without it, the `randomness` setting of `vmap` is unknown: one mask for all slices, or one each."""

    def run(function: Any) -> None:
        vmap(vmap(grad(function), randomness="same"), randomness="different")(torch.ones(2, 3, 4))

    assert looked(internals.vmap_randomness, run) == [("different", "same")]
    assert internals.vmap_randomness() == ()


# --- the backward pass


def test_node_sequence_number() -> None:
    """Without it, recomputed forwards with equal RNG states but different rates cannot be distinguished."""
    first, second = (torch.ones(2, requires_grad=True).exp() for _ in range(2))
    assert internals.node_sequence_number(first.grad_fn) < internals.node_sequence_number(second.grad_fn)


def test_graph_task() -> None:
    """Without it, a checkpoint's recompute counts as a new forward, at the current rate."""
    assert internals.graph_task() == -1
    found: list[int] = []
    Look.apply(torch.ones(2, requires_grad=True), lambda _: found.append(internals.graph_task())).sum().backward()
    assert found != [-1]


def test_sequence_number() -> None:
    """Without it, recomputed forwards with equal RNG states cannot be distinguished."""
    before = internals.sequence_number()
    y = torch.ones(2, requires_grad=True) * 2
    assert y.grad_fn is not None
    assert y.grad_fn._sequence_nr() == before
    assert internals.sequence_number() == before + 1


def test_current_node() -> None:
    """Without it, likewise: it is the node whose backward recomputes the forward."""
    found: list[tuple[str, int]] = []

    def look(_: Tensor) -> None:
        found.append((internals.current_node().name(), internals.current_node()._sequence_nr()))

    before = internals.sequence_number()
    Look.apply(torch.ones(2, requires_grad=True), look).sum().backward()
    assert found == [("LookBackward", before)]


def test_saved_tensors_hooks() -> None:
    """Without it, every training forward is treated as checkpointed, and its rate is remembered."""
    if internals.saved_tensors_hooks is None:
        assert torch.__version__ < (2, 8), "available since PyTorch 2.8"
        return
    hooks = internals.saved_tensors_hooks
    assert hooks(True) is None
    run = lambda function: checkpoint(lambda x: function(x).sin(), torch.ones(2), use_reentrant=False)  # noqa: E731
    assert None not in looked(lambda: hooks(True), run)


# --- the compiler (more in tests/integration/compile/test_torch_internals.py)


def test_recomputes_forward() -> None:
    """Without it, compiled code with a low activation memory budget has wrong gradients."""
    from torch._functorch import config

    assert not internals.recomputes_forward()
    for name, value in {
        "activation_memory_budget": 0.9,
        "activation_memory_budget_require_full_coverage": False,
    }.items():
        if hasattr(config, name):
            with config.patch({name: value}):
                assert internals.recomputes_forward()
    assert hasattr(config, "activation_memory_budget")


def test_can_replay_random_operators() -> None:
    """Without it, code that cannot be right compiles, or fails inside PyTorch."""
    assert internals.can_replay_random_operators() == (torch.__version__ >= (2, 11))
    assert not vmap(lambda x: x + internals.can_replay_random_operators())(torch.zeros(2)).any()


def test_constants_of_a_trace() -> None:
    """Without it, the compiler traces into these functions, and fails."""
    assert all(isinstance(function(), bool | tuple) for function in internals.constants_of_a_trace)


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


def test_was_loaded() -> None:
    """A resumed SGD has no other trace: its schedule would start over without a warning."""
    group = {"lr": 0.1, "params": [nn.Parameter(torch.ones(1))]}
    optimizer = torch.optim.SGD([group, {"params": [nn.Parameter(torch.ones(1))]}], 0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert not internals.was_loaded(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    assert internals.was_loaded(optimizer)


class Seeing(TorchFunctionMode):
    """Records the functions that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen.append(function.__name__)
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
    assert hidden.seen == ["multi_head_attention_forward"]
    assert "softmax" in shown.seen


def test_remove_function_mode() -> None:
    """Without it, a mode that a KeyboardInterrupt left would stay, or take another one along."""
    below, lost, above = Seeing(), Seeing(), Seeing()
    with below:
        lost.__enter__()
        with above:
            internals.remove_function_mode(lost)
            torch.ones(1).neg()
    assert "neg" in above.seen
    assert "neg" in below.seen
    assert not lost.seen
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
