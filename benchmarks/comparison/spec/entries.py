"""Which runs make an arm of a comparison."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from comparison.analysis.schema import Tuning
from comparison.spec.run_spec import Arm, Run

Control = Literal["", "aa", "seeds"]


@dataclass(frozen=True)
class Entry:
    """An arm in one cell, with the final run of each seed."""

    cell: str
    arm: Arm
    runs: Mapping[int, Run]
    """By the seed of the pair. The run's own seed is another one for the control that has other seeds."""
    control: Control = ""
    """`aa`: p = 0 injected, has to be bit-equal to none. `seeds`: none again, with other seeds."""
    tuning: Tuning | None = None
    """Its own; None if its settings are those that were written, or another arm's."""
    like: str = ""
    """The arm whose tuned settings it takes, if it is not tuned itself."""
    command: str = ""
    """A shell command that makes these runs."""
