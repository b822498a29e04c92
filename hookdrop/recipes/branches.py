"""Where the residual branches of other people's blocks end.

A block is recognized by the modules inside it, not by its class name, so one rule covers all blocks that are written
the same way. A rule gives the names, within the block, of the last layer of each branch: none if the block has no
branch (an EfficientNet block that changes the resolution), and None if the rule does not recognize the block.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterator

from torch import nn

from hookdrop.injection.select import Layer, named_layers
from hookdrop.utils.tables import some

Ends = tuple[str, ...]
Rule = Callable[[nn.Module], Ends | None]


def blocks(model: nn.Module) -> Iterator[tuple[Layer, Ends]]:
    """The residual blocks of a model in `named_modules()` order, and where their branches end."""
    for layer in named_layers(model):
        ends = branch_ends(layer.module)
        if ends is not None:
            yield layer, ends


def branch_ends(module: nn.Module) -> Ends | None:
    """The names of the last layers of a block's residual branches; None if no rule recognizes the block."""
    return next((ends for rule in _RULES if (ends := rule(module)) is not None), None)


def decoder_ends(module: nn.Module) -> Ends | None:
    """The same for the layers of decoder-only transformers."""
    return next((ends for rule in _DECODERS if (ends := rule(module)) is not None), None)


def skipped_layers(model: nn.Module, known: Collection[str]) -> list[str]:
    """A warning for each list of layers of which a recipe recognizes some and not others."""
    found = []
    for layer in named_layers(model):
        if not isinstance(layer.module, nn.ModuleList):
            continue
        names = {f"{layer.name}.{name}": child for name, child in layer.module.named_children()}
        others = [name for name, child in names.items() if name not in known and any(child.children())]
        if others and any(name in known for name in names):
            found.append(
                f"skipped {len(others)} of the {len(names)} layers of {layer.name!r}, which the recipe does not "
                f"recognize: {some(others)}."
            )
    return found


def has(module: nn.Module, *names: str) -> bool:
    """Whether all of these are modules inside `module`."""
    try:
        return all(module.get_submodule(name) is not None for name in names)
    except AttributeError:
        return False


def norms_follow(block: nn.Module) -> bool:
    """Whether each convolution comes before its norm; in a block that begins with a norm, a convolution ends it."""
    names = [name for name, _ in block.named_modules(remove_duplicate=False)]
    pairs = [(f"conv{i}", f"bn{i}") for i in (1, 2, 3) if has(block, f"conv{i}", f"bn{i}")]
    return all(names.index(conv) < names.index(norm) for conv, norm in pairs)


def _made_of(parts: str, ends: str, unless: str = "") -> Rule:
    """The rule for blocks with all of these parts and without the attribute `unless`; absent ends are left out."""

    def rule(block: nn.Module) -> Ends | None:
        if not has(block, *parts.split()) or (unless and hasattr(block, unless)):
            return None
        return tuple(end for end in ends.split() if has(block, end))

    return rule


def _transformers_swin(block: nn.Module) -> Ends | None:
    """`drop_path` for attention; the MLP's branch is added as it is."""
    known = hasattr(block, "shift_size") and has(block, "drop_path", "intermediate", "output", "layernorm_after")
    return ("drop_path", "output") if known else None


def _torchvision(block: nn.Module) -> Ends | None:
    """ConvNeXt, EfficientNet, Swin, MaxViT: one module, called for each branch."""
    names = [name for name in ("stochastic_depth", "stochastic_dropout") if has(block, name)]
    if not names:
        return None
    return tuple(names) if getattr(block, "use_res_connect", True) else ()


def _timm(block: nn.Module) -> Ends | None:
    """`drop_path`, `drop_path1`, ...: an Identity while the rate is 0; None in ResNets and some others."""
    children = [name for name, _ in block.named_children()]
    unset = [name for name, value in vars(block).items() if value is None]
    names = [name for name in (*children, *unset) if re.fullmatch(r"(\w+_)?drop_path\d*", name)]
    if not names:
        return None
    if not _timm_adds(block):
        return ()
    if getattr(block, names[0]) is None:
        return _first(block, *_TIMM_ENDS)
    return tuple(name for name in names if has(block, name))


_TIMM_ENDS = ("conv_pwl", "se", "bn3", "bn2", "conv3", "conv2", "stack", "attn", "conv_concat")
"""The last layer of a branch without `drop_path`, the first that exists: ReXNet, ResNet, SKNet, Xception, VoVNet."""


def _timm_adds(block: nn.Module) -> bool:
    """Whether the block has a skip; one that changes the shape may have none."""
    if any(getattr(block, flag, True) is False for flag in ("has_skip", "use_shortcut", "add_identity", "residual")):
        return False
    if hasattr(block, "no_skip"):  # Xception, where no `shortcut` means that the skip is the identity
        return not block.no_skip
    # In RegNet an identity skip is an Identity, and no module is no skip; everywhere else no module is the identity.
    regnet = has(block, "conv3.bn", "act3") and isinstance(getattr(block, "drop_path", None), nn.Identity)
    flags = ("shortcut", "identity", "downsample") if regnet else ("shortcut", "identity")
    return all(getattr(block, name, block) is not None for name in flags)


def _resnet(block: nn.Module) -> Ends | None:
    """Torchvision's ResNets: convolutions with norms are a branch only if the block has an attribute for its skip."""
    adds = any(hasattr(block, name) for name in ("downsample", "shortcut"))
    if not adds or not has(block, "conv1", "bn1", "conv2", "bn2") or not norms_follow(block):
        return None
    return _first(block, *_GATES, "bn3", "bn2")


_GATES = ("se", "cbam", "attention", "attn", "eca")
"""What comes between the last norm of a branch and the addition."""


def _bart(block: nn.Module) -> Ends | None:
    """Whisper, BART, and the encoder-decoders that are written like them."""
    if not has(block, "self_attn", "self_attn_layer_norm", "fc1", "fc2", "final_layer_norm"):
        return None
    # Pegasus-X calls fc2 for two branches. In the others the first axis is not the sample: OPT and the packed audio of
    # Qwen2.5-Omni, then Mask2Former and FSMT.
    other = any(hasattr(block, name) for name in ("stagger_blocks_this_layer", "do_layer_norm_before", "cross_attn"))
    packed = "cu_seqlens" in inspect.signature(block.forward).parameters
    if other or packed or hasattr(block.self_attn, "encoder_decoder_attention"):
        return None
    return tuple(name for name in ("self_attn", "encoder_attn_text", "encoder_attn", "fc2") if has(block, name))


def _first(block: nn.Module, *names: str) -> Ends | None:
    return next(((name,) for name in names if has(block, name)), None)


_DECODERS: tuple[Rule, ...] = (
    # Gemma 2, OLMo 2: a norm ends the branch. Gemma 3n (`altup`) adds more than its branches.
    *(
        _made_of(f"self_attn mlp {ends}", ends, unless="altup")
        for ends in (
            "post_attention_layernorm post_feedforward_layernorm",
            "post_self_attn_layernorm post_mlp_layernorm",
        )
    ),
    # LLaMA, Mistral, Qwen, Phi, ...
    *(
        _made_of(f"{mixer} mlp input_layernorm", f"{mixer} mlp", unless="altup")
        for mixer in ("self_attn", "linear_attn", "cross_attn")
    ),
    _made_of("attn mlp ln_1", "attn crossattention mlp"),  # GPT-2, GPT-Neo
    _made_of("attention mlp input_layernorm", "attention crossattention mlp"),  # GPT-NeoX
)
# The first that fits. Attributes that a library made for stochastic depth come before what its blocks are made of.
_RULES: tuple[Rule, ...] = (
    _transformers_swin,
    _torchvision,
    _timm,
    _resnet,
    _made_of("ln_1 self_attention dropout ln_2 mlp", "dropout mlp"),  # torchvision's ViT
    # BERT, RoBERTa, ELECTRA, and the ViTs that are written like them.
    _made_of(
        "attention.output.dropout output.dropout",
        "attention.output.dropout crossattention.output.dropout output.dropout",
    ),
    # ViT of transformers: one dropout ends each branch. InternVL (`lambda_1`) calls it for one of the two.
    _made_of("layernorm_before attention layernorm_after mlp dropout", "dropout", unless="lambda_1"),
    _made_of("layer_norm1 self_attn layer_norm2 mlp", "self_attn mlp"),  # CLIP
    _bart,
    # Wav2Vec2, HuBERT, WavLM; an `adapter_layer` is a branch of MMS.
    _made_of("attention layer_norm feed_forward final_layer_norm", "attention feed_forward adapter_layer"),
    *(_made_of(f"{part} dropout", "dropout") for part in ("SelfAttention", "EncDecAttention", "DenseReluDense")),  # T5
    *_DECODERS,
)
