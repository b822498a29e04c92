"""`observe.statistics` equals numbers computed from all tensors of a training, which it does not keep."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import hookdrop
from hookdrop import observe
from tests.support.models import Small, toy


def train(model: nn.Module, x: Tensor, steps: int = 6, accumulate: int = 1, autocast: bool = False) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(steps):
        with torch.autocast("cpu", enabled=autocast):
            loss = model(x + step).float().square().mean()
        loss.backward()
        if (step + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()


def check(found: observe.LayerStatistics, calls: list[observe.Seen]) -> None:
    """Compare with the tensors of all calls."""
    x, gradients = torch.cat([call.output for call in calls]).double(), [call.gradient for call in calls]
    near = lambda value: pytest.approx(value.item(), rel=1e-6, abs=1e-7)
    assert (found.mean, found.std, found.largest) == (near(x.mean()), near(x.std(correction=0)), near(x.abs().max()))
    assert found.zeros == near((x == 0).double().mean())
    assert found.gradient == near(torch.stack([one.double().norm() for one in gradients]).mean())
    dead = (x == 0).transpose(0, 1).flatten(1).all(1)
    assert (found.samples, found.units, found.dead) == (len(x), len(dead), dead.sum())


@pytest.mark.parametrize("autocast", [False, True])
def test_equals_the_tensors_of_a_whole_training(model: Small, images: Tensor, autocast: bool) -> None:
    both = ("output", "gradient")
    with observe.statistics(model, every=1) as health, observe.capture(model, "**", what=both, last=99) as seen:
        train(model, images, autocast=autocast)
    assert set(health) == set(seen) == {name for name, _ in model.named_modules() if name}
    for name, found in health.items():
        check(found, seen.calls(name))


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 3), st.data())
def test_dead_and_saturated_units_equal_brute_force(samples: int, units: int, steps: int, data: Any) -> None:
    shape = data.draw(st.sampled_from([(units,), (units, 3, 2), (4, units)]))
    axis = 2 if shape == (4, units) else 1
    batches = [torch.randint(-1, 2, (samples, *shape)) * 9.0 for _ in range(steps)]
    relu, tanh = nn.ReLU(), nn.Tanh()
    for activation, quantity in ((relu, "dead"), (tanh, "saturated")):
        with observe.statistics(nn.Sequential(activation), "0", every=1) as health:
            for x in batches:
                health.model(x)
        outputs = torch.cat([activation(x) for x in batches]).movedim(axis, 0).flatten(1)
        between = (outputs.abs() < 0.98).sum(1)
        expected = (outputs == 0).all(1) if quantity == "dead" else 10 * between <= outputs.shape[1]
        assert getattr(health["0"], quantity) == expected.sum()


@pytest.mark.parametrize(
    ("make", "bounded"),
    [
        *((make, True) for make in (nn.Sigmoid, nn.Tanh, nn.ReLU6, nn.Hardtanh, nn.Softsign, nn.Hardsigmoid)),
        *((make, False) for make in (nn.ReLU, nn.GELU, nn.Identity, nn.Flatten, nn.Hardswish)),
        *((make, False) for make in (lambda: nn.Softmax(-1), lambda: nn.Dropout(0.5), lambda: nn.MaxPool2d(2))),
        (lambda: nn.LayerNorm(2, elementwise_affine=False), False),
        (lambda: toy(lambda m, x: torch.erf(x)), True),
    ],
)
def test_only_bounded_functions_of_each_element_saturate(make: Callable[[], nn.Module], bounded: bool) -> None:
    model = nn.Sequential(make())
    with observe.statistics(model) as health:
        model(torch.full((4, 2, 2, 2), 1e3))
    assert health["0"].saturated == 2 * bounded


def test_recurrent_layers_saturate() -> None:
    model = nn.Sequential(nn.LSTM(4, 8, batch_first=True))
    for bias, saturated in ((0.0, 0), (500.0, 8)):
        nn.init.constant_(model[0].bias_ih_l0, bias)
        with observe.statistics(model) as health:
            model(torch.randn(3, 20, 4))
        assert health["0"].saturated == saturated


def test_every_nth_call_counts_if_the_model_itself_is_not_called() -> None:
    outer = toy(lambda m, x: x, net=nn.Sequential(nn.Linear(4, 4), nn.ReLU()))  # such as a LightningModule
    optimizer = torch.optim.SGD(outer.parameters(), 0.1)
    with observe.statistics(outer, every=5) as health:
        for _ in range(11):
            outer.net(torch.randn(2, 4)).sum().backward()
            optimizer.step()
    assert {one.samples for one in health.values()} == {6}  # calls 0, 5 and 10
    assert health["net.0"].update > 0


@pytest.mark.parametrize("accumulate", [1, 2])
def test_norms_of_parameters_are_those_around_the_measured_step(accumulate: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    seen: list[tuple[Tensor, Tensor]] = []
    original = torch.optim.SGD.step

    class Noting(torch.optim.SGD):
        def step(self, *args: Any) -> Any:
            weights = torch.cat([p.flatten() for p in model.parameters()]).detach()
            gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
            original(self, *args)
            after = torch.cat([p.flatten() for p in model.parameters()]).detach()
            seen.append((gradient.norm(), after.norm(), (after - weights).norm()))

    optimizer = Noting(model.parameters(), 0.1, momentum=0.9)
    with observe.statistics(model, model, every=4) as health:
        for forward in range(8):
            model(torch.randn(3, 4)).square().sum().backward()
            if forward % accumulate == accumulate - 1:
                optimizer.step()
                optimizer.zero_grad()
    step = 4 if accumulate == 1 else 0  # every fourth of 8 steps, or of 4
    found = health[""]
    assert [found.weight_gradient, found.weight, found.update] == pytest.approx([x.item() for x in seen[step]])


def test_two_optimizers_that_step_after_one_forward_are_both_measured() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizers = [torch.optim.SGD(layer.parameters(), 0.1) for layer in model]
    with observe.statistics(model) as health:
        for _ in range(3):
            model(torch.randn(3, 4)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
    assert all(health[name].update for name in ("0", "1"))


def test_only_every_nth_forward_is_measured_and_in_training_no_eval_call() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with observe.statistics(model, every=3) as health:
        model.eval()(torch.full((50, 2), 1e9))
        for training in (True, False, True, True, True, False, False):
            model.train(training)(torch.ones(4, 2))
    assert health["0"].samples == 8  # forwards 0 and 3 of those in training mode
    assert health["0"].largest < 100


def test_eval_forwards_do_not_count_nor_their_gradients() -> None:
    model, x = nn.Sequential(nn.Linear(3, 2)), torch.randn(4, 3)
    with observe.statistics(model, every=2) as health:
        for _ in range(4):
            (1000 * model.eval()(x)).sum().backward()
            model.train()(x).sum().backward()
    assert health["0"].samples == 8
    assert health["0"].gradient == pytest.approx(8**0.5)


def test_units_are_those_of_the_layer_with_weights_before() -> None:
    relu = nn.ReLU()  # shared by layers of other widths
    model = nn.Sequential(nn.Conv1d(1, 4, 3), relu, nn.Conv1d(4, 6, 3), relu)
    with observe.statistics(model, every=1) as health:
        for length in (20, 25):
            model(torch.randn(3, 1, length))
    assert (health["0"].units, health["1"].units) == (4, 10)
    square = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1))
    square[0].weight.data[0], square[0].bias.data[0] = 0.0, 0.0
    with observe.statistics(square) as health:
        square(torch.randn(3, 1, 8, 20))
    assert (health["0"].units, health["0"].dead) == (8, 1)


def test_gradients_that_overflow_are_counted_apart() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    with observe.statistics(model, every=1) as health:
        for factor in (1.0, float("inf"), 1.0):
            (model(torch.ones(2, 3)) * factor).sum().backward()
    assert health["1"].gradient == pytest.approx(2.0)
    assert health["1"].bad_gradients == 1
    assert "the gradient of '1' was NaN or infinite in 1 measured backward passes" in health.doubts()[0]


def test_graphs_are_not_kept_and_modules_not_called() -> None:
    counting = toy(lambda m, x: (setattr(m, "calls", m.calls + 1), x)[1], calls=0)
    model = nn.Sequential(nn.Linear(3, 2), counting)
    with observe.statistics(model, every=1) as health:
        x = torch.randn(4, 3, requires_grad=True)
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
    assert counting.calls == 1
    assert not health.seen["0"].gradient.requires_grad


def test_doubts_name_the_layer_and_what_to_do() -> None:
    model = nn.Sequential(nn.Linear(4, 10), nn.ReLU(), nn.Sequential(nn.Linear(10, 10), nn.ReLU()), nn.Linear(10, 1))
    model[0].bias.data = torch.tensor([-100.0] * 4 + [100.0] * 6)
    nn.init.constant_(model[2][0].weight, -1.0)
    nn.init.constant_(model[2][0].bias, -1.0)
    with observe.statistics(model, [*model.children(), model[2][1]]) as health:
        model[:3](torch.rand(8, 4)).sum().backward()
    doubts = health.doubts()
    dead = "units of {} were zero for all 8 samples"
    assert doubts[0].splitlines()[:2] == ["10 of 10 " + dead.format("'2.1'"), "4 of 10 " + dead.format("'1'")]
    assert doubts[0].splitlines()[2].startswith("  lower the learning rate")
    assert doubts[-1].startswith("never ran: '3'")
    assert repr(health).splitlines()[2].startswith("2")  # the worst first
    with torch.no_grad():
        model[0].weight[0, 0] = torch.nan
    with observe.statistics(model, "0") as health:
        model(torch.rand(8, 4))
    assert health["0"].not_finite == 8
    assert health.doubts()[0].startswith("'0' returned NaN or infinite values for 8 of 8 samples\n")


def test_a_gradient_that_vanishes_and_a_step_that_is_too_large_are_doubts() -> None:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(5)])
    optimizer = torch.optim.SGD(model.parameters(), 1e4)
    with torch.no_grad():
        model[1].weight.mul_(1e-6)
    with observe.statistics(model) as health:
        model(torch.randn(8, 4)).sum().backward()
        optimizer.step()
    texts = "\n".join(health.doubts())
    assert "the gradient of '0' has a norm of" in texts
    assert "clip" not in texts
    assert "one step changed the parameters of '2' by" in texts


def test_metrics_are_flat_numbers_and_the_plot_has_a_bar_for_each_layer(model: Small, images: Tensor) -> None:
    pytest.importorskip("matplotlib")
    with observe.statistics(model, "layer1.*") as health:
        train(model, images, 1)
    metrics = health.metrics()
    assert {key.rpartition("/")[0] for key in metrics} == {"observe/layer1.0", "observe/layer1.1"}
    assert all(type(value) is float for value in metrics.values())
    assert metrics["observe/layer1.0/std"] == health["layer1.0"].std
    figure = health.plot()
    assert [len(axes.patches) for axes in figure.axes] == [2, 2, 2]
    assert [bar.get_width() for bar in figure.axes[1].patches] == [one.std for one in health.values()]


def test_a_training_is_the_same_with_and_without(images: Tensor) -> None:
    weights = []
    for watched in (False, True):
        torch.manual_seed(0)
        model = Small()
        hookdrop.inject(model, hookdrop.Dropout(0.5), layers="layer1.0")
        if watched:
            with observe.statistics(model, every=2):
                train(model, images)
        else:
            train(model, images)
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*weights)
