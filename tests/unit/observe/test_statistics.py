"""`observe.stats`: numbers of every layer, held against PyTorch's own over everything at once."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hookdrop import HookdropWarning, InjectionError, LayerError, ShapeError
from hookdrop.observe import Stats, capture, stats
from hookdrop.observe.layer_statistics import Moments
from tests.support.nets import Small


def deep(activation: type[nn.Module], depth: int, gain: float = 1.0) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [module for _ in range(depth) for module in (nn.Linear(32, 32), activation())]
    for linear in layers[::2]:
        nn.init.normal_(linear.weight, std=gain / math.sqrt(32))
        nn.init.zeros_(linear.bias)
    return nn.Sequential(*layers)


def backward(model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().mean().backward()


class TestNumbers:
    def test_they_are_those_of_all_calls_at_once(self, model: Small) -> None:
        with stats(model) as seen, capture(model, list(model.modules())[1:], gradients=True) as tensors:
            for n in (1, 5, 3):
                backward(model, 100 + 10 * torch.randn(n, 3, 16, 16))
        for name, layer in seen.items():
            for moments, calls in ((layer.activation, tensors[name]), (layer.gradient, tensors.gradients[name])):
                everything = torch.cat([x.double().flatten() for x in calls])
                variance, mean = torch.var_mean(everything, correction=0)
                assert moments.mean == pytest.approx(mean.item(), rel=1e-9, abs=1e-12)
                assert moments.variance == pytest.approx(variance.item(), rel=1e-9)
            norms = [x.double().norm().item() for x in tensors.gradients[name]]
            assert layer.gradient_norm == pytest.approx(math.sqrt(sum(n * n for n in norms) / 3))
            assert layer.calls == 3
        assert (seen["fc"].mean, seen["fc"].variance) == (seen["fc"].activation.mean, seen["fc"].activation.variance)
        assert seen["fc"].gradient_variance == seen["fc"].gradient.variance

    def test_a_small_variance_around_a_large_mean(self) -> None:
        """Where the mean of squares less the square of the mean has no digit left."""
        x = 1e8 + torch.arange(12, dtype=torch.float64)
        moments = Moments()
        for part in x.split(5):
            moments.add(part)
        assert moments.variance == pytest.approx(143 / 12)
        assert moments.mean == pytest.approx(1e8 + 5.5)

    def test_of_nothing_and_of_empty_tensors(self) -> None:
        moments = Moments()
        moments.add(torch.ones(0, 3))
        assert math.isnan(moments.mean)
        assert math.isnan(moments.variance)
        assert math.isnan(moments.norm)
        moments.add(torch.tensor([1.0, 3.0]))
        assert (moments.mean, moments.variance, moments.norm) == (2, 1, pytest.approx(math.sqrt(10)))

    def test_memory_does_not_grow_with_the_calls(self, model: Small, images: torch.Tensor) -> None:
        def held(seen: Stats) -> list[int]:
            """Elements of all tensors, and hooks on tensors."""
            parts = [
                [*vars(one).values(), *vars(one.activation).values(), *vars(one.gradient).values()]
                for one in seen.values()
            ]
            kept = [sum(x.numel() for x in part if isinstance(x, torch.Tensor)) for part in parts]
            return [*kept, *(len(one._handles) for one in seen.values())]

        with stats(model) as seen:
            for _ in range(2):
                backward(model, images)
            before = held(seen)
            for _ in range(5):
                backward(model, images)
            assert held(seen) == before
            assert max(before) <= 4 + 10  # numbers, and a bool for each channel
        assert not any(one._handles for one in seen.values())

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_what_a_checkpoint_runs_again_is_counted_once(self, reentrant: bool) -> None:
        model = deep(nn.Tanh, 2)
        x = torch.randn(4, 32, requires_grad=True)
        with stats(model) as plain:
            backward(model, x)
        with stats(model) as seen:
            checkpoint(model, x, use_reentrant=reentrant).square().mean().backward()
        assert [one.calls for one in seen.values()] == [1] * 4
        assert [one.mean for one in seen.values()] == [one.mean for one in plain.values()]
        assert [one.gradient_norm for one in seen.values()] == [one.gradient_norm for one in plain.values()]


class MapNorm(nn.LayerNorm):
    """As ConvNeXt's: the map is turned round, and back."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class TestDeadAndSaturated:
    def test_dead_units_are_found_exactly(self) -> None:
        model = nn.Sequential(nn.Linear(4, 10), nn.ReLU())
        with torch.no_grad():
            model[0].bias[:3] = -1e3  # 3 of 10 never fire
        with stats(model) as seen:
            for _ in range(4):
                model(torch.randn(64, 4))
        assert seen["1"].dead == pytest.approx(0.3)
        assert seen["0"].dead == 0

    def test_a_unit_that_fires_once_is_alive(self) -> None:
        model = nn.Sequential(nn.ReLU())
        x = torch.full((10, 2), -1.0)
        with stats(model) as seen:
            model(x)
            assert seen["0"].dead == 1
            x[7, 1] = 1
            model(x)
            model(-x.abs())
        assert seen["0"].dead == 0.5

    @pytest.mark.parametrize(
        ("shape", "axis"), [((5, 6, 4, 4), 1), ((5, 4, 4, 6), 3), ((5, 9, 6), 2), ((5, 6), 1)], ids=str
    )
    def test_channels_are_where_the_shape_says(self, shape: tuple[int, ...], axis: int) -> None:
        x = torch.ones(shape)
        x.select(axis, 2).zero_()
        model = nn.Sequential(nn.Identity())
        with stats(model) as seen:
            model(x)
        assert seen["0"].dead == pytest.approx(1 / 6)

    def test_or_where_they_are_said_to_be(self) -> None:
        x = torch.ones(5, 6, 9)
        x[:, 2] = 0
        model = nn.Sequential(nn.Identity())
        with stats(model, channel_dim=1) as seen:
            model(x)
        assert seen["0"].dead == pytest.approx(1 / 6)

    @pytest.mark.parametrize(
        ("module", "shape"),
        [
            (nn.Conv1d(3, 6, 1), (5, 3, 9)),
            (nn.BatchNorm1d(6), (5, 6, 9)),
            (nn.Conv2d(3, 6, 1), (5, 3, 6, 9)),
            (nn.GroupNorm(6, 6), (5, 6, 6, 9)),
            (nn.Linear(3, 6), (5, 2, 7, 3)),
            (nn.LayerNorm(6), (5, 2, 7, 6)),
            (nn.Conv1d(3, 6, 1), (3, 9)),
            (nn.Conv2d(3, 6, 1), (3, 7, 9)),
            (nn.Conv3d(3, 6, 1), (3, 2, 7, 9)),
            (MapNorm(6), (5, 6, 7, 9)),
            (nn.InstanceNorm2d(6, affine=True), (6, 7, 9)),
        ],
        ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
    )
    def test_or_where_the_layer_has_them(self, module: nn.Module, shape: tuple[int, ...]) -> None:
        with torch.no_grad():
            module.weight[2] = 0
            module.bias[2] = 0
        model = nn.Sequential(module)
        with stats(model) as seen:
            model(torch.randn(shape))
        assert seen["0"].dead == pytest.approx(1 / 6)

    @pytest.mark.parametrize(
        ("layers", "shape", "channels"),
        [
            ([nn.Conv2d(3, 64, 1), nn.ReLU()], (2, 3, 64, 8), 64),
            ([nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU()], (2, 3, 8, 5), 8),
            ([nn.Conv2d(3, 7, 1), nn.ReLU()], (3, 4, 5), 7),
            ([nn.Conv1d(3, 7, 1), nn.ReLU()], (2, 3, 5), 7),
            ([nn.Linear(3, 7), nn.ReLU()], (2, 4, 5, 3), 7),
        ],
        ids=str,
    )
    def test_an_activation_has_them_where_the_layer_before_it_has(
        self, layers: list[nn.Module], shape: tuple[int, ...], channels: int
    ) -> None:
        """Of (2, 64, 64, 8) the shape alone says NHWC. Whether that layer is looked at makes no difference."""
        with torch.no_grad():
            for layer in layers[:-1]:
                layer.weight[1] = 0
                layer.bias[:] = 1
                layer.bias[1] = -1
        model = nn.Sequential(*layers)
        for which in (None, nn.ReLU):
            with stats(model, which) as seen:
                model(torch.rand(shape).mul_(1e-3))
            assert seen[str(len(layers) - 1)].dead == pytest.approx(1 / channels)

    def test_what_is_said_wins_over_the_layers(self) -> None:
        model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU())
        with torch.no_grad():
            model[0].weight[1] = model[0].bias[1] = 0
        with stats(model, channel_dim=-1) as seen:
            model(torch.randn(2, 3, 5, 6))
        assert [one.dead for one in seen.values()] == [0, 0]

    def test_axes_that_there_are_not(self) -> None:
        model = nn.Sequential(nn.Linear(3, 4))
        with pytest.raises(TypeError, match="stats: channel_dim must be an integer, got 'a'"):
            with stats(model, channel_dim="a"):
                pass
        with pytest.raises(ShapeError, match=r"'0' returned \(2, 4\): channel_dim=3 is not one of its axes 0 to 1"):
            with stats(model, channel_dim=3):
                model(torch.ones(2, 3))

    def test_of_a_changing_number_of_channels_there_is_no_fraction(self) -> None:
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
            (nn.Hardtanh(-2, 2), [-3.0, 1.9, 1.7, 0.0], 2 / 4),
            (nn.Hardsigmoid(), [-9.0, 0.0], 1 / 2),
            (nn.ReLU6(), [-9.0, 0.0, 5.8, 9.0], 2 / 4),  # its 0 is `dead`, not saturated
        ],
        ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
    )
    def test_saturated_is_within_a_twentieth_of_an_end(
        self, module: nn.Module, values: list[float], fraction: float
    ) -> None:
        model = nn.Sequential(module)
        with stats(model) as seen:
            model(torch.tensor(values))
        assert seen["0"].saturated == pytest.approx(fraction)

    def test_what_has_no_ends_does_not_saturate(self) -> None:
        model = nn.Sequential(nn.ReLU())
        with stats(model) as seen:
            model(torch.randn(4, 4))
        assert seen["0"].saturated is None


class TestDoubts:
    def test_a_deep_sigmoid_network_vanishes(self) -> None:
        model = deep(nn.Sigmoid, 10)
        with stats(model) as seen:
            backward(model, torch.randn(16, 32))
        told = [doubt for doubt in seen.doubts() if "gradient vanishes" in doubt]
        assert told[0].startswith("'0': its gradient vanishes (")
        assert "at '19'" in told[0]
        assert 3 < len(told) < 20  # those near the loss have not
        assert seen["0"].gradient_norm < 1e-3 * seen["19"].gradient_norm

    def test_a_badly_scaled_one_explodes(self) -> None:
        model = deep(nn.Identity, 8, gain=6.0)
        with stats(model) as seen:
            backward(model, torch.randn(16, 32))
        assert any(doubt.startswith("'15': its output explodes") for doubt in seen.doubts())
        assert any(doubt.startswith("'0': its gradient explodes") for doubt in seen.doubts())
        assert not any("'14'" in doubt and "gradient" in doubt for doubt in seen.doubts())

    def test_a_small_one_vanishes_forward(self) -> None:
        model = deep(nn.Identity, 8, gain=0.1)
        with stats(model) as seen:
            model(torch.randn(16, 32))
        assert any("'15': its output vanishes" in doubt for doubt in seen.doubts())

    def test_where_nothing_flows(self, model: Small, images: torch.Tensor) -> None:
        nn.init.zeros_(model.layer2[1].bn2.weight)  # as residual branches are often started
        with stats(model) as seen:
            backward(model, images)
        assert "'layer2.1.bn2': its output is 0 (expected at step 0 around layers initialized to 0)" in seen.doubts()
        assert any(doubt.startswith("'layer2.1.conv1': its gradient is 0") for doubt in seen.doubts())
        assert seen["layer1.0.conv1"].gradient_norm > 0

    def test_a_healthy_one_is_not_doubted(self, model: Small, images: torch.Tensor) -> None:
        with stats(model) as seen:
            backward(model, images)
        assert seen.doubts() == []

    def test_what_is_not_finite(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2))
        with stats(model) as seen:
            model(torch.tensor([[math.inf, 1.0]]))
        assert seen.doubts() == ["'0': its output is not finite"]

    def test_dead_and_saturated_layers(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.ReLU())
        with torch.no_grad():
            model[0].weight *= 100
            model[2].bias[:3] = -1e3
        with stats(model) as seen:
            model(torch.randn(64, 4))
        assert "'3': 75% of its channels are dead (0 in every call)" in seen.doubts()
        assert any(doubt.startswith("'1': 9") and "is saturated" in doubt for doubt in seen.doubts())
        assert not any("dead" in doubt for doubt in seen.doubts(dead=0.8))


class TestWhichLayers:
    def test_all_without_others_in_them_in_the_order_of_their_calls(self) -> None:
        class Backwards(nn.Sequential):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                for module in reversed(self):
                    x = module(x)
                return x

        model = Backwards(nn.Linear(3, 4), nn.Sequential(nn.ReLU(), nn.Linear(2, 3)))
        with stats(model) as seen:
            model(torch.randn(5, 2))
        assert list(seen) == ["1.0", "1.1", "0"]
        with stats(model, exclude="1.*", layers=None) as seen:
            model[0](torch.randn(5, 3))
        assert list(seen) == ["0"]

    def test_those_that_are_named(self, model: Small, images: torch.Tensor) -> None:
        with stats(model, "layer*") as seen:
            model(images)
        assert list(seen) == ["layer1", "layer2"]

    def test_one_that_is_not_called(self, model: Small, images: torch.Tensor) -> None:
        model.spare = nn.ModuleList([nn.Linear(2, 2)])
        with stats(model) as seen:
            model(images)  # nobody named it
        with pytest.raises(LayerError, match="'spare.0' was not called"):
            seen["spare.0"]
        with pytest.raises(
            LayerError, match="'conv2' is not one of the layers of these stats.\n  did you mean: 'conv1'"
        ):
            seen["conv2"]
        with pytest.warns(HookdropWarning, match="never called inside stats.*'spare.0'"):
            with stats(model, ["spare.0", "fc"]):
                model(images)
        with pytest.warns(HookdropWarning, match="never called"), stats(model) as seen:
            pass
        assert repr(seen) == "<no layer was called>"

    def test_torch_func_is_refused(self) -> None:
        """What a vmap shows is one slice, in a wrapper that ends with it."""
        model = nn.Sequential(nn.Linear(3, 4))
        with stats(model) as seen:
            with pytest.raises(InjectionError, match="cannot be used inside torch.func"):
                torch.func.vmap(model)(torch.ones(2, 3))
            model(torch.ones(2, 3))
        assert seen["0"].calls == 1

    def test_nothing_is_left_and_nothing_changes(self, model: Small, images: torch.Tensor) -> None:
        twin = copy.deepcopy(model)
        with stats(model):
            out = model(images)
            out.square().mean().backward()
        backward(twin, images)
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
        assert not any(module._forward_hooks for module in model.modules())
        with pytest.raises(ZeroDivisionError), stats(model) as seen:
            out = model(images)
            raise ZeroDivisionError
        out.sum().backward()
        assert seen["fc"].gradient.count == 0
        assert not any(module._forward_hooks for module in model.modules())


def test_it_shows_as_a_table(model: Small, images: torch.Tensor) -> None:
    with stats(model, ["conv1", "fc"]) as seen:
        model(images)
    lines = repr(seen).splitlines()
    assert lines[0].split("  ")[0] == "layer"
    assert lines[2].split()[:3] == ["conv1", "Conv2d", "1"]
    assert lines[2].split()[5:] == ["-", "-", "-", "0", "-"]  # no backward pass, nothing dead, nothing to saturate
    assert "<table>" in seen._repr_html_()


def test_tensorboard_gets_numbers_and_the_picture(model: Small, images: torch.Tensor) -> None:
    pytest.importorskip("matplotlib")

    class Writer:
        def __init__(self) -> None:
            self.scalars: dict[str, tuple[float, int]] = {}
            self.images: dict[str, tuple[int, ...]] = {}

        def add_scalar(self, tag: str, value: float, step: int) -> None:
            self.scalars[tag] = (value, step)

        def add_image(self, tag: str, image: object, step: int, dataformats: str) -> None:
            assert dataformats == "HWC"
            self.images[tag] = image.shape

    writer = Writer()
    with stats(model) as seen:
        backward(model, images)
    seen.log_tensorboard(writer, 7)
    assert writer.scalars["hookdrop/stats/layer1.0.bn1/grad_norm"] == (seen["layer1.0.bn1"].gradient_norm, 7)
    assert writer.scalars["hookdrop/stats/fc/mean"] == (seen["fc"].mean, 7)
    assert "hookdrop/stats/fc/saturated" not in writer.scalars
    assert writer.images["hookdrop/stats"][2] == 3
