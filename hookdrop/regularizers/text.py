"""Regularizers as text, for flags and sweeps: parsed, never evaluated."""

from __future__ import annotations

from hookdrop.regularizers.alpha import AlphaDropout, FeatureAlphaDropout
from hookdrop.regularizers.base import Regularizer
from hookdrop.regularizers.cutout import Cutout
from hookdrop.regularizers.dropblock import DropBlock
from hookdrop.regularizers.dropout import Dropout, Dropout1d, Dropout2d, Dropout3d
from hookdrop.regularizers.droppath import DropPath
from hookdrop.regularizers.gradients import (
    ClampActivationGrad,
    ClipActivationGrad,
    NoiseActivationGrad,
    ScaleActivationGrad,
)
from hookdrop.regularizers.mixstyle import MixStyle
from hookdrop.regularizers.noise import GaussianDropout, GaussianNoise, UniformNoise
from hookdrop.regularizers.tokens import LockedDropout, TokenDropout
from hookdrop.utils.call_syntax import Kind, read_call, signature_of

REGULARIZERS: dict[str, type[Regularizer]] = {
    cls.__name__: cls
    for cls in (
        Dropout,
        Dropout1d,
        Dropout2d,
        Dropout3d,
        AlphaDropout,
        FeatureAlphaDropout,
        GaussianDropout,
        GaussianNoise,
        UniformNoise,
        DropBlock,
        DropPath,
        Cutout,
        TokenDropout,
        LockedDropout,
        MixStyle,
        ClipActivationGrad,
        ClampActivationGrad,
        ScaleActivationGrad,
        NoiseActivationGrad,
    )
}
_KIND = Kind("parse", "regularizer", REGULARIZERS, "DropBlock(p=0.1, block_size=7)")


def parse(text: str) -> Regularizer:
    """The regularizer that `text` spells.

    Args:
        text: a hookdrop regularizer's name with literal settings. Nothing in it is evaluated.

    Raises:
        TypeError: not a text, or settings that the regularizer does not take.
        ValueError: another form, an unknown name, or anything that is not a literal.

    Example:
        >>> parse("DropBlock(p=0.2, block_size=5)")
        DropBlock(p=0.2, block_size=5)
    """
    call = read_call(text, _KIND)
    try:
        return REGULARIZERS[call.name](*call.args, **dict(call.kwargs))
    except TypeError as error:
        raise TypeError(f"parse: {text!r}: {error}{signature_of(call.name, _KIND)}") from None
