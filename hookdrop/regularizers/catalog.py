"""The table of regularizers that `hookdrop` exports and that `parse` can name."""

from __future__ import annotations

from hookdrop.regularizers.alpha import AlphaDropout, FeatureAlphaDropout
from hookdrop.regularizers.base import Regularizer
from hookdrop.regularizers.cutout import Cutout
from hookdrop.regularizers.drop_path import DropPath
from hookdrop.regularizers.dropblock import DropBlock
from hookdrop.regularizers.dropout import Dropout, Dropout1d, Dropout2d, Dropout3d
from hookdrop.regularizers.dsu import DSU
from hookdrop.regularizers.gradients import (
    ClampActivationGrad,
    ClipActivationGrad,
    NoiseActivationGrad,
    ScaleActivationGrad,
)
from hookdrop.regularizers.head_dropout import HeadDropout
from hookdrop.regularizers.layer_drop import LayerDrop
from hookdrop.regularizers.masksembles import Masksembles
from hookdrop.regularizers.mixstyle import MixStyle
from hookdrop.regularizers.neftune import NEFTune
from hookdrop.regularizers.noise import GaussianDropout, GaussianNoise, UniformNoise
from hookdrop.regularizers.shake_drop import ShakeDrop
from hookdrop.regularizers.tokens import LockedDropout, TokenDropout

# To add a regularizer, import it above and list it here, and export its function in `hookdrop.functional`.
__all__ = [
    "DSU",
    "AlphaDropout",
    "ClampActivationGrad",
    "ClipActivationGrad",
    "Cutout",
    "DropBlock",
    "DropPath",
    "Dropout",
    "Dropout1d",
    "Dropout2d",
    "Dropout3d",
    "FeatureAlphaDropout",
    "GaussianDropout",
    "GaussianNoise",
    "HeadDropout",
    "LayerDrop",
    "LockedDropout",
    "Masksembles",
    "MixStyle",
    "NEFTune",
    "NoiseActivationGrad",
    "ScaleActivationGrad",
    "ShakeDrop",
    "TokenDropout",
    "UniformNoise",
]

REGULARIZERS: dict[str, type[Regularizer]] = {name: globals()[name] for name in sorted(__all__, key=str.lower)}
