"""Dropping the identity skip of a residual block: two pre-hooks that compute f(x) + D(x)."""

from __future__ import annotations

import copy
import io
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hookdrop
from hookdrop import InjectionError, find, functional, inject
from hookdrop.recipes import dropblock_resnet
from hookdrop.recipes.base import RecipeSite
from tests.support.compiling import fresh_compiler as fresh_compiler
from tests.support.tensors import all_equal
from tests.support.training import train_step

timm = pytest.importorskip("timm")


def branch_of(block: Any, x: Tensor) -> Tensor:
    """The residual branch, written out."""
    return block.bn2(block.conv2(F.relu(block.bn1(block.conv1(x)))))


class KeywordBlock(nn.Module):
    """A basic block that calls its first convolution by keyword."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        b = self.block
        return F.relu(b.bn2(b.conv2(F.relu(b.bn1(b.conv1(input=x))))) + x)


class CheckpointedBlock(nn.Module):
    """A basic block with its branch and the addition inside a checkpoint, as in mmdetection."""

    def __init__(self, block: Any, reentrant: bool) -> None:
        super().__init__()
        self.block, self.reentrant = block, reentrant

    def forward(self, x: Tensor) -> Tensor:
        inner = lambda x: branch_of(self.block, x) + x  # noqa: E731
        return F.relu(torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=self.reentrant))


@pytest.fixture
def model() -> nn.Module:
    return timm.create_model("resnet18", num_classes=5, channels=(8, 8, 8, 16), stem_width=8).train()


@pytest.fixture
def images() -> Tensor:
    return torch.randn(2, 3, 128, 128)


@pytest.fixture
def x() -> Tensor:
    """The input of the last block."""
    return torch.rand(8, 16, 4, 4)


@dataclass(frozen=True)
class skips_only(dropblock_resnet):
    def sites(self, model: nn.Module, survey: Any) -> list[RecipeSite]:
        return [site for site in super().sites(model, survey) if site.at == "skip"]


def only_skips(model: nn.Module, p: float = 0.5) -> None:
    """Apply the recipe only to the skips."""
    inject(model, skips_only(p=p, block_size=2), name="dropblock_resnet")


def test_only_the_skip_is_dropped(model: Any, x: Tensor) -> None:
    only_skips(model, p=1.0)
    block = model.layer4[1]
    assert torch.equal(block(x), F.relu(branch_of(block, x)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_skip_is_exact_in_every_dtype(model: Any, x: Tensor, dtype: torch.dtype) -> None:
    model = model.to(dtype)
    twin = copy.deepcopy(model.layer4[1])
    only_skips(model)
    x = x.to(dtype)
    torch.manual_seed(1)
    out = model.layer4[1](x)
    torch.manual_seed(1)
    dropped = functional.drop_block(x, 0.5, 2)
    assert torch.equal(out, F.relu(branch_of(twin, x) + dropped))


def test_hooks_hold_no_tensor_after_a_forward(model: Any, images: Tensor) -> None:
    only_skips(model)
    model(images).sum().backward()
    hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
    assert hooks
    assert all(getattr(hook, "kept", None) is None for hook in hooks)


def test_copies_and_pickles_keep_the_skip(model: Any, images: Tensor) -> None:
    only_skips(model)
    expected = train_step(copy.deepcopy(model), images)[0]
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(train_step(twin, images)[0], expected)
        assert find(twin)["dropblock_resnet"].remove() is None
        assert not any(module._forward_pre_hooks for module in twin.modules())


def test_activation_checkpointing_replays_the_skip(model: Any, images: Tensor) -> None:
    only_skips(model)
    twin = copy.deepcopy(model)

    def checkpointed(x: Tensor) -> Tensor:
        x = twin.layer1(twin.maxpool(twin.act1(twin.bn1(twin.conv1(x)))))
        x = torch.utils.checkpoint.checkpoint(twin.layer3, twin.layer2(x), use_reentrant=False)
        x = torch.utils.checkpoint.checkpoint(twin.layer4, x, use_reentrant=False)
        return twin.fc(twin.global_pool(x))

    ours, theirs = train_step(twin, images, checkpointed), train_step(model, images)
    grads = len(list(model.parameters())) + 2  # recomputation updates the batch-norm statistics twice
    assert all_equal(ours[:grads], theirs[:grads])


def test_skip_compiles_into_one_graph(model: Any, x: Tensor) -> None:
    block = model.layer4[1]
    only_skips(model, p=1.0)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), F.relu(branch_of(block, x)))


def test_replaced_first_layer_of_the_branch_raises(model: Any, images: Tensor) -> None:
    only_skips(model)
    model.layer4[1].conv1 = nn.Conv2d(16, 16, 3, padding=1)
    with pytest.raises(InjectionError):
        model(images)


def test_nested_calls_of_a_block_restore_their_own_input(model: Any, x: Tensor) -> None:
    """A block that runs inside itself: the input is stored with the tensor, not with the hook."""
    only_skips(model, p=1.0)
    block = model.layer4[1]
    y = torch.rand_like(x)
    alone = block(x)
    inner: list[Tensor] = []

    def once_more(*_: Any) -> None:
        if not inner:
            inner.append(y)
            block(y)

    handle = block.bn1.register_forward_hook(once_more)
    assert torch.equal(block(x), alone)
    assert inner
    handle.remove()


def test_branch_called_by_keyword_receives_the_original_input(model: Any, x: Tensor) -> None:
    only_skips(model, p=1.0)
    block = model.layer4[1]
    expected = block(x)
    by_keyword = KeywordBlock(block)
    move_hooks(block, by_keyword)
    assert torch.equal(by_keyword(x), expected)


def move_hooks(block: nn.Module, other: nn.Module) -> None:
    for name in [name for name in vars(block) if name.startswith("_forward_")]:
        setattr(other, name, getattr(block, name))


@pytest.mark.parametrize("compiled", ["conv1", "forward", "block"])
@pytest.mark.filterwarnings("ignore::hookdrop.HookdropWarning")
def test_skip_is_correct_if_only_one_part_is_compiled(model: Any, x: Tensor, compiled: str) -> None:
    only_skips(model, p=1.0)
    block = model.layer4[1]
    expected = block(x)
    if compiled == "conv1":
        block.conv1.compile(backend="eager")
    elif compiled == "forward":
        block.forward = torch.compile(block.forward, backend="eager")
    else:
        block.compile(backend="eager")
    for _ in range(2):
        torch.testing.assert_close(block(x), expected)


@pytest.mark.parametrize("other", ["a user hook", "an injection at the block's input", "the block itself"])
def test_modified_input_before_the_branch_raises(model: Any, x: Tensor, other: str) -> None:
    """Otherwise the branch would silently receive D(x)."""
    only_skips(model)
    block = model.layer4[1]
    if other == "a user hook":
        block.register_forward_pre_hook(lambda module, args: (args[0].clone(),))
    elif other == "an injection at the block's input":
        inject(model, hookdrop.Dropout(0.1), layers="layer4.1", at="input", on_existing="stack")
    else:
        block.conv1.register_forward_pre_hook(lambda module, args: (args[0].clone(),), prepend=True)
    with pytest.raises(InjectionError):
        block(x)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_inside_the_block(model: Any, x: Tensor, reentrant: bool) -> None:
    """Non-reentrant: the gradients are correct. Reentrant: the input of the branch is lost, which raises."""
    only_skips(model)
    twin = copy.deepcopy(model)
    block, plain = CheckpointedBlock(model.layer4[1], reentrant), twin.layer4[1]
    move_hooks(model.layer4[1], block)
    x.requires_grad_()
    torch.manual_seed(2)
    expected = torch.autograd.grad(plain(x).sum(), [x, plain.conv1.weight])
    torch.manual_seed(2)
    out = block(x)
    if reentrant:
        with pytest.raises(InjectionError, match="a checkpoint inside the block"):
            out.sum().backward()
    else:
        assert all_equal(list(torch.autograd.grad(out.sum(), [x, block.block.conv1.weight])), list(expected))


def test_frozen_block_keeps_its_own_input(model: Any, x: Tensor) -> None:
    """Even if the previous block returned its own skip tensor."""
    only_skips(model)
    first, second = model.layer3[1], model.layer4[1].eval()
    hook = next(iter(first._forward_pre_hooks.values()))
    skip_tensor = hook.apply(x, hook.train_rate)
    assert skip_tensor is not x
    seen: list[Tensor] = []
    second.conv1.register_forward_hook(lambda module, args, output: seen.append(args[0]))
    second(skip_tensor)
    assert seen[0] is skip_tensor


def test_copies_and_pickles_of_the_skip_tensor_exclude_the_input(model: Any, x: Tensor) -> None:
    only_skips(model)
    hook = next(iter(model.layer4[1]._forward_pre_hooks.values()))
    skip_tensor = hook.apply(x, hook.train_rate)
    saved = io.BytesIO()
    torch.save(skip_tensor, saved)
    assert saved.tell() < 2 * x.numel() * 4
    assert copy.deepcopy(skip_tensor)._hookdrop_skipped is None


def test_chain_of_in_place_blocks_keeps_only_one_input(model: Any, x: Tensor) -> None:
    only_skips(model)
    hooks = [next(iter(model.get_submodule(name)._forward_pre_hooks.values())) for name in ("layer3.1", "layer4.1")]
    middle = hooks[0].apply(x, hooks[0].train_rate)
    last = hooks[1].apply(middle, hooks[1].train_rate)
    assert last._hookdrop_skipped.x is middle
    assert not hasattr(middle, "_hookdrop_skipped")
