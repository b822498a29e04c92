"""Inputs for the models of transformers, made from the signature of their `forward` and from their config."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

BATCH = 2
TOKENS = 12
FRAMES = 4

Inputs = dict[str, Any]
MAIN = ("input_ids", "pixel_values", "input_features", "input_values", "decoder_input_ids", "pixel_values_videos")


def attempts(model: PreTrainedModel) -> Iterator[Inputs]:
    """Yield inputs to try, those with the most arguments first."""
    parameters = list(inspect.signature(model.forward).parameters.values())
    required = [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    main = model.main_input_name
    main = [main] if isinstance(main, str) else list(main)
    names = [p.name for p in parameters]
    optional = [n for n in MAIN if n in names]
    first = [*required, *(n for n in main if n in names)]
    sets = [[*first, *optional, "bbox"], [*first, "decoder_input_ids", "bbox"], [*first, "attention_mask"], first]
    sets += [["input_ids"], ["pixel_values"], ["input_features"], ["input_values"]]
    tried: list[list[str]] = []
    for wanted in sets:
        chosen = [name for name in dict.fromkeys(wanted) if name in names]
        if not chosen or chosen in tried or not set(required) <= set(chosen):
            continue
        tried.append(chosen)
        variants = [list(values(name, model.config)) for name in chosen]
        if all(variants):
            for combination in islice(product(*variants), 40):
                yield dict(zip(chosen, combination, strict=True))


def values(name: str, config: PreTrainedConfig) -> Iterator[Any]:
    """Yield the values to try for an argument."""
    size = lookup(config, "image_size", "img_size", "input_size", "pretrain_image_size") or 32
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    if not isinstance(height, int): height = width = 32
    channels = lookup(config, "num_channels", "in_channels", "in_chans", "input_channels") or 3
    if not isinstance(channels, int): channels = 3
    frames = lookup(config, "num_frames", "frames") or FRAMES
    mels = lookup(config, "num_mel_bins", "feature_size", "input_feat_size", "input_dim","feature_projection_input_dim", "input_size", "n_mels", "mel_bins","in_channels") or 80
    width_ = lookup(config, "hidden_size", "d_model") or 32
    if name in ("input_ids", "decoder_input_ids", "qformer_input_ids"):
        yield torch.randint(5, 90, (BATCH, TOKENS))
        yield torch.randint(5, 90, (BATCH, 128))
        books = lookup(config, "num_codebooks", "num_channels", "n_codebooks")
        if isinstance(books, int): yield torch.randint(5, 30, (BATCH, TOKENS, books))
    elif name in ("pixel_values","pixel_values_videos", "prompt_pixel_values", "high_res_pixel_values"):
        image = torch.randn(BATCH, channels, height, width)
        clip = torch.randn(BATCH, frames, channels, height, width)
        if name == "pixel_values_videos" or has(config, "num_frames", "tubelet_size"): yield clip
        yield image
        for side in (64, 128, 224, 256):
            if side > height: yield torch.randn(BATCH, channels, side, side)
        yield clip
        patch = lookup(config, "patch_size") or 8
        if isinstance(patch, int): yield torch.randn(BATCH, 16, channels * patch * patch)
    elif name == "input_features":
        if isinstance(mels, int):
          for length in (64, 256, 1024, 3000):
            source = lookup(config, "max_source_positions")
            if source and length == 64: yield torch.randn(BATCH, mels, 2 * source)
            yield torch.randn(BATCH, length, mels)
            yield torch.randn(BATCH, mels, length)
            yield torch.randn(BATCH, 1, length, mels)
    elif name in ("input_values", "audio_mel"):
        yield torch.randn(BATCH, 2048)
        yield torch.randn(BATCH, 1, 3200)
        yield torch.randn(BATCH, 16000)
        length = lookup(config, "max_length") or 1024
        yield torch.randn(BATCH, length, mels)
        yield torch.randn(BATCH, 48000)
    elif name == "bbox":
        yield torch.randint(1, 10, (BATCH, TOKENS, 4)).sort(-1).values
        yield torch.rand(BATCH, TOKENS, 8)
    elif name in ("attention_mask", "input_features_mask", "past_observed_mask"):
        yield torch.ones(BATCH, TOKENS, dtype=torch.long)
    elif name in ("hidden_states", "inputs_embeds", "query_embeds", "encoder_hidden_states", "latents", "inputs"):
        patch, steps = lookup(config, "patch_size") or 8, lookup(config, "temporal_patch_size") or 1
        if isinstance(patch, int): yield torch.randn(BATCH * 16, channels * steps * patch * patch)
        yield torch.randn(BATCH, TOKENS, width_)
    elif name in ("grid_thw", "image_grid_thw", "grid_hws"):
        yield torch.tensor([[1, 4, 4]] * BATCH)
        yield torch.tensor([[4, 4]] * BATCH)
    elif name == "past_values":
        length = lookup(config, "context_length") or 32
        series = lookup(config, "num_input_channels", "input_size") or 1
        yield torch.randn(BATCH, length, series)
        yield torch.randn(BATCH, length)


def has(config, *names):
    return lookup(config, *names) is not None

def lookup(config: PreTrainedConfig, *names: str) -> Any:
    """Return the first of these attributes in the config or in its sub-configs, or None."""
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    for part in vars(config).values():
        if isinstance(part, PreTrainedConfig):
            found = lookup(part, *names)
            if found is not None:
                return found
    return None
