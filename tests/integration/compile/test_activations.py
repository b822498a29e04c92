"""`observe.capture` of compiled models."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hookdrop.observe import capture


class TestCompiledModels:
    @pytest.mark.parametrize("fullgraph", [True, False])
    def test_capture_after_compiling(self, fullgraph: bool) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        fast = torch.compile(model, backend="eager", fullgraph=fullgraph)
        x = torch.randn(2, 4)
        fast(x)
        counted = torch._dynamo.utils.counters
        compiled_before = counted["frames"]["ok"]
        with capture(fast, "*", gradients=True) as seen:
            for _ in range(12):
                fast(x).sum().backward()
        assert torch.equal(seen["0"][0], model[0](x))
        assert len(seen["1"]) == len(seen.gradients["1"]) == 12
        fast(x)
        assert counted["frames"]["ok"] == compiled_before  # capturing caused no compilation
