"""Problems that `check` reports."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hookdrop import Dropout, DropPath, HookdropWarning, LinearSchedule, inject
from hookdrop.recipes import set_dropout
from tests.support.models import Small, toy


class TestChecks:
    def test_check_right_after_inject_reports_nothing(self, model: Small, images: torch.Tensor) -> None:
        """Sites that have not run are reported only after another site has run or the schedule has advanced."""
        drop = inject(model, Dropout(0.1), layers=["fc", "layer1.*"], schedule=LinearSchedule(10))
        assert drop.check() == []
        drop.step()
        assert "never ran" in drop.check()[0]
        model(images)
        assert drop.check() == []

    def test_state_dict_and_metrics_never_warn(self, model: Small) -> None:
        """They run at every training step, possibly under `-W error`."""
        drop = inject(model, Dropout(0.1), layers="fc", schedule=LinearSchedule(100))
        model.fc = nn.Identity()
        drop.step(20)
        drop.state_dict()
        drop.metrics()
        with pytest.warns(HookdropWarning, match="lost their hook"):
            drop.remove()

    def test_replaced_dropout_of_the_model_is_reported(self) -> None:
        model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5))
        drop = inject(model, set_dropout(p=0.2), example_input=torch.ones(2), schedule=LinearSchedule(50))
        assert drop.check() == []
        model[1] = nn.Dropout(0.7)
        (problem,) = drop.check()
        assert problem.startswith("'set_dropout': 1 of 2 sites lost their hook or rate: '1'")
        model[0] = nn.Identity()
        assert [one.partition(":")[2][:7] for one in drop.check()] == [" 2 of 2"]

    def test_layers_always_in_eval_mode_are_reported(self, model: Small, images: torch.Tensor) -> None:
        drop = inject(model, Dropout(0.1), layers="layer?.*")
        model.layer2.eval()
        model(images)
        (problem,) = drop.check()
        assert "'layer2.0', 'layer2.1' only ran in eval mode" in problem
        assert [site.calls for site in drop.probe(images).sites.values()] == [3, 3, 0, 0]

    def test_check_after_an_eval_forward_reports_nothing(self, model: Small, images: torch.Tensor) -> None:
        drop = inject(model, Dropout(0.1), layers="layer?.*")
        model.eval()(images)
        assert drop.check() == []
        drop.state_dict()


def test_sites_whose_rows_are_not_all_samples_warn_at_the_first_training_forward() -> None:
    forward = lambda m, x: m.after(m.inside(x.flatten(0, 1)).view(x.shape))  # noqa: E731
    model, x = toy(forward, inside=nn.Linear(2, 2), after=nn.Linear(2, 2)), torch.ones(2, 4, 2)
    drop = inject(model, DropPath(0.5), layers="*")
    model.eval()(x)
    with pytest.warns(HookdropWarning, match=r"'inside' has 8 and 'after' 2(.|\n)*example_input"):
        model.train()(x)
    model(x)
    drop.remove()
    for right in (DropPath(0.5, "batch"), DropPath(0.5)):
        with inject(model, right, layers="*", example_input=x):
            model(x)
