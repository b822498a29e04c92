"""`drop.recording()` of compiled models."""

from __future__ import annotations

import pytest
import torch

from tests.support.recording import X, layer


def test_recording_a_compiled_model() -> None:
    model, drop = layer()
    fast = torch.compile(model, backend="eager")
    fast(X)
    with drop.recording() as r:
        out = fast(X)
    assert torch.equal(r["0"].after, out)
    assert (fast(X) == 0).any()


@pytest.mark.skipif(torch.__version__ < (2, 8), reason="this PyTorch does not report the reason")
def test_recording_under_fullgraph_raises_with_a_hint() -> None:
    model, drop = layer()
    fast = torch.compile(model, backend="eager", fullgraph=True)
    with drop.recording(), pytest.raises(torch._dynamo.exc.Unsupported, match=r"measuring\(\) and recording\(\)"):
        fast(X)
