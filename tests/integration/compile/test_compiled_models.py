"""Compiled models: hooks take effect immediately, at the right rate."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookdrop import DropBlock, Dropout, HookdropWarning, InjectionError, LinearSchedule, find, inject, without_hooks
from hookdrop.core.torch_internals import disable_dynamo
from hookdrop.guards.progress import UPDATES_BEFORE_WARNING
from hookdrop.recipes import set_dropout
from tests.support.compiling import graphs
from tests.support.leaks import no_leaks
from tests.support.models import toy, without_zeros
from tests.support.programs import run_code
from tests.support.tensors import X, zero_fraction, zeroed
from tests.support.training import optimize


def net() -> nn.Module:
    return nn.Sequential(nn.Identity(), nn.Identity())


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")


def test_a_schedule_that_is_not_advancing_warns() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    drop = inject(model, Dropout(0.5), layers="0", schedule=LinearSchedule(1000))
    with pytest.warns(HookdropWarning, match="still at step 0 of LinearSchedule") as caught:
        optimize(compiled(model), 3 * UPDATES_BEFORE_WARNING)
    assert len(caught) == 1
    assert any("its schedule is not advancing" in problem for problem in drop.check())


ONE_GRAPH = {"backend": "aot_eager", "fullgraph": True}
WAYS: dict[str, Callable[[nn.Module], Callable[[Tensor], Tensor]]] = {
    "the model": partial(torch.compile, **ONE_GRAPH),
    "in place": lambda model: model.compile(**ONE_GRAPH) or model,
    "by regions": lambda model: [block.compile(**ONE_GRAPH) for block in model] and model,
    "a step function": lambda model: torch.compile(lambda x: model(x) * 1.0, **ONE_GRAPH),
}


@pytest.mark.parametrize(
    ("way", "regularizer"), [("the model", DropBlock(0.5, 3, normalize=None)), *((way, Dropout(0.5)) for way in WAYS)]
)
def test_hooks_placed_and_removed_after_compiling_take_effect_immediately(way: str, regularizer: Any) -> None:
    """PyTorch's guards notice them, without a warning, a graph break or a new batch size."""
    model = net()
    fraction = partial(zeroed, WAYS[way](model), torch.ones(64, 64, 12, 12))

    assert fraction() == 0
    for _ in range(2):
        drop = inject(model, regularizer, layers="0")
        assert fraction() == pytest.approx(0.5, abs=0.02)
        with without_hooks(model):
            assert fraction() == 0
        assert fraction() == pytest.approx(0.5, abs=0.02)
        with drop.disabled():
            assert fraction() == 0
        drop.target_p = 0.2
        assert fraction() == pytest.approx(0.2, abs=0.02)
        model.eval()
        assert fraction() == 0
        with drop.sampling(p=0.1):
            assert fraction() == pytest.approx(0.1, abs=0.02)
        model.train()
        drop.remove()
        assert fraction() == 0
    inject(model, regularizer, layers="1")
    assert fraction() > 0.4
    find(model).remove()
    assert fraction() == 0


def test_unrelated_compiled_models_are_not_recompiled() -> None:
    """The clean code of the model itself is also reused after `remove`."""
    other, model = compiled(nn.Sequential(nn.Linear(4, 4), nn.Tanh())), nn.Sequential(nn.Tanh())
    fast = compiled(model)

    def call() -> int:
        other(torch.ones(4))
        fast(X)
        return graphs()

    assert call() == 2
    drop = inject(model, Dropout(0.5), layers="0")
    assert call() == 3
    with without_hooks(model):
        assert call() == 3
    drop.remove()
    assert call() == 3


def test_hooked_and_clean_models_do_not_share_code_if_hooked_before_importing_the_compiler() -> None:
    """Without `torch._dynamo` as the compiler's name, functions that must stay eager are compiled.

    Importing it takes as long as importing PyTorch, so `disable_dynamo` is not `torch.compiler.disable`, which imports it.
    """
    run_code("""
import sys
import torch
from torch import nn
from hookdrop import Dropout, inject
from hookdrop.core.torch_internals import compiler_is_imported, disable_dynamo, when_compiler_is_imported

models = [nn.Sequential(nn.Identity()) for _ in range(2)]
inject(models[1], Dropout(0.5), layers="0")
disable_dynamo(lambda x: x)
found, finders = [], len(sys.meta_path)
when_compiler_is_imported(lambda: found.append(callable(torch._dynamo.disable)))
assert found == []
assert not compiler_is_imported() and "torch._dynamo" not in sys.modules
clean, hooked = (torch.compile(model, backend="eager")(torch.ones(20_000)) for model in models)
assert (clean == 0).sum() == 0 and 0.4 < (hooked == 0).float().mean() < 0.6
assert found == [True] and compiler_is_imported(), "called once, after the module is fully imported"
assert len(sys.meta_path) < finders, "hookdrop's finders were not removed"
when_compiler_is_imported(lambda: found.append("at once"))
assert found == [True, "at once"]
""", "-W", "error::UserWarning")  # fmt: skip


def test_code_compiled_before_importing_hookdrop_is_recompiled_once() -> None:
    """Without guards on hooks, a hook that is placed after the first compiled call never runs.

    Without the names that `enable_hook_guards` reads, code compiled before importing hookdrop keeps running without hooks.
    `torch.export` must not count as compiled code, or the compiler would be reset needlessly, with a warning.
    """
    run_code("""
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

from hookdrop.core.torch_internals import enable_hook_guards
config, x = torch._dynamo.config, torch.ones(1, 2)
assert not config.skip_nnmodule_hook_guards, "set by hookdrop"
layer = nn.Linear(2, 2)
compiled = torch.compile(layer, backend="eager")
compiled(x)
handle = layer.register_forward_hook(lambda *_: torch.zeros(1, 2))
assert not compiled(x).any()
handle.remove()
assert compiled(x).any()
torch.compiler.reset()

def unguarded():
    config.skip_nnmodule_hook_guards = True  # as it is by default
    return enable_hook_guards()

assert not unguarded()
torch.export.export(nn.Linear(2, 2), (x,), strict=True)
assert not unguarded()
torch.compile(nn.Linear(2, 2), backend="eager")(x)
assert unguarded()
assert not enable_hook_guards(), "hooks are guarded now"
""")


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


def test_a_warning_raised_as_an_error_does_not_interrupt_rate_updates() -> None:
    """All rates are set before any warning is raised."""
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Conv2d(2, 2, 1))
    drop = inject(model, DropBlock(0.5, 7), layers="*", schedule=LinearSchedule(4))
    torch.compile(model, backend="eager")(torch.ones(1, 1, 4, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(HookdropWarning, match="covers the whole 4x4 map"):
            drop.seek(2)
    assert [site.p for site in drop.sites] == [0.25, 0.25]


def attention() -> nn.Module:
    """Reads its rate at each call, as the attention of transformers does."""
    forward = lambda self, x: nn.functional.dropout(x, self.attention_dropout, self.training)
    return toy(forward, attention_dropout=0.0)


@pytest.mark.parametrize(("layer", "backend"), [(attention, "eager"), (lambda: nn.Dropout(0.0), "aot_eager")])
@torch._dynamo.config.patch(recompile_limit=3)
def test_scheduled_set_dropout_never_keeps_an_old_rate(layer: Callable[[], nn.Module], backend: str) -> None:
    """Each rate is compiled anew; beyond PyTorch's limit of recompilations, the code runs uncompiled."""
    model = nn.Sequential(layer()).train()
    change = inject(model, set_dropout(p=0.6), schedule=LinearSchedule(7), example_input=X)
    fast = torch.compile(model, backend=backend)
    while change.step_count < change.schedule.settles_at:
        change.step()
        expected = 0.6 * change.step_count / change.schedule.settles_at
        assert zeroed(fast) == pytest.approx(expected, abs=0.018)  # 5 standard errors
    assert graphs() == 3


def test_set_dropout_inside_compiled_code_raises() -> None:
    model = nn.Sequential(nn.Dropout(0.5))
    change = inject(model, set_dropout(p=0.1), example_input=X)

    def forward(x: Tensor) -> Tensor:
        change.step()
        return model(x)

    with pytest.raises(Exception, match=r"step\(\)"):
        torch.compile(forward, backend="eager", fullgraph=True)(X)


@pytest.mark.filterwarnings("ignore:code compiled:hookdrop.HookdropWarning")
def test_compiled_model_leaks_nothing() -> None:
    model, x = without_zeros(), torch.ones(8, 8, 8)
    with no_leaks(model, torch.optim.SGD(model.parameters(), 0.01)):
        fast = torch.compile(model, backend="eager")
        for _ in range(3):
            with inject(model, DropBlock(0.5, 1, channel_dim=-1), layers="1"):
                assert zero_fraction(fast(x)) > 0.3
        assert zero_fraction(fast(x)) == 0.0


# --- private names of the compiler


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by dynamo
def test_disable_dynamo() -> None:
    """Without it, the compiler traces into the drawing operations, which read a number from a tensor."""
    seen = []

    @disable_dynamo
    def outside(x: Tensor) -> Tensor:
        seen.append(torch.compiler.is_compiling())
        return x + 1

    torch.compile(lambda x: outside(x) * 2, backend="eager")(torch.ones(2))
    assert seen == [False]
