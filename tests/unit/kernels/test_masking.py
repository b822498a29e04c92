"""Applying a mask is a linear map: all kinds of derivatives, and no effect of dropped values."""

import itertools
from typing import Any

import pytest
import torch
from torch.func import vmap
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from hookdrop.accel import native
from hookdrop.functional import drop_block, dropout
from tests.support.tensors import accelerate

NORMALIZE = ["batch", "sample", "expected", None]


# p=0.2 is drawn as sparse seeds, p=0.97 as a dense mask.
SETTINGS = [
    {"p": p, "block_size": 3, "normalize": normalize, "per_channel": own}
    for p, normalize, own in itertools.product([0.2, 0.97], NORMALIZE, [True, False])
]


@pytest.fixture(params=["compiled loops", "PyTorch alone"], autouse=True)
def with_and_without_compiled_loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "PyTorch alone":
        accelerate(monkeypatch, "cpu")
    elif not native.available():
        pytest.skip("the compiled loops were not built")


@pytest.mark.parametrize("settings", SETTINGS, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_dropped_nan_and_inf_become_zero(settings: dict, dtype: torch.dtype, memory_format: Any) -> None:
    """In forward and backward, a map of NaN and Inf has the same mask as a map of ones."""
    invalid = torch.full((4, 8, 12, 12), float("nan"), dtype=dtype).contiguous(memory_format=memory_format)
    invalid[:, :, ::2] = float("inf")
    results = []
    for values in (torch.ones_like(invalid), invalid):
        torch.manual_seed(1)
        x = values.requires_grad_()
        y = drop_block(x, **settings)
        (gradient,) = torch.autograd.grad(y, x, invalid)
        assert y.is_contiguous(memory_format=memory_format)
        results.append(y == 0)
        results.append(gradient == 0)
        assert (y[y != 0].isfinite().all()) == (values is not invalid)
    assert results[0].any()
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("settings", SETTINGS, ids=repr)
def test_vmap_randomness_controls_the_masks(settings: dict) -> None:
    x = torch.ones(5, 4, 8, 12, 12)

    def drop(x: torch.Tensor) -> torch.Tensor:
        return drop_block(x, **settings)

    different = vmap(drop, randomness="different")(x)
    assert len({tuple((y == 0).flatten().tolist()) for y in different}) == 5
    same = vmap(drop, randomness="same")(x)
    assert (same == same[0]).all()
    along_2 = vmap(drop, in_dims=2, out_dims=2, randomness="different")(x.movedim(0, 2)).movedim(2, 0)
    for y in (different, same, along_2):
        assert 0 < (y != 0).float().mean() < 1
        if settings["normalize"] in ("expected", None):
            factor = 1 / (1 - settings["p"]) if settings["normalize"] else 1.0
            torch.testing.assert_close(y, torch.where(y != 0, x * factor, 0))
        if settings["normalize"] == "batch":
            torch.testing.assert_close(y.mean((1, 2, 3, 4)), torch.ones(5))
        if settings["normalize"] == "sample" and settings["p"] < 0.9:
            torch.testing.assert_close(y.mean((2, 3, 4)), torch.ones(5, 4))


@pytest.mark.parametrize("settings", SETTINGS, ids=repr)
def test_extreme_rates(settings: dict) -> None:
    x = torch.ones(4, 8, 12, 12)
    for p, expected in ((1e-12, x), (1.0, torch.zeros_like(x))):
        torch.testing.assert_close(drop_block(x, **{**settings, "p": p}), expected)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("one", [lambda x: dropout(x, 0.3), *(lambda x, p=p: drop_block(x, p, 3) for p in (0.1, 0.97))])
def test_profilers_and_checkpoints_keep_the_mask(one: Any, use_reentrant: bool) -> None:
    """A profiler around forward only, and a checkpoint that recomputes it in backward."""
    x = torch.randn(8, 16, 32, 32, requires_grad=True)
    with FlopCounterMode(display=False):
        y = checkpoint(lambda x: one(x) ** 2, x, use_reentrant=use_reentrant)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad == 0, y == 0)
