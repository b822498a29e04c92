"""What breaks hooks elsewhere, and has no file of its own: odd tensors, operations in place, layers that are not called."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from every import DERIVING, EVERY, FORWARD, Case
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from hookdrop import (
    DropBlock,
    Dropout,
    DropPath,
    GaussianNoise,
    HookdropWarning,
    LayerError,
    ShapeError,
    inject,
    plan,
)

ALL = pytest.mark.parametrize("case", EVERY.values(), ids=EVERY)
AT = pytest.mark.parametrize("at", ["output", "input"])


def hooked(regularizer: nn.Module) -> nn.Sequential:
    model = nn.Sequential(nn.Identity())
    inject(model, regularizer, layers="0")
    return model


# --- in place

ACTIVATIONS = [
    nn.ReLU(inplace=True),
    nn.SiLU(inplace=True),
    nn.Hardswish(inplace=True),
    nn.Sigmoid(),
    nn.Softmax(1),
    nn.Tanh(),
]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda module: type(module).__name__)
@AT
@pytest.mark.parametrize("case", DERIVING.values(), ids=DERIVING)
def test_before_and_after_activations_that_write_in_place_or_keep_their_output(
    case: Case, at: str, activation: nn.Module
) -> None:
    """`mul_` breaks the backward pass of what keeps its output; backward hooks break before what writes in place."""
    case = Case(case.regularizer, (2, *case.shape[1:]))
    model = nn.Sequential(nn.Softplus(), copy.deepcopy(activation), nn.Identity(), copy.deepcopy(activation))
    drop = inject(model, case.regularizer, layers="*", at=at)

    def run(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        return model(x)

    x = case.input(torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(run, x, fast_mode=True)
    with drop.measuring():
        run(x).sum().backward()


@pytest.mark.parametrize("case", FORWARD.values(), ids=FORWARD)
@AT
def test_nobody_elses_tensor_is_written_to(case: Case, at: str) -> None:
    """Neither the layer's own output, which it may keep, nor what the caller passes, by position or by name."""

    class Keeps(nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            self.kept = hidden
            return hidden

    class Owner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Keeps()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(hidden=x)

    model, x = Owner(), case.input()
    inject(model, case.regularizer, layers="inner", at=at)
    before = x.clone()
    assert not all(torch.equal(model(x), before) for _ in range(20))
    assert torch.equal(x, before)
    assert (model.inner.kept is x) == (at == "output")


# --- odd tensors


@ALL
@pytest.mark.parametrize("empty", [0, 1, -1])
def test_empty_tensors_stay_empty(case: Case, empty: int) -> None:
    """No samples, no channels, no width."""
    shape = list(case.shape)
    shape[empty] = 0
    x = torch.ones(shape, requires_grad=True)
    y = hooked(case.regularizer)(x)
    y.sum().backward()
    assert y.shape == x.grad.shape == x.shape


def expanded(x: torch.Tensor) -> torch.Tensor:
    return x[:1].expand_as(x)


def every_second(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x, x], -1)[..., 0]


def overlapping(x: torch.Tensor) -> torch.Tensor:
    return torch.randn(x.numel()).as_strided(x.shape, [2**axis for axis in range(x.dim())][::-1])


def one_number(x: torch.Tensor) -> torch.Tensor:
    return torch.ones(()).expand_as(x)


@ALL
@pytest.mark.parametrize("make", [expanded, every_second, overlapping, one_number])
def test_what_lies_oddly_in_memory_is_regularized_as_its_copy(
    case: Case, make: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    model, x = hooked(case.regularizer), make(case.input())
    results = []
    for t in (x.clone(memory_format=torch.contiguous_format), x):
        t = t.detach().requires_grad_()
        torch.manual_seed(0)
        y = model(t)
        results.append((y, torch.autograd.grad(y, t, torch.ones(x.shape))[0]))
    for plain, odd in zip(*results, strict=True):
        torch.testing.assert_close(odd, plain)


class Sub(torch.Tensor):
    """A subclass that does nothing."""


@ALL
def test_subclasses_keep_their_class(case: Case) -> None:
    x = case.input().as_subclass(Sub)
    y = hooked(case.regularizer)(x.requires_grad_())
    assert type(y) is Sub
    y.sum().backward()
    assert x.grad is not None


@ALL
def test_subclasses_that_wrap_tensors(case: Case) -> None:
    """As quantized or distributed ones do, without memory of their own."""
    y = hooked(case.regularizer)(TwoTensor(case.input(), case.input()))
    assert type(y) is TwoTensor
    assert y.shape == case.shape


@ALL
def test_a_parameter_as_output(case: Case) -> None:
    """As of a position embedding: what comes out is no parameter, and its gradient arrives."""

    class Embedding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(case.input())

        def forward(self) -> torch.Tensor:
            return self.weight

    model = nn.ModuleDict({"embedding": Embedding()})
    inject(model, case.regularizer, layers="embedding")
    y = model["embedding"]()
    assert type(y) is torch.Tensor
    y.sum().backward()
    assert model["embedding"].weight.grad is not None


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (torch.ones(2, 3, dtype=torch.complex64), r"got \(2, 3\) complex64: no floating-point tensor"),
        (torch.ones(2, 3, dtype=torch.bool), r"got \(2, 3\) bool: no floating-point tensor"),
        (torch.tensor(1.0), r"got \(\) float32: no floating-point tensor in it that is not 0-d"),
        (torch.ones(2, 3).to_sparse(), "pass x.to_dense"),
        (torch.ones(2, 3).to(torch.float8_e5m2), "pass x.to.torch.bfloat16."),
    ],
)
def test_outputs_that_can_not_be_regularized_are_told(value: torch.Tensor, says: str) -> None:
    with pytest.raises((ShapeError, TypeError), match=says) as error:
        hooked(Dropout(0.3))(value)
    assert "'0'" in str(error.value) + "".join(getattr(error.value, "__notes__", []))


@ALL
def test_without_gradients_nothing_is_asked_of_them(case: Case) -> None:
    y = hooked(case.regularizer)(case.input())
    assert not y.requires_grad
    with torch.no_grad():
        x = case.input().requires_grad_()
        y = hooked(case.regularizer)(x)
    assert y is x or not y.requires_grad


# --- outputs of several tensors


def test_multihead_attention_gives_a_pair() -> None:
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2, batch_first=True)})
    inject(model, Dropout(1.0), layers="attention")
    x = torch.randn(2, 5, 8)
    out, weights = model["attention"](x, x, x)
    assert not out.any()
    assert weights.any()
    assert model["attention"](x, x, x, need_weights=False)[1] is None


@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_networks_give_a_state_that_is_left_alone(cell: type[nn.RNNBase]) -> None:
    model = nn.ModuleDict({"cell": cell(4, 8, batch_first=True)})
    inject(model, Dropout(1.0), layers="cell")
    out, state = model["cell"](torch.randn(2, 5, 4))
    assert not out.any()
    assert all(part.any() for part in (state if cell is nn.LSTM else [state]))


# --- never called


class Direct(nn.Module):
    """Calls a part by its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc.forward(x)


def torchvision_model(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import torchvision

        return torchvision.models.get_model(name, weights=None)

    return make


def timm_model(name: str, **settings: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import timm

        return timm.create_model(name, **settings)

    return make


def images(size: int) -> torch.Tensor:
    return torch.randn(1, 3, size, size)


NARROW = {"img_size": 32, "depth": 1, "embed_dim": 32, "num_heads": 2}
NEVER = {
    "called by .forward()": (Direct, torch.ones(2, 8), "fc", "f?"),
    "torchvision swin attn.qkv": (torchvision_model("swin_t"), images(32), "features.1.0.attn.qkv", "**.attn.qkv"),
    "torchvision swin attn.proj": (torchvision_model("swin_t"), images(32), "features.1.0.attn.proj", "**.attn.proj"),
    "timm beit attn.qkv": (timm_model("beit_base_patch16_224", **NARROW), images(32), "blocks.0.attn.qkv", "**.qkv"),
    "timm eva attn.qkv": (
        timm_model("eva_giant_patch14_224", **NARROW | {"img_size": 28}), images(28), "blocks.0.attn.qkv", "**.qkv",
    ),
    "timm attn_drop under fused attention": (
        timm_model("vit_tiny_patch16_224", **NARROW), images(32), "blocks.0.attn.attn_drop", "**.attn_drop",
    ),
    "timm efficientnet drop_path": (
        timm_model("test_efficientnet"), images(32), "blocks.0.0.drop_path", "blocks.0.*.drop_path",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", NEVER.values(), ids=NEVER)
def test_never_called(case: tuple[Callable[[], nn.Module], torch.Tensor, str, str]) -> None:
    """Weights used directly, branches not taken: an error if named, a warning if matched, told later without example."""
    make, x, name, pattern = case
    model = make()
    with pytest.raises(LayerError, match="is not called in a forward: a hook on it never fires"):
        inject(model, Dropout(0.3), layers=name, example_input=x)
    with pytest.warns(HookdropWarning, match=r"sites? never called in an eval forward, where a hook does not fire"):
        inject(model, Dropout(0.3), layers=pattern, example_input=x).remove()
    drop = inject(model, Dropout(0.3), layers=name)
    model(torch.cat([x, x]))
    drop.seek(1)
    assert [text.partition("\n")[0] for text in drop.check()] == [
        f"'dropout': {name!r} never ran, so nothing is dropped there."
    ]


# --- called more than once


def hf_vit() -> nn.Module:
    from transformers import ViTConfig, ViTModel

    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "image_size": 32, "patch_size": 8}
    return ViTModel(ViTConfig(num_hidden_layers=1, **sizes))


OFTEN = {
    "torchvision Bottleneck relu": (torchvision_model("resnet50"), "layer1.0.relu", 3),
    "timm cait drop_path": (timm_model("cait_xxs24_224", img_size=32, depth=1), "blocks.0.drop_path", 2),
    "transformers ViT dropout": (hf_vit, "layers.0.dropout", 2),
}


@pytest.mark.parametrize("case", OFTEN.values(), ids=OFTEN)
def test_called_more_than_once(case: tuple[Callable[[], nn.Module], str, int]) -> None:
    """A plan says how often, and each call draws a mask of its own."""
    make, name, calls = case
    model, x = make(), images(32)
    if not any(name == other for other, _ in model.named_modules()):
        pytest.skip(f"this version has no {name}")
    (site,) = plan(model, Dropout(0.3), layers=name, example_input=x).sites
    assert site.calls == calls
    drop = inject(model, Dropout(0.3), layers=name)
    outputs: list[torch.Tensor] = []
    model.get_submodule(name).register_forward_hook(lambda module, args, output: outputs.append(output))
    with drop.measuring() as m:
        model(torch.cat([x, x]))
    assert m.calls == len(outputs) == calls
    assert m.dropped == pytest.approx(0.3, abs=0.02)
    for first, second in itertools.pairwise(outputs):
        if first.shape == second.shape:
            assert not torch.equal(first == 0, second == 0)


# --- what a copy of PyTorch's own would get wrong


def test_noise_that_is_stacked_on_a_mask_does_not_fill_it() -> None:
    """Hooks run in the order in which they were placed."""
    model = nn.Sequential(nn.Identity())
    inject(model, GaussianNoise(0.1), layers="0")
    inject(model, DropBlock(0.5, 3), layers="0", on_existing="stack")
    assert (model(torch.ones(4, 8, 12, 12)) == 0).float().mean() == pytest.approx(0.5, abs=0.1)


def test_drop_path_of_a_branch_keeps_the_shortcut() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branch = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.branch(x)

    model, x = Residual(), torch.randn(4, 8)
    inject(model, DropPath(1.0), layers="branch")
    assert torch.equal(model(x), x)


def test_warnings_are_said_once_for_a_thousand_calls() -> None:
    """Whatever the filters are: a training's log is not for reading the same line."""
    model = hooked(DropBlock(0.3, 7))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(1000):
            model(torch.ones(1, 2, 5, 5))
    assert len(caught) == 1
