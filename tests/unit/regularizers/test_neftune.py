"""NEFTune against its formulas; tests/integration/models/test_language_models.py compares it with transformers."""

from __future__ import annotations

import math

import pytest
import torch

from hookdrop import NEFTune
from hookdrop.functional import neftune
from tests.support.tensors import within

MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 0]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_noise_is_uniform_up_to_alpha_over_the_root_of_the_size(dtype: torch.dtype) -> None:
    """In float32, the mean and the mean square are within 4 standard errors of a million draws."""
    bound = 7 / math.sqrt(1000 * 10)
    noise = NEFTune(7)(torch.zeros(100, 1000, 10, dtype=dtype)).double()
    assert bound * 0.99 < noise.abs().amax() < bound * 1.01
    if dtype == torch.float32:
        assert within(noise.mean(), 0.0, bound / math.sqrt(3), 1e6)
        assert within(noise.square().mean() / bound**2, 1 / 3, math.sqrt(4 / 45), 1e6)


def test_attention_mask_spares_padding_and_scales_by_real_length() -> None:
    """As in the authors' code: U(-1, 1) * mask * alpha / sqrt(real length * d), for the same draws."""
    x = torch.randn(2, 6, 16)
    torch.manual_seed(1)
    found = neftune(x, 5.0, MASK)
    torch.manual_seed(1)
    u = 2 * torch.rand_like(x) - 1
    scale = 5.0 / (MASK.sum(1) * 16).sqrt()
    torch.testing.assert_close(found, x + u * MASK[..., None] * scale[:, None, None])
    assert torch.equal(found[MASK == 0], x[MASK == 0])


def test_a_sample_without_real_tokens_gets_no_noise() -> None:
    x = torch.randn(2, 6, 16)
    assert torch.equal(neftune(x, 5.0, torch.zeros(2, 6)), x)
