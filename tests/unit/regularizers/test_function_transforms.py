"""`torch.func`, double backward, tensor subclasses, and the contexts in which a model is built, hooked and run."""

import copy
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, jacfwd, jacrev, vmap

from hookdrop import DropBlock, DropKey, Dropout, HeadDropout, InjectionError, LinearSchedule, inject
from hookdrop.core.parts import REGULARIZERS
from tests.support.regularizers import ACTIVATIONS, EVERY, REPRESENTATIVE, SINGLE_SAMPLE, SITES, Affine, Case
from tests.support.tensors import all_equal
from tests.support.training import gradients_of, seeded


def cases(some: dict[str, Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", some.values(), ids=some)


ALL = cases(EVERY)
EDITING = {name: case for name, case in EVERY.items() if case.in_backward}
Weights = dict[str, torch.Tensor]


def test_cases_cover_every_regularizer() -> None:
    """Also of the tests of checkpointing and of precision."""
    assert set(REGULARIZERS.values()) <= {type(case.regularizer) for case in EVERY.values()}


def hooked(case: Case) -> tuple[nn.Sequential, Weights, torch.Tensor]:
    model = case.model(torch.float64)
    inject(model, case.regularizer, layers=SITES)
    return model, {name: p.detach() for name, p in model.named_parameters()}, case.input(torch.float64)


# --- torch.func


@cases(REPRESENTATIVE)
def test_grad_of_functional_call_equals_backward(case: Case) -> None:
    model, weights, x = hooked(case)
    found = seeded(grad(lambda weights: functional_call(model, weights, (x,)).square().sum()), weights)
    seeded(model, x).square().sum().backward()
    assert all_equal(list(found.values()), [p.grad for p in model.parameters()])


def per_sample(model: nn.Module, weights: Weights, x: torch.Tensor, **randomness: str) -> Weights:
    def loss(weights: Weights, x: torch.Tensor) -> torch.Tensor:
        return functional_call(model, weights, (x.unsqueeze(0),)).square().sum()

    return vmap(grad(loss), (None, 0), **randomness)(weights, x)


@cases(REPRESENTATIVE)
def test_per_sample_gradients_share_a_mask_only_with_randomness_same(case: Case) -> None:
    model, weights, x = hooked(case)
    equal = x[:1].expand_as(x)
    same = per_sample(model, weights, equal, randomness="same")["0.weight"]
    torch.testing.assert_close(same, same[:1].expand_as(same))
    # DropPath has only two outcomes per sample, so try five times.
    tries = [per_sample(model, weights, equal, randomness="different")["0.weight"] for _ in range(5)]
    assert not all(torch.equal(gradient[0], gradient[i]) for gradient in tries for i in range(1, len(x)))


@cases(REPRESENTATIVE)
def test_ensemble_raises_with_randomness_error(case: Case) -> None:
    base = nn.Sequential(case.layer if case.acts_on_scores else Affine(case.shape[1:]))
    inject(base, case.regularizer, layers="0", at="output" if case.acts_on_scores else case.places[-1])
    with pytest.raises(RuntimeError, match="draws random numbers, which torch.func.vmap does not allow"):
        vmap(lambda factor: factor * base(torch.ones(case.shape)))(torch.ones(3))


@pytest.mark.parametrize(
    ("outer", "inner", "masks"), [("different", "same", 2), ("same", "different", 3), ("different", "different", 6)]
)
@pytest.mark.parametrize("name", ["DropBlock (sparse)", "DropBlock (dense)", "Dropout", "Dropout2d", "DropPath"])
def test_nested_vmaps_respect_each_randomness(name: str, outer: str, inner: str, masks: int) -> None:
    """PyTorch crashes if one of two nested in-place random functions has `randomness="same"`."""
    drop, x = EVERY[name].regularizer, torch.ones(50, 4, 8, 8)
    each = vmap(lambda a: vmap(lambda b: a * b * drop(x), randomness=inner)(torch.ones(3)), randomness=outer)
    found = {tuple((y == 0).flatten().tolist()) for y in each(torch.ones(2)).flatten(0, 1)}
    assert len(found) == masks


@pytest.mark.parametrize("name", ["Dropout", "DropBlock (sparse)", "DropPath"])
def test_jacobians_and_hessians_agree_in_all_modes(name: str) -> None:
    """Reverse mode, forward mode, forward over reverse, and `torch.autograd.functional` with and without vmap."""
    model, _, x = hooked(Case(EVERY[name].regularizer, (4, 4, 4, 4)))  # small enough for a full Jacobian

    def sums(x: torch.Tensor) -> torch.Tensor:
        return model(x).sum((0, 1)).flatten()

    jacobian = torch.autograd.functional.jacobian
    expected = seeded(jacobian, sums, x)
    assert expected.any()
    torch.testing.assert_close(seeded(jacrev(sums), x), expected)
    torch.testing.assert_close(seeded(jacfwd(sums, randomness="same"), x), expected)
    torch.testing.assert_close(seeded(jacobian, sums, x, vectorize=True), expected)
    (small, _, x), total = hooked(Case(EVERY[name].regularizer, (2, 4, 4, 4))), lambda x: small(x).sum()
    second = seeded(jacrev(jacrev(total)), x)
    torch.testing.assert_close(seeded(jacfwd(jacrev(total), randomness="same"), x), second)


# --- contexts


CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "torch.device": lambda: torch.device("meta"),
    "FakeTensorMode": lambda: FakeTensorMode(allow_non_fake_inputs=True),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}
IN_CONTEXT = pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)


def trained(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    return gradients_of(model, lambda: seeded(model, x).square().sum())


@IN_CONTEXT
@cases(REPRESENTATIVE)
def test_inject_and_step_inside_a_context_train_outside(case: Case, context: Callable[[], Any]) -> None:
    model, x = case.model(), case.input()
    clean = copy.deepcopy(model)
    drop = inject(clean, case.regularizer, layers=SITES, schedule=LinearSchedule(4))
    drop.seek(2)
    expected = trained(clean, x)
    with context():
        drop = inject(model, case.regularizer, layers=SITES, schedule=LinearSchedule(4))
        drop.enabled = False
    with context():
        drop.enabled = True
        drop.load_state_dict(drop.state_dict())
        drop.seek(1)
        drop.step()
    assert all_equal(trained(model, x), expected)


@ALL
def test_default_device_does_not_affect_training(case: Case) -> None:
    """Intermediate tensors are on the device of the input."""
    model, x = case.model(), case.input()
    inject(model, case.regularizer, layers=SITES)
    expected = trained(model, x)
    with torch.device("meta"):
        assert all_equal(trained(model, x), expected)


@pytest.mark.parametrize("name", ["inference_mode", "no_grad", "torch.device", "FakeTensorMode"])
def test_example_input_in_a_context(name: str) -> None:
    """The example input is created outside of the context."""
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), torch.randn(2, 3, 8, 8)
    with CONTEXTS[name]():
        drop = inject(model, DropBlock(0.1, 3), layers="*", example_input=x)
    model(x).sum().backward()
    assert [site.called for site in drop.sites] == [True, True]
    assert type(model[1].running_mean) is torch.Tensor
    assert not model[1].running_mean.is_inference()


def test_measuring_on_the_meta_device_raises() -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(4, 4)), torch.ones(2, 4)
    drop = inject(model, Dropout(0.3), layers="0")
    with drop.recording(last=0):
        for use in (drop.probe, model):
            with pytest.raises(InjectionError):
                use(x)


@ALL
def test_model_of_fake_tensors(case: Case) -> None:
    """Built, hooked and run without values, as for a memory estimate."""
    with FakeTensorMode():
        model, x = case.model(), case.input()
        # These layers have no heads, and no product after the softmax.
        example = None if isinstance(case.regularizer, HeadDropout | DropKey) else x
        inject(model, case.regularizer, layers=SITES, example_input=example)
        y = model(x)
        y.sum().backward()
        assert y.shape == x.shape
        assert all(p.grad.shape == p.shape for p in model.parameters())


def test_vmap_emits_no_performance_warnings() -> None:
    """PyTorch warns if it falls back to a loop over slices."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for case in (*SINGLE_SAMPLE.values(), *EDITING.values()):
            model, weights, x = hooked(case)
            per_sample(model, weights, x, randomness="different")
    assert not [str(warning.message) for warning in caught if "vmap" in str(warning.message)]


@pytest.mark.parametrize("transform", [lambda f: vmap(f, randomness="different"), lambda f: grad(lambda x: f(x).sum())])
def test_recording_raises(transform: Any) -> None:
    model = nn.Sequential(nn.Identity())
    drop = inject(model, Dropout(0.3), layers="0")
    with drop.recording(), pytest.raises(InjectionError, match="cannot be used inside torch.func"):
        transform(model)(torch.ones(5, 8))


# --- tensor subclasses


class MetaTensor(torch.Tensor):
    """Carries metadata through every function, as MONAI's class of this name does."""

    meta: Any = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(result, MetaTensor):
            result.meta = next((arg.meta for arg in args if isinstance(arg, MetaTensor)), None)
        return result


def with_meta(x: torch.Tensor) -> MetaTensor:
    y = x.clone().as_subclass(MetaTensor)
    y.meta = {"spacing": 0.5}
    return y


@cases(ACTIVATIONS)
@pytest.mark.parametrize("shared", [True, False])
def test_tensor_subclass_is_kept_and_allows_inplace_operations(case: Case, shared: bool) -> None:
    """Bitwise equal to a plain tensor with the same seed: output and gradient, also after `relu_`."""
    model = nn.Sequential(case.layer)
    inject(model, case.regularizer, layers="0")
    plain = case.input()
    results = []
    for x in (plain.clone(), with_meta(plain)):
        x.requires_grad_(shared)
        with torch.device("cpu"):  # a mode, as of `torch.set_default_device`
            y = seeded(model, x * 1.0)
        before = y.detach().clone()
        assert y.relu_() is y
        if shared:
            y.square().sum().backward()
        results.append([before, y, *([x.grad] if shared else [])])
        assert type(y) is type(x)
    assert results[1][1].meta == {"spacing": 0.5}
    assert all_equal(*[[tensor.as_subclass(torch.Tensor) for tensor in tensors] for tensors in results])


@pytest.mark.parametrize("regularizer", [Dropout(0.3), DropBlock(0.3, 3)], ids=repr)
def test_leaf_subclass_receives_its_gradient(regularizer: nn.Module) -> None:
    """No operation precedes it, so the gradient reaches the leaf itself."""
    leaf = with_meta(torch.ones(4, 16, 32, 32)).requires_grad_()
    y = regularizer(leaf)
    y.sum().backward()
    assert torch.equal(leaf.grad.as_subclass(torch.Tensor), y.detach().as_subclass(torch.Tensor))
