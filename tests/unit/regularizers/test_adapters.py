"""Foreign modules, functions and user-defined regularizers in a model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hookdrop import (
    InjectionError,
    LinearSchedule,
    Rate,
    Regularizer,
    inject,
)
from tests.support.models import Small


class TestForeignModules:
    """Modules and functions that are not part of hookdrop."""

    def test_inplace_is_disabled_on_the_copy(self) -> None:
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

    def test_a_user_defined_regularizer_with_a_schedule(self, images: torch.Tensor, model: Small) -> None:
        drop = inject(model, Shrink(0.5), layers="fc", schedule=LinearSchedule(2))
        drop.step(2)
        assert drop.metrics()["hookdrop/shrink/p"] == 0.5
        model.train()
        torch.manual_seed(1)
        shrunk = model(images)
        with drop.disabled():
            torch.testing.assert_close(shrunk * 2, model(images))


class Shrink(Regularizer):
    rate = Rate("amount")

    def __init__(self, amount: float = 0.1) -> None:
        super().__init__()
        self.amount = amount

    def regularize(self, x: torch.Tensor, rate: float) -> torch.Tensor:
        return x * (1 - rate)


class TensorRate(Regularizer):
    """Stores its rate as a tensor."""

    def __init__(self, p: float = 0.1) -> None:
        super().__init__()
        self.p = torch.tensor(p)

    def regularize(self, x: torch.Tensor, rate: float) -> torch.Tensor:
        return x * (1 - rate)


def test_a_user_defined_regularizer_may_store_its_rate_as_a_tensor() -> None:
    model = nn.Sequential(nn.Identity())
    drop = inject(model, TensorRate(0.5), layers="0", schedule=LinearSchedule(10))
    drop.seek(5)
    assert (drop.p, type(drop.sites[0].p), model(torch.ones(2)).tolist()) == (0.25, float, [0.75, 0.75])
