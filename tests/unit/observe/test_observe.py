"""Contents of the figures, not their pixels. Grad-CAM is that of its paper, and changes nothing."""

import copy
import random
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import interpolate

import hookdrop
from hookdrop import Dropout, HookdropError, LayerError, LinearSchedule, ShapeError, find, inject
from hookdrop.measure import figures
from hookdrop.observe import compare_cam, grad_cam, plot_schedule
from hookdrop.observe.cam import as_map
from tests.support.models import Small, toy
from tests.support.tensors import scale_maps

pytest.importorskip("matplotlib")
pytest.importorskip("pytorch_grad_cam")
from matplotlib.figure import Figure


def all_axes(figure: Figure) -> list[Any]:
    """Return the axes of the figure and its subfigures, without color bars."""
    found = [*figure.axes, *(axes for part in figure.subfigs for axes in all_axes(part))]
    return [axes for axes in dict.fromkeys(found) if axes.get_label() != "<colorbar>"]


def images_of(figure: Figure) -> list[np.ndarray]:
    return [np.asarray(image.get_array()) for axes in all_axes(figure) for image in axes.images]


def titles(figure: Figure) -> list[str]:
    return [part.get_suptitle() for part in figure.subfigs]


class TestRecordings:
    def test_maps_are_three_rows_of_channels_with_one_color_scale(self, model: Small, images: torch.Tensor) -> None:
        with inject(model, hookdrop.DropBlock(0.3, 3), layers="layer1.*").recording() as r:
            model(images)
        figure = r.plot_features(sample=2, channels=5)
        assert titles(figure) == [f"{name}: DropBlock at 0.3, dropped {site.dropped:.3f}" for name, site in r.items()]
        for part, site in zip(figure.subfigs, r.values(), strict=True):
            shown = images_of(part)
            assert len(shown) == 15
            for row, tensor in enumerate((site.before, site.mask, site.after)):
                assert all(np.array_equal(shown[5 * row + c], tensor[2, c].float()) for c in range(5))
            axes = all_axes(part)
            assert [a.get_ylabel() for a in axes[::5]] == ["before", "mask", "after"]
            assert [a.get_title() for a in axes[:5]] == [f"channel {c}" for c in range(5)]
            # Before and after share a color scale with a color bar; the mask has two colors with a legend.
            both = torch.stack([site.before[2, :5], site.after[2, :5]])
            assert {a.images[0].get_clim() for a in axes[:5] + axes[10:]} == {(both.min().item(), both.max().item())}
            assert len([a for a in part.axes if a.get_label() == "<colorbar>"]) == 1
            assert {a.images[0].get_clim() for a in axes[5:10]} == {(0, 1)}
        legends = [legend for part in figure.subfigs for legend in part.legends]
        assert [[text.get_text() for text in legend.get_texts()] for legend in legends] == [["kept", "dropped"]]

    def test_plot_masks(self, model: Small, images: torch.Tensor) -> None:
        with inject(model, Dropout(0.3), layers=["layer1", "fc"]).recording() as r:
            model(images)
        shown = images_of(r.plot_masks("layer1", sample=1, channels=3))
        assert len(shown) == 3
        assert np.array_equal(shown[2], r["layer1"].mask[1, 2])
        assert np.array_equal(images_of(r.plot_masks("layer1"))[0], r["layer1"].mask[0, 0])
        assert len(titles(r.plot_masks())) == 2
        with pytest.raises(LayerError, match="no site 'layer2'"):
            r.plot_masks(["layer2"])

    @pytest.mark.parametrize(
        ("shape", "size", "label"),
        [((4, 20, 6), (20, 6), "tokens x channels"), ((4, 6), (4, 6), "samples x units"), ((6,), (6, 1), "samples x units")],
        ids=str,
    )  # fmt: skip
    def test_tokens_are_one_image_each(self, shape: tuple[int, ...], size: tuple[int, ...], label: str) -> None:
        with inject(model := nn.Sequential(nn.Identity()), Dropout(0.5), layers="0").recording() as r:
            model(torch.randn(shape))
        figure = r.plot_features()
        assert [image.shape for image in images_of(figure)] == [size] * 3
        axes = all_axes(figure)
        assert [a.get_ylabel() for a in axes] == ["before", "mask", "after"]
        assert {a.get_xlabel() for a in axes} == {label}


def test_images_of_other_tensors() -> None:
    x = torch.randn(2, 7, 7, 12)
    assert torch.equal(figures.images_of(x, 0, 8)[3], x[0, ..., 3])  # channels last
    x = torch.randn(2, 3, 5, 6, 7)
    assert torch.equal(figures.images_of(x, 1, 8)[2], x[1, 2, 2])  # a volume shows its middle slice
    x = torch.tensor([[[[float("inf"), 3], [1, 1]]]])  # non-finite values do not affect the color scale
    assert all_axes(figures.blocks_figure({"": {"": x}}))[0].images[0].get_clim() == (1, 3)
    for wrong, sample in ((torch.ones(4, 3, 5, 5), 4), (torch.ones(()), 0)):
        with pytest.raises(ShapeError):
            figures.images_of(wrong, sample, 8)


class TestSchedules:
    def test_schedule_plot_shows_its_multipliers(self) -> None:
        line = plot_schedule(LinearSchedule(4), 6).axes[0].lines[0]
        assert list(line.get_xdata()) == list(range(7))
        assert list(line.get_ydata()) == LinearSchedule(4).simulate(7)


def reference_grad_cam(model: nn.Module, x: torch.Tensor, layer: str, classes: list[int]) -> torch.Tensor:
    """Grad-CAM by equations 1 and 2 of its paper, resized to the image."""
    twin, seen = copy.deepcopy(model).eval(), []

    def keep(module: nn.Module, args: object, output: torch.Tensor) -> None:
        seen.append(output.detach().clone())
        output.register_hook(seen.append)

    twin.get_submodule(layer).register_forward_hook(keep)
    twin(x)[range(len(x)), classes].sum().backward()
    features, gradients = seen
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
    def test_the_model_and_random_states_are_restored(self, model: Small, images: torch.Tensor, fails: bool) -> None:
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
        x = torch.randn(2, 5, 4, 6)
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
        forward = lambda m, x: m.fc(m.layer1(m.conv1(x)).detach().mean((2, 3)) + x.mean((1, 2, 3))[:, None])
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

    def test_missing_libraries(self, model: Small, images: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in ("pytorch_grad_cam", "matplotlib.figure"):
            monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(HookdropError, match="^pytorch_grad_cam is not installed"):
            grad_cam(model, images, "layer2")
        assert model.training
        with pytest.raises(HookdropError, match="^matplotlib is not installed"):
            plot_schedule(hookdrop.ConstantSchedule(), 5)


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
