"""Put regularizers on the layers of any PyTorch model with one line, and take them off again."""

from hookdrop import observe as observe
from hookdrop import recipes as recipes
from hookdrop.diagnostics.rank_seeds import seed_per_rank
from hookdrop.errors import HookdropError, HookdropWarning, InjectionError, LayerError, ShapeError, StateError
from hookdrop.injection.group import Injections
from hookdrop.injection.handle import Injection
from hookdrop.injection.plan import Plan
from hookdrop.injection.verbs import eject, find, from_config, inject, plan, without_hooks
from hookdrop.regularizers import (
    AlphaDropout,
    ClampActivationGrad,
    ClipActivationGrad,
    Cutout,
    DropBlock,
    Dropout,
    Dropout1d,
    Dropout2d,
    Dropout3d,
    DropPath,
    FeatureAlphaDropout,
    GaussianDropout,
    GaussianNoise,
    LockedDropout,
    MixStyle,
    NoiseActivationGrad,
    Regularizer,
    ScaleActivationGrad,
    TokenDropout,
    UniformNoise,
    parse,
)
from hookdrop.schedules import (
    ChainedSchedule,
    ConstantSchedule,
    CosineSchedule,
    EarlySchedule,
    ExponentialSchedule,
    LambdaSchedule,
    LateSchedule,
    LinearSchedule,
    Schedule,
)

__version__ = "0.1.0"

__all__ = [
    "AlphaDropout",
    "ChainedSchedule",
    "ClampActivationGrad",
    "ClipActivationGrad",
    "ConstantSchedule",
    "CosineSchedule",
    "Cutout",
    "DropBlock",
    "DropPath",
    "Dropout",
    "Dropout1d",
    "Dropout2d",
    "Dropout3d",
    "EarlySchedule",
    "ExponentialSchedule",
    "FeatureAlphaDropout",
    "GaussianDropout",
    "GaussianNoise",
    "HookdropError",
    "HookdropWarning",
    "Injection",
    "InjectionError",
    "Injections",
    "LambdaSchedule",
    "LateSchedule",
    "LayerError",
    "LinearSchedule",
    "LockedDropout",
    "MixStyle",
    "NoiseActivationGrad",
    "Plan",
    "Regularizer",
    "ScaleActivationGrad",
    "Schedule",
    "ShapeError",
    "StateError",
    "TokenDropout",
    "UniformNoise",
    "eject",
    "find",
    "from_config",
    "inject",
    "observe",
    "parse",
    "plan",
    "recipes",
    "seed_per_rank",
    "without_hooks",
]
