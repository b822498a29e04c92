"""`probe` and `recording`: correct numbers, without side effects."""

from __future__ import annotations

import pytest
import torch

from hookdrop import DropBlock, Dropout, InjectionError, LinearSchedule, inject
from tests.support.models import Small


class TestProbeAndMeasuring:
    def test_probe_measures_without_side_effects(self, model: Small, images: torch.Tensor) -> None:
        drop = inject(model, DropBlock(0.3, 3), layers="layer?.*.bn1", schedule=LinearSchedule(10))
        model.eval()
        model.layer1[0].train()
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        flags, rng = [m.training for m in model.modules()], torch.get_rng_state()
        result = drop.probe(images, forwards=5, step=10)
        assert result.asked == pytest.approx(0.3)
        assert result.dropped == pytest.approx(0.3, abs=0.02)
        assert result.mean_ratio == pytest.approx(1, abs=0.03)
        assert [site.calls for site in result.sites.values()] == [5] * 4
        assert result.eval_identical is True
        assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
        assert [m.training for m in model.modules()] == flags
        assert torch.equal(torch.get_rng_state(), rng)
        assert (drop.step_count, drop.p) == (0, 0.0)
        assert not any(site.called for site in drop.sites)

    def test_probe_at_rate_0_reports_the_reason(self, model: Small, images: torch.Tensor) -> None:
        drop = inject(model, DropBlock(0.3, 3), layers="layer1.0.bn1", schedule=LinearSchedule(10))
        assert "rate is 0 at step 0 of LinearSchedule(steps=10) (at another: probe(" in str(drop.probe(images))
        drop.enabled = False
        assert "is disabled" in str(drop.probe(images, step=10))

    def test_probe_detects_different_eval_output(self, model: Small, images: torch.Tensor) -> None:
        drop = inject(model, Dropout(0.3), layers="fc")
        with drop.sampling():
            result = drop.probe(images)
        assert result.eval_identical is False
        assert "NOT bit-identical" in str(result)


def test_probe_with_an_invalid_input_restores_the_model(model: Small, images: torch.Tensor) -> None:
    """The step and the mode are restored after an error."""
    drop = inject(model, Dropout(0.1), layers="fc", schedule=LinearSchedule(10))
    model.eval()
    with pytest.raises(InjectionError, match=r"does not accept this example, \(3, 3\) float32"):
        drop.probe(torch.ones(3, 3), step=5)
    assert (drop.step_count, model.training) == (0, False)
