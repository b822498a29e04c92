"""The arms of the study, read from `study.yaml`, and their models; those of the peers have dropout written in."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor, nn

from hookdrop import InjectionSpec, LinearSchedule, parse
from language.corpus import VOCABULARY

NONE, WIDTH = "none", 128
CONFIG: Mapping[str, Any] = yaml.safe_load(Path(__file__).with_name("study.yaml").read_text())
MODELS: Mapping[str, Any] = CONFIG["models"]


@dataclass(frozen=True)
class Arm:
    """What is injected, at rates proportional to one tuned value; a peer has dropout written into its model instead."""

    name: str
    model: str  # lstm, written_in, stacked or decoder
    injections: Sequence[Mapping[str, Any]] = ()
    values: Sequence[float] = ()  # tuned together with the weight decay; empty for an arm that takes those of `like`
    like: str = ""
    ramp: bool = False
    steps: float = 1.0  # times those of the other arms: more where each takes less time

    @property
    def family(self) -> str:
        """The model that it is compared on: the peers of `lstm` differ from it only in their dropout."""
        return self.model if self.model in MODELS else "lstm"

    @property
    def penalizes(self) -> bool:
        """Whether it adds a term to the loss."""
        return any(one["text"].startswith("ActivationPenalty") for one in self.injections)

    def specs(self, value: float) -> list[InjectionSpec]:
        schedule = LinearSchedule(steps=1.0) if self.ramp else None
        found = []
        for i, one in enumerate(self.injections):
            settings = {name: setting for name, setting in one.items() if name not in ("text", "rate")}
            made = parse(one["text"].format(one.get("rate", 1.0) * value))
            found.append(InjectionSpec(made, schedule=schedule, name=str(i), on_existing="stack", **settings))
        return found


ARMS = [
    Arm(**{**one, "model": model})
    for one in CONFIG["arms"]
    for model in (one["model"] if isinstance(one["model"], list) else [one["model"]])
]


class Lstm(nn.Module):
    """Two layers with tied weights, as in Merity et al. 2017; for a peer, with `nn.Dropout` written in."""

    def __init__(self, p: float | None = None) -> None:
        super().__init__()
        self.drop = nn.Identity() if p is None else nn.Dropout(p)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.lstm1 = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.lstm2 = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head.weight = self.embed.weight
        nn.init.uniform_(self.embed.weight, -0.1, 0.1)

    def forward(self, x_BT: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """The logits of the next tokens, and the state for the next window."""
        first, second = state or (None, None)
        h_BTC, first = self.lstm1(self.drop(self.embed(x_BT)), first)
        h_BTC, second = self.lstm2(self.drop(h_BTC), second)
        return self.head(self.drop(h_BTC)), (first, second)


class StackedLstm(Lstm):
    """A peer: one `nn.LSTM` with its own dropout, which acts between the layers only."""

    def __init__(self, p: float) -> None:
        super().__init__()
        del self.lstm2
        self.lstm1 = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=p, batch_first=True)

    def forward(self, x_BT: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        h_BTC, state = self.lstm1(self.embed(x_BT), state and state[0])
        return self.head(h_BTC), (state,)


class Decoder(nn.Module):
    """LLaMA's architecture from transformers; each window is a sequence."""

    def __init__(self, name: str) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        self.llama = LlamaForCausalLM(LlamaConfig(**MODELS[name]["config"]))

    def forward(self, x_BT: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """The logits of the next tokens; there is no state."""
        return self.llama(input_ids=x_BT).logits, None


def build(name: str, p: float) -> nn.Module:
    """A model with weights drawn from the global generator; `p` is for the peers."""
    peers = {"written_in": Lstm, "stacked": StackedLstm}
    return peers[name](p) if name in peers else Decoder(name) if "config" in MODELS[name] else Lstm()
