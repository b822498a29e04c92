"""TokenDropout and LockedDropout against the formulas of their papers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from hookdrop import LockedDropout, TokenDropout, inject, plan
from tests.support.tensors import within


class TestTokenDropout:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    @pytest.mark.parametrize(("p", "prefix"), [(0.003, 1), (0.3, 0), (0.5, 4)])
    def test_drops_whole_tokens_at_rate_p_and_scales_the_rest(self, p: float, prefix: int, dtype: torch.dtype) -> None:
        """Within 4 standard errors over a million tokens."""
        y = TokenDropout(p, prefix=prefix)(torch.ones(1000, 1000 + prefix, 2, dtype=dtype))
        assert torch.equal(y[:, :prefix], torch.ones(1000, prefix, 2, dtype=dtype))
        zero = y[:, prefix:] == 0
        assert torch.equal(zero.all(2), zero.any(2))
        assert within(zero.double().mean(), p, math.sqrt(p * (1 - p)), 1e6)
        rest = y[:, prefix:][~zero].unique()
        assert torch.equal(rest, torch.tensor([1 / (1 - p)]).to(dtype))

    def test_p_1_drops_all_but_the_prefix(self) -> None:
        x = torch.randn(3, 5, 4, requires_grad=True)
        y = TokenDropout(1.0, prefix=2)(x)
        assert torch.equal(y[:, :2], x[:, :2])
        assert not y[:, 2:].any()
        y.sum().backward()
        assert torch.equal(x.grad, torch.tensor([1.0, 1, 0, 0, 0])[None, :, None].expand_as(x))


class TestRemovingTokens:
    def test_later_layers_see_fewer_tokens_at_the_rate_of_the_schedule(self) -> None:
        model, x = nn.Sequential(nn.Identity(), nn.Linear(4, 4)), torch.randn(2, 41, 4)
        drop = inject(model, TokenDropout(0.5, remove=True), layers="0", schedule="LinearSchedule(steps=2)")
        lengths = []
        for _ in range(3):
            lengths.append(model(x).shape[1])
            drop.step()
        assert lengths == [41, 31, 21]
        measured = drop.probe(x)  # removed elements are dropped
        assert (measured.dropped, measured.eval_identical) == (20 / 41, True)
        assert measured.mean_ratio == pytest.approx(1.0, abs=0.15)
        shown = plan(nn.Sequential(nn.Identity()), TokenDropout(0.5, remove=True), layers="0", example_input=x)
        assert shown.sites[0].reading == "L=41 (prefix 1, keeps 21) C=4"


class TestLockedDropout:
    @pytest.mark.parametrize("batch_first", [True, False])
    def test_lstm_output_is_masked_and_its_state_is_not(self, batch_first: bool) -> None:
        lstm, time = nn.LSTM(4, 6, batch_first=batch_first), 1 if batch_first else 0
        x = torch.randn(3, 3, 4)
        assert plan(lstm, LockedDropout(0.5), layers=lstm, example_input=x).sites[0].reading == "T=3 (1 of 3 tensors)"
        clean, (state, _) = lstm(x)
        inject(lstm, LockedDropout(0.5, time), layers=lstm)
        locked, (still, _) = lstm(x)
        steps = (locked / clean).unbind(time)
        assert all(torch.allclose(step, steps[0]) for step in steps)
        assert set(steps[0].round(decimals=3).unique().tolist()) == {0.0, 2.0}
        assert torch.equal(state, still)
