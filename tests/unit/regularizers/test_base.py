"""The base class: rates as arguments, and classes defined by users."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import hookdrop
from hookdrop import (
    Dropout,
    Regularizer,
)
from hookdrop.regularizers import as_regularizer
from tests.support.regularizers import OWN, Case

# --- the rate as an argument


class OnlyRegularize(Regularizer):
    """Reads its rate from an attribute and counts its calls."""

    rate_name = "amount"

    def __init__(self, amount: float = 0.1) -> None:
        super().__init__()
        self.amount = self.valid_rate(amount)
        self.calls = 0

    def regularize(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * (1 - self.amount)


class Counting(nn.Module):
    """A foreign module with its own state."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p, self.calls = p, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * (1 - self.p)


def halve(x: torch.Tensor) -> torch.Tensor:
    return x / 2


class TestRegularizeAt:
    @pytest.mark.parametrize("case", OWN.values(), ids=OWN)
    def test_matches_a_regularizer_with_that_rate(self, case: Case) -> None:
        regularizer, x = case.regularizer, case.input().requires_grad_()
        if case.skips_layers:
            return  # needs another tensor
        before = regularizer.rate
        other = None if before is None else before / 2

        def results(call: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
            torch.manual_seed(6)
            y = call(x)
            return [y, torch.autograd.grad(y.square().sum(), x)[0]]

        found = results(lambda x: regularizer.regularize_at(x, other))
        assert regularizer.rate == before
        twin = copy.deepcopy(regularizer)
        if other is not None:
            twin.set_rate(other)
        assert all(map(torch.equal, found, results(twin.regularize)))

    def test_a_class_with_only_regularize_runs_at_its_own_rate(self) -> None:
        layer, x = OnlyRegularize(0.5), torch.ones(2)
        assert layer.regularize_at(x, 0.5).tolist() == [0.5, 0.5]
        assert layer.calls == 1

    def test_another_rate_runs_a_copy_and_leaves_the_original_unchanged(self) -> None:
        layer, x = OnlyRegularize(0.5), torch.ones(2)
        for rate in (0.25, torch.tensor(0.25, dtype=torch.float64)):
            assert layer.regularize_at(x, rate).tolist() == [0.75, 0.75]
        assert (layer.amount, layer.calls) == (0.5, 0)

    def test_foreign_module_and_function(self) -> None:
        foreign, x = as_regularizer(Counting(0.5)), torch.ones(2)
        assert foreign.regularize_at(x, 0.5).tolist() == [0.5, 0.5]
        assert foreign.module.calls == 1
        assert foreign.regularize_at(x, 0.25).tolist() == [0.75, 0.75]
        assert (foreign.rate, foreign.module.calls) == (0.5, 1)
        assert as_regularizer(halve).regularize_at(x, None).tolist() == [0.5, 0.5]

    def test_overriding_only_regularize_takes_precedence(self) -> None:
        """The inherited `regularize_at` is not used, but `super().regularize` still reaches it."""

        class Negated(Dropout):
            def regularize(self, x: torch.Tensor) -> torch.Tensor:
                return -super().regularize(x)

        class Again(Negated):
            pass

        for cls in (Negated, Again):
            assert set(cls(0.5).regularize_at(torch.ones(100), 0.5).tolist()) == {0.0, -2.0}
            assert set(cls(0.5).regularize_at(torch.ones(100), 0.75).tolist()) == {0.0, -4.0}
            assert "as a Python float" in cls(0.5).graph_break

    def test_a_class_with_neither_method_raises(self) -> None:
        class Nothing(Regularizer):
            rate_name = None

        with pytest.raises(
            NotImplementedError, match=r"Nothing must define regularize_at\(self, x, rate\) or regularize"
        ):
            Nothing()(torch.ones(2))


# --- user-defined classes


@pytest.mark.parametrize("name", ["rate", "settings", "title", "drops", "check", "graph_break", "max_rate", "forward"])
def test_a_reserved_rate_name_raises_at_class_definition(name: str) -> None:
    with pytest.raises(
        TypeError, match=f"Own: rate_name is '{name}', which is a reserved name(.|\n)*rename the attribute"
    ):
        type("Own", (Regularizer,), {"rate_name": name})


@pytest.mark.parametrize("name", ["settings", "title", "drops", "check", "rate_name"])
def test_a_reserved_setting_name_raises_at_class_definition(name: str) -> None:
    scope: dict[str, type] = {}
    with pytest.raises(
        TypeError, match=f"Own: an argument of __init__ is '{name}', which is a reserved name of Regularizer"
    ):
        exec(f"class Own(Base):\n  def __init__(self, p, {name}=1): pass", {"Base": Regularizer}, scope)


def test_a_rate_defined_by_a_property_is_allowed() -> None:
    class Own(Regularizer):
        rate_name = "rate"

        def __init__(self, rate: float = 0.5) -> None:
            super().__init__()
            self.rate = rate

        rate = property(lambda self: self.kept, lambda self, value: setattr(self, "kept", value))

        def regularize(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.rate

    layer = Own(0.25)
    layer.set_rate(0.5)
    assert layer(torch.ones(1)).item() == 0.5


class DropsASetting(Regularizer):
    """Does not store its second setting."""

    def __init__(self, p: float = 0.1, scale: float = 2.0) -> None:
        super().__init__()
        self.p = self.valid_rate(p)

    def regularize(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1.0


def test_repr_shows_only_stored_settings() -> None:
    assert repr(DropsASetting(0.2)) == "DropsASetting(p=0.2)"
    model = nn.Sequential(nn.Identity())
    assert "DropsASetting(p=0.2)" in str(hookdrop.plan(model, DropsASetting(0.2), layers="0"))
    with pytest.raises(
        hookdrop.StateError, match="does not store its settings: 'DropsASetting' object has no attribute 'scale'"
    ):
        _ = hookdrop.inject(model, DropsASetting(0.2), layers="0").config
