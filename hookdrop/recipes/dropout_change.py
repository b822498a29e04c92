"""The handle of `set_dropout`: the changed rates of a model's built-in dropout, with a schedule."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, ClassVar

from torch import nn

from hookdrop.errors import InjectionError, LayerError, warn
from hookdrop.guards import progress
from hookdrop.guards.updates import schedule_problems
from hookdrop.hooks.state import InjectionState
from hookdrop.injection import state_dict
from hookdrop.injection.scheduled import ScheduledHandle, rate_lock
from hookdrop.recipes.dropout_rates import Rate
from hookdrop.schedules import Schedule
from hookdrop.utils.tables import counted, some
from hookdrop.utils.validation import rate as valid_rate

_states: weakref.WeakKeyDictionary[nn.Module, set[InjectionState]] = weakref.WeakKeyDictionary()
"""By model, so that a schedule that is not advancing is noticed even if the program did not keep the handle."""


class ChangedRate:
    """One changed rate. Holds its module weakly."""

    def __init__(self, found: Rate, target: float) -> None:
        self.site = found.name
        self.module = weakref.ref(found.module)
        self.attribute = found.attribute
        self.before: Any = getattr(found.module, found.attribute)
        """The attribute as it was."""
        self.value = found.value
        """What this handle set last."""
        self.target: float | None = target
        self.initial_target: float | None = target

    def at(self, multiplier: float) -> float:
        """Return the rate at a multiplier of the schedule, or raise `ValueError` if it is out of range."""
        assert self.target is not None
        try:
            return self.valid_target(self.target * multiplier)
        except ValueError as error:
            where = f"at {self.site!r}: p {self.target:g} x schedule {multiplier:g}"
            raise ValueError(f"{error}\n  {where}. No rate was changed.") from None

    def valid_target(self, value: object) -> float:
        """Return `value` as a float, or raise if it is not a probability."""
        return valid_rate(value, "p", f"set_dropout, {self.site!r}" if self.site else "set_dropout")

    @property
    def is_ours(self) -> bool:
        """Whether the module still exists and has the value that this handle set last."""
        module = self.module()
        return module is not None and float(getattr(module, self.attribute)) == self.value

    def write(self, value: object) -> None:
        """Set the attribute."""
        setattr(self.module(), self.attribute, value)


class DropoutChange(ScheduledHandle):
    """The handle of `set_dropout`: drives the rates by a schedule, and restores the old ones.

    It does not keep the model alive. Copies of the model keep the rates that they were copied with.
    """

    _made_by: ClassVar[str] = "set_dropout()"

    def __init__(self, model: nn.Module, wanted: Sequence[tuple[Rate, float]], schedule: Schedule) -> None:
        self._rates = [ChangedRate(found, target) for found, target in wanted]
        self._model = weakref.ref(model)
        self._state = InjectionState("set_dropout", tuple(rate.site for rate in self._rates), schedule)
        self._check_peak()
        self._update()
        if self._state.scheduled:
            self._state.live.trained = True  # a deleted model needs no warning: its rates are gone too
            progress.watch(model, self._state)
            _states.setdefault(model, set()).add(self._state)

    @property
    def rates(self) -> dict[str, tuple[float, float]]:
        """(old rate, new rate) by name; with a schedule, the new rate is that of the current step."""
        return {rate.site: (float(rate.before), rate.value) for rate in self._rates}

    def state_dict(self) -> dict[str, Any]:
        """Return the step count and the target rates by name, for `load_state_dict`."""
        self._check_not_removed("state_dict()")
        return state_dict.save(self._state, self._rates)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Resume from a saved state, with the schedule that the code sets.

        Raises:
            StateError: the names of the rates differ (with `strict`), or `state` is invalid. Nothing was loaded.
        """
        self._check_not_removed("load_state_dict()")
        state_dict.load(self._state, self._rates, state, strict, self._changing)

    def remove(self) -> None:
        """Restore the old rates; a second call does nothing."""
        if self._state.removed:
            return
        try:
            counter = self._state.live.update_counter
            for kind, text in schedule_problems(self._state, counter is not None and counter.updates > 0).items():
                self._state.warn_once(kind, text)
        finally:
            self._restore()

    def _restore(self) -> None:
        with rate_lock:
            self._stop()
            if (model := self._model()) is not None:
                _states.get(model, set()).discard(self._state)
            here = [rate for rate in self._rates if rate.module() is not None]
            ours = [rate for rate in here if rate.is_ours]
            for rate in ours:
                rate.write(rate.before)
        if touched := [rate.site for rate in here if rate not in ours]:
            warn(
                f"set_dropout did not restore {counted(len(touched), 'rate')} that changed again since: "
                f"{some(touched)}.\n  remove changes in reverse order."
            )

    # --- changing the rates

    def _seek(self, step: int) -> None:
        live, before = self._state.live, self._state.step_count
        with self._changing(check_peak=False):
            self._state.step_count = step
        live.was_stepped = True
        live.moves += step != before

    @contextmanager
    def _changing(self, check_peak: bool = True) -> Iterator[None]:
        with rate_lock:
            state = self._state
            before = state.step_count, state.enabled, [rate.target for rate in self._rates]
            try:
                yield
                if check_peak:
                    self._check_peak()
                self._update()
            except BaseException:
                state.step_count, state.enabled, targets = before
                for rate, target in zip(self._rates, targets, strict=True):
                    rate.target = target
                raise
        self._warn_about_skipped()

    def _check_peak(self) -> None:
        for rate in self._rates:
            rate.at(self._state.schedule.peak or 0.0)

    def _update(self) -> None:
        """Set the rates of the current step, or none of them after an error."""
        multiplier = self._state.multiplier if self._state.on else 0.0
        here = [(rate, rate.at(multiplier)) for rate in self._rates if rate.module() is not None]
        _write_all([(rate, value) for rate, value in here if rate.is_ours])

    def _warn_about_skipped(self) -> None:
        if skipped := [rate.site for rate in self._rates if rate.module() is not None and not rate.is_ours]:
            self._state.warn_once(
                "changed again",
                f"set_dropout: the schedule left out {counted(len(skipped), 'rate')} that changed again since: "
                f"{some(skipped)}.\n  it continues once the later change is removed.",
            )

    def _is_attached(self) -> bool:
        return any(rate.module() is not None for rate in self._rates)

    def _require_model(self) -> nn.Module:
        if (model := self._model()) is not None:
            return model
        raise InjectionError(
            "the model that set_dropout changed was deleted.\n"
            "  a handle does not keep its model alive: keep a reference to the model."
        )

    # Copying or pickling a handle includes its model. The copy follows no optimizer.

    def __getstate__(self) -> dict[str, Any]:
        modules = [rate.module() for rate in self._rates]
        rates = [vars(rate) | {"module": module} for rate, module in zip(self._rates, modules, strict=True)]
        return {"model": self._require_model(), "state": self._state, "rates": rates}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._model, self._state, self._rates = weakref.ref(state["model"]), state["state"], []
        for settings in state["rates"]:
            rate = ChangedRate.__new__(ChangedRate)
            vars(rate).update(settings | {"module": weakref.ref(settings["module"])})
            self._rates.append(rate)

    def __enter__(self) -> DropoutChange:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.remove()
        elif not self._state.removed:  # do not distract from the error with a warning about the schedule
            self._restore()

    def __repr__(self) -> str:
        changes = [f"{name!r} {before:g} -> {after:g}" for name, (before, after) in self.rates.items()]
        more = f", and {len(changes) - 4} more" if len(changes) > 4 else ""
        step = f"; step {self.step_count} of {self.schedule}" if self._state.scheduled else ""
        return f"<{counted(len(changes), 'rate')} changed: {', '.join(changes[:4])}{more}{step}>"


def _write_all(wanted: Sequence[tuple[ChangedRate, float]]) -> None:
    """Set all rates, or restore all if one cannot be set."""
    before = [(rate, getattr(rate.module(), rate.attribute)) for rate, _ in wanted]
    for rate, value in wanted:
        try:
            rate.write(value)
        except Exception as error:
            for other, old in before:
                with suppress(Exception):
                    other.write(old)
            raise LayerError(
                f"set_dropout: cannot set {rate.site!r} to {value:g}: {type(rate.module()).__name__} raised "
                f"{type(error).__name__}: {error}.\n  All rates are unchanged. To skip this one, name the "
                "others: set_dropout(model, {name: p, ...})"
            ) from error
    for rate, value in wanted:
        rate.value = value
