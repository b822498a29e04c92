"""The base class: rates as arguments, and classes defined by users."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookdrop import InjectionError, LinearSchedule, Rate, Regularizer, inject, plan
from hookdrop.regularizers import as_regularizer
from tests.support.injections import halve


class Own(Regularizer):
    """Its attribute has the name of the class attribute that declares it, and its range includes negative numbers."""

    rate: Any = Rate("rate", low=-2.0, high=2.0, neutral=1.0, kind="factor")

    def __init__(self, rate: float = 0.5) -> None:
        super().__init__()
        self.rate = rate

    def regularize(self, x: Tensor, rate: float) -> Tensor:
        return x * rate


class TensorRate(Own):
    """Stores its rate as a tensor."""

    rate: Any = Rate("p")

    def __init__(self, p: float = 0.1) -> None:
        super().__init__()
        self.p = torch.tensor(p)


class DropsASetting(Own):
    """Does not store its second setting."""

    rate: Any = Rate("p")

    def __init__(self, p: float = 0.1, scale: float = 2.0) -> None:
        super().__init__()
        self.p = p


class Missing(Regularizer):
    rate = Rate("amount")


class Counting(nn.Module):
    """A foreign module with its own state."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p, self.calls = p, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (1 - self.p)


class TestForeignModules:
    def test_at_another_rate_a_copy_runs(self) -> None:
        """Another thread may be running the module."""
        foreign, x = as_regularizer(Counting(0.5)), torch.ones(2)
        module = foreign.module
        assert foreign.regularize(x, 0.5).tolist() == [0.5, 0.5]
        for _ in range(2):
            assert foreign.regularize(x, 0.25).tolist() == [0.75, 0.75]
        assert (module.p, module.calls) == (0.5, 1)

    def test_inplace_is_disabled_on_the_copy_of_each_site(self) -> None:
        given = nn.Dropout(0.4, inplace=True)
        model = nn.Sequential(nn.Sigmoid(), nn.Sigmoid())
        drop = inject(model, given, layers="*", p_scale="depth")
        assert [site.p for site in drop.sites] == [0.2, 0.4]
        model(torch.randn(8, requires_grad=True)).sum().backward()
        assert given.inplace

    def test_a_function_has_no_rate(self) -> None:
        model = nn.Sequential(nn.Identity())
        drop = inject(model, halve, layers="0")
        assert model(torch.ones(2)).tolist() == [0.5, 0.5]
        assert (drop.p, drop.keep_prob, drop.target_p) == (None, None, None)
        assert drop.metrics() == {"hookdrop/halve/step": 0.0, "hookdrop/halve/enabled": 1.0}
        with pytest.raises(InjectionError):
            drop.target_p = 0.1
        with pytest.raises(InjectionError), drop.sampling(p=0.1):
            pass


class TestUserDefinedClasses:
    def test_any_attribute_name_and_range(self) -> None:
        model = nn.Sequential(nn.Identity())
        drop = inject(model, Own(-1.5), layers="0", schedule=LinearSchedule(2))
        drop.step()
        assert model(torch.ones(1)).item() == drop.sites[0].p == -0.75
        assert drop.metrics()["hookdrop/own/rate"] == -0.75
        assert drop.sites[0].regularizer == "Own(rate=-1.5)"
        for wrong in (lambda: setattr(drop, "target_p", 3.0), lambda: inject(nn.Sequential(), Own(7.0), layers="")):
            with pytest.raises(ValueError):
                wrong()
        with drop.disabled():
            assert drop.p == 1.0
        assert Own(0.25)(torch.ones(1)).item() == 0.25

    def test_a_rate_may_be_a_tensor(self) -> None:
        model = nn.Sequential(nn.Identity())
        drop = inject(model, TensorRate(0.5), layers="0", schedule=LinearSchedule(10))
        drop.seek(5)
        assert (drop.p, type(drop.sites[0].p), model(torch.ones(2)).tolist()) == (0.25, float, [0.25, 0.25])

    def test_a_class_without_regularize_or_its_rate_raises(self) -> None:
        class Nothing(Regularizer):
            rate = None

        with pytest.raises(NotImplementedError):
            Nothing()(torch.ones(2))
        for use in (lambda: inject(nn.Sequential(nn.ReLU()), Missing(), layers="0"), lambda: Missing()(torch.ones(2))):
            with pytest.raises(InjectionError, match="no attribute 'amount'"):
                use()


def test_repr_marks_settings_that_are_not_stored() -> None:
    model = nn.Sequential(nn.Identity())
    assert "DropsASetting(p=0.2, scale=?)" in str(plan(model, DropsASetting(0.2), layers="0"))


@pytest.mark.parametrize(
    ("rate", "bad", "span"),
    [
        (Rate("p"), 1.5, "[0, 1]"),
        (Rate("p", open_end=True), 1.0, "[0, 1)"),
        (Rate("std", high=math.inf), -1.0, "[0, inf)"),
        (Rate("a", low=-math.inf, high=2.0), 3.0, "(-inf, 2]"),
        (Rate("a", low=-math.inf, high=math.inf), -math.inf, "finite"),
    ],
)
def test_a_rate_states_its_range(rate: Rate, bad: float, span: str) -> None:
    assert rate.valid(0.5, "Own") == 0.5
    with pytest.raises(ValueError) as caught:
        rate.valid(bad, "Own")
    assert span in str(caught.value)


def test_a_neutral_rate_out_of_range_raises() -> None:
    with pytest.raises(ValueError):
        Rate("factor", neutral=2.0)
