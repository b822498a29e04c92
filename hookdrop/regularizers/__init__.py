"""The regularizers. Each one is a pure function and a module, which can also be used as an ordinary layer.

Each file is imported when a regularizer of it is first used.
"""

from typing import TYPE_CHECKING, Any

from hookdrop.core.parts import REGULARIZERS
from hookdrop.core.regularizer import Rate as Rate
from hookdrop.core.regularizer import Regularizer as Regularizer

if TYPE_CHECKING:
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

# To add a regularizer, import it above, list it in `__all__` and `_FILES`, and export its function in `functional`.
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
_FILES = {
    "drop_key": "DropKey",
    "drop_path": "DropPath LayerDrop",
    "dropblock": "Cutout DropBlock",
    "dropout": "AlphaDropout Dropout Dropout1d Dropout2d Dropout3d FeatureAlphaDropout Mixout",
    "gradients": "ClampActivationGrad ClipActivationGrad NoiseActivationGrad ScaleActivationGrad",
    "head_dropout": "HeadDropout",
    "masksembles": "Masksembles",
    "noise": "GaussianDropout GaussianNoise NEFTune ShakeDrop UniformNoise",
    "penalties": "ActivationPenalty",
    "styles": "DSU MixStyle",
    "tokens": "LockedDropout TokenDropout",
}
_PLACES = {name: f"{__name__}.{file}:{name}" for file, names in _FILES.items() for name in names.split()}
REGULARIZERS.places.update({name: _PLACES[name] for name in sorted(__all__, key=str.lower)})


def __getattr__(name: str) -> Any:
    if name in REGULARIZERS:
        return REGULARIZERS[name]
    if name == "Penalty":
        from hookdrop.regularizers.penalties import Penalty

        return Penalty
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "Penalty"})
