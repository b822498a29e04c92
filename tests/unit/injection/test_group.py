"""All injections of a model, and handles on parts of a model."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn

from hookdrop import Dropout, LinearSchedule, StateError, find, inject, without_hooks
from hookdrop.hooks.registry import hooks_of
from tests.support.models import ROWS, mlp, pair
from tests.support.training import sgd


def test_follow_and_check_apply_to_all_injections() -> None:
    model = pair()
    inject(model, Dropout(0.5), layers="0.0", schedule=LinearSchedule(10))
    inject(model, Dropout(0.5), layers="1.0", schedule=LinearSchedule(10), name="second")
    optimizer = sgd(model)
    find(model).follow(optimizer)
    model(ROWS).sum().backward()
    optimizer.step()
    assert [drop.step_count for drop in find(model)] == [1, 1]
    assert find(model).check() == []
    with pytest.raises(StateError, match="inject first"):
        find(copy.deepcopy(nn.Linear(1, 1))).load_state_dict(find(model).state_dict())


class TestPartsOfModels:
    def test_sites_removed_from_a_part_no_longer_affect_the_target(self) -> None:
        model = nn.Sequential(mlp(), mlp())
        drop = inject(model, {"0.0": Dropout(0.5), "1.0": Dropout(0.1)})
        find(model[0]).remove()
        assert [site.name for site in drop.sites] == ["1.0"]
        assert drop.p == find(model).p == 0.1
        find(model).target_p = 0.2
        assert [site.p for site in find(model).sites] == [0.2]
        with find(model).sampling(p=0.3):
            assert [site.p for site in find(model).sites] == [0.3]

    @pytest.mark.filterwarnings("ignore:'dropout'. 1 of 2 sites lost their hook")
    @pytest.mark.parametrize("deleted", ["wrapper", "part"])
    def test_follow_continues_after_the_wrapper_or_a_part_is_deleted(self, deleted: str) -> None:
        model = nn.Sequential(mlp(), mlp())
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        outer: Any = nn.DataParallel(model)
        drop = inject(outer, Dropout(0.5), layers="*.0", schedule=LinearSchedule(100))
        (drop if deleted == "wrapper" else find(model[0])).follow(optimizer)
        del outer
        if deleted == "part":
            model[0] = mlp()
        gc.collect()
        for step in range(1, 6):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            assert find(model).step_count == step

    def test_handle_first_used_inside_without_hooks(self) -> None:
        model = mlp()
        drop = inject(model, Dropout(0.5), layers="0")
        twin, copied = copy.deepcopy((model, drop))
        with without_hooks(twin):
            assert "p=0.5" in repr(copied)
        copied.remove()
        assert list(hooks_of(twin)) == []
        assert drop.p == 0.5
