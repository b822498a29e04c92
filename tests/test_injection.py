"""The handle: rates, on and off, sampling, proof, and that contexts end where they began."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
import torch
from conftest import Small
from hypothesis import given
from torch import nn

import hookdrop
from hookdrop import (
    ClipActivationGrad,
    ConstantSchedule,
    DropBlock,
    Dropout,
    Dropout2d,
    DropPath,
    GaussianDropout,
    GaussianNoise,
    HookdropWarning,
    Injection,
    InjectionError,
    Injections,
    LambdaSchedule,
    LinearSchedule,
    Regularizer,
    eject,
    find,
    inject,
)


def zeroed(model: nn.Module, x: torch.Tensor) -> float:
    with torch.no_grad():
        return (model(x) == 0).float().mean().item()


def layer(p: float = 0.5, **kwargs: object) -> tuple[nn.Module, object]:
    model = nn.Sequential(nn.Identity())
    return model, inject(model, Dropout(p), layers="0", **kwargs)


X = torch.ones(40_000)


def rising(step: int) -> float:
    return float(step)


class TestRates:
    def test_the_rate_in_force_is_target_times_scale_times_schedule(self, model: Small) -> None:
        drop = inject(model, DropBlock(0.4, 3), layers="layer1.*", schedule=LinearSchedule(10), p_scale="depth")
        drop.step(5)
        assert (drop.p, drop.keep_prob, drop.target_p, drop.step_count) == (0.2, 0.8, 0.4, 5)
        assert [site.p for site in drop.sites] == [0.1, 0.2]
        assert [site.p_scale for site in drop.sites] == [0.5, 1.0]

    @pytest.mark.parametrize("steps", [1, 7, 10])
    def test_the_target_is_reached_exactly_and_kept(self, steps: int) -> None:
        model, drop = layer(0.3, schedule=LinearSchedule(steps))
        assert zeroed(model, X) == 0
        for _ in range(steps):
            drop.step()
        assert drop.p == 0.3
        assert zeroed(model, X) == pytest.approx(0.3, abs=0.01)
        drop.step(1000)
        assert drop.p == 0.3

    def test_seek_is_idempotent_and_goes_back_too(self) -> None:
        _, drop = layer(0.4, schedule=LinearSchedule(100))
        for _ in range(3):
            drop.seek(25)
        assert drop.p == 0.1
        drop.seek(5)
        assert drop.step_count == 5

    def test_forwards_do_not_count(self) -> None:
        model, drop = layer(0.4, schedule=LinearSchedule(100))
        drop.step()
        for _ in range(10):
            model(X)
        assert drop.step_count == 1

    def test_target_may_be_set_live(self) -> None:
        model, drop = layer(0.4, schedule=LinearSchedule(10))
        drop.seek(5)
        drop.target_p = 0.8
        assert drop.p == 0.4
        assert zeroed(model, X) == pytest.approx(0.4, abs=0.01)

    def test_where_sites_differ_the_largest_speaks_and_proportions_are_kept(self, model: Small) -> None:
        drop = inject(model, {"layer1.*": Dropout2d(0.1), "layer2.*": Dropout2d(0.4)})
        assert drop.target_p == 0.4
        drop.target_p = 0.8
        assert [site.p for site in drop.sites] == [0.2, 0.2, 0.8, 0.8]

    def test_a_bad_target_changes_nothing(self, model: Small) -> None:
        drop = inject(model, Dropout(0.4), layers="layer1.*", p_scale={"layer1.0": 2.0})
        for bad, error in ((1.5, ValueError), ("0.1", TypeError), (0.6, ValueError)):
            with pytest.raises(error):
                drop.target_p = bad
            assert [site.p for site in drop.sites] == [0.8, 0.4]

    def test_a_schedule_that_leaves_the_range_stops_at_the_step_before(self) -> None:
        _, drop = layer(0.5, schedule=LambdaSchedule(abs))
        drop.step(2)
        with pytest.raises(ValueError, match=r"at '0': target 0.5 x p_scale 1 x schedule 3 at step 3"):
            drop.step()
        assert (drop.step_count, drop.p) == (2, 1.0)

    def test_noise_is_driven_by_its_std(self) -> None:
        model = nn.Sequential(nn.Identity())
        drop = inject(model, GaussianNoise(std=2.0), layers="0", schedule=LinearSchedule(4))
        drop.step()
        assert model(X).std() == pytest.approx(0.5, rel=0.05)
        assert drop.p == 0.5

    @pytest.mark.parametrize("bad", [-1, 1.5, "3", None, True])
    def test_bad_steps(self, bad: object) -> None:
        _, drop = layer()
        with pytest.raises((TypeError, ValueError), match="step"):
            drop.seek(bad)
        assert drop.step_count == 0


class TestForeign:
    """Modules that hookdrop did not write."""

    @pytest.mark.parametrize(
        "make",
        [
            lambda: nn.Dropout2d(0.4),
            lambda: nn.Dropout(0.4, inplace=True),
            lambda: __import__("torchvision").ops.StochasticDepth(0.4, "row"),
            lambda: __import__("torchvision").ops.DropBlock2d(0.4, 3),
            lambda: __import__("timm").layers.DropPath(0.4),
        ],
    )
    def test_a_schedule_drives_its_rate(self, make: object, model: Small, images: torch.Tensor) -> None:
        theirs = make()
        drop = inject(model, theirs, layers="layer1.*.bn1", schedule=LinearSchedule(4))
        assert drop.sites[0].p == 0
        drop.step(4)
        with drop.measuring() as m:
            for _ in range(40):
                model(images)
        assert drop.p == 0.4
        assert m.dropped == pytest.approx(0.4, abs=0.08)
        assert "0.4" in repr(theirs), "the module that was passed in was changed"

    def test_inplace_is_switched_off_on_the_copy(self) -> None:
        given_module = nn.Dropout(0.5, inplace=True)
        model = nn.Sequential(nn.Sigmoid())
        inject(model, given_module, layers="0")
        x = torch.randn(8, requires_grad=True)
        model(x).sum().backward()
        assert given_module.inplace

    def test_each_site_has_its_own_copy(self, model: Small) -> None:
        drop = inject(model, nn.Dropout2d(0.4), layers="layer1.*", p_scale="depth")
        assert [site.p for site in drop.sites] == [0.2, 0.4]

    def test_a_function_has_no_rate(self, model: Small, images: torch.Tensor) -> None:
        drop = inject(model, torch.relu, layers="fc")
        assert (drop.p, drop.keep_prob, drop.target_p) == (None, None, None)
        assert (model(images) >= 0).all()
        assert drop.metrics() == {"hookdrop/relu/step": 0.0, "hookdrop/relu/enabled": 1.0}
        with pytest.raises(InjectionError, match="no rate"):
            drop.target_p = 0.1
        with pytest.raises(InjectionError, match="no rate"), drop.sampling(p=0.1):
            pass

    def test_a_regularizer_of_ones_own(self, images: torch.Tensor, model: Small) -> None:
        drop = inject(model, Shrink(0.5), layers="fc", schedule=LinearSchedule(2))
        drop.step(2)
        assert drop.metrics()["hookdrop/shrink/p"] == 0.5
        model.train()
        torch.manual_seed(1)
        shrunk = model(images)
        with drop.disabled():
            torch.testing.assert_close(shrunk * 2, model(images))


class TestTexts:
    """For flags and sweeps: parsed, never evaluated."""

    def test_a_text_is_a_regularizer(self, model: Small) -> None:
        drop = inject(model, "DropBlock(p=0.2, block_size=(3, 5))", layers="layer1.*")
        assert drop.name == "dropblock"
        assert drop.sites[0].regularizer == "DropBlock(p=0.2, block_size=(3, 5))"

    def test_texts_in_a_mapping(self, model: Small) -> None:
        drop = inject(model, {"layer1.*": "Dropout2d(p=0.1)", nn.Linear: "Dropout(p=0.5)"}, schedule=LinearSchedule(2))
        assert drop.name == "dropout2d+dropout"
        drop.step(2)
        assert [site.p for site in drop.sites] == [0.1, 0.1, 0.5]


class Shrink(Regularizer):
    rate_name = "amount"

    def __init__(self, amount: float = 0.1) -> None:
        super().__init__()
        self.amount = amount

    def regularize(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 - self.amount)


class TestOnAndOff:
    def test_disable_and_enable(self) -> None:
        model, drop = layer(schedule=LinearSchedule(2))
        drop.step(2)
        drop.disable()
        assert (drop.p, zeroed(model, X)) == (0.0, 0.0)
        drop.step()
        assert drop.step_count == 3
        drop.enable()
        assert (drop.p, drop.step_count) == (0.5, 3)

    def test_disabled_inside_only(self) -> None:
        model, drop = layer()
        with drop.disabled():
            assert zeroed(model, X) == 0
        assert zeroed(model, X) > 0.4

    def test_contexts_end_after_an_error_too(self) -> None:
        model, drop = layer()
        with pytest.raises(KeyError), drop.disabled():
            raise KeyError
        assert zeroed(model, X) > 0.4

    def test_removing_inside_a_context_is_fine(self) -> None:
        model, drop = layer()
        with drop.disabled():
            drop.remove()
        assert zeroed(model, X) == 0

    @given(st.lists(st.sampled_from(["disabled", "sampling", "rate", "disable", "enable", "step", "end"]), max_size=12))
    def test_any_nesting_ends_in_the_state_it_began_in(self, moves: list[str]) -> None:
        """`disable` and `enable` inside a context last until its end; outside they stay."""
        model, drop = layer(0.5)
        stack: list[tuple[object, tuple[object, ...]]] = []

        def looks() -> tuple[object, ...]:
            model.eval()
            in_eval = round(zeroed(model, X), 1)
            model.train()
            return drop.p, in_eval, round(zeroed(model, X), 1)

        for move in moves:
            if move == "end":
                if stack:
                    context, before = stack.pop()
                    context.__exit__(None, None, None)
                    assert looks() == before
            elif move == "step":
                drop.step()
            elif move in ("disable", "enable"):
                getattr(drop, move)()
            else:
                before = looks()
                context = {
                    "disabled": drop.disabled, "sampling": drop.sampling, "rate": lambda: drop.sampling(p=0.3)
                }[move]()  # fmt: skip
                context.__enter__()
                stack.append((context, before))
        while stack:
            context, before = stack.pop()
            context.__exit__(None, None, None)
            assert looks() == before


class TestSampling:
    def test_on_in_eval_mode_with_batch_norm_untouched(self, model: Small, images: torch.Tensor) -> None:
        drop = inject(model, DropBlock(0.5, 3), layers="layer1.*")
        model.eval()
        clean = model(images)
        statistics = {name: buffer.clone() for name, buffer in model.named_buffers()}
        with drop.sampling():
            samples = torch.stack([model(images) for _ in range(8)])
        assert samples.std(0).min() > 0
        assert all(torch.equal(buffer, statistics[name]) for name, buffer in model.named_buffers())
        assert torch.equal(model(images), clean)

    def test_with_a_rate_of_its_own(self, model: Small) -> None:
        drop = inject(model, {"layer1.*": Dropout(0.1), "layer2.*": Dropout(0.4)}, schedule=LinearSchedule(10))
        with drop.sampling(p=0.2):
            assert [site.p for site in drop.sites] == [0.05, 0.05, 0.2, 0.2]
            assert drop.p == 0.2
            drop.seek(10)
            assert drop.p == 0.2
        assert drop.p == 0.4

    def test_it_samples_although_disabled(self) -> None:
        model, drop = layer()
        drop.disable()
        model.eval()
        with drop.sampling():
            assert zeroed(model, X) > 0.4
        assert zeroed(model, X) == 0

    def test_at_rate_0_it_is_an_error(self) -> None:
        """An EMA copy that was never stepped stands at step 0 of its schedule."""
        _, drop = layer(0.3, schedule=LinearSchedule(10))
        with pytest.raises(InjectionError, match=r"at step 0 of LinearSchedule\(steps=10\)(.|\n)*sampling\(p=0.3\)"):
            with drop.sampling():
                pass
        with pytest.raises(InjectionError, match="sampling at rate 0"), drop.sampling(p=0):
            pass
        with drop.sampling(p=0.3):
            pass

    def test_a_bad_rate(self) -> None:
        _, drop = layer()
        with pytest.raises(ValueError, match=r"must lie in \[0, 1\], got 1.5"), drop.sampling(p=1.5):
            pass
        assert drop.p == 0.5

    def test_under_inference_mode(self) -> None:
        model, drop = layer()
        model.eval()
        with drop.sampling(), torch.inference_mode(), drop.measuring() as m:
            model(X)
        assert m.dropped == pytest.approx(0.5, abs=0.02)


class TestProof:
    def test_probe_measures_and_leaves_no_trace(self, model: Small, images: torch.Tensor) -> None:
        drop = inject(model, DropBlock(0.3, 3), layers="layer?.*.bn1", schedule=LinearSchedule(10))
        model.eval()
        model.layer1[0].train()
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        flags, rng = [m.training for m in model.modules()], torch.get_rng_state()
        result = drop.probe(images, forwards=5, step=10)
        assert result.asked == pytest.approx(0.3)
        assert result.dropped == pytest.approx(0.3, abs=0.02)
        assert result.mean_ratio == pytest.approx(1, abs=0.03)
        assert [site.calls for site in result.sites.values()] == [5] * 4
        assert result.eval_identical is True
        assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
        assert [m.training for m in model.modules()] == flags
        assert torch.equal(torch.get_rng_state(), rng)
        assert (drop.step_count, drop.p) == (0, 0.0)
        assert not any(site.fired for site in drop.sites)

    def test_what_probe_prints(self, model: Small, images: torch.Tensor) -> None:
        drop = inject(model, DropBlock(0.3, 3), layers="layer1.0.bn1")
        lines = str(drop.probe(images)).splitlines()
        assert lines[0].split() == ["site", "asked", "dropped", "mean", "ratio", "calls"]
        assert lines[2].split()[0] == "layer1.0.bn1"
        assert lines[-1] == "eval output bit-identical with and without hooks"

    def test_probe_at_rate_0_says_why(self, model: Small, images: torch.Tensor) -> None:
        drop = inject(model, DropBlock(0.3, 3), layers="layer1.0.bn1", schedule=LinearSchedule(10))
        assert "rate is 0 at step 0 of LinearSchedule(steps=10); probe(x, step=...)" in str(drop.probe(images))
        drop.disable()
        assert "is disabled" in str(drop.probe(images, step=10))

    def test_probe_notices_an_eval_output_that_differs(self, model: Small, images: torch.Tensor) -> None:
        drop = inject(model, Dropout(0.3), layers="fc")
        with drop.sampling():
            result = drop.probe(images)
        assert result.eval_identical is False
        assert "NOT bit-identical" in str(result)

    def test_measuring_changes_no_mask_and_no_result(self, model: Small, images: torch.Tensor) -> None:
        drop = inject(model, DropBlock(0.3, 3), layers="layer1.*")
        torch.manual_seed(1)
        expected, state = model(images), torch.get_rng_state()
        torch.manual_seed(1)
        with drop.measuring() as m:
            assert torch.equal(model(images), expected)
        assert torch.equal(torch.get_rng_state(), state)
        assert m.calls == 2

    @pytest.mark.parametrize(
        "regularizer",
        [Dropout(0.3), Dropout2d(0.3), DropPath(0.3), DropBlock(0.3, 3), DropBlock(0.3, 3, per_channel=False)],
        ids=repr,
    )
    def test_dropped_is_exact_where_activations_are_zero_anyway(self, regularizer: Regularizer) -> None:
        """After a ReLU half of the zeros are nobody's doing."""
        model = nn.Sequential(nn.ReLU())
        drop = inject(model, regularizer, layers="0")
        with drop.measuring() as m:
            model(torch.randn(300, 20, 6, 6))
        assert m.dropped == pytest.approx(0.3, abs=0.1 if isinstance(regularizer, DropPath) else 0.03)

    def test_noise_drops_nothing(self) -> None:
        model = nn.Sequential(nn.Identity())
        drop = inject(model, GaussianDropout(0.3), layers="0")
        with drop.measuring() as m:
            model(X)
        assert (m.asked, m.dropped) == (0.3, 0.0)


class TestTalk:
    def test_metrics_are_flat_numbers(self) -> None:
        _, drop = layer(0.5, schedule=LinearSchedule(10))
        drop.step()
        assert drop.metrics() == {
            "hookdrop/dropout/p": 0.05,
            "hookdrop/dropout/keep_prob": 0.95,
            "hookdrop/dropout/step": 1.0,
            "hookdrop/dropout/enabled": 1.0,
        }

    def test_repr_and_summary(self, model: Small) -> None:
        drop = inject(model, DropBlock(0.2, 3), layers="layer1.*", schedule=LinearSchedule(10))
        drop.step(5)
        assert repr(drop) == "<Injection 'dropblock': 2 sites, p=0.1 of 0.2, step 5 of LinearSchedule(steps=10)>"
        assert [line.split() for line in drop.summary().splitlines()[3:]] == [
            ["layer1.0", "0.1", "1", "no", "DropBlock(p=0.2,", "block_size=3)"],
            ["layer1.1", "0.1", "1", "no", "DropBlock(p=0.2,", "block_size=3)"],
        ]
        drop.disable()
        assert "disabled" in repr(drop)
        drop.remove()
        assert repr(drop) == "<Injection 'dropblock', removed>"

    def test_notebooks_get_tables(self, model: Small, images: torch.Tensor) -> None:
        drop = inject(model, DropBlock(0.2, 3), layers="layer1.*")
        for shown in (drop, find(model), drop.probe(images)):
            assert "<table>" in shown._repr_html_()
            assert "&lt;" not in shown._repr_html_().replace("&lt;Injection", "")


class TestHandles:
    def test_all_handles_on_the_same_hooks_are_interchangeable(self) -> None:
        model, drop = layer(0.5, schedule=LinearSchedule(10))
        (other,) = find(model)
        other.step(3)
        assert drop.step_count == 3
        assert other == drop
        assert hash(other) == hash(drop)
        other.remove()
        assert find(model) == ()
        drop.remove()

    def test_find_passes_calls_on_to_all(self, model: Small, images: torch.Tensor) -> None:
        inject(model, DropBlock(0.2, 3), layers="layer1.*", schedule=LinearSchedule(10))
        inject(model, Dropout(0.4), layers="fc", schedule=LinearSchedule(20))
        every = find(model)
        every.step(5)
        assert [drop.p for drop in every] == [0.1, 0.1]
        every.seek(10)
        assert every["dropout"].p == 0.2
        assert set(every.state_dict()) == {"dropblock", "dropout"}
        assert len(every.metrics()) == 8
        with every.disabled():
            assert [drop.p for drop in every] == [0.0, 0.0]
        with every.sampling(p=0.5):
            assert [drop.p for drop in every] == [0.5, 0.5]
        with pytest.raises(InjectionError, match="no injection 'droput' here; there are: dropblock, dropout"):
            every["droput"]
        assert "2 sites" in repr(every)
        every.remove()
        assert repr(find(model)) == "<no injections>"

    def test_a_part_of_them_passes_calls_on_too(self, model: Small) -> None:
        one, two = inject(model, Dropout(0.4), layers="fc"), inject(model, DropBlock(0.2, 3), layers="layer1.*")
        for some in (find(model)[0:1], find(model)[::-1][:1], find(model)[:0] + find(model)[:1]):
            assert isinstance(some, Injections)
        find(model)[1:].disable()
        assert (one.p, two.p) == (0.0, 0.2)
        find(model).enable()
        assert (one.p, two.p) == (0.4, 0.2)

    def test_they_are_probed_and_summed_up_by_name(self, model: Small, images: torch.Tensor) -> None:
        inject(model, DropBlock(0.2, 3), layers="layer1.*", schedule=LinearSchedule(10))
        inject(model, Dropout(0.4), layers="fc", schedule=LinearSchedule(10))
        found = find(model).probe(images.repeat(50, 1, 1, 1), forwards=1, step=10)
        assert list(found) == ["dropblock", "dropout"]
        assert found["dropblock"].dropped == pytest.approx(0.2, abs=0.05)
        assert found["dropout"].dropped == pytest.approx(0.4, abs=0.05)
        assert [drop.step_count for drop in find(model)] == [0, 0]
        assert find(model).summary() == "\n\n".join(drop.summary() for drop in find(model))
        assert find(nn.ReLU()).summary() == "<no injections>"

    def test_a_change_that_fails_in_one_is_undone_in_all(self, model: Small) -> None:
        first = inject(model, Dropout(0.4), layers="fc", schedule=LinearSchedule(10))
        second = inject(model, Dropout(0.4), layers="conv1", schedule=LambdaSchedule(rising), name="second")
        every = find(model)
        optimizer, other = (torch.optim.SGD(model.parameters(), 0.1) for _ in range(2))
        assert every == (second, first)
        every = every[::-1]
        every.seek(2)
        for fails in (lambda: every.seek(5), lambda: every.step(3)):
            with pytest.raises(ValueError, match=r"p must lie in \[0, 1\]"):
                fails()
            assert [drop.step_count for drop in every] == [2, 2]
            assert (first.p, second.p) == (pytest.approx(0.08), pytest.approx(0.8))
        second.follow(other)
        with pytest.raises(InjectionError, match="follows another"):
            every.follow(optimizer)
        first.step()  # follows none
        second.remove()
        for switch in (every.disable, every.enable):
            with pytest.raises(InjectionError, match="was removed"):
                switch()
        assert first.p == pytest.approx(0.12)

    def test_eject_all_or_by_name(self, model: Small) -> None:
        inject(model, DropBlock(0.2, 3), layers="layer1.*")
        inject(model, Dropout(0.4), layers="fc")
        with pytest.raises(InjectionError, match="no injection 'x'"):
            eject(model, "x")
        assert eject(model, "dropblock") == 2
        assert eject(model) == 1
        assert eject(model) == 0

    def test_a_removed_handle_says_so(self, model: Small) -> None:
        drop = inject(model, Dropout(0.4), layers="fc")
        eject(model)
        for use in (drop.step, drop.enable, drop.disable, drop.state_dict, lambda: drop.seek(3), lambda: drop.config):
            with pytest.raises(InjectionError, match="'dropout' was removed from its model"):
                use()

    def test_the_schedule_of_none_is_constant(self) -> None:
        _, drop = layer()
        assert drop.schedule == ConstantSchedule()
        drop.step()
        assert drop.p == 0.5

    def test_stacked_injections_both_work(self) -> None:
        model, _ = layer(0.5)
        inject(model, Dropout(0.5), layers="0", on_existing="stack", name="second")
        assert zeroed(model, X) == pytest.approx(0.75, abs=0.02)

    def test_replace_takes_the_old_one_off(self) -> None:
        model, old = layer(0.5)
        inject(model, Dropout(0.2), layers="0", on_existing="replace")
        assert zeroed(model, X) == pytest.approx(0.2, abs=0.02)
        with pytest.raises(InjectionError, match="was removed"):
            old.step()

    def test_replace_warns_of_sites_that_get_nothing_back(self, model: Small) -> None:
        inject(model, Dropout(0.5), layers="layer?.*")
        with pytest.warns(HookdropWarning, match="takes it off 2 sites that the new one does not have: 'layer1.0'"):
            inject(model, Dropout(0.5), layers="layer2.*", on_existing="replace")
        assert len(find(model)[0].sites) == 2

    def test_input_and_output_of_a_layer_are_two_places(self, model: Small) -> None:
        inject(model, Dropout(0.5), layers="fc")
        inject(model, Dropout(0.5), layers="fc", at="input", name="before")
        assert len(find(model)) == 2


def test_warnings_point_at_the_callers_line(model: Small) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        inject(model, Dropout(0.5), layers="**")
    assert caught[0].filename == __file__


class TestUnits:
    """A probability and a standard deviation are no rates of one kind."""

    def drop(self) -> tuple[nn.Module, Injection]:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        return model, inject(model, {"0": Dropout(0.1), "1": GaussianNoise(5.0), "2": Dropout(0.2)})

    def test_they_have_no_common_p(self) -> None:
        model, drop = self.drop()
        assert (drop.p, drop.keep_prob, drop.target_p) == (None, None, None)
        assert [site.p for site in drop.sites] == [0.1, 5.0, 0.2]
        assert "p=0.2 of 0.2, std=5 of 5" in repr(drop)
        assert drop.metrics() == {
            "hookdrop/dropout+gaussiannoise/p": 0.2,
            "hookdrop/dropout+gaussiannoise/std": 5.0,
            "hookdrop/dropout+gaussiannoise/step": 0.0,
            "hookdrop/dropout+gaussiannoise/enabled": 1.0,
        }
        assert len(find(model)) == 1

    def test_setting_one_names_the_sites_and_changes_nothing(self) -> None:
        model, drop = self.drop()
        sets: list[Callable[[], object]] = [
            lambda: setattr(drop, "target_p", 0.5),
            lambda: setattr(drop, "p", 0.5),
            lambda: setattr(drop, "keep_prob", 0.5),
            lambda: drop.sampling(p=0.2).__enter__(),
        ]
        for change in sets:
            with pytest.raises(InjectionError, match=r"different units(.|\n)*p: '0', '2'(.|\n)*No rate was changed"):
                change()
        assert [site.p for site in drop.sites] == [0.1, 5.0, 0.2]
        with drop.sampling():
            assert not torch.equal(model.eval()(torch.ones(4)), model(torch.ones(4)))

    def test_one_unit_beside_a_regularizer_without_a_rate(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        drop = inject(model, {"0": Dropout(0.1), "1": ClipActivationGrad(max_norm=1.0)})
        drop.target_p = 0.3
        assert (drop.p, drop.keep_prob, [site.p for site in drop.sites]) == (0.3, 0.7, [0.3, None])


def test_a_lazy_first_parameter() -> None:
    """It has no values before the first forward."""
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.Linear(4, 4))
    drop = inject(model, Dropout(0.5), layers="1", schedule=LinearSchedule(10))
    optimizer = torch.optim.SGD(model[2].parameters(), 0.1)
    drop.follow(optimizer)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert (drop.step_count, drop.check()) == (1, [])
    drop.remove()


@pytest.mark.parametrize("name", ["plan", "inject"])
def test_a_function_is_not_imported_as_a_module(name: str) -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"hookdrop.{name}")
    assert callable(getattr(hookdrop, name))


class TensorRate(Regularizer):
    """Keeps its rate as a tensor."""

    def __init__(self, p: float = 0.1) -> None:
        super().__init__()
        self.p = torch.tensor(p)

    def regularize(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 - self.p)


def test_a_custom_regularizer_may_keep_its_rate_as_a_tensor() -> None:
    model = nn.Sequential(nn.Identity())
    drop = inject(model, TensorRate(0.5), layers="0", schedule=LinearSchedule(10))
    drop.seek(5)
    assert (drop.p, type(drop.sites[0].p), model(torch.ones(2)).tolist()) == (0.25, float, [0.75, 0.75])
