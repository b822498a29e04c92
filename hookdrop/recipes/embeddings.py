"""NEFTune: noise on the token embeddings of a language model."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from hookdrop.errors import InjectionError, LayerError
from hookdrop.injection.plan import Plan
from hookdrop.recipes.recipe import Factory, Recipe, RecipeSite, plan_sites
from hookdrop.regularizers import NEFTune
from hookdrop.schedules import Schedule
from hookdrop.utils.select import Layer, named_layers, select


@Recipe
def neftune(
    model: nn.Module,
    alpha: float = 5.0,
    embedding: str | nn.Module | None = None,
    attention_mask: bool = False,
    regularizer: Factory | None = None,
    *,
    schedule: Schedule | str | None = None,
    total_steps: int | None = None,
    name: str = "neftune",
    on_existing: str = "error",
    portable: bool = False,
    example_input: Any = None,
) -> Plan:
    """Inject noise on the token embeddings while a language model is fine-tuned. A schedule drives `alpha`.

    The site is the module that `get_input_embeddings()` returns; of an encoder-decoder, the encoder's. With the same
    seed, the noise equals that of transformers' Trainer with `neftune_noise_alpha`, bit for bit. Jain et al. 2023,
    arXiv:2310.05914.

    Args:
        model: a language model of transformers, or a model that contains one (a PEFT model), or any model if
            `embedding` is given.
        alpha: scale of the noise; the paper uses 5, 10 and 15.
        embedding: the embedding, by name or as a module; None asks the model.
        attention_mask: whether to spare padding, as in `NEFTune`.
        regularizer: called with `alpha=` instead of `NEFTune`.
        schedule, total_steps, name, on_existing, portable, example_input: as in `inject`.

    Raises:
        LayerError: the model has no `get_input_embeddings()`, and `embedding` is None.
        InjectionError: transformers' own NEFTune is active, or no module takes an attention mask.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> size = dict(num_hidden_layers=2, hidden_size=16, intermediate_size=16, num_attention_heads=2, vocab_size=9)
        >>> model = LlamaForCausalLM(LlamaConfig(**size, num_key_value_heads=2))
        >>> neftune(model, alpha=5)
        <Injection 'neftune': 1 site, alpha=5 of 5, step 0 of ConstantSchedule()>
        >>> neftune.plan(model, on_existing="replace").sites[0].name
        'model.embed_tokens'
    """
    site = _input_embedding(model) if embedding is None else _given(model, embedding)
    if getattr(site.module, "neftune_noise_alpha", None):
        raise InjectionError(
            f"neftune: transformers' own NEFTune is already active at {site.name!r}.\n"
            "  remove neftune_noise_alpha from the TrainingArguments"
        )
    make = partial(NEFTune, attention_mask=attention_mask) if regularizer is None else regularizer
    return plan_sites(
        model,
        [RecipeSite(site.name, {"alpha": alpha})],
        make,
        schedule=schedule,
        total_steps=total_steps,
        name=name,
        on_existing=on_existing,
        portable=portable,
        example_input=example_input,
    )


def _given(model: nn.Module, embedding: str | nn.Module) -> Layer:
    found = select(model, embedding).layers
    if len(found) != 1:
        raise LayerError(f"neftune: {embedding!r} matches {len(found)} layers: name one embedding.")
    return found[0]


def _input_embedding(model: nn.Module) -> Layer:
    layers = list(named_layers(model))
    names = {id(layer.module): layer for layer in layers}
    for layer in layers:
        embedding = _embedding_of(layer.module)
        if id(embedding) in names:
            return names[id(embedding)]
    raise LayerError(
        f"neftune found no matching layer in {type(model).__name__}: it looks for a token embedding, from "
        "get_input_embeddings().\n"
        '  name the embedding: neftune(model, alpha, embedding="tok_embeddings")\n'
        "  find its name:      print(hookdrop.plan(model, layers=torch.nn.Embedding))"
    )


def _embedding_of(module: nn.Module) -> nn.Module | None:
    """Return the embedding that a model of transformers runs on its input tokens; None for other modules."""
    getters = [getattr(module, "get_encoder", None)] if _has_encoder_and_decoder(module) else []
    for owner in [*(getter() for getter in getters if callable(getter)), module]:
        try:
            embedding = owner.get_input_embeddings()
        except (AttributeError, NotImplementedError, TypeError):  # not a model of transformers, or not of text
            continue
        if isinstance(embedding, nn.Module) and not any(map(_is_convolution, embedding.modules())):
            return embedding
    return None


def _is_convolution(module: nn.Module) -> bool:
    """Whether a module embeds patches or audio, not tokens."""
    return isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)


def _has_encoder_and_decoder(module: nn.Module) -> bool:
    return bool(getattr(getattr(module, "config", None), "is_encoder_decoder", False))
