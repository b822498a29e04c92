"""The mistakes that people make, and what they read then; and bad input, after which nothing has changed."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from hookdrop import (
    Dropout,
    HookdropWarning,
    LinearSchedule,
    Regularizer,
    ShapeError,
    inject,
)
from tests.support.nets import Small


class TestLater:
    def test_sites_lost_to_surgery(self, model: Small, images: torch.Tensor) -> None:
        drop = inject(model, Dropout(0.1), layers=["fc", "layer1.*"])
        model(images)
        model.fc = nn.Linear(8, 3)
        (problem,) = drop.check()
        assert problem.startswith("'dropout': 1 of 3 sites carry no hook any more: 'fc'.")
        with pytest.warns(HookdropWarning, match="carry no hook any more"):
            drop.summary()
        drop.summary()
        again = inject(model, Dropout(0.1), layers=["fc", "layer1.*"], on_existing="replace")
        model(images)
        assert again.check() == []

    def test_check_right_after_inject_finds_nothing(self, model: Small, images: torch.Tensor) -> None:
        """Only once something has run or stepped can a site that has not be reported."""
        drop = inject(model, Dropout(0.1), layers=["fc", "layer1.*"], schedule=LinearSchedule(10))
        assert drop.check() == []
        drop.step()
        assert "never ran" in drop.check()[0]
        model(images)
        assert drop.check() == []

    def test_saving_and_logging_raise_no_warnings(self, model: Small) -> None:
        """`state_dict` and `metrics` run in every step of a training, under `-W error` too."""
        drop = inject(model, Dropout(0.1), layers="fc", schedule=LinearSchedule(100))
        model.fc = nn.Identity()
        drop.step(20)
        drop.state_dict()
        drop.metrics()
        with pytest.warns(HookdropWarning, match="carry no hook any more"):
            drop.summary()

    def test_an_own_regularizer_that_forgets_to_return(self, model: Small, images: torch.Tensor) -> None:
        inject(model, Forgets(), layers="fc")
        with pytest.raises(ShapeError, match="Forgets at 'fc' got .* and returned NoneType"):
            model(images)

    def test_an_error_inside_a_regularizer_names_the_site(self, model: Small, images: torch.Tensor) -> None:
        inject(model, torch.linalg.inv, layers="fc")
        with pytest.raises(RuntimeError) as error:
            model(images)
        assert error.value.__notes__ == ["in hookdrop's linalg_inv at 'fc'"]

    def test_always_in_eval(self, model: Small, images: torch.Tensor) -> None:
        drop = inject(model, Dropout(0.1), layers="layer?.*")
        model.layer2.eval()
        model(images)
        (problem,) = drop.check()
        assert "'layer2.0', 'layer2.1' only ran in eval mode" in problem
        assert [site.calls for site in drop.probe(images).sites.values()] == [3, 3, 0, 0]

    def test_nothing_is_said_of_a_fresh_injection(self, model: Small, images: torch.Tensor) -> None:
        drop = inject(model, Dropout(0.1), layers="layer?.*")
        model.eval()(images)
        assert drop.check() == []
        drop.summary()
        drop.state_dict()

    def test_a_thousand_rounds_leave_nothing_behind(self, model: Small) -> None:
        from hookdrop.hooks.hook import SiteHook

        def alive() -> int:  # other tests may have left some to a compiler's caches
            gc.collect()
            return sum(type(thing) is SiteHook for thing in gc.get_objects())

        before = alive()
        for _ in range(1000):
            inject(model, Dropout(0.1), layers="fc").remove()
        assert alive() == before


class Forgets(Regularizer):
    """To return what it made."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.p = p

    def regularize(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[return]
        x * 0
