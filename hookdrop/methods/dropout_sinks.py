"""The dropout that a model already has, as sinks of an injection.

Its rate is an attribute of a module, and a table here, weak like a hook table, says which injection drives it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from hookdrop.core import events
from hookdrop.core.errors import warn
from hookdrop.core.registry import finders, shared_finders
from hookdrop.core.regularizer import NO_RATE, CurrentRate, P
from hookdrop.core.sink import RateSink
from hookdrop.core.state import InjectionState
from hookdrop.core.tables import counted, some

if TYPE_CHECKING:
    from hookdrop.methods.training_mode import TrainingMode


def attribute_of(module: nn.Module | None, path: str) -> tuple[Any, str]:
    """Return the object that has the attribute, and its name: `"config.layerdrop"` is one of `module.config`."""
    *owners, name = path.split(".")
    return reduce(lambda owner, name: getattr(owner, name, None), owners, module), name


class ObservedRate(float):
    """A rate that shows where it arrives. Copies are plain numbers."""

    sink: AttributeSink

    def __reduce__(self) -> Any:
        return float, (float(self),)


class DropoutSink(RateSink):
    """A dropout that the model already has: of a function whose rate is in the code, which can only be sampled.

    It holds the module weakly.
    """

    at = "attribute"
    rate = P
    p_scale = 1.0
    placed = False  # like the rest of the state, an attribute

    @staticmethod
    def place_of(module: nn.Module | None, what: Any) -> Any:
        # Layers that share an object with a rate share this place.
        owner, name = attribute_of(module, what.attribute)
        return id(owner), what.at, name, what.constant

    def __init__(self, site: Any, plan: Any, state: InjectionState) -> None:
        self.site, self.state, state.live.survey = site.name, state, plan.survey
        self.attribute, self.constant = site.attribute, site.constant
        """`attribute` is the function that drops, at the rate `constant`, if there is one."""
        self.target = self.initial_target = None
        self._link(site.module)

    def _link(self, module: nn.Module) -> None:
        self.module: weakref.ref[nn.Module] = weakref.ref(module)
        self.placed = True
        self.runners: Sequence[weakref.ref[nn.Module]] | None = None
        """The modules whose own forward drops at this rate; None before the first sampling."""
        self.training_modes: list[TrainingMode] = []
        """Those of the runners while they are sampled."""
        self.observers: list[Callable[..., None]] = []
        """While there are any, the attribute shows that it is this rate."""
        self.state.live.members.add(self)
        self.state.live.known_sites.add(self.site)
        _dropout_sinks.setdefault(module, []).append(self)

    def place(self, module: nn.Module) -> None:
        self.state.live.trained = True  # without hooks, nothing notes the calls
        state, target = self.state, self.target
        value = None if target is None else target * state.multiplier * self.p_scale
        self.set_rate(NO_RATE if value is None else CurrentRate(value, value == 0.0), state.on, state.sampling)

    def before_sampling(self, model: Callable[[], nn.Module]) -> None:
        if self.runners is None:
            from hookdrop.methods.runners import find_runners  # only sampling needs it

            find_runners(model(), self.state)

    @property
    def is_attached(self) -> bool:
        return self.placed and self.module() is not None

    @property
    def is_ours(self) -> bool:
        """Whether the module exists and has the value that this sink set last."""
        return self.module() is not None

    @property
    def p(self) -> float:
        return self.constant or 0.0

    def set_rate(self, rate: CurrentRate, on: bool, sampling: bool) -> None:
        self._sample(on and sampling)

    def show(self) -> None:
        """Write the rate to the attribute, in a form that says whose it is if it is observed."""

    def observe(self, before: Tensor, after: Tensor, dropped: Tensor | None) -> None:
        """Pass a drop to the observers; see `measurement.Record`."""
        for observer in self.observers:
            observer(self, self.p, before, after, dropped)

    def _sample(self, active: bool) -> None:
        """Keep the runners in training mode, or end this."""
        if active and not self.training_modes:
            from hookdrop.methods.training_mode import TrainingMode  # only sampling needs it

            found = [module for one in self.runners or () if (module := one()) is not None]
            self.training_modes = [TrainingMode(module, self._settings) for module in found]
        elif not active:
            for mode in self.training_modes:
                mode.remove()
            self.training_modes = []

    def _settings(self) -> list[tuple[Any, str, Any]]:
        """Return the object, the attribute and the value of the present rate, for a recompute."""
        return []

    def valid_target(self, value: object) -> float:
        return P.valid(value, f"{self.state.name} at {self.site!r}")

    def describe(self, rate: float | None = None) -> str:
        return f"{type(self.module()).__name__}: {self.attribute} at {self.p:g}"

    def remove(self) -> None:
        self._sample(False)
        self.observers = []
        if (module := self.module()) is not None:
            _dropout_sinks[module].remove(self)
        self.placed = False

    # A pickled or copied handle includes its model.

    def __getstate__(self) -> dict[str, Any]:
        live = ("runners", "training_modes", "observers")
        return {key: value for key, value in self.__dict__.items() if key not in live} | {"module": self.module()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        module = state.pop("module")
        self.__dict__.update(state)
        self._link(module)


class AttributeSink(DropoutSink):
    """A rate of the dropout that a model already has: an attribute of a module.

    The attribute may be one of an object that the module holds, such as `"config.layerdrop"`.
    """

    def __init__(self, site: Any, plan: Any, state: InjectionState) -> None:
        super().__init__(site, plan, state)
        self.target, self.initial_target, self.p_scale = site.target, site.target, site.p_scale
        self.before: Any = getattr(*attribute_of(site.module, self.attribute))
        """The attribute as it was."""
        self.value = float(self.before)
        """What this sink set last."""

    @property
    def is_ours(self) -> bool:
        module = self.module()
        return module is not None and getattr(*attribute_of(module, self.attribute), None) == self.value

    @property
    def p(self) -> float:
        return self.value

    def set_rate(self, rate: CurrentRate, on: bool, sampling: bool) -> None:
        value = rate.value if on and rate.value is not None else 0.0
        super().set_rate(rate, value != 0.0, sampling)
        module = self.module()
        if module is None or not self.placed or value == self.value:
            return
        if not self.is_ours:
            self.state.warn_once(
                "changed again",
                f"{self.state.name!r} does not change {self.site!r}, which something else has changed since.\n"
                "  it continues once the later change is removed.",
            )
            return
        setattr(*attribute_of(module, self.attribute), value)
        self.value = value
        self.show()

    def _settings(self) -> list[tuple[Any, str, Any]]:
        return [(*attribute_of(self.module(), self.attribute), self.value)]

    def show(self) -> None:
        if self.is_ours:
            value = self.value
            if self.observers:
                value = ObservedRate(value)
                value.sink = self
            setattr(*attribute_of(self.module(), self.attribute), value)

    def describe(self, rate: float | None = None) -> str:
        kind = type(self.module()).__name__
        return f"{kind}.{self.attribute}={self.target if rate is None else rate:g} (was {float(self.before):g})"

    def take_over(self, replaced: Sequence[RateSink]) -> None:
        place = self.place_of(self.module(), self)
        for old in reversed(replaced):  # the oldest has what was there before
            if isinstance(old, AttributeSink) and old.place_of(old.module(), old) == place:
                self.before, old.before, old.value = old.before, self.value, self.value

    def remove(self) -> None:
        super().remove()
        module = self.module()
        if self.is_ours and getattr(*attribute_of(module, self.attribute)) is not self.before:
            setattr(*attribute_of(module, self.attribute), self.before)


_dropout_sinks: weakref.WeakKeyDictionary[nn.Module, list[DropoutSink]] = weakref.WeakKeyDictionary()


def _sinks_of(model: nn.Module) -> Iterator[tuple[nn.Module, DropoutSink]]:
    for module in model.modules() if _dropout_sinks else ():
        for sink in _dropout_sinks.get(module, ()):
            yield module, sink


def _warn_about_changed(model: nn.Module | None, sinks: Sequence[RateSink]) -> None:
    """Warn about rates that a removal will not restore, because something else has changed them since."""
    attributes = [sink for sink in sinks if isinstance(sink, AttributeSink) and model is not None]
    if changed := [sink.site for sink in attributes if sink.module() is not None and not sink.is_ours]:
        warn(
            f"{attributes[0].state.name!r} does not restore {counted(len(changed), 'rate')} that something else has "
            f"changed since: {some(changed)}.\n  remove injections in reverse order."
        )


def _all_sinks() -> Iterator[tuple[nn.Module, DropoutSink]]:
    """Yield those of all models: a rate may belong to an object that layers of several models share."""
    for module, sinks in _dropout_sinks.items():
        for sink in sinks:
            yield module, sink


finders.append(_sinks_of)
shared_finders.append(_all_sinks)
events.removing.append(lambda model, states, sinks: _warn_about_changed(model, sinks))
events.replacing.append(_warn_about_changed)
