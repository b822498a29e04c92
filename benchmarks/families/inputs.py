"""Inputs for the models of transformers, from the signature of their `forward` and from their config."""

import inspect
from collections.abc import Callable, Iterator
from itertools import islice, product
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

BATCH = 3
TOKENS = 13
FRAMES = 4
MOST = 40
"""Combinations of values to try for one set of arguments."""
_MAIN = ("input_ids", "pixel_values", "input_features", "input_values", "decoder_input_ids", "pixel_values_videos")
_MASKS = ("input_features_mask", "feature_attention_mask", "attention_mask")

Inputs = dict[str, Any]


def attempts(model: PreTrainedModel) -> Iterator[Inputs]:
    """Yield the keyword arguments to try, in this order."""
    parameters = inspect.signature(model.forward).parameters.values()
    names = [p.name for p in parameters]
    required = [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    main = [model.main_input_name] if isinstance(model.main_input_name, str) else list(model.main_input_name)
    first = [*required, *main]
    cross = [[*first, "encoder_hidden_states"]] if "encoder_hidden_states" in names else []
    sets = [*cross, [*first, *_MAIN, "bbox"], [*first, "decoder_input_ids", "bbox"], [*first, "attention_mask"], first]
    sets += [[*first, *_VALUES], *([name] for name in _MAIN[:4])]
    tried: list[list[str]] = []
    for wanted in sets:
        chosen = [name for name in dict.fromkeys(wanted) if name in names]
        if chosen and chosen not in tried and set(required) <= set(chosen):
            tried.append(chosen)
            variants = [list(values(name, model.config)) for name in chosen]
            for combination in islice(product(*variants), MOST):
                inputs = dict(zip(chosen, combination, strict=True))
                yield inputs
                yield from _with_masks(inputs, names)


def _with_masks(inputs: Inputs, names: list[str]) -> Iterator[Inputs]:
    """Yield the same audio features with a mask that spares everything."""
    features = inputs.get("input_features")
    if features is not None and features.dim() == 3:
        for mask in set(_MASKS) & set(names):
            for axis in (1, 2):
                yield inputs | {mask: torch.ones(BATCH, features.shape[axis], dtype=torch.long)}


def values(name: str, config: PreTrainedConfig) -> Iterator[Any]:
    """Yield the values to try for an argument."""
    if name in ("input_ids", "decoder_input_ids", "qformer_input_ids"):
        yield from _tokens(config)
    elif "pixel_values" in name:
        yield from _images(name, config)
    elif name == "input_features":
        yield from _features(config)
    elif name in ("input_values", "audio_mel"):
        for shape in ((2048,), (1, 3200), (16000,), (_get(config, 1024, "max_length"), _bins(config)), (48000,)):
            yield torch.randn(BATCH, *shape)
    elif name in ("hidden_states", "inputs_embeds", "query_embeds", "encoder_hidden_states", "latents", "inputs"):
        yield torch.randn(BATCH, TOKENS, _get(config, 64, "encoder_hidden_size", "hidden_size", "d_model"))
        patch = _get(config, 8, "patch_size") ** 2 * _get(config, 1, "temporal_patch_size")
        yield torch.randn(BATCH * 16, _get(config, 3, "num_channels", "in_channels") * patch)
        yield torch.randn(BATCH, TOKENS, _get(config, 64, "hidden_size", "d_model"))
    elif name in ("grid_thw", "image_grid_thw", "grid_hws"):
        yield torch.tensor([[1, 4, 4]] * BATCH)
        yield torch.tensor([[4, 4]] * BATCH)
    elif name == "past_values":
        yield from _series(config)
    elif name == "bbox":
        yield torch.randint(1, 10, (BATCH, TOKENS, 4)).sort(-1).values
        yield torch.rand(BATCH, TOKENS, 8)
    elif name in ("attention_mask", "input_features_mask", "past_observed_mask"):
        yield torch.ones(BATCH, TOKENS, dtype=torch.long)
    elif name in _VALUES:
        yield _VALUES[name](config)


def _tokens(config: PreTrainedConfig) -> Iterator[Any]:
    top = min(90, _get(config, 91, "vocab_size") - 1)  # below the special tokens
    yield torch.randint(5, top, (BATCH, TOKENS))
    yield torch.randint(5, top, (BATCH, 128))
    yield torch.randint(5, 30, (BATCH, TOKENS, _get(config, 2, "num_codebooks", "num_channels", "n_codebooks")))


def _images(name: str, config: PreTrainedConfig) -> Iterator[Any]:
    size = lookup(config, "image_size", "img_size", "input_size", "pretrain_image_size")
    height, width = size if isinstance(size, list | tuple) else (size, size)
    height, width = (height, width) if isinstance(height, int) else (32, 32)
    channels = _get(config, 3, "num_channels", "in_channels", "in_chans", "input_channels")
    image = torch.randn(BATCH, channels, height, width)
    clip = torch.randn(BATCH, _get(config, FRAMES, "num_frames", "frames"), channels, height, width)
    if "videos" in name or lookup(config, "num_frames", "tubelet_size") is not None:
        yield clip
    yield image
    yield from (torch.randn(BATCH, channels, side, side) for side in (64, 128, 224, 256) if side > height)
    yield clip
    yield image[:, None]
    patch = channels * _get(config, 8, "patch_size") ** 2
    yield torch.randn(BATCH, 16, patch)
    for frames in {1, _get(config, 1, "temporal_patch_size")}:  # packed
        yield torch.randn(BATCH * 16, frames * patch)


def _features(config: PreTrainedConfig) -> Iterator[Any]:
    bins, source = _bins(config), lookup(config, "max_source_positions")
    if isinstance(source, int):
        yield torch.randn(BATCH, bins, 2 * source)
    for length in (64, 256, 1024):
        yield torch.randn(BATCH, length, bins)
        yield torch.randn(BATCH, bins, length)
        yield torch.randn(BATCH, 1, length, bins)


def _series(config: PreTrainedConfig) -> Iterator[Any]:
    length, lags = _get(config, 32, "context_length"), lookup(config, "lags_sequence")
    if lags:
        yield torch.randn(BATCH, length + max(lags))
    yield torch.randn(BATCH, length, _get(config, 1, "num_input_channels", "input_size"))
    yield torch.randn(BATCH, length)


def _bins(config: PreTrainedConfig) -> int:
    names = ("num_mel_bins", "feature_size", "input_feat_size", "input_dim", "feature_projection_input_dim", "n_mels")
    return _get(config, 80, *names, "input_size", "mel_bins", "in_channels")


_VALUES: dict[str, Callable[[PreTrainedConfig], Any]] = {
    "pixel_attention_mask": lambda config: torch.ones(BATCH, 16, dtype=torch.long),
    "spatial_shapes": lambda config: torch.tensor([[4, 4]] * BATCH),
    "target_sizes": lambda config: torch.tensor([[4, 4]] * BATCH),
    "visual_feats": lambda config: torch.randn(BATCH, 4, _get(config, 2048, "visual_feat_dim")),
    "visual_pos": lambda config: torch.rand(BATCH, 4, 4),
    "past_time_features": lambda config: torch.zeros(
        BATCH,
        _get(config, 32, "context_length") + max(lookup(config, "lags_sequence") or [0]),
        _get(config, 0, "num_time_features"),
    ),
    "past_values_padding": lambda config: torch.zeros(BATCH, _get(config, 32, "context_length"), dtype=torch.long),
    "freq": lambda config: torch.zeros(BATCH, 1, dtype=torch.long),
    "states": lambda config: torch.randn(BATCH, TOKENS, _get(config, 17, "state_dim")),
    "actions": lambda config: torch.randn(BATCH, TOKENS, _get(config, 4, "act_dim")),
    "rewards": lambda config: torch.randn(BATCH, TOKENS, 1),
    "returns_to_go": lambda config: torch.randn(BATCH, TOKENS, 1),
    "timesteps": lambda config: torch.arange(TOKENS).expand(BATCH, -1),
    "qformer_input_ids": lambda config: torch.randint(5, 90, (BATCH, TOKENS)),
}


def _get(config: PreTrainedConfig, default: int, *names: str) -> int:
    """Return `lookup` if it is a positive integer, else the default."""
    found = lookup(config, *names)
    return found if isinstance(found, int) and found > 0 else default


def lookup(config: PreTrainedConfig, *names: str) -> Any:
    """Return the first of these attributes in the config or in its sub-configs, or None."""
    for name in names:
        if (value := getattr(config, name, None)) is not None:
            return value
    parts = (part for part in vars(config).values() if isinstance(part, PreTrainedConfig))
    return next((value for part in parts if (value := lookup(part, *names)) is not None), None)
