"""Handles: rates, contexts, reports, and several injections on one model. test_state_machine.py has orders of calls."""

import copy
import gc
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import hookdrop
from hookdrop import DropBlock, Dropout, Dropout2d, Injection, InjectionError, LinearSchedule, find, inject
from hookdrop.core.registry import hooks_of
from tests.support.models import ROWS, Small, mlp, pair
from tests.support.tensors import zeroed
from tests.support.training import layer, optimize, sgd


def rates(drop: Injection) -> list[Any]:
    return [site.p for site in drop.sites]


class TestRates:
    def test_contexts_may_exit_in_any_order_after_an_error_and_a_removal(self) -> None:
        model = pair().eval()
        drop = inject(model, Dropout(0.5), layers="*.0")
        first, second = drop.sampling(), drop.sampling(p=0.9)
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert drop.p == 0.9
        second.__exit__(None, None, None)
        assert drop.p == 0.5
        assert torch.equal(model(ROWS), model(ROWS))

        with pytest.raises(KeyError), drop.sampling():
            raise KeyError
        assert torch.equal(model(ROWS), model(ROWS))
        with pytest.raises(KeyError), drop, drop.disabled():
            drop.remove()
            raise KeyError
        assert zeroed(model.train()[0][0], ROWS) == 0
        assert not find(model)

    def test_what_is_out_of_range_raises_and_changes_nothing(self) -> None:
        drop = inject(model := pair(), Dropout(0.3), layers="*.0", p_scale={"0.0": 2.0})
        changes: list[Any] = [lambda value=value: drop.seek(value) for value in (-1, 1.5, "3", None, True)]
        changes += [lambda value=value: setattr(drop, "target_p", value) for value in (0.9, 1.5, "0.1")]
        for context, expected in ((drop.sampling(p=0.1), [0.2, 0.1]), (drop.sampling(), [0.6, 0.3])):
            with context:
                for change in (*changes, lambda: drop.sampling(p=0.9).__enter__()):
                    with pytest.raises((ValueError, TypeError)):
                        change()
                assert rates(drop) == pytest.approx(expected)
        assert (drop.target_p, drop.p, drop.step_count, len(find(model))) == (0.3, 0.3, 0, 1)

    def test_schedule_out_of_range_raises_and_keeps_the_previous_step(self) -> None:
        _, drop = layer(0.5, schedule=hookdrop.LambdaSchedule(abs))
        drop.step(2)
        with pytest.raises(ValueError, match=r"at '0': target 0.5 x p_scale 1 x schedule 3 at step 3"):
            drop.step()
        assert (drop.step_count, drop.p) == (2, 1.0)

    def test_target_is_the_largest_rate_and_setting_it_keeps_proportions(self, model: Small) -> None:
        drop = inject(model, {"layer1.*": Dropout2d(0.1), "layer2.*": Dropout2d(0.4)}, schedule=LinearSchedule(10))
        assert drop.target_p == 0.4
        drop.target_p = 0
        drop.target_p = 0.8
        with drop.sampling(p=0.2):
            assert (rates(drop), drop.p) == ([0.05, 0.05, 0.2, 0.2], 0.2)
            drop.seek(10)
            assert drop.p == 0.2
        assert rates(drop) == [0.2, 0.2, 0.8, 0.8]


class TestUnits:
    """A probability and a standard deviation are rates with different units."""

    def drop(self) -> tuple[nn.Module, Injection]:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        return model, inject(model, {"0": Dropout(0.1), "1": hookdrop.GaussianNoise(5.0), "2": Dropout(0.2)})

    def test_different_units_have_no_common_p(self) -> None:
        model, drop = self.drop()
        assert (drop.p, drop.keep_prob, drop.target_p) == (None, None, None)
        assert "p=0.2 of 0.2, std=5 of 5" in repr(drop)
        expected = {"p": 0.2, "std": 5.0, "step": 0.0, "enabled": 1.0}
        assert drop.metrics() == {f"hookdrop/dropout_gaussiannoise/{key}": value for key, value in expected.items()}
        drop.enabled = False
        drop.enabled = True
        assert rates(drop) == [0.1, 5.0, 0.2]
        assert len(find(model)) == 1

    def test_setting_a_common_rate_raises_with_the_sites(self) -> None:
        model, drop = self.drop()
        for change in (lambda: setattr(drop, "target_p", 0.5), lambda: drop.sampling(p=0.2).__enter__()):
            with pytest.raises(InjectionError, match="p: '0', '2'"):
                change()
        assert rates(drop) == [0.1, 5.0, 0.2]
        with drop.sampling():
            assert not torch.equal(model.eval()(torch.ones(4)), model(torch.ones(4)))

    def test_one_unit_next_to_a_regularizer_without_a_rate(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        drop = inject(model, {"0": Dropout(0.1), "1": hookdrop.ClipActivationGrad(max_norm=1.0)})
        drop.target_p = 0.3
        assert (drop.p, drop.keep_prob, rates(drop)) == (0.3, 0.7, [0.3, None])


class TestReports:
    def test_repr_and_tables(self, model: Small) -> None:
        drop = inject(model, DropBlock(0.2, 3), layers="layer1.*", schedule=LinearSchedule(10))
        drop.step(5)
        expected = {"p": 0.1, "keep_prob": 0.9, "step": 5.0, "enabled": 1.0}
        assert drop.metrics() == {f"hookdrop/dropblock/{key}": value for key, value in expected.items()}
        assert repr(drop) == "<Injection 'dropblock': 2 sites, p=0.1 of 0.2, step 5 of LinearSchedule(steps=10)>"
        assert [line.split() for line in str(drop.sites).splitlines()[2:]] == [
            [f"layer1.{i}", "0.1", "1", "False", "DropBlock(p=0.2,", "block_size=3)"] for i in (0, 1)
        ]
        for shown in (drop, find(model)):
            assert "<table>" in shown._repr_html_()
            assert "&lt;" not in shown._repr_html_().replace("&lt;Injection", "")
        drop.enabled = False
        assert "disabled" in repr(drop)

    def test_removed_handle_reports_no_rate(self) -> None:
        drop = inject(model := pair(), Dropout(0.5), layers="*.0")
        sites = drop.sites
        drop.remove()
        assert (len(sites), drop.p, repr(drop)) == (2, 0, "<Injection 'dropout', removed>")
        assert drop.check() == ["'dropout' was removed from its model."]
        for use in (drop.metrics, drop.step, drop.state_dict, lambda: drop.seek(3), lambda: drop.spec):
            with pytest.raises(InjectionError):
                use()
        assert not find(model)

    def test_warnings_point_at_the_callers_line(self, model: Small) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            inject(model, Dropout(0.5), layers="**")
        assert caught[0].filename == __file__

    def test_remove_removes_hooks_even_if_a_warning_raises(self) -> None:
        drop = inject(model := pair(), Dropout(0.5), layers="*.0", schedule=LinearSchedule(10))
        model(ROWS)
        with pytest.raises(hookdrop.HookdropWarning, match="its schedule is not advancing"):
            drop.remove()
        assert not find(model)


class TestSeveralInjections:
    def test_a_handle_controls_all_injections(self, model: Small, images: torch.Tensor) -> None:
        inject(model, DropBlock(0.2, 3), layers="layer1.*", schedule=LinearSchedule(10))
        inject(model, Dropout(0.4), layers="fc", schedule=LinearSchedule(20))
        every = find(model)
        assert (len(every), every.name, "dropout" in every) == (2, "dropblock, dropout", True)
        assert (find(model) == every, hash(find(model)) == hash(every)) == (True, True)
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
        with pytest.raises(InjectionError):
            every["droput"]
        assert "2 sites" in repr(every)
        every.follow(optimizer := sgd(model))
        optimize(model, 1, optimizer, images)
        assert ([drop.step_count for drop in every], every.check()) == ([11, 11], [])
        every.remove()
        assert (repr(find(model)), bool(find(model)), bool(every)) == ("<no injections>", False, False)

    def test_what_differs_between_injections_is_read_from_each(self, model: Small) -> None:
        inject(model, DropBlock(0.2, 3), layers="layer1.*", schedule=LinearSchedule(10)).step()
        inject(model, Dropout(0.4), layers="fc")
        every: Any = find(model)
        for use in (lambda: every.step_count, lambda: every.schedule, lambda: every.spec, lambda: find(nn.ReLU()).spec):
            with pytest.raises(InjectionError):
                use()

    def test_injections_of_submodules_with_one_name_are_told_apart(self) -> None:
        model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4)))
        for part, p, steps in zip(model, (0.1, 0.4), (10, 5), strict=True):
            inject(part, Dropout(p), layers="0", schedule=LinearSchedule(steps)).step(steps - 1)
        both = find(model)
        with pytest.raises(InjectionError, match="step_count differs: 'dropout' 9, 'dropout' 4"):
            both.step_count  # noqa: B018
        assert [both.metrics()[f"hookdrop/{name}/step"] for name in ("dropout", "dropout2")] == [9, 4]

    @pytest.mark.parametrize("name", ["p", "keep_prob", "target", "drop_prob", "step_count"])
    def test_only_what_can_be_set_is(self, name: str) -> None:
        drop = inject(model := nn.Sequential(nn.Linear(4, 4)), Dropout(0.1), layers="0")
        with pytest.raises(AttributeError, match=f"{name} cannot be set"):
            setattr(drop, name, 0.5)
        with pytest.raises(InjectionError, match="there is no injection here"):
            find(nn.ReLU()).follow(torch.optim.SGD(model.parameters(), 0.1))

    def test_injections_are_probed_together(self, model: Small, images: torch.Tensor) -> None:
        inject(model, DropBlock(0.2, 3), layers="layer1.*", schedule=LinearSchedule(10))
        inject(model, Dropout(0.4), layers="fc", schedule=LinearSchedule(10))
        inject(model, Dropout(0.1), layers="fc", on_existing="stack", name="second", schedule=LinearSchedule(10))
        found = find(model).probe(images.repeat(50, 1, 1, 1), forwards=1, step=10)
        assert list(found.sites) == ["layer1.0", "layer1.1", "fc (dropout, output)", "fc (second, output)"]
        assert found.sites["layer1.0"].dropped == pytest.approx(0.2, abs=0.05)
        assert found.sites["fc (dropout, output)"].dropped == pytest.approx(0.4, abs=0.05)
        assert [drop.step_count for drop in find(model)] == [0, 0, 0]

    def test_change_that_fails_in_one_injection_is_undone_in_all(self, model: Small) -> None:
        first = inject(model, Dropout(0.4), layers="fc", schedule=LinearSchedule(10))
        second = inject(model, Dropout(0.4), layers="conv1", schedule=hookdrop.LambdaSchedule(float), name="second")
        every = find(model)
        optimizer, other = sgd(model), sgd(model)
        every.seek(2)
        for fails in (lambda: every.seek(5), lambda: every.step(3)):
            with pytest.raises(ValueError):
                fails()
            assert [drop.step_count for drop in every] == [2, 2]
            assert (first.p, second.p) == (pytest.approx(0.08), pytest.approx(0.8))
        second.follow(other)
        for use in (every.step, lambda: every.follow(optimizer)):
            with pytest.raises(InjectionError):
                use()
        first.step()  # follows none
        second.remove()
        with pytest.raises(InjectionError):
            every.enabled = False
        assert first.p == pytest.approx(0.12)

    def test_replace_removes_the_whole_old_injection(self, model: Small) -> None:
        """Input and output of a layer are separate sites."""
        inject(model, Dropout(0.5), layers="layer?.*")
        inject(model, Dropout(0.5), layers="layer2.*", on_existing="replace")
        inject(model, Dropout(0.5), layers="layer2.*", at="input", name="before")
        assert [len(drop.sites) for drop in find(model)] == [2, 2]


class TestPartsOfModels:
    def test_sites_removed_from_a_part_no_longer_affect_the_target(self) -> None:
        model = nn.Sequential(mlp(), mlp())
        drop = inject(model, {"0.0": Dropout(0.5), "1.0": Dropout(0.1)})
        find(model[0]).remove()
        assert [site.name for site in drop.sites] == ["1.0"]
        assert drop.p == find(model).p == 0.1
        find(model).target_p = 0.2
        assert rates(find(model)) == [0.2]
        with find(model).sampling(p=0.3):
            assert rates(find(model)) == [0.3]

    @pytest.mark.filterwarnings("ignore:'dropout'. 1 of 2 sites lost their hook")
    @pytest.mark.parametrize("deleted", ["wrapper", "part"])
    def test_follow_continues_after_the_wrapper_or_a_part_is_deleted(self, deleted: str) -> None:
        model = nn.Sequential(mlp(), mlp())
        optimizer = sgd(model)
        outer: Any = nn.DataParallel(model)
        drop = inject(outer, Dropout(0.5), layers="*.0", schedule=LinearSchedule(100))
        (drop if deleted == "wrapper" else find(model[0])).follow(optimizer)
        del outer
        if deleted == "part":
            model[0] = mlp()
        gc.collect()
        for step in range(1, 6):
            optimize(model, 1, optimizer, torch.ones(2, 8))
            assert find(model).step_count == step
        with drop.sampling(p=0.5):
            assert not torch.equal(model.eval()(torch.ones(2, 8)), model(torch.ones(2, 8)))

    def test_handle_first_used_inside_without_hooks(self) -> None:
        model = mlp()
        drop = inject(model, Dropout(0.5), layers="0")
        twin, copied = copy.deepcopy((model, drop))
        with hookdrop.without_hooks(twin):
            assert "p=0.5" in repr(copied)
        copied.remove()
        assert list(hooks_of(twin)) == []
        assert drop.p == 0.5
