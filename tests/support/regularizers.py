"""One of each regularizer with an input shape, for tests that apply to all of them.

A regularizer that can be created as `Dropout(0.3)` and accepts `Case.shape` needs no entry in the table.
"""

from dataclasses import dataclass

import torch
from torch import nn

from hookdrop import LayerDrop, Penalty, Regularizer, parse
from hookdrop.core.parts import REGULARIZERS

ZEROS = ("layer_input", "start")
"""What a regularizer may need that is another tensor of the same shape."""


class Affine(nn.Module):
    """A weight and a bias for each element of a sample, so that gradients show the mask of each element."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.5 + torch.rand(shape, dtype=dtype))
        self.bias = nn.Parameter(torch.randn(shape, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + self.bias


class Softmax(nn.Module):
    """Takes its input for scores of attention. The result may be changed in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.softmax(-1) * 1.0


class Attention(Affine):
    """Takes its result for scores of attention."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).softmax(-1)


@dataclass(frozen=True)
class Case:
    """A regularizer and an input shape that it supports."""

    regularizer: nn.Module
    shape: tuple[int, ...] = (4, 6, 8, 8)
    derives: bool = True
    """Whether the gradient is the derivative of the output; False if it is edited or treats parts as constants."""
    mixes: bool = False
    """Whether samples depend on one another, so that it does nothing to a batch of one."""
    draws: bool = True
    """Whether it draws random numbers."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the regularizer without a hook."""
        if isinstance(self.regularizer, Penalty):  # no plain layer
            return self.regularizer.regularize(x, 1.0)
        context = {name: torch.zeros_like(x) for name in getattr(self.regularizer, "needs", ()) if name in ZEROS}
        return self.regularizer(x, **context)

    @property
    def in_backward(self) -> bool:
        """Whether it edits only gradients, so that its output equals its input."""
        return getattr(self.regularizer, "in_backward", False)

    @property
    def acts_on_scores(self) -> bool:
        """Whether it has an effect only inside a layer that computes attention."""
        return getattr(self.regularizer, "only_at", None) == "scores"

    @property
    def layer(self) -> nn.Module:
        """A layer without weights to hook."""
        return Softmax() if self.acts_on_scores else nn.Identity()

    @property
    def places(self) -> tuple[str, ...]:
        """Where it can be hooked."""
        only_at = getattr(self.regularizer, "only_at", None)
        return ("output", "input") if only_at is None else (only_at,)

    @property
    def skips_layers(self) -> bool:
        """Whether it has no effect at a layer that returns its input."""
        return isinstance(self.regularizer, LayerDrop)

    @property
    def example(self) -> torch.Tensor:
        return torch.randn(self.shape, generator=torch.Generator().manual_seed(0))

    def input(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(self.shape, dtype=dtype)

    def model(self, dtype: torch.dtype = torch.float32) -> nn.Sequential:
        """A model without hooks. The tests hook "0" and "2"."""
        inner, layer = self.shape[1:], Attention if self.acts_on_scores else Affine
        return nn.Sequential(layer(inner, dtype), nn.Tanh(), layer(inner, dtype), nn.Sigmoid())


SITES = ["0", "2"]


def case(text: str, shape: tuple[int, ...] = (4, 6, 8, 8), **facts: bool) -> Case:
    return Case(parse(text), shape, **facts)


_CASES = {
    "DropKey": case("DropKey(0.3, calls=(True,))"),
    "Dropout (native)": case("Dropout(0.3)", (4, 8, 32, 32)),  # large enough for hookdrop's implementation
    "Dropout (shared)": case("Dropout(0.3, shared=(2, 3))"),
    "Dropout (one mask for all samples)": case("Dropout(0.3, shared=(0, -1))"),
    "Dropout1d": case("Dropout1d(0.3)", (4, 6, 8)),
    "Dropout3d": case("Dropout3d(0.3)", (4, 6, 4, 4, 4)),
    "DropBlock (sparse)": case("DropBlock(0.3, 3)"),
    "DropBlock (dense)": case("DropBlock(0.79, 3)"),
    "DropBlock (shared mask)": case("DropBlock(0.3, 3, per_channel=False, normalize='sample')"),
    "DropBlock (1d)": case("DropBlock(0.3, 3, channel_dim=1)", (4, 6, 16)),
    "DropBlock (3d)": case("DropBlock(0.3, 3, normalize='expected')", (4, 6, 5, 6, 7)),
    "DropPath (batch)": case("DropPath(0.3, 'batch')"),
    "DropPath (unscaled)": case("DropPath(0.3, scale=False)"),
    "Cutout": case("Cutout(3)"),
    "HeadDropout": case("HeadDropout(0.3, heads=4)", (4, 6, 8)),
    "NEFTune": case("NEFTune(3.0)", (4, 6, 8)),
    "TokenDropout": case("TokenDropout(0.3)", (4, 6, 8)),
    "LockedDropout": case("LockedDropout(0.3)", (4, 6, 8)),
    "Mixout": case("Mixout(0.5)"),
    "MixStyle": case("MixStyle(0.9)", derives=False, mixes=True),
    "DSU": case("DSU(0.9)", mixes=True),
    "ShakeDrop": case("ShakeDrop(0.9)", derives=False),
    "Masksembles": case("Masksembles(n=2)", (4, 12, 8, 8), draws=False, mixes=True),
    "ClipActivationGrad": case("ClipActivationGrad(max_norm=0.1)", derives=False),
    "ClipActivationGrad (per sample)": case("ClipActivationGrad(max_norm=0.1, per_sample=True)", derives=False),
    "ClipActivationGrad (max_value)": case("ClipActivationGrad(max_value=0.1)", derives=False),
    "ClampActivationGrad": case("ClampActivationGrad(max=0.1)", derives=False),
    "ScaleActivationGrad": case("ScaleActivationGrad(-0.5)", derives=False),
    "NoiseActivationGrad": case("NoiseActivationGrad(0.3)", derives=False),
    "ActivationPenalty": case("ActivationPenalty()", (4, 6, 8), derives=False, draws=False),
    "torch.nn.Dropout2d": Case(nn.Dropout2d(0.3)),
}
_OTHERS = {name: cls for name, cls in REGULARIZERS.items() if name not in {*_CASES, "DropBlock"}}
EVERY = {name: Case(cls(0.3)) for name, cls in _OTHERS.items()} | _CASES
OWN = {name: case for name, case in EVERY.items() if isinstance(case.regularizer, Regularizer)}
"""The cases of hookdrop's regularizers."""

ACTIVATIONS = {name: case for name, case in EVERY.items() if "parameters" not in case.places}
"""The cases that can be hooked at the output or the input of a layer without parameters, such as `nn.Identity`."""

SINGLE_SAMPLE = {name: case for name, case in EVERY.items() if not case.in_backward and not case.mixes}
"""The cases that change the forward output, also of a batch of one."""

DERIVING = {name: case for name, case in ACTIVATIONS.items() if case.derives}
"""The cases of activations whose gradient is the derivative of the output."""

REPRESENTATIVE = {name: EVERY[name] for name in ("Dropout", "DropBlock (sparse)", "DropPath", "LayerDrop", "ShakeDrop")}
"""One for each way to draw and to apply, for tests of what `hookdrop.testing` checks for all."""

_OWN_GRADIENT = "parts of it are constants for the gradient"
LACKS: dict[str, dict[str, str]] = {
    "AlphaDropout": {"mean_is_kept": "only a mean of 0"},
    "FeatureAlphaDropout": {"mean_is_kept": "only a mean of 0"},
    "DropKey": {"mean_is_kept": "the softmax rescales"},
    "DropPath (unscaled)": {"mean_is_kept": "scale=False"},
    "HeadDropout": {"p_means_p": "one head is always kept"},
    "HeadDropout (interleaved)": {"p_means_p": "one head is always kept"},
    "LayerDrop": {"mean_is_kept": "it does not rescale"},
    "MixStyle": dict.fromkeys(("gradient_is_the_derivative", "gradient_has_a_derivative"), _OWN_GRADIENT),
    "ShakeDrop": dict.fromkeys(("gradient_is_the_derivative", "gradient_has_a_derivative"), _OWN_GRADIENT),
    "TokenDropout": {"p_means_p": "the prefix is always kept"},
}
"""The checks of `hookdrop.testing` that a case does not pass on purpose."""
