"""The private names of PyTorch that hookdrop uses still mean what it takes them for.

A failing test here says which name changed, and its docstring says what breaks.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from hookdrop.utils import torch_internals as internals
from tests.support.paths import ROOT


class Watching(TorchDispatchMode):
    """Notes the operations that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def in_a_backward(look: object) -> list[object]:
    """What `look` returns within a backward pass."""
    found: list[object] = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: found.append(look()))  # type: ignore[operator]
    y.sum().backward()
    return found


def test_every_name_has_a_test() -> None:
    names = set()
    for node in ast.parse(Path(internals.__file__).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        for target in getattr(node, "targets", [getattr(node, "target", None)]):
            names |= {target.id} if isinstance(target, ast.Name) else set()
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_torch_internals.py"))
    missing = [name for name in names if not name.startswith("_") and f"def test_{name}(" not in tests]
    assert len(names) > 15
    assert not missing, f"write a canary for each name of torch_internals.py: {missing}"


# --- modules


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.LazyBatchNorm2d])
def test_BatchNorm(kind: type[nn.Module]) -> None:
    """Without it a probe and a dry run leave changed running statistics behind, or don't know frozen batch norms."""
    assert issubclass(kind, internals.BatchNorm)
    assert not issubclass(nn.LayerNorm, internals.BatchNorm)


def test_children_of() -> None:
    """Without it a layer that its parent has under two names is found by one of them alone."""
    parent, shared = nn.Module(), nn.Linear(2, 2)
    parent.first, parent.second, parent.third = shared, shared, None
    assert list(internals.children_of(parent).items()) == [("first", shared), ("second", shared)]
    assert [name for name, _ in parent.named_children()] == ["first"]


def test_parameters_of() -> None:
    """Without it the first trained weight is looked for at every step."""
    layer = nn.Linear(2, 2, bias=False)
    assert internals.parameters_of(layer) == {"weight": layer.weight, "bias": None}


def test_buffers_of() -> None:
    """Without it a dry run cannot exchange buffers for copies, and leaves changed statistics behind."""
    norm, other = nn.BatchNorm1d(2), torch.ones(2)
    internals.buffers_of(norm)["running_mean"] = other
    assert norm.running_mean is other
    assert list(internals.buffers_of(norm)) == ["running_mean", "running_var", "num_batches_tracked"]


def test_HOOK_TABLES() -> None:
    """Without them hooks cannot be found on a copied or unpickled model, nor hidden for an export."""
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


def test_has_storage() -> None:
    """Without it the native loops write to the memory of a batch of gradients, which has none, and crash."""
    found = []
    x = torch.ones(3, requires_grad=True)

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            return x.clone()

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            found.append(internals.has_storage(grad))
            return grad

    torch.autograd.grad(Look.apply(x), x, torch.eye(3), is_grads_batched=True)
    assert internals.has_storage(torch.ones(2))
    assert found == [False]


def test_is_zero_tensor() -> None:
    """Without it the native loops read the memory of a gradient of 0, which has none."""
    zero = torch._efficientzerotensor((2,))
    assert internals.is_zero_tensor(zero)
    assert not internals.is_zero_tensor(torch.zeros(2))


def test_version_of() -> None:
    """Without it an update of the weights, or of a buffer in a dry run, goes unnoticed."""
    x = torch.ones(2)
    before = internals.version_of(x)
    x.add_(1)
    assert internals.version_of(x) == before + 1


# --- who watches or rewrites operations


def test_dispatch_modes() -> None:
    """Without it native loops run unseen by fake tensors, FLOP counters and traces of `make_fx`."""
    assert internals.dispatch_modes() == 0
    with Watching():
        assert internals.dispatch_modes() == 1


def test_is_tracing() -> None:
    """Without it `torch.jit.trace` keeps one mask for good, with no error."""
    found = []

    def function(x: Tensor) -> Tensor:
        found.append(internals.is_tracing())
        return x * 2

    torch.jit.trace(function, torch.ones(2), check_trace=False)
    assert not internals.is_tracing()
    assert found == [True]


def test_functorch_stack() -> None:
    """Without it `torch.func` transforms of a regularizer fail, or give all slices of a `vmap` one mask."""
    found = []

    def function(x: Tensor) -> Tensor:
        found.append(internals.functorch_stack() is not None)
        return x.sum()

    vmap(function)(torch.ones(2, 2))
    grad(function)(torch.ones(2))
    assert internals.functorch_stack() is None
    assert found == [True, True]


def test_without_dispatch_modes() -> None:
    """Without it a rate that is set under a fake-tensor mode is fake, and selective checkpoints see random states."""
    with Watching() as watching, internals.without_dispatch_modes():
        torch.ones(2).mul(2)
    assert watching.seen == []


def test_without_functorch() -> None:
    """Without it the random state can't be read inside of a `vmap`."""

    def function(x: Tensor) -> Tensor:
        with internals.without_functorch():
            torch.rand(1)
        with pytest.raises(RuntimeError, match="randomness error mode"):
            torch.rand(1)
        return x

    vmap(function, randomness="error")(torch.ones(2))


def test_forward_ad_level() -> None:
    """Without it forward-mode derivatives of DropBlock and Dropout raise: their fast autograd function has none."""
    assert internals.forward_ad_level() == -1
    with forward_ad.dual_level():
        assert internals.forward_ad_level() == 0
    assert internals.forward_ad_level() == -1


def test_is_proxy_tracing() -> None:
    """Without it a graph of `make_fx` keeps the number of seeds that its trace happened to draw."""
    found = []

    def function(x: Tensor) -> Tensor:
        found.append(internals.is_proxy_tracing())
        return x * 2

    make_fx(function)(torch.ones(2))
    with Watching():
        found.append(internals.is_proxy_tracing())
    assert found == [True, False]


def test_vmap_levels() -> None:
    """Without it nothing knows whether the slices of a `vmap` want one mask or one each."""
    found = []

    def function(x: Tensor) -> Tensor:
        found.extend((level.randomness(), level.batch_size()) for level in internals.vmap_levels())
        return x.sum()

    vmap(vmap(grad(function), randomness="same"), randomness="different")(torch.ones(2, 3, 4))
    assert found == [("different", 2), ("same", 3)]
    assert internals.vmap_levels() == []


def test_mark_vmap_slices() -> None:
    """Without it an input that all slices of a `vmap` share gets one mask, though each slice wants its own."""

    def function(shared: Tensor, _: Tensor) -> Tensor:
        (level,) = internals.vmap_levels()
        return shared + internals.mark_vmap_slices(torch.arange(3.0), level.level())

    y = vmap(function, in_dims=(None, 0), randomness="different")(torch.zeros(()), torch.ones(3))
    assert y.tolist() == [0.0, 1.0, 2.0]


# --- the backward pass


def test_number_of() -> None:
    """Without it forwards from one random state at two rates cannot be told apart when they are recomputed."""
    first, second = (torch.ones(2, requires_grad=True).exp() for _ in range(2))
    assert internals.number_of(first.grad_fn) < internals.number_of(second.grad_fn)


def test_graph_task() -> None:
    """Without it a checkpoint's second forward in the backward pass is taken for a new one, at the rate of now."""
    assert internals.graph_task() == -1
    assert in_a_backward(internals.graph_task) != [-1]


def test_sequence_number() -> None:
    """Without it two forwards from one random state are not told apart when a checkpoint runs one again."""
    before = internals.sequence_number()
    y = torch.ones(2, requires_grad=True) * 2
    assert y.grad_fn is not None
    assert y.grad_fn._sequence_nr() == before
    assert internals.sequence_number() == before + 1


def test_current_node() -> None:
    """Without it the same: it is the node whose backward runs the forward again."""
    found = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            return x.clone()

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            found.append((internals.current_node().name(), internals.current_node()._sequence_nr()))
            return grad

    before = internals.sequence_number()
    Look.apply(torch.ones(2, requires_grad=True)).sum().backward()
    assert found == [("LookBackward", before)]


def test_saved_tensors_hooks() -> None:
    """Without it every training forward counts as one of an activation checkpoint, and has its rate noted."""
    if internals.saved_tensors_hooks is None:
        assert torch.__version__ < (2, 8), "it is there since PyTorch 2.8"
        return
    found = []
    layer = nn.Linear(2, 2)

    def function(x: Tensor) -> Tensor:
        found.append(internals.saved_tensors_hooks(True) is not None)  # type: ignore[misc]
        return layer(x)

    function(torch.ones(2))
    checkpoint(function, torch.ones(2), use_reentrant=False)
    assert found == [False, True]


# --- distributed jobs


def test_default_store() -> None:
    """Without it ranks that have the same seed, and so draw the same masks, get no warning."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        internals.default_store().set("hookdrop/test", "note")
        assert internals.default_store().get("hookdrop/test") == b"note"
    finally:
        dist.destroy_process_group()
