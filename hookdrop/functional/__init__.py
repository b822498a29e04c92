"""The regularizers as pure functions: tensor in, tensor out, drawn from PyTorch's global generators.

Every function returns `x` itself where there is nothing to do, writes nothing in place, and keeps shape, dtype
and memory format. `x` must be of real floating-point numbers and dense, or it is a `TypeError`. `p` is the
probability to drop, as in `torch.nn.functional`; in compiled code it may be a 0-d tensor, which is not compiled in.
"""

from hookdrop.dropblock import drop_block
from hookdrop.functional.alpha import alpha_dropout, feature_alpha_dropout
from hookdrop.functional.channels import dropout1d, dropout2d, dropout3d
from hookdrop.functional.elements import dropout
from hookdrop.functional.noise import gaussian_dropout, gaussian_noise
from hookdrop.functional.path import drop_path

__all__ = [
    "alpha_dropout",
    "drop_block",
    "drop_path",
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "feature_alpha_dropout",
    "gaussian_dropout",
    "gaussian_noise",
]
