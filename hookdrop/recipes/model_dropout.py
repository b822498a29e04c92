"""Built-in dropout of a model: list its rates, and change them temporarily."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import nn

from hookdrop.errors import LayerError, nearest, nothing_placed
from hookdrop.hooks import compiling
from hookdrop.injection.text import as_schedule
from hookdrop.recipes.dropout_change import DropoutChange
from hookdrop.recipes.dropout_rates import Rate, find_out_of_reach, find_rates
from hookdrop.schedules import ConstantSchedule, Schedule
from hookdrop.schedules.base import in_steps
from hookdrop.utils.names import glob_expression, unwrapped
from hookdrop.utils.tables import counted, html_table, some, text_table
from hookdrop.utils.validation import rate as valid_rate

Rates: TypeAlias = float | Callable[[str, float], float]
_HEADER = ("name", "type", "rate")


def set_dropout(
    model: nn.Module,
    p: Rates | Mapping[str | re.Pattern[str], Rates],
    schedule: Schedule | str | None = None,
    total_steps: int | None = None,
) -> DropoutChange:
    """Change the rates of a model's built-in dropout until the handle is removed, at once or by a schedule.

    This covers the dropout modules of PyTorch, timm (`drop`, `attn_drop`, `drop_path`) and torchvision
    (`StochasticDepth`), and rates that a forward reads at each call: `attention_dropout` of transformers, `dropout` of
    `nn.LSTM`. `report_dropout` lists their names. `set_dropout` does not change `model.config`, and does not add
    dropout: where a layer was built without dropout, or with an `Identity`, use `inject`.

    Args:
        model: any module, wrapped or not.
        p: one rate in [0, 1] for all, a function from (name, rate) to a rate, or a mapping from names, globs and
            compiled regular expressions to either. Rates that no pattern matches do not change.
        schedule: how the rates change with optimizer steps, as in `inject`; None sets them once. The rate at a step is
            `p` times the schedule's multiplier: the old rate plays no role until `remove()`.
        total_steps: the length of the training in optimizer steps, for a schedule with fractions of it.

    Returns:
        A handle: `remove()`, or leaving the `with` block, restores the old rates. With a schedule, call
        `follow(optimizer)`, `step()` or `seek(step)`, as for an injection.

    Raises:
        LayerError: the model has no rate to change, a pattern matches nothing, or two patterns match the same name.
        InjectionError: the schedule has fractions of the training, and `total_steps` is missing.
        ValueError, TypeError: a rate is out of range, now or at the peak of the schedule, or an argument is invalid.
            After any error all rates are unchanged.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1))
        >>> with set_dropout(model, 0.5) as change:
        ...     print(change, model[1].p)
        <1 rate changed: '1' 0.1 -> 0.5> 0.5
        >>> model[1].p
        0.1
        >>> halved = set_dropout(model, {"1": lambda name, rate: rate / 2})
        >>> drop = set_dropout(model, 0.4, schedule=LinearSchedule(steps=10))
        >>> drop.step(5)
        >>> drop
        <1 rate changed: '1' 0.05 -> 0.2; step 5 of LinearSchedule(steps=10)>
    """
    with nothing_placed():
        compiling.raise_if_tracing("set_dropout()")
        timing = ConstantSchedule() if schedule is None else in_steps(as_schedule(schedule, "set_dropout"), total_steps)
        found = find_rates(model)
        if not found:
            raise LayerError(
                f"set_dropout found no rate that it can change in {type(model).__name__}.\n"
                "  list all dropout: report_dropout(model)   add dropout: inject(model, Dropout(p=...), layers=...)"
            )
        values = zip(found, _new_values(found, p), strict=True)
        wanted = [(rate, value) for rate, value in values if value is not None]
        if schedule is None:
            wanted = [(rate, value) for rate, value in wanted if value != rate.value]
        return DropoutChange(unwrapped(model), wanted, timing)


def report_dropout(model: nn.Module) -> DropoutReport:
    """List a model's built-in dropout: each rate by name, and the dropout that cannot be changed.

    Injected hooks are not listed; `hookdrop.find(model)` returns them.

    Example:
        >>> print(report_dropout(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.LSTM(4, 4, 2, dropout=0.2))))
        2 dropout rates in Sequential
        name       type     rate
        ---------  -------  ----
        1          Dropout   0.1
        2.dropout  LSTM      0.2
        searched the source of forward and the methods it calls, but no other functions
    """
    return DropoutReport(type(model).__name__, find_rates(model), find_out_of_reach(model))


@dataclass(frozen=True)
class DropoutReport:
    """The result of `report_dropout`; `print` it."""

    model: str
    rates: Sequence[Rate]
    """Each has `name`, `module`, `attribute` and the current `value`."""
    out_of_reach: Mapping[str, Sequence[str]]
    """Dropout that `set_dropout` cannot change: descriptions of the code, with the names of the modules that run it."""

    def __str__(self) -> str:
        lines = [self._title(), text_table(_HEADER, self._rows())] if self.rates else [self._title()]
        for what, names in self.out_of_reach.items():
            lines.append(f"out of reach: {what} ({some([name or 'the model' for name in names])})")
        searched = "searched the source of forward and the methods it calls, but no other functions"
        return "\n".join([*lines, searched])

    def _repr_html_(self) -> str:
        return html_table(_HEADER, self._rows(), "\n".join([self._title(), *self.out_of_reach]))

    def _rows(self) -> list[tuple[str, str, str]]:
        return [(rate.name or "(the model)", type(rate.module).__name__, f"{rate.value:g}") for rate in self.rates]

    def _title(self) -> str:
        return f"{counted(len(self.rates), 'dropout rate')} in {self.model}"


def _new_values(found: Sequence[Rate], p: Rates | Mapping[str | re.Pattern[str], Rates]) -> list[float | None]:
    """Return the new value of each rate; None keeps the old value."""
    if not isinstance(p, Mapping):
        return [_new_value(rate, p) for rate in found]
    if not p:
        raise LayerError(
            "set_dropout: the mapping is empty, so no rate would change.\n"
            f"  rates:      {some([rate.name for rate in found])}\n  change all: set_dropout(model, p)"
        )
    chosen: dict[Rate, tuple[object, float]] = {}
    for pattern, value in p.items():
        for rate in _matching(found, pattern):
            if rate in chosen:
                raise LayerError(f"set_dropout: two patterns match {rate.name!r}: {chosen[rate][0]!r} and {pattern!r}.")
            chosen[rate] = pattern, _new_value(rate, value)
    return [chosen[rate][1] if rate in chosen else None for rate in found]


def _matching(found: Sequence[Rate], pattern: str | re.Pattern[str]) -> list[Rate]:
    if not isinstance(pattern, str | re.Pattern):
        raise TypeError(f"set_dropout: a key must be a name, a glob or a compiled regular expression, got {pattern!r}.")
    exact = [rate for rate in found if rate.name == pattern]
    expression = glob_expression(pattern) if isinstance(pattern, str) else pattern
    if matching := exact or [rate for rate in found if expression.fullmatch(rate.name)]:
        return matching
    names = [rate.name for rate in found]
    near = nearest(pattern, names) if isinstance(pattern, str) else []
    raise LayerError(
        f"set_dropout: {pattern!r} matches none of the {len(names)} dropout rates by name.\n"
        f"  {'did you mean' if near else 'their names'}: {some(near or names)}\n"
        "  see all: print(hookdrop.recipes.report_dropout(model))"
    )


def _new_value(rate: Rate, value: Rates) -> float:
    given = value(rate.name, rate.value) if callable(value) else value
    return valid_rate(given, "p", f"set_dropout, {rate.name!r}" if rate.name else "set_dropout")
