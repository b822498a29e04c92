"""Whether the layers of a model need every token at its place, so that none can be removed."""

from __future__ import annotations

import re

from torch import nn

_BIAS = re.compile("relative_pos|rel_pos|relative_attention_bias")
_BIAS_TEXT = "adds a bias for each pair of positions"
_REASONS = {
    "RelPos": _BIAS_TEXT,
    "Window|Swin": "divides the tokens into windows of a grid",
    "Rotary|RotEmb|Rope|RoPE": "rotates tokens by their index (RoPE), which changes if others are removed",
    "Decod|Segment|Depth(?!wise)|Detect|MaskedImage|Backbone|Neck|FPN|Upsampl": "needs a token for each image patch",
}
"""By a pattern of the class name."""


def why_tokens_must_stay(model: nn.Module) -> str:
    """Return why later layers need every token at its place; empty if none is known to."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        where = f"{name!r} ({kind})" if name else kind
        for pattern, reason in _REASONS.items():
            if re.search(pattern, kind):
                return f"{where} {reason}"
        if any(map(_BIAS.search, (name.rpartition(".")[2], *module._parameters))):
            return f"{where} {_BIAS_TEXT}"
    return ""
