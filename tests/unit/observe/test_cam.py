"""`observe.grad_cam` computes the maps of the papers and restores the model."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.functional import interpolate

from hookdrop import Dropout, HookdropError, LayerError, ShapeError, find, inject
from hookdrop.observe import grad_cam
from hookdrop.observe.cam import as_map
from tests.support.models import Small

pytest.importorskip("pytorch_grad_cam")
from tests.support.tensors import captured, scale_maps


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
    @pytest.mark.parametrize("layer", ["layer1", "layer2.0", "layer2"])
    def test_gradcam_matches_the_equations_of_the_paper(self, layer: str) -> None:
        model, x = Strided(), torch.randn(3, 3, 32, 48)
        assert torch.allclose(
            grad_cam(model, x, layer, [1, 7, 7]), reference_grad_cam(model, x, layer, [1, 7, 7]), atol=1e-4
        )

    def test_later_in_place_relu_does_not_change_the_map(self) -> None:
        model, x = Strided(), torch.randn(2, 3, 32, 32)
        assert torch.allclose(
            grad_cam(model, x, "conv1.0", 2), reference_grad_cam(model, x, "conv1.0", [2, 2]), atol=1e-4
        )

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


class TestTargets:
    def test_none_is_the_predicted_class(self, model: Small, images: torch.Tensor) -> None:
        predicted = copy.deepcopy(model).eval()(images).argmax(1)
        expected = grad_cam(model, images, "layer2", predicted)
        assert torch.equal(grad_cam(model, images, "layer2"), expected)
        assert torch.equal(grad_cam(model, images, "layer2", predicted.tolist()), expected)

    def test_invalid_arguments_raise(self, model: Small, images: torch.Tensor) -> None:
        with pytest.raises(IndexError):
            grad_cam(model, images, "layer2", 10)
        with pytest.raises(RuntimeError, match="must match the existing size"):
            grad_cam(model, images, "layer2", [1, 2, 3])


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

    def test_hookdrop_hooks_are_disabled(self, model: Small, images: torch.Tensor) -> None:
        expected = grad_cam(model, images, "layer2", 1)
        inject(model, Dropout(0.9), layers="layer*.*")
        assert torch.equal(grad_cam(model, images, "layer2", 1), expected)
        assert not any(site.called for site in next(iter(find(model))).sites)

    def test_parameter_gradient_hooks_are_not_called(self, model: Small, images: torch.Tensor) -> None:
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: pytest.fail("called"))
        assert grad_cam(model, images, "layer2").any()

    def test_grad_cam_between_a_forward_and_its_backward(self, model: Small, images: torch.Tensor) -> None:
        twin = copy.deepcopy(model)
        loss = model(images).square().sum()
        grad_cam(model, images, "layer2")
        loss.backward()
        twin(images).square().sum().backward()
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), twin.parameters(), strict=True))

    @pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
    def test_grad_cam_under_no_grad_and_inference_mode(
        self, model: Small, images: torch.Tensor, context: Callable[[], object]
    ) -> None:
        expected = grad_cam(model, images, "layer2")
        with context():
            assert torch.equal(grad_cam(model, images.clone(), "layer2"), expected)


class TestTransformers:
    @pytest.mark.parametrize(
        ("tokens", "image", "grid"),
        [(196, (224, 224), (14, 14)), (197, (224, 224), (14, 14)), (201, (224, 224), (14, 14)), (25, (64, 96), (4, 6)), (8, (32, 16), (4, 2))],
        ids=str,
    )  # fmt: skip
    def test_token_grid_has_the_aspect_ratio_of_the_image(
        self, tokens: int, image: tuple[int, int], grid: tuple[int, int]
    ) -> None:
        x = torch.arange(tokens * 2.0).reshape(1, tokens, 2)
        maps = as_map(x, image)
        assert maps.shape == (1, 2, *grid)
        assert torch.equal(maps[0].flatten(1), x[0, -grid[0] * grid[1] :].T)

    def test_other_outputs_raise(self) -> None:
        with pytest.raises(ShapeError, match=r"returns 99 tokens.*224 x 224"):
            as_map(torch.ones(1, 99, 2), (224, 224))
        with pytest.raises(ShapeError, match="expected a map"):
            as_map(torch.ones(1, 99), (224, 224))
        with pytest.raises(ShapeError, match="expected a map"):
            as_map((torch.ones(1, 99, 2),), (224, 224))

    def test_models_with_container_outputs(self, images: torch.Tensor) -> None:
        class Output(Strided):
            def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
                return {"logits": super().forward(x), "other": x}

        model = Output()
        plain = Strided()
        plain.load_state_dict(model.state_dict())
        assert torch.equal(grad_cam(model, images, "layer2", 2), grad_cam(plain, images, "layer2", 2))


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
        class Detached(Small):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.fc(
                    self.layer2(self.layer1(self.conv1(x)).detach()).mean((2, 3)) + x.mean((1, 2, 3))[:, None]
                )

        with pytest.raises(LayerError, match="'layer1' .* the output must depend on it"):
            grad_cam(Detached(), images, "layer1")

    def test_uint8_images_raise(self, model: Small, images: torch.Tensor) -> None:
        with pytest.raises(TypeError, match=r"grad_cam: x must be a dense floating-point.*uint8.\n  pass x.float\(\)"):
            grad_cam(model, images.byte(), "layer2")

    def test_invalid_shapes_of_images_and_model_output_raise(self, model: Small, images: torch.Tensor) -> None:
        with pytest.raises(ShapeError, match=r"images \(N, C, H, W\), got \(3, 16, 16\)"):
            grad_cam(model, images[0], "layer2")
        with pytest.raises(ShapeError, match=r"must return \(N, classes\), got \(4, 8, 16, 16\)"):
            grad_cam(nn.Sequential(model.conv1, model.layer1), images, "1")

    def test_missing_library_error_says_what_to_install(
        self, model: Small, images: torch.Tensor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "pytorch_grad_cam", None)
        with pytest.raises(
            HookdropError, match=r"pytorch_grad_cam is not installed.\n  pip install 'hookdrop\[observe\]'"
        ):
            grad_cam(model, images, "layer2")
        assert model.training
