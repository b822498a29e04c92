"""`report_dropout` finds a model's built-in dropout, `set_dropout` changes and restores its rates."""

from __future__ import annotations

import copy
import linecache
import re
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import dropout as zero_some

import hookdrop
from hookdrop import HookdropWarning, InjectionError, LayerError, LinearSchedule, find, inject
from hookdrop.recipes import report_dropout, set_dropout
from tests.support.models import DropoutInMethod, SubmoduleRate, TwoDropouts


class Functional(nn.Module):
    """Functional dropout with rates from an attribute and from a literal."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.dropout_rate = 0.2
        self.dropped_so_far = 0.5  # no forward reads it

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.linear(x), self.dropout_rate, self.training)
        return self.head(F.dropout(x, 0.25, training=self.training))

    def head(self, x: Tensor) -> Tensor:
        return F.dropout(x, p=self.dropout_rate if self.training else 0.0)


RATE = 0.4


class TestReportDropout:
    def test_unreadable_source_is_reported(self) -> None:
        scope: dict[str, Any] = {"Module": nn.Module}
        exec("class Net(Module):\n    def forward(self, x): return x", scope)
        assert "the source of Net.forward is not available" in str(report_dropout(scope["Net"]()))

    def test_lists_modules_and_attributes_with_their_rates(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.LSTM(4, 4, 2, dropout=0.2), nn.AlphaDropout(0.3))
        assert [(rate.name, rate.value) for rate in report_dropout(model).rates] == [
            ("1", 0.1),
            ("2.dropout", 0.2),
            ("3", 0.3),
        ]

    def test_finds_functional_dropout_whose_rate_is_an_attribute(self) -> None:
        assert [rate.name for rate in report_dropout(Functional()).rates] == ["dropout_rate"]

    def test_reports_functional_dropout_that_is_out_of_reach(self) -> None:
        report = report_dropout(nn.Sequential(Functional(), Functional()))
        assert report.out_of_reach == {
            "Functional.forward calls F.dropout(x, 0.25, training=self.training)": ["0", "1"]
        }
        assert "out of reach: Functional.forward calls F.dropout" in str(report)

    def test_lists_hookdrop_regularizers_used_as_layers(self) -> None:
        model = nn.Sequential(nn.Conv2d(3, 3, 3), hookdrop.DropBlock(0.2, 3), hookdrop.GaussianNoise(0.1))
        assert [(rate.name, rate.value) for rate in report_dropout(model).rates] == [("1", 0.2)]
        with inject(model, set_dropout(0.5)):
            assert model[1].p == 0.5
        assert model[1].p == 0.2

    def test_model_without_dropout_reports_0_rates(self) -> None:
        report = report_dropout(nn.Linear(2, 2))
        assert (list(report.rates), report.out_of_reach) == ([], {})
        assert str(report).startswith("0 dropout rates in Linear")

    def test_lists_a_shared_module_once(self) -> None:
        shared = nn.Dropout(0.1)
        assert [rate.name for rate in report_dropout(nn.Sequential(shared, nn.ReLU(), shared)).rates] == ["0"]

    def test_looks_through_wrappers(self) -> None:
        model = nn.DataParallel(nn.Sequential(nn.Dropout(0.1)))
        assert [rate.name for rate in report_dropout(model).rates] == ["0"]

    def test_notebook_repr_is_a_table(self) -> None:
        assert "<td>0.1</td>" in report_dropout(nn.Sequential(nn.Dropout(0.1)))._repr_html_()


def undecorated(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator without functools.wraps."""

    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


class Holder(nn.Module):
    """Base of the models below: stores its keyword arguments as attributes."""

    rates: Any

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)


class RateInConfig(Holder):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.cfg.dropout, self.training)


class RateInConfigAlias(Holder):
    def forward(self, x: Tensor) -> Tensor:
        args = self.args
        return F.dropout(x, args.p if self.training else 0.0)


class RateInDict(Holder):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.rates["first"], self.training)


class RateInOtherModule(Holder):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.place.p, self.training)


class GlobalRate(Holder):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, RATE, self.training)


class ClassAttributeRate(Holder):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, ClassAttributeRate.RATE, self.training)

    RATE = 0.3


class ArithmeticRate(Holder):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 1 - self.keep, self.training)


class DefaultArgumentRate(Holder):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)

    def head(self, x: Tensor, p: float = 0.3) -> Tensor:
        return F.dropout(x, p, self.training)


class LoopRate(Holder):
    def forward(self, x: Tensor) -> Tensor:
        for p in self.rates:
            x = F.dropout(x, p, self.training)
        return x


class DropoutCreatedInForward(Holder):
    def forward(self, x: Tensor) -> Tensor:
        return nn.Dropout(0.3)(x)


class ClassMethodDropout(Holder):
    @classmethod
    def head(cls, x: Tensor) -> Tensor:
        return F.dropout(x, 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


class PropertyDropout(Holder):
    @property
    def weight(self) -> Tensor:
        return F.dropout(self.kept, 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class PartialArgumentRate(Holder):
    def forward(self, x: Tensor) -> Tensor:
        return partial(self.head, p=0.3)(x)

    def head(self, x: Tensor, p: float) -> Tensor:
        return F.dropout(x, p)


class NestedFunctionDropout(Holder):
    def forward(self, x: Tensor) -> Tensor:
        def head(x: Tensor, p: float) -> Tensor:
            return F.dropout(x, p)

        return head(x, 0.3)


class RenamedDropout(Holder):
    def forward(self, x: Tensor) -> Tensor:
        return zero_some(x, 0.3)


UNREACHED: dict[str, tuple[nn.Module, str]] = {
    "a config object": (
        RateInConfig(cfg=SimpleNamespace(dropout=0.3)),
        "RateInConfig.forward calls F.dropout(x, self.cfg.dropout, self.training)",
    ),
    "a config object through a local variable": (
        RateInConfigAlias(args=SimpleNamespace(p=0.3)),
        "RateInConfigAlias.forward calls F.dropout(x, args.p if self.training else 0.0)",
    ),
    "a dictionary": (
        RateInDict(rates={"first": 0.3}),
        "RateInDict.forward calls F.dropout(x, self.rates['first'], self.training)",
    ),
    "a module that does not drop": (
        RateInOtherModule(place=Holder(p=0.3)),
        "RateInOtherModule.forward calls F.dropout(x, self.place.p, self.training)",
    ),
    "a global constant": (GlobalRate(), "GlobalRate.forward calls F.dropout(x, RATE, self.training)"),
    "a class attribute": (
        ClassAttributeRate(),
        "ClassAttributeRate.forward calls F.dropout(x, ClassAttributeRate.RATE, self.training)",
    ),
    "arithmetic": (ArithmeticRate(keep=0.9), "ArithmeticRate.forward calls F.dropout(x, 1 - self.keep, self.training)"),
    "a default argument": (DefaultArgumentRate(), "DefaultArgumentRate.forward calls F.dropout(x, p, self.training)"),
    "a loop": (LoopRate(rates=[0.3]), "LoopRate.forward calls F.dropout(x, p, self.training)"),
    "a module created in each call": (
        DropoutCreatedInForward(),
        "DropoutCreatedInForward.forward calls nn.Dropout(0.3)",
    ),
    "a class method": (ClassMethodDropout(), "ClassMethodDropout.forward calls F.dropout(x, 0.3)"),
    "a property": (PropertyDropout(), "PropertyDropout.forward calls F.dropout(self.kept, 0.3)"),
    "an argument bound by partial": (PartialArgumentRate(), "PartialArgumentRate.forward calls F.dropout(x, p)"),
    "a nested function": (NestedFunctionDropout(), "NestedFunctionDropout.forward calls F.dropout(x, p)"),
    "dropout imported under another name": (RenamedDropout(), "RenamedDropout.forward calls zero_some(x, 0.3)"),
    "a tensor": (DropoutInMethod(), "DropoutInMethod.forward reads rate, a Tensor"),
}
UNREACHED["a tensor"][0].rate = torch.tensor(0.3)


class Flags(Holder):
    """Numbers with "drop" in their names that are not rates."""

    def forward(self, x: Tensor) -> Tensor:
        return x if self.drop_first + self.num_dropped + self.drop_count + self.drop_rate_id else x * self.training


class Kept(Holder):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.bernoulli(torch.full_like(x, self.drop_keep_prob))


class Fixed(nn.Module):
    """A read-only rate."""

    @property
    def drop_rate(self) -> float:
        return 0.3

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.drop_rate, self.training)


class Refusing(Fixed):
    @property
    def drop_rate(self) -> float:
        return 0.3

    @drop_rate.setter
    def drop_rate(self, value: float) -> None:
        raise KeyError("read-only")


class ManyDropouts(nn.Module):
    """Multi-sample dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.dropouts = nn.ModuleList([nn.Dropout(0.1), nn.Dropout(0.2)])

    def forward(self, x: Tensor) -> Tensor:
        return sum(dropout(x) for dropout in self.dropouts)


LAZY: Any = None


class LazyAttributes:
    """A lazily imported module whose import fails."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"failed to import {name}")


class LazyEverything(LazyAttributes):
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(f"failed to import {name}")


class LazyImport(Holder):
    def forward(self, x: Tensor) -> Tensor:
        return LAZY.attend(x) + LAZY.nn.dropped(x)


class LazyRate(Holder):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, LAZY.rate, self.training)


class TestSourceAnalysis:
    @pytest.mark.parametrize("name", UNREACHED)
    def test_rate_stored_elsewhere_is_out_of_reach(self, name: str) -> None:
        model, line = UNREACHED[name]
        report = report_dropout(nn.Sequential(model))
        assert report.out_of_reach == {line: ["0"]}
        assert [rate.name for rate in report.rates] == []

    def test_submodule_rate_is_listed_under_the_submodule(self) -> None:
        assert [rate.name for rate in report_dropout(SubmoduleRate()).rates] == ["attn_drop"]

    def test_forward_hidden_by_a_decorator_is_out_of_reach(self) -> None:
        class Net(nn.Module):
            @undecorated
            def forward(self, x: Tensor) -> Tensor:
                return F.dropout(self.head(x), 0.3)

        assert report_dropout(Net()).out_of_reach == {"the source of Net.forward is not available": [""]}

    def test_method_hidden_by_a_decorator_is_out_of_reach(self) -> None:
        class Net(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return self.head(x)

            @undecorated
            def head(self, x: Tensor) -> Tensor:
                return F.dropout(x, 0.3)

        assert report_dropout(Net()).out_of_reach == {"the source of Net.head is not available": [""]}

    def test_forward_overridden_on_the_instance_is_out_of_reach(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[1].forward = lambda x: F.dropout(x, 0.3)
        assert report_dropout(model).out_of_reach == {"this Linear instance overrides forward": ["1"]}

    def test_flags_and_counts_are_not_rates(self) -> None:
        report = report_dropout(Flags(drop_first=1, num_dropped=0, drop_count=0, drop_rate_id=3))
        assert (list(report.rates), report.out_of_reach) == ([], {})

    def test_keep_probability_is_out_of_reach(self) -> None:
        report = report_dropout(Kept(drop_keep_prob=0.9))
        assert list(report.rates) == []
        assert report.out_of_reach == {"Kept.forward reads drop_keep_prob, which may be a drop rate": [""]}

    @pytest.mark.parametrize(
        "name",
        [
            "dropout",
            "attention_dropout",
            "hidden_dropout_prob",
            "attn_pdrop",
            "layerdrop",
            "drop_path_prob",
            "patch_drop_rate",
            "dropout_prob",
            "dropout_p",
            "dropout1",
            "drop_connect_rate",
            "_drop_prob",
        ],
    )
    def test_common_rate_names_are_recognized(self, name: str) -> None:
        scope: dict[str, Any] = {"Holder": Holder}
        source = f"class Net(Holder):\n    def forward(self, x):\n        return draw(x, self.{name})\n"
        linecache.cache["<net>"] = (len(source), None, source.splitlines(True), "<net>")
        exec(compile(source, "<net>", "exec"), scope)
        scope["Net"].__module__ = __name__
        assert [rate.name for rate in report_dropout(scope["Net"](**{name: 0.1})).rates] == [name]

    def test_single_layer_rnn_has_no_dropout(self) -> None:
        with pytest.warns(UserWarning, match="num_layers greater than 1"):
            model = nn.Sequential(nn.LSTM(4, 4, 1, dropout=0.2), nn.GRU(4, 4, 2, dropout=0.2))
        report = report_dropout(model)
        assert ([rate.name for rate in report.rates], report.out_of_reach) == (["1.dropout"], {})

    def test_two_rates_of_one_module_have_two_names(self) -> None:
        model = nn.Sequential(TwoDropouts())
        assert [rate.name for rate in report_dropout(model).rates] == ["0", "0.rate2"]
        inject(model, set_dropout({"0.rate2": 0.9}))
        assert (model[0].rate, model[0].rate2) == (0.3, 0.9)

    def test_property_without_a_setter_is_out_of_reach(self) -> None:
        model = nn.Sequential(nn.Dropout(0.3), Fixed())
        report = report_dropout(model)
        assert [rate.name for rate in report.rates] == ["0"]
        assert report.out_of_reach == {"Fixed.forward reads drop_rate, a property without a setter": ["1"]}

    def test_dropout_modules_called_in_a_loop_are_listed(self) -> None:
        report = report_dropout(ManyDropouts())
        assert [rate.name for rate in report.rates] == ["dropouts.0", "dropouts.1"]
        assert report.out_of_reach == {}

    @pytest.mark.parametrize("lazy", [LazyAttributes, LazyEverything])
    def test_failing_lazy_import_is_ignored(self, lazy: type, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(globals(), "LAZY", lazy())
        report = report_dropout(nn.Sequential(nn.Dropout(0.1), LazyImport(), LazyRate()))
        assert [rate.name for rate in report.rates] == ["0"]
        assert report.out_of_reach == {"LazyRate.forward calls F.dropout(x, LAZY.rate, self.training)": ["2"]}


class TestSetDropout:
    @pytest.fixture
    def model(self) -> Any:
        return nn.Sequential(nn.Dropout(0.1), nn.LSTM(4, 4, 2, dropout=0.2), nn.Sequential(nn.Dropout(0.3)))

    @staticmethod
    def rates(model: nn.Module) -> list[float]:
        return [rate.value for rate in report_dropout(model).rates]

    def test_one_rate_applies_to_all(self, model: Any) -> None:
        inject(model, set_dropout(0.5))
        assert self.rates(model) == [0.5, 0.5, 0.5]

    def test_function_computes_each_rate(self, model: Any) -> None:
        inject(model, set_dropout(lambda name, rate: rate / 2))
        assert self.rates(model) == pytest.approx([0.05, 0.1, 0.15])

    @pytest.mark.parametrize("pattern", ["1.dropout", "*.dropout", "**.dropout", re.compile(r".*dropout")])
    def test_patterns_change_only_matching_rates(self, model: Any, pattern: Any) -> None:
        inject(model, set_dropout({pattern: 0.5}))
        assert self.rates(model) == [0.1, 0.5, 0.3]

    def test_exact_name_takes_precedence_over_a_glob(self) -> None:
        model = nn.ModuleDict({"a[1]": nn.Dropout(0.1), "a1": nn.Dropout(0.1)})
        inject(model, set_dropout({"a[1]": 0.5}))
        assert self.rates(model) == [0.5, 0.1]

    def test_unmatched_pattern_raises_and_suggests_names(self, model: Any) -> None:
        with pytest.raises(LayerError, match=r"'1.dropot' matches none of the 3 dropout rates by name") as excinfo:
            inject(model, set_dropout({"0": 0.5, "1.dropot": 0.5}))
        assert "did you mean: '1.dropout'" in str(excinfo.value)
        assert self.rates(model) == [0.1, 0.2, 0.3]

    def test_two_patterns_matching_one_rate_raise(self, model: Any) -> None:
        with pytest.raises(LayerError, match=r"two patterns match '0'"):
            inject(model, set_dropout({"0": 0.5, "**": 0.4}))

    @pytest.mark.parametrize("p", [1.5, -0.1, float("nan")])
    def test_rate_out_of_range_raises_and_changes_nothing(self, model: Any, p: float) -> None:
        with pytest.raises(ValueError, match="set_dropout, '2.0': p must"):
            inject(model, set_dropout({"0": 0.5, "2.0": p}))
        assert self.rates(model) == [0.1, 0.2, 0.3]

    @pytest.mark.parametrize("p", ["0.1", None, True, [0.1]])
    def test_invalid_rate_type_raises(self, model: Any, p: Any) -> None:
        with pytest.raises(TypeError, match="must be a number"):
            inject(model, set_dropout(p))

    def test_model_without_dropout_raises(self) -> None:
        with pytest.raises(LayerError, match="found no rate that it can change in Linear"):
            inject(nn.Linear(2, 2), set_dropout(0.1))

    def test_failing_setter_raises_and_changes_nothing(self) -> None:
        model = nn.Sequential(nn.Dropout(0.3), Refusing(), nn.Dropout(0.3))
        with pytest.raises(LayerError, match=r"cannot set '1.drop_rate' to 0.5: Refusing raised KeyError: 'read-only'"):
            inject(model, set_dropout(0.5))
        assert [rate.value for rate in report_dropout(model).rates] == [0.3, 0.3, 0.3]

    def test_property_without_a_setter_is_skipped(self) -> None:
        model = nn.Sequential(nn.Dropout(0.3), Fixed())
        with inject(model, set_dropout(0.5)):
            assert model[0].p == 0.5
        assert model[0].p == 0.3

    def test_empty_mapping_raises(self, model: Any) -> None:
        with pytest.raises(LayerError, match="the mapping is empty") as excinfo:
            inject(model, set_dropout({}))
        assert "'1.dropout'" in str(excinfo.value)

    def test_rates_are_restored_after_an_exception(self, model: Any) -> None:
        with pytest.raises(KeyError), inject(model, set_dropout(0.5)):
            raise KeyError
        assert self.rates(model) == [0.1, 0.2, 0.3]

    def test_nested_changes_are_restored_in_order(self, model: Any) -> None:
        with inject(model, set_dropout(0.5)):
            with inject(model, set_dropout({"0": 0.6}), on_existing="stack", name="inner"):
                assert self.rates(model) == [0.6, 0.5, 0.5]
            assert self.rates(model) == [0.5, 0.5, 0.5]
        assert self.rates(model) == [0.1, 0.2, 0.3]

    def test_rate_changed_afterward_is_not_restored_and_warns(self, model: Any) -> None:
        change = inject(model, set_dropout(0.5))
        model[0].p = 0.7
        with pytest.warns(HookdropWarning, match=r"did not restore 1 rate that something else has changed since: '0'"):
            change.remove()
        assert self.rates(model) == [0.7, 0.2, 0.3]
        change.remove()

    def test_repr_shows_old_and_new_rates(self, model: Any) -> None:
        change = inject(model, set_dropout({"0": 0.5}))
        assert repr(change).startswith("<Injection 'set_dropout': 1 site, p=0.5 of 0.5")
        assert change.sites[0].regularizer == "Dropout.p=0.5 (was 0.1)"

    def test_schedule_state_and_spec(self, model: Any) -> None:
        change = inject(model, set_dropout(0.5), schedule=LinearSchedule(10), p_scale={"0": 0.5}, exclude="2.0")
        change.seek(5)
        saved, spec = change.state_dict(), change.spec
        before = self.rates(model)
        with change.disabled():
            assert self.rates(model)[0] == 0.0
        assert self.rates(model) == before
        assert find(model) == change
        change.remove()
        assert self.rates(model) == [0.1, 0.2, 0.3]
        again = inject(model, spec)
        again.load_state_dict(saved)
        assert self.rates(model) == before

    def test_replaced_changes_restore_the_first_rates(self, model: Any) -> None:
        inject(model, set_dropout(0.5))
        inject(model, set_dropout(0.6), on_existing="replace")
        assert self.rates(model) == [0.6, 0.6, 0.6]
        find(model).remove()
        assert self.rates(model) == [0.1, 0.2, 0.3]

    def test_sampling_needs_hooks(self, model: Any) -> None:
        change = inject(model, set_dropout(0.5))
        for use in (change.sampling().__enter__, lambda: change.probe(torch.ones(1, 2))):
            with pytest.raises(InjectionError, match="needs hooks"):
                use()

    def test_copies_keep_the_changed_rates(self, model: Any) -> None:
        with inject(model, set_dropout(0.5)):
            twin = copy.deepcopy(model)
        assert self.rates(twin) == [0.5, 0.5, 0.5]
