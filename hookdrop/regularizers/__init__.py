"""The regularizers. Each one is a pure function and a module, which can also be used as an ordinary layer."""

from hookdrop.core.regularizer import REGULARIZERS
from hookdrop.regularizers.drop_key import DropKey
from hookdrop.regularizers.drop_path import DropPath, LayerDrop
from hookdrop.regularizers.dropblock import Cutout, DropBlock
from hookdrop.regularizers.dropout import (
    AlphaDropout,
    Dropout,
    Dropout1d,
    Dropout2d,
    Dropout3d,
    FeatureAlphaDropout,
    Mixout,
)
from hookdrop.regularizers.gradients import (
    ClampActivationGrad,
    ClipActivationGrad,
    NoiseActivationGrad,
    ScaleActivationGrad,
)
from hookdrop.regularizers.head_dropout import HeadDropout
from hookdrop.regularizers.masksembles import Masksembles
from hookdrop.regularizers.noise import GaussianDropout, GaussianNoise, NEFTune, ShakeDrop, UniformNoise
from hookdrop.regularizers.penalties import ActivationPenalty
from hookdrop.regularizers.penalties import Penalty as Penalty
from hookdrop.regularizers.styles import DSU, MixStyle
from hookdrop.regularizers.tokens import LockedDropout, TokenDropout

# To add a regularizer, import it above and list it here, and export its function in `hookdrop.functional`.
__all__ = [
    "DSU",
    "ActivationPenalty",
    "AlphaDropout",
    "ClampActivationGrad",
    "ClipActivationGrad",
    "Cutout",
    "DropBlock",
    "DropKey",
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
    "Mixout",
    "NEFTune",
    "NoiseActivationGrad",
    "ScaleActivationGrad",
    "ShakeDrop",
    "TokenDropout",
    "UniformNoise",
]

REGULARIZERS.update({name: globals()[name] for name in sorted(__all__, key=str.lower)})
