"""`observe.stats`: statistics of every layer, validated against PyTorch over all calls at once."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hookdrop import HookdropWarning, InjectionError, LayerError
from hookdrop.observe import stats
from hookdrop.observe.statistics import Moments
from tests.support.models import Small, toy
from tests.support.tensors import captured


def deep_network(activation: type[nn.Module], depth: int, gain: float = 1.0) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [module for _ in range(depth) for module in (nn.Linear(32, 32), activation())]
    for linear in layers[::2]:
        nn.init.normal_(linear.weight, std=gain / math.sqrt(32))
        nn.init.zeros_(linear.bias)
    return nn.Sequential(*layers)


def backward(model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().mean().backward()


class TestNumbers:
    def test_statistics_match_torch_over_all_calls(self, model: Small) -> None:
        with stats(model) as seen, captured(model, *dict(model.named_modules())) as tensors:
            for n in (1, 5, 3):
                backward(model, 100 + 10 * torch.randn(n, 3, 16, 16))
        for name, layer in seen.items():
            for moments, calls in (
                (layer.activation, tensors[name]),
                (layer.gradient, [x.grad for x in tensors[name]]),
            ):
                everything = torch.cat([x.double().flatten() for x in calls])
                variance, mean = torch.var_mean(everything, correction=0)
                assert moments.mean == pytest.approx(mean.item(), rel=1e-9, abs=1e-12)
                assert moments.variance == pytest.approx(variance.item(), rel=1e-9)
            norms = [x.double().norm().item() for x in (call.grad for call in tensors[name])]
            assert layer.gradient.norm == pytest.approx(math.sqrt(sum(n * n for n in norms) / 3))
            assert layer.calls == 3

    def test_variance_is_stable_around_a_large_mean(self) -> None:
        """Subtracting the squared mean from the mean of squares would lose all digits."""
        x = 1e8 + torch.arange(12, dtype=torch.float64)
        moments = Moments()
        for part in x.split(5):
            moments.add(part)
        assert moments.variance == pytest.approx(143 / 12)
        assert moments.mean == pytest.approx(1e8 + 5.5)

    def test_moments_without_elements_are_nan(self) -> None:
        moments = Moments()
        moments.add(torch.ones(0, 3))
        assert all(math.isnan(value) for value in (moments.mean, moments.variance, moments.norm))
        moments.add(torch.tensor([1.0, 3.0]))
        assert (moments.mean, moments.variance, moments.norm) == (2, 1, pytest.approx(math.sqrt(10)))

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_recomputed_forwards_are_counted_once(self, reentrant: bool) -> None:
        model = deep_network(nn.Tanh, 2)
        x = torch.randn(4, 32, requires_grad=True)
        with stats(model) as plain:
            backward(model, x)
        with stats(model) as seen:
            checkpoint(model, x, use_reentrant=reentrant).square().mean().backward()
        assert [one.calls for one in seen.values()] == [1] * 4
        assert [one.activation.mean for one in seen.values()] == [one.activation.mean for one in plain.values()]
        assert [one.gradient.norm for one in seen.values()] == [one.gradient.norm for one in plain.values()]


class TestDeadAndSaturated:
    def test_unit_that_fires_once_is_alive(self) -> None:
        model, x = nn.Sequential(nn.ReLU()), torch.full((10, 2), -1.0)
        with stats(model) as seen:
            model(x)
            assert seen["0"].dead == 1
            x[7, 1] = 1
            model(x)
            model(-x.abs())
        assert seen["0"].dead == 0.5

    @pytest.mark.parametrize(
        ("layers", "shape", "channels"),
        [
            *(([nn.Identity()], shape, 6) for shape in ((5, 6, 4, 4), (5, 4, 4, 6), (5, 9, 6), (5, 6))),
            ([nn.Conv1d(3, 6, 1)], (5, 3, 9), 6),
            ([nn.BatchNorm1d(6)], (5, 6, 9), 6),
            ([nn.Conv2d(3, 6, 1)], (5, 3, 6, 9), 6),
            ([nn.GroupNorm(6, 6)], (5, 6, 6, 9), 6),
            ([nn.Linear(3, 6)], (5, 2, 7, 3), 6),
            ([nn.Conv2d(3, 64, 1), nn.ReLU()], (2, 3, 64, 8), 64),  # the shape (2, 64, 64, 8) alone suggests NHWC
            ([nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU()], (2, 3, 8, 5), 8),
            ([nn.Conv1d(3, 7, 1), nn.ReLU()], (2, 3, 5), 7),
            ([nn.Linear(3, 7), nn.ReLU()], (2, 4, 5, 3), 7),
        ],
        ids=str,
    )
    def test_channel_axis_follows_the_layer_or_the_previous_one_or_the_shape(
        self, layers: list[nn.Module], shape: tuple[int, ...], channels: int
    ) -> None:
        model, x = nn.Sequential(*layers), torch.rand(shape).mul_(1e-3)
        with torch.no_grad():
            for layer in layers:
                if hasattr(layer, "weight"):
                    layer.weight[1], layer.bias[:] = 0, 1
                    layer.bias[1] = -1 if len(layers) > 1 else 0
        if isinstance(layers[0], nn.Identity):
            x.select(shape.index(6), 1).zero_()
        with stats(model) as seen:
            model(x)
        assert seen[str(len(layers) - 1)].dead == pytest.approx(1 / channels)

    def test_dead_is_none_if_the_number_of_channels_varies(self) -> None:
        model = nn.Sequential(nn.Identity())
        with stats(model) as seen:
            model(torch.ones(2, 3))
            model(torch.ones(2, 4))
            model(torch.ones(5))
        assert seen["0"].dead is None

    @pytest.mark.parametrize(
        ("module", "values", "fraction"),
        [
            (nn.Sigmoid(), [-4.0, -2.0, 0.0, 2.0, 4.0], 2 / 5),  # .018 .12 .5 .88 .98
            (nn.Tanh(), [-2.0, -1.0, 0.0, 1.0, 2.0], 2 / 5),  # .76 at 1, .96 at 2
            (nn.Softsign(), [-20.0, 1.0, 0.0, 1.0], 1 / 4),
            (nn.Hardsigmoid(), [-9.0, 0.0], 1 / 2),
        ],
    )
    def test_saturated_is_within_5_percent_of_a_bound(self, module: nn.Module, values: Any, fraction: float) -> None:
        with stats(model := nn.Sequential(module)) as seen:
            model(torch.tensor(values))
        assert seen["0"].saturated == pytest.approx(fraction)


class TestDoubts:
    def test_vanishing_gradient(self) -> None:
        model = deep_network(nn.Sigmoid, 10)
        with stats(model) as seen:
            backward(model, torch.randn(16, 32))
        vanished = [doubt for doubt in seen.doubts() if "gradient vanishes" in doubt]
        assert vanished[0].startswith("'0': gradient vanishes (")
        assert "at '19'" in vanished[0]
        assert 3 < len(vanished) < 20  # the gradient near the loss has not vanished
        assert seen["0"].gradient.norm < 1e-3 * seen["19"].gradient.norm

    def test_exploding_output_and_gradient(self) -> None:
        model = deep_network(nn.Identity, 8, gain=6.0)
        with stats(model) as seen:
            backward(model, torch.randn(16, 32))
        assert any(doubt.startswith("'15': output explodes") for doubt in seen.doubts())
        assert any(doubt.startswith("'0': gradient explodes") for doubt in seen.doubts())
        assert not any("'14'" in doubt and "gradient" in doubt for doubt in seen.doubts())

    def test_zero_output_and_gradient(self, model: Small, images: torch.Tensor) -> None:
        nn.init.zeros_(model.layer2[1].bn2.weight)  # a common initialization of residual branches
        with stats(model) as seen:
            backward(model, images)
        assert "'layer2.1.bn2': output is 0 (expected at step 0 around zero-initialized layers)" in seen.doubts()
        assert any(doubt.startswith("'layer2.1.conv1': gradient is 0") for doubt in seen.doubts())
        assert seen["layer1.0.conv1"].gradient.norm > 0

    def test_healthy_network_has_no_doubts(self, model: Small, images: torch.Tensor) -> None:
        with stats(model) as seen:
            backward(model, images)
        assert seen.doubts() == []

    def test_saturated_layers(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        with torch.no_grad():
            model[0].weight *= 100
        with stats(model) as seen:
            model(torch.randn(64, 4))
        assert any(doubt.startswith("'1': 9") and "are saturated" in doubt for doubt in seen.doubts())

    @pytest.mark.parametrize(("samples", "dead", "reported"), [(64, 40, True), (64, 20, False), (1, 100, False)])
    def test_dead_units_are_reported_with_their_number(self, samples: int, dead: int, reported: bool) -> None:
        """Not those that are 0 by chance, such as half of the units in a batch of one sample."""
        model, x = nn.Sequential(nn.Identity()), torch.ones(samples, 256)
        x[:, :dead] = 0
        with stats(model) as seen:
            model(x)
        assert [doubt.startswith(f"'0': {dead} of 256 channels are dead") for doubt in seen.doubts()] == [
            True
        ] * reported


class TestLayers:
    def test_default_is_every_leaf_module_in_call_order(self) -> None:
        later, first = nn.Linear(3, 4), nn.Sequential(nn.ReLU(), nn.Linear(2, 3))
        first.forward = lambda x: first[0](first[1](x))  # type: ignore[method-assign]
        model = toy(lambda m, x: m.later(m.first(x)), later=later, first=first)
        with stats(model) as seen:
            model(torch.randn(5, 2))
        assert list(seen) == ["first.1", "first.0", "later"]
        with stats(model, exclude="first.*", layers=None) as seen:
            later(torch.randn(5, 3))
        assert list(seen) == ["later"]

    def test_named_layers(self, model: Small, images: torch.Tensor) -> None:
        with stats(model, "layer*") as seen:
            model(images)
        assert list(seen) == ["layer1", "layer2"]

    def test_layer_that_is_never_called(self, model: Small, images: torch.Tensor) -> None:
        model.spare = nn.ModuleList([nn.Linear(2, 2)])
        with stats(model) as seen:
            model(images)  # no warning: the layer was not named
        with pytest.raises(LayerError, match="'spare.0' was not called"):
            seen["spare.0"]
        with pytest.raises(LayerError, match="'conv2' is not an observed layer.\n  did you mean: 'conv1'"):
            seen["conv2"]
        with pytest.warns(HookdropWarning, match="never ran.*'spare.0'"):
            with stats(model, ["spare.0", "fc"]):
                model(images)
        with pytest.warns(HookdropWarning, match="never ran"), stats(model) as seen:
            pass
        assert repr(seen) == "<no layer was called>"

    def test_torch_func_raises(self) -> None:
        """Under vmap a hook sees a wrapper of one slice, which becomes invalid after it."""
        model = nn.Sequential(nn.Linear(3, 4))
        with stats(model) as seen:
            with pytest.raises(InjectionError):
                torch.func.vmap(model)(torch.ones(2, 3))
            model(torch.ones(2, 3))
        assert seen["0"].calls == 1

    def test_stats_leaves_no_hook_and_changes_no_gradient(self, model: Small, images: torch.Tensor) -> None:
        twin = copy.deepcopy(model)
        with stats(model):
            out = model(images)
            out.square().mean().backward()
        backward(twin, images)
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
        assert not any(module._forward_hooks for module in model.modules())
        with stats(model) as seen:
            model(images)
            copy.deepcopy(model)(images)
            pickle.loads(pickle.dumps(model))(images)
        assert seen["fc"].calls == 1
        with pytest.raises(ZeroDivisionError), stats(model):
            model(images)
            raise ZeroDivisionError
        assert not any(module._forward_hooks for module in model.modules())


def test_repr_is_a_table(model: Small, images: torch.Tensor) -> None:
    with stats(model, ["conv1", "fc"]) as seen:
        model(images)
    lines = repr(seen).splitlines()
    assert lines[0].split("  ")[0] == "layer"
    assert lines[2].split()[:3] == ["conv1", "Conv2d", "1"]
    assert lines[2].split()[5:] == ["-", "-", "-", "0", "-"]  # no backward pass, no dead channel, no bounds
