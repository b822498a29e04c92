"""The language models, without dropout, and those of the peers, with it."""

from typing import Any

from torch import Tensor, nn

from language.arms import MODELS
from language.corpus import VOCABULARY

WIDTH = 128


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
