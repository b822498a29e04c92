"""The regularizers: modules that also work as plain layers."""

from hookdrop.regularizers.alpha import AlphaDropout, FeatureAlphaDropout
from hookdrop.regularizers.base import Regularizer
from hookdrop.regularizers.cutout import Cutout
from hookdrop.regularizers.dropblock import DropBlock
from hookdrop.regularizers.dropout import Dropout, Dropout1d, Dropout2d, Dropout3d
from hookdrop.regularizers.droppath import DropPath
from hookdrop.regularizers.foreign import ForeignFunction, ForeignModule, as_regularizer, like, must_pickle
from hookdrop.regularizers.gradients import (
    ClampActivationGrad,
    ClipActivationGrad,
    NoiseActivationGrad,
    ScaleActivationGrad,
)
from hookdrop.regularizers.mixstyle import MixStyle
from hookdrop.regularizers.noise import GaussianDropout, GaussianNoise, UniformNoise
from hookdrop.regularizers.text import REGULARIZERS, parse
from hookdrop.regularizers.tokens import LockedDropout, TokenDropout

__all__ = [
    "REGULARIZERS",
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
    "ForeignFunction",
    "ForeignModule",
    "GaussianDropout",
    "GaussianNoise",
    "LockedDropout",
    "MixStyle",
    "NoiseActivationGrad",
    "Regularizer",
    "ScaleActivationGrad",
    "TokenDropout",
    "UniformNoise",
    "as_regularizer",
    "like",
    "must_pickle",
    "parse",
]
