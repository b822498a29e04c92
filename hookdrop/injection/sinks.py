"""What an injection drives: hooks, and rates of the dropout that a model already has.

A hook belongs to its module's hook table. A rate of the model's own dropout is an attribute of a module, and a table
here, weak like a hook table, says which injection drives it.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator
from operator import attrgetter
from typing import Any, TypeAlias

from torch import nn

from hookdrop.hooks.hook import CurrentRate, SiteHook
from hookdrop.hooks.registry import hooks_of, remove_hooks
from hookdrop.hooks.state import InjectionState
from hookdrop.regularizers.base import P
from hookdrop.utils.errors import warn
from hookdrop.utils.tables import counted, some


class AttributeSink:
    """A rate of the dropout that a model already has: an attribute of a module, which is held weakly.

    The attribute may be one of an object that the module holds, such as `"config.layerdrop"`.
    """

    at = "attribute"
    rate = P

    def __init__(
        self, site: str, module: nn.Module, attribute: str, target: float, p_scale: float, state: InjectionState
    ) -> None:
        self.site, self.attribute, self.p_scale, self.state = site, attribute, p_scale, state
        self.target: float | None = target
        self.initial_target: float | None = target
        self.before: Any = attrgetter(attribute)(module)
        """The attribute as it was."""
        self.value = float(self.before)
        """What this sink set last."""
        self._link(module)

    def _link(self, module: nn.Module) -> None:
        self.module: weakref.ref[nn.Module] = weakref.ref(module)
        self.placed = True
        self.state.live.members.add(self)
        _attribute_sinks.setdefault(module, []).append(self)

    @property
    def is_attached(self) -> bool:
        return self.placed and self.module() is not None

    @property
    def is_ours(self) -> bool:
        """Whether the module exists and has the value that this sink set last."""
        module = self.module()
        return module is not None and float(attrgetter(self.attribute)(module)) == self.value

    @property
    def p(self) -> float:
        return self.value

    def set_rate(self, rate: CurrentRate, on: bool, sampling: bool) -> None:
        value = rate.value if on and rate.value is not None else 0.0
        module = self.module()
        if module is None or value == self.value:
            return
        if not self.is_ours:
            self.state.warn_once(
                "changed again",
                f"{self.state.name!r} does not change {self.site!r}, which something else has changed since.\n"
                "  it continues once the later change is removed.",
            )
            return
        self._write(module, value)
        self.value = value

    def _write(self, module: nn.Module, value: object) -> None:
        path, _, name = self.attribute.rpartition(".")
        setattr(attrgetter(path)(module) if path else module, name, value)

    def valid_target(self, value: object) -> float:
        return P.valid(value, f"{self.state.name} at {self.site!r}")

    def describe(self, rate: float | None = None) -> str:
        kind = type(self.module()).__name__
        return f"{kind}.{self.attribute}={self.target if rate is None else rate:g} (was {float(self.before):g})"

    def take_over(self, states: Collection[InjectionState]) -> None:
        """Make the sinks that this one replaces leave the attribute as it is, and restore what they would."""
        module = self.module()
        for other in () if module is None else _attribute_sinks[module]:
            if other.state in states and other.attribute == self.attribute:
                self.before, other.before, other.value = other.before, self.value, self.value

    def remove(self) -> None:
        module = self.module()
        if module is not None:
            _attribute_sinks[module].remove(self)
            if self.is_ours and attrgetter(self.attribute)(module) is not self.before:
                self._write(module, self.before)
        self.placed = False

    # A pickled or copied handle includes its model.

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"module": self.module()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        module = state.pop("module")
        self.__dict__.update(state)
        self._link(module)


RateSink: TypeAlias = SiteHook | AttributeSink
"""Whatever has a rate that an injection can set."""

_attribute_sinks: weakref.WeakKeyDictionary[nn.Module, list[AttributeSink]] = weakref.WeakKeyDictionary()


def sinks_of(model: nn.Module) -> Iterator[tuple[nn.Module, RateSink]]:
    """Yield everything that injections drive in `model`: hooks first, each in `named_modules()` order."""
    yield from hooks_of(model)
    if _attribute_sinks:
        for module in model.modules():
            for sink in _attribute_sinks.get(module, ()):
                yield module, sink


def remove_sinks(model: nn.Module | None, sinks: Iterable[RateSink]) -> None:
    """Remove hooks, and restore attributes; those that something else has changed since stay, with a warning."""
    removed = list(sinks)
    remove_hooks(model, [sink for sink in removed if isinstance(sink, SiteHook)])
    attributes = [sink for sink in removed if isinstance(sink, AttributeSink)]
    touched = [sink for sink in attributes if sink.module() is not None and not sink.is_ours]
    for sink in attributes:
        sink.remove()
    if touched:
        warn(
            f"{touched[0].state.name!r} did not restore {counted(len(touched), 'rate')} that something else has "
            f"changed since: {some([sink.site for sink in touched])}.\n  remove injections in reverse order."
        )
