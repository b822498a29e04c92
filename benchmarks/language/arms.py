"""What is compared: the injections of each arm, and the settings that are tuned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hookdrop import InjectionSpec, LinearSchedule, parse

NONE = "none"
DECAYS = {"lstm": (0.1, 0.3), "decoder": (0.3, 1.0)}
DECAYS_OF_NONE = {"lstm": (0.03, 0.1, 0.2, 0.3, 0.5, 1.0), "decoder": (0.1, 0.3, 0.6, 1.0, 2.0, 4.0)}
"""Weight decays by model; `none` gets as many settings as an arm with three rates."""


@dataclass(frozen=True)
class Arm:
    """Injections whose rates are multiples of one tuned number, or a model with dropout of its own."""

    name: str
    model: str  # lstm, written_in, stacked or decoder
    injections: Sequence[Mapping[str, Any]] = ()  # `text` with {} for the rate, `rate` at the value 1, and `settings`
    values: Sequence[float] = ()  # tuned together with the weight decay; empty for an arm that takes those of `like`
    like: str = ""
    ramp: bool = False

    @property
    def family(self) -> str:
        """The model that it is compared on: the peers of `lstm` differ from it only in their dropout."""
        return "decoder" if self.model == "decoder" else "lstm"

    @property
    def penalizes(self) -> bool:
        """Whether it adds a term to the loss."""
        return any(one["text"].startswith("ActivationPenalty") for one in self.injections)

    def specs(self, value: float) -> list[InjectionSpec]:
        """The injections at a tuned value."""
        schedule = LinearSchedule(steps=1.0) if self.ramp else None
        return [
            InjectionSpec(
                parse(one["text"].format(one["rate"] * value)),
                schedule=schedule,
                name=str(i),
                on_existing="stack",
                **one["settings"],
            )
            for i, one in enumerate(self.injections)
        ]


def _at(text: str, rate: float, *layers: str, **rest: Any) -> Mapping[str, Any]:
    return {"text": text, "rate": rate, "settings": {"layers": list(layers) or None, **rest}}


_PLACES = ("embed", "lstm1", "lstm2")
_WEIGHTS = {"at": "parameters", "tensor": "weight_hh_*"}
_ROWS = _at("Dropout(p={}, shared=(1,))", 1.0, "embed", at="parameters")
_TAR = _at("ActivationPenalty(l2=0.0, slowness={})", 1.0, "lstm2")  # of the output before its dropout
_AR = _at("ActivationPenalty(l2={}, slowness=0.0)", 2.0, "lstm2")  # of the output after it
# AWD-LSTM at 1: the rates of Merity et al. 2017 for Penn Treebank.
_LOCKED = [_at("LockedDropout(p={})", rate, place) for place, rate in zip(_PLACES, (0.4, 0.25, 0.4), strict=True)]
_AWD = {
    "LockedDropout": _LOCKED,
    "rows of the embedding": [_at(_ROWS["text"], 0.1, "embed", at="parameters")],
    "WeightDrop": [_at("Dropout(p={})", 0.5, "lstm*", **_WEIGHTS)],
    "AR + TAR": [_TAR, _AR],
}


def _awd(without: str = "") -> list[Mapping[str, Any]]:
    """All parts of AWD-LSTM but one, with TAR first and AR last."""
    parts = {name: part for name, part in _AWD.items() if name != without}
    penalties = parts.pop("AR + TAR", [])
    return [*penalties[:1], *(one for part in parts.values() for one in part), *penalties[1:]]


_RATES = (0.2, 0.4, 0.6)
CONTROLS = {"lstm": "LockedDropout", "decoder": "residual_dropout"}
"""By model: the arm whose hooks at p = 0 must leave the runs of none bit-identical."""
ARMS = [
    Arm(NONE, "lstm"),
    Arm("Dropout", "lstm", [_at("Dropout(p={})", 1.0, *_PLACES)], _RATES),
    Arm("LockedDropout", "lstm", [_at("LockedDropout(p={})", 1.0, *_PLACES)], _RATES),
    Arm("rows of the embedding", "lstm", [_ROWS], (0.1, 0.2, 0.4)),
    Arm("WeightDrop", "lstm", [_at("Dropout(p={})", 1.0, "lstm*", **_WEIGHTS)], (0.25, 0.5, 0.7)),
    Arm("AR + TAR", "lstm", [_TAR, _AR], (0.5, 1.0, 2.0)),
    Arm("AWD-LSTM", "lstm", _awd(), (0.5, 1.0, 1.5)),
    *(Arm(f"AWD-LSTM without {part}", "lstm", _awd(part), like="AWD-LSTM") for part in _AWD),
    # A ramp to p has the mean p / 2.
    Arm(
        "LockedDropout (ramp to p)",
        "lstm",
        [_at("LockedDropout(p={})", 1.0, *_PLACES)],
        like="LockedDropout",
        ramp=True,
    ),
    Arm("LockedDropout (p / 2)", "lstm", [_at("LockedDropout(p={})", 0.5, *_PLACES)], like="LockedDropout"),
    Arm("nn.Dropout written in", "written_in", like="Dropout"),
    Arm("nn.LSTM(dropout=)", "stacked", like="Dropout"),
    Arm(NONE, "decoder"),
    Arm("residual_dropout", "decoder", [_at("residual_dropout(p={})", 1.0)], (0.1, 0.2, 0.4)),
    Arm("layer_drop", "decoder", [_at("layer_drop(p={})", 1.0)], (0.1, 0.2, 0.4)),
    Arm("head_dropout", "decoder", [_at("head_dropout(p={})", 1.0)], (0.1, 0.2, 0.4)),
    Arm("drop_key", "decoder", [_at("drop_key(p={})", 1.0)], (0.1, 0.2, 0.4)),
    Arm("neftune", "decoder", [_at("neftune(alpha={})", 1.0)], (5.0, 10.0, 20.0)),
    Arm("TokenDropout", "decoder", [_at("TokenDropout(p={})", 1.0, "**.embed_tokens")], (0.1, 0.2, 0.4)),
]
