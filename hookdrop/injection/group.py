"""Control all injections of a model together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from hookdrop.diagnostics.measurement import Measurement
from hookdrop.diagnostics.recording import Recording
from hookdrop.diagnostics.uncertainty import Prediction
from hookdrop.errors import InjectionError, StateError
from hookdrop.hooks.hook import SiteHook
from hookdrop.hooks.registry import hooks_of
from hookdrop.hooks.state import InjectionState
from hookdrop.injection.handle import Injection
from hookdrop.injection.prediction import Settings, predict
from hookdrop.utils.captures import CopyDevice
from hookdrop.utils.tables import html_table

_HEADER = ("name", "sites", "p", "step", "schedule")


class Injections(tuple[Injection, ...]):
    """The injections on a model: a tuple that forwards calls to each of them, and finds them by name."""

    __slots__ = ()

    def __getitem__(self, key: Any) -> Any:
        """Get an injection by index or name, or a slice of injections."""
        if isinstance(key, slice):
            return Injections(super().__getitem__(key))
        if not isinstance(key, str):
            return super().__getitem__(key)
        named = self._by_name()
        if key not in named:
            raise InjectionError(f"this model has no injection named {key!r}; available: {', '.join(named) or 'none'}.")
        return named[key]

    def __add__(self, other: Any) -> Any:
        """Combine the injections of several models."""
        combined = super().__add__(other)
        return Injections(combined) if isinstance(other, Injections) else combined

    def step(self, n: int = 1) -> None:
        """Count `n` optimizer steps in each, or in none if one of them follows an optimizer."""
        for injection in self:
            injection._check_not_following()
        self._change_all(lambda injection: injection.step(n))

    def seek(self, step: int) -> None:
        """Set the step count of each, or of none after an error."""
        self._change_all(lambda injection: injection.seek(step))

    def follow(self, optimizer: Optimizer | None) -> Injections:
        """Make each follow `optimizer`, or none after an error."""
        with ExitStack() as undo:
            for injection in self:
                new = injection._follower is None
                injection.follow(optimizer)
                if new:
                    undo.callback(injection.follow, None)
            undo.pop_all()
        return self

    def disable(self) -> None:
        """Drop nothing in any injection until `enable`; the schedules continue."""
        self._change_all(Injection.disable)

    def enable(self) -> None:
        """Drop again in all injections after `disable`."""
        self._change_all(Injection.enable)

    def _change_all(self, change: Callable[[Injection], object]) -> None:
        """Apply a change to each, and undo it in all if one raises an error."""
        with self._enter_all(Injection._changing):
            for injection in self:
                change(injection)

    def probe(self, x: Any, forwards: int = 3, step: int | None = None) -> dict[str, Measurement]:
        """Probe one injection after another, by name, while the others keep their rates; see `Injection.probe`."""
        return {name: injection.probe(x, forwards, step) for name, injection in self._by_name().items()}

    def summary(self) -> str:
        """Return the tables of all injections."""
        return "\n\n".join(injection.summary() for injection in self) or repr(self)

    def check(self) -> list[str]:
        """Return the problems of all injections."""
        return [problem for injection in self for problem in injection.check()]

    def metrics(self) -> dict[str, float]:
        """Return the metrics of all injections in one dict."""
        return {key: value for injection in self._by_name().values() for key, value in injection.metrics().items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each, by name."""
        return {name: injection.state_dict() for name, injection in self._by_name().items()}

    def load_state_dict(self, states: Mapping[str, Any], strict: bool = True) -> None:
        """Load each from the state under its name, or none after an error.

        Raises:
            StateError: the names in `states` and here differ (with `strict`), or a state is invalid.
        """
        named = self._by_name()
        if not isinstance(states, Mapping):
            raise StateError(f"expected a mapping of names to states, got {type(states).__name__}. Nothing was loaded.")
        if strict and set(states) != set(named):
            raise StateError(
                "the states do not match the injections here. Nothing was loaded.\n"
                f"  only in the states: {sorted(set(states) - set(named))}\n"
                f"  only here:          {sorted(set(named) - set(states))}"
                f"{'' if named else chr(10) + '  this model has no injections: inject first, then load.'}"
            )
        with self._enter_all(Injection._changing):  # all or none
            for name, state in states.items():
                if name in named:
                    named[name].load_state_dict(state, strict)

    def disabled(self) -> AbstractContextManager[Injections]:
        """Disable all injections inside the `with` block."""
        return self._enter_all(Injection.disabled)

    def sampling(self, p: float | None = None) -> AbstractContextManager[Injections]:
        """Drop in all injections inside the `with` block, in eval mode too."""
        return self._enter_all(lambda injection: injection.sampling(p))

    def predict(self, data: Any, samples: int = 30, *, p: float | None = None, **settings: Any) -> Prediction:
        """Sample predictions while all injections drop; the arguments are those of `Injection.predict`.

        Raises:
            InjectionError: there is no injection here, or they are on several models.
        """
        models = {id(injection._require_model()): injection._require_model() for injection in self}
        if len(models) != 1:
            raise InjectionError(
                f"predict: these injections are on {len(models)} models.\n"
                f"  {'call inject first' if not models else 'for each model: find(model).predict(...)'}"
            )
        hooks = [hook for injection in self for hook in injection._hooks]
        model = next(iter(models.values()))
        return predict(model, hooks, lambda: self.sampling(p), data, Settings(samples, **settings))

    @contextmanager
    def _enter_all(self, context: Callable[[Injection], AbstractContextManager[Any]]) -> Iterator[Injections]:
        """Enter a context of each injection."""
        with ExitStack() as stack:
            for injection in self:
                stack.enter_context(context(injection))
            yield self

    @contextmanager
    def recording(self, last: int = 1, to: CopyDevice = None) -> Iterator[dict[str, Recording]]:
        """Record all injections inside the `with` block, by name."""
        with ExitStack() as stack:
            named = self._by_name().items()
            yield {name: stack.enter_context(injection.recording(last, to)) for name, injection in named}

    def remove(self) -> None:
        """Remove all hooks."""
        for injection in self:
            injection.remove()

    def _by_name(self) -> dict[str, Injection]:
        """Map names to injections. Names can collide if a model contains copies or parts of other hooked models."""
        named: dict[str, Injection] = {}
        for injection in self:
            if injection.name in named:
                first_sites = [i.sites[0].name for i in self if i.name == injection.name]
                raise InjectionError(
                    f"{len(first_sites)} injections here are named {injection.name!r} (their first sites: "
                    f"{', '.join(map(repr, first_sites))}).\n  access them by index, or inject with name=..."
                )
            named[injection.name] = injection
        return named

    def __repr__(self) -> str:
        return "\n".join(map(repr, self)) or "<no injections>"

    def _repr_html_(self) -> str:
        rows = [(i.name, len(i.sites), i.p, i.step_count, repr(i.schedule)) for i in self]
        return html_table(_HEADER, rows, "injections")


def find(model: nn.Module) -> Injections:
    """Return all injections on `model`, which may be copied, wrapped, or unpickled.

    Args:
        model: any module.

    Returns:
        Handles of the injections on this model, in the order of their first sites.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        >>> _ = inject(model, Dropout(p=0.5), layers="1")
        >>> twin = copy.deepcopy(model)
        >>> find(twin)
        <Injection 'dropout': 1 site, p=0.5 of 0.5, step 0 of ConstantSchedule()>
    """
    groups: dict[InjectionState, list[SiteHook]] = {}
    for _, hook in hooks_of(model):
        groups.setdefault(hook.state, []).append(hook)
    return Injections(Injection(model, state, hooks) for state, hooks in groups.items())
