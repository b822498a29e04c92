"""Where the residual branches of other people's blocks end.

A block is known by what is in it, not by its class's name, so that the many that are written alike are one rule. Each
rule gives the names, within the block, of the last layer of each of its branches: none if the block has no branch (an
EfficientNet block that changes the resolution), and None if it is no block of that kind.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator

from torch import nn

from hookdrop.injection.select import Layer, walk
from hookdrop.utils.tables import some

Ends = tuple[str, ...]


def blocks(model: nn.Module) -> Iterator[tuple[Layer, Ends]]:
    """The residual blocks of a model in `named_modules()` order, and where their branches end."""
    for layer in walk(model):
        ends = branch_ends(layer.module)
        if ends is not None:
            yield layer, ends


def branch_ends(module: nn.Module) -> Ends | None:
    """The names of the last layers of a block's residual branches; None if it is no block that is known."""
    return next((ends for rule in _RULES if (ends := rule(module)) is not None), None)


def decoder_ends(module: nn.Module) -> Ends | None:
    """The same for the layers of decoder-only transformers alone."""
    return next((ends for rule in _DECODERS if (ends := rule(module)) is not None), None)


def _transformers_swin(block: nn.Module) -> Ends | None:
    """`drop_path` for attention; the MLP's branch is added as it is."""
    found = hasattr(block, "shift_size") and has(block, "drop_path", "intermediate", "output", "layernorm_after")
    return ("drop_path", "output") if found else None


def left_out(model: nn.Module, known: Collection[str]) -> list[str]:
    """A warning for each list of layers in which some are known and others are not."""
    found = []
    for layer in walk(model):
        if not isinstance(layer.module, nn.ModuleList):
            continue
        names = {f"{layer.name}.{name}": child for name, child in layer.module.named_children()}
        others = [name for name, child in names.items() if name not in known and any(child.children())]
        if len(others) < len(names) and any(name in known for name in names) and others:
            found.append(
                f"{len(others)} of the {len(names)} layers of {layer.name!r} are of a kind that the recipe does not "
                f"know, and get nothing: {some(others)}."
            )
    return found


def _torchvision(block: nn.Module) -> Ends | None:
    """ConvNeXt, EfficientNet, Swin, MaxViT: one module, called for each branch."""
    names = [name for name in ("stochastic_depth", "stochastic_dropout") if has(block, name)]
    if not names:
        return None
    return tuple(names) if getattr(block, "use_res_connect", True) else ()


def _timm(block: nn.Module) -> Ends | None:
    """`drop_path`, `drop_path1`, ...: an Identity while the rate is 0; None in ResNets and some others."""
    unset = [name for name, value in vars(block).items() if value is None]
    names = [name for name in (*block._modules, *unset) if re.fullmatch(r"(\w+_)?drop_path\d*", name)]
    if not names:
        return None
    if not _timm_adds(block):
        return ()
    if getattr(block, names[0]) is None:
        return _last(block, *_TIMM_ENDS)
    return tuple(name for name in names if has(block, name))


_TIMM_ENDS = ("conv_pwl", "se", "bn3", "bn2", "conv3", "conv2", "stack", "attn", "conv_concat")
"""The last layer of a branch without `drop_path`, the first that is there: ReXNet, ResNet, SKNet, Xception, VoVNet."""


def _timm_adds(block: nn.Module) -> bool:
    """Whether a skip goes around the block; one that changes the shape may have none."""
    if any(getattr(block, flag, True) is False for flag in ("has_skip", "use_shortcut", "add_identity", "residual")):
        return False
    if hasattr(block, "no_skip"):  # Xception, where no `shortcut` means that the skip is the identity
        return not block.no_skip
    # In RegNet an identity skip is an Identity, and no module is no skip; everywhere else no module is the identity.
    regnet = has(block, "conv3.bn", "act3") and isinstance(getattr(block, "drop_path", None), nn.Identity)
    flags = ("shortcut", "identity", "downsample") if regnet else ("shortcut", "identity")
    return all(getattr(block, name, block) is not None for name in flags)


def _torchvision_resnet(block: nn.Module) -> Ends | None:
    """Convolutions with norms are a branch only where something is made for the skip, if only None."""
    adds = any(hasattr(block, name) for name in ("downsample", "shortcut"))
    if not adds or not has(block, "conv1", "bn1", "conv2", "bn2") or not norms_follow(block):
        return None
    return _last(block, *_GATES, "bn3", "bn2")


_GATES = ("se", "cbam", "attention", "attn", "eca")
"""What comes between the last norm of a branch and the addition."""


def norms_follow(block: nn.Module) -> bool:
    """Whether each convolution comes before its norm; if not, the block begins with a norm and ends otherwise."""
    names = list(block._modules)
    pairs = [(f"conv{i}", f"bn{i}") for i in (1, 2, 3) if has(block, f"conv{i}", f"bn{i}")]
    return all(names.index(conv) < names.index(norm) for conv, norm in pairs)


def _torchvision_vit(block: nn.Module) -> Ends | None:
    return ("dropout", "mlp") if has(block, "ln_1", "self_attention", "dropout", "ln_2", "mlp") else None


def _bert(block: nn.Module) -> Ends | None:
    """BERT, RoBERTa, ELECTRA, and the ViTs that are written like them."""
    ends = ("attention.output.dropout", "output.dropout")
    across = ("crossattention.output.dropout",) if has(block, "crossattention.output.dropout") else ()
    return (ends[0], *across, ends[1]) if has(block, *ends) else None


def _transformers_vit(block: nn.Module) -> Ends | None:
    """One dropout, called at the end of each branch."""
    known = has(block, "layernorm_before", "attention", "layernorm_after", "mlp", "dropout")
    return ("dropout",) if known and not hasattr(block, "lambda_1") else None  # InternVL calls it for one of the two


def _clip(block: nn.Module) -> Ends | None:
    return ("self_attn", "mlp") if has(block, "layer_norm1", "self_attn", "layer_norm2", "mlp") else None


def _t5(block: nn.Module) -> Ends | None:
    inner = any(has(block, name) for name in ("SelfAttention", "EncDecAttention", "DenseReluDense"))
    return ("dropout",) if inner and has(block, "dropout") else None


def _norms_after(block: nn.Module) -> Ends | None:
    """Gemma 2, OLMo 2: the branch ends with a norm."""
    for ends in (
        ("post_attention_layernorm", "post_feedforward_layernorm"),
        ("post_self_attn_layernorm", "post_mlp_layernorm"),
    ):
        if has(block, "self_attn", "mlp", *ends) and not has(block, "altup"):
            return ends
    return None


def _llama(block: nn.Module) -> Ends | None:
    """LLaMA, Mistral, Qwen, Phi, and all that are written like them."""
    mixer = _last(block, "self_attn", "linear_attn", "cross_attn")
    known = mixer is not None and has(block, "mlp", "input_layernorm") and not has(block, "altup")  # Gemma 3n adds more
    return (*mixer, "mlp") if mixer is not None and known else None


def _gpt(block: nn.Module) -> Ends | None:
    """GPT-2 and GPT-Neo; GPT-NeoX."""
    for ends, norm in ((("attn", "mlp"), "ln_1"), (("attention", "mlp"), "input_layernorm")):
        if has(block, *ends, norm):
            return (ends[0], "crossattention", ends[1]) if has(block, "crossattention") else ends
    return None


def _last(block: nn.Module, *names: str) -> Ends | None:
    return next(((name,) for name in names if has(block, name)), None)


def has(module: nn.Module, *names: str) -> bool:
    """Whether all of these are modules inside `module`."""
    return all(_submodule(module, name) is not None for name in names)


def _submodule(module: nn.Module, name: str) -> nn.Module | None:
    for part in name.split("."):
        found = module._modules.get(part)
        if found is None:
            return None
        module = found
    return module


_Rule = Callable[[nn.Module], Ends | None]
_DECODERS: tuple[_Rule, ...] = (_norms_after, _llama, _gpt)
# The first that fits: what a library says of its own blocks goes before what they are made of.
_RULES: tuple[_Rule, ...] = (
    _transformers_swin,
    _torchvision,
    _timm,
    _torchvision_resnet,
    _torchvision_vit,
    _bert,
    _transformers_vit,
    _clip,
    _t5,
    *_DECODERS,
)
