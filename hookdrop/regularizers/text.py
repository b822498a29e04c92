"""Regularizers as text, for flags and sweeps: parsed, never evaluated."""

from __future__ import annotations

import ast
import inspect

from hookdrop.errors import nearest
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
    if not isinstance(text, str):
        raise TypeError(f"parse: text must be a str, got {text!r} ({type(text).__name__}).")
    try:
        call = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise _unreadable(text) from None
    if isinstance(call, ast.Name) and call.id in REGULARIZERS:
        raise ValueError(f"parse: {text!r} has no settings: write '{call.id}(...)'.{_signature(call.id)}")
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise _unreadable(text)
    name = call.func.id
    if name not in REGULARIZERS:
        raise ValueError(
            f"parse: {name!r} is not a regularizer of hookdrop.\n"
            f"  did you mean: {', '.join(nearest(name, REGULARIZERS)) or 'one of these?'}\n"
            f"  there are:    {', '.join(REGULARIZERS)}"
        )
    try:
        args = [ast.literal_eval(arg) for arg in call.args]
        kwargs = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords if keyword.arg}
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        raise ValueError(f"parse: {text!r} has something in it that is not a literal; it is not run.") from None
    if len(kwargs) != len(call.keywords):
        raise _unreadable(text)
    try:
        return REGULARIZERS[name](*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"parse: {text!r}: {error}{_signature(name)}") from None


def _unreadable(text: str) -> ValueError:
    return ValueError(
        f"parse: can't read {text!r}.\n  write one name with literal settings and no prefix: "
        f"'DropBlock(p=0.1, block_size=7)'\n  there are: {', '.join(REGULARIZERS)}"
    )


def _signature(name: str) -> str:
    """What the regularizer takes, without the types, which only a checker reads."""
    signature = inspect.signature(REGULARIZERS[name])
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return f"\n  it takes: {name}{signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)}"
