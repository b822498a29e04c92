"""The regularizers: modules that also work as plain layers."""

from hookdrop.regularizers.alpha import AlphaDropout, FeatureAlphaDropout
from hookdrop.regularizers.base import Regularizer
from hookdrop.regularizers.dropblock import DropBlock
from hookdrop.regularizers.dropout import Dropout, Dropout1d, Dropout2d, Dropout3d
from hookdrop.regularizers.droppath import DropPath
from hookdrop.regularizers.foreign import ForeignFunction, ForeignModule, as_regularizer, like, must_pickle
from hookdrop.regularizers.gaussian import GaussianDropout, GaussianNoise
from hookdrop.regularizers.text import REGULARIZERS, parse

__all__ = [
    "REGULARIZERS",
    "AlphaDropout",
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
    "Regularizer",
    "as_regularizer",
    "like",
    "must_pickle",
    "parse",
]
