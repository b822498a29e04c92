"""Provokes the errors and warnings of hookdrop, and prints each: `python -m tests.support.error_catalog`."""

# ruff: noqa: F401  # CODE uses further names

import contextlib
import copy
import functools
import gc
import io
import re
import sys
import textwrap
import warnings
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the "fake" backend
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import hookdrop
from hookdrop import DropBlock, Dropout, GaussianNoise, inject, testing
from hookdrop.accel import triton_dropblock
from tests.support.models import Small, from_timm, from_torchvision, toy

IMAGES = torch.zeros(2, 3, 16, 16)


class ResNet(Small):
    """Two stages of residual blocks, 16x16 maps."""


class ViT(nn.Module):
    """Tokens (N, 17, 8), in a ModuleList of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 8, 4, 4)
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.unused = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).mT
        for block in self.blocks:
            x = block(x)
        return x


class InjectsInForward(ResNet):
    def forward(self, x: Tensor) -> Tensor:
        inject(self, Dropout(p=0.1), layers="fc", on_existing="replace")
        return super().forward(x)


def output_dict() -> nn.Module:
    """Returns a dict, and has a layer that it never calls."""
    return toy(lambda m, x: {"out": m.fc(x)}, fc=nn.Linear(8, 3), unused=nn.Linear(8, 3))


def decoder() -> nn.Module:
    """A transformer layer with the structure of LLaMA's, and dropout in its MLP."""
    layers = {"input_layernorm": nn.LayerNorm(8), "self_attn": nn.Linear(8, 8)}
    mlp = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1))
    return toy(lambda m, x: x + m.mlp(x + m.self_attn(m.input_layernorm(x))), **layers, mlp=mlp)


def language_model() -> Any:
    """Called with embeddings, so that its own embedding never runs, and with a KV cache."""
    layer = toy(lambda m, x, past_key_values=None, settings=None: x)
    forward = lambda m, inputs_embeds: m.head(m.layer(inputs_embeds, past_key_values=[]))
    return toy(forward, embed_tokens=nn.Embedding(8, 16), layer=layer, head=nn.Linear(16, 2))


class Jitter(GaussianNoise):
    def __init__(self, std: float = 0.1, every: int = 1) -> None:
        super().__init__(std)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


def half(step: int) -> float:
    return 0.5


def train(model: nn.Module, steps: int = 30, optimizer: Any = None) -> None:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 1e-3)
    for _ in range(steps):
        sum(parameter.square().sum() for parameter in model.parameters()).backward()
        model(torch.zeros(2, 8) if isinstance(model, nn.Sequential) else IMAGES)
        optimizer.step()
        optimizer.zero_grad()


def injected(regularizer: Any = None, schedule: Any = None) -> tuple[ResNet, Any]:
    model = ResNet()
    return model, inject(model, regularizer or DropBlock(p=0.1, block_size=3), layers="**.bn1", schedule=schedule)


def hooked(model: nn.Module, regularizer: Any = None, layers: Any = "0") -> nn.Module:
    inject(model, regularizer or Dropout(p=0.1), layers=layers)
    return model


def run(model: nn.Module, regularizer: Any, x: Any, layers: str = "0") -> None:
    hooked(model, regularizer, layers)(x)


def handle(schedule: Any = None) -> Any:
    """The handle of an injection whose model stays alive."""
    model, drop = injected(schedule=schedule)
    drop._kept = model
    return drop


def dropped(module: nn.Module, x: Tensor) -> Tensor:
    rate: Any = module.rate
    return nn.functional.dropout(x, rate, module.training)


class OwnLoss(nn.Dropout):
    """Needs labels in training mode."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        if self.training and labels is None:
            raise ValueError("labels are required")
        return super().forward(x)


CODE = r"""
## choosing layers
# a misspelled layer
inject(ResNet(), Dropout(p=0.1), layers="layer3")
# a layer without the name of its block
inject(ResNet(), Dropout(p=0.1), layers="bn1")
# a pattern that matches nothing
inject(ResNet(), Dropout(p=0.1), layers="layer1.*bn1")
# a key of a mapping that matches nothing
inject(ResNet(), {"fc": Dropout(p=0.1), "layer1.bn1": Dropout2d(p=0.1)})
# a class that matches nothing
inject(ResNet(), Dropout(p=0.1), layers=nn.LSTM)
# the name of a class as a string
inject(ResNet(), Dropout(p=0.1), layers="BatchNorm2d")
# a regular expression as a string
inject(ResNet(), Dropout(p=0.1), layers=r"layer\d\.0")
# no layers
inject(ResNet(), Dropout(p=0.1))
# a misspelled argument
inject(ResNet(), Dropout(p=0.1), layer="fc")
# an argument of the regularizer
inject(ResNet(), DropBlock(p=0.1), layers="layer1.*", block_size=3)
# a list of models
inject([ResNet(), ResNet()], Dropout(p=0.1), layers="fc")
# every layer is excluded
inject(ResNet(), Dropout(p=0.1), layers="layer1.*", exclude="layer1.**")
# a module of another model
inject(ResNet(), Dropout(p=0.1), layers=ResNet().conv1)
# a container without a forward()
inject(ViT(), Dropout(p=0.1), layers="blocks")
# a pattern of p_scale that matches nothing
inject(ResNet(), Dropout(p=0.1), layers="layer1.*", p_scale={"layer2.*": 0.5})
# a layer that two patterns of a mapping match
inject(ResNet(), {"layer1.*": Dropout(p=0.1), "layer1.0": Dropout2d(p=0.1)})
# a pattern that also matches containers without a forward()
inject(ViT(), Dropout(p=0.1), layers="*")
# an exclude that matches none of the selected layers
inject(ResNet(), Dropout(p=0.1), layers="layer1.*", exclude="layer2")
# a Keras layer
Dense = type("Dense", (nn.Linear,), {"__module__": "keras.src.layers.core"})  # a stand-in for a Keras layer
inject(nn.Sequential(Dense(8, 8)), Dropout(p=0.1), layers="0")
# a ScriptModule
inject(torch.jit.script(mlp()), Dropout(p=0.1), layers="0")
# a module inside a TransformerEncoderLayer
inject(nn.TransformerEncoderLayer(8, 2, batch_first=True), Dropout(p=0.1), layers="linear1")

## shapes, with an example input
# tokens into DropBlock
inject(ViT(), DropBlock(p=0.1), layers="blocks.*", example_input=IMAGES)
# features into Dropout2d
inject(ResNet(), Dropout2d(p=0.1), layers="fc", example_input=IMAGES)
# a block larger than the map
inject(ResNet(), DropBlock(p=0.1, block_size=31), layers="layer1.*", example_input=IMAGES)
# a batch that Masksembles cannot split
inject(nn.Sequential(nn.Linear(8, 16)), Masksembles(n=4), layers="0", example_input=torch.zeros(30, 8))
# heads at another layer
inject(ResNet(), HeadDropout(p=0.1), layers="fc")
# heads that do not divide the features
inject(ResNet(), HeadDropout(p=0.1, heads=3), layers="fc")
# attention scores at another layer
inject(ResNet(), DropKey(p=0.1), layers="fc", example_input=IMAGES)
# no attention scores in a call
hooked(ViT(), DropKey(p=0.1, calls=(True,)), "blocks.0")(IMAGES)
# attention scores without an example
inject(ViT(), DropKey(p=0.1), layers="blocks.0")
# a model without attention scores
inject(ResNet(), recipes.drop_key(p=0.1), example_input=IMAGES)
# equal layers, of which one computes no attention
parts = [toy(lambda m, x, dim=dim: m.f((x @ x.mT).softmax(dim) @ x), f=nn.Linear(8, 8)) for dim in (-1, 1, -1)]
inject(nn.Sequential(*parts), recipes.drop_key(p=0.1), example_input=torch.rand(2, 3, 8))
# a tensor of attention scores
inject(ViT(), DropKey(p=0.1, calls=(True,)), layers="blocks.0", tensor=0)
# attention scores at the input
inject(ViT(), DropKey(p=0.1), layers="blocks.0", at="input")
# a checkpoint inside an attention layer
recomputed = toy(lambda self, x: torch.utils.checkpoint.checkpoint(torch.softmax, x, -1, use_reentrant=False))
hooked(nn.Sequential(recomputed), DropKey(p=0.1, calls=(True,)), "0")(torch.zeros(2, 3, 3, requires_grad=True))
# a checkpoint inside a layer whose parameters are regularized
layer = toy(lambda m, x: checkpoint(lambda x: x @ m.weight, x, use_reentrant=False), weight=nn.Parameter(torch.ones(3, 3)))
inject(layer, Dropout(p=0.5), layers=layer, at="parameters")
layer(torch.ones(2, 3))
# a regularized parameter that is used outside of its layer
model = toy(lambda m, x: m.embed(x) @ m.embed.weight.T, embed=nn.Embedding(8, 16))
inject(model, Dropout(p=0.5), layers="embed", at="parameters", example_input=torch.arange(3))
# an object given to a branch that runs on part of the batch
model = hooked(language_model(), DropPath(p=0.5, mode="subset"), "layer")
model.layer(torch.zeros(4, 8), settings=object())
# heads that attention does not have
model = from_timm("vit_tiny_patch16_224", depth=1, img_size=32)()
inject(model, HeadDropout(p=0.1, heads=4), layers="blocks.0.attn.proj", example_input=torch.rand(1, 3, 32, 32))
# tokens removed before rotary embeddings
model = from_timm("eva02_tiny_patch14_224", depth=1, img_size=56)()
inject(model, TokenDropout(p=0.5, remove=True), layers="pos_drop", example_input=torch.randn(1, 3, 56, 56))
# a batch norm in a branch that runs on part of the batch
inject(ResNet(), DropPath(p=0.1, mode="subset"), layers="layer1.*")
# a branch that mixes samples, on part of the batch
run(nn.Sequential(toy(lambda m, x: x - x.mean(0))), DropPath(p=0.5, mode="subset"), torch.rand(4, 8))
# a branch that returns further rows, on part of the batch
run(nn.Sequential(nn.LSTM(3, 4, batch_first=True)), DropPath(p=0.5, mode="subset"), torch.rand(4, 5, 3))
# a branch that returns more with gradients, on part of the batch
run(nn.Sequential(toy(lambda m, x: (x, x.mean()) if torch.is_grad_enabled() else x)), DropPath(p=0.5, mode="subset"), torch.rand(4, 8))
# an attention mask that no module takes
inject(nn.Sequential(nn.Embedding(8, 8)), NEFTune(alpha=5, attention_mask=True), layers="0")
# a KV cache in training
run(language_model(), LayerDrop(p=0.1), torch.zeros(2, 4, 16), layers="layer")
# DropPath on whole residual blocks
inject(ResNet(), DropPath(p=0.1), layers="layer1.*", example_input=torch.randn(2, 3, 16, 16))
# a layer that already drops
inject(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2)), Dropout(p=0.1), layers="0", example_input=torch.zeros(2, 8))
# a rate of 1
inject(ResNet(), Dropout2d(p=1), layers="layer1.*")
# dropout on the predictions
inject(ResNet(), Dropout(p=0.1), layers="fc", example_input=IMAGES)
# a rate that looks like keep_prob
inject(ResNet(), DropBlock(p=0.9, block_size=3), layers="layer1.*")
# an int for p
DropBlock(7)
# a shared axis twice
Dropout(p=0.1, shared=(2, 2))
# a shared axis that does not exist
Dropout(p=0.1, shared=(2, 3))(torch.ones(8, 197, 384))
# a PackedSequence
run(nn.Sequential(nn.LSTM(3, 4)), DropPath(p=0.1), nn.utils.rnn.pack_sequence([torch.zeros(5, 3), torch.zeros(2, 3)]))
# a complex output
inject(nn.Sequential(toy(lambda m, x: torch.fft.fft(x))), Dropout(p=0.1), layers="0", example_input=torch.zeros(2, 8))
# a strided NestedTensor
inject(model := nn.Sequential(nn.Linear(3, 4)), Dropout(p=0.1), layers="0")
with warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)  # of PyTorch, about this layout
    model(torch.nested.nested_tensor([torch.zeros(5, 3), torch.zeros(2, 3)]))
# a partial sum of tensor parallelism
inject(model := nn.Sequential(nn.Linear(8, 8)), Dropout(p=0.1), layers="0")
dist.init_process_group("fake", rank=0, world_size=2, store=dist.HashStore())
try:
    parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": RowwiseParallel()})
    model(torch.zeros(2, 4))
finally:
    dist.destroy_process_group()
# nested sites
inject(ResNet(), Dropout(p=0.1), layers="layer1.**")
# maps with the channels last (NHWC)
inject(nn.Sequential(nn.Linear(8, 8)), Dropout2d(p=0.1), layers="0", example_input=torch.zeros(2, 16, 16, 8))
# a high rate before a batch norm
inject(ResNet(), Dropout(p=0.5), layers="layer1.0.conv1", example_input=IMAGES)
# a frozen layer
(model := ResNet()).layer1.requires_grad_(False)
inject(model, Dropout(p=0.1), layers="layer1.0", example_input=IMAGES)
# a layer that returns no tensor
model, ids = nn.Sequential(nn.Embedding(8, 8), toy(lambda m, x: x.argmax(-1))), torch.ones(2, 3).long()
inject(model, Dropout(p=0.1), layers="1", example_input=ids)
# a pattern that also matches a layer that a forward never calls
inject(ViT(), Dropout(p=0.1), layers=nn.Linear, example_input=IMAGES)
# a layer that a forward never calls
inject(ViT(), Dropout(p=0.1), layers="unused", example_input=IMAGES)
# an example input that the model rejects
inject(ResNet(), Dropout(p=0.1), layers="fc", example_input=torch.zeros(2, 4, 16, 16))
# an example input without a batch axis, with its channels last
inject(ResNet(), Dropout(p=0.1), layers="fc", example_input=torch.zeros(16, 16, 3))
# an example input that is one argument of the model
takes_dict = toy(lambda m, batch: m.fc(batch["wide"]), fc=nn.Linear(8, 3))
inject(takes_dict, Dropout(p=0.1), layers="fc", example_input={"wide": torch.zeros(2, 8)})
# an example input of another size
inject(mlp(), Dropout(p=0.1), layers="0", example_input=torch.zeros(2, 9, 9))
# a map without a batch axis
inject(nn.Sequential(nn.Conv2d(3, 4, 3)), Dropout2d(p=0.1), layers="0", example_input=torch.zeros(3, 16, 16))
# an example input of a model with lazy modules
inject(nn.Sequential(nn.LazyLinear(8)), Dropout(p=0.1), layers="0", example_input=torch.zeros(2, 4))
# a wrong shape without an example input
run(ViT(), DropBlock(p=0.1), IMAGES, layers="blocks.0")

## penalties
# reading a penalty that there is not
handle().penalty()
# a penalty as a plain layer
ActivationPenalty()(torch.ones(2, 3, 4))
# a penalty of an LSTM with the batch as time
inject(nn.Sequential(nn.LSTM(4, 4)), ActivationPenalty(), layers="0")
# a penalty of a tensor without time steps
run(nn.Sequential(nn.Linear(8, 8)), ActivationPenalty(), torch.ones(2, 8))
# a penalty in a reentrant checkpoint
inject(model := nn.Sequential(nn.Linear(8, 8)), ActivationPenalty(), layers="0")
torch.utils.checkpoint.checkpoint(model, torch.ones(2, 5, 8, requires_grad=True), use_reentrant=True)
# a penalty that is never added to the loss
model = nn.Sequential(nn.Linear(8, 8))
optimizer, _drop = torch.optim.SGD(model.parameters(), 0.1), inject(model, ActivationPenalty(), layers="0")
for _ in range(25):
    model(torch.ones(2, 5, 8)).mean().backward()
    optimizer.step()
# thousands of forwards with a penalty that is not read
inject(model := nn.Sequential(nn.Identity()), ActivationPenalty(), layers="0")
for _ in range(4100):
    model(torch.ones(1, 1, 1))

## settings
# p out of range
DropBlock(p=1.5)
# p as a percentage
Dropout(p=10)
# no rate
Dropout()
# p as a string
Dropout(p="1")
# both p and keep_prob
DropBlock(p=0.1, keep_prob=0.9)
# a block of size 0
DropBlock(p=0.1, block_size=0)
# the regularizer before the model
inject(Dropout(p=0.1), ResNet(), layers="fc")
# the class of a regularizer instead of an instance
inject(ResNet(), Dropout, layers="fc")
# a module with parameters
inject(ResNet(), nn.BatchNorm2d(8), layers="layer1.*")
# a lambda as the regularizer
inject(ResNet(), lambda x: 0.9 * x, layers="fc")
# a schedule for a regularizer without a rate
inject(ResNet(), torch.tanh, layers="fc", schedule=LinearSchedule(steps=10))
# a number as the schedule
inject(ResNet(), Dropout(p=0.1), layers="fc", schedule=1000)
# a schedule without steps
LinearSchedule(steps=0)
# a schedule whose peak exceeds the range of p
inject(ResNet(), Dropout(p=0.6), layers="fc", schedule=LinearSchedule(steps=10, end=2.0))
# parse: a typo
hookdrop.parse("DropBlok(p=0.1)")
# parse: code instead of a literal
hookdrop.parse("Dropout(p=min(0.1, 0.2))")

## injecting
# a notebook cell that is run again
inject(injected()[0], DropBlock(p=0.1, block_size=3), layers="**.bn1")
# a second injection of the same name
inject(injected()[0], DropBlock(p=0.2, block_size=3), layers="conv1")
# inject inside without_hooks
model, _ = injected()
with hookdrop.without_hooks(model):
    inject(model, Dropout(p=0.1), layers="layer1.0.bn1")
# inject inside torch.jit.trace
torch.jit.trace(InjectsInForward(), IMAGES)
# a model in training mode in torch.jit.trace
torch.jit.trace(injected()[0], IMAGES)
# a hooked layer in torch.jit.script
model, drop = injected()
with drop:
    torch.jit.script(model.layer1[0].bn1)
# torch.export in training mode
torch.export.export(hooked(mlp()), (torch.zeros(2, 8),))
# other libraries' code that compiled code may recompute
inject(model := mlp(), nn.RReLU(), layers="0")
with torch._functorch.config.patch(activation_memory_budget=0.5):
    torch.compile(model, backend="eager")(torch.zeros(2, 8))
# torch.fx of a hooked block
torch.fx.symbolic_trace(hooked(nn.Sequential(mlp())))

## training
# a schedule that is not advancing
train(injected(schedule=LinearSchedule(steps=100))[0])
# a model that is trained in eval mode
train(injected()[0].eval())
# a layer that training never calls
train(hooked(ViT(), layers=["blocks.0", "unused"]))
# a language model that is trained on embeddings
train(hooked(language_model(), NEFTune(alpha=5), layers="embed_tokens"))
# two optimizers
model, drop = injected(schedule=LinearSchedule(steps=100))
optimizers = torch.optim.SGD(model.parameters(), 0.1), torch.optim.Adam(model.parameters())
drop.follow(optimizers[0]).follow(optimizers[1])
# step() while an optimizer is followed
model, drop = injected(schedule=LinearSchedule(steps=100))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
drop.follow(optimizer).step()
# follow() of something else than an optimizer
handle(LinearSchedule(steps=100)).follow(nn.Linear(8, 8))
# the followed optimizer is gone
model, drop = injected(schedule=LinearSchedule(steps=100))
drop.follow(torch.optim.SGD(model.parameters(), 0.1))
train(model)
# a resumed optimizer and a schedule at its beginning
train(model := ResNet(), 10, optimizer := torch.optim.Adam(model.parameters()))
inject(model, Dropout(p=0.1), layers="fc", schedule=LinearSchedule(steps=100)).follow(optimizer)
train(model, 1, optimizer)
# a hooked module is replaced
model, drop = injected()
model.layer2[0].bn1 = nn.BatchNorm2d(8)
drop.remove()
# a hooked module is copied within the model
model, drop = injected()
model.layer3 = copy.deepcopy(model.layer2)
drop.remove()
# an adapter around a hooked module
drop = inject(model := mlp(), Dropout(p=0.1), layers="0")
model[0] = nn.Sequential(model[0], nn.Linear(8, 8))
drop.remove()
# a full backward hook on a hooked module
drop = inject(model := mlp(), Dropout(p=0.1), layers="0")
model[0].register_full_backward_hook(lambda *_: None)
drop.remove()
# DropPath where rows are windows
windows = nn.Sequential(nn.Flatten(0, 1), nn.Linear(8, 8), nn.Unflatten(0, (2, 4)), nn.Linear(8, 2))
inject(windows, DropPath(p=0.1), layers=nn.Linear)
windows(torch.ones(2, 4, 8))
# a schedule that advances twice for each update
model, drop = injected(schedule=LinearSchedule(steps=1000))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for batch in range(40):
    drop.step()
    train(model, batch % 2, optimizer)
# a forward without gradients during the training
model, _ = injected()
train(model, 1, torch.optim.SGD(model.parameters(), 0.1))
with torch.no_grad():
    model(IMAGES)
# a schedule that advances once per epoch
model, drop = injected(schedule=LinearSchedule(steps=1000))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    train(model, 10, optimizer)
    drop.step()
# the optimizer of another model
model, drop = injected(schedule=LinearSchedule(steps=1000))
drop.follow(other := torch.optim.SGD(mlp().parameters(), 0.1))
for _ in range(40):
    train(model, 1, torch.optim.SGD(model.parameters(), 0.1)), other.step(), other.step()
# a schedule in epochs
model, drop = injected(schedule=LinearSchedule(steps=1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
drop.follow(optimizer)
train(model, 101, optimizer)
# an activation checkpoint that does not restore the random state
model, _ = injected(Dropout(p=0.5))
x = torch.ones(2, 8, 16, 16, requires_grad=True)
checkpoint(model.layer1, x, use_reentrant=False, preserve_rng_state=False).sum().backward()
# PyTorch's update_bn of a hooked average
torch.optim.swa_utils.update_bn([IMAGES], torch.optim.swa_utils.AveragedModel(injected()[0]))
# two ranks with the same seed
(model, drop), store = injected(), dist.HashStore()
for rank in range(2):  # two ranks in turn, with one store
    dist.init_process_group("fake", rank=rank, world_size=2, store=store)
    train(model, 1)
    if rank:
        drop.remove()
    dist.destroy_process_group()

## the handle
# a handle whose model was deleted
injected()[1].probe(IMAGES)
# a handle that was removed
_model, drop = injected()
drop.remove()
drop.step()
# removing an injection twice by name
model, _ = injected()
hookdrop.find(model)["dropblock"].remove()
hookdrop.find(model)["dropblock"].remove()
# one target for rates of mixed units
model = ResNet()
inject(model, {"fc": Dropout(p=0.1), "conv1": GaussianNoise(std=0.1)}).target_p = 0.2
# sampling at rate 0
handle(LinearSchedule(steps=100)).sampling().__enter__()
# one Monte Carlo sample
handle().predict(IMAGES, samples=1)
# predicting an empty loader
handle().predict(iter([]))
# predicting an array
handle().predict(IMAGES.numpy())
# predicting with a model that returns a dict
inject((_model := output_dict()), Dropout(p=0.5), layers="fc").predict(torch.ones(2, 8))
# the softmax of one class
inject((_model := nn.Sequential(nn.Linear(8, 1))), Dropout(p=0.5), layers="0").predict(torch.ones(2, 8))
# the softmax of probabilities
inject((_model := nn.Sequential(nn.Linear(8, 3), nn.Softmax(-1))), Dropout(p=0.5), layers="0").predict(torch.ones(2, 8))
# equal Monte Carlo samples
drop = inject((_model := output_dict()), Dropout(p=0.5), layers="unused")
drop.predict(torch.ones(2, 8), output=lambda out: out["out"])
# predicting with hooks that only edit gradients
inject((_model := mlp()), ClipActivationGrad(max_norm=1.0), layers="0").predict(torch.ones(2, 8))

## saving
# the state of other sites
handle().load_state_dict(inject((_model := ResNet()), DropBlock(p=0.1), layers="layer1.*").state_dict())
# the state of other sites, not strict
drop = inject((_model := ResNet()), DropBlock(p=0.1), layers="layer1.*.bn1")
handle().load_state_dict(drop.state_dict(), strict=False)
# the states of other injections
(model, _), other = injected(), ResNet()
inject(other, Dropout(p=0.1), layers="fc")
hookdrop.find(model).load_state_dict(hookdrop.find(other).state_dict())
# the state of another rate
handle().load_state_dict(injected(DropBlock(p=0.2, block_size=3))[1].state_dict())
# the state of another schedule
handle(LinearSchedule(steps=100)).load_state_dict(handle(LinearSchedule(steps=50)).state_dict())
# the state_dict of the model
handle().load_state_dict(ResNet().state_dict())
# a spec with an invalid value
InjectionSpec.from_dict({"regularizer": "Dropout(p=2)", "layers": "fc"})
# a spec with an unknown setting
InjectionSpec.from_dict({"regularizer": "Dropout(p=0.1)", "layer": "fc"})
# a schedule that counts epochs
LinearSchedule(epochs=5)
# a schedule that is no dataclass
class Decay(hookdrop.Schedule):
    speed: float = 1.0
Decay(speed=2.0)
# a regularizer without its rate
class Shrink(hookdrop.Regularizer):
    def __init__(self, amount: float = 0.1) -> None:
        super().__init__()
        self.amount = amount
Shrink()(IMAGES)
# kernels that fail on a GPU
with mock.patch.object(triton_dropblock, "_draw", side_effect=RuntimeError("out of resource: shared memory")):
    triton_dropblock._check(torch.device("cpu"))
triton_dropblock._works.clear()
# a callback registered after the training
from hookdrop.integrations.transformers import InjectionCallback
trained = mock.MagicMock(is_in_train=False, state=mock.Mock(global_step=8))
InjectionCallback(InjectionSpec("Dropout(p=0.1)", layers="fc")).register(trained)
# a spec of a class that is not allowed
InjectionSpec.from_dict({"regularizer": "timm.layers.drop.DropPath(drop_prob=0.1)", "layers": "fc"})
# the spec of a schedule with a function
handle(LambdaSchedule(half)).spec.to_dict()
# the spec of an own regularizer that does not store an argument
inject((_model := ResNet()), Jitter(every=2), layers="fc").spec.to_dict()
# the spec of a recipe that chooses other sites
spec = InjectionSpec("set_dropout(p=0.2)", layers=["0"])
inject(nn.Sequential(nn.Dropout(0.1), nn.Dropout(0.1)), spec, example_input=torch.ones(1))
# a value that differs between injections
model, _ = injected()
inject(model, Dropout(p=0.1), layers="fc", schedule=LinearSchedule(steps=10)).step()
print(hookdrop.find(model).step_count)
# sampling of a module that does more than drop in training mode
auxiliary = lambda m, x: (dropped(m, x), x.sigmoid()) if m.training else dropped(m, x)
model = nn.Sequential(nn.Linear(8, 8), toy(auxiliary, rate=0.2))
with inject(model, recipes.set_dropout(), example_input=torch.ones(2, 8)).sampling():
    pass
# sampling of a module that does not run in training mode
model = nn.Sequential(OwnLoss(0.1))
with warnings.catch_warnings(action="ignore"):  # the same reason
    drop = inject(model, recipes.set_dropout(), example_input=torch.ones(2, 8))
with drop.sampling():
    pass
# sampling of the copied handle of a model without an example
model = nn.Sequential(nn.Linear(8, 8), toy(dropped, rate=0.2))
drop = inject(model, recipes.set_dropout(), example_input=torch.ones(2, 8))
_twin, copied = copy.deepcopy((model, drop))
with copied.sampling():
    pass

## recipes
# dropblock_resnet of an MLP
inject(mlp(), recipes.dropblock_resnet(p=0.1), example_input=torch.zeros(2, 8))
# dropblock_resnet of a CNN with attention blocks
import timm
with torch.device("meta"):
    model = timm.create_model("coatnet_nano_rw_224")
inject(model, recipes.dropblock_resnet())
# dropblock_resnet of a traced model
inject(torch.fx.symbolic_trace(from_torchvision("resnet18")()), recipes.dropblock_resnet())
# dropblock_unet of a classifier
inject(from_torchvision("resnet18")(), recipes.dropblock_unet())
# stochastic_depth of a model that has it
inject(from_timm("test_vit", drop_path_rate=0.1)(), recipes.stochastic_depth())
# residual_dropout of a model that has dropout
inject(nn.Sequential(decoder()), recipes.residual_dropout(), example_input=torch.randn(2, 4, 8))
# neftune of a model with the NEFTune of transformers
model = toy(lambda m, ids: m.embed_tokens(ids), embed_tokens=nn.Embedding(8, 16))
model.embed_tokens.neftune_noise_alpha = 5
inject(model, recipes.neftune(), example_input=torch.zeros(2, 3).long())
# patch_dropout of a model without patches in a sequence
model = from_timm("swin_tiny_patch4_window7_224", depths=(1, 1))()
inject(model, recipes.patch_dropout(p=0.5), example_input=torch.randn(1, 3, 224, 224))
# a recipe for a model without residual branches
inject(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), recipes.stochastic_depth(), example_input=IMAGES)
# stochastic_depth of a sum of two towers
towers = toy(lambda m, x: m.wide(x) + m.deep(x), wide=nn.Linear(8, 2), deep=mlp())
inject(towers, recipes.stochastic_depth(), example_input=torch.randn(2, 8))
# layer_drop of a model that adds further branches in a loop
loop = toy(lambda m, x: (y := x + m.all[0](x)) + m.all[1](y), all=nn.Sequential(*map(nn.Linear, (8, 8), (8, 8))))
inject(nn.Sequential(toy(lambda m, x: x + m.fc(x), fc=nn.Linear(8, 8)), loop), recipes.layer_drop(), example_input=torch.randn(2, 8))
# a recipe for branches that end with a function
branches = (toy(lambda m, x: x + m.fc(x).relu(), fc=nn.Linear(8, 8)) for _ in range(2))
inject(nn.Sequential(*branches), recipes.stochastic_depth(), example_input=torch.randn(2, 8))
# a keyword that a recipe does not take
recipes.stochastic_depth(rate=0.1)
# set_dropout that reaches nothing
inject(ResNet(), recipes.set_dropout(p=0.1), example_input=IMAGES)
# set_dropout with a pattern that matches nothing
model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
inject(model, recipes.set_dropout(p={"drop": 0.2}), example_input=torch.ones(2))
# set_dropout without an example input
inject(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)), recipes.set_dropout(p=0.2))
# set_dropout of a model with a constant rate
head = toy(lambda m, x: nn.functional.dropout(x, 0.5, m.training))
inject(nn.Sequential(nn.Dropout(0.1), head), recipes.set_dropout(p=0.2), example_input=torch.ones(2))
# a draw that no rate switches off
draws = toy(lambda m, x: x * torch.rand(2) if m.training else x)
inject(nn.Sequential(nn.Dropout(0.1), draws), recipes.set_dropout(), example_input=torch.ones(2))
# dropout in eval mode
always = toy(lambda m, x: nn.functional.dropout(x))
inject(nn.Sequential(nn.Dropout(0.1), always), recipes.set_dropout(), example_input=torch.ones(2))
# set_dropout with a schedule beyond 1
model, schedule = nn.Sequential(nn.Dropout(0.1)), LinearSchedule(steps=10, end=2.0)
inject(model, recipes.set_dropout(p=0.6), schedule=schedule, example_input=torch.ones(2))
# a schedule of rates that changed again
model = nn.Sequential(nn.Dropout(0.1))
schedule = LinearSchedule(steps=10)
drop = inject(model, recipes.set_dropout(p=0.2), schedule=schedule, example_input=torch.ones(2))
model[0].p = 0.3
drop.step()
# set_dropout removed after another change
model = nn.Sequential(nn.Dropout(0.1))
drop = inject(model, recipes.set_dropout(p=0.2), example_input=torch.ones(2))
model[0].p = 0.3
drop.remove()

## observing
# grad_cam of a layer without maps
observe.grad_cam(ResNet(), IMAGES, "fc")
# grad_cam of several layers
observe.grad_cam(ResNet(), IMAGES, "layer1.*")

## checks of one's own classes
# a regularizer lacks a property
dict(testing.regularizer_checks(DropPath(p=0.3, scale=False)))["mean_is_kept"]()
# a misspelled check
testing.check_regularizer(Dropout(p=0.1), expected_failures={"mean_kept": "it does not rescale"})
# a check without an example of the shape
testing.check_regularizer(DropBlock(p=0.1, block_size=(3, 3, 3, 3)))
"""
"""The code of each case, after its title."""


def run_code(code: str) -> None:
    """Run the code as the body of a function, with hookdrop's public names."""
    names = {name: getattr(hookdrop, name) for name in hookdrop.__all__} | globals()
    exec(f"def body() -> None:\n{textwrap.indent(code, '    ')}\n\nbody()", names)


_CASES = re.findall(r"^# (.+)\n((?:(?!#).*\n)+)", CODE, re.M)
CASES: list[tuple[str, partial[None]]] = [(title, partial(run_code, code.strip())) for title, code in _CASES]
"""(title, function that raises an error or warns)."""


def provoke(function: partial[None]) -> list[str]:
    torch.manual_seed(0)
    gc.collect()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", hookdrop.HookdropWarning)
        try:
            function()
            errors = []
        except Exception as error:
            errors = [error]
    texts = [f"{type(w.message).__name__}: {w.message}" for w in caught]
    return texts + [f"{type(error).__name__}: {error}" for error in errors]


@functools.cache
def messages() -> dict[str, list[str]]:
    """The errors and warnings of each case, by its title."""
    gc.collect()
    gc.freeze()  # or each case searches all objects of the process for garbage
    return {title: provoke(function) for title, function in CASES}


if __name__ == "__main__":
    for number, (title, function) in enumerate(CASES, start=1):
        print(f"{number}. {title}\n{textwrap.indent(function.args[0], '    >>> ')}")
        print(textwrap.indent("\n".join(messages()[title]), "    ") + "\n")
