"""`observe.capture` captures detached tensors by layer name and leaves no hook on the model."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hookdrop import Dropout, HookdropWarning, InjectionError, LayerError, ShapeError, inject
from hookdrop.observe import capture
from tests.support.models import Small


def count_hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules())


class TestCapturedTensors:
    def test_outputs_and_gradients_match_the_model(self, model: Small, images: torch.Tensor) -> None:
        with capture(model, ["conv1", "layer2.*", "fc"], gradients=True) as seen:
            out = model(images)
            out.square().sum().backward()
        first = torch.nn.functional.conv2d(images, model.conv1.weight, model.conv1.bias, padding=1)
        assert list(seen) == ["conv1", "layer2.0", "layer2.1", "fc"]
        assert torch.equal(seen["conv1"][0], first)
        assert torch.equal(seen["fc"][-1], out)
        # The loss is the sum of squares, so the gradient of the last map follows from the head.
        assert torch.allclose(seen["fc"][0].grad, 2 * out)
        pooled = (2 * out.detach()) @ model.fc.weight.detach() / 256
        assert torch.allclose(seen["layer2.1"][0].grad, pooled[:, :, None, None].expand(4, 8, 16, 16), atol=1e-6)
        assert not any(x.requires_grad for calls in seen.values() for x in calls)

    def test_repeated_calls_are_captured_in_order(self) -> None:
        relu = nn.ReLU()
        model = nn.Sequential(nn.Linear(4, 4), relu, nn.Linear(4, 4), relu)
        x = torch.randn(2, 4, requires_grad=True)
        with capture(model, nn.ReLU, gradients=True) as seen:
            out = model(x)
            model(x.detach() * 2)
            out.sum().backward()
        assert torch.equal(seen["1"][1], out)
        assert torch.equal(seen["1"][1].grad, torch.ones(2, 4))
        assert torch.equal(seen["1"][0].grad, (out > 0).float() @ model[2].weight.detach())
        assert [x.grad for x in seen["1"][2:]] == [None, None]  # no backward pass through these

    def test_captured_tensors_are_safe_from_later_in_place_operations(self) -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True))
        x = torch.randn(4, 8)
        with capture(model, "*", gradients=True) as seen:
            model(x).sum().backward()
        plain = torch.nn.functional.linear(x, model[0].weight, model[0].bias).detach()
        assert torch.equal(seen["0"][0], plain)
        assert torch.equal(seen["1"][0], plain.relu())
        assert torch.equal(seen["0"][0].grad, (plain > 0).float())

    def test_output_after_a_regularizer_is_the_regularized_output(self) -> None:
        model = nn.Sequential(nn.Identity())
        drop = inject(model, Dropout(0.5), layers="0")
        with capture(model, "0") as seen, drop.recording() as r:
            model(torch.ones(100))
        assert torch.equal(seen["0"][0], r["0"].after)

    def test_first_tensor_of_a_tuple_is_captured(self) -> None:
        model = nn.Sequential(nn.LSTM(3, 5, batch_first=True))
        with capture(model, "0") as seen:
            out, _ = model(torch.randn(2, 4, 3))
        assert torch.equal(seen["0"][0], out)

    def test_gradients_of_two_backward_passes_are_summed(self) -> None:
        model = nn.Sequential(nn.Linear(3, 3))
        with capture(model, "0", gradients=True) as seen:
            out = model(torch.ones(1, 3))
            out.sum().backward(retain_graph=True)
            (2 * out).sum().backward()
        assert torch.equal(seen["0"][0].grad, torch.full((1, 3), 3.0))

    def test_inference_mode_captures_ordinary_tensors(self) -> None:
        model = nn.Sequential(nn.Linear(3, 3))
        with torch.inference_mode(), capture(model, "0") as seen:
            model(torch.ones(1, 3))
        assert not seen["0"][0].is_inference()

    def test_integer_output_is_captured_if_there_is_no_floating_point_tensor(self) -> None:
        model = nn.Sequential(nn.Linear(3, 3), Argmax())
        with capture(model, "1") as seen:
            model(torch.eye(3))
        assert seen["1"][0].dtype == torch.int64


class Argmax(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.argmax(-1)


class TestMemory:
    def test_last_keeps_only_the_most_recent_calls(self) -> None:
        model = nn.Sequential(nn.Identity())
        with capture(model, "0", gradients=True, last=2) as seen:
            outs = [model(torch.full((1,), float(i), requires_grad=True)) for i in range(5)]
            sum(outs).backward()
        assert [x.item() for x in seen["0"]] == [3, 4]
        assert [x.grad.item() for x in seen["0"]] == [1, 1]

    def test_to_copies_to_the_given_device(self) -> None:
        model = nn.Sequential(nn.Linear(3, 3, device="meta"))
        with capture(model, "0", to="meta") as seen:
            model(torch.ones(1, 3, device="meta"))
        assert seen["0"][0].device.type == "meta"
        plain = nn.Sequential(nn.Identity())
        x = torch.ones(3)
        with capture(plain, "0", to="cpu") as seen:
            plain(x)
        assert seen["0"][0].data_ptr() != x.data_ptr()

    def test_capture_does_not_keep_the_graph_alive(self) -> None:
        model = nn.Sequential(nn.Linear(3, 3))
        with capture(model, "0", gradients=True) as seen:
            out = model(torch.ones(1, 3))
            out.sum().backward()
            alive = weakref.ref(out)
            del out
            gc.collect()
            assert alive() is None
        assert seen["0"][0].grad is not None


class TestNoSideEffects:
    def test_hooks_are_removed_after_the_block(self, model: Small, images: torch.Tensor) -> None:
        before = count_hooks(model)
        with capture(model, ["layer1.*"], gradients=True) as seen:
            out = model(images)
            assert count_hooks(model) == before + 2
            out.sum().backward()
        model(images).sum().backward()
        assert count_hooks(model) == before
        assert len(seen["layer1.0"]) == 1

    def test_hooks_are_removed_after_an_exception(self, model: Small, images: torch.Tensor) -> None:
        with pytest.raises(RuntimeError), capture(model, "**.bn1", gradients=True) as seen:
            out = model(images)
            model(images[:, :2])
        assert count_hooks(model) == 0
        assert len(seen["layer1.0.bn1"]) == 1
        out.sum().backward()
        assert seen["layer1.0.bn1"][0].grad is not None

    def test_nested_captures_see_the_same_tensors(self, model: Small, images: torch.Tensor) -> None:
        with capture(model, "fc", gradients=True) as outer:
            with capture(model, "fc", gradients=True) as inner:
                model(images).sum().backward()
            model(images)
        assert len(outer["fc"]) == 2
        assert torch.equal(outer["fc"][0], inner["fc"][0])
        assert torch.equal(outer["fc"][0].grad, inner["fc"][0].grad)

    def test_capture_changes_neither_outputs_nor_random_state(self, model: Small, images: torch.Tensor) -> None:
        inject(model, Dropout(0.5), layers="layer1.*")
        torch.manual_seed(1)
        expected, state = model(images), torch.get_rng_state()
        torch.manual_seed(1)
        with capture(model, "layer1.**", gradients=True):
            out = model(images)
            assert torch.equal(torch.get_rng_state(), state)
            out.sum().backward()
        gradient = model.conv1.weight.grad.clone()
        model.zero_grad()
        expected.sum().backward()
        assert torch.equal(out, expected)
        assert torch.equal(gradient, model.conv1.weight.grad)

    @pytest.mark.parametrize(
        "how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
    )
    def test_copy_made_inside_the_block_captures_nothing(self, how: Any) -> None:
        model = nn.Sequential(nn.Linear(3, 3))
        with capture(model, "0", gradients=True) as seen:
            twin = how(model)
            twin(torch.ones(1, 3))
            model(torch.ones(1, 3)).sum().backward()
        assert len(seen["0"]) == 1

    def test_pickle_made_inside_the_block_excludes_captured_tensors(self) -> None:
        model = nn.Sequential(nn.Identity())
        with capture(model, "0"):
            model(torch.ones(100_000))
            assert len(pickle.dumps(model)) < 10_000


class TestExecutionModes:
    @pytest.mark.parametrize("reentrant", [True, False])
    def test_checkpointed_forwards_are_captured_once(self, reentrant: bool) -> None:
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        x = torch.randn(2, 6, requires_grad=True)
        with capture(model, "*", gradients=not reentrant) as seen:
            for _ in range(2):
                checkpoint(model, x, use_reentrant=reentrant).square().sum().backward()
        assert [len(calls) for calls in seen.values()] == [2, 2, 2]
        if not reentrant:
            assert torch.equal(seen["2"][0].grad, 2 * seen["2"][0])

    def test_wrapped_models_use_the_names_of_the_inner_model(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4))
        wrapped = nn.DataParallel(model)
        with capture(wrapped, "0") as seen:
            wrapped(torch.ones(2, 4))
        assert list(seen) == ["0"]

    def test_capture_of_the_model_itself(self, model: Small, images: torch.Tensor) -> None:
        with capture(model, model) as seen:
            out = model(images)
        assert torch.equal(seen[""][0], out)


class TestErrors:
    def test_unknown_layer_raises(self, model: Small) -> None:
        with pytest.raises(LayerError, match="did you mean: 'layer2'"), capture(model, "layer3"):
            pass
        assert count_hooks(model) == 0

    def test_layer_that_is_never_called_warns(self, model: Small, images: torch.Tensor) -> None:
        model.spare = nn.Linear(2, 2)
        with pytest.warns(HookdropWarning, match="capture: 1 of 2 layers never ran: 'spare'"):
            with capture(model, ["spare", "fc"]) as seen:
                model(images)
        assert list(seen) == ["fc"]
        with pytest.raises(LayerError, match="'spare' was not called, or returned no tensor.\n  called: 'fc'"):
            seen["spare"]
        assert seen.get("spare") is None

    def test_lookup_of_a_layer_that_was_not_captured_raises(self, model: Small, images: torch.Tensor) -> None:
        with capture(model, "layer2.*") as seen:
            model(images)
        with pytest.raises(LayerError, match="'layer2.3' is not an observed layer.\n  did you mean: 'layer2.[01]'"):
            seen["layer2.3"]

    def test_layer_without_a_tensor_output_raises(self) -> None:
        class Text(nn.Module):
            def forward(self, x: torch.Tensor) -> str:
                return "text"

        model = nn.Sequential(Text())
        with pytest.raises(ShapeError, match="'0' returned str, which contains no tensor.\n  skip it: exclude="):
            with capture(model, "0"):
                model(torch.ones(1))

    def test_torch_func_raises(self) -> None:
        """Its tensors become invalid when the transform ends."""
        model = nn.Sequential(nn.Linear(3, 3))
        with pytest.raises(InjectionError, match=r"cannot be used inside torch.func \(vmap, grad, ...\)"):
            with capture(model, "0"):
                torch.func.vmap(model)(torch.ones(2, 3))
        with pytest.raises(InjectionError, match="cannot be used inside torch.func"), capture(model, "0"):
            torch.func.grad(lambda x: model(x).sum())(torch.ones(3))

    @pytest.mark.parametrize("to", ["nope", "cuda:99", 1.5], ids=repr)
    def test_unknown_device_raises(self, model: Small, to: Any) -> None:
        errors = (RuntimeError, TypeError, AssertionError)  # PyTorch's
        with pytest.raises(errors), capture(model, "fc", to=to):
            pass
        drop = inject(model, Dropout(0.5), layers="fc")
        with pytest.raises(errors), drop.recording(to=to):
            pass
        assert count_hooks(model) == 1

    def test_invalid_arguments_raise(self, model: Small) -> None:
        with pytest.raises(ValueError, match="capture: last must be at least 1, got 0"), capture(model, "fc", last=0):
            pass


def test_repr_lists_captured_layers(model: Small, images: torch.Tensor) -> None:
    with capture(model, ["layer1", "fc"]) as seen:
        assert repr(seen) == "<nothing captured>"
        model(images)
    assert repr(seen) == "'layer1': 1 call, (4, 8, 16, 16) float32\n'fc': 1 call, (4, 10) float32"
