"""DropBlock in compiled code: one graph for all rates, the right rate, and the forward's mask in backward."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.func import grad, vmap
from torch.utils.checkpoint import checkpoint

from hookdrop import DropBlock, Dropout, HookdropWarning, LinearSchedule, ShapeError, inject
from hookdrop.dropblock import drop_block

X = torch.ones(16, 16, 20, 20)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


class Net(nn.Module):
    """x -> weight * D(x)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.weight


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def zeroed(y: torch.Tensor) -> float:
    return (y == 0).float().mean().item()


@pytest.mark.parametrize("settings", [{}, {"normalize": "expected"}, {"normalize": "sample"}, {"per_channel": False}])
def test_three_graphs_serve_a_thousand_steps(settings: dict[str, object]) -> None:
    """Training at rate 0, training above it, eval; with fullgraph, so that a graph break would be an error."""
    model = Net()
    drop = inject(model, DropBlock(0.4, 3, **settings), layers="inner", schedule=LinearSchedule(1000))
    fast = torch.compile(model, backend="aot_eager", fullgraph=True)
    small = torch.ones(2, 3, 8, 8)
    for step in range(1001):
        drop.seek(step)
        fast(small).sum().backward()
    model.eval()
    assert torch.equal(fast(X), X)
    assert graphs() == 3


def test_without_a_schedule_there_are_two() -> None:
    model = Net()
    inject(model, DropBlock(0.4, 3), layers="inner")
    fast = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(3):
        fast(X)
    model.eval()
    fast(X)
    assert graphs() == 2


RATES = """
import sys, torch
from torch import nn
from hookdrop import DropBlock, LinearSchedule, inject
model = nn.Sequential(nn.Identity(), nn.Hardtanh(0, 9))
drop = inject(model, DropBlock(float(sys.argv[1]), 3, normalize=None), layers="0", schedule=LinearSchedule(4))
fast = torch.compile(model, fullgraph=True)
x = torch.ones(32, 32, 20, 20, requires_grad=True)
for step in range(5):
    drop.seek(step)
    y = fast(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad == 0, y == 0)
    print((y == 0).float().mean().item())
"""


def test_the_right_rate_under_inductor_in_two_processes_that_share_a_cache(tmp_path: Path) -> None:
    """A rate that was compiled in would come out of the cache in the second process."""
    settings = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_FX_GRAPH_CACHE": "1"}
    for target in (0.4, 0.8):
        run = subprocess.run(
            [sys.executable, "-c", RATES, str(target)],
            env={**os.environ, **settings},
            check=True,
            capture_output=True,
            text=True,
        )
        realised = [float(line) for line in run.stdout.split()]
        assert realised == pytest.approx([target * step / 4 for step in range(5)], abs=0.015)
    assert any(tmp_path.iterdir())


@pytest.mark.parametrize("normalize", ["batch", "sample", "expected", None])
@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("p", [0.1, 0.95])
def test_compiled_is_eager_under_one_seed(normalize: str | None, per_channel: bool, p: float) -> None:
    """Forward and gradient, where seeds are rare and where they are not."""
    x = torch.randn(X.shape).requires_grad_()

    def both(call: object) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(3)
        y = call(x)  # type: ignore[operator]
        return y.detach(), torch.autograd.grad((y * y).sum(), x)[0]

    model = Net()
    inject(model, DropBlock(p, 5, normalize=normalize, per_channel=per_channel), layers="inner")
    for ours, theirs in zip(both(torch.compile(model, backend="aot_eager", fullgraph=True)), both(model), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_memory_format_comes_out_as_it_went_in(memory_format: torch.memory_format) -> None:
    x = X.contiguous(memory_format=memory_format)
    y = torch.compile(DropBlock(0.2, 3), backend="aot_eager", fullgraph=True)(x)
    assert y.is_contiguous(memory_format=memory_format)


def test_the_rate_may_change_between_forward_and_backward() -> None:
    model = Net()
    drop = inject(model, DropBlock(0.5, 3, normalize=None), layers="inner", schedule=LinearSchedule(10))
    fast = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = X.clone().requires_grad_()
    for step in range(1, 10):
        drop.seek(step)
        y = fast(x)
        drop.seek(10)
        (grad,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(grad == 0, y == 0)


def checkpointed(model: nn.Module, use_reentrant: bool, fullgraph: bool) -> None:
    drop = inject(model, DropBlock(0.5, 3, normalize=None), layers="inner", schedule=LinearSchedule(4))

    def step(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(model, x, use_reentrant=use_reentrant)

    fast = torch.compile(step, backend="aot_eager", fullgraph=fullgraph)
    for number in range(1, 5):
        drop.seek(number)
        x = X.clone().requires_grad_()
        y = fast(x)
        y.sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad == 0, y == 0)
        assert zeroed(y) == pytest.approx(0.5 * number / 4, abs=0.03)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_replays_the_mask(use_reentrant: bool) -> None:
    checkpointed(Net(), use_reentrant, fullgraph=False)


SKIP = "skip_fwd_side_effects_in_bwd_under_checkpoint"


@pytest.mark.skipif(not hasattr(torch._dynamo.config, SKIP), reason=f"this PyTorch has no {SKIP}")
def test_checkpointing_within_one_graph_wants_leave_to_note_calls_once() -> None:
    """A hook notes that it ran, which PyTorch wants to hear before it leaves that out of the recomputation."""
    with torch._dynamo.config.patch({SKIP: True}):
        checkpointed(Net(), use_reentrant=False, fullgraph=True)


def test_dynamic_shapes() -> None:
    fast = torch.compile(DropBlock(0.3, 3, normalize=None), backend="aot_eager", fullgraph=True, dynamic=True)
    for batch, size in ((16, 20), (24, 20), (17, 24), (32, 12)):
        assert zeroed(fast(torch.ones(batch, 16, size, size))) == pytest.approx(0.3, abs=0.02)


def test_one_and_three_axes_and_channels_last_by_name() -> None:
    for layer, shape in (
        (DropBlock(0.3, 3, channel_dim=1, normalize=None), (64, 8, 40)),
        (DropBlock(0.3, 3, normalize=None), (16, 8, 9, 10, 11)),
        (DropBlock(0.3, 3, channel_dim=-1, normalize=None), (16, 20, 20, 16)),
    ):
        fast = torch.compile(layer, backend="aot_eager", fullgraph=True)
        assert zeroed(fast(torch.ones(shape))) == pytest.approx(0.3, abs=0.03)


def test_a_plain_layer_keeps_its_rate() -> None:
    layer = DropBlock(0.3, 3, normalize=None)
    assert zeroed(torch.compile(layer, backend="aot_eager", fullgraph=True)(X)) == pytest.approx(0.3, abs=0.02)


@pytest.mark.parametrize("normalize", ["batch", "sample", "expected"])
@pytest.mark.parametrize("p", [0.3, 0.95])
def test_vmap_draws_a_mask_for_each_slice(normalize: str, p: float) -> None:
    def both(x: torch.Tensor) -> torch.Tensor:
        return vmap(lambda x: drop_block(x, p, 3, normalize=normalize), randomness="different")(x)

    y = torch.compile(both, backend="aot_eager", fullgraph=True)(torch.ones(5, 4, 8, 20, 20))
    assert len({tuple((slice == 0).flatten().tolist()) for slice in y}) == 5
    if normalize == "batch":
        torch.testing.assert_close(y.mean((1, 2, 3, 4)), torch.ones(5))


@pytest.mark.skipif(torch.__version__ < (2, 14), reason="PyTorch 2.13 and older refuse it")
@pytest.mark.filterwarnings("ignore")  # dynamo's, of what it does not trace
@pytest.mark.parametrize("p", [0.3, 0.95])
def test_gradients_of_slices_drop_whole_blocks(p: float) -> None:
    """Within `torch.func` transforms PyTorch leaves the graph, and traces what runs then."""
    each = vmap(grad(lambda x: drop_block(x, p, 3).sum()), randomness="different")
    y = torch.compile(lambda x: each(x), backend="aot_eager")(torch.ones(5, 4, 8, 20, 20))
    assert zeroed(y) == pytest.approx(p, abs=0.04)
    torch.testing.assert_close(y.mean((1, 2, 3, 4)), torch.ones(5))


def test_measuring_leaves_the_graph_and_comes_back() -> None:
    model = Net()
    drop = inject(model, DropBlock(0.3, 3), layers="inner")
    fast = torch.compile(model, backend="aot_eager")
    fast(X)
    with drop.measuring() as m:
        fast(X)
    assert m.dropped == pytest.approx(0.3, abs=0.03)
    assert zeroed(fast(X)) > 0.2
    before = graphs()
    assert zeroed(fast(X)) > 0.2
    assert graphs() == before


def test_a_shape_that_cannot_be_regularized_is_told() -> None:
    model = nn.Sequential(nn.Identity())
    inject(model, DropBlock(0.3, 3), layers="0")
    with pytest.raises(ShapeError, match="DropBlock at '0' got \\(2, 5, 8\\): tokens have no map"):
        torch.compile(model, backend="eager")(torch.ones(2, 5, 8))


def test_what_was_probably_not_meant_is_told_at_the_next_step() -> None:
    """Nothing can be said from within a graph."""
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


@pytest.mark.parametrize("regularizer", [DropBlock(0.4, 3), Dropout(0.4)], ids=repr)
@pytest.mark.parametrize("clean_first", [True, False])
def test_a_like_model_without_hooks_is_not_taken_for_it(regularizer: nn.Module, clean_first: bool) -> None:
    """A teacher and a student of one class: by default PyTorch does not look at hooks when it looks for compiled code."""
    clean, hooked = Net(), Net()
    inject(hooked, regularizer, layers="inner")
    calls = [(torch.compile(model, backend="eager"), rate) for model, rate in ((clean, 0.0), (hooked, 0.4))]
    for call, rate in 3 * (calls if clean_first else calls[::-1]):
        assert zeroed(call(X)) == pytest.approx(rate, abs=0.03)
