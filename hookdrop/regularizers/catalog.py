"""The table of the regularizers that `hookdrop` exports and that `parse` and configs may name."""

from __future__ import annotations

from hookdrop.regularizers.alpha import AlphaDropout, FeatureAlphaDropout
from hookdrop.regularizers.base import Regularizer
from hookdrop.regularizers.cutout import Cutout
from hookdrop.regularizers.drop_path import DropPath
from hookdrop.regularizers.dropblock import DropBlock
from hookdrop.regularizers.dropout import Dropout, Dropout1d, Dropout2d, Dropout3d
from hookdrop.regularizers.gradients import (
    ClampActivationGrad,
    ClipActivationGrad,
    NoiseActivationGrad,
    ScaleActivationGrad,
)
from hookdrop.regularizers.mixstyle import MixStyle
from hookdrop.regularizers.noise import GaussianDropout, GaussianNoise, UniformNoise
from hookdrop.regularizers.tokens import LockedDropout, TokenDropout
from hookdrop.utils.call_syntax import CallSyntax, parse_call, signature_of

# A new regularizer is imported above and named here; its function is exported by `hookdrop.functional`.
__all__ = [
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
    "LockedDropout",
    "MixStyle",
    "NoiseActivationGrad",
    "ScaleActivationGrad",
    "TokenDropout",
    "UniformNoise",
]

REGULARIZERS: dict[str, type[Regularizer]] = {name: globals()[name] for name in __all__}
_SYNTAX = CallSyntax("parse", "regularizer", REGULARIZERS, "DropBlock(p=0.1, block_size=7)")


def parse(text: str) -> Regularizer:
    """The regularizer that `text` describes, for flags and sweeps: parsed, never evaluated.

    Args:
        text: the name of a hookdrop regularizer with literal settings.

    Raises:
        TypeError: not a text, or settings that the regularizer does not take.
        ValueError: another form, an unknown name, or a setting that is not a literal.

    Example:
        >>> parse("DropBlock(p=0.2, block_size=5)")
        DropBlock(p=0.2, block_size=5)
    """
    call = parse_call(text, _SYNTAX)
    try:
        return REGULARIZERS[call.name](*call.args, **dict(call.kwargs))
    except TypeError as error:
        raise TypeError(f"parse: {text!r}: {error}{signature_of(call.name, _SYNTAX)}") from None
