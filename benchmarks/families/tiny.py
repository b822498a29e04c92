"""Tiny configurations and models of every family of transformers, with random weights. Nothing is downloaded."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
import transformers

VOCABULARY = 128
WIDTH = 64
HEAD = 16
# The first pattern that matches an attribute's name gives its value. A list keeps its length.
SIZES: tuple[tuple[str, int], ...] = (
    (r"(.*_)?vocab_size(_.*)?|n_vocab|num_embeddings", VOCABULARY),
    (r"(.*_)?(num_hidden_layers|num_layers|n_layers?|layers|depth|num_blocks|num_decoder_layers|num_encoder_layers)", 2),
    (r"(encoder|decoder|t2u_encoder|t2u_decoder|speech_encoder|text_encoder)_layers", 2),
    (r"depths|num_hidden_groups|.*blocks_per_stage|stage_num_blocks", 2),
    (r"(.*_)?(num_key_value_heads|num_kv_heads|num_key_heads|n_kv_heads|multi_query_group_num)", 2),
    (r"(.*_)?(attention_heads|num_heads|n_heads?|heads|num_attention_heads_per_stage|num_value_heads|n_v_heads)", 4),
    (r"(.*_)?(qk_rope_head_dim|rope_head_dim)", 8),
    (r"(.*_)?(qk_nope_head_dim|v_head_dim|head_dim|d_kv|d_head|dim_head|kv_channels|head_size|attention_head_size)", 16),
    (r"(.*_)?(intermediate_size|ffn_dim|ffn_hidden_size|d_ff|d_inner|mlp_dim|n_inner|feedforward_dim|linear_units|inner_dim|intermediate_dim)", 128),
    (r"(.*_)?(hidden_sizes?|d_model|n_embd|embed_dims?|embedding_size|hidden_dim|emb_dim|projection_dim|lora_rank|embed_proj_dim)", WIDTH),
    (r"(.*_)?max_position_embeddings|n_positions|max_seq_len|n_ctx|max_sequence_length|max_source_positions|max_target_positions", 128),
    (r".*(experts_per_tok(en)?|_top_k|moe_k|top_k_experts|moe_topk)|topk", 2),
    (r"n_group|topk_group|num_expert_groups?", 1),
    (r"(num_experts|num_local_experts|n_routed_experts|moe_num_experts)", 4),
    (r"(image_size|input_size|pretrain_image_size|img_size)", 32),
    (r"(patch_size)", 8),
)


def tiny_config(kind: type[PreTrainedConfig], **given: Any) -> PreTrainedConfig:
    """Return a config of this class with small sizes; `given` overrides them."""
    default = kind()
    own = OVERRIDES.get(kind.model_type, {})
    settings: dict[str, Any] = {}
    small_id = iter(range(100, VOCABULARY))
    for field in fields(kind):
        name, value = field.name, vars(default).get(field.name)
        if name in own:
            continue
        if isinstance(value, PreTrainedConfig):
            settings[name] = tiny_config(type(value), **_changes(value))
        elif name == "backbone_config" and value is None:
            settings[name] = None
        elif re.fullmatch(r".*_(token_ids?|token_index|id)|blank_token_id", name) and isinstance(value, int):
            if value >= VOCABULARY:
                settings[name] = next(small_id)
        elif name == "layer_types" and field.default is not None:
            settings[name] = list(dict.fromkeys(value))
        elif field.default is not None and (small := _shrunk(name, value)) is not None:
            settings[name] = small
    types = vars(default).get("layer_types")
    if types and "num_hidden_layers" in settings and "layer_types" not in own:
        kinds = list(dict.fromkeys(types))
        settings["layer_types"] = kinds if len(kinds) > 1 else kinds * 2
        settings["num_hidden_layers"] = len(settings["layer_types"])
    if "head_dim" in vars(default) and "head_dim" not in settings and "num_attention_heads" in settings:
        settings["head_dim"] = 16
    rope = vars(default).get("rope_parameters")
    if isinstance(rope, dict) and (sections := rope.get("mrope_section")):
        settings["rope_parameters"] = rope | {"mrope_section": _sections(len(sections), rope.get("partial_rotary_factor", 1.0))}
    heads = next((n for n in ("num_attention_heads", "n_heads") if n in settings), None)
    if heads and "num_key_value_heads" in settings and vars(default).get(heads) == vars(default).get("num_key_value_heads"):
        settings["num_key_value_heads"] = settings[heads]
    return kind(**{**settings, **own, **given})


def _sections(count: int, factor: float) -> list[int]:
    """Return the sections of a multimodal rotary embedding: half of the rotated dimensions of a head."""
    half = int(HEAD // 2 * factor)
    return [half - (count - 1) * (half // 4), *[half // 4] * (count - 1)]


def _changes(value):
    return {}


def _shrunk(name: str, value: Any) -> Any:
    """Return the small value of an attribute, or None to keep the default."""
    if re.fullmatch(r"drop_path(_rate)?|.*layerdrop|mask_(time|feature)_prob", name) and value:
        return type(value)(0)
    number = next((size for pattern, size in SIZES if re.fullmatch(pattern, name)), None)
    if number is None or isinstance(value, bool):
        return None
    if isinstance(value, int):
        return min(value, number)
    if isinstance(value, list | tuple) and value and all(isinstance(v, int) for v in value):
        if "heads" in name: number = 2
        return type(value)(min(v, number) for v in value)
    return None


def model_class(name: str) -> Any:
    entry = modeling_auto.MODEL_MAPPING_NAMES[name]
    return getattr(transformers, entry if isinstance(entry, str) else entry[0])


def build(name: str) -> Any:
    config = tiny_config(CONFIG_MAPPING[name])
    torch.manual_seed(0)
    return model_class(name)(config)

OVERRIDES: dict[str, dict[str, Any]] = {
}
