"""Models with built-in dropout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

torchvision = pytest.importorskip("torchvision")


transformers = pytest.importorskip("transformers")


SIZE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


TOKENS = {"input_ids": torch.arange(8)[None]}


OFF = 0.0


class Inherited(nn.Dropout):
    """The forward of the base class reads the rate."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.rate = nn.Linear(16, 16), 0.3

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.linear(x))

    def head(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.rate, self.training)


class OverriddenMethod(Base):
    """The inherited forward calls this method, which calls the method of the base class."""

    def head(self, x: Tensor) -> Tensor:
        return super().head(x).relu()


class ArbitraryNames(nn.Module):
    """Rates with unspecific names, some of them passed through a local variable or an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.p, self.prob, self.noise, self.chance = 0.2, 0.3, 0.4, 0.5

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.linear(x), self.p, self.training)
        x = F.dropout1d(x, p=float(self.prob) if self.training else 0.0)
        p = self.noise if self.training else 0.0
        x = x + F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=p)[0]
        return self.head(x, self.chance)

    def head(self, x: Tensor, q: float = 0.9) -> Tensor:
        return torchvision.ops.stochastic_depth(x, q, "row", self.training)


class SubmoduleRate(nn.Module):
    """The rate of a submodule that is never called, and a constant rate of 0."""

    def __init__(self) -> None:
        super().__init__()
        self.attn_drop = nn.Dropout(0.3)

    def forward(this, x: Tensor) -> Tensor:
        x = F.dropout(x, OFF)
        return F.scaled_dot_product_attention(x, x, x, dropout_p=this.attn_drop.p if this.training else 0.0)


class RenamedSelf(nn.Module):
    """The forward uses another name for `self`."""

    def __init__(self) -> None:
        super().__init__()
        self.rate, self.drop_rate = 0.3, 0.2

    def forward(net, x: Tensor) -> Tensor:
        x = F.dropout(x, net.rate, net.training)
        return F.dropout(x, getattr(net, "drop_rate"), net.training)  # noqa: B009


class TwoRates(nn.Module):
    """Drops at two rates and does nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.rate, self.rate2 = 0.3, 0.2

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(F.dropout(x, self.rate, self.training), self.rate2, self.training)


class TwoDropouts(TwoRates):
    """A class whose name contains Dropout."""


def bert() -> nn.Module:
    return transformers.BertModel(transformers.BertConfig(**SIZE, vocab_size=50))


def llama(**settings: Any) -> nn.Module:
    return transformers.LlamaModel(transformers.LlamaConfig(**SIZE, num_key_value_heads=2, vocab_size=50, **settings))


def gpt2(**settings: Any) -> nn.Module:
    return transformers.GPT2Model(transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=50, **settings))
