"""`recording`: inputs, masks and outputs of real forwards. `probe`: numbers without side effects."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hookdrop import (
    AlphaDropout,
    DropBlock,
    Dropout,
    Dropout2d,
    DropPath,
    GaussianDropout,
    InjectionError,
    LayerError,
    LinearSchedule,
    Rate,
    Regularizer,
    find,
    inject,
)
from hookdrop.regularizers import rate_of
from tests.support.injections import layer
from tests.support.models import Small

X = torch.ones(8, 16)


def test_recording_does_not_change_masks_gradients_or_rng_state(model: Small, images: torch.Tensor) -> None:
    inject(model, DropBlock(0.3, 3), layers="layer1.*")
    inject(model, Dropout(0.3), layers="layer2.1")
    twin = copy.deepcopy(model)

    def trained(model: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(images).square().mean().backward()
            optimizer.step()
        return [*model.state_dict().values(), torch.get_rng_state()]

    with find(model).recording() as r:
        with_recording = trained(model)
    assert all(map(torch.equal, with_recording, trained(twin)))
    assert list(r)[:2] == ["layer1.0", "layer1.1"]
    assert r["layer2.1"].before.shape == (4, 8, 16, 16)


def test_later_in_place_operations_do_not_change_the_record() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(inplace=True))
    drop = inject(model, Dropout(0.5), layers="0")
    with drop.recording() as r:
        out = model(torch.randn(8, 16))
    assert (r["0"].after < 0).any()
    assert torch.equal(r["0"].after.relu(), out)
    assert not r["0"].after.requires_grad
    assert not r["0"].before.requires_grad


def test_only_the_last_calls_are_kept() -> None:
    model, drop = layer()
    with drop.recording(last=2) as r:
        for value in range(5):
            model(X * value)
    assert [call.before[0, 0].item() for call in r.calls("0")] == [3.0, 4.0]
    assert r["0"].before[0, 0] == 4
    model(X * 9)
    assert r["0"].before[0, 0] == 4  # the recording has ended


class Constant(Regularizer):
    """Its output does not depend on its input."""

    rate = None

    def regularize(self, x: torch.Tensor, rate: None) -> torch.Tensor:
        return torch.full_like(x, 3)


class ConstantNoise(Constant):
    rate: Any = Rate("level", kind="noise")
    level = 0.5


@pytest.mark.parametrize(
    ("regularizer", "dropped"),
    [
        *((one, 0.3) for one in (Dropout(0.3), Dropout2d(0.3), DropPath(0.3), DropBlock(0.3, 3, normalize=None))),
        (GaussianDropout(0.3), 0.0),
        (AlphaDropout(0.3), 0.3),
        (DropBlock(0.3, 3), 0.3),  # and not the zeros of the ReLU before it
        (Constant(), 1.0),
        (ConstantNoise(), 0.0),
        (Dropout(1.0), 1.0),
    ],
    ids=repr,
)
def test_mask_is_true_except_where_the_regularizer_drops(regularizer: Regularizer, dropped: float) -> None:
    model = nn.Sequential(nn.ReLU())
    drop = inject(model, regularizer, layers="0")
    with drop.recording() as r, drop.recording(last=0) as m:
        out = model(x := torch.randn(500, 10, 6, 6))
    record, kept = r["0"], r["0"].mask
    assert torch.equal(record.before, x.relu())
    assert torch.equal(record.after, out)
    assert record.mask.dtype == torch.bool
    assert (~kept).float().mean() == pytest.approx(dropped, abs=0.05)
    assert record.dropped == pytest.approx(m.totals.dropped) == pytest.approx(dropped, abs=0.05)
    assert record.p == rate_of(regularizer)
    if dropped == 0.3 and not isinstance(regularizer, AlphaDropout):  # all kept elements have the same scale
        assert not out[~kept].any()
        ratio = (out / record.before)[kept & (record.before > 0)]
        assert ratio.std() < 1e-5


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_recompute_is_not_recorded(reentrant: bool) -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    drop = inject(model, Dropout(0.5), layers="0")
    x = X.clone().requires_grad_()
    with drop.recording(last=9) as r:
        for _ in range(2):
            checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    assert len(r.calls("0")) == 2


def test_records_in_inference_mode_are_ordinary_tensors() -> None:
    model, drop = layer()
    with drop.sampling(), torch.inference_mode(), drop.recording() as r:
        model(X)
    assert not r["0"].before.is_inference()
    r["0"].after.requires_grad_()


def test_nested_recordings_and_copies() -> None:
    model, drop = layer()
    with drop.recording() as outer:
        pickle.loads(pickle.dumps(copy.deepcopy(model)))(X)  # copies do not record
        assert len(outer) == 0
        model(X)
        with drop.recording() as inner, drop.recording(last=0) as m:
            model(X * 2)
    assert torch.equal(outer["0"].mask, inner["0"].mask)
    assert m.totals.dropped == pytest.approx(inner["0"].dropped)


class TestMissingRecords:
    def test_unknown_site(self, model: Small) -> None:
        drop = inject(model, DropBlock(0.3, 3), layers="layer1.*")
        with drop.recording() as r, pytest.raises(LayerError, match="did you mean: 'layer1.[01]'"):
            r["layer1.2"]
        assert r.get("layer1.2") is None
        assert "layer1.0" not in r

    @pytest.mark.parametrize(
        ("run", "says"),
        [
            (lambda model, drop: None, "the layer was never called"),
            (lambda model, drop: model.eval()(X), "not called in training mode"),
            (lambda model, drop: (drop.seek(0), model(X)), "rate is 0 at step 0"),
            (lambda model, drop: (setattr(drop, "enabled", False), model(X)), "is disabled"),
        ],
        ids=["never called", "eval mode", "rate 0", "disabled"],
    )
    def test_the_reason_is_named(self, run: Any, says: str) -> None:
        model, drop = layer(schedule=LinearSchedule(10))
        drop.seek(10)
        with drop.recording() as r:
            run(model, drop)
        with pytest.raises(LayerError, match=says):
            r["0"]
        with pytest.raises(LayerError):
            r.plot_masks()
        drop.seek(1)

    def test_a_removed_injection_and_a_count_that_is_none(self) -> None:
        _, drop = layer()
        with pytest.raises(ValueError), drop.recording(last=-1):
            pass
        drop.remove()
        with pytest.raises(RuntimeError), drop.recording():
            pass


def test_repr_is_a_table() -> None:
    model, drop = layer()
    with drop.recording() as r:
        assert repr(r) == "<Recording of 'dropout': empty>"
        model(X)
        model(X)
    assert repr(r).splitlines()[2].split()[:4] == ["0", "2", "8x16", "0.5"]


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
