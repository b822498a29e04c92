"""Compiled models leak no objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks

from hookdrop import (
    DropBlock,
    Dropout,
    inject,
)
from hookdrop.hooks.registry import hidden_modules
from tests.support.threads import X, entries, ours, pair, zeroed


class TestLeaks:
    """Inject and remove leave no objects behind."""

    @pytest.fixture
    def model(self) -> nn.Sequential:
        return pair()

    @pytest.fixture
    def optimizer(self, model: nn.Sequential) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), 0.01)

    @pytest.fixture(autouse=True)
    def no_leaks(self, model: nn.Sequential, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        inject(model, Dropout(0.5), layers="*").remove()
        gc.collect()
        listeners = set(_global_optimizer_post_hooks)
        gc.freeze()
        try:
            yield
            assert ours() == {}
        finally:
            gc.unfreeze()
        assert entries(model) == 0
        assert not optimizer._optimizer_step_post_hooks
        assert set(_global_optimizer_post_hooks) <= listeners
        assert not list(hidden_modules)

    @pytest.mark.filterwarnings("ignore:code compiled:hookdrop.HookdropWarning")
    def test_compiled_model_leaks_nothing(self, model: nn.Sequential) -> None:
        fast = torch.compile(model, backend="eager")
        for _ in range(3):
            with inject(model, DropBlock(0.5, 1, channel_dim=-1), layers="1"):
                assert zeroed(fast(X.view(8, 8, 8))) > 0.3
        assert zeroed(fast(X.view(8, 8, 8))) == 0.0
