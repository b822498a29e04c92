"""Tiny models of every family of transformers, with random weights; nothing is downloaded.

A family is a `model_type` with a base model (`AutoModel`). Its default config is made smaller by the names of its
attributes, its sub-configs too: sizes.yaml.
"""

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

VOCABULARY = 128
HEAD = 16
LARGEST = 100e6  # parameters
OFF = r"drop_path(_rate)?|fusion_droppath|.*layerdrop|mask_(time|feature)_prob|use_cache"
"""Stochastic depth of the model, masks that need long sequences, and KV caches, which training does not fill."""
TOKEN_ID = r".*_(token_ids?|token_index|id)"
_HEADS, _KV_HEADS = "num_attention_heads", "num_key_value_heads"
MULTIMODAL_ROPE = r".*(vl|4v|ocr|image|omni|compass|cosmos|qwen|glm4|hunyuan|v46).*"

SMALL: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("sizes.yaml").read_text())


def names() -> list[str]:
    return list(MODEL_MAPPING_NAMES)


def models(name: str) -> Iterator[PreTrainedModel]:
    """Yield models of a family: a tiny one, then one with two layers of the default width if it is not too large."""
    entry = MODEL_MAPPING_NAMES[name]
    kind = getattr(transformers, entry if isinstance(entry, str) else entry[0])
    for all_sizes in (True, False):
        config = tiny_config(CONFIG_MAPPING[name], all_sizes)
        with torch.device("meta"):
            count = sum(p.numel() for p in kind(config).parameters())
        if count > LARGEST and not all_sizes:
            return
        if count > LARGEST:
            raise ValueError(f"the smallest model has {count / 1e6:,.0f} million parameters")
        torch.manual_seed(0)
        model = kind(tiny_config(CONFIG_MAPPING[name], all_sizes))
        for part in model.modules():  # T5Gemma switches the cache of its decoder on again
            if getattr(getattr(part, "config", None), "use_cache", False):
                part.config.use_cache = False
        yield model


def tiny_config(kind: type[PreTrainedConfig], all_sizes: bool = True) -> PreTrainedConfig:
    """Return a config with small sizes. Without `all_sizes`, only the layers and the vocabulary are small."""
    default = kind()
    values, own = vars(default), SMALL["families"].get(kind.model_type, {})
    settings: dict[str, Any] = {}
    free_ids = iter(range(100, VOCABULARY))
    for field in fields(kind):
        value = values.get(field.name)
        if isinstance(value, PreTrainedConfig):
            timm = "timm" in value.model_type
            settings[field.name] = _small_timm(value) if timm else tiny_config(type(value), all_sizes)
        elif re.fullmatch(TOKEN_ID, field.name) and isinstance(value, int) and value >= VOCABULARY:
            settings[field.name] = next(free_ids)
        elif field.default is not None and (small := _shrunk(field.name, value, all_sizes)) is not None:
            settings[field.name] = small
    if values.get("layer_types") and "num_hidden_layers" in settings:
        kinds = list(dict.fromkeys(values["layer_types"]))
        settings["layer_types"] = kinds if len(kinds) > 1 else kinds * 2
        settings["num_hidden_layers"] = len(settings["layer_types"])
    if all_sizes:
        settings |= _head_settings(kind, values, settings)
    return kind(**settings | own)


def _head_settings(kind: type[PreTrainedConfig], values: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "head_dim" in values and not {"head_dim", "qk_rope_head_dim"} & set(settings) and _HEADS in settings:
        found["head_dim"] = HEAD
    if settings.keys() >= {_HEADS, _KV_HEADS} and values.get(_HEADS) == values.get(_KV_HEADS):
        found[_KV_HEADS] = settings[_HEADS]
    rope = values.get("rope_parameters")
    if isinstance(rope, dict) and "rope_type" in rope and re.fullmatch(MULTIMODAL_ROPE, kind.model_type):
        half = int(HEAD // 2 * rope.get("partial_rotary_factor", 1.0))
        found["rope_parameters"] = rope | {"mrope_section": [half - 2 * (half // 4), half // 4, half // 4]}
    return found


def _small_timm(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a config of timm's ResNet-18 instead of its default network."""
    indices = getattr(config, "out_indices", None)
    settings = {"out_indices": indices} if indices else {}
    if config.model_type == "timm_wrapper":
        return type(config)(architecture="resnet18", **settings)
    return type(config)(backbone="resnet18", use_pretrained_backbone=False, **settings)


def _shrunk(name: str, value: Any, all_sizes: bool) -> Any:
    """Return the small value of an attribute, or None to keep the default."""
    if re.fullmatch(OFF, name) and value:
        return type(value)([0.0] * len(value)) if isinstance(value, list | tuple) else type(value)(0)
    rows = SMALL["counts"] | (SMALL["sizes"] if all_sizes else {})
    limit = next((size for pattern, size in rows.items() if re.fullmatch(pattern, name)), None)
    if limit is None or isinstance(value, bool):
        return None
    if isinstance(value, int):
        return None if name == "window_size" and value > 32 else min(value, limit)  # larger ones are in pixels
    if isinstance(value, list | tuple) and value and all(isinstance(item, int) for item in value):
        limit = 2 if "heads" in name else limit  # of stages, whose widths are multiples of 16
        return type(value)(min(item, limit) for item in value)
    return None
