"""The injection of a trainer callback: placed, restored before or after placement, and removed."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from hookdrop.injection.handle import Injection
from hookdrop.injection.spec import InjectionSpec
from hookdrop.injection.verbs import inject


class Placement:
    """Places specs, or mappings of their settings, on a model: all or none. `specs` may come from a file."""

    def __init__(self, spec: Sequence[Any], specs: Any = ()) -> None:
        more = [specs] if isinstance(specs, InjectionSpec | Mapping | str) else specs or ()
        given = [*spec, *more]
        if not given:
            raise TypeError('pass at least one spec, such as InjectionSpec("Dropout(p=0.1)", layers="head")')
        self.specs = [one if isinstance(one, InjectionSpec) else InjectionSpec.from_dict(one) for one in given]
        self.injection: Injection | None = None
        self.pending: Mapping[str, Any] | None = None

    @property
    def is_relative(self) -> bool:
        """Whether a spec needs the length of the training."""
        return any(spec.is_relative for spec in self.specs)

    def place(self, model: nn.Module, total_steps: int | None) -> None:
        """Replace the injections of an earlier training by new ones, and restore a pending state."""
        self.remove()
        try:
            for spec in self.specs:
                placed = inject(model, spec, total_steps=total_steps)
                self.injection = placed if self.injection is None else self.injection._joined(placed)
            if self.pending:
                self.load_state_dict(self.pending)
        except BaseException:
            self.remove()
            raise
        finally:
            self.pending = None

    def seek(self, step: int) -> None:
        """Set the step of all schedules."""
        if self.injection is not None:
            self.injection.seek(step)

    def metrics(self) -> dict[str, float]:
        """The metrics of all injections, for loggers."""
        return {} if self.injection is None else self.injection.metrics()

    def remove(self) -> None:
        """Remove all hooks; while an exception is handled, without warnings that would distract from it."""
        if self.injection is not None:
            self.injection.__exit__(*sys.exc_info())
        self.injection = None

    def state_dict(self) -> dict[str, Any]:
        """The state of the injections; empty before they are placed."""
        return {} if self.injection is None else self.injection.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the injections; before they are placed, keep the state for `place`."""
        if self.injection is None:
            self.pending = state
        else:
            self.injection.load_state_dict(state)
