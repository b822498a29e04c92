"""Every regularizer with a supported input."""

from __future__ import annotations

import torch

from hookdrop import (
    ClampActivationGrad,
    ClipActivationGrad,
    Cutout,
    DropBlock,
    Dropout1d,
    Dropout3d,
    DropPath,
    LockedDropout,
    MixStyle,
    NoiseActivationGrad,
    Regularizer,
    ScaleActivationGrad,
    TokenDropout,
)
from hookdrop.regularizers import REGULARIZERS

TOKENS = (8, 6, 5)


SHAPES = {Dropout1d: TOKENS, Dropout3d: (8, 6, 3, 4, 5), TokenDropout: TOKENS, LockedDropout: TOKENS}


IN_BACKWARD = [
    ClipActivationGrad(max_norm=0.5),
    ClipActivationGrad(max_value=0.5, per_sample=False),
    ClipActivationGrad(0.5, per_sample=True),
    ClampActivationGrad(-0.5, 0.25),
    ClampActivationGrad(max=0.25),
    ScaleActivationGrad(-1),
    ScaleActivationGrad(0),
    NoiseActivationGrad(0.3),
]


WITH_SETTINGS = [DropBlock(0.3, 3), DropPath(0.3, "batch"), Cutout(2), MixStyle(0.5)]


OTHERS = [cls for cls in REGULARIZERS.values() if cls not in (DropBlock, Cutout, MixStyle, *map(type, IN_BACKWARD))]


ALL = [*(cls(0.3) for cls in OTHERS), *WITH_SETTINGS]


def example(regularizer: Regularizer, **kwargs: object) -> torch.Tensor:
    return torch.randn(SHAPES.get(type(regularizer), (8, 6, 5, 5)), **kwargs)
