"""`recording`: inputs, masks and outputs of real forwards. `probe` and dry runs: no side effects, and examples that fail."""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hookdrop
from hookdrop import DropBlock, Dropout, Dropout2d, DropPath, InjectionError, LinearSchedule, ShapeError, inject, plan
from hookdrop.core.regularizer import rate_of
from hookdrop.recipes import dropblock_resnet
from tests.support.models import ROWS, Small, toy
from tests.support.training import layer

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

    with hookdrop.find(model).recording() as r:
        with_recording = trained(model)
    assert all(map(torch.equal, with_recording, trained(twin)))
    assert list(r)[:2] == ["layer1.0", "layer1.1"]
    assert r["layer2.1"].before.shape == (4, 8, 16, 16)


def test_later_in_place_operations_do_not_change_the_record() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(inplace=True))
    with inject(model, Dropout(0.5), layers="0").recording() as r:
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


class Constant(hookdrop.Regularizer):
    """Its output does not depend on its input."""

    rate = None

    def regularize(self, x: torch.Tensor, rate: None) -> torch.Tensor:
        return torch.full_like(x, 3)


class ConstantNoise(Constant):
    rate: Any = hookdrop.Rate("level", kind="noise")
    level = 0.5


@pytest.mark.filterwarnings("ignore:the rate of:hookdrop.HookdropWarning")
@pytest.mark.parametrize(
    ("regularizer", "dropped"),
    [
        *((one, 0.3) for one in (Dropout(0.3), Dropout2d(0.3), DropPath(0.3), DropBlock(0.3, 3, normalize=None))),
        (hookdrop.GaussianDropout(0.3), 0.0),
        (hookdrop.AlphaDropout(0.3), 0.3),
        (DropBlock(0.3, 3), 0.3),  # and not the zeros of the ReLU before it
        (Constant(), 1.0),
        (ConstantNoise(), 0.0),
        (Dropout(1.0), 1.0),
    ],
    ids=repr,
)
def test_mask_is_true_except_where_the_regularizer_drops(regularizer: hookdrop.Regularizer, dropped: float) -> None:
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
    if dropped == 0.3 and not isinstance(regularizer, hookdrop.AlphaDropout):  # all kept elements have the same scale
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
        with drop.recording() as r, pytest.raises(hookdrop.LayerError, match="did you mean: 'layer1.[01]'"):
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
        with pytest.raises(hookdrop.LayerError, match=says):
            r["0"]
        with pytest.raises(hookdrop.LayerError):
            r.plot_masks()
        drop.seek(1)

    def test_an_injection_that_is_removed_before_the_block(self) -> None:
        drop = inject(nn.Sequential(nn.Identity()), Dropout(0.5), layers="0")
        later = drop.recording()
        drop.remove()
        with pytest.raises(InjectionError, match=r"recording\(\): 'dropout' was removed"), later:
            pass

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
        rng = torch.get_rng_state()
        drop = inject(model, DropBlock(0.3, 3), layers="**.bn1", schedule=LinearSchedule(10), example_input=images)
        print(plan(model, Dropout(0.1), layers="**", example_input=images, on_existing="stack"))
        model.eval()
        model.layer1[0].train()
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        flags = [m.training for m in model.modules()]
        result = drop.probe(images, forwards=5, step=10)
        assert result.requested == pytest.approx(0.3)
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

    def test_probe_names_layers_that_return_only_zeros(self, model: Small, images: torch.Tensor) -> None:
        """As the last norm of a branch in timm's ResNets, whose weight begins at 0: the mask has no effect yet."""
        nn.init.zeros_(model.layer1[0].bn1.weight)
        note = "no effect yet, because the layer returns only zeros: 'layer1.0.bn1'"
        assert note in str(inject(model, Dropout(0.3), layers="**.bn1").probe(images))

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


class TestNoSideEffects:
    def test_probe_between_forward_and_backward(self) -> None:
        """Frozen batch norm saves its statistics for backward, so they must not be modified; a buffer is read-only."""
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        model[0].register_buffer("mask", before := torch.ones(1, 8).expand(8, 8))
        drop = inject(model, Dropout(0.1), layers="0", example_input=ROWS)
        model[1].eval()
        out = model(ROWS)
        drop.probe(ROWS)
        out.sum().backward()
        assert model[0].mask is before

    def test_buffers_added_by_a_dry_run_are_removed(self) -> None:
        model = nn.Sequential(toy(lambda m, x: m.register_buffer("cache", x.detach()) or x))
        inject(model, Dropout(0.5), layers="0", example_input=ROWS)
        assert "0.cache" not in model.state_dict()

    def test_probe_does_not_call_train(self) -> None:
        """LoRA layers merge their weights in `train`."""

        class Merging(nn.Linear):
            def train(self, mode: bool = True) -> Merging:
                with torch.no_grad():
                    self.weight += 1.0
                return super().train(mode)

        drop = inject(model := nn.Sequential(Merging(8, 8)), Dropout(0.5), layers="0")
        model.eval()
        before = model[0].weight.clone()
        assert drop.probe(ROWS).dropped == pytest.approx(0.5, abs=0.05)
        assert torch.equal(model[0].weight, before)

    def test_large_buffers_are_not_copied(self) -> None:
        """In a quantized language model, buffers hold the weights."""
        calls: list[tuple[bool, int, int]] = []

        def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
            calls.append((m.training, m.weight.data_ptr(), m.table.data_ptr()))
            return x * m.weight[0, 0]

        quantized = toy(forward)
        quantized.register_buffer("weight", torch.ones(1200, 1200, dtype=torch.int8))
        quantized.register_buffer("table", torch.ones(600, 600))
        model = nn.Sequential(quantized)
        weight, table = model[0].weight.data_ptr(), model[0].table.data_ptr()
        drop = inject(model, Dropout(0.5), layers="0", example_input=ROWS)
        assert calls == [(False, weight, table)]
        drop.probe(ROWS)
        assert {at for _, at, _ in calls} == {weight}
        # Training forwards write to queues and codebooks of any size.
        assert all(at != table for training, _, at in calls if training)

    def test_modified_large_buffer_is_named_in_a_warning(self) -> None:
        def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
            m.few += 1
            m.counts += 1
            return x

        model = nn.Sequential(toy(forward))
        for name, size in (("counts", 2**20), ("few", 2**10)):
            model[0].register_buffer(name, torch.zeros(size, dtype=torch.int32))
        says = r"modified '0\.counts', which is too large to be copied first"
        with pytest.warns(hookdrop.HookdropWarning, match=says):
            inject(model, Dropout(0.5), layers="0", example_input=ROWS)
        assert model[0].few.sum() == 0

    def test_python_and_numpy_rng_states_are_restored(self) -> None:
        draws = toy(lambda m, x: x * (1 + 0 * random.random() + 0 * np.random.rand()))
        model = nn.Sequential(draws)
        before = random.getstate(), np.random.get_state()[1].copy()
        inject(model, Dropout(0.5), layers="0", example_input=ROWS).probe(ROWS)
        assert random.getstate() == before[0]
        assert np.array_equal(np.random.get_state()[1], before[1])

    def test_eval_identical_is_none_without_tensor_outputs(self) -> None:
        model = toy(lambda m, x: m.fc(x) is None or object(), fc=nn.Linear(8, 8))
        result = inject(model, Dropout(0.5), layers="fc").probe(ROWS)
        assert result.eval_identical is None
        assert "identical" not in str(result)

    def test_probe_does_not_consume_shape_warnings(self, model: Small) -> None:
        """A probe on large images does not silence the warning about small ones."""
        drop = inject(model, DropBlock(0.3, 7), layers="layer1.0", example_input=torch.randn(1, 3, 16, 16))
        drop.probe(torch.randn(2, 3, 16, 16))
        with pytest.warns(hookdrop.HookdropWarning, match="covers the whole 6x6 map"):
            model(torch.randn(2, 3, 6, 6))


def net(channels: int = 3) -> nn.Module:
    """Takes (N, 3, H, W) with maps of any size, as an argument or by name."""
    layers = {"conv": nn.Conv2d(channels, 4, 3), "bn": nn.BatchNorm2d(4), "fc": nn.Linear(4, 2)}
    return toy(lambda m, pixels: m.fc(m.bn(m.conv(pixels)).mean((2, 3))), **layers)


FAULTS = [
    ((3, 9, 8), r"has no batch axis: pass x\[None\]"),
    ((2, 9, 8, 3), r"has its channels last: pass x.movedim\(-1, 1\)"),
    ((9, 8, 3), r"has its channels last and no batch axis: pass x.movedim\(-1, 0\)\[None\]"),
    ((2, 4, 9, 8), r"has more than the 3 channels that the model takes: pass x\[:, :3\]"),
    ((2, 1, 9, 8), r"does not have the 3 channels that the model takes: pass x\[:, :1\].expand\(-1, 3, -1, -1\)"),
]


@pytest.mark.parametrize(("shape", "fault"), FAULTS)
def test_the_error_says_how_to_correct_the_example(shape: tuple[int, ...], fault: str) -> None:
    for example in (x := torch.randn(shape)), *([(x,), {"pixels": x}] if len(shape) == 3 and shape[0] == 3 else []):
        with pytest.raises(InjectionError, match=rf"the example {fault}"):
            plan(net(), Dropout(0.1), layers="conv", example_input=example)


def test_the_dtype_the_channels_of_a_gray_model_and_other_faults() -> None:
    for dtype in (torch.uint8, torch.float64):
        with pytest.raises(InjectionError, match=r"the example has another dtype than the model: pass x.float\(\)"):
            plan(net(), Dropout(0.1), layers="conv", example_input=torch.ones(2, 3, 9, 9, dtype=dtype))
    with pytest.raises(InjectionError, match=FAULTS[2][1]):  # a recipe that surveys a part does not replace the example
        plan(net(), dropblock_resnet(0.1), example_input=torch.randn(9, 8, 3))
    with pytest.raises(InjectionError, match=r"has more than the one channel that the model takes: pass x\[:, :1\]"):
        inject(net(1), Dropout(0.1), layers="conv", example_input=torch.randn(2, 3, 9, 8))
    with pytest.raises(InjectionError, match="pass a tensor, a tuple of arguments or a dict"):
        plan(nn.Linear(8, 2), Dropout(0.1), layers=nn.Linear, example_input=torch.randn(2, 9))
    with pytest.raises(InjectionError, match="pass a tensor, not its shape"):
        plan(net(), Dropout(0.1), layers="conv", example_input=(2, 3, 9, 9))


def test_a_single_image_that_the_model_accepts() -> None:
    """A convolution takes it, and its maps have no batch axis; tokens are no images."""
    with pytest.raises(ShapeError, match=r"needs \(N, C, H, W\)(?s:.)*the example has no batch axis: pass x\[None\]"):
        plan(nn.Sequential(nn.Conv2d(3, 4, 3)), Dropout2d(0.1), layers="0", example_input=torch.randn(3, 9, 9))
    with pytest.raises(ShapeError) as caught:
        plan(nn.Sequential(nn.Linear(4, 4)), Dropout2d(0.1), layers="0", example_input=torch.randn(2, 5, 4))
    assert "batch axis" not in str(caught.value)
