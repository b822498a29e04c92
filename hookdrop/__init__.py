"""Add regularizers to the layers of any PyTorch model with one line, and remove them with another."""

import importlib
from typing import TYPE_CHECKING, Any

from hookdrop import regularizers as _regularizers
from hookdrop import schedules as _schedules
from hookdrop.injection.handle import Injection, find
from hookdrop.injection.plan import Plan
from hookdrop.injection.spec import InjectionSpec
from hookdrop.injection.text import parse
from hookdrop.injection.verbs import inject, layers, plan, update_bn, without_hooks
from hookdrop.regularizers import *
from hookdrop.regularizers import Penalty, Rate, Regularizer
from hookdrop.schedules import *
from hookdrop.utils.errors import HookdropError, HookdropWarning, InjectionError, LayerError, ShapeError, StateError
from hookdrop.utils.seeding import seed_per_rank

if TYPE_CHECKING:
    from hookdrop import functional as functional
    from hookdrop import integrations as integrations
    from hookdrop import observe as observe
    from hookdrop import recipes as recipes
    from hookdrop import testing as testing
    from hookdrop.injection.prediction import Prediction as Prediction

__version__ = "0.3.0"
_PACKAGES = ("functional", "integrations", "observe", "recipes", "testing")

__all__ = [
    "HookdropError",
    "HookdropWarning",
    "Injection",
    "InjectionError",
    "InjectionSpec",
    "LayerError",
    "Penalty",
    "Plan",
    "Prediction",
    "Rate",
    "Regularizer",
    "ShapeError",
    "StateError",
    "find",
    "inject",
    "layers",
    "parse",
    "plan",
    "seed_per_rank",
    "update_bn",
    "without_hooks",
]
__all__ += [*_PACKAGES, *_regularizers.__all__, *_schedules.__all__]
__all__.sort()


def __getattr__(name: str) -> Any:
    """Import packages and `Prediction` on first use, because they take as long as the rest."""
    if name in _PACKAGES:
        return importlib.import_module(f"hookdrop.{name}")
    if name == "Prediction":
        return importlib.import_module("hookdrop.injection.prediction").Prediction
    raise AttributeError(f"module 'hookdrop' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List them before they are imported too, for completion."""
    return sorted({*globals(), *__all__})
