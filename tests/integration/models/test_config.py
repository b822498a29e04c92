"""Configs with classes of other libraries."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hookdrop import (
    LinearSchedule,
    StateError,
    from_config,
)
from tests.support.nets import Small
from tests.support.state import injected


def test_classes_of_other_libraries_must_be_in_allow() -> None:
    from timm.layers import DropPath

    for regularizer in (nn.Dropout2d(0.3), DropPath(0.3), torch.relu):
        schedule = None if regularizer is torch.relu else LinearSchedule(20)
        _, drop = injected(regularizer=regularizer, schedule=schedule)
        twin = Small()
        with pytest.raises(StateError, match=r"which is not part of hookdrop(.|\n)*allow=\[") as error:
            from_config(twin, drop.config)
        assert "No hook was placed" in str(error.value)
        allowed = regularizer if regularizer is torch.relu else type(regularizer)
        if regularizer is torch.relu:
            continue
        assert from_config(twin, drop.config, allow=[allowed]).config == drop.config
