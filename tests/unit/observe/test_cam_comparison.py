"""`observe.compare_cam` compares the maps of two models."""

from __future__ import annotations

import copy

import pytest
import torch

from hookdrop.observe import compare_cam, grad_cam
from tests.support.models import Small

pytest.importorskip("pytorch_grad_cam")


class TestCompareCam:
    def test_default_target_is_the_class_that_the_second_model_predicts(self, images: torch.Tensor) -> None:
        before, after = Small(), Small()
        result = compare_cam(before, after, images, "layer2")
        predicted = copy.deepcopy(after).eval()(images).argmax(1).tolist()
        assert result.targets == predicted
        assert torch.equal(result.before, grad_cam(before, images, "layer2", predicted))
        assert torch.equal(result.after, grad_cam(after, images, "layer2", predicted))
        assert before.training
        assert after.training

    def test_width_is_the_fraction_above_half(self, model: Small, images: torch.Tensor) -> None:
        result = compare_cam(model, model, images, "layer2", 1)
        assert torch.equal(result.wide_before, result.wide_after)
        assert result.wide_after[2] == (result.after[2] > 0.5).sum() / 256
        result.after = torch.ones(4, 16, 16)
        assert repr(result).endswith(" above half before, 100.0% after>")
