"""`observe.edit_parameter_gradients` edits gradients by parameter name until it is removed."""

from __future__ import annotations

import copy
import io
import math
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from hookdrop import HookdropWarning, InjectionError, LayerError, ShapeError
from hookdrop.observe import capture, clamp, edit_parameter_gradients, scale, zero
from tests.support.models import Small
from tests.support.training import gradients


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (zero, torch.zeros_like),
        (clamp(-0.01, 0.02), lambda g: g.clamp(-0.01, 0.02)),
        (scale(-3), lambda g: g * -3),
        (lambda g: g.sign(), torch.sign),
    ],
    ids=["zero", "clamp", "scale", "user function"],
)
def test_only_matching_parameters_are_edited(model: Small, images: torch.Tensor, fn: object, expected: object) -> None:
    plain = gradients(model, images)
    with edit_parameter_gradients(model, ["fc*.bias", "**.bn1.weight"], fn) as edit:
        edited = gradients(model, images)
    assert set(edit.names) == {"fc.bias", *(f"layer{i}.{j}.bn1.weight" for i in (1, 2) for j in (0, 1))}
    for name, gradient in edited.items():
        assert torch.equal(gradient, expected(plain[name]) if name in edit.names else plain[name]), name
    assert not torch.equal(edited["fc.bias"], plain["fc.bias"])
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, images).values(), plain.values(), strict=True))


def test_zeroed_gradient_rows_keep_their_weights(model: Small, images: torch.Tensor) -> None:
    """How to train only a part of a tensor."""
    before = model.fc.weight.detach().clone()
    keep = torch.zeros(10, 1)
    keep[3:] = 1
    with edit_parameter_gradients(model, "fc.weight", lambda g: g * keep):
        gradients(model, images)
        torch.optim.SGD(model.parameters(), 0.1).step()
    assert torch.equal(model.fc.weight[:3], before[:3])
    assert not torch.equal(model.fc.weight[3:], before[3:])


def test_zero_replaces_nan() -> None:
    assert torch.equal(zero(torch.tensor([math.nan, math.inf])), torch.zeros(2))


def test_shared_parameter_is_edited_once_under_each_of_its_names() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    (model["a"](torch.ones(3)) + model["b"](torch.ones(3))).sum().backward()
    plain = model["a"].weight.grad.clone()
    with edit_parameter_gradients(model, ["a.weight", "b.weight", "*.weight"], scale(2)) as edit:
        model.zero_grad()
        (model["a"](torch.ones(3)) + model["b"](torch.ones(3))).sum().backward()
    assert edit.names == ("a.weight",)
    assert torch.equal(model["a"].weight.grad, 2 * plain)
    with edit_parameter_gradients(model, "b.weight", zero) as edit:
        assert edit.names == ("a.weight",)


def test_each_backward_pass_is_edited_before_accumulation(model: Small, images: torch.Tensor) -> None:
    with edit_parameter_gradients(model, "fc.bias", lambda g: torch.ones_like(g)):
        for _ in range(3):
            model(images).sum().backward()
    assert torch.equal(model.fc.bias.grad, torch.full((10,), 3.0))


def test_two_edits_of_one_parameter_run_in_order(model: Small, images: torch.Tensor) -> None:
    first = edit_parameter_gradients(model, "fc.bias", lambda g: torch.ones_like(g))
    second = edit_parameter_gradients(model, "fc.bias", scale(5))
    assert torch.equal(gradients(model, images)["fc.bias"], torch.full((10,), 5.0))
    first.remove()
    first.remove()
    assert not torch.equal(gradients(model, images)["fc.bias"], torch.full((10,), 5.0))
    second.remove()
    assert "removed" in repr(second)


@pytest.mark.parametrize("reentrant", [False, True])
def test_reentrant_checkpoints_edit_each_part_of_the_gradient(reentrant: bool) -> None:
    model = nn.Sequential(nn.Linear(1, 1, bias=False))
    x = torch.full((1, 1), 3.0, requires_grad=True)
    with edit_parameter_gradients(model, "0.weight", clamp(-4, 4)):
        sum(checkpoint(model, x, use_reentrant=reentrant) for _ in range(2)).backward()
    assert model[0].weight.grad.item() == (6 if reentrant else 4)


def test_edit_is_removed_after_an_exception(model: Small, images: torch.Tensor) -> None:
    plain, attributes = gradients(model, images), set(vars(model))
    with pytest.raises(ZeroDivisionError), edit_parameter_gradients(model, "**", zero):
        raise ZeroDivisionError
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, images).values(), plain.values(), strict=True))
    assert set(vars(model)) == attributes


def test_repr_names_the_function_and_the_parameters(model: Small) -> None:
    with edit_parameter_gradients(model, "fc.*", clamp(-1, 1)) as edit:
        assert repr(edit) == "<GradientEdit clamp of 2 parameters: 'fc.weight', 'fc.bias'>"


@pytest.mark.parametrize(
    "params", ["layer1.**", re.compile(r"layer1\..*"), ["layer1.0.**", "layer1.1.**", "layer1.0.bn1.bias"]], ids=str
)
def test_globs_and_regular_expressions(model: Small, params: object) -> None:
    with edit_parameter_gradients(model, params, zero) as edit:
        assert sorted(edit.names) == sorted(n for n, _ in model.named_parameters() if n.startswith("layer1."))


class TestCopies:
    """Copies lose parameter hooks, with a warning."""

    def test_deepcopy_warns_and_does_not_edit(self, model: Small, images: torch.Tensor) -> None:
        plain = gradients(model, images)
        with edit_parameter_gradients(model, "fc.bias", zero):
            with pytest.warns(HookdropWarning, match="the copy does not edit the gradients of 'fc.bias'"):
                twin = copy.deepcopy(model)
            assert torch.equal(gradients(twin, images)["fc.bias"], plain["fc.bias"])
            copy.deepcopy(twin)  # no warning: it has no hooks
        assert not gradients(model, images)["fc.bias"].equal(torch.zeros(10))
        with edit_parameter_gradients(twin, "fc.bias", zero):
            assert gradients(twin, images)["fc.bias"].equal(torch.zeros(10))
        copy.deepcopy(model)
        copy.deepcopy(twin)

    def test_pickle_warns_and_does_not_need_hookdrop(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2))
        with (
            edit_parameter_gradients(model, "**", zero),
            pytest.warns(HookdropWarning, match="neither deepcopy nor pickle copies"),
        ):
            saved = pickle.dumps(model)
        assert b"hookdrop.observe" not in saved
        assert pickle.loads(saved)[0].weight.requires_grad

    def test_state_dict_does_not_warn(self, model: Small) -> None:
        keys = list(model.state_dict())
        with edit_parameter_gradients(model, "**", zero):
            torch.save(model.state_dict(), io.BytesIO())
            assert list(model.state_dict()) == keys


class TestErrors:
    def test_frozen_parameters_raise_or_warn(self, model: Small) -> None:
        model.fc.bias.requires_grad_(False)
        with pytest.raises(LayerError, match="'fc.bias' matches only frozen parameters.*'fc.bias'"):
            edit_parameter_gradients(model, "fc.bias", zero)
        with pytest.warns(HookdropWarning, match=r"'fc.\*' also matches frozen parameters.*'fc.bias'"):
            assert edit_parameter_gradients(model, "fc.*", zero).names == ("fc.weight",)

    def test_invalid_params_raise(self, model: Small) -> None:
        with pytest.raises(LayerError, match="`params` is empty"):
            edit_parameter_gradients(model, [], zero)
        with pytest.raises(TypeError, match="names, globs or compiled regular expressions, got a Linear"):
            edit_parameter_gradients(model, [model.fc], zero)
        for params, got in (
            (model.fc, "a Linear"),
            (model.layer1, "a Sequential"),
            (model.parameters(), "a Parameter"),
            (model.fc.weight, "a Parameter"),
            (nn.Linear, "the class Linear"),
            (3, r"3 \(int\)"),
        ):
            with pytest.raises(
                TypeError, match=f"compiled regular expressions, got {got}.\n  for example 'fc.weight', "
            ):
                edit_parameter_gradients(model, params, zero)

    def test_invalid_fn_raises(self, model: Small) -> None:
        with pytest.raises(TypeError, match="fn must be a function"):
            edit_parameter_gradients(model, "fc.*", 0)
        with pytest.raises(TypeError, match=r"call it: clamp\(min, max\)"):
            edit_parameter_gradients(model, "fc.*", clamp)
        with pytest.raises(TypeError, match=r"call it: scale\(factor\)"):
            edit_parameter_gradients(model, "fc.*", scale)
        assert not any(p._backward_hooks for p in model.parameters())

    def test_invalid_return_value_of_fn_raises(self, model: Small, images: torch.Tensor) -> None:
        with edit_parameter_gradients(model, "fc.bias", lambda g: g.sum()):
            with pytest.raises(ShapeError, match=r"of shape \(10,\) for 'fc.bias', got \(\)"):
                gradients(model, images)
        with edit_parameter_gradients(model, "fc.bias", lambda g: None):
            with pytest.raises(ShapeError, match="got None"):
                gradients(model, images)

    def test_invalid_arguments_of_clamp_and_scale_raise(self) -> None:
        with pytest.raises(ValueError, match="clamp: min must not be above max, got 1 and -1"):
            clamp(1, -1)
        with pytest.raises(TypeError, match="scale: factor must be a number"):
            scale("1")


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
class TestWrapped:
    def test_distributed_data_parallel(self, model: Small, images: torch.Tensor) -> None:
        plain = gradients(model, images)
        wrapped = nn.parallel.DistributedDataParallel(model)
        with edit_parameter_gradients(wrapped, ["fc.bias", "module.fc.weight"], scale(2)) as edit:
            with capture(wrapped, "fc", gradients=True) as seen:
                edited = gradients(wrapped, images)
        assert edit.names == ("fc.bias", "fc.weight")
        assert torch.allclose(edited["module.fc.bias"], 2 * plain["fc.bias"])
        assert torch.allclose(edited["module.conv1.bias"], plain["conv1.bias"])
        assert torch.allclose(2 * seen.gradients["fc"][0].sum(0), edited["module.fc.bias"])

    @pytest.mark.filterwarnings("ignore:FSDP will not all-gather:UserWarning")
    def test_fsdp_raises(self) -> None:
        fully_shard = pytest.importorskip("torch.distributed.fsdp").fully_shard
        model = nn.Sequential(nn.Linear(4, 4))
        fully_shard(model)
        with pytest.raises(InjectionError, match="FSDP bypasses parameter hooks"):
            edit_parameter_gradients(model, "0.bias", zero)


class TestPatternErrors:
    @pytest.mark.parametrize(
        ("params", "said"),
        [
            ("fc.biass", "asked for:    'fc.biass'\n  did you mean: 'fc.bias'"),
            ("bn1.bias", "did you mean: '**.bn1.bias'"),
            ("fc", "did you mean: 'fc.\\*'"),
            ("layer1", "did you mean: 'layer1.**'"),
            ("bn1", "did you mean: '**.bn1.\\*'"),
            (re.compile("fc.baias"), r"asked for:    re.compile\('fc.baias'\)\n  did you mean: 'fc.bias'"),
            (["fc.bias", "nothing*"], "asked for:    'nothing\\*'\n  see all: "),
        ],
    )
    def test_unmatched_pattern_suggests_names(self, model: Small, params: object, said: str) -> None:
        with pytest.raises(LayerError, match=said.replace("**", r"\*\*")):
            edit_parameter_gradients(model, params, zero)
        assert not any(p._backward_hooks for p in model.parameters())
