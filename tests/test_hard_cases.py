"""What an adversary would try: parts of models, surgery, contexts out of order, failures half-way."""

from __future__ import annotations

import copy
import random
import threading
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Small
from torch import nn
from torch.utils.checkpoint import checkpoint

from hookdrop import (
    Dropout,
    GaussianNoise,
    HookdropWarning,
    InjectionError,
    LinearSchedule,
    Schedule,
    StateError,
    eject,
    find,
    inject,
    without_hooks,
)

X = torch.ones(5000, 8)


def pair() -> nn.Sequential:
    return nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Sequential(nn.Linear(8, 8), nn.ReLU()))


def zeroed(module: nn.Module) -> float:
    with torch.no_grad():
        return (module(X) == 0).float().mean().item()


class TestParts:
    def test_a_part_is_given_back_alone_and_the_rest_later(self) -> None:
        model = pair()
        drop = inject(model, Dropout(0.5), layers="*.0")
        model(X)
        assert eject(model[0]) == 1
        assert zeroed(model[0][0]) == 0
        assert zeroed(model[1][0]) == pytest.approx(0.5, abs=0.05)
        drop.remove()
        assert zeroed(model[1][0]) == 0
        assert find(model) == ()

    def test_a_step_through_a_part_moves_every_site(self) -> None:
        model = pair()
        drop = inject(model, Dropout(0.5), layers="*.0", schedule=LinearSchedule(10))
        find(model[0]).seek(10)
        assert [site.p for site in drop.sites] == [0.5, 0.5]

    def test_two_injections_of_one_name_on_parts_are_told_apart(self) -> None:
        model = pair()
        inject(model[0], Dropout(0.5), layers="0")
        inject(model[1], Dropout(0.2), layers="0")
        with pytest.raises(InjectionError, match=r"2 injections here are named 'dropout'"):
            find(model).state_dict()
        assert [drop.p for drop in find(model)] == [0.5, 0.2]
        assert eject(model) == 2

    def test_injecting_inside_without_hooks_is_refused(self) -> None:
        model = pair()
        inject(model, Dropout(0.5), layers="*.0")
        with without_hooks(model), pytest.raises(InjectionError, match="inside without_hooks"):
            inject(model, Dropout(0.5), layers="*.0")
        assert len(find(model)) == 1


class TestSurgery:
    """Quantization and fusion register a module's hooks anew on its successor."""

    @pytest.mark.parametrize("at", ["output", "input"])
    def test_hooks_that_were_registered_anew_can_be_removed(self, at: str) -> None:
        model = pair().eval()
        drop = inject(model, Dropout(0.5), layers="*.0", at=at)
        successor = nn.Linear(8, 8).eval()
        for hook in model[0][0]._forward_hooks.values():
            successor.register_forward_hook(hook)
        for hook in model[0][0]._forward_pre_hooks.values():
            successor.register_forward_pre_hook(hook)
        model[0][0] = successor
        clean = successor(X)
        with without_hooks(model):
            assert not successor._forward_hooks
            assert not successor._forward_pre_hooks
        successor.train()
        model[1].train()(model[0](X))
        assert not torch.equal(successor(X), clean)
        drop.remove()
        assert torch.equal(successor(X), clean)
        assert not successor._forward_hooks
        assert not successor._forward_pre_hooks


class TestContexts:
    def test_contexts_that_end_out_of_order_leave_nothing_behind(self) -> None:
        model = pair().eval()
        drop = inject(model, Dropout(0.5), layers="*.0")
        first, second = drop.sampling(), drop.sampling(p=0.9)
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert drop.p == 0.9
        second.__exit__(None, None, None)
        assert drop.p == 0.5
        assert torch.equal(model(X), model(X))

    def test_threads_that_sample_at_once(self) -> None:
        model = pair().eval()
        drop = inject(model, Dropout(0.5), layers="*.0")
        barrier = threading.Barrier(2)

        def sample(slow: bool) -> None:
            with drop.sampling():
                barrier.wait()
                if slow:
                    barrier.wait()
            if not slow:
                barrier.wait()

        threads = [threading.Thread(target=sample, args=(slow,)) for slow in (True, False)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert torch.equal(model(X), model(X))

    def test_nested_measurements_both_see_all(self) -> None:
        model = pair()
        drop = inject(model, Dropout(0.5), layers="*.0")
        with drop.measuring() as outer:
            model(X)
            with drop.measuring() as inner:
                model(X)
        assert (outer.calls, inner.calls) == (4, 2)

    def test_a_target_that_does_not_fit_is_refused_inside_a_context_too(self) -> None:
        model = pair()
        drop = inject(model, Dropout(0.3), layers="*.0", p_scale={"0.0": 2.0})
        with drop.sampling(p=0.1), pytest.raises(ValueError, match="must lie in"):
            drop.target_p = 0.9
        assert (drop.target_p, drop.p) == (0.3, 0.3)

    def test_a_context_that_does_not_fit_is_not_entered(self) -> None:
        model = pair()
        drop = inject(model, Dropout(0.3), layers="*.0", p_scale={"0.0": 2.0})
        with pytest.raises(ValueError, match="must lie in"), drop.sampling(p=0.9):
            raise AssertionError
        assert [site.p for site in drop.sites] == [0.6, 0.3]


class TestFailures:
    def test_a_state_that_does_not_fit_the_scale_changes_nothing(self) -> None:
        drop = inject(model := pair(), Dropout(0.3), layers="*.0", p_scale={"0.0": 2.0})
        before = drop.state_dict()
        with pytest.raises(StateError, match="must lie in"):
            drop.load_state_dict(before | {"target_p": [0.9, 0.9], "step_count": 77, "enabled": False})
        assert drop.state_dict() == before
        assert len(find(model)) == 1

    def test_a_state_with_rates_for_what_has_none(self) -> None:
        drop = inject(model := pair(), torch.relu, layers="*.0")
        saved = drop.state_dict() | {"target_p": [0.1, 0.1]}
        with pytest.raises(StateError, match="which has none; nothing was loaded"):
            drop.load_state_dict(saved)
        assert len(find(model)) == 1

    def test_remove_gives_the_model_back_even_if_a_warning_is_an_error(self) -> None:
        model = pair()
        drop = inject(model, Dropout(0.5), layers="*.0", schedule=LinearSchedule(10))
        model(X)
        with pytest.raises(HookdropWarning, match="its schedule is not advancing"):
            drop.remove()
        assert find(model) == ()

    def test_an_error_inside_a_with_block_is_the_one_that_comes_out(self) -> None:
        model = pair()
        with pytest.raises(KeyError), inject(model, Dropout(0.5), layers="*.0", schedule=LinearSchedule(10)):
            model(X)
            raise KeyError
        assert find(model) == ()

    def test_a_removed_handle_reports_no_rate(self) -> None:
        drop = inject(model := pair(), Dropout(0.5), layers="*.0")
        sites = drop.sites
        drop.remove()
        assert len(sites) == 2
        assert drop.p == 0
        assert drop.check() == ["'dropout' was removed from its model."]
        with pytest.raises(InjectionError, match="was removed"):
            drop.metrics()
        assert find(model) == ()

    def test_stepping_all_steps_none_if_one_follows(self) -> None:
        model = pair()
        first = inject(model, Dropout(0.5), layers="0.0", schedule=LinearSchedule(10))
        second = inject(model, Dropout(0.5), layers="1.0", schedule=LinearSchedule(10), name="second")
        opt = _sgd(model)
        second.follow(opt)
        with pytest.raises(InjectionError, match="'second' follows an optimizer"):
            find(model).step()
        assert first.step_count == 0
        assert opt is not None

    def test_a_target_of_0_keeps_the_proportions(self) -> None:
        drop = inject(model := pair(), {"0.0": Dropout(0.05), "1.0": Dropout(0.1)})
        drop.target_p = 0
        drop.target_p = 0.1
        assert [site.p for site in drop.sites] == [0.05, 0.1]
        assert len(find(model)) == 1

    def test_rates_of_several_kinds_are_each_held_to_their_own_range(self) -> None:
        drop = inject(model := pair(), {"0.0": Dropout(0.1), "1.0": GaussianNoise(2.0)})
        drop.disable()
        drop.enable()
        assert [site.p for site in drop.sites] == pytest.approx([0.1, 2.0])
        assert len(find(model)) == 1


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


class TestNoTrace:
    def test_measuring_under_activation_checkpointing(self) -> None:
        model = pair()
        drop = inject(model, Dropout(0.5), layers="*.0")

        def gradient(measure: bool) -> torch.Tensor:
            torch.manual_seed(1)
            model.zero_grad()
            if measure:
                with drop.measuring():
                    out = checkpoint(model, X, use_reentrant=False)
            else:
                out = checkpoint(model, X, use_reentrant=False)
            out.sum().backward()
            return model[0][0].weight.grad.clone()

        assert torch.equal(gradient(True), gradient(False))

    def test_a_probe_between_forward_and_backward(self) -> None:
        """Frozen batch norm keeps its statistics for backward: they must not be written to."""
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        drop = inject(model, Dropout(0.5), layers="0")
        model[1].eval()
        out = model(X)
        drop.probe(X)
        out.sum().backward()

    def test_buffers_that_can_not_be_written_to(self) -> None:
        model = nn.Sequential(nn.Linear(8, 8))
        model[0].register_buffer("mask", torch.ones(1, 8).expand(8, 8))
        before = model[0].mask
        drop = inject(model, Dropout(0.5), layers="0", example_input=X)
        drop.probe(X)
        assert model[0].mask is before

    def test_buffers_that_a_forward_adds_are_gone_after(self) -> None:
        class Caches(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.register_buffer("cache", x.detach())
                return super().forward(x)

        model = nn.Sequential(Caches(8, 8))
        inject(model, Dropout(0.5), layers="0", example_input=X)
        assert "0.cache" not in model.state_dict()

    def test_a_probe_of_a_model_in_eval_mode_does_not_call_train(self) -> None:
        """LoRA layers merge their weights in it."""

        class Merging(nn.Linear):
            def train(self, mode: bool = True) -> Merging:
                with torch.no_grad():
                    self.weight += 1.0
                return super().train(mode)

        drop = inject(model := nn.Sequential(Merging(8, 8)), Dropout(0.5), layers="0")
        model.eval()
        before = model[0].weight.clone()
        result = drop.probe(X)
        assert torch.equal(model[0].weight, before)
        assert result.dropped == pytest.approx(0.5, abs=0.05)
        assert "Merging defines train(), which a probe does not call" in result.note

    def test_a_probe_keeps_frozen_batch_norm_in_eval_where_train_does(self) -> None:
        class Detector(nn.Sequential):
            def train(self, mode: bool = True) -> Detector:
                super().train(mode)
                self[1].eval()
                return self

        model = Detector(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.BatchNorm1d(8)).eval()
        model[1].requires_grad_(False)
        drop = inject(model, Dropout(0.5), layers=nn.BatchNorm1d)
        assert [site.calls for site in drop.probe(X).sites.values()] == [0, 3]
        model.train()
        assert [site.calls for site in drop.probe(X).sites.values()] == [0, 3]
        assert not drop.probe(X).note

    def test_large_buffers_are_not_copied(self) -> None:
        """Those of a quantized language model are its weights."""

        class Quantized(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("weight", torch.ones(1200, 1200, dtype=torch.int8))
                self.register_buffer("table", torch.ones(600, 600))
                self.met: list[tuple[bool, int, int]] = []

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.met.append((self.training, self.weight.data_ptr(), self.table.data_ptr()))
                return x * self.weight[0, 0]

        model = nn.Sequential(Quantized())
        weight, table = model[0].weight.data_ptr(), model[0].table.data_ptr()
        drop = inject(model, Dropout(0.5), layers="0", example_input=X)
        assert model[0].met == [(False, weight, table)]
        drop.probe(X)
        assert {at for _, at, _ in model[0].met} == {weight}
        # Training forwards write to queues and code books of any size.
        assert all(at != table for training, _, at in model[0].met if training)

    def test_a_large_buffer_that_was_written_to_is_named(self) -> None:
        class Counts(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("counts", torch.zeros(2**20, dtype=torch.int32))
                self.register_buffer("few", torch.zeros(2**10, dtype=torch.int32))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.few += 1
                self.counts += 1
                return x

        model = nn.Sequential(Counts())
        with pytest.warns(HookdropWarning, match=r"wrote to '0\.counts', which is too large to be copied first"):
            inject(model, Dropout(0.5), layers="0", example_input=X)
        assert model[0].few.sum() == 0

    def test_batch_norms_of_any_size_are_put_back(self) -> None:
        model = nn.Sequential(nn.BatchNorm1d(2**19))
        x = torch.randn(2, 2**19)
        drop = inject(model, Dropout(0.5), layers="0", example_input=x)
        drop.probe(x)
        assert model[0].running_mean.count_nonzero() == 0
        assert model[0].num_batches_tracked == 0

    def test_probes_are_no_training(self) -> None:
        model = pair()
        drop = inject(model, Dropout(0.5), layers="*.0", schedule=LinearSchedule(100))
        other = inject(model, Dropout(0.5), layers="*.1", name="other", schedule=LinearSchedule(100))
        for step in range(15):
            drop.probe(X, step=step, forwards=1)
        assert not any(site.fired for site in (*drop.sites, *other.sites))
        assert (drop.step_count, other.step_count) == (0, 0)
        drop.summary()

    def test_pythons_and_numpys_generators_are_put_back(self) -> None:
        class Draws(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(x) * (1 + 0 * random.random() + 0 * np.random.rand())

        model = nn.Sequential(Draws(8, 8))
        before = random.getstate(), np.random.get_state()[1].copy()
        drop = inject(model, Dropout(0.5), layers="0", example_input=X)
        drop.probe(X)
        assert random.getstate() == before[0]
        assert np.array_equal(np.random.get_state()[1], before[1])

    def test_nothing_is_claimed_where_nothing_was_compared(self) -> None:
        class Outer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.fc = nn.Linear(8, 8)

            def forward(self, x: torch.Tensor) -> Any:
                self.fc(x)
                return object()

        drop = inject(model := Outer(), Dropout(0.5), layers="fc")
        result = drop.probe(X)
        assert result.eval_identical is None
        assert "identical" not in str(result)
        assert model is not None

    def test_a_warning_used_up_by_nobody(self, model: Small) -> None:
        """A probe on large images does not silence the warning that small ones deserve."""
        from hookdrop import DropBlock

        drop = inject(model, DropBlock(0.3, 7), layers="layer1.0", example_input=torch.randn(1, 3, 16, 16))
        drop.probe(torch.randn(2, 3, 16, 16))
        with pytest.warns(HookdropWarning, match="covers the whole 6x6 map"):
            model(torch.randn(2, 3, 6, 6))


class TestNoise:
    def test_noise_speaks_of_std(self) -> None:
        drop = inject(model := pair(), GaussianNoise(2.0), layers="*.0", schedule=LinearSchedule(2))
        drop.step()
        assert drop.metrics() == {
            "hookdrop/gaussiannoise/std": 1.0, "hookdrop/gaussiannoise/step": 1.0, "hookdrop/gaussiannoise/enabled": 1.0,
        }  # fmt: skip
        assert drop.keep_prob is None
        assert "std=1 of 2" in repr(drop)
        row = str(drop.probe(X)).splitlines()[2].split()
        assert row[:3] == ["0.0", "1.000", "-"]
        assert model is not None

    def test_a_function_is_asked_nothing(self) -> None:
        drop = inject(model := pair(), nn.functional.dropout, layers="*.0")
        row = str(drop.probe(X)).splitlines()[2].split()
        assert row[:2] == ["0.0", "-"]
        assert float(row[2]) == pytest.approx(0.5, abs=0.05)
        assert model is not None


class Plain(Schedule):
    """No dataclass, and a tensor as multiplier."""

    def __call__(self, step: int) -> Any:
        return torch.tensor(0.5)


def test_a_schedule_that_is_no_dataclass_and_gives_tensors() -> None:
    drop = inject(model := pair(), Dropout(0.5), layers="*.0", schedule=Plain())
    drop.step()
    assert "Plain()" in repr(drop)
    assert drop.metrics()["hookdrop/dropout/p"] == 0.25
    assert type(drop.p) is float
    assert drop.state_dict()["schedule"] == "Plain()"
    assert model is not None


def test_the_rate_of_the_moment_can_not_be_set() -> None:
    drop = inject(model := pair(), Dropout(0.5), layers="*.0")
    with pytest.raises(AttributeError, match=r"drop.target_p = 0.4"):
        drop.p = 0.4
    with pytest.raises(AttributeError, match=r"drop.target_p = 1 - 0.6"):
        drop.keep_prob = 0.6
    assert model is not None


def test_an_empty_module_as_exclude_is_an_exclude() -> None:
    model = nn.Sequential(nn.Sequential(), nn.ReLU())
    drop = inject(model, Dropout(0.5), layers="*", exclude=model[0])
    assert [site.name for site in drop.sites] == ["1"]


def test_a_forward_that_was_patched_on_the_module_itself() -> None:
    class Takes(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> Any:
            return a, b

    class Owner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Takes()
            self.inner.forward = lambda b, a: (a, b)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            return self.inner(x, y)

    model = Owner()
    inject(model, Dropout(1.0), layers="inner", at="input", tensor="a")
    a, b = model(torch.ones(3), torch.ones(3))
    assert torch.equal(a, torch.zeros(3))
    assert torch.equal(b, torch.ones(3))


def test_the_arguments_in_the_wrong_order() -> None:
    with pytest.raises(TypeError, match="the model comes first"):
        inject(Dropout(0.5), pair(), layers="*.0")


def test_find_follows_and_checks_for_all() -> None:
    model = pair()
    inject(model, Dropout(0.5), layers="0.0", schedule=LinearSchedule(10))
    inject(model, Dropout(0.5), layers="1.0", schedule=LinearSchedule(10), name="second")
    optimizer = _sgd(model)
    find(model).follow(optimizer)
    model(X).sum().backward()
    optimizer.step()
    assert [drop.step_count for drop in find(model)] == [1, 1]
    assert find(model).check() == []
    with pytest.raises(StateError, match="inject first"):
        find(copy.deepcopy(nn.Linear(1, 1))).load_state_dict(find(model).state_dict())


def test_warnings_of_a_copy_are_its_own() -> None:
    model = pair()
    inject(model, Dropout(0.5), layers="*.0", schedule=LinearSchedule(10))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        twin = copy.deepcopy(model)
        twin(X)
