"""Find where residual branches end in the blocks of torchvision, timm and transformers.

A rule recognizes a block by the modules inside it, not by its class name, so one rule covers every block with the same
structure. It returns the names, within the block, of the last layer of each branch: an empty tuple if the block has no
residual branch (an EfficientNet block that changes the resolution), and None if it does not recognize the block.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch import nn

from hookdrop.injection.select import Layer, named_layers
from hookdrop.recipes.transformer_layers import count_calls, is_decoder, transformer_ends
from hookdrop.utils.tables import some

Ends = tuple[str, ...]
Rule = Callable[[nn.Module], Ends | None]


def blocks(model: nn.Module) -> Iterator[tuple[Layer, Ends]]:
    """Yield the residual blocks of a model in `named_modules()` order, with the ends of their branches."""
    for layer in named_layers(model):
        ends = branch_ends(layer.module)
        if ends is not None:
            yield layer, ends


def branch_ends(module: nn.Module) -> Ends | None:
    """Return the names of the last layers of a block's residual branches, or None if no rule recognizes the block."""
    return next((ends for rule in _RULES if (ends := rule(module)) is not None), None)


def decoder_ends(module: nn.Module) -> Ends | None:
    """Like `branch_ends`, for the layers of decoder-only transformers."""
    return transformer_ends(module) if is_decoder(module) else None


def skipped_layers(model: nn.Module, known: Collection[str]) -> list[str]:
    """Return a warning for each `ModuleList` in which the recipe recognizes only some of the layers."""
    found = []
    for layer in named_layers(model):
        names = _layers_of(layer)
        others = [name for name, child in names.items() if name not in known and any(child.children())]
        if others and any(name in known for name in names):
            found.append(
                f"skipped {len(others)} of {len(names)} layers in {layer.name!r}: the recipe does not recognize "
                f"{some(others)}."
            )
    return found


def skipped_stacks(model: nn.Module, known: Collection[str], not_samples: Collection[str]) -> list[str]:
    """Return a warning for each `ModuleList` of attention layers in which the recipe hooks none.

    Args:
        model: the model.
        known: the names of the blocks with sites.
        not_samples: the names of the recognized blocks in which the first axis is not the batch.
    """
    found: list[str] = []
    inside = tuple(f"{name}." for name in (*known, *not_samples))
    for layer in named_layers(model):
        names = [name for name, child in _layers_of(layer).items() if _mixes_tokens(child)]
        if not names or layer.name.startswith(inside):
            continue
        if any(f"{one}.".startswith(tuple(f"{name}." for name in names)) for one in known):
            parts = [part for name in names for part in _branches_of(name, model, known)]
            if parts:
                found.append(f"skipped parts of layers in {layer.name!r}: the recipe does not recognize {some(parts)}.")
            continue
        reason = "the recipe does not recognize them."
        if any(one.startswith(tuple(names)) for one in not_samples):
            reason = 'the first axis of their branches is not the batch. mode="batch" includes them.'
        found.append(f"skipped all {len(names)} layers in {layer.name!r}: {reason}")
        inside += tuple(f"{name}." for name in names)
    return found


def _branches_of(name: str, model: nn.Module, known: Collection[str]) -> list[str]:
    """Return the children of a layer that are a branch by their class name, and that contain no known block."""
    if name in known:
        return []
    parts = {f"{name}.{child}": module for child, module in model.get_submodule(name).named_children()}
    branches = [part for part, module in parts.items() if _BRANCH.search(type(module).__name__)]
    return [part for part in branches if not any(f"{one}.".startswith(f"{part}.") for one in known)]


_BRANCH = re.compile("Attention|Mixer|Mamba|MLP|FeedForward|FFN")


def _layers_of(layer: Layer) -> dict[str, nn.Module]:
    children = layer.module.named_children() if isinstance(layer.module, nn.ModuleList) else ()
    return {f"{layer.name}.{name}": child for name, child in children}


def _mixes_tokens(module: nn.Module) -> bool:
    """Whether the module has an attention or another mixer inside, by class name."""
    parts = [type(part).__name__ for name, part in module.named_modules() if name]
    return any(re.search("Attention|Mixer|Mamba", part) for part in parts)


def has_submodules(module: nn.Module, *names: str) -> bool:
    """Whether `module` contains a submodule under each of these names."""
    try:
        return all(module.get_submodule(name) is not None for name in names)
    except AttributeError:
        return False


def norms_follow_convs(block: nn.Module) -> bool:
    """Whether each convolution comes before its norm. A pre-activation block ends with a convolution instead."""
    names = [name for name, _ in block.named_modules(remove_duplicate=False)]
    pairs = [(f"conv{i}", f"bn{i}") for i in (1, 2, 3) if has_submodules(block, f"conv{i}", f"bn{i}")]
    return all(names.index(conv) < names.index(norm) for conv, norm in pairs)


def _made_of(parts: str, ends: str, unless: str = "") -> Rule:
    """Return the rule for blocks with all of these parts and without the attribute `unless`; it skips absent ends."""

    def rule(block: nn.Module) -> Ends | None:
        if not has_submodules(block, *parts.split()) or (unless and hasattr(block, unless)):
            return None
        return tuple(end for end in ends.split() if has_submodules(block, end))

    return rule


def _transformers_swin(block: nn.Module) -> Ends | None:
    """Swin of transformers: `drop_path` ends the attention branch only. In Swin v2 it ends both."""
    if not hasattr(block, "shift_size") or not has_submodules(block, "drop_path", "layernorm_after"):
        return None
    cls: Any = type(block)
    mlp = _first(block, "mlp", "output")
    return ("drop_path", *mlp) if mlp and count_calls(cls, "drop_path") == 1 else None


def _torchvision(block: nn.Module) -> Ends | None:
    """ConvNeXt, EfficientNet, Swin and MaxViT of torchvision: the block calls one module for each branch."""
    names = [name for name in ("stochastic_depth", "stochastic_dropout") if has_submodules(block, name)]
    if not names:
        return None
    return tuple(names) if getattr(block, "use_res_connect", True) else ()


def _timm(block: nn.Module) -> Ends | None:
    """`drop_path`, `drop_path1`, ...: at rate 0 an Identity, or None in ResNets and some other models."""
    children = [name for name, _ in block.named_children()]
    unset = [name for name, value in vars(block).items() if value is None]
    names = [name for name in (*children, *unset) if re.fullmatch(r"(\w+_)?drop_path\d*", name)]
    if not names or any(name in children for name in _UNDROPPED):
        return None
    if not _timm_has_skip(block):
        return ()
    if getattr(block, names[0]) is None:
        return _first(block, *_TIMM_ENDS)
    return tuple(name for name in names if has_submodules(block, name))


_UNDROPPED = ("temporal_attention", "message_attn")
"""Branches that `drop_path` does not end, in TimeSformer and X-CLIP of transformers."""
_TIMM_ENDS = ("conv_pwl", "se", "bn3", "bn2", "conv3", "conv2", "stack", "attn", "conv_concat")
"""Candidates for the last layer of a branch whose `drop_path` is None (ReXNet, ResNet, SKNet, Xception, VoVNet)."""


def _timm_has_skip(block: nn.Module) -> bool:
    """Whether the block has a skip connection. Blocks that change the shape may not have one."""
    if any(getattr(block, flag, True) is False for flag in ("has_skip", "use_shortcut", "add_identity", "residual")):
        return False
    if hasattr(block, "no_skip"):  # Xception: `shortcut = None` is an identity skip
        return not block.no_skip
    # `downsample = None` means no skip in RegNet, and an identity skip in all other models.
    regnet = has_submodules(block, "conv3.bn", "act3") and isinstance(getattr(block, "drop_path", None), nn.Identity)
    flags = ("shortcut", "identity", "downsample") if regnet else ("shortcut", "identity")
    return all(getattr(block, name, block) is not None for name in flags)


def _resnet(block: nn.Module) -> Ends | None:
    """ResNets of torchvision. Convolutions and norms form a residual branch only if the block has a skip attribute."""
    adds = any(hasattr(block, name) for name in ("downsample", "shortcut"))
    if not adds or not has_submodules(block, "conv1", "bn1", "conv2", "bn2") or not norms_follow_convs(block):
        return None
    return _first(block, *_GATES, "bn3", "bn2")


_GATES = ("se", "cbam", "attention", "attn", "eca")
"""Attention modules between the last norm of a branch and the addition."""


def _levit(block: nn.Module) -> Ends | None:
    """LeViT: a block for each branch."""
    return ("module",) if hasattr(block, "drop_rate") and list(dict(block.named_children())) == ["module"] else None


def _first(block: nn.Module, *names: str) -> Ends | None:
    return next(((name,) for name in names if has_submodules(block, name)), None)


# The first match wins: a library's own stochastic depth attributes come before the structure of its blocks.
_RULES: tuple[Rule, ...] = (
    _transformers_swin,
    _torchvision,
    _timm,
    _resnet,
    _made_of("ln_1 self_attention dropout ln_2 mlp", "dropout mlp"),  # torchvision's ViT
    _made_of(
        "attention.output.dropout output_query.dropout",  # the query transformers of BLIP-2 and InstructBLIP
        "attention.output.dropout crossattention.output.dropout output.dropout output_query.dropout",
    ),
    # BERT, RoBERTa, ELECTRA, and ViTs with the same structure.
    _made_of(
        "attention.output.dropout output.dropout",
        "attention.output.dropout crossattention.output.dropout output.dropout",
        unless="temporal_attention",
    ),
    # ViT of transformers: one dropout module ends both branches. InternVL (`lambda_1`) calls it for one of them only.
    _made_of("layernorm_before attention layernorm_after mlp dropout", "dropout", unless="lambda_1"),
    # Wav2Vec2, HuBERT, WavLM. In MMS, `adapter_layer` is another branch.
    _made_of("attention layer_norm feed_forward final_layer_norm", "attention feed_forward adapter_layer"),
    # The parts of the layer add the branches, or there is one more branch.
    _made_of("attention.output.dropout output.dense LayerNorm", "attention.output.dropout output.dense"),  # XLM-R XL
    _made_of("attention.attn attention.dropout output.dropout", "attention.dropout output.dropout"),  # MPNet
    _made_of("attention.output_dropout ffn_output", "attention.output_dropout ffn_output"),  # ALBERT
    _made_of("attention post_attention.dropout output.dropout", "post_attention.dropout output.dropout"),  # SqueezeBERT
    _made_of("fourier.self output.dropout", "fourier.self output.dropout"),  # FNet
    _made_of("attention.hidden_dropout ffn.dropout ffn.layer_norm", "attention.hidden_dropout ffn.dropout"),  # Funnel
    _made_of("self_attention.dense mlp.dense_4h_to_h", "self_attention.dense mlp.dense_4h_to_h"),  # BLOOM, Falcon
    _made_of("norm_1 norm_2 resid_attn_dropout ffn.down_proj", "resid_attn_dropout ffn.down_proj"),  # MPT
    _made_of("self_attn cross_attn mlp.fc2 layer_norm", "self_attn cross_attn mlp.fc2"),  # RF-DETR
    _made_of("self_attn input_layernorm mlp.layer_norm mlp.down_proj", "self_attn mlp.down_proj"),  # TimesFM
    _made_of("norm q k v proj_out", "proj_out"),  # the attention of VQ-GANs
    _made_of("norm mlp gating_block", "gating_block"),  # PatchTSMixer
    _made_of(
        "per_layer_input_gate post_attention_layernorm post_feedforward_layernorm post_per_layer_input_norm",
        "post_attention_layernorm post_feedforward_layernorm post_per_layer_input_norm",  # Gemma 4
        unless="altup",
    ),
    _made_of(
        "post_attention_layernorm post_feedforward_layernorm ple_block.post_per_layer_input_norm",  # EmbeddingGemma 2
        "post_attention_layernorm post_feedforward_layernorm ple_block.post_per_layer_input_norm",
    ),
    _made_of("self_attn mlp attn_sconv mlp_sconv", "attn_sconv mlp_sconv"),  # Inkling
    *(  # DAB-DETR
        _made_of(f"{name}_query_content_proj {name} {name}_layer_norm", name) for name in ("self_attn", "cross_attn")
    ),
    _levit,
    transformer_ends,
)
