"""Handles: enabling, reporting, and several injections on one model."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from hookdrop import DropBlock, Dropout, HookdropWarning, InjectionError, LambdaSchedule, LinearSchedule, find, inject
from tests.support.injections import layer
from tests.support.models import ROWS, Small, pair
from tests.support.tensors import X, zeroed


def rising(step: int) -> float:
    return float(step)


class TestEnabled:
    def test_contexts_exit_after_an_error(self) -> None:
        model, drop = layer()
        with pytest.raises(KeyError), drop.disabled():
            raise KeyError
        assert zeroed(model, X) > 0.4

    def test_remove_inside_a_context(self) -> None:
        model, drop = layer()
        with drop.disabled():
            drop.remove()
        assert zeroed(model, X) == 0


class TestReprAndMetrics:
    def test_metrics_are_flat_numbers(self) -> None:
        _, drop = layer(0.5, schedule=LinearSchedule(10))
        drop.step()
        assert drop.metrics() == {
            "hookdrop/dropout/p": 0.05,
            "hookdrop/dropout/keep_prob": 0.95,
            "hookdrop/dropout/step": 1.0,
            "hookdrop/dropout/enabled": 1.0,
        }

    def test_repr_and_table(self, model: Small) -> None:
        drop = inject(model, DropBlock(0.2, 3), layers="layer1.*", schedule=LinearSchedule(10))
        drop.step(5)
        assert repr(drop) == "<Injection 'dropblock': 2 sites, p=0.1 of 0.2, step 5 of LinearSchedule(steps=10)>"
        assert [line.split() for line in str(drop.sites).splitlines()[2:]] == [
            ["layer1.0", "0.1", "1", "False", "DropBlock(p=0.2,", "block_size=3)"],
            ["layer1.1", "0.1", "1", "False", "DropBlock(p=0.2,", "block_size=3)"],
        ]
        drop.enabled = False
        assert "disabled" in repr(drop)
        drop.remove()
        assert repr(drop) == "<Injection 'dropblock', removed>"

    def test_html_tables_for_notebooks(self, model: Small) -> None:
        drop = inject(model, DropBlock(0.2, 3), layers="layer1.*")
        for shown in (drop, find(model)):
            assert "<table>" in shown._repr_html_()
            assert "&lt;" not in shown._repr_html_().replace("&lt;Injection", "")


class TestHandles:
    def test_all_handles_on_the_same_hooks_are_interchangeable(self) -> None:
        model, drop = layer(0.5, schedule=LinearSchedule(10))
        other = find(model)
        other.step(3)
        assert drop.step_count == 3
        assert other == drop
        assert hash(other) == hash(drop)
        other.remove()
        assert not find(model)
        drop.remove()

    def test_a_handle_controls_all_injections(self, model: Small) -> None:
        inject(model, DropBlock(0.2, 3), layers="layer1.*", schedule=LinearSchedule(10))
        inject(model, Dropout(0.4), layers="fc", schedule=LinearSchedule(20))
        every = find(model)
        assert (len(every), every.name, "dropout" in every) == (2, "dropblock, dropout", True)
        every.step(5)
        assert [drop.p for drop in every] == [0.1, 0.1]
        every.seek(10)
        assert (every["dropout"].p, every.p, every.step_count) == (0.2, 0.2, 10)
        assert set(every.state_dict()["injections"]) == {"dropblock", "dropout"}
        assert len(every.metrics()) == 8
        with every.disabled():
            assert [drop.p for drop in every] == [0.0, 0.0]
        with every.sampling(p=0.5):
            assert [drop.p for drop in every] == [0.5, 0.5]
        every.target_p = 0.3
        assert [drop.target_p for drop in every] == [0.3, 0.3]
        with pytest.raises(InjectionError, match="no injection named 'droput' here; available: 'dropblock', 'dropout'"):
            every["droput"]
        assert "2 sites" in repr(every)
        every.remove()
        assert (repr(find(model)), bool(find(model)), bool(every)) == ("<no injections>", False, False)

    def test_what_differs_between_injections_is_read_from_each(self, model: Small) -> None:
        inject(model, DropBlock(0.2, 3), layers="layer1.*", schedule=LinearSchedule(10)).step()
        inject(model, Dropout(0.4), layers="fc")
        with pytest.raises(InjectionError, match=r"step_count differs: 'dropblock' 1, 'dropout' 0"):
            _ = find(model).step_count
        for read in (lambda: find(model).schedule, lambda: find(model).spec, lambda: find(nn.ReLU()).schedule):
            with pytest.raises(InjectionError):
                read()

    def test_injections_are_probed_together(self, model: Small, images: torch.Tensor) -> None:
        inject(model, DropBlock(0.2, 3), layers="layer1.*", schedule=LinearSchedule(10))
        inject(model, Dropout(0.4), layers="fc", schedule=LinearSchedule(10))
        inject(model, Dropout(0.1), layers="fc", on_existing="stack", name="second", schedule=LinearSchedule(10))
        found = find(model).probe(images.repeat(50, 1, 1, 1), forwards=1, step=10)
        assert list(found.sites) == ["layer1.0", "layer1.1", "fc (dropout, output)", "fc (second, output)"]
        assert found.sites["layer1.0"].dropped == pytest.approx(0.2, abs=0.05)
        assert found.sites["fc (dropout, output)"].dropped == pytest.approx(0.4, abs=0.05)
        assert [drop.step_count for drop in find(model)] == [0, 0, 0]
        assert str(find(model)) == "\n".join(str(drop) for drop in find(model))

    def test_change_that_fails_in_one_injection_is_undone_in_all(self, model: Small) -> None:
        first = inject(model, Dropout(0.4), layers="fc", schedule=LinearSchedule(10))
        second = inject(model, Dropout(0.4), layers="conv1", schedule=LambdaSchedule(rising), name="second")
        every = find(model)
        optimizer, other = (torch.optim.SGD(model.parameters(), 0.1) for _ in range(2))
        assert [drop == other for drop, other in zip(every, (second, first), strict=True)] == [True, True]
        every.seek(2)
        for fails in (lambda: every.seek(5), lambda: every.step(3)):
            with pytest.raises(ValueError, match=r"p must lie in \[0, 1\]"):
                fails()
            assert [drop.step_count for drop in every] == [2, 2]
            assert (first.p, second.p) == (pytest.approx(0.08), pytest.approx(0.8))
        second.follow(other)
        for use in (every.step, lambda: every.follow(optimizer)):
            with pytest.raises(InjectionError, match="'second' (already )?follows an optimizer"):
                use()
        first.step()  # follows none
        second.remove()
        with pytest.raises(InjectionError, match="was removed"):
            every.enabled = False
        assert first.p == pytest.approx(0.12)

    def test_stacked_injections_both_drop(self) -> None:
        model, _ = layer(0.5)
        inject(model, Dropout(0.5), layers="0", on_existing="stack", name="second")
        assert zeroed(model, X) == pytest.approx(0.75, abs=0.02)

    def test_replace_removes_the_whole_old_injection(self, model: Small) -> None:
        inject(model, Dropout(0.5), layers="layer?.*")
        inject(model, Dropout(0.5), layers="layer2.*", on_existing="replace")
        assert len(next(iter(find(model))).sites) == 2

    def test_input_and_output_of_a_layer_are_separate_sites(self, model: Small) -> None:
        inject(model, Dropout(0.5), layers="fc")
        inject(model, Dropout(0.5), layers="fc", at="input", name="before")
        assert len(find(model)) == 2


def test_warnings_point_at_the_callers_line(model: Small) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        inject(model, Dropout(0.5), layers="**")
    assert caught[0].filename == __file__


def test_remove_removes_hooks_even_if_a_warning_raises() -> None:
    model = pair()
    drop = inject(model, Dropout(0.5), layers="*.0", schedule=LinearSchedule(10))
    model(ROWS)
    with pytest.raises(HookdropWarning, match="its schedule is not advancing"):
        drop.remove()
    assert not find(model)


def test_error_inside_a_with_block_propagates_and_hooks_are_removed() -> None:
    model = pair()
    with pytest.raises(KeyError), inject(model, Dropout(0.5), layers="*.0", schedule=LinearSchedule(10)):
        model(ROWS)
        raise KeyError
    assert not find(model)


def test_removed_handle_reports_no_rate() -> None:
    drop = inject(model := pair(), Dropout(0.5), layers="*.0")
    sites = drop.sites
    drop.remove()
    assert len(sites) == 2
    assert drop.p == 0
    assert drop.check() == ["'dropout' was removed from its model."]
    for use in (drop.metrics, drop.step, drop.state_dict, lambda: drop.seek(3), lambda: drop.spec):
        with pytest.raises(InjectionError, match="'dropout' was removed from its model"):
            use()
    assert not find(model)
