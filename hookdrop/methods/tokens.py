"""Recipes for the heads, patches and token embeddings of transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from hookdrop.core.errors import InjectionError, LayerError
from hookdrop.core.recipe import Recipe, RecipeSite
from hookdrop.core.tables import some
from hookdrop.regularizers import DropKey, HeadDropout, NEFTune, TokenDropout
from hookdrop.survey.facts import Survey


@dataclass(frozen=True)
class head_dropout(Recipe):
    """DropHead: zero whole attention heads, before the output projection of every attention layer.

    Zhou et al. 2020, arXiv:2004.13342. Running the model shows the projections, which features of their input belong to
    which head, and which rows belong to which sample. With grouped queries, these are the query heads.

    Args:
        p: probability of dropping a head, in [0, 1).

    Raises:
        LayerError: no layer gets separate heads. `nn.MultiheadAttention` does not call its output projection, so hooks
            cannot reach its heads.

    Example:
        >>> import timm
        >>> model = timm.create_model("vit_tiny_patch16_224", depth=2)
        >>> drop = inject(model, head_dropout(p=0.2))
        >>> [site.name for site in drop.sites]
        ['blocks.0.attn.proj', 'blocks.1.attn.proj']
    """

    p: float = 0.1

    def __post_init__(self) -> None:
        HeadDropout(self.p)

    def sites(self, model: nn.Module, survey: Survey) -> Sequence[RecipeSite]:
        found = {name: heads for name, heads in survey.heads.items() if not isinstance(heads, str)}
        if not found:
            raise LayerError(
                f"head_dropout found no layer of {type(model).__name__} whose input is attention heads side by side."
                + "".join(f"\n  {text}" for text in _skipped("head_dropout", survey.heads))
            )
        return [
            RecipeSite(name, HeadDropout(self.p, heads.count, interleaved=heads.interleaved))
            for name, heads in found.items()
        ]

    def warnings(self, model: nn.Module, survey: Survey, sites: Sequence[RecipeSite]) -> Sequence[str]:
        return _skipped("head_dropout", survey.heads)


def _skipped(recipe: str, found: Mapping[str, Any]) -> list[str]:
    """Return a warning for each reason why layers are no sites."""
    reasons: dict[str, list[str]] = {}
    for name, reason in found.items():
        if isinstance(reason, str):
            reasons.setdefault(reason, []).append(name)
    return [f"{recipe} skips {some(names)}: {reason}." for reason, names in reasons.items()]


@dataclass(frozen=True)
class drop_key(Recipe):
    """DropKey: drop keys before the softmax of every attention layer, less in deeper ones.

    Li et al. 2022, arXiv:2208.02646. The sites are the innermost modules that compute attention over positions, which
    running the model shows; their first call gives their order. Rates fall from p at the first to p / L at the last of
    L sites; `inject(..., p_scale="equal")` gives all sites `p`.

    Args:
        p: probability of dropping a key in the first layer, in [0, 1).

    Raises:
        LayerError: no layer computes attention that hooks can see. Flash and flex kernels hide it.

    Example:
        >>> import timm
        >>> model = timm.create_model("vit_tiny_patch16_224", depth=2)
        >>> drop = inject(model, drop_key(p=0.2))
        >>> [(site.name, site.p) for site in drop.sites]
        [('blocks.0.attn', 0.2), ('blocks.1.attn', 0.1)]
    """

    p: float = 0.1
    p_scale: ClassVar[str | None] = "depth_reversed"

    def __post_init__(self) -> None:
        DropKey(self.p)

    def sites(self, model: nn.Module, survey: Survey) -> Sequence[RecipeSite]:
        found = [name for name, scores in survey.scores.items() if not isinstance(scores, str)]
        if not found:
            fact = f"drop_key found no layer of {type(model).__name__} that computes attention that hooks can see."
            fix = 'transformers: build the model with attn_implementation="sdpa"'
            raise LayerError("\n  ".join([fact, fix, *_skipped("drop_key", survey.scores)]))
        return [RecipeSite(name, DropKey(self.p)) for name in found]

    def warnings(self, model: nn.Module, survey: Survey, sites: Sequence[RecipeSite]) -> Sequence[str]:
        return _skipped("drop_key", survey.scores)


@dataclass(frozen=True)
class patch_dropout(Recipe):
    """PatchDropout: in training, a vision transformer sees a random part of the patches, which saves time.

    Liu et al. 2022, arXiv:2208.07220. The site is the last layer before attention that returns the patches with their
    positions. Class and register tokens are kept: those that are equal for two images. Running the model with the
    patches in another order, and with half of them, shows that no later layer depends on their places. With the same
    seed, timm's `patch_drop_rate` keeps the same patches.

    Args:
        p: fraction of the patches to remove, in [0, 1).

    Raises:
        LayerError: the model has no such tokens, or later layers need all of them, as windows, relative positions, RoPE
            and heads for dense prediction do.
        InjectionError: the model already removes patches.

    Example:
        >>> import timm
        >>> model = timm.create_model("vit_tiny_patch16_224", depth=1)
        >>> drop = inject(model, patch_dropout(p=0.5))
        >>> drop.sites[0].name, drop.sites[0].regularizer
        ('pos_drop', 'TokenDropout(p=0.5, prefix=1, remove=True)')
    """

    p: float = 0.5

    def __post_init__(self) -> None:
        TokenDropout(self.p, remove=True)

    def sites(self, model: nn.Module, survey: Survey) -> Sequence[RecipeSite]:
        active = [name for name, module in model.named_modules() if type(module).__name__ == "PatchDropout"]
        if active:
            raise InjectionError(
                f"patch_dropout: the model already has it: {active[0]} is {model.get_submodule(active[0])!r}.\n"
                "  build the model with patch_drop_rate=0.0"
            )
        found = survey.patches
        if isinstance(found, str):
            raise LayerError(
                f"patch_dropout does not apply to {type(model).__name__}: {found}.\n"
                "  zero tokens instead: inject(model, TokenDropout(p=...), layers=...)"
            )
        return [RecipeSite(found.layer, TokenDropout(self.p, found.prefix, remove=True))]


@dataclass(frozen=True)
class neftune(Recipe):
    """NEFTune: noise on the token embeddings while a language model is fine-tuned. A schedule drives `alpha`.

    Jain et al. 2023, arXiv:2310.05914. The site is the layer that first looks up tokens that the model is called with:
    in an encoder-decoder, those of the encoder. A warning names other layers that look them up. With the same seed, the
    noise equals that of transformers' Trainer with `neftune_noise_alpha`, bit for bit.

    Args:
        alpha: scale of the noise; the paper uses 5, 10 and 15.
        attention_mask: whether to spare padding, as in `NEFTune`.

    Raises:
        LayerError: the model looks up no tokens.
        InjectionError: transformers' own NEFTune is active, or no module takes an attention mask.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> size = dict(num_hidden_layers=2, hidden_size=16, intermediate_size=16)
        >>> heads = dict(num_attention_heads=2, num_key_value_heads=2)
        >>> model = LlamaForCausalLM(LlamaConfig(**size, **heads, vocab_size=9))
        >>> inject(model, neftune(alpha=5))
        <Injection 'neftune': 1 site, alpha=5 of 5, step 0 of ConstantSchedule()>
        >>> plan(model, neftune(), on_existing="replace").sites[0].name
        'model.embed_tokens'
    """

    alpha: float = 5.0
    attention_mask: bool = False

    def __post_init__(self) -> None:
        NEFTune(self.alpha, attention_mask=self.attention_mask)

    def sites(self, model: nn.Module, survey: Survey) -> Sequence[RecipeSite]:
        name = next(iter(survey.token_embeddings), "")
        if not name:
            raise LayerError(
                f"neftune found no layer of {type(model).__name__} that looks up the tokens it is called with.\n"
                '  name the embedding: inject(model, NEFTune(alpha=5), layers="tok_embeddings")\n'
                "  find its name:      print(hookdrop.layers(model, only=torch.nn.Embedding))"
            )
        if getattr(model.get_submodule(name), "neftune_noise_alpha", None):
            raise InjectionError(
                f"neftune: transformers' own NEFTune is already active at {name!r}.\n"
                "  remove neftune_noise_alpha from the TrainingArguments"
            )
        return [RecipeSite(name, NEFTune(self.alpha, attention_mask=self.attention_mask))]

    def warnings(self, model: nn.Module, survey: Survey, sites: Sequence[RecipeSite]) -> Sequence[str]:
        first, *others = [repr(name) if name else "the model itself" for name in survey.token_embeddings]
        fact = f"neftune hooks {first} alone, although the tokens are also looked up in {', '.join(others)}."
        return [f"{fact}\n  hook other layers: inject(model, NEFTune(alpha=5), layers=[...])"] if others else []
