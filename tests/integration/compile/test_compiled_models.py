"""Compiled models: hooks take effect immediately, at the right rate."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hookdrop import Dropout, HookdropWarning, InjectionError, LinearSchedule, eject, inject, without_hooks
from hookdrop.diagnostics.training import UPDATES_BEFORE_WARNING
from tests.support.measures import zero_fraction

X = torch.ones(20_000)


def net() -> nn.Module:
    return nn.Sequential(nn.Identity(), nn.Identity())


def zeroed(call: nn.Module) -> float:
    return zero_fraction(call(X))


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")


def test_every_step_uses_the_scheduled_rate() -> None:
    model = net()
    drop = inject(model, Dropout(0.8), layers="0", schedule=LinearSchedule(20))
    fast = compiled(model)
    for step in range(0, 21, 2):
        drop.seek(step)
        assert zeroed(fast) == pytest.approx(0.8 * step / 20, abs=0.015)


@pytest.mark.parametrize("start", [0, 7])
def test_a_schedule_that_is_not_advancing_warns(start: int) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    drop = inject(model, Dropout(0.5), layers="0", schedule=LinearSchedule(1000))
    drop.seek(start)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    fast = compiled(model)

    def update(times: int) -> None:
        for _ in range(times):
            fast(torch.ones(2)).sum().backward()
            optimizer.step()

    with pytest.warns(
        HookdropWarning, match=f"still at step {start} of LinearSchedule.*its schedule is not advancing"
    ) as caught:
        update(3 * UPDATES_BEFORE_WARNING)
    assert len(caught) == 1
    assert any("its schedule is not advancing" in problem for problem in drop.check())


@pytest.mark.parametrize("theirs", [nn.Dropout(0.8), Dropout(0.8)], ids=repr)
def test_eval_has_no_graph_break_and_is_the_identity(theirs: nn.Module) -> None:
    model = net().eval()
    inject(model, theirs, layers="0", schedule=LinearSchedule(20))
    fast = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(fast(X), X)


def whole(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    return torch.compile(model, backend="eager")


def in_place(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    model.compile(backend="eager")
    return model


def by_regions(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    for block in model:
        block.compile(backend="eager")
    return model


def step_function(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    return torch.compile(lambda x: model(x), backend="eager")


@pytest.mark.parametrize("compile_", [whole, in_place, by_regions, step_function])
def test_hooks_placed_and_removed_after_compiling_take_effect_immediately(compile_: Callable[..., Any]) -> None:
    """PyTorch's guards notice them, without a warning."""
    model = net()
    fast = compile_(model)
    assert zeroed(fast) == 0
    for _ in range(2):
        drop = inject(model, Dropout(0.5), layers="0")
        assert zeroed(fast) == pytest.approx(0.5, abs=0.02)
        with without_hooks(model):
            assert zeroed(fast) == 0
        assert zeroed(fast) == pytest.approx(0.5, abs=0.02)
        drop.remove()
        assert zeroed(fast) == 0
    inject(model, Dropout(0.5), layers="1")
    assert zeroed(fast) > 0.4
    eject(model)
    assert zeroed(fast) == 0


def test_unrelated_compiled_models_are_not_recompiled() -> None:
    """The clean code of the model itself is also reused after `remove`."""
    compiled_graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Any:
        compiled_graphs.append(graph)
        return graph

    other = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), backend=backend)
    model = nn.Sequential(nn.Tanh())
    fast = torch.compile(model, backend=backend)

    def call() -> int:
        other(torch.ones(4))
        fast(X)
        return len(compiled_graphs)

    assert call() == 2
    drop = inject(model, Dropout(0.5), layers="0")
    assert call() == 3
    with without_hooks(model):
        assert call() == 3
    drop.remove()
    assert call() == 3


def run_program(code: str) -> None:
    done = subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_compiler_is_imported_only_when_something_is_compiled(tmp_path: Path) -> None:
    """The import takes about as long as that of PyTorch. (PyTorch's optimizers import it when they are created.)"""
    run_program(f"""
import sys, torch
from torch import nn
from hookdrop import DropBlock, Dropout, LinearSchedule, find, inject
model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(6, 6))
drop = inject(model, DropBlock(0.1, 3), layers="0", schedule=LinearSchedule(4), example_input=torch.ones(1, 3, 8, 8))
inject(model, nn.Dropout(0.5), layers="1")
model(torch.ones(1, 3, 8, 8)).sum().backward()
drop.step()
drop.probe(torch.ones(1, 3, 8, 8))
torch.save(model, {str(tmp_path / "model.pt")!r})
find(torch.load({str(tmp_path / "model.pt")!r}, weights_only=False)).step()
drop.remove()
assert "torch._dynamo" not in sys.modules
""")


def test_hooked_and_clean_models_do_not_share_code_if_hooked_before_importing_the_compiler() -> None:
    run_program("""
import torch
from torch import nn
from hookdrop import Dropout, inject
models = [nn.Sequential(nn.Identity()) for _ in range(2)]
inject(models[1], Dropout(0.5), layers="0")
clean, hooked = (torch.compile(model, backend="eager")(torch.ones(20_000)) for model in models)
assert (clean == 0).sum() == 0 and 0.4 < (hooked == 0).float().mean() < 0.6
""")


def test_code_compiled_before_importing_hookdrop_is_recompiled_once() -> None:
    run_program("""
import warnings, torch
from torch import nn
model = nn.Sequential(nn.Identity())
fast = torch.compile(model, backend="eager")
fast(torch.ones(20_000))
from hookdrop import Dropout, HookdropWarning, inject
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    drop = inject(model, Dropout(0.5), layers="0")
    assert 0.4 < (fast(torch.ones(20_000)) == 0).float().mean() < 0.6
    drop.remove()
    inject(model, Dropout(0.5), layers="0")
assert ["import hookdrop before the first compiled call" in str(w.message) for w in caught] == [True], caught
""")


def test_export_does_not_count_as_a_compiled_model() -> None:
    code = """
import warnings, torch
from torch import nn
from hookdrop import Dropout, inject
torch.export.export(nn.Sequential(nn.Linear(2, 2)).eval(), (torch.ones(1, 2),))
warnings.simplefilter("error", UserWarning)
inject(nn.Sequential(nn.Linear(2, 2)), Dropout(0.5), layers="0")
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_injecting_before_the_first_call_emits_no_warning() -> None:
    model = compiled(net())
    inject(model, Dropout(0.5), layers="0")
    assert zeroed(model) == pytest.approx(0.5, abs=0.02)


def test_contexts_and_enable_take_effect() -> None:
    model = net()
    drop = inject(model, Dropout(0.5), layers="0")
    fast = compiled(model)
    assert zeroed(fast) > 0.4
    with drop.disabled():
        assert zeroed(fast) == 0
    drop.disable()
    assert zeroed(fast) == 0
    drop.enable()
    model.eval()
    assert zeroed(fast) == 0
    with drop.sampling(p=0.2):
        assert zeroed(fast) == pytest.approx(0.2, abs=0.02)
    assert zeroed(fast) == 0


def test_measuring_and_probing_a_compiled_model() -> None:
    model = net()
    drop = inject(model, Dropout(0.5), layers="0")
    fast = compiled(model)
    fast(X)
    with drop.measuring() as m:
        fast(X)
    assert m.dropped == pytest.approx(0.5, abs=0.02)
    assert drop.probe(X).eval_identical


def test_inject_inside_a_trace_raises() -> None:
    model = net()

    def step(x: torch.Tensor) -> torch.Tensor:
        inject(model, Dropout(0.5), layers="0")
        return model(x)

    # The compiler wraps the error.
    with pytest.raises(torch._dynamo.exc.Unsupported, match="Observed exception|skip function nothing_placed"):
        torch.compile(step, backend="eager", fullgraph=True)(X)
    assert not model[0]._forward_hooks
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(InjectionError, match="inside a trace"):
            torch.jit.trace(step, X)


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # raised by dynamo at a graph break
def test_a_compiled_train_step_follows_the_optimizer() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    drop = inject(model, Dropout(0.5), layers="1", schedule=LinearSchedule(100))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    drop.follow(optimizer)
    fast = compiled(model)
    for _ in range(12):
        fast(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    assert drop.step_count == 12
