"""Add regularizers to the layers of any PyTorch model with one line, and remove them with another."""

import importlib
from typing import TYPE_CHECKING, Any

from hookdrop import guards as guards
from hookdrop import recipes as recipes
from hookdrop import regularizers as _regularizers
from hookdrop.core import parts as _parts
from hookdrop.core import schedules as _schedules
from hookdrop.core.errors import HookdropError, HookdropWarning, InjectionError, LayerError, ShapeError, StateError
from hookdrop.core.handle import Injection, find
from hookdrop.core.inject import inject, plan, without_hooks
from hookdrop.core.plan import Plan
from hookdrop.core.regularizer import Rate, Regularizer
from hookdrop.core.schedules import *
from hookdrop.core.spec import InjectionSpec
from hookdrop.core.text import parse
from hookdrop.kernels import accelerators as _accelerators
from hookdrop.training.seeding import seed_per_rank

if TYPE_CHECKING:
    from hookdrop import functional as functional
    from hookdrop import integrations as integrations
    from hookdrop import observe as observe
    from hookdrop import testing as testing
    from hookdrop.measure.prediction import Prediction as Prediction
    from hookdrop.regularizers import *
    from hookdrop.regularizers.penalties import Penalty as Penalty
    from hookdrop.survey.tree import layers as layers
    from hookdrop.training.averages import update_bn as update_bn

__version__ = "0.4.0"

for _name in ("kernels.custom_ops", "kernels.fixed_masks"):
    importlib.import_module(f"hookdrop.{_name}")  # defines operators, which exported programs name

# What is imported on first use, because it takes as long as the rest.
_PACKAGES = ("functional", "integrations", "observe", "testing")
_LATE = _parts.Parts(
    {
        "Penalty": "hookdrop.regularizers.penalties:Penalty",
        "Prediction": "hookdrop.measure.prediction:Prediction",
        "layers": "hookdrop.survey.tree:layers",
        "update_bn": "hookdrop.training.averages:update_bn",
    }
)
_parts.KINDS.places.update(
    attribute="hookdrop.methods.dropout_sinks:AttributeSink",
    constant="hookdrop.methods.dropout_sinks:DropoutSink",
    parameters="hookdrop.methods.parameter_hooks:ParameterHook",
    rows="hookdrop.methods.rows_hook:RowsHook",
    scores="hookdrop.methods.score_hooks:ScoreHook",
    skip="hookdrop.methods.skip_hook:SkipHook",
)
_parts.PARTS.places.update(
    adapted="hookdrop.regularizers.foreign:adapted",
    collected="hookdrop.methods.collecting:Collected",
    inspect="hookdrop.guards.inspection:inspect_forward",
    is_checkpointed="hookdrop.training.checkpointing:is_checkpointed",
    loss_terms="hookdrop.methods.penalties:LossTerms",
    note_forward="hookdrop.training.checkpointing:note_forward",
    penalty="hookdrop.methods.penalties:read_penalty",
    predict="hookdrop.measure.prediction:predict",
    probe="hookdrop.measure.measurement:probe",
    recompute="hookdrop.training.checkpointing:recompute",
    recording="hookdrop.measure.recording:recording",
    run_recipe="hookdrop.methods.planning:run_recipe",
    samples="hookdrop.measure.prediction:samples",
    survey="hookdrop.survey.facts:LazySurvey",
)
_accelerators.PLACES.places.update(
    cpu="hookdrop.accel.native:ACCELERATOR",
    cuda="hookdrop.accel.triton_dropblock:ACCELERATOR",
)

__all__ = [
    "HookdropError",
    "HookdropWarning",
    "Injection",
    "InjectionError",
    "InjectionSpec",
    "LayerError",
    "Plan",
    "Rate",
    "Regularizer",
    "ShapeError",
    "StateError",
    "find",
    "inject",
    "parse",
    "plan",
    "recipes",
    "seed_per_rank",
    "without_hooks",
]
__all__ += [*_PACKAGES, *_LATE, *_regularizers.__all__, *_schedules.__all__]
__all__.sort()


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"hookdrop.{name}")
    for parts in (_parts.REGULARIZERS, _LATE):
        if name in parts:
            globals()[name] = parts[name]
            return parts[name]
    raise AttributeError(f"module 'hookdrop' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List them before they are imported too, for completion."""
    return sorted({*globals(), *__all__})
