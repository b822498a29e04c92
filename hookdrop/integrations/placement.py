"""The injections of a trainer callback: placed together, restored before or after placement, and removed together."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from hookdrop.errors import LayerError, StateError, did_you_mean
from hookdrop.injection.handle import Injection
from hookdrop.integrations.spec import InjectionSpec


class Placement:
    """Places specs on a model, all or none.

    Args:
        spec: specs, or mappings of their settings.
        specs: more of them, or one, as from a configuration file.

    Raises:
        TypeError, ValueError: there is no spec, or one is invalid.
    """

    def __init__(self, spec: Sequence[Any], specs: Any = ()) -> None:
        more = [specs] if isinstance(specs, InjectionSpec | Mapping | str) else specs or ()
        given = [*spec, *more]
        if not given:
            raise TypeError('pass at least one spec, such as InjectionSpec("Dropout(p=0.1)", layers="head")')
        self.specs = [one if isinstance(one, InjectionSpec) else InjectionSpec.from_dict(one) for one in given]
        self.injections: list[Injection] = []
        self.pending: Mapping[str, Any] | None = None

    @property
    def is_relative(self) -> bool:
        """Whether a spec needs the length of the training."""
        return any(spec.is_relative for spec in self.specs)

    def place(self, model: nn.Module, total_steps: int | None) -> None:
        """Replace the injections of an earlier training by new ones, and restore a pending state.

        Raises:
            HookdropError, TypeError, ValueError: a spec does not fit the model. No hook remains.
        """
        self.remove()
        try:
            for spec in self.specs:
                self.injections.append(spec.place(model, total_steps))
            if self.pending is not None:
                self.load_state_dict(self.pending)
        except BaseException:
            self.remove()
            raise
        finally:
            self.pending = None

    def seek(self, step: int) -> None:
        """Set the step of all schedules."""
        for drop in self.injections:
            if drop.step_count != step:
                drop.seek(step)

    def metrics(self) -> dict[str, float]:
        """The metrics of all injections, for loggers."""
        return {name: value for drop in self.injections for name, value in drop.metrics().items()}

    def remove(self) -> None:
        """Remove all hooks; while an exception is handled, without warnings that would distract from it."""
        for drop in self.injections:
            drop.__exit__(*sys.exc_info())
        self.injections = []

    def state_dict(self) -> dict[str, Any]:
        """The states of the injections by name."""
        return {drop.name: drop.state_dict() for drop in self.injections}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the injections; before they are placed, keep the state for `place`.

        Raises:
            StateError: the state is that of other injections.
        """
        if not self.injections:
            self.pending = state
            return
        own = [drop.name for drop in self.injections]
        if sorted(own) != sorted(state):
            raise StateError(
                f"the checkpoint has the injections {', '.join(map(repr, state))}, the callback has "
                f"{', '.join(map(repr, own))}.\n"
                "  to resume, use the specs of the checkpoint; for other specs, load only its weights"
            )
        for drop in self.injections:
            drop.load_state_dict(state[drop.name])


def submodule(model: nn.Module, name: str | None) -> nn.Module:
    """The named part of a model, or the model itself.

    Raises:
        LayerError: there is no such part.
    """
    if name is None:
        return model
    if not isinstance(name, str) or not name:
        raise TypeError(f"module must be the name of a submodule, or None for the whole model; got {name!r}.")
    try:
        return model.get_submodule(name)
    except AttributeError:
        known = [found for found, _ in model.named_modules() if found]
        raise LayerError(
            f"module={name!r}: {type(model).__name__} has no such submodule.{did_you_mean(name, known)}"
        ) from None
