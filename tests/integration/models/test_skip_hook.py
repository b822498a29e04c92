"""Dropping the identity skip of a residual block: two pre-hooks that compute f(x) + D(x)."""

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookdrop
from hookdrop import InjectionError, find, functional, inject
from hookdrop.core.recipe import RecipeSite
from hookdrop.recipes import dropblock_resnet
from tests.support.compiling import fresh_compiler as fresh_compiler
from tests.support.models import toy
from tests.support.tensors import all_equal
from tests.support.training import seeded, train_step

timm = pytest.importorskip("timm")


def branch_of(block: Any, x: Tensor) -> Tensor:
    return block.bn2(block.conv2(F.relu(block.bn1(block.conv1(x)))))


def rewritten(block: nn.Module, forward: Callable[[Tensor], Tensor]) -> nn.Module:
    """A block with another forward and the hooks of `block`, which it takes over."""
    other = toy(lambda self, x: forward(x), block=block)
    for name in [name for name in vars(block) if name.startswith("_forward_")]:
        setattr(other, name, getattr(block, name))
    return other


pytestmark = pytest.mark.filterwarnings("ignore:the rate of 1 site reaches 1:hookdrop.HookdropWarning")


@pytest.fixture
def model() -> nn.Module:
    return timm.create_model("resnet18", num_classes=5, channels=(8, 8, 8, 16), stem_width=8).train()


@pytest.fixture
def images() -> Tensor:
    return torch.randn(2, 3, 128, 128)


@pytest.fixture
def x() -> Tensor:
    return torch.rand(8, 16, 4, 4)


@dataclass(frozen=True)
class skips_only(dropblock_resnet):
    def sites(self, model: nn.Module, survey: Any) -> list[RecipeSite]:
        return [site for site in super().sites(model, survey) if site.at == "skip"]


def hooked(model: Any, p: float = 0.5) -> Any:
    inject(model, skips_only(p=p, block_size=2), name="dropblock_resnet")
    return model.layer4[1]


@pytest.mark.parametrize(("p", "dtype"), [(1.0, torch.float32), (0.5, torch.float32), (0.5, torch.bfloat16)])
def test_skip_is_exact_in_every_dtype(model: Any, x: Tensor, p: float, dtype: torch.dtype) -> None:
    model, x = model.to(dtype), x.to(dtype)
    twin = copy.deepcopy(model.layer4[1])
    block = hooked(model, p)
    dropped = seeded(functional.drop_block, x, p, 2)
    assert torch.equal(seeded(block, x), F.relu(branch_of(twin, x) + dropped))


def test_copies_and_pickles_keep_the_skip(model: Any, images: Tensor) -> None:
    hooked(model)
    expected = train_step(copy.deepcopy(model), images)[0]
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(train_step(twin, images)[0], expected)
        find(twin).remove()
        assert not any(module._forward_pre_hooks for module in twin.modules())


def test_activation_checkpointing_replays_the_skip(model: Any, images: Tensor) -> None:
    hooked(model)
    twin = copy.deepcopy(model)

    def checkpointed(x: Tensor) -> Tensor:
        x = twin.layer2(twin.layer1(twin.maxpool(twin.act1(twin.bn1(twin.conv1(x))))))
        for layer in (twin.layer3, twin.layer4):
            x = checkpoint(layer, x, use_reentrant=False)
        return twin.fc(twin.global_pool(x))

    ours, theirs = train_step(twin, images, checkpointed), train_step(model, images)
    grads = len(list(model.parameters())) + 2  # recomputation updates the batch-norm statistics twice
    assert all_equal(ours[:grads], theirs[:grads])


def test_replaced_first_layer_of_the_branch_raises(model: Any, images: Tensor) -> None:
    hooked(model).conv1 = nn.Conv2d(16, 16, 3, padding=1)
    with pytest.raises(InjectionError):
        model(images)


def test_nested_calls_of_a_block_restore_their_own_input(model: Any, x: Tensor) -> None:
    """A block that runs inside itself: the input is stored with the tensor, not with the hook."""
    block = hooked(model, p=1.0)
    alone = block(x)
    inner: list[Tensor] = []

    def once_more(*_: Any) -> None:
        if not inner:
            inner.append(torch.rand_like(x))
            block(inner[0])

    block.bn1.register_forward_hook(once_more)
    assert torch.equal(block(x), alone)
    assert inner


def test_branch_called_by_keyword_receives_the_original_input(model: Any, x: Tensor) -> None:
    block = hooked(model, p=1.0)
    expected = block(x)
    by_keyword = lambda x: F.relu(block.bn2(block.conv2(F.relu(block.bn1(block.conv1(input=x))))) + x)
    assert torch.equal(rewritten(block, by_keyword)(x), expected)


@pytest.mark.parametrize("compiled", ["conv1", "forward", "block"])
@pytest.mark.filterwarnings("ignore::hookdrop.HookdropWarning")
def test_skip_is_correct_if_only_one_part_is_compiled(model: Any, x: Tensor, compiled: str) -> None:
    block = hooked(model, p=1.0)
    expected = block(x)
    if compiled == "block":
        block.compile(fullgraph=True, backend="aot_eager")
    elif compiled == "conv1":
        block.conv1.compile(backend="eager")
    else:
        block.forward = torch.compile(block.forward, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(block(x), expected)


@pytest.mark.parametrize("other", ["a user hook", "an injection at the block's input", "the block itself"])
def test_modified_input_before_the_branch_raises(model: Any, x: Tensor, other: str) -> None:
    """Otherwise the branch would silently receive D(x)."""
    block = hooked(model)
    if other == "an injection at the block's input":
        inject(model, hookdrop.Dropout(0.1), layers="layer4.1", at="input", on_existing="stack")
    else:
        module = block if other == "a user hook" else block.conv1
        module.register_forward_pre_hook(lambda module, args: (args[0].clone(),), prepend=module is block.conv1)
    with pytest.raises(InjectionError):
        block(x)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_inside_the_block(model: Any, x: Tensor, reentrant: bool) -> None:
    """As in mmdetection. Non-reentrant: the gradients are correct. Reentrant: the input of the branch is lost."""
    inner, x = hooked(model), x.requires_grad_()
    plain = copy.deepcopy(model).layer4[1]
    addition = partial(checkpoint, lambda x: branch_of(inner, x) + x, use_reentrant=reentrant)
    block = rewritten(inner, lambda x: F.relu(addition(x)))
    expected, out = torch.autograd.grad(seeded(plain, x).sum(), [x, plain.conv1.weight]), seeded(block, x)
    if reentrant:
        with pytest.raises(InjectionError, match="a checkpoint inside the block"):
            out.sum().backward()
    else:
        assert all_equal(list(torch.autograd.grad(out.sum(), [x, inner.conv1.weight])), list(expected))


def skip_tensor(block: nn.Module, x: Tensor) -> Tensor:
    """D(x), which the first pre-hook of the block returns."""
    hook = next(iter(block._forward_pre_hooks.values()))
    return hook.apply(x, hook.train_rate)


def test_frozen_block_keeps_its_own_input(model: Any, x: Tensor) -> None:
    """Even if the previous block returned its own skip tensor."""
    second, seen = hooked(model).eval(), []
    dropped = skip_tensor(model.layer3[1], x)
    assert dropped is not x
    second.conv1.register_forward_hook(lambda module, args, output: seen.append(args[0]))
    second(dropped)
    assert seen[0] is dropped


def test_copies_and_pickles_of_the_skip_tensor_exclude_the_input(model: Any, x: Tensor) -> None:
    dropped = skip_tensor(hooked(model), x)
    torch.save(dropped, saved := io.BytesIO())
    assert saved.tell() < 2 * x.numel() * 4
    assert copy.deepcopy(dropped)._hookdrop_skipped is None


def test_chain_of_in_place_blocks_keeps_only_one_input(model: Any, x: Tensor) -> None:
    block = hooked(model)
    middle = skip_tensor(model.layer3[1], x)
    assert skip_tensor(block, middle)._hookdrop_skipped.x is middle
    assert not hasattr(middle, "_hookdrop_skipped")
