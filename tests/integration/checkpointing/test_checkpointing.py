"""Activation checkpointing: a recompute draws the masks of its forward at its rate, or warns; also in timm and transformers."""

import functools
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import CheckpointError, CheckpointPolicy, checkpoint, checkpoint_sequential

from hookdrop import Dropout, HookdropWarning, Injection, LayerError, LinearSchedule, find, inject
from hookdrop.core.torch_internals import graph_task
from hookdrop.guards.progress import UPDATES_BEFORE_WARNING
from hookdrop.training import checkpointing
from tests.support.models import from_timm, mlp, toy
from tests.support.regularizers import EVERY, REPRESENTATIVE, SITES, Case
from tests.support.tensors import all_equal
from tests.support.transformers_models import IDS, llama

Forward = Callable[[nn.Sequential, torch.Tensor], torch.Tensor]


def plain(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x)


def non_reentrant(model: nn.Module, x: torch.Tensor, **settings: Any) -> torch.Tensor:
    return checkpoint(model, x, use_reentrant=False, **settings)


def reentrant(model: nn.Module, x: torch.Tensor, **settings: Any) -> torch.Tensor:
    return checkpoint(model, x, use_reentrant=True, **settings)


MODES = [reentrant, non_reentrant]


def run(model: nn.Sequential, x: torch.Tensor, way: Forward, between: Callable[[], object] = lambda: None) -> list[Any]:
    """Return the output and all gradients from a fixed seed; `between` is called between forward and backward."""
    torch.manual_seed(1)
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = way(model, x)
    between()
    (y * y).sum().backward()
    return [y.detach(), x.grad, *[p.grad for p in model.parameters()]]


def nested(way: Callable[..., torch.Tensor], model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    return way(lambda x: way(model[2:], way(model[:2], x)), x)


def save_tanh(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = operation is torch.ops.aten.tanh.default
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def selective(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    contexts = functools.partial(torch.utils.checkpoint.create_selective_checkpoint_contexts, save_tanh)
    return non_reentrant(model, x, context_fn=contexts)


def offloaded(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        return model(x)


WAYS: dict[str, Forward] = {
    "reentrant": reentrant,
    "non-reentrant": non_reentrant,
    "nested reentrant": functools.partial(nested, reentrant),
    "nested non-reentrant": functools.partial(nested, non_reentrant),
    "sequential reentrant": lambda model, x: checkpoint_sequential(model, 2, x, use_reentrant=True),
    "sequential non-reentrant": lambda model, x: checkpoint_sequential(model, 2, x, use_reentrant=False),
    "selective": selective,
    "offloaded": offloaded,
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # nested reentrant checkpoints
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("case", REPRESENTATIVE.values(), ids=REPRESENTATIVE)
def test_gradients_are_bit_identical_with_and_without_checkpointing(case: Case, way: Forward) -> None:
    model, x = case.model(), case.input()
    clean = run(model, x, plain)
    for at in case.places:
        drop = inject(model, case.regularizer, layers=SITES, at=at)
        expected = run(model, x, plain)
        assert not all_equal(expected, clean)
        assert all_equal(run(model, x, way), expected)
        drop.remove()


@pytest.fixture(params=["this version", "before 2.8"])
def pytorch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch 2.6 and 2.7 do not report saved-tensors hooks, so checkpoints are recognized on the call stack."""
    if request.param == "before 2.8":
        monkeypatch.setattr(checkpointing.internals, "saved_tensors_hooks", None)


ANY_PYTORCH = pytest.mark.usefixtures("pytorch")


class TestRngStateNotPreserved:
    """`preserve_rng_state=False`: the recompute has another mask and the gradients are wrong; PyTorch does not warn."""

    @ANY_PYTORCH
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("name", ["Dropout", "DropBlock (sparse)", "LayerDrop"])
    def test_warns_once(self, name: str, mode: Forward) -> None:
        model, x = EVERY[name].model(), EVERY[name].input()
        inject(model, EVERY[name].regularizer, layers=SITES)

        def run_unpreserved() -> None:
            with suppress(CheckpointError):  # PyTorch detects a different number of blocks
                run(model, x, functools.partial(mode, preserve_rng_state=False))

        with pytest.warns(HookdropWarning, match="remove preserve_rng_state=False") as caught:
            run_unpreserved()
        assert len(caught) == 1
        run_unpreserved()

    @pytest.mark.parametrize("mode", MODES)
    def test_warns_for_the_last_layer(self, mode: Forward) -> None:
        """There, an exception stops the recompute as soon as the mask is saved."""
        model, x = nn.Sequential(nn.Linear(8, 8), nn.Identity()), torch.ones(4, 8)
        inject(model, Dropout(0.5), layers="1")
        with pytest.warns(HookdropWarning, match="remove preserve_rng_state=False"):
            run(model, x, functools.partial(mode, preserve_rng_state=False))

    @pytest.mark.parametrize("mode", MODES)
    def test_no_warning_if_nothing_is_drawn(self, mode: Forward) -> None:
        model, x = EVERY["Dropout"].model(), EVERY["Dropout"].input()
        drop = inject(model, Dropout(0.3), layers=SITES, schedule=LinearSchedule(4))
        inject(model, torch.tanh, layers=SITES, on_existing="stack", name="no random function")
        unpreserved = functools.partial(mode, preserve_rng_state=False)
        run(model, x, unpreserved)
        drop.seek(4)
        drop.enabled = False
        run(model, x, unpreserved)
        run(model.eval(), x, unpreserved)

    def test_number_of_remembered_forwards_is_bounded(self) -> None:
        """Forwards without gradients look like checkpointed ones, but may never be recomputed."""
        model = nn.Sequential(nn.Identity())
        inject(model, Dropout(0.3), layers="0")
        (hook,) = model[0]._forward_hooks.values()
        with pytest.MonkeyPatch.context() as patch, torch.no_grad():
            patch.setattr(checkpointing, "CAPACITY", 10)
            for _ in range(30):
                model(torch.ones(2))
        assert len(hook.state.live.checkpointed) == 10
        assert not hook.state.live.checkpointed.complete


class TestOtherThreads:
    """A recompute uses its own rate and does not affect forwards in other threads."""

    @staticmethod
    def recompute_while(during: Callable[[nn.Module, Injection], object]) -> tuple[list[Any], list[Any], Injection]:
        """Return the gradients of a step at rate 0.25, whose recompute runs at rate 0.5 with `during`, and the expected."""
        model, x = EVERY["Dropout"].model(), EVERY["Dropout"].input()
        drop = inject(model, Dropout(0.5), layers=SITES, schedule=LinearSchedule(4))
        drop.seek(2)
        expected = run(model, x, plain)

        def hold(module: nn.Module, args: Any, output: Any) -> None:
            if graph_task() != -1:
                thread = threading.Thread(target=during, args=(model, drop))
                thread.start()
                thread.join()

        handles = [module.register_forward_hook(hold, prepend=True) for module in model]
        found = run(model, x, non_reentrant, between=lambda: drop.seek(4))
        for handle in handles:
            handle.remove()
        return found, expected, drop

    def test_forward_in_another_thread_uses_the_current_rate(self) -> None:
        rates = []

        def forward(model: nn.Module, drop: Injection) -> None:
            state = torch.get_rng_state()
            with torch.no_grad(), drop.recording(last=0) as measured:
                model(EVERY["Dropout"].input())
            torch.set_rng_state(state)
            rates.append(measured.totals.requested)

        found, expected, _ = self.recompute_while(forward)
        assert all_equal(found, expected)
        assert rates
        assert rates == pytest.approx([0.5] * len(rates))

    def test_seek_in_another_thread_takes_effect_and_lasts(self) -> None:
        found, expected, drop = self.recompute_while(lambda model, drop: drop.seek(0))
        assert all_equal(found, expected)
        assert [drop.p, *(site.p for site in drop.sites)] == [0.0] * 3


@ANY_PYTORCH
def test_ordinary_forwards_are_not_remembered() -> None:
    model, x = EVERY["Dropout"].model(), EVERY["Dropout"].input()
    drop = inject(model, Dropout(0.3), layers=SITES)
    run(model, x, plain)
    assert not drop._states[0].live.checkpointed


ALL_MODES = pytest.mark.parametrize("mode", MODES)
CHANGES: dict[str, Callable[[Injection], object]] = {
    "stepped": lambda drop: drop.step(3),
    "target changed": lambda drop: setattr(drop, "target_p", 0.1),
    "to zero": lambda drop: drop.seek(0),
    "disabled": lambda drop: setattr(drop, "enabled", False),
}


@ANY_PYTORCH
@ALL_MODES
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("case", REPRESENTATIVE.values(), ids=REPRESENTATIVE)
def test_recompute_uses_the_rate_of_the_forward(case: Case, change: Callable[[Injection], Any], mode: Forward) -> None:
    """`loss = model(x); drop.step(); loss.backward()`."""
    model, x = case.model(), case.input()
    drop = inject(model, case.regularizer, layers=SITES, schedule=LinearSchedule(4))
    drop.step()
    expected = run(model, x, plain)
    assert all_equal(run(model, x, mode, between=lambda: change(drop)), expected)
    drop.seek(0)  # the recompute left no rate behind
    assert torch.equal(model(x), model(x))


@ALL_MODES
def test_measuring_a_recompute_reports_the_rate_of_the_forward(mode: Forward) -> None:
    model, x = EVERY["Dropout"].model(), EVERY["Dropout"].input()
    drop = inject(model, Dropout(0.8), layers=["0"], schedule=LinearSchedule(4))
    drop.seek(1)
    out = mode(model, x.requires_grad_())
    drop.seek(4)
    with drop.recording(last=0) as m:
        out.sum().backward()
    assert [m.totals.requested, m.totals.dropped] == pytest.approx([0.2, 0.2], abs=0.05)


# --- several forwards, and what happens between them and the backward

Scenario = Callable[[nn.Sequential, Tensor, Forward], Tensor]
"""A function that returns the loss of forwards that a `Forward` runs."""


def dropped(model: nn.Module, **settings: Any) -> Injection:
    return inject(model, Dropout(0.5), layers=["0", "2"], **settings)


def one_module_twice_in_a_forward(model: nn.Sequential, x: Tensor, way: Forward) -> Tensor:
    dropped(model)
    return way(model, way(model, x)).square().sum()


def two_rates_before_one_backward(model: nn.Sequential, x: Tensor, way: Forward) -> Tensor:
    """Neither the current rate nor that of the last forward is correct for both."""
    drop, loss = dropped(model, schedule=LinearSchedule(4)), torch.zeros(())
    for step in (1, 3):
        drop.seek(step)
        loss = loss + way(model, x).square().sum()
    drop.seek(4)
    return loss


def a_clean_forward_before_a_noisy_one(model: nn.Sequential, x: Tensor, way: Forward) -> Tensor:
    """As in consistency training. A disabled forward draws nothing, so the next one starts from the same RNG state."""
    with dropped(model).disabled():
        clean = way(model, x)
    return (clean - way(model, x)).square().sum()


def equal_seeds_at_two_rates(model: nn.Sequential, x: Tensor, way: Forward) -> Tensor:
    drop = dropped(model)
    torch.manual_seed(5)
    first = way(model, x)
    drop.target_p = 0.2
    torch.manual_seed(5)
    return (first * way(model, x)).sum()


def a_teacher_from_the_same_rng_state(model: nn.Sequential, x: Tensor, way: Forward) -> Tensor:
    with dropped(model).disabled():
        student = way(model, x)
    with torch.random.fork_rng(), torch.no_grad():
        teacher = model(x)
    return (student - teacher).square().sum()


def a_probe_before_the_backward(model: nn.Sequential, x: Tensor, way: Forward) -> Tensor:
    drop = dropped(model, schedule=LinearSchedule(4))
    y = way(model, x)
    drop.probe(x.detach(), step=4)
    return y.square().sum()


def a_backward_after_the_sampling_context(model: nn.Sequential, x: Tensor, way: Forward) -> Tensor:
    with dropped(model.eval()).sampling():
        y = way(model, x)
    return y.square().sum()


SCENARIOS = [
    one_module_twice_in_a_forward, two_rates_before_one_backward,
    a_clean_forward_before_a_noisy_one, equal_seeds_at_two_rates, a_teacher_from_the_same_rng_state,
    a_probe_before_the_backward, a_backward_after_the_sampling_context,
]  # fmt: skip


def gradient(scenario: Scenario, way: Forward) -> Tensor:
    model = mlp()
    x = torch.linspace(-1, 1, 512).view(64, 8).requires_grad_()
    torch.manual_seed(1)
    scenario(model, x, way).backward()
    assert x.grad is not None
    return x.grad


@ALL_MODES
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_gradients_of_several_forwards_equal_those_without_a_checkpoint(scenario: Scenario, mode: Forward) -> None:
    torch.testing.assert_close(gradient(scenario, mode), gradient(scenario, plain))


@pytest.mark.skipif(checkpointing.internals.saved_tensors_hooks is None, reason="PyTorch 2.6 and 2.7: robustness.md")
@pytest.mark.parametrize("replaced", [False, True])
def test_an_injection_between_forward_and_backward_warns(replaced: bool) -> None:
    model, x = mlp(), torch.ones(4, 8, requires_grad=True)
    if replaced:
        inject(model, Dropout(0.5), layers="0")
    y = reentrant(model, x)
    inject(model, Dropout(0.2), layers="0", on_existing="replace")
    with pytest.warns(HookdropWarning, match="with an RNG state that none of its forwards had"):
        y.sum().backward()


def test_rng_state_is_read_from_the_device_of_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The current device may differ between forward and backward. Uses a fake CUDA module."""
    requested: list[Any] = []

    class Cuda:
        @staticmethod
        def get_rng_state(device: Any) -> Tensor:
            requested.append(device)
            return torch.get_rng_state()

    with FakeTensorMode():
        x = torch.empty(2, device="cuda:1")
    monkeypatch.setattr(torch, "get_device_module", lambda device: Cuda)
    checkpointing.rng_fingerprint((x, None))
    checkpointing.rng_fingerprint(torch.ones(2))
    assert requested == [torch.device("cuda:1")]


class TestTimm:
    """After `model.set_grad_checkpointing()`, containers are iterated, so hooks on them do not fire."""

    def test_a_container_is_an_error_or_warns(self) -> None:
        """An error if it is named, a warning if a pattern matches it."""
        model, x = from_timm("resnet10t", num_classes=3)(), torch.randn(2, 3, 32, 32)
        model.set_grad_checkpointing()
        with pytest.raises(LayerError, match="is not called in the forward pass: a hook on it never fires"):
            inject(model, Dropout(0.3), layers="layer3", example_input=x)
        assert not find(model)
        with pytest.warns(HookdropWarning, match="never called in an eval forward, so the hooks there do not fire"):
            drop = inject(model, Dropout(0.3), layers="layer[34]", example_input=x)
        model(x)
        drop.seek(1)
        assert "never ran" in drop.check()[0]


def checkpointed() -> Any:
    """Like timm: with checkpointing, containers are iterated instead of called."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return checkpoint_sequential(m.blocks, 2, x, use_reentrant=False) if m.on else m.blocks(x)

    return toy(forward, on=False, blocks=nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))


def test_checkpointing_enabled_later_warns_without_a_handle() -> None:
    """Without a schedule, a followed optimizer or a handle, the warning comes after 20 weight updates."""
    model = checkpointed()
    inject(model, Dropout(0.3), layers="block[s]", example_input=torch.ones(2, 8))
    model.on = True
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for update in range(1, UPDATES_BEFORE_WARNING + 2):
        model(torch.ones(2, 8)).sum().backward()
        warns = pytest.warns(HookdropWarning, match="'blocks' never ran, so nothing is dropped there")
        with warns if update == UPDATES_BEFORE_WARNING else nullcontext():
            optimizer.step()


@pytest.mark.parametrize("mode", [True, False])
def test_transformers_gradient_checkpointing(mode: bool) -> None:
    model = llama().train()
    drop = inject(model, Dropout(0.3), layers=["**.mlp", "**.self_attn"])

    def gradients() -> list[torch.Tensor]:
        torch.manual_seed(1)
        model.zero_grad()
        model(input_ids=IDS, labels=IDS).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = gradients()
    # The new name comes first, because the old one is deprecated.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": mode})
    if mode:
        model.enable_input_require_grads()
    assert all_equal(gradients(), expected)
    drop.remove()
    assert not all_equal(gradients(), expected)
