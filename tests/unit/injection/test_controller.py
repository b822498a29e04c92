"""Rates, sampling, and contexts of a handle."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from hookdrop import (
    ClipActivationGrad,
    DropBlock,
    Dropout,
    Dropout2d,
    GaussianNoise,
    Injection,
    InjectionError,
    LambdaSchedule,
    LinearSchedule,
    find,
    inject,
)
from tests.support.injections import layer
from tests.support.models import ROWS, Small, pair


class TestContexts:
    def test_contexts_may_exit_in_any_order(self) -> None:
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

    def test_invalid_target_raises_inside_a_context(self) -> None:
        model = pair()
        drop = inject(model, Dropout(0.3), layers="*.0", p_scale={"0.0": 2.0})
        with drop.sampling(p=0.1), pytest.raises(ValueError, match="must lie in"):
            drop.target_p = 0.9
        assert (drop.target_p, drop.p) == (0.3, 0.3)

    def test_context_with_an_invalid_rate_is_not_entered(self) -> None:
        model = pair()
        drop = inject(model, Dropout(0.3), layers="*.0", p_scale={"0.0": 2.0})
        with pytest.raises(ValueError, match="must lie in"), drop.sampling(p=0.9):
            raise AssertionError
        assert [site.p for site in drop.sites] == [0.6, 0.3]


class TestRates:
    def test_target_is_the_largest_rate_and_setting_it_keeps_proportions(self, model: Small) -> None:
        drop = inject(model, {"layer1.*": Dropout2d(0.1), "layer2.*": Dropout2d(0.4)})
        assert drop.target_p == 0.4
        drop.target_p = 0.8
        assert [site.p for site in drop.sites] == [0.2, 0.2, 0.8, 0.8]

    def test_invalid_target_changes_nothing(self, model: Small) -> None:
        drop = inject(model, Dropout(0.4), layers="layer1.*", p_scale={"layer1.0": 2.0})
        for bad, error in ((1.5, ValueError), ("0.1", TypeError), (0.6, ValueError)):
            with pytest.raises(error):
                drop.target_p = bad
            assert [site.p for site in drop.sites] == [0.8, 0.4]

    def test_schedule_out_of_range_raises_and_keeps_the_previous_step(self) -> None:
        _, drop = layer(0.5, schedule=LambdaSchedule(abs))
        drop.step(2)
        with pytest.raises(ValueError, match=r"at '0': target 0.5 x p_scale 1 x schedule 3 at step 3"):
            drop.step()
        assert (drop.step_count, drop.p) == (2, 1.0)

    @pytest.mark.parametrize("bad", [-1, 1.5, "3", None, True])
    def test_invalid_steps_raise(self, bad: object) -> None:
        _, drop = layer()
        with pytest.raises((TypeError, ValueError), match="step"):
            drop.seek(bad)
        assert drop.step_count == 0


class TestSampling:
    def test_sampling_drops_in_eval_mode_without_changing_batch_norm(self, model: Small, images: torch.Tensor) -> None:
        drop = inject(model, DropBlock(0.5, 3), layers="layer1.*")
        model.eval()
        clean = model(images)
        statistics = {name: buffer.clone() for name, buffer in model.named_buffers()}
        with drop.sampling():
            samples = torch.stack([model(images) for _ in range(8)])
        assert samples.std(0).min() > 0
        assert all(torch.equal(buffer, statistics[name]) for name, buffer in model.named_buffers())
        assert torch.equal(model(images), clean)

    def test_sampling_at_a_given_rate(self, model: Small) -> None:
        drop = inject(model, {"layer1.*": Dropout(0.1), "layer2.*": Dropout(0.4)}, schedule=LinearSchedule(10))
        with drop.sampling(p=0.2):
            assert [site.p for site in drop.sites] == [0.05, 0.05, 0.2, 0.2]
            assert drop.p == 0.2
            drop.seek(10)
            assert drop.p == 0.2
        assert drop.p == 0.4

    def test_sampling_at_rate_0_raises(self) -> None:
        """For example, an EMA copy that was never stepped is at step 0 of its schedule."""
        _, drop = layer(0.3, schedule=LinearSchedule(10))
        with pytest.raises(InjectionError, match=r"at step 0 of LinearSchedule\(steps=10\)(.|\n)*sampling\(p=0.3\)"):
            with drop.sampling():
                pass
        with pytest.raises(InjectionError, match="sampling at rate 0"), drop.sampling(p=0):
            pass
        with drop.sampling(p=0.3):
            pass


class TestUnits:
    """A probability and a standard deviation are rates with different units."""

    def drop(self) -> tuple[nn.Module, Injection]:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        return model, inject(model, {"0": Dropout(0.1), "1": GaussianNoise(5.0), "2": Dropout(0.2)})

    def test_different_units_have_no_common_p(self) -> None:
        model, drop = self.drop()
        assert (drop.p, drop.keep_prob, drop.target_p) == (None, None, None)
        assert [site.p for site in drop.sites] == [0.1, 5.0, 0.2]
        assert "p=0.2 of 0.2, std=5 of 5" in repr(drop)
        assert drop.metrics() == {
            "hookdrop/dropout_gaussiannoise/p": 0.2,
            "hookdrop/dropout_gaussiannoise/std": 5.0,
            "hookdrop/dropout_gaussiannoise/step": 0.0,
            "hookdrop/dropout_gaussiannoise/enabled": 1.0,
        }
        assert len(find(model)) == 1

    def test_setting_a_common_rate_raises_with_the_sites(self) -> None:
        model, drop = self.drop()
        sets: list[Callable[[], object]] = [
            lambda: setattr(drop, "target_p", 0.5),
            lambda: drop.sampling(p=0.2).__enter__(),
        ]
        for change in sets:
            with pytest.raises(InjectionError, match=r"different units(.|\n)*p: '0', '2'(.|\n)*No rate was changed"):
                change()
        assert [site.p for site in drop.sites] == [0.1, 5.0, 0.2]
        with drop.sampling():
            assert not torch.equal(model.eval()(torch.ones(4)), model(torch.ones(4)))

    def test_one_unit_next_to_a_regularizer_without_a_rate(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        drop = inject(model, {"0": Dropout(0.1), "1": ClipActivationGrad(max_norm=1.0)})
        drop.target_p = 0.3
        assert (drop.p, drop.keep_prob, [site.p for site in drop.sites]) == (0.3, 0.7, [0.3, None])


def test_target_of_0_keeps_the_proportions() -> None:
    drop = inject(model := pair(), {"0.0": Dropout(0.05), "1.0": Dropout(0.1)})
    drop.target_p = 0
    drop.target_p = 0.1
    assert [site.p for site in drop.sites] == [0.05, 0.1]
    assert len(find(model)) == 1


def test_rates_of_each_unit_are_checked_against_their_own_range() -> None:
    drop = inject(model := pair(), {"0.0": Dropout(0.1), "1.0": GaussianNoise(2.0)})
    drop.enabled = False
    drop.enabled = True
    assert [site.p for site in drop.sites] == pytest.approx([0.1, 2.0])
    assert len(find(model)) == 1
