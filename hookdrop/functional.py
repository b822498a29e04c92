"""The regularizers as pure functions. They draw from PyTorch's global RNG.

`activation_penalty` returns a loss term. Every other function returns `x` itself if there is nothing to do or if
`training=False`. It never modifies `x` in place, and keeps shape, dtype and memory format. It raises `TypeError` unless
`x` is a dense tensor of real floating-point numbers, and the same errors as the regularizer named in its docstring,
which documents the settings, the shapes and the paper.

`p` is the drop probability, as in `torch.nn.functional`. In compiled code `p` may be a 0-d tensor, so that one graph
serves all rates; its value is not checked there.
"""

from hookdrop.regularizers.drop_key import drop_key
from hookdrop.regularizers.drop_path import drop_path, layer_drop
from hookdrop.regularizers.dropblock import cutout, drop_block
from hookdrop.regularizers.dropout import (
    alpha_dropout,
    dropout,
    dropout1d,
    dropout2d,
    dropout3d,
    feature_alpha_dropout,
    mixout,
)
from hookdrop.regularizers.gradients import (
    clamp_activation_grad,
    clip_activation_grad,
    noise_activation_grad,
    scale_activation_grad,
)
from hookdrop.regularizers.head_dropout import head_dropout
from hookdrop.regularizers.masksembles import masksembles
from hookdrop.regularizers.noise import gaussian_dropout, gaussian_noise, neftune, shake_drop, uniform_noise
from hookdrop.regularizers.penalties import activation_penalty
from hookdrop.regularizers.styles import dsu, mix_style
from hookdrop.regularizers.tokens import locked_dropout, token_dropout

__all__ = [
    "activation_penalty",
    "alpha_dropout",
    "clamp_activation_grad",
    "clip_activation_grad",
    "cutout",
    "drop_block",
    "drop_key",
    "drop_path",
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "dsu",
    "feature_alpha_dropout",
    "gaussian_dropout",
    "gaussian_noise",
    "head_dropout",
    "layer_drop",
    "locked_dropout",
    "masksembles",
    "mix_style",
    "mixout",
    "neftune",
    "noise_activation_grad",
    "scale_activation_grad",
    "shake_drop",
    "token_dropout",
    "uniform_noise",
]
