"""Which layer returns image patches, and whether later layers need all of them; which layer looks up tokens."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hookdrop.survey.facts import survey
from hookdrop.survey.tokens import Patches
from tests.support.models import toy

X = torch.randn(2, 3, 8, 8)


class Transformer(nn.Module):
    """A vision transformer with patches of 2 x 2, and one attention that depends on `kind`."""

    def __init__(self, kind: str = "", prefix: int = 1, last: bool = False) -> None:
        super().__init__()
        self.kind, self.last, self.embed, self.drop = kind, last, nn.Conv2d(3, 4, 2, 2), nn.Dropout(0.1)
        self.norm, self.mixing = nn.LayerNorm(4), nn.Linear(16 + prefix, 16 + prefix)
        self.prefix, self.positions = (nn.Parameter(torch.randn(1, n, 4)) for n in (prefix, 16 + prefix))

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.prefix.expand(len(x), -1, -1), self.embed(x).flatten(2).mT]
        x = self.drop(torch.cat(parts[::-1] if self.last else parts, 1) + self.positions)
        y = self.norm(x)
        if self.kind == "rotary":
            y = y * torch.arange(y.shape[1]).cos()[:, None]
        if self.kind == "grid":
            y = y + 0 * y[:, 1:].reshape(len(y), 16, 4).sum(1, keepdim=True)
        if self.kind == "mixer":
            y = self.mixing(y.mT).mT
        # LayerScale, which makes the branch almost invisible in the output.
        x = x + 1e-6 * self.norm(F.scaled_dot_product_attention(y, y, y))
        return x.mean(1)


@pytest.mark.parametrize("prefix", [0, 1, 3])
def test_patches_and_their_prefix(prefix: int) -> None:
    model = Transformer(prefix=prefix)
    assert survey(model, X).patches == Patches("drop", prefix)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Transformer("rotary"), "'norm' depends on the position"),
        (Transformer("grid"), "do not run with fewer tokens"),
        (Transformer("mixer"), "'mixing' depends on the position"),
        (Transformer(last=True), "are not the first ones"),
        (nn.Conv2d(3, 3, 2), "no tensor (N, L, C) of image patches"),
    ],
)
def test_models_that_need_all_patches(model: nn.Module, reason: str) -> None:
    facts = survey(model, X)
    for _ in range(2):
        assert isinstance(facts.patches, str)
        assert reason in facts.patches
    assert facts.forwards <= 3


def test_text_tokens_among_the_patches_are_not_patches() -> None:
    model = toy(
        lambda m, ids, x: F.scaled_dot_product_attention(y := m.join(torch.cat([m.words(ids), m.embed(x).flatten(2).mT], 1)), y, y),
        words=nn.Embedding(9, 4), embed=nn.Conv2d(3, 4, 2, 2), join=nn.Identity(),
    )  # fmt: skip
    facts = survey(model, (torch.tensor([[1, 2], [3, 4]]), X))
    assert isinstance(facts.patches, str)
    assert facts.token_embedding == "words"


def test_the_embedding_of_tokens_is_not_that_of_positions() -> None:
    text = toy(
        lambda m, ids: m.places(torch.arange(ids.shape[1])) + m.words(ids.clamp(min=0)),
        places=nn.Embedding(9, 4), words=nn.Embedding(9, 4),
    )  # fmt: skip
    assert survey(nn.Sequential(text), torch.ones(2, 5, dtype=torch.long)).token_embedding == "0.words"


def test_a_model_without_tokens_has_no_embedding() -> None:
    assert survey(nn.Linear(3, 3), torch.ones(2, 3)).token_embedding is None
