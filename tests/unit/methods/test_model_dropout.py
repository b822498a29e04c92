"""`set_dropout` changes the rates of the dropout that a model has, by a schedule or at once, and restores them."""

import re
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hookdrop
from hookdrop import HookdropWarning, InjectionError, LayerError, find, inject, plan
from hookdrop.recipes import set_dropout
from tests.support.error_catalog import OwnLoss
from tests.support.models import toy


class Block(nn.Module):
    """Drops at an own rate, at a rate of its configuration, and at a constant."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.rate, self.linear = config, 0.0, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.linear(x), self.rate, self.training)
        return F.dropout(F.dropout(x, self.config.dropout, self.training), 0.25, self.training)


class ReadOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        vars(self)["rate"] = 0.3

    def __setattr__(self, name: str, value: object) -> None:
        if name == "rate":
            raise KeyError("read-only")
        super().__setattr__(name, value)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.rate, self.training)


X = torch.ones(2, 4)
pytestmark = pytest.mark.filterwarnings("ignore:functional dropout was not looked for")


@pytest.fixture
def model() -> Iterator[nn.Sequential]:
    """Modules only: no example is needed."""
    found = nn.Sequential(nn.Dropout(0.1), nn.LSTM(4, 4, 2, dropout=0.2), nn.Sequential(nn.Dropout(0.3)))
    yield found
    find(found).remove()


def rates(model: Any) -> list[float]:
    return [model[0].p, model[1].dropout, model[2][0].p]


class TestPlan:
    def test_it_lists_the_rates_also_those_in_the_code(self) -> None:
        model = nn.Sequential(nn.Dropout(0.1), Block(SimpleNamespace(dropout=0.2)))
        found = plan(model, set_dropout(), example_input=X)
        wanted = [("0", 0.1), ("1.rate", 0.0), ("1.config.dropout", 0.2), ("1.dropout(0.25)", 0.25)]
        assert [(site.name, site.p) for site in found.sites] == wanted
        assert found.warnings == []
        assert "0.25 in the code: can be sampled, not changed" in str(found)
        assert "Block.config.dropout (now 0.2)" in str(found)
        assert (model[0].p, model[1].rate) == (0.1, 0.0)

    def test_what_still_draws_at_rate_0_is_named_with_module_and_line(self) -> None:
        def bernoulli(m: Any, x: Tensor) -> Tensor:
            return x * torch.bernoulli(torch.full_like(x, m.keep)) if m.training else x

        layers = nn.Dropout(0.1), toy(bernoulli, keep=0.5), nn.Dropout(0.2), toy(bernoulli, keep=0.5)
        model = nn.Sequential(*layers)
        with pytest.warns(match=r"out of reach.*Toy calls bernoulli in test_model_dropout.py, line \d+ \('1', '3'\)"):
            inject(model, set_dropout(p=0.0), example_input=X)
        twin = nn.Sequential(*layers[::2])
        assert plan(twin, set_dropout(p=0.0), example_input=X).warnings == []

    def test_dropout_in_eval_mode_is_named(self) -> None:
        class Always(nn.Dropout):
            def train(self, mode: bool = True) -> Any:
                return super().train(True)

        always = toy(lambda m, x: F.dropout(x, m.rate), rate=0.1)
        in_training = toy(lambda m, x: F.dropout(x, m.rate, m.training), rate=0.1)
        model = nn.Sequential(always, in_training, Always(0.5))
        warnings = plan(model.eval(), set_dropout(), example_input=torch.ones(64, 4)).warnings
        random = [text for text in warnings if "in eval mode" in text]
        assert [re.findall(r"\('(.*)'\)", text) for text in random] == [["0"], ["2"]]

    def test_without_an_example_it_lists_modules_and_says_so(self) -> None:
        found = plan(nn.Sequential(nn.Dropout(0.1), Block(SimpleNamespace(dropout=0.2))), set_dropout())
        assert [site.name for site in found.sites] == ["0"]
        assert [text for text in found.warnings if "functional dropout was not looked for" in text]

    def test_injected_dropout_is_no_dropout_of_the_model(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1))
        inject(model, hookdrop.Dropout(0.3), layers="0")
        found = plan(model, set_dropout(), example_input=X)
        assert [site.name for site in found.sites] == ["1"]
        assert found.warnings == []

    def test_a_model_that_refuses_training_mode_has_its_modules(self) -> None:
        found = plan(nn.Sequential(OwnLoss(0.1)), set_dropout(), example_input=X)
        assert [site.name for site in found.sites] == ["0"]
        assert "does not run in training mode: ValueError: labels are required" in found.warnings[0]


class TestRates:
    @pytest.mark.parametrize("pattern", ["1.dropout", "*.dropout", "**.dropout", re.compile(r".*dropout")])
    def test_patterns_change_only_matching_rates(self, model: Any, pattern: Any) -> None:
        inject(model, set_dropout(p={pattern: 0.5}))
        assert rates(model) == [0.1, 0.5, 0.3]

    def test_functional_rates_change_in_the_module_and_in_its_configuration(self) -> None:
        model = nn.Sequential(Block(config := SimpleNamespace(dropout=0.2)))
        with inject(model, set_dropout(p={"**.dropout": 0.5, "**.rate": 0.4}), example_input=X):
            assert (config.dropout, model[0].rate) == (0.5, 0.4)
        assert (config.dropout, model[0].rate) == (0.2, 0.0)

    def test_invalid_rates_raise(self) -> None:
        for p in (1.5, 2, -0.1, float("nan")):
            for make in (lambda p=p: set_dropout(p), lambda p=p: set_dropout({"0": 0.5, "2.0": p})):
                with pytest.raises(ValueError):
                    make()
        for wrong in ("0.1", True, [0.1], {"0": "0.1"}):
            with pytest.raises(TypeError):
                set_dropout(p=wrong)

    def test_patterns_that_match_nothing_or_twice_raise(self, model: Any) -> None:
        for p in ({"0": 0.5, "1.dropot": 0.5}, {"0": 0.5, "**": 0.4}, {}):
            with pytest.raises(LayerError):
                inject(model, set_dropout(p=p))
        assert rates(model) == [0.1, 0.2, 0.3]

    def test_failing_setter_raises_and_changes_nothing(self) -> None:
        model = nn.Sequential(nn.Dropout(0.3), ReadOnly(), nn.Dropout(0.3))
        with pytest.raises(KeyError):
            inject(model, set_dropout(p=0.5), example_input=X)
        assert [model[0].p, model[1].rate, model[2].p] == [0.3, 0.3, 0.3]

    def test_exclude_takes_layers(self, model: Any) -> None:
        inject(model, set_dropout(p=0.5), exclude=nn.LSTM)
        assert rates(model) == [0.5, 0.2, 0.5]

    def test_first_rate_of_a_module_that_only_drops_has_its_name(self) -> None:
        two = toy(lambda m, x: F.dropout(F.dropout(x, m.rate, m.training), m.rate2, m.training), rate=0.3, rate2=0.2)
        found = plan(nn.Sequential(two), set_dropout(), example_input=X)
        assert [site.name for site in found.sites] == ["0", "0.rate2"]


class TestHandle:
    def test_schedule_step_disable_and_remove(self, model: Any) -> None:
        settings: Any = {"schedule": hookdrop.EarlySchedule(0.3), "total_steps": 10}
        with inject(model, set_dropout(), p_scale={"**": 0.5}, **settings) as own:
            assert rates(model) == [0.05, 0.1, 0.15]
            own.step(3)
            assert rates(model) == [0, 0, 0]
        recipe = "set_dropout(p={'0': 0.6, '1.dropout': 0.4})"
        spec = hookdrop.InjectionSpec(recipe, schedule="LinearSchedule(steps=10)")
        drop = inject(model, hookdrop.InjectionSpec.from_dict(spec.to_dict()))
        for step in range(4):
            assert rates(model) == pytest.approx([0.06 * step, 0.04 * step, 0.3])
            drop.step()
        with drop.disabled():
            assert rates(model) == [0.0, 0.0, 0.3]
        assert rates(model) == pytest.approx([0.24, 0.16, 0.3])
        assert drop.metrics()["hookdrop/set_dropout/p"] == pytest.approx(0.24)
        drop.remove()
        assert rates(model) == [0.1, 0.2, 0.3]

    def test_rate_that_something_else_changed_is_left_alone_with_a_warning(self, model: Any) -> None:
        drop = inject(model, set_dropout(p=0.5), schedule=hookdrop.LinearSchedule(10))
        drop.step(2)
        model[0].p = 0.7
        with pytest.warns(HookdropWarning, match="'0', which something else has changed"):
            drop.step()
        assert rates(model) == pytest.approx([0.7, 0.15, 0.15])
        with pytest.warns(HookdropWarning, match="does not restore 1 rate"):
            drop.remove()
        assert rates(model) == [0.7, 0.2, 0.3]

    def test_second_change_needs_a_decision(self, model: Any) -> None:
        first = inject(model, set_dropout(p=0.5))
        with pytest.raises(InjectionError):
            inject(model, set_dropout(p=0.6))
        with inject(model, set_dropout(p={"0": 0.6}), on_existing="stack", name="second"):
            assert rates(model) == [0.6, 0.5, 0.5]
        assert rates(model) == [0.5, 0.5, 0.5]
        second = inject(model, set_dropout(p=0.7), on_existing="replace")
        assert (rates(model), len(find(model))) == ([0.7, 0.7, 0.7], 1)
        second.remove()
        assert rates(model) == [0.1, 0.2, 0.3]
        first.remove()
        for name in ("first", "second"):
            inject(model, set_dropout(p=0.5), on_existing="stack", name=name)
        inject(model, set_dropout(p=0.6), on_existing="replace").remove()  # of the whole stack
        assert (rates(model), bool(find(model))) == ([0.1, 0.2, 0.3], False)

    def test_a_rate_of_a_shared_object_is_one_site(self) -> None:
        model = nn.Sequential(Block(config := SimpleNamespace(dropout=0.2)), Block(config))
        recipe = set_dropout(p={"**.dropout": 0.5})
        inject(model[0], recipe, example_input=X)
        with pytest.raises(InjectionError, match="1 site already carries 'set_dropout'"):
            inject(model[1], recipe, example_input=X, name="second")
        second = inject(model[1], set_dropout(p={"**.dropout": 0.6}), example_input=X, on_existing="replace")
        assert (config.dropout, bool(find(model[0]))) == (0.6, False)
        second.remove()
        assert config.dropout == 0.2

    def test_a_replacement_that_may_not_warn_changes_nothing(self, model: Any) -> None:
        drop = inject(model, set_dropout(p=0.5))
        model[0].p = 0.7
        with warnings.catch_warnings(action="error"), pytest.raises(HookdropWarning, match="does not restore 1 rate"):
            inject(model, set_dropout(p={"2.0": 0.6}), on_existing="replace")
        assert rates(model) == [0.7, 0.5, 0.5]
        assert find(model) == drop
        model[0].p = 0.5  # as before the change
        drop.remove()
        assert rates(model) == [0.1, 0.2, 0.3]

    def test_wrapped_model_and_exception(self, model: Any) -> None:
        with pytest.raises(KeyError), inject(nn.DataParallel(model), set_dropout(p=0.5)):
            assert rates(model) == [0.5, 0.5, 0.5]
            raise KeyError
        assert rates(model) == [0.1, 0.2, 0.3]
