"""Find where residual branches end in the blocks of torchvision, timm and transformers.

A rule recognizes a block by the modules inside it, not by its class name, so one rule covers every block with the same
structure. It returns the names, within the block, of the last layer of each branch: an empty tuple if the block has no
residual branch (an EfficientNet block that changes the resolution), and None if it does not recognize the block.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from hookdrop.recipes.transformer_layers import count_calls, is_decoder, transformer_ends
from hookdrop.utils.select import Layer, named_layers

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


# One row for each structure: an example, the parts of the block, the last layers of its branches (the parts themselves
# if empty), and an attribute of blocks to which the row does not apply.
_STRUCTURES: tuple[tuple[str, str, str, str], ...] = (
    ("torchvision's ViT", "ln_1 self_attention dropout ln_2 mlp", "dropout mlp", ""),
    (
        "query transformers of BLIP-2",
        "attention.output.dropout output_query.dropout",
        "attention.output.dropout crossattention.output.dropout output.dropout output_query.dropout",
        "",
    ),
    (
        "BERT, RoBERTa, ELECTRA",
        "attention.output.dropout output.dropout",
        "attention.output.dropout crossattention.output.dropout output.dropout",
        "temporal_attention",  # TimeSformer
    ),
    # One dropout module ends both branches. InternVL calls it for one of them only.
    ("ViT of transformers", "layernorm_before attention layernorm_after mlp dropout", "dropout", "lambda_1"),
    # In MMS, `adapter_layer` is another branch.
    ("Wav2Vec2", "attention layer_norm feed_forward final_layer_norm", "attention feed_forward adapter_layer", ""),
    ("XLM-RoBERTa XL", "attention.output.dropout output.dense LayerNorm", "attention.output.dropout output.dense", ""),
    ("MPNet", "attention.attn attention.dropout output.dropout", "attention.dropout output.dropout", ""),
    ("ALBERT", "attention.output_dropout ffn_output", "", ""),
    ("SqueezeBERT", "attention post_attention.dropout output.dropout", "post_attention.dropout output.dropout", ""),
    ("FNet", "fourier.self output.dropout", "", ""),
    ("Funnel", "attention.hidden_dropout ffn.dropout ffn.layer_norm", "attention.hidden_dropout ffn.dropout", ""),
    ("BLOOM, Falcon", "self_attention.dense mlp.dense_4h_to_h", "", ""),
    ("MPT", "norm_1 norm_2 resid_attn_dropout ffn.down_proj", "resid_attn_dropout ffn.down_proj", ""),
    ("RF-DETR", "self_attn cross_attn mlp.fc2 layer_norm", "self_attn cross_attn mlp.fc2", ""),
    ("TimesFM", "self_attn input_layernorm mlp.layer_norm mlp.down_proj", "self_attn mlp.down_proj", ""),
    ("attention of VQ-GANs", "norm q k v proj_out", "proj_out", ""),
    ("PatchTSMixer", "norm mlp gating_block", "gating_block", ""),
    (
        "Gemma 4",
        "per_layer_input_gate post_attention_layernorm post_feedforward_layernorm post_per_layer_input_norm",
        "post_attention_layernorm post_feedforward_layernorm post_per_layer_input_norm",
        "altup",  # Gemma 3n does not add plain residual branches
    ),
    (
        "EmbeddingGemma 2",
        "post_attention_layernorm post_feedforward_layernorm ple_block.post_per_layer_input_norm",
        "",
        "",
    ),
    ("Inkling", "self_attn mlp attn_sconv mlp_sconv", "attn_sconv mlp_sconv", ""),
    ("DAB-DETR", "self_attn_query_content_proj self_attn self_attn_layer_norm", "self_attn", ""),
    ("DAB-DETR", "cross_attn_query_content_proj cross_attn cross_attn_layer_norm", "cross_attn", ""),
)
# The first match wins: a library's own stochastic depth attributes come before the structure of its blocks.
_RULES: tuple[Rule, ...] = (
    _transformers_swin,
    _torchvision,
    _timm,
    _resnet,
    *(_made_of(parts, ends or parts, unless) for _, parts, ends, unless in _STRUCTURES),
    _levit,
    transformer_ends,
)
