"""PatchDropout: remove image patches, so that a vision transformer is trained on fewer tokens."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from hookdrop.errors import InjectionError, LayerError
from hookdrop.injection.plan import Plan
from hookdrop.recipes.recipe import Factory, Recipe, RecipeSite, plan_sites, require_sites
from hookdrop.regularizers import TokenDropout
from hookdrop.regularizers.positions import why_tokens_must_stay
from hookdrop.schedules import Schedule
from hookdrop.utils.select import Layer, named_layers


@Recipe
def patch_dropout(
    model: nn.Module,
    p: float = 0.5,
    regularizer: Factory | None = None,
    *,
    schedule: Schedule | str | None = None,
    total_steps: int | None = None,
    name: str = "patch_dropout",
    on_existing: str = "error",
    portable: bool = False,
    example_input: Any = None,
) -> Plan:
    """Inject PatchDropout: in training, a vision transformer sees a random part of the patches, which saves time.

    The site is the output of the position embedding. Class and register tokens are kept. Liu et al. 2022,
    arXiv:2208.07220; with the same seed, the same patches are kept as by timm's `patch_drop_rate`.

    Args:
        model: a ViT or DeiT of timm, torchvision's ViT, or ViT, DeiT, DINOv2, CLIP or SigLIP of transformers.
        p: fraction of the patches to remove, in [0, 1).
        regularizer: called with `p=` and `prefix=` instead of `TokenDropout(..., remove=True)`.
        schedule, total_steps, name, on_existing, portable, example_input: as in `inject`.

    Raises:
        LayerError: the model is no such vision transformer, or later layers need all tokens: windows, relative
            positions, RoPE, and heads for dense prediction.
        InjectionError: the model already removes patches.

    Example:
        >>> import timm
        >>> model = timm.create_model("vit_tiny_patch16_224", depth=1)
        >>> drop = patch_dropout(model, p=0.5)
        >>> drop.sites[0].name, drop.sites[0].regularizer
        ('patch_drop', 'TokenDropout(p=0.5, prefix=1, remove=True)')
    """
    is_vision = any("patch" in f"{layer.name} {type(layer.module).__name__}".lower() for layer in named_layers(model))
    if is_vision and (reason := why_tokens_must_stay(model)):
        raise LayerError(
            f"patch_dropout: {reason}.\n  zero tokens instead: inject(model, TokenDropout(p=...), layers=...)"
        )
    sites = [site for layer in named_layers(model) if (site := _site(layer)) is not None]
    wanted = "patch_drop of timm's ViTs, encoder.dropout of torchvision's, or embeddings of transformers'"
    require_sites("patch_dropout", model, [site.name for site in sites], wanted)
    make = partial(TokenDropout, remove=True) if regularizer is None else regularizer
    return plan_sites(
        model,
        [RecipeSite(site.name, {"p": p, "prefix": site.prefix}) for site in sites],
        make,
        schedule=schedule,
        total_steps=total_steps,
        name=name,
        on_existing=on_existing,
        portable=portable,
        example_input=example_input,
    )


class _Site(NamedTuple):
    name: str
    prefix: int
    """The number of class and register tokens."""


def _site(layer: Layer) -> _Site | None:
    """Return the layer that ends the position embedding, if `layer` is a vision transformer or such an embedding."""
    module, inside = layer.module, f"{layer.name}." if layer.name else ""
    if "patch_drop" in dict(module.named_children()):  # timm
        if not isinstance(module.patch_drop, nn.Identity):
            raise InjectionError(
                f"patch_dropout: the model already has it: {inside}patch_drop is {module.patch_drop!r}.\n"
                "  build the model with patch_drop_rate=0.0"
            )
        return _Site(f"{inside}patch_drop", int(getattr(module, "num_prefix_tokens", 1)))
    if isinstance(getattr(module, "pos_embedding", None), Tensor) and hasattr(module, "dropout"):  # torchvision
        return _Site(f"{inside}dropout", 1)
    patches = _patch_count(module)
    positions = getattr(module, "position_embeddings", getattr(module, "position_embedding", None))
    if patches is None or positions is None:
        return None
    table = positions.weight if isinstance(positions, nn.Embedding) else positions
    registers = getattr(module, "register_tokens", None)
    return _Site(layer.name, table.shape[-2] - patches + (0 if registers is None else registers.shape[-2]))


def _patch_count(module: nn.Module) -> int | None:
    """The number of patches of an embedding of transformers; None for other modules."""
    embedding = getattr(module, "patch_embeddings", None)
    count = getattr(module if embedding is None else embedding, "num_patches", None)
    return count if isinstance(count, int) and hasattr(module, "forward") else None
