"""What `observe.capture` keeps equals what hooks written by hand see, and nothing is left behind."""

import copy
import gc
import io
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookdrop
from hookdrop import DropBlock, Dropout, HookdropWarning, LayerError, ShapeError, inject, observe
from tests.support.models import Small, names, toy
from tests.support.tensors import all_equal

BOTH = ("output", "gradient")


def in_place() -> nn.Sequential:
    """Each ReLU overwrites the output of the layer before it."""
    layers = nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 2)
    return nn.Sequential(*layers)


def by_hand(model: nn.Sequential, x: Tensor) -> dict[str, list[Tensor]]:
    """The input, output and gradient of each layer, from hooks of PyTorch."""
    found: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_children()}
    twin = copy.deepcopy(model)
    for name, layer in twin.named_children():
        layer.register_forward_pre_hook(lambda layer, args, name=name: found[name].append(args[0].detach().clone()))

        def after(layer: nn.Module, args: Any, output: Tensor, name: str = name) -> None:
            found[name].append(output.detach().clone())
            output.register_hook(lambda gradient: found[name].append(gradient.clone()))

        layer.register_forward_hook(after)
    twin(x).square().sum().backward()
    return found


@pytest.mark.parametrize("model", [in_place(), nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(True))])
def test_equals_hooks_written_by_hand_bit_for_bit(model: nn.Sequential) -> None:
    x = torch.randn(5, 6) if isinstance(model[0], nn.Linear) else torch.randn(5, 3, 6, 6)
    expected = by_hand(model, x)
    with observe.capture(model, "*", what=("input", *BOTH)) as seen:
        model(x).square().sum().backward()
    assert list(seen) == list(expected)
    for name, tensors in expected.items():
        assert all_equal([seen[name].input, seen[name].output, seen[name].gradient], tensors)


def test_the_last_calls_of_each_layer_are_kept_and_all_are_counted() -> None:
    model = in_place()
    batches = torch.randn(4, 3, 6)
    with observe.capture(model, "0", last=2) as seen:
        for x in batches:
            model(x)
    assert [call.output.shape for call in seen.calls("0")] == [(3, 8)] * 2
    assert all_equal([call.output for call in seen.calls("0")], [model[0](x) for x in batches[2:]])
    assert "    4  " in repr(seen)


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_on_the_model_or_its_tensors(fails: bool) -> None:
    model = in_place()
    tables = [dict(vars(module)) for module in model.modules()]
    kept: list[Any] = []
    with pytest.raises(ZeroDivisionError) if fails else torch.enable_grad():
        with observe.capture(model, "**", what=("input", *BOTH)) as seen:
            kept.append(y := model(torch.randn(2, 6)))
            1 / (not fails)
    assert [dict(vars(module)) for module in model.modules()] == tables
    assert not y._backward_hooks
    copies = weakref.ref(seen["0"].output)
    del seen
    gc.collect()
    assert copies() is None


def test_layers_are_selected_as_for_inject(model: Small, images: Tensor) -> None:
    given: tuple[Any, ...] = ("layer1.*.bn1", nn.Linear, model.conv1, lambda name, _: name.endswith("conv2"))
    compiled = torch.compile(model, backend="eager")
    with observe.capture(compiled, given, exclude="layer2.**") as seen:  # and compiled code runs uncompiled
        compiled(images)
    assert set(seen) == set(names(model, given, "layer2.**")) > {"layer1.0.bn1", "fc", "conv1", "layer1.1.conv2"}
    for layers, message in (("layer5", "did you mean: 'layer"), ("layer9.*", "matches no module")):
        with pytest.raises(LayerError, match=message):
            observe.capture(model, layers)


def test_a_tensor_of_a_container_is_chosen_as_by_inject() -> None:
    model = nn.Sequential(toy(lambda m, x: {"a": x + 1, "n": 3, "b": (x * 2,)}))
    x = torch.randn(2, 3, requires_grad=True)

    def seen_with(tensor: Any) -> Any:
        with observe.capture(model, "0", tensor=tensor, what=BOTH) as seen:
            (model(x)["a"].sum() + model(x)["a"].sum()).backward()
        return seen["0"]

    assert torch.equal(seen_with(None).output, x + 1)
    both = seen_with("all")
    assert all_equal([*both.output], [x + 1, x * 2])
    assert torch.equal(both.gradient[0], torch.ones(2, 3))
    assert both.gradient[1] is None  # not used
    with pytest.raises(ShapeError, match="observe at '0'.*no tensor='c'"):
        seen_with("c")


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recompute_is_kept_once_with_its_gradient(reentrant: bool) -> None:
    model, x = in_place(), torch.randn(3, 6, requires_grad=True)
    expected = by_hand(model, x)
    with observe.capture(model, "*", what=BOTH, last=9) as seen:
        checkpoint(model, x, use_reentrant=reentrant).square().sum().backward()
    for name in seen:
        assert len(seen.calls(name)) == 1
        assert torch.equal(seen[name].output, expected[name][1])
        if not reentrant:
            assert torch.equal(seen[name].gradient, expected[name][2])
    if reentrant:
        with pytest.raises(LayerError, match="use_reentrant=False"):
            seen["0"].gradient  # noqa: B018


def test_each_call_has_its_own_gradient() -> None:
    model = toy(lambda m, x: m.f(torch.tanh(m.f(x))), f=nn.Linear(4, 4))
    with observe.capture(model, "f", what=BOTH, last=4) as seen:
        first, second = model(torch.randn(2, 4)), model(torch.randn(2, 4))
        (first * 2).sum().backward()
        (second * 3).sum().backward()
    assert [call.gradient.unique().tolist() for call in seen.calls("f")[1::2]] == [[2.0], [3.0]]


def test_inputs_of_recursive_layers_and_of_layers_without_float_outputs() -> None:
    module = toy(lambda m, x: m(x[1:]) + 1 if len(x) > 1 else x)
    with observe.capture(model := nn.Sequential(module), "0", what="input", last=3) as seen:
        model(torch.arange(3.0))
    assert [call.input.tolist() for call in seen.calls("0")] == [[2.0], [1.0, 2.0], [0.0, 1.0, 2.0]]
    with observe.capture(model := nn.Sequential(toy(lambda m, x: x.argmax())), "0", what="input") as seen:
        model(torch.arange(3.0))
    assert seen["0"].input.tolist() == [0.0, 1.0, 2.0]


def test_sparse_tensors_and_those_inside_vmap_are_left_out() -> None:
    model = nn.Sequential(toy(lambda m, x: x.to_sparse()), toy(lambda m, x: x.to_dense()), nn.ReLU())
    with observe.capture(model, "*") as seen, observe.statistics(model, every=1) as health:
        model(torch.eye(3))
        torch.func.vmap(model[2])(torch.ones(2, 5))
    assert set(health) == {"1", "2"}
    assert seen["2"].output.shape == (3, 3)
    assert repr(seen).splitlines()[2].split() == ["0", "1", "-"]


def test_a_block_cannot_be_open_twice() -> None:
    model = in_place()
    with observe.capture(model, "0") as seen:
        model(torch.randn(2, 6))
        with pytest.raises(hookdrop.InjectionError, match="open already"), seen:
            pass


def test_undetached_copies_can_be_part_of_a_loss() -> None:
    model, x = in_place(), torch.randn(3, 6)
    with observe.capture(model, "0", detach=False) as seen:
        model(x)
    seen["0"].output.sum().backward()
    assert torch.equal(model[0].weight.grad, torch.ones(3, 8).T @ x)


def test_copies_and_files_of_a_model_are_not_watched() -> None:
    model, file = in_place(), io.BytesIO()
    with observe.capture(model, "*", what="input") as seen:
        twin = copy.deepcopy(model)
        torch.save(model, file)
        file.seek(0)
        for other in (twin, torch.load(file, weights_only=False)):
            other(torch.randn(2, 6))
        assert not seen
        hookdrop.layers(model, torch.randn(2, 6))  # which also runs the model without values
        assert {type(one.input) for one in seen.values()} == {Tensor}


def test_a_layer_that_never_ran_is_named(model: Small, images: Tensor) -> None:
    with observe.capture(model, ["fc", "conv1"]) as seen:
        model.conv1(images)
    assert repr(seen).endswith("never ran: 'fc'")
    for name, message in (("fc", "did not run"), ("cnv1", "not watched\n  did you mean: 'conv1'")):
        with pytest.raises(LayerError, match=message):
            seen[name]
    with pytest.raises(LayerError, match=r"the gradient was not kept.\n  write capture\(..., what="):
        seen["conv1"].gradient  # noqa: B018
    with pytest.warns(HookdropWarning, match="none of the layers ran"), observe.capture(model, "fc"):
        pass


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"what": "outputs"}, ValueError),
        ({"what": []}, ValueError),
        ({"last": 0}, ValueError),
        ({"to": "nowhere"}, RuntimeError),
    ],
)
def test_invalid_arguments_are_errors(model: Small, settings: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        observe.capture(model, "fc", **settings)


def test_a_hooked_layer_is_drawn_before_and_after_its_mask(model: Small, images: Tensor) -> None:
    pytest.importorskip("matplotlib")
    drop = inject(model, DropBlock(0.3, 3), layers="layer1.0")
    with drop.recording() as recorded, observe.capture(model, ["layer1.0", "fc"]) as seen:
        model(images)
    assert torch.equal(seen["layer1.0"].output, recorded["layer1.0"].after)
    figure = seen.plot("layer1.0", image=1, channels=4, recorded=recorded)
    labels = [axes.get_ylabel() for axes in figure.subfigs[0].axes if axes.get_ylabel()]
    assert labels[:3] == ["before", "mask", "output"]
    shown = [axes.images[0].get_array() for axes in figure.subfigs[0].axes if axes.images][8:12]
    assert all_equal([torch.as_tensor(image.data) for image in shown], list(seen["layer1.0"].output[1, :4]))
    with observe.capture(model, "conv1", what=("input", "output", "gradient")) as first:
        model(images).sum().backward()
    parts = first.plot("conv1").subfigs  # 3 channels and 8, and a scale for the gradient
    assert [part.get_suptitle() for part in parts] == ["conv1", "conv1: gradient"]
    assert [sum(bool(axes.images) for axes in part.axes) for part in parts] == [11, 8]
    written: list[Any] = []
    writer = type("Writer", (), {"add_figure": lambda self, *given: written.append(given)})()
    seen.add_to(writer, 7, recorded=recorded)
    assert [(tag, step) for tag, _, step in written] == [("observe/layer1.0", 7), ("observe/fc", 7)]


class TestCompare:
    def test_differences_begin_at_the_site_and_are_those_of_two_runs(self, model: Small, images: Tensor) -> None:
        drop = inject(model, Dropout(0.5), layers="layer1.1")
        found = observe.compare(model, images, drop, ["conv1", "layer1.*", "fc"])
        assert [one.output == 0.0 for one in found.values()] == [True, True, False, False]
        assert all(one.gradient for one in found.values())
        state = torch.get_rng_state()
        regularized = model(images)
        torch.set_rng_state(state)
        with drop.disabled():
            plain = model(images)
        assert found["fc"].output == pytest.approx(((regularized - plain).norm() / plain.norm()).item(), rel=1e-5)

    def test_changes_nothing(self, model: Small, images: Tensor) -> None:
        drop = inject(model, Dropout(0.5), layers="layer1.1")
        model.conv1.weight.requires_grad_(False)
        model.eval()
        before = copy.deepcopy(model.state_dict()), torch.get_rng_state(), model.fc.bias.grad
        observe.compare(model, images, drop)
        assert all_equal([*model.state_dict().values()], [*before[0].values()])
        assert torch.equal(torch.get_rng_state(), before[1])
        assert model.fc.bias.grad is before[2]
        assert [p.requires_grad for p in model.parameters()].count(False) == 1
        assert not any(module.training for module in model.modules())

    def test_an_idle_injection_says_why(self, model: Small, images: Tensor) -> None:
        drop = inject(model, Dropout(0.5), layers="layer1.1", schedule=hookdrop.LinearSchedule(10))
        assert repr(observe.compare(model, images, drop, "fc")).endswith(
            "nothing differs: its rate is 0 at step 0 of LinearSchedule(steps=10) (at another: probe(x, step=...))"
        )
