"""MixStyle in compiled code."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from hookdrop import (
    LinearSchedule,
    MixStyle,
    inject,
)
from tests.support.compiling import graphs
from tests.support.mixstyle import styled


class TestMixStyle:
    @pytest.mark.filterwarnings("ignore:Skipping serialization:UserWarning")  # raised by PyTorch 2.6 itself
    @pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
    def test_compiled_mixstyle_follows_its_schedule(self, backend: str) -> None:
        """One graph above rate 0. The rate is right within 4 standard errors, and other batches are unchanged."""
        model = nn.Sequential(nn.Identity())
        drop = inject(model, MixStyle(1.0, alpha=5.0), layers="0", schedule=LinearSchedule(10))
        fast, x = torch.compile(model, backend=backend, fullgraph=True), styled()
        for step in (3, 7):
            drop.seek(step)
            mixed = sum(not torch.equal(fast(x), x) for _ in range(400))
            assert abs(mixed / 400 - step / 10) < 4 * math.sqrt(0.21 / 400)
        drop.seek(10)
        x.requires_grad_()
        y = fast(x)
        (grad,) = torch.autograd.grad(y.sum(), x)
        assert not torch.equal(y, x)
        assert len(grad.flatten(2).unique(dim=2).shape) == 3
        torch.testing.assert_close(grad, grad[:, :, :1, :1].expand_as(grad))  # one factor per channel
        assert graphs() <= 2
