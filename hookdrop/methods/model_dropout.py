"""The dropout that a model already has, as a recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import nn

from hookdrop.core.errors import InjectionError, LayerError
from hookdrop.core.recipe import Recipe, RecipeSite
from hookdrop.core.regularizer import P
from hookdrop.core.selection import Layer, named_layers, unregistered, values_by_entry
from hookdrop.core.tables import some
from hookdrop.survey.drop_rates import DropRate, DropRates, known_drop_rates
from hookdrop.survey.facts import Survey


@dataclass(frozen=True)
class set_dropout(Recipe):
    """Change the rates of the dropout that a model already has, at once or by a schedule, until the handle is removed.

    `plan(model, set_dropout())` lists the rates, and the dropout that is out of reach. The recipe finds them by running
    the model once in training mode: dropout modules of any library, `attention_dropout` of transformers, `dropout` of
    `nn.LSTM`, and any other attribute whose value arrives at a random drop. Without an example input it finds
    PyTorch's own dropout modules only, and says so. It adds no dropout: where a layer was built without dropout, or
    with an `Identity`, inject a regularizer.

    The rate at a step is `p` times the factor of `p_scale` and the schedule's multiplier. `remove()` restores the old
    rates. Copies of the model keep the rates that they were copied with.

    Args:
        p: one rate in [0, 1] for all, or a mapping from entries to rates, as those of `layers` but for the names of the
            rates; those that no entry matches do not change. None keeps each rate, for a schedule or `p_scale`.

    Raises:
        LayerError: the model has no rate to change, an entry matches nothing, or two entries match the same name.
        ValueError, TypeError: a rate is out of range, or `p` has the wrong type.

    Example:
        >>> model, x = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1), torch.randn(2, 3, 4)
        >>> with inject(model, set_dropout(p={"dropout?": 0.5}), example_input=x):
        ...     print(model.dropout.p, model.dropout1.p, model.dropout2.p)
        0.1 0.5 0.5
        >>> model.dropout1.p
        0.1
        >>> ramp = LinearSchedule(steps=10)
        >>> drop = inject(model, set_dropout(), schedule=ramp, example_input=x)
        >>> drop.seek(5)
        >>> model.dropout1.p
        0.05

    Reference: dropout only early or only late in the training, Liu et al. 2023, "Dropout reduces underfitting",
    arXiv:2303.01500.
    """

    p: float | Mapping[Any, float] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.p, Mapping):
            if not self.p:
                raise LayerError("set_dropout: the mapping is empty, so no rate would change.")
            for entry, value in self.p.items():
                P.valid(value, f"set_dropout at {entry!r}")
        elif self.p is not None:
            P.valid(self.p, "set_dropout")

    def sites(self, model: nn.Module, survey: Survey) -> Sequence[RecipeSite]:
        rates, constants = _current_rates(model, survey), _find(model, survey)[0].constants
        if not rates and (self.p is not None or not constants):
            raise LayerError(
                f"set_dropout found no rate that it can change in {type(model).__name__}."
                + "".join(f"\n  {text}" for text in _left_out(model, survey, changes=True))
                + "\n  add dropout: inject(model, Dropout(p=...), layers=...)" * (self.p != 0)
            )
        if isinstance(self.p, Mapping):
            named = [Layer(label, model.get_submodule(rate.layer), {label}) for label, (rate, _) in rates.items()]
            values = values_by_entry(named, self.p, "set_dropout", "dropout rates")
            constants = []
        else:
            values = {label: value if self.p is None else self.p for label, (_, value) in rates.items()}
        changed = [
            RecipeSite(rate.layer, None, attribute=rate.attribute, p=values[label], label=label)
            for label, (rate, _) in rates.items()
            if label in values
        ]
        fixed = [
            RecipeSite(one.layer, None, attribute=one.attribute, constant=one.constant, label=_label(one))
            for one in constants
        ]
        return [*changed, *fixed]

    def warnings(self, model: nn.Module, survey: Survey, sites: Sequence[RecipeSite]) -> Sequence[str]:
        if isinstance(self.p, Mapping):
            return ()
        return _left_out(model, survey, changes=self.p is not None)

    def groups(self, model: nn.Module, survey: Survey, sites: Sequence[RecipeSite]) -> Sequence[str]:
        return list(dict.fromkeys(site.name for site in sites if site.constant is None))


def _label(constant: DropRate) -> str:
    """Return the name of a drop whose rate is in the code, such as `"conv1.dropout(0.5)"`."""
    return ".".join(filter(None, (constant.layer, f"{constant.attribute}({constant.constant:g})")))


def _left_out(model: nn.Module, survey: Survey, changes: bool) -> list[str]:
    """Return what draws random numbers and is no site, or does not change."""
    found, why = _find(model, survey)
    if why:
        return [f"functional dropout was not looked for: {why}\n  to run the model, pass example_input="]
    places = [(what, list(layers)) for what, layers in found.out_of_reach.items()]
    if changes and found.constants:
        places.append(("rates that no attribute stores as a number", [_label(one) for one in found.constants]))
    eval_mode: Mapping[Any, list[str]] = {}
    with suppress(InjectionError):  # without values, or in training mode
        eval_mode = survey.draws_in_eval_mode
        draws = [(line, names) for line, names in survey.draws.items() if line not in eval_mode]
        places += [(_drawing(model, line, names), names) for line, names in draws]
    left = [f"out of reach, so it stays as it is: {_where(what, layers)}" for what, layers in places]
    always = [(_drawing(model, line, names), names) for line, names in eval_mode.items()]
    left += [f"random in eval mode too: {_where(what, names)}" for what, names in always]
    lists = unregistered(named_layers(model)) if always or found.constants else ""
    return left + [lists.strip()] * bool(lists)


def _drawing(model: nn.Module, line: Any, names: Sequence[str]) -> str:
    if not names:
        return f"random numbers of Python, NumPy or compiled code, which {line}, uses first"
    return f"{type(model.get_submodule(names[0])).__name__} calls {line}"


def _where(what: str, layers: Sequence[str]) -> str:
    return f"{what} ({some([name or 'the model' for name in layers])})" if layers else what


def _current_rates(model: nn.Module, survey: Survey) -> dict[str, tuple[DropRate, float]]:
    """Return the rates, with their current values, by a name to show: that of the module if it does nothing else."""
    found: dict[str, tuple[DropRate, float]] = {}
    for rate in _find(model, survey)[0].rates:
        module = model.get_submodule(rate.layer)
        only_drops = not any(module.children()) and not any(True for _ in module.parameters())
        full = ".".join(filter(None, (rate.layer, rate.attribute)))
        name = rate.layer if only_drops and rate.layer and rate.layer not in found else full
        found[name] = rate, rate.value_in(model)
    return found


def _find(model: nn.Module, survey: Survey) -> tuple[DropRates, str]:
    """Return the rates, and the reason if the model could not run."""
    try:
        return survey.all_drop_rates, ""
    except InjectionError as error:
        if getattr(survey, "is_given", False):  # by the user: the error says what is wrong with it
            raise
        return DropRates(tuple(known_drop_rates(model)), {}), str(error).partition("\n")[0]
