"""Compiled models: hooks take effect at once, at the right rate; eager is promised, graph breaks are allowed."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from hookdrop import Dropout, HookdropWarning, InjectionError, LinearSchedule, eject, inject, without_hooks
from hookdrop.diagnostics.training import UPDATES_TO_JUDGE

X = torch.ones(20_000)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def net() -> nn.Module:
    return nn.Sequential(nn.Identity(), nn.Identity())


def zeroed(call: nn.Module) -> float:
    return (call(X) == 0).float().mean().item()


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")


def test_the_rate_of_every_step_is_right() -> None:
    model = net()
    drop = inject(model, Dropout(0.8), layers="0", schedule=LinearSchedule(20))
    fast = compiled(model)
    for step in range(0, 21, 2):
        drop.seek(step)
        assert zeroed(fast) == pytest.approx(0.8 * step / 20, abs=0.015)


@pytest.mark.parametrize("start", [0, 7])
def test_a_schedule_that_nobody_drives_is_told(start: int) -> None:
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
        update(3 * UPDATES_TO_JUDGE)
    assert len(caught) == 1
    assert any("its schedule is not advancing" in problem for problem in drop.check())


@pytest.mark.parametrize("theirs", [nn.Dropout(0.8), Dropout(0.8)], ids=repr)
def test_eval_has_no_graph_break_and_is_the_clean_models(theirs: nn.Module) -> None:
    model = net().eval()
    inject(model, theirs, layers="0", schedule=LinearSchedule(20))
    fast = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(fast(X), X)


def test_hooks_placed_and_removed_after_the_first_call_are_noticed_at_once() -> None:
    model = net()
    fast = compiled(model)
    assert zeroed(fast) == 0
    for _ in range(2):
        with pytest.warns(HookdropWarning, match=r"torch.compiler.reset\(\)"):
            drop = inject(fast, Dropout(0.5), layers="0")
        assert zeroed(fast) == pytest.approx(0.5, abs=0.02)
        with without_hooks(fast):
            assert zeroed(fast) == 0
        assert zeroed(fast) == pytest.approx(0.5, abs=0.02)
        with pytest.warns(HookdropWarning, match="compile"):
            drop.remove()
        assert zeroed(fast) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HookdropWarning)
        inject(model, Dropout(0.5), layers="1")
        assert zeroed(fast) > 0.4
        eject(model)
    assert zeroed(fast) == 0


def test_an_export_is_not_taken_for_a_compiled_model() -> None:
    code = """
import warnings, torch
from torch import nn
from hookdrop import Dropout, inject
torch.export.export(nn.Sequential(nn.Linear(2, 2)).eval(), (torch.ones(1, 2),))
warnings.simplefilter("error", UserWarning)
inject(nn.Sequential(nn.Linear(2, 2)), Dropout(0.5), layers="0")
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_injecting_before_the_first_call_warns_of_nothing() -> None:
    model = compiled(net())
    inject(model, Dropout(0.5), layers="0")
    assert zeroed(model) == pytest.approx(0.5, abs=0.02)


def test_contexts_and_switches_are_noticed() -> None:
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


def test_inside_a_trace_it_is_an_error() -> None:
    model = net()

    def step(x: torch.Tensor) -> torch.Tensor:
        inject(model, Dropout(0.5), layers="0")
        return model(x)

    # The compiler wraps what it meets in an error of its own.
    with pytest.raises(torch._dynamo.exc.Unsupported, match="Observed exception|skip function nothing_placed"):
        torch.compile(step, backend="eager", fullgraph=True)(X)
    assert not model[0]._forward_hooks
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(InjectionError, match="inside a trace"):
            torch.jit.trace(step, X)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's, at a graph break
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
