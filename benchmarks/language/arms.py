"""The arms of the study, read from `study.yaml`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hookdrop import InjectionSpec, LinearSchedule, parse

NONE = "none"
CONFIG: Mapping[str, Any] = yaml.safe_load(Path(__file__).with_name("study.yaml").read_text())
MODELS: Mapping[str, Any] = CONFIG["models"]


@dataclass(frozen=True)
class Arm:
    """What is injected, at rates proportional to one tuned value; a peer has dropout written into its model instead."""

    name: str
    model: str  # lstm, written_in, stacked or decoder
    injections: Sequence[Mapping[str, Any]] = ()
    values: Sequence[float] = ()  # tuned together with the weight decay; empty for an arm that takes those of `like`
    like: str = ""
    ramp: bool = False
    steps: float = 1.0  # times those of the other arms: more where each takes less time

    @property
    def family(self) -> str:
        """The model that it is compared on: the peers of `lstm` differ from it only in their dropout."""
        return self.model if self.model in MODELS else "lstm"

    @property
    def penalizes(self) -> bool:
        """Whether it adds a term to the loss."""
        return any(one["text"].startswith("ActivationPenalty") for one in self.injections)

    def specs(self, value: float) -> list[InjectionSpec]:
        schedule = LinearSchedule(steps=1.0) if self.ramp else None
        found = []
        for i, one in enumerate(self.injections):
            settings = {name: setting for name, setting in one.items() if name not in ("text", "rate")}
            made = parse(one["text"].format(one.get("rate", 1.0) * value))
            found.append(InjectionSpec(made, schedule=schedule, name=str(i), on_existing="stack", **settings))
        return found


ARMS = [
    Arm(**{**one, "model": model})
    for one in CONFIG["arms"]
    for model in (one["model"] if isinstance(one["model"], list) else [one["model"]])
]
