"""Find where the residual branches of a transformer layer end, if its `forward` adds each branch itself.

The names of the children tell their roles: attention or another mixer, MLP, norm. A layer is recognized only if every
child with parameters has a role, the norms fit the branches, and the source of `forward` has an addition for each
branch. So a layer with another branch, or with a gate or a convolution after a branch, is refused.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from torch import nn

from hookdrop.recipes.source_analysis import dotted_path, reachable_methods

_MIXER = re.compile(
    r"(self_|linear_|temporal_)?(attn|attention|att)|(encoder|cross)_?(attn|attention)|encoder_attn_text|"
    r"SelfAttention|LocalSelfAttention|TransientGlobalSelfAttention|EncDecAttention|multi_head_attention|temporal_block|"
    r"mixer|mamba|conv|conv_module"
)
_MLP = re.compile("mlp|mlp_block|(feed_forward|ffn|ff)[12]?|block_sparse_moe|shared_mlp|moe|DenseReluDense|fc2")
_NORM = re.compile(r"(ln|norm|(rms|layer)_?norm)(_.*|\d)?|.*(norm|ln)\d?")
_INERT = re.compile(r".*layer_?scale\d?|ls_?\d|act(ivation)?(_fn)?")
"""Activations in a branch, and factors of a branch for each channel, which follow the site."""
_SKIP_NORMS = {"norm_out", "pre_ln", "ada_rms_norm"}
"""Norms besides one for each branch: before the first or after the last, on the skip, or in a branch."""
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


def transformer_ends(layer: nn.Module) -> tuple[str, ...] | None:
    """Return the names of the last layers of the branches, or None if the layer is not recognized."""
    children = dict(layer.named_children())
    ends = [name for name in children if _MIXER.fullmatch(name) or _MLP.fullmatch(name)]
    norms = [name for name in children if name not in ends and _NORM.fullmatch(name)]
    inert = {"fc1"} if "fc2" in ends else set()
    inert |= {name for name, child in children.items() if _INERT.fullmatch(name) or not list(child.parameters())}
    if set(children) - {*ends, *norms, *inert} or any(isinstance(children[end], _CONTAINERS) for end in ends):
        return None
    if len(ends) > 1 and not any(_MIXER.fullmatch(name) for name in ends):
        return None
    found = _after_norms(ends, norms)
    cls: Any = type(layer)
    return found if found and _additions(cls) >= len(found) else None


def is_decoder(layer: nn.Module) -> bool:
    """Whether a layer that `transformer_ends` recognizes belongs to a decoder-only transformer."""
    children = dict(layer.named_children())
    recurrent = children.keys() & {"linear_attn", "mamba", "mixer"}
    flags = [child.is_causal for child in children.values() if hasattr(child, "is_causal")]
    causal = any(flags) if flags else "input_layernorm" in children  # LLaMA's name, in models of other libraries
    return (causal or bool(recurrent)) and not children.keys() & {"encoder_attn", "cross_attn_layer_norm"}


def _after_norms(ends: Sequence[str], norms: Sequence[str]) -> tuple[str, ...] | None:
    """Replace the ends by the norms after them, which would undo the scale of what remains; None if unclear."""
    if set(norms) == {"post_attention_layernorm", "post_feedforward_layernorm"}:  # OLMo 2
        return tuple(norms)
    if len(norms) == 2 * len(ends):  # Gemma 2: a norm before and one after each branch
        after = [name for name in norms if name.startswith("post_")]
        if len(after) > len(ends):  # GLM 4: the name that LLaMA gives to the norm before the MLP
            after.remove("post_attention_layernorm")
        return tuple(after) if len(after) == len(ends) else None
    pairs = ({"mamba", "self_attn"}, {"block_sparse_moe", "shared_mlp"})  # with one norm: Falcon-H1, Granite MoE hybrid
    parallel = sum(pair <= set(ends) for pair in pairs)
    fits = len(norms) in (1, len(ends) - parallel, len(ends), len(ends) + bool(_SKIP_NORMS & set(norms)))
    return tuple(ends) if norms and fits else None


@lru_cache(maxsize=1024)
def count_calls(cls: Any, child: str) -> int:
    """Return the number of calls of a child in the source of a forward."""
    nodes = [node for method in reachable_methods(cls)[0] for node in method.nodes]
    return sum(isinstance(node, ast.Call) and dotted_path(node.func) == ("self", child) for node in nodes)


@lru_cache(maxsize=1024)
def _additions(cls: Any) -> float:
    """Return the number of additions in the methods that a forward runs, or infinity if their source is missing.

    It is 0 if the forward subtracts one part from another, as in RepMixer, where x + mixer(x) - norm(x) has one branch.
    """
    nodes = [node for method in reachable_methods(cls)[0] for node in method.nodes]
    if any(_subtracts_parts(node) for node in nodes):
        return 0
    return sum(_adds(node) for node in nodes) if nodes else float("inf")


def _subtracts_parts(node: ast.AST) -> bool:
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Sub):
        return False
    return isinstance(node.left, ast.Call) and isinstance(node.right, ast.Call)


def _adds(node: ast.AST) -> bool:
    """Whether a node adds two values, neither of which is a tuple or a constant, or calls `..._residual_add`."""
    if isinstance(node, ast.Call):
        return (dotted_path(node.func) or ("",))[-1].endswith("residual_add")
    if not isinstance(node, ast.BinOp | ast.AugAssign) or not isinstance(node.op, ast.Add):
        return False
    sides = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.target, node.value)
    return not any(isinstance(side, ast.Tuple | ast.Constant) for side in sides)


def rows_are_samples(layer: nn.Module) -> bool:
    """Whether the first axis of what the layer adds is the batch.

    Otherwise images of different sizes are packed into one sequence, or the layer splits the image into windows, merges
    batch and tokens, or has the tokens first.
    """
    names = {name for name, _ in layer.named_children()}
    classes: set[Any] = {type(part) for part in layer.modules()}
    packed = any(_needs_lengths(cls) for cls in classes)
    pixtral = names == {"attention_norm", "feed_forward", "attention", "ffn_norm"}
    windows = bool(getattr(layer, "window_size", 0)) and {"layer_norm1", "layer_norm2"} <= names  # SAM
    merged = hasattr(layer, "do_layer_norm_before") or getattr(layer, "is_moe_layer", False)  # OPT, Llama 4
    attention = getattr(layer, "self_attn", None)
    tokens_first = hasattr(attention, "encoder_decoder_attention")  # FSMT
    return not (packed or pixtral or windows or merged or tokens_first)


@lru_cache(maxsize=1024)
def _needs_lengths(cls: Any) -> bool:
    """Whether the forward requires the lengths or the grids of packed sequences."""
    parameters = inspect.signature(cls.forward).parameters
    return any(parameters[name].default is inspect.Parameter.empty for name in _LENGTHS & parameters.keys())


_LENGTHS = {"cu_seqlens", "grid_thw"}
