"""NEFTune: noise on the token embeddings of a language model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from hookdrop.recipes.base import Recipe, RecipeSite
from hookdrop.regularizers import NEFTune
from hookdrop.utils.errors import InjectionError, LayerError
from hookdrop.utils.select import named_layers, select

if TYPE_CHECKING:
    from hookdrop.survey import Survey


@dataclass(frozen=True)
class neftune(Recipe):
    """NEFTune: noise on the token embeddings while a language model is fine-tuned. A schedule drives `alpha`.

    Jain et al. 2023, arXiv:2310.05914. The site is the module that `get_input_embeddings()` returns (of an
    encoder-decoder, the encoder's); of other models, the layer that looks up the integers that the model is called
    with. With the same seed, the noise equals that of transformers' Trainer with `neftune_noise_alpha`, bit for bit.

    Args:
        alpha: scale of the noise; the paper uses 5, 10 and 15.
        attention_mask: whether to spare padding, as in `NEFTune`.
        embedding: the name of the embedding; None asks the model, or runs it.

    Raises:
        LayerError: the model looks up no tokens.
        InjectionError: transformers' own NEFTune is active, or no module takes an attention mask.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> size = dict(num_hidden_layers=2, hidden_size=16, intermediate_size=16, num_attention_heads=2, vocab_size=9)
        >>> model = LlamaForCausalLM(LlamaConfig(**size, num_key_value_heads=2))
        >>> inject(model, neftune(alpha=5))
        <Injection 'neftune': 1 site, alpha=5 of 5, step 0 of ConstantSchedule()>
        >>> plan(model, neftune(), on_existing="replace").sites[0].name
        'model.embed_tokens'
    """

    alpha: float = 5.0
    attention_mask: bool = False
    embedding: str | None = None

    def sites(self, model: nn.Module, survey: Survey) -> Sequence[RecipeSite]:
        if self.embedding is not None:
            found = select(model, self.embedding).layers
            if len(found) != 1:
                raise LayerError(f"neftune: {self.embedding!r} matches {len(found)} layers: name one embedding.")
            name: str | None = found[0].name
        else:
            name = _input_embedding(model) or survey.token_embedding
        if name is None:
            raise LayerError(
                f"neftune found no layer of {type(model).__name__} that looks up the tokens it is called with.\n"
                '  name the embedding: neftune(alpha, embedding="tok_embeddings")\n'
                "  find its name:      print(hookdrop.plan(model, layers=torch.nn.Embedding))"
            )
        if getattr(model.get_submodule(name), "neftune_noise_alpha", None):
            raise InjectionError(
                f"neftune: transformers' own NEFTune is already active at {name!r}.\n"
                "  remove neftune_noise_alpha from the TrainingArguments"
            )
        return [RecipeSite(name, NEFTune(self.alpha, attention_mask=self.attention_mask))]


def _input_embedding(model: nn.Module) -> str | None:
    """Return the embedding that a model of transformers, possibly inside another, names as that of its tokens."""
    layers = list(named_layers(model))
    names = {id(layer.module): layer.name for layer in layers}
    for layer in layers:
        if hasattr(layer.module, "get_input_embeddings"):
            encoders = [getattr(layer.module, "get_encoder", None)] if _has_encoder_and_decoder(layer.module) else []
            for owner in [*(getter() for getter in encoders if callable(getter)), layer.module]:
                try:
                    embedding = owner.get_input_embeddings()
                except (AttributeError, NotImplementedError, TypeError):  # not a model of text
                    continue
                if id(embedding) in names and not any(map(_computes, embedding.modules())):
                    return names[id(embedding)]
    return None


def _computes(module: nn.Module) -> bool:
    """Whether a module embeds patches or audio, not tokens."""
    return isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)


def _has_encoder_and_decoder(module: nn.Module) -> bool:
    return bool(getattr(getattr(module, "config", None), "is_encoder_decoder", False))
