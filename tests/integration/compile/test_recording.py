"""`with drop.recording() as r`: what came in, what was kept, what went on, of real training steps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.recording import X, layer


@pytest.fixture
def compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("compiler")
def test_a_compiled_model_is_recorded_and_runs_compiled_again_after() -> None:
    model, drop = layer()
    fast = torch.compile(model, backend="eager")
    fast(X)
    with drop.recording() as r:
        out = fast(X)
    assert torch.equal(r["0"].after, out)
    assert (fast(X) == 0).any()


@pytest.mark.skipif(torch.__version__ < (2, 8), reason="PyTorch names no reason")
@pytest.mark.usefixtures("compiler")
def test_under_fullgraph_the_error_says_that_recording_is_why() -> None:
    model, drop = layer()
    fast = torch.compile(model, backend="eager", fullgraph=True)
    with drop.recording(), pytest.raises(torch._dynamo.exc.Unsupported, match=r"measuring\(\) and recording\(\)"):
        fast(X)
