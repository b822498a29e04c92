"""Callbacks for trainers, and injections described by plain values.

The callbacks are in modules of their own, which import the trainer: `hookdrop.integrations.lightning`, `.transformers`
and `.fastai`.
"""

from hookdrop.integrations.spec import InjectionSpec

__all__ = ["InjectionSpec"]
