"""`observe.grad_cam` computes the maps of the papers and restores the model."""

from __future__ import annotations

import copy
import random
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import interpolate

from hookdrop import Dropout, HookdropError, LayerError, ShapeError, find, inject
from hookdrop.observe import compare_cam, grad_cam
from hookdrop.observe.cam import as_map
from tests.support.models import Small, toy
from tests.support.tensors import captured, scale_maps

pytest.importorskip("pytorch_grad_cam")


def reference_grad_cam(model: nn.Module, x: torch.Tensor, layer: str, classes: list[int]) -> torch.Tensor:
    """Grad-CAM by equations 1 and 2 of its paper, resized to the image."""
    modes = [module.training for module in model.modules()]
    model.eval()
    with captured(model, layer) as seen:
        model(x)[range(len(x)), classes].sum().backward()
    model.zero_grad()
    for module, training in zip(model.modules(), modes, strict=True):
        module.training = training
    features, gradients = seen[layer][0], seen[layer][0].grad
    maps = (gradients.mean((2, 3), keepdim=True) * features).sum(1).relu()
    return scale_maps(interpolate(scale_maps(maps)[:, None], x.shape[2:], mode="bilinear", align_corners=False)[:, 0])


class Strided(Small):
    """Its maps have a quarter of the image size, and its ReLU is in-place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Sequential(nn.Conv2d(3, 8, 3, stride=4, padding=1), nn.ReLU(inplace=True))
        nn.init.uniform_(self.fc.weight)  # positive evidence for every class


class TestPapers:
    @pytest.mark.parametrize("layer", ["layer1", "layer2.0", "layer2", "conv1.0"])
    def test_gradcam_matches_the_equations_of_the_paper(self, layer: str) -> None:
        """Also if a later ReLU works in place, after "conv1.0"."""
        model, x = Strided(), torch.randn(3, 3, 32, 48)
        expected = reference_grad_cam(model, x, layer, [1, 7, 7])
        assert torch.allclose(grad_cam(model, x, layer, [1, 7, 7]), expected, atol=1e-4)

    @pytest.mark.parametrize("size", [1e-4, 1e-12, 1e-25])
    def test_maximum_is_1_for_tiny_gradients(self, size: float) -> None:
        model, x = Strided(), torch.randn(3, 3, 32, 32)
        plain = grad_cam(model, x, "layer2", 1)
        with torch.no_grad():
            model.fc.weight *= size
            model.fc.bias *= size
        maps = grad_cam(model, x, "layer2", 1)
        assert maps.amax((1, 2)).tolist() == [1, 1, 1]
        assert torch.allclose(maps, plain, atol=1e-5)


def test_the_default_target_is_the_predicted_class(model: Small, images: torch.Tensor) -> None:
    predicted = copy.deepcopy(model).eval()(images).argmax(1)
    expected = grad_cam(model, images, "layer2", predicted)
    assert torch.equal(grad_cam(model, images, "layer2"), expected)
    assert torch.equal(grad_cam(model, images, "layer2", predicted.tolist()), expected)


class TestNoSideEffects:
    @pytest.mark.parametrize("fails", [False, True], ids=["success", "error"])
    def test_modes_gradients_buffers_hooks_and_random_state_are_restored(
        self, model: Small, images: torch.Tensor, fails: bool
    ) -> None:
        model.train()
        model.layer1[0].bn1.eval()
        model.fc.bias.requires_grad_(False)
        drop = inject(model, Dropout(0.5), layers="layer1.1")
        model(images).sum().backward()
        modes = {name: module.training for name, module in model.named_modules()}
        grads = {name: p.grad for name, p in model.named_parameters()}
        values = {name: None if g is None else g.clone() for name, g in grads.items()}
        state = {name: value.clone() for name, value in model.state_dict().items()}
        hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
        random_states = torch.get_rng_state(), random.getstate()

        if fails:
            with pytest.raises(IndexError):
                grad_cam(model, images, "layer2", 11)
        else:
            grad_cam(model, images, "layer2", 1)

        assert {name: module.training for name, module in model.named_modules()} == modes
        for name, parameter in model.named_parameters():
            assert parameter.grad is grads[name]
            assert parameter.requires_grad == (name != "fc.bias")
            assert values[name] is None or torch.equal(parameter.grad, values[name])
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
        assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()] == hooks
        assert torch.equal(torch.get_rng_state(), random_states[0])
        assert random.getstate() == random_states[1]
        assert drop.check() == []

    def test_hooks_of_hookdrop_and_of_gradients_are_not_called(self, model: Small, images: torch.Tensor) -> None:
        expected = grad_cam(model, images, "layer2", 1)
        inject(model, Dropout(0.9), layers="layer*.*")
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: pytest.fail("called"))
        assert torch.equal(grad_cam(model, images, "layer2", 1), expected)
        assert not any(site.called for site in find(model).sites)

    def test_between_a_forward_and_its_backward(self, model: Small, images: torch.Tensor) -> None:
        twin = copy.deepcopy(model)
        loss = model(images).square().sum()
        grad_cam(model, images, "layer2")
        loss.backward()
        twin(images).square().sum().backward()
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), twin.parameters(), strict=True))

    @pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
    def test_under_no_grad_and_inference_mode(self, model: Small, images: torch.Tensor, context: Any) -> None:
        expected = grad_cam(model, images, "layer2")
        with context():
            assert torch.equal(grad_cam(model, images.clone(), "layer2"), expected)


class TestOutputs:
    @pytest.mark.parametrize(
        ("tokens", "image", "grid"),
        [(196, (224, 224), (14, 14)), (197, (224, 224), (14, 14)), (201, (224, 224), (14, 14)), (25, (64, 96), (4, 6)), (8, (32, 16), (4, 2))],
        ids=str,
    )  # fmt: skip
    def test_token_grid_has_the_aspect_ratio_of_the_image(self, tokens: int, image: Any, grid: Any) -> None:
        x = torch.arange(tokens * 2.0).reshape(1, tokens, 2)
        maps = as_map(x, image)
        assert maps.shape == (1, 2, *grid)
        assert torch.equal(maps[0].flatten(1), x[0, -grid[0] * grid[1] :].T)

    def test_the_channels_of_a_map_may_be_last(self) -> None:
        x = torch.randn(2, 9, 4, 6)
        assert torch.equal(as_map(x, (64, 96)), x)
        assert torch.equal(as_map(x.movedim(1, -1), (64, 96)), x)

    def test_other_outputs_raise(self) -> None:
        for wrong in (torch.ones(1, 99, 2), torch.ones(1, 99), (torch.ones(1, 99, 2),)):
            with pytest.raises(ShapeError):
                as_map(wrong, (224, 224))

    def test_models_with_container_outputs(self, images: torch.Tensor) -> None:
        model = Strided()
        expected, forward = grad_cam(model, images, "layer2", 2), model.forward
        model.forward = lambda x: {"logits": forward(x), "other": x}  # type: ignore[method-assign, assignment]
        assert torch.equal(grad_cam(model, images, "layer2", 2), expected)


class TestErrors:
    def test_layer_called_more_than_once_or_never_raises(self, images: torch.Tensor) -> None:
        relu = nn.ReLU()
        model = nn.Sequential(nn.Conv2d(3, 4, 3), relu, relu, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        with pytest.raises(LayerError, match="'1' must be called once in one forward"):
            grad_cam(model, images, "1")
        model.spare = nn.Conv2d(3, 3, 1)
        model.forward = lambda x: x.mean((2, 3))
        with pytest.raises(LayerError, match="'spare' must be called once"):
            grad_cam(model, images, "spare")

    def test_layer_without_a_gradient_raises(self, images: torch.Tensor) -> None:
        forward = lambda m, x: m.fc(m.layer1(m.conv1(x)).detach().mean((2, 3)) + x.mean((1, 2, 3))[:, None])  # noqa: E731
        model = toy(forward, **dict(Small().named_children()))
        with pytest.raises(LayerError):
            grad_cam(model, images, "layer1")

    def test_invalid_images_and_model_outputs_raise(self, model: Small, images: torch.Tensor) -> None:
        with pytest.raises(TypeError):
            grad_cam(model, images.byte(), "layer2")
        with pytest.raises(ShapeError):
            grad_cam(model, images[0], "layer2")
        with pytest.raises(ShapeError):
            grad_cam(nn.Sequential(model.conv1, model.layer1), images, "1")
        with pytest.raises(IndexError):
            grad_cam(model, images, "layer2", 10)
        with pytest.raises(RuntimeError, match="must match the existing size"):
            grad_cam(model, images, "layer2", [1, 2, 3])

    def test_missing_library(self, model: Small, images: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "pytorch_grad_cam", None)
        with pytest.raises(HookdropError, match="pip install"):
            grad_cam(model, images, "layer2")
        assert model.training


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
