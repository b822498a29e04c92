"""`probe`, `recording` and dry runs leave model and RNG unchanged, and say what is wrong with an example that a model rejects."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hookdrop import DropBlock, Dropout, Dropout2d, HookdropWarning, InjectionError, ShapeError, inject, plan
from hookdrop.recipes import dropblock_resnet
from tests.support.models import ROWS, Small, toy


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
        with pytest.warns(HookdropWarning, match=r"modified '0\.counts', which is too large to be copied first"):
            inject(model, Dropout(0.5), layers="0", example_input=ROWS)
        assert model[0].few.sum() == 0

    def test_python_and_numpy_rng_states_are_restored(self) -> None:
        draws = toy(lambda m, x: x * (1 + 0 * random.random() + 0 * np.random.rand()))
        model = nn.Sequential(draws)
        before = random.getstate(), np.random.get_state()[1].copy()
        drop = inject(model, Dropout(0.5), layers="0", example_input=ROWS)
        drop.probe(ROWS)
        assert random.getstate() == before[0]
        assert np.array_equal(np.random.get_state()[1], before[1])

    def test_eval_identical_is_none_without_tensor_outputs(self) -> None:
        model = toy(lambda m, x: m.fc(x) is None or object(), fc=nn.Linear(8, 8))
        drop = inject(model, Dropout(0.5), layers="fc")
        result = drop.probe(ROWS)
        assert result.eval_identical is None
        assert "identical" not in str(result)

    def test_probe_does_not_consume_shape_warnings(self, model: Small) -> None:
        """A probe on large images does not silence the warning about small ones."""
        drop = inject(model, DropBlock(0.3, 7), layers="layer1.0", example_input=torch.randn(1, 3, 16, 16))
        drop.probe(torch.randn(2, 3, 16, 16))
        with pytest.warns(HookdropWarning, match="covers the whole 6x6 map"):
            model(torch.randn(2, 3, 6, 6))


def test_inject_does_not_change_the_random_state(model: nn.Module, images: torch.Tensor) -> None:
    state = torch.get_rng_state()
    drop = inject(model, DropBlock(0.5, 3), layers="layer1.*", example_input=images)
    drop.probe(images)
    print(plan(model, Dropout(0.1), layers="**", example_input=images, on_existing="stack"))
    drop.remove()
    assert torch.equal(torch.get_rng_state(), state)


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


def test_the_dtype_and_the_channels_of_a_gray_model() -> None:
    for dtype in (torch.uint8, torch.float64):
        with pytest.raises(InjectionError, match=r"the example has another dtype than the model: pass x.float\(\)"):
            plan(net(), Dropout(0.1), layers="conv", example_input=torch.ones(2, 3, 9, 9, dtype=dtype))
    with pytest.raises(InjectionError, match=FAULTS[2][1]):  # a recipe that surveys a part does not replace the example
        plan(net(), dropblock_resnet(0.1), example_input=torch.randn(9, 8, 3))
    with pytest.raises(InjectionError, match=r"has more than the one channel that the model takes: pass x\[:, :1\]"):
        inject(net(1), Dropout(0.1), layers="conv", example_input=torch.randn(2, 3, 9, 8))


def test_an_example_with_another_fault_keeps_the_general_advice() -> None:
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
