"""Features together: what each does alone, it does beside the others."""

from __future__ import annotations

import copy
import gc
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from hookdrop import DropBlock, Dropout, HookdropWarning, LinearSchedule, find, inject, without_hooks
from hookdrop.hooks import checkpointing as replay
from hookdrop.hooks.registry import hooks_of

Way = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def plain(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x)


def reentrant(model: nn.Module, x: torch.Tensor) -> Any:
    return checkpoint(model, x, use_reentrant=True)


def non_reentrant(model: nn.Module, x: torch.Tensor) -> Any:
    return checkpoint(model, x, use_reentrant=False)


WAYS = [reentrant, non_reentrant]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Sigmoid())


def gradient(scenario: Callable[[nn.Sequential, torch.Tensor, Way], torch.Tensor], way: Way) -> torch.Tensor:
    model = net()
    x = torch.linspace(-1, 1, 512).view(64, 8).requires_grad_()
    torch.manual_seed(1)
    scenario(model, x, way).backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("way", WAYS)
class TestOneRandomStateTwoRates:
    """Nothing is drawn while off or at rate 0, so that the next forward finds the same random state."""

    def test_a_clean_forward_before_a_noisy_one(self, way: Way) -> None:
        """Consistency training: both wait for one backward."""

        def scenario(model: nn.Sequential, x: torch.Tensor, way: Way) -> torch.Tensor:
            drop = inject(model, Dropout(0.5), layers=["0", "2"])
            with drop.disabled():
                clean = way(model, x)
            return (clean - way(model, x)).square().sum()

        torch.testing.assert_close(gradient(scenario, way), gradient(scenario, plain))

    def test_the_first_step_of_a_ramp_before_the_second(self, way: Way) -> None:
        def scenario(model: nn.Sequential, x: torch.Tensor, way: Way) -> torch.Tensor:
            drop = inject(model, Dropout(0.5), layers=["0", "2"], schedule=LinearSchedule(4))
            first = way(model, x)
            drop.step()
            return (first * way(model, x)).sum()

        torch.testing.assert_close(gradient(scenario, way), gradient(scenario, plain))

    def test_seeded_alike(self, way: Way) -> None:
        def scenario(model: nn.Sequential, x: torch.Tensor, way: Way) -> torch.Tensor:
            drop = inject(model, Dropout(0.5), layers=["0", "2"])
            torch.manual_seed(5)
            first = way(model, x)
            drop.target_p = 0.2
            torch.manual_seed(5)
            return (first * way(model, x)).sum()

        torch.testing.assert_close(gradient(scenario, way), gradient(scenario, plain))

    def test_a_teacher_without_gradients_from_the_same_random_state(self, way: Way) -> None:
        def scenario(model: nn.Sequential, x: torch.Tensor, way: Way) -> torch.Tensor:
            drop = inject(model, Dropout(0.5), layers=["0", "2"])
            with drop.disabled():
                student = way(model, x)
            with torch.random.fork_rng(), torch.no_grad():
                teacher = model(x)
            return (student - teacher).square().sum()

        torch.testing.assert_close(gradient(scenario, way), gradient(scenario, plain))


@pytest.mark.parametrize("way", WAYS)
def test_a_probe_between_forward_and_backward_changes_no_gradient(way: Way) -> None:
    def scenario(model: nn.Sequential, x: torch.Tensor, way: Way) -> torch.Tensor:
        drop = inject(model, Dropout(0.5), layers=["0", "2"], schedule=LinearSchedule(4))
        y = way(model, x)
        drop.probe(x.detach(), step=4)
        return y.square().sum()

    assert torch.equal(gradient(scenario, way), gradient(scenario, plain))


@pytest.mark.parametrize("way", WAYS)
def test_sampling_in_eval_whose_backward_comes_after_the_context(way: Way) -> None:
    def scenario(model: nn.Sequential, x: torch.Tensor, way: Way) -> torch.Tensor:
        drop = inject(model.eval(), Dropout(0.5), layers=["0", "2"])
        with drop.sampling():
            y = way(model, x)
        return y.square().sum()

    assert torch.equal(gradient(scenario, way), gradient(scenario, plain))


def test_injected_between_forward_and_backward_it_is_told() -> None:
    model, x = net(), torch.ones(4, 8, requires_grad=True)
    y = reentrant(model, x)
    inject(model, Dropout(0.5), layers="0")
    with pytest.warns(HookdropWarning, match="from a random state that no forward of it had"):
        y.sum().backward()


def test_replaced_between_forward_and_backward_it_is_told() -> None:
    model, x = net(), torch.ones(4, 8, requires_grad=True)
    inject(model, Dropout(0.5), layers="0")
    y = reentrant(model, x)
    inject(model, Dropout(0.2), layers="0", on_existing="replace")
    with pytest.warns(HookdropWarning, match="from a random state that no forward of it had"):
        y.sum().backward()


class TestParts:
    def test_what_is_removed_from_a_part_is_no_measure_of_the_rest(self) -> None:
        model = nn.Sequential(net(), net())
        drop = inject(model, {"0.0": Dropout(0.5), "1.0": Dropout(0.1)})
        find(model[0]).remove()
        assert [site.name for site in drop.sites] == ["1.0"]
        assert drop.p == find(model)[0].p == 0.1
        find(model)[0].target_p = 0.2
        assert [site.p for site in find(model)[0].sites] == [0.2]
        with find(model)[0].sampling(p=0.3):
            assert [site.p for site in find(model)[0].sites] == [0.3]

    @pytest.mark.parametrize("gone", ["wrapper", "part"])
    def test_following_goes_on_when_what_the_handle_was_made_of_goes(self, gone: str) -> None:
        model = nn.Sequential(net(), net())
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        outer: Any = nn.DataParallel(model)
        drop = inject(outer, Dropout(0.5), layers="*.0", schedule=LinearSchedule(100))
        (drop if gone == "wrapper" else find(model[0])[0]).follow(optimizer)
        del outer
        if gone == "part":
            model[0] = net()
        gc.collect()
        for step in range(1, 6):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            assert find(model)[0].step_count == step

    def test_a_handle_that_is_first_asked_inside_without_hooks(self) -> None:
        model = net()
        drop = inject(model, Dropout(0.5), layers="0")
        twin, copied = copy.deepcopy((model, drop))
        with without_hooks(twin):
            assert "p=0.5" in repr(copied)
        copied.remove()
        assert list(hooks_of(twin)) == []
        assert drop.p == 0.5


class TestHealthyTrainings:
    @pytest.fixture(autouse=True)
    def nothing_is_said(self) -> Iterator[None]:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield

    def test_an_activation_that_is_called_a_thousand_times_a_step(self) -> None:
        class Recurrent(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.fc, self.act = nn.Linear(4, 4), nn.Tanh()

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                for _ in range(1100):
                    x = self.act(self.fc(x))
                return x

        model = Recurrent()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        drop = inject(model, Dropout(0.01), layers="act", schedule=LinearSchedule(100)).follow(optimizer)
        for _ in range(2):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        assert drop.step_count == 2

    def test_a_teacher_in_eval_whose_output_is_detached(self) -> None:
        student = net()
        inject(student, Dropout(0.5), layers="0")
        teacher = copy.deepcopy(student).eval()
        optimizer = torch.optim.SGD(student.parameters(), 0.01)
        for _ in range(30):
            x = torch.ones(2, 8)
            (student(x) - teacher(x).detach()).square().sum().backward()
            optimizer.step()
            with torch.no_grad():
                for mine, theirs in zip(teacher.parameters(), student.parameters(), strict=True):
                    mine.lerp_(theirs, 0.01)


def test_threads_that_sample_at_once_leave_the_rates_as_they_were() -> None:
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(2)]).eval()
    drop = inject(model, Dropout(0.5), layers="*")
    errors: list[BaseException] = []

    def sample() -> None:
        try:
            for _ in range(10):
                with drop.sampling(p=0.9):
                    assert drop._state.sampling
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(400):
            threads = [threading.Thread(target=sample) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert not errors
            assert [site.p for site in drop.sites] == [0.5, 0.5]
    finally:
        sys.setswitchinterval(interval)


def test_a_warning_that_is_an_error_leaves_no_rate_behind() -> None:
    """All rates are set before anything is said."""
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Conv2d(2, 2, 1))
    drop = inject(model, DropBlock(0.5, 7), layers="*", schedule=LinearSchedule(4))
    torch.compile(model, backend="eager")(torch.ones(1, 1, 4, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(HookdropWarning, match="covers the whole 4x4 map"):
            drop.seek(2)
    assert [site.p for site in drop.sites] == [0.25, 0.25]
    torch.compiler.reset()


def test_no_optimizers_step_walks_the_models_that_are_alive() -> None:
    model = nn.Sequential(*[nn.Linear(2, 2).requires_grad_(False) for _ in range(20)], nn.Linear(2, 2))
    inject(model, Dropout(0.5), layers="0", schedule=LinearSchedule(1000))
    optimizer = torch.optim.SGD(model[20].parameters(), 0.1)
    walked = []

    def counting(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        walked.append(self)
        return modules(self, *args, **kwargs)

    model(torch.ones(2, 2)).sum().backward()
    optimizer.step()
    modules, nn.Module.modules = nn.Module.modules, counting  # type: ignore[method-assign]
    try:
        optimizer.step()
    finally:
        nn.Module.modules = modules  # type: ignore[method-assign]
    # Other tests' models may be alive, and be looked at for the first time.
    assert not any(part is own for part in walked for own in model.modules())


def test_an_average_that_is_hooked_for_later_is_not_taken_for_a_training() -> None:
    model, average = net(), net().eval()
    drop = inject(average, Dropout(0.5), layers="0")
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(30):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)
    with drop.sampling():
        average(torch.ones(2, 8))


def test_a_checkpoints_random_state_is_that_of_the_tensors_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a backward pass the device in use is another one than in the forward. Without a GPU: who is asked, for what."""
    asked: list[Any] = []

    class Cuda:
        @staticmethod
        def get_rng_state(device: Any) -> torch.Tensor:
            asked.append(device)
            return torch.get_rng_state()

    with FakeTensorMode():
        x = torch.empty(2, device="cuda:1")
    monkeypatch.setattr(torch, "get_device_module", lambda device: Cuda)
    replay.random_state((x, None))
    replay.random_state(torch.ones(2))
    assert asked == [torch.device("cuda:1")]
