"""Provokes the errors and warnings of hookdrop, and prints each: `python -m tests.support.error_catalog`."""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import gc
import io
import re
import sys
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
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
from hookdrop import (
    ClipActivationGrad,
    DropBlock,
    DropKey,
    Dropout,
    Dropout2d,
    DropPath,
    GaussianNoise,
    HeadDropout,
    InjectionSpec,
    LambdaSchedule,
    LayerDrop,
    LinearSchedule,
    Masksembles,
    NEFTune,
    TokenDropout,
    inject,
    observe,
    recipes,
    testing,
)
from hookdrop.cli import main
from hookdrop.kernels import triton_dropblock
from tests.support.models import from_timm, from_torchvision

IMAGES = torch.zeros(2, 3, 16, 16)
CASES: list[tuple[str, Callable[[], Any]]] = []
"""(title, function that raises an error or warns)."""


def case(title: str, function: Callable[[], Any] | None = None) -> Callable[[Callable[[], Any]], None]:
    """Add a case: a lambda, or as a decorator a function."""

    def add(function: Callable[[], Any]) -> None:
        CASES.append((title, function))

    if function:
        add(function)
    return add


# --- models and helpers


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bn1(self.conv1(x))


class ResNet(nn.Module):
    """Two stages of residual blocks, 16x16 maps."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.layer1, self.layer2 = nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block())
        self.fc = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.layer2(self.layer1(self.conv1(x))).mean((2, 3)))


class OutputDict(nn.Module):
    """Returns a dict, and has a layer that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.unused = nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"out": self.fc(x)}


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


class Decoder(nn.Module):
    """A transformer layer with the structure of LLaMA's, and dropout in its MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = nn.LayerNorm(8), nn.Linear(8, 8)
        self.mlp = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x + self.self_attn(self.input_layernorm(x)))


class Spectrum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft(x)


class LanguageModel(nn.Module):
    """Called with embeddings, so that its own embedding never runs, and with a KV cache."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens, self.layer, self.head = nn.Embedding(8, 16), CachedLayer(), nn.Linear(16, 2)

    def forward(self, inputs_embeds: Tensor) -> Tensor:
        return self.head(self.layer(inputs_embeds, past_key_values=[]))


class CachedLayer(nn.Module):
    def forward(self, x: Tensor, past_key_values: Any = None, settings: Any = None) -> Tensor:
        return x


class MixesSamples(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class ReturnsMore(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return (x, x.mean()) if self.training else x


class Argmax(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.argmax(-1)


class Jitter(GaussianNoise):
    def __init__(self, std: float = 0.1, every: int = 1) -> None:
        super().__init__(std)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


def half(step: int) -> float:
    return 0.5


def keras_layer() -> nn.Module:
    """A stand-in for a Keras layer on the torch backend."""
    return type("Dense", (nn.Linear,), {"__module__": "keras.src.layers.core"})(8, 8)


def train(model: nn.Module, steps: int = 30, optimizer: Any = None) -> None:
    """Some optimizer steps."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 1e-3)
    for _ in range(steps):
        sum(parameter.square().sum() for parameter in model.parameters()).backward()
        model(torch.zeros(2, 8) if isinstance(model, nn.Sequential) else IMAGES)
        optimizer.step()
        optimizer.zero_grad()


class CommandLineError(Exception):
    """What the command line wrote to stderr."""


def command(*arguments: str) -> None:
    with contextlib.redirect_stderr(io.StringIO()) as stderr, contextlib.suppress(SystemExit):
        main(arguments)
    if message := re.search(r"^hookdrop.*: error: .*", stderr.getvalue(), re.MULTILINE | re.DOTALL):
        raise CommandLineError(message[0].strip())


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
    drop.model = model
    return drop


# --- choosing layers

case("a misspelled layer", lambda: inject(ResNet(), Dropout(p=0.1), layers="layer3"))
case("a layer without the name of its block", lambda: inject(ResNet(), Dropout(p=0.1), layers="bn1"))
case("a pattern that matches nothing", lambda: inject(ResNet(), Dropout(p=0.1), layers="layer1.*bn1"))
case(
    "a key of a mapping that matches nothing",
    lambda: inject(ResNet(), {"fc": Dropout(p=0.1), "layer1.bn1": Dropout2d(p=0.1)}),
)
case("a class that matches nothing", lambda: inject(ResNet(), Dropout(p=0.1), layers=nn.LSTM))
case("the name of a class as a string", lambda: inject(ResNet(), Dropout(p=0.1), layers="BatchNorm2d"))
case("a regular expression as a string", lambda: inject(ResNet(), Dropout(p=0.1), layers=r"layer\d\.0"))
case("no layers", lambda: inject(ResNet(), Dropout(p=0.1)))
case("every layer is excluded", lambda: inject(ResNet(), Dropout(p=0.1), layers="layer1.*", exclude="layer1.**"))
case("a module of another model", lambda: inject(ResNet(), Dropout(p=0.1), layers=ResNet().conv1))
case("a container without a forward()", lambda: inject(ViT(), Dropout(p=0.1), layers="blocks"))
case(
    "a pattern of p_scale that matches nothing",
    lambda: inject(ResNet(), Dropout(p=0.1), layers="layer1.*", p_scale={"layer2.*": 0.5}),
)
case(
    "a layer that two patterns of a mapping match",
    lambda: inject(ResNet(), {"layer1.*": Dropout(p=0.1), "layer1.0": Dropout2d(p=0.1)}),
)
case("a pattern that also matches containers without a forward()", lambda: inject(ViT(), Dropout(p=0.1), layers="*"))
case(
    "an exclude that matches none of the selected layers",
    lambda: inject(ResNet(), Dropout(p=0.1), layers="layer1.*", exclude="layer2"),
)
case("a Keras layer", lambda: inject(nn.Sequential(keras_layer()), Dropout(p=0.1), layers="0"))
case("a ScriptModule", lambda: inject(torch.jit.script(mlp()), Dropout(p=0.1), layers="0"))
case(
    "a module inside a TransformerEncoderLayer",
    lambda: inject(nn.TransformerEncoderLayer(8, 2, batch_first=True), Dropout(p=0.1), layers="linear1"),
)


# --- shapes, with an example input

case("tokens into DropBlock", lambda: inject(ViT(), DropBlock(p=0.1), layers="blocks.*", example_input=IMAGES))
case("features into Dropout2d", lambda: inject(ResNet(), Dropout2d(p=0.1), layers="fc", example_input=IMAGES))
case(
    "a block larger than the map",
    lambda: inject(ResNet(), DropBlock(p=0.1, block_size=31), layers="layer1.*", example_input=IMAGES),
)
case(
    "a batch that Masksembles cannot split",
    lambda: inject(nn.Sequential(nn.Linear(8, 16)), Masksembles(n=4), layers="0", example_input=torch.zeros(30, 8)),
)
case("heads at another layer", lambda: inject(ResNet(), HeadDropout(p=0.1), layers="fc"))
case("heads that do not divide the features", lambda: inject(ResNet(), HeadDropout(p=0.1, heads=3), layers="fc"))


case("attention scores at another layer", lambda: inject(ResNet(), DropKey(p=0.1), layers="fc", example_input=IMAGES))
case("no attention scores in a call", lambda: hooked(ViT(), DropKey(p=0.1), "blocks.0")(IMAGES))
case("a model without attention scores", lambda: inject(ResNet(), recipes.drop_key(p=0.1), example_input=IMAGES))
case("a tensor of attention scores", lambda: inject(ViT(), DropKey(p=0.1), layers="blocks.0", tensor=0))
case("attention scores at the input", lambda: inject(ViT(), DropKey(p=0.1), layers="blocks.0", at="input"))


@case("a checkpoint inside an attention layer")
def _() -> None:
    class Checkpointed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(torch.softmax, x, -1, use_reentrant=False)

    hooked(nn.Sequential(Checkpointed()), DropKey(p=0.1), "0")(torch.zeros(2, 3, 3, requires_grad=True))


@case("an object given to a branch that runs on part of the batch")
def _() -> None:
    model = hooked(LanguageModel(), DropPath(p=0.5, mode="subset"), "layer")
    model.layer(torch.zeros(4, 8), settings=object())


case(
    "heads that attention does not have",
    lambda: inject(
        from_timm("vit_tiny_patch16_224", depth=1, img_size=32)(),
        HeadDropout(p=0.1, heads=4),
        layers="blocks.0.attn.proj",
        example_input=torch.rand(1, 3, 32, 32),
    ),
)
case(
    "tokens removed before rotary embeddings",
    lambda: inject(
        from_timm("eva02_tiny_patch14_224", depth=1, img_size=56)(),
        TokenDropout(p=0.5, remove=True),
        layers="pos_drop",
        example_input=torch.randn(1, 3, 56, 56),
    ),
)
case(
    "a batch norm in a branch that runs on part of the batch",
    lambda: inject(ResNet(), DropPath(p=0.1, mode="subset"), layers="layer1.*"),
)
case(
    "a branch that mixes samples, on part of the batch",
    lambda: run(nn.Sequential(MixesSamples()), DropPath(p=0.5, mode="subset"), torch.rand(4, 8)),
)
case(
    "a branch that returns further rows, on part of the batch",
    lambda: run(nn.Sequential(nn.LSTM(3, 4, batch_first=True)), DropPath(p=0.5, mode="subset"), torch.rand(4, 5, 3)),
)
case(
    "a branch that returns more in training, on part of the batch",
    lambda: run(nn.Sequential(ReturnsMore()), DropPath(p=0.5, mode="subset"), torch.rand(4, 8)),
)
case(
    "an attention mask that no module takes",
    lambda: inject(nn.Sequential(nn.Embedding(8, 8)), NEFTune(alpha=5, attention_mask=True), layers="0"),
)
case("a KV cache in training", lambda: run(LanguageModel(), LayerDrop(p=0.1), torch.zeros(2, 4, 16), layers="layer"))
case(
    "DropPath on whole residual blocks",
    lambda: inject(ResNet(), DropPath(p=0.1), layers="layer1.*", example_input=torch.randn(2, 3, 16, 16)),
)
case(
    "a layer that already drops",
    lambda: inject(
        nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2)), Dropout(p=0.1), layers="0", example_input=torch.zeros(2, 8)
    ),
)
case("a rate that looks like keep_prob", lambda: inject(ResNet(), DropBlock(p=0.9, block_size=3), layers="layer1.*"))
case("an int for p", lambda: DropBlock(7))
case(
    "a PackedSequence",
    lambda: run(
        nn.Sequential(nn.LSTM(3, 4)),
        DropPath(p=0.1),
        nn.utils.rnn.pack_sequence([torch.zeros(5, 3), torch.zeros(2, 3)]),
    ),
)
case(
    "a complex output",
    lambda: inject(nn.Sequential(Spectrum()), Dropout(p=0.1), layers="0", example_input=torch.zeros(2, 8)),
)


@case("a strided NestedTensor")
def _() -> None:
    inject(model := nn.Sequential(nn.Linear(3, 4)), Dropout(p=0.1), layers="0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of PyTorch, about this layout
        model(torch.nested.nested_tensor([torch.zeros(5, 3), torch.zeros(2, 3)]))


@case("a partial sum of tensor parallelism")
def _() -> None:
    inject(model := nn.Sequential(nn.Linear(8, 8)), Dropout(p=0.1), layers="0")
    dist.init_process_group("fake", rank=0, world_size=2, store=dist.HashStore())
    try:
        parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": RowwiseParallel()})
        model(torch.zeros(2, 4))
    finally:
        dist.destroy_process_group()


case("nested sites", lambda: inject(ResNet(), Dropout(p=0.1), layers="layer1.**"))
case(
    "maps with the channels last (NHWC)",
    lambda: inject(
        nn.Sequential(nn.Linear(8, 8)), Dropout2d(p=0.1), layers="0", example_input=torch.zeros(2, 16, 16, 8)
    ),
)
case(
    "a high rate before a batch norm",
    lambda: inject(ResNet(), Dropout(p=0.5), layers="layer1.0.conv1", example_input=IMAGES),
)


@case("a frozen layer")
def _() -> None:
    (model := ResNet()).layer1.requires_grad_(False)
    inject(model, Dropout(p=0.1), layers="layer1.0", example_input=IMAGES)


case(
    "a layer that returns no tensor",
    lambda: inject(
        nn.Sequential(nn.Embedding(8, 8), Argmax()), Dropout(p=0.1), layers="1", example_input=torch.ones(2, 3).long()
    ),
)
case(
    "a pattern that also matches a layer that a forward never calls",
    lambda: inject(ViT(), Dropout(p=0.1), layers=nn.Linear, example_input=IMAGES),
)
case("a layer that a forward never calls", lambda: inject(ViT(), Dropout(p=0.1), layers="unused", example_input=IMAGES))
case(
    "an example input that the model rejects",
    lambda: inject(ResNet(), Dropout(p=0.1), layers="fc", example_input=torch.zeros(2, 4, 16, 16)),
)
case(
    "an example input without a batch axis, with its channels last",
    lambda: inject(ResNet(), Dropout(p=0.1), layers="fc", example_input=torch.zeros(16, 16, 3)),
)
case(
    "an example input of another size",
    lambda: inject(mlp(), Dropout(p=0.1), layers="0", example_input=torch.zeros(2, 9, 9)),
)
case(
    "a map without a batch axis",
    lambda: inject(
        nn.Sequential(nn.Conv2d(3, 4, 3)), Dropout2d(p=0.1), layers="0", example_input=torch.zeros(3, 16, 16)
    ),
)
case(
    "an example input of a model with lazy modules",
    lambda: inject(nn.Sequential(nn.LazyLinear(8)), Dropout(p=0.1), layers="0", example_input=torch.zeros(2, 4)),
)
case("a wrong shape without an example input", lambda: run(ViT(), DropBlock(p=0.1), IMAGES, layers="blocks.0"))


# --- settings

case("p out of range", lambda: DropBlock(p=1.5))
case("p as a percentage", lambda: Dropout(p=10))
case("no rate", lambda: Dropout())
case("p as a string", lambda: Dropout(p="1"))
case("both p and keep_prob", lambda: DropBlock(p=0.1, keep_prob=0.9))
case("a block of size 0", lambda: DropBlock(p=0.1, block_size=0))
case("the regularizer before the model", lambda: inject(Dropout(p=0.1), ResNet(), layers="fc"))
case("the class of a regularizer instead of an instance", lambda: inject(ResNet(), Dropout, layers="fc"))
case("a module with parameters", lambda: inject(ResNet(), nn.BatchNorm2d(8), layers="layer1.*"))
case("a lambda as the regularizer", lambda: inject(ResNet(), lambda x: 0.9 * x, layers="fc"))
case(
    "a schedule for a regularizer without a rate",
    lambda: inject(ResNet(), torch.tanh, layers="fc", schedule=LinearSchedule(steps=10)),
)
case("a number as the schedule", lambda: inject(ResNet(), Dropout(p=0.1), layers="fc", schedule=1000))
case("a schedule without steps", lambda: LinearSchedule(steps=0))
case(
    "a schedule whose peak exceeds the range of p",
    lambda: inject(ResNet(), Dropout(p=0.6), layers="fc", schedule=LinearSchedule(steps=10, end=2.0)),
)
case("parse: a typo", lambda: hookdrop.parse("DropBlok(p=0.1)"))
case("parse: code instead of a literal", lambda: hookdrop.parse("Dropout(p=min(0.1, 0.2))"))


# --- injecting


case(
    "a notebook cell that is run again", lambda: inject(injected()[0], DropBlock(p=0.1, block_size=3), layers="**.bn1")
)
case(
    "a second injection of the same name", lambda: inject(injected()[0], DropBlock(p=0.2, block_size=3), layers="conv1")
)


@case("inject inside without_hooks")
def _() -> None:
    model, _ = injected()
    with hookdrop.without_hooks(model):
        inject(model, Dropout(p=0.1), layers="layer1.0.bn1")


case("inject inside torch.jit.trace", lambda: torch.jit.trace(InjectsInForward(), IMAGES))
case("a model in training mode in torch.jit.trace", lambda: torch.jit.trace(injected()[0], IMAGES))


@case("a hooked layer in torch.jit.script")
def _() -> None:
    model, drop = injected()
    with drop:
        torch.jit.script(model.layer1[0].bn1)


case("torch.export in training mode", lambda: torch.export.export(hooked(mlp()), (torch.zeros(2, 8),)))


@case("other libraries' code that compiled code may recompute")
def _() -> None:
    inject(model := mlp(), nn.RReLU(), layers="0")
    with torch._functorch.config.patch(activation_memory_budget=0.5):
        torch.compile(model, backend="eager")(torch.zeros(2, 8))


case("torch.fx of a hooked block", lambda: torch.fx.symbolic_trace(hooked(nn.Sequential(mlp()))))


# --- training


case("a schedule that is not advancing", lambda: train(injected(schedule=LinearSchedule(steps=100))[0]))
case("a model that is trained in eval mode", lambda: train(injected()[0].eval()))
case("a layer that training never calls", lambda: train(hooked(ViT(), layers=["blocks.0", "unused"])))
case(
    "a language model that is trained on embeddings",
    lambda: train(hooked(LanguageModel(), NEFTune(alpha=5), layers="embed_tokens")),
)


@case("two optimizers")
def _() -> None:
    model, drop = injected(schedule=LinearSchedule(steps=100))
    optimizers = torch.optim.SGD(model.parameters(), 0.1), torch.optim.Adam(model.parameters())
    drop.follow(optimizers[0]).follow(optimizers[1])


@case("step() while an optimizer is followed")
def _() -> None:
    model, drop = injected(schedule=LinearSchedule(steps=100))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    drop.follow(optimizer).step()


case("follow() of something else than an optimizer", lambda: handle(LinearSchedule(steps=100)).follow(nn.Linear(8, 8)))


@case("the followed optimizer is gone")
def _() -> None:
    model, drop = injected(schedule=LinearSchedule(steps=100))
    drop.follow(torch.optim.SGD(model.parameters(), 0.1))
    train(model)


@case("a resumed optimizer and a schedule at its beginning")
def _() -> None:
    train(model := ResNet(), 10, optimizer := torch.optim.Adam(model.parameters()))
    inject(model, Dropout(p=0.1), layers="fc", schedule=LinearSchedule(steps=100)).follow(optimizer)
    train(model, 1, optimizer)


@case("the hooked model is discarded and another one trained")
def _() -> None:
    _drop = inject(mlp(), Dropout(p=0.1), layers="0")
    train(mlp(), 1)


@case("a model is built and trained while the hooked one waits")
def _() -> None:
    inject(_model := mlp(), Dropout(p=0.1), layers="0")
    train(mlp(), 20)


@case("a hooked module is replaced")
def _() -> None:
    model, drop = injected()
    model.layer2[0].bn1 = nn.BatchNorm2d(8)
    drop.remove()


@case("a hooked module is copied within the model")
def _() -> None:
    model, drop = injected()
    model.layer3 = copy.deepcopy(model.layer2)
    drop.remove()


@case("an adapter around a hooked module")
def _() -> None:
    drop = inject(model := mlp(), Dropout(p=0.1), layers="0")
    model[0] = nn.Sequential(model[0], nn.Linear(8, 8))
    drop.remove()


@case("a full backward hook on a hooked module")
def _() -> None:
    drop = inject(model := mlp(), Dropout(p=0.1), layers="0")
    model[0].register_full_backward_hook(lambda *_: None)
    drop.remove()


@case("DropPath where rows are windows")
def _() -> None:
    windows = nn.Sequential(nn.Flatten(0, 1), nn.Linear(8, 8), nn.Unflatten(0, (2, 4)), nn.Linear(8, 2))
    inject(windows, DropPath(p=0.1), layers=nn.Linear)
    windows(torch.ones(2, 4, 8))


@case("a schedule that advances twice for each update")
def _() -> None:
    model, drop = injected(schedule=LinearSchedule(steps=1000))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in range(40):
        drop.step()
        train(model, batch % 2, optimizer)


@case("a forward without gradients during the training")
def _() -> None:
    model, _ = injected()
    train(model, 1, torch.optim.SGD(model.parameters(), 0.1))
    with torch.no_grad():
        model(IMAGES)


@case("a schedule that advances once per epoch")
def _() -> None:
    model, drop = injected(schedule=LinearSchedule(steps=1000))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        train(model, 10, optimizer)
        drop.step()


@case("a schedule in epochs")
def _() -> None:
    model, drop = injected(schedule=LinearSchedule(steps=1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    drop.follow(optimizer)
    train(model, 101, optimizer)


@case("an activation checkpoint that does not restore the random state")
def _() -> None:
    model, _ = injected(Dropout(p=0.5))
    x = torch.ones(2, 8, 16, 16, requires_grad=True)
    checkpoint(model.layer1, x, use_reentrant=False, preserve_rng_state=False).sum().backward()


case(
    "PyTorch's update_bn of a hooked average",
    lambda: torch.optim.swa_utils.update_bn([IMAGES], torch.optim.swa_utils.AveragedModel(injected()[0])),
)


@case("two ranks with the same seed")
def _() -> None:
    (model, drop), store = injected(), dist.HashStore()
    for rank in range(2):  # two ranks in turn, with one store
        dist.init_process_group("fake", rank=rank, world_size=2, store=store)
        train(model, 1)
        if rank:
            drop.remove()
        dist.destroy_process_group()


# --- the handle


case("a handle whose model was deleted", lambda: injected()[1].probe(IMAGES))


@case("a handle that was removed")
def _() -> None:
    _model, drop = injected()
    drop.remove()
    drop.step()


@case("removing an injection twice by name")
def _() -> None:
    model, _ = injected()
    hookdrop.find(model)["dropblock"].remove()
    hookdrop.find(model)["dropblock"].remove()


@case("one target for rates of mixed units")
def _() -> None:
    model = ResNet()
    inject(model, {"fc": Dropout(p=0.1), "conv1": GaussianNoise(std=0.1)}).target_p = 0.2


case("sampling at rate 0", lambda: handle(LinearSchedule(steps=100)).sampling().__enter__())
case("one Monte Carlo sample", lambda: handle().predict(IMAGES, samples=1))
case("predicting an empty loader", lambda: handle().predict(iter([])))
case("predicting an array", lambda: handle().predict(IMAGES.numpy()))
case(
    "predicting with a model that returns a dict",
    lambda: inject(_model := OutputDict(), Dropout(p=0.5), layers="fc").predict(torch.ones(2, 8)),
)
case(
    "the softmax of one class",
    lambda: inject(_model := nn.Sequential(nn.Linear(8, 1)), Dropout(p=0.5), layers="0").predict(torch.ones(2, 8)),
)
case(
    "the softmax of probabilities",
    lambda: inject(_model := nn.Sequential(nn.Linear(8, 3), nn.Softmax(-1)), Dropout(p=0.5), layers="0").predict(
        torch.ones(2, 8)
    ),
)
case(
    "equal Monte Carlo samples",
    lambda: inject(_model := OutputDict(), Dropout(p=0.5), layers="unused").predict(
        torch.ones(2, 8), output=lambda out: out["out"]
    ),
)
case(
    "predicting with hooks that only edit gradients",
    lambda: inject(_model := mlp(), ClipActivationGrad(max_norm=1.0), layers="0").predict(torch.ones(2, 8)),
)


# --- saving


case(
    "the state of other sites",
    lambda: handle().load_state_dict(inject(_model := ResNet(), DropBlock(p=0.1), layers="layer1.*").state_dict()),
)
case(
    "the state of other sites, not strict",
    lambda: handle().load_state_dict(
        inject(_model := ResNet(), DropBlock(p=0.1), layers="layer1.*.bn1").state_dict(), strict=False
    ),
)


@case("the states of other injections")
def _() -> None:
    (model, _), other = injected(), ResNet()
    inject(other, Dropout(p=0.1), layers="fc")
    hookdrop.find(model).load_state_dict(hookdrop.find(other).state_dict())


case(
    "the state of another rate",
    lambda: handle().load_state_dict(injected(DropBlock(p=0.2, block_size=3))[1].state_dict()),
)
case(
    "the state of another schedule",
    lambda: handle(LinearSchedule(steps=100)).load_state_dict(handle(LinearSchedule(steps=50)).state_dict()),
)
case("the state_dict of the model", lambda: handle().load_state_dict(ResNet().state_dict()))
case("a spec with an invalid value", lambda: InjectionSpec.from_dict({"regularizer": "Dropout(p=2)", "layers": "fc"}))
case(
    "a spec with an unknown setting", lambda: InjectionSpec.from_dict({"regularizer": "Dropout(p=0.1)", "layer": "fc"})
)
case("a schedule that counts epochs", lambda: LinearSchedule(epochs=5))


@case("a schedule that is no dataclass")
def _() -> None:
    class Decay(hookdrop.schedules.Schedule):
        speed: float = 1.0

    Decay(speed=2.0)


@case("a regularizer without its rate")
def _() -> None:
    class Shrink(hookdrop.Regularizer):
        def __init__(self, amount: float = 0.1) -> None:
            super().__init__()
            self.amount = amount

    Shrink()(IMAGES)


@case("kernels that fail on a GPU")
def _() -> None:
    with mock.patch.object(triton_dropblock, "_draw", side_effect=RuntimeError("out of resource: shared memory")):
        triton_dropblock._check(torch.device("cpu"))
    triton_dropblock._works.clear()


@case("a callback registered after the training")
def _() -> None:
    from hookdrop.integrations.transformers import InjectionCallback

    trained = mock.MagicMock(is_in_train=False, state=mock.Mock(global_step=8))
    InjectionCallback(InjectionSpec("Dropout(p=0.1)", layers="fc")).register(trained)


case(
    "a spec of a class that is not allowed",
    lambda: InjectionSpec.from_dict({"regularizer": "timm.layers.drop.DropPath(drop_prob=0.1)", "layers": "fc"}),
)
case("the spec of a schedule with a function", lambda: handle(LambdaSchedule(half)).spec.to_dict())
case(
    "the spec of an own regularizer that does not store an argument",
    lambda: inject(_model := ResNet(), Jitter(every=2), layers="fc").spec.to_dict(),
)
case(
    "the spec of a recipe that chooses other sites",
    lambda: inject(
        nn.Sequential(nn.Dropout(0.1), nn.Dropout(0.1)),
        InjectionSpec("set_dropout(p=0.2)", layers=["0"]),
        example_input=torch.ones(1),
    ),
)


@case("a value that differs between injections")
def _() -> None:
    model, _ = injected()
    inject(model, Dropout(p=0.1), layers="fc", schedule=LinearSchedule(steps=10)).step()
    print(hookdrop.find(model).step_count)


@case("sampling of dropout that the model has")
def _() -> None:
    drop = inject(nn.Sequential(nn.Dropout(0.1)), recipes.set_dropout(0.2), example_input=torch.ones(1))
    drop.probe(torch.ones(1))


# --- recipes

case(
    "dropblock_resnet of an MLP",
    lambda: inject(mlp(), recipes.dropblock_resnet(p=0.1), example_input=torch.zeros(2, 8)),
)


@case("dropblock_resnet of a CNN with attention blocks")
def _() -> None:
    import timm

    with torch.device("meta"):
        model = timm.create_model("coatnet_nano_rw_224")
    inject(model, recipes.dropblock_resnet())


case(
    "dropblock_resnet of a traced model",
    lambda: inject(torch.fx.symbolic_trace(from_torchvision("resnet18")()), recipes.dropblock_resnet()),
)
case("dropblock_unet of a classifier", lambda: inject(from_torchvision("resnet18")(), recipes.dropblock_unet()))
case(
    "stochastic_depth of a model that has it",
    lambda: inject(from_timm("test_vit", drop_path_rate=0.1)(), recipes.stochastic_depth()),
)
case(
    "residual_dropout of a model that has dropout",
    lambda: inject(nn.Sequential(Decoder()), recipes.residual_dropout(), example_input=torch.randn(2, 4, 8)),
)


@case("neftune of a model with the NEFTune of transformers")
def _() -> None:
    (model := LanguageModel()).embed_tokens.neftune_noise_alpha = 5
    model.get_input_embeddings = lambda: model.embed_tokens
    inject(model, recipes.neftune())


case(
    "patch_dropout of a model without patches in a sequence",
    lambda: inject(
        from_timm("swin_tiny_patch4_window7_224", depths=(1, 1))(),
        recipes.patch_dropout(p=0.5),
        example_input=torch.randn(1, 3, 224, 224),
    ),
)
case(
    "a recipe for a model without residual branches",
    lambda: inject(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), recipes.stochastic_depth(), example_input=IMAGES),
)


@case("a recipe for branches that end with a function")
def _() -> None:
    class Branch(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return x + super().forward(x).relu()

    inject(nn.Sequential(Branch(8, 8), Branch(8, 8)), recipes.stochastic_depth(), example_input=torch.randn(2, 8))


case("a keyword that a recipe does not take", lambda: recipes.stochastic_depth(rate=0.1))
case("set_dropout that reaches nothing", lambda: inject(ResNet(), recipes.set_dropout(p=0.1), example_input=IMAGES))
case(
    "set_dropout with a pattern that matches nothing",
    lambda: inject(
        nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)),
        recipes.set_dropout(p={"drop": 0.2}),
        example_input=torch.ones(2),
    ),
)
case(
    "set_dropout without an example input",
    lambda: inject(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)), recipes.set_dropout(p=0.2)),
)


@case("set_dropout of a model with a constant rate")
def _() -> None:
    class Head(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(x, 0.5, self.training)

    inject(nn.Sequential(nn.Dropout(0.1), Head()), recipes.set_dropout(p=0.2), example_input=torch.ones(2))


case(
    "set_dropout with a schedule beyond 1",
    lambda: inject(
        nn.Sequential(nn.Dropout(0.1)),
        recipes.set_dropout(p=0.6),
        schedule=LinearSchedule(steps=10, end=2.0),
        example_input=torch.ones(2),
    ),
)


@case("a schedule of rates that changed again")
def _() -> None:
    model = nn.Sequential(nn.Dropout(0.1))
    schedule = LinearSchedule(steps=10)
    drop = inject(model, recipes.set_dropout(p=0.2), schedule=schedule, example_input=torch.ones(2))
    model[0].p = 0.3
    drop.step()


@case("set_dropout removed after another change")
def _() -> None:
    model = nn.Sequential(nn.Dropout(0.1))
    drop = inject(model, recipes.set_dropout(p=0.2), example_input=torch.ones(2))
    model[0].p = 0.3
    drop.remove()


# --- observing

case("grad_cam of a layer without maps", lambda: observe.grad_cam(ResNet(), IMAGES, "fc"))
case("grad_cam of several layers", lambda: observe.grad_cam(ResNet(), IMAGES, "layer1.*"))


@case("statistics of a layer that is never called")
def _() -> None:
    with observe.stats(model := ViT(), "unused"):
        model(IMAGES)


# --- checks of one's own classes

case(
    "a regularizer lacks a property",
    lambda: dict(testing.regularizer_checks(DropPath(p=0.3, scale=False)))["mean_is_kept"](),
)
case(
    "a misspelled check",
    lambda: testing.check_regularizer(Dropout(p=0.1), expected_failures={"mean_kept": "it does not rescale"}),
)
case(
    "a check without an example of the shape",
    lambda: testing.check_regularizer(DropBlock(p=0.1, block_size=(3, 3, 3, 3))),
)


# --- the command line

case(
    "command line: a misspelled regularizer",
    lambda: command("plan", "resnet18", "DropBlok(p=0.1)", "--layers", "layer1"),
)
case("command line: a misspelled model", lambda: command("plan", "resnet5O", "Dropout(p=0.1)", "--layers", "layer1"))


@case("command line: a package is not installed")
def _() -> None:
    with mock.patch.dict(sys.modules, {"timm": None}):
        command("layers", "resnet18")


case("command line: no layers", lambda: command("plan", "resnet18", "Dropout(p=0.1)"))
case(
    "command line: a recipe and --layers",
    lambda: command("plan", "resnet18", "stochastic_depth(p=0.1)", "--layers", "layer1"),
)
case(
    "command line: an unreadable input size",
    lambda: command("plan", "resnet18", "Dropout(p=0.1)", "--layers", "layer1", "--input-size", "big"),
)


# --- printing


def provoke(function: Callable[[], Any]) -> list[str]:
    """The error and the warnings of one case."""
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


def code_of(function: Callable[[], Any]) -> str:
    """The body of a case."""
    line, source = function.__code__.co_firstlineno, Path(__file__).read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Lambda) and node.lineno == line:
            return textwrap.dedent(ast.get_source_segment(source, node.body))
        if isinstance(node, ast.FunctionDef) and node.decorator_list and node.decorator_list[0].lineno == line:
            return textwrap.dedent("\n".join(source.splitlines()[node.lineno : node.end_lineno]))
    raise AssertionError(f"no case begins at line {line}")


@functools.cache
def messages() -> dict[str, list[str]]:
    """The errors and warnings of each case, by its title."""
    gc.collect()
    gc.freeze()  # or each case searches all objects of the process for garbage
    try:
        return {title: provoke(function) for title, function in CASES}
    finally:
        gc.unfreeze()


def print_catalog() -> None:
    """Print every case: number, title, code, messages."""
    for number, (title, function) in enumerate(CASES, start=1):
        print(f"{number}. {title}\n{textwrap.indent(code_of(function), '    >>> ')}")
        print(textwrap.indent("\n".join(messages()[title]), "    ") + "\n")


if __name__ == "__main__":
    print_catalog()
