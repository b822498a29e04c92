"""All injections of a model at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from hookdrop.diagnostics.measurement import Measurement
from hookdrop.diagnostics.recording import Recording
from hookdrop.errors import InjectionError, StateError
from hookdrop.hooks.hook import SiteHook
from hookdrop.hooks.registry import hooks_of
from hookdrop.hooks.state import InjectionState
from hookdrop.injection.handle import Injection
from hookdrop.utils.tables import html_table
from hookdrop.utils.tensor_copies import CopyDevice

_HEADER = ("name", "sites", "p", "step", "schedule")


class Injections(tuple[Injection, ...]):
    """The injections alive on a model: a tuple that passes calls on to each, and knows them by name."""

    __slots__ = ()

    def __getitem__(self, key: Any) -> Any:
        """By index as in a tuple, by name, or a slice of them."""
        if isinstance(key, slice):
            return Injections(super().__getitem__(key))
        if not isinstance(key, str):
            return super().__getitem__(key)
        named = self._by_name()
        if key not in named:
            raise InjectionError(f"there is no injection {key!r} here; there are: {', '.join(named) or 'none'}.")
        return named[key]

    def __add__(self, other: Any) -> Any:
        """Those of several models together."""
        both = super().__add__(other)
        return Injections(both) if isinstance(other, Injections) else both

    def step(self, n: int = 1) -> None:
        """Count `n` optimizer steps in each; in none, if one of them follows an optimizer."""
        for injection in self:
            injection._must_not_follow()
        self._change_all(lambda injection: injection.step(n))

    def seek(self, step: int) -> None:
        """Go to a step in each, or in none after an error."""
        self._change_all(lambda injection: injection.seek(step))

    def follow(self, optimizer: Optimizer | None) -> Injections:
        """Step each after each step of `optimizer`, or none after an error."""
        with ExitStack() as undo:
            for injection in self:
                new = injection._follower is None
                injection.follow(optimizer)
                if new:
                    undo.callback(injection.follow, None)
            undo.pop_all()
        return self

    def disable(self) -> None:
        """Drop nothing in any until `enable`; the schedules go on."""
        self._change_all(Injection.disable)

    def enable(self) -> None:
        """Drop again in all."""
        self._change_all(Injection.enable)

    def _change_all(self, change: Callable[[Injection], object]) -> None:
        """Make a change in each, which is undone in all if it does not fit in one."""
        with self._inside(Injection._changing):
            for injection in self:
                change(injection)

    def probe(self, x: Any, forwards: int = 3, step: int | None = None) -> dict[str, Measurement]:
        """Probe each as `Injection.probe` does, by name: one after another, while the rates of the others stay."""
        return {name: injection.probe(x, forwards, step) for name, injection in self._by_name().items()}

    def summary(self) -> str:
        """The tables of all."""
        return "\n\n".join(injection.summary() for injection in self) or repr(self)

    def check(self) -> list[str]:
        """The problems of all."""
        return [problem for injection in self for problem in injection.check()]

    def metrics(self) -> dict[str, float]:
        """The numbers of all."""
        return {key: value for injection in self._by_name().values() for key, value in injection.metrics().items()}

    def state_dict(self) -> dict[str, Any]:
        """The state of each, by name."""
        return {name: injection.state_dict() for name, injection in self._by_name().items()}

    def load_state_dict(self, states: Mapping[str, Any], strict: bool = True) -> None:
        """Load each from the state under its name.

        Raises:
            StateError: names that are here and not in `states`, or the other way round (with `strict`).
        """
        named = self._by_name()
        if not isinstance(states, Mapping):
            raise StateError(f"expected a state for each name, got {type(states).__name__}; nothing was loaded.")
        if strict and set(states) != set(named):
            raise StateError(
                "the states do not fit the injections here; nothing was loaded.\n"
                f"  only in the states: {sorted(set(states) - set(named))}\n"
                f"  only here:          {sorted(set(named) - set(states))}"
                f"{'' if named else chr(10) + '  nothing is injected here: inject first, then load.'}"
            )
        with self._inside(Injection._changing):  # all or none
            for name, state in states.items():
                if name in named:
                    named[name].load_state_dict(state, strict)

    def disabled(self) -> AbstractContextManager[Injections]:
        """All off inside."""
        return self._inside(Injection.disabled)

    def sampling(self, p: float | None = None) -> AbstractContextManager[Injections]:
        """All on inside, in eval mode too."""
        return self._inside(lambda injection: injection.sampling(p))

    @contextmanager
    def _inside(self, context: Callable[[Injection], AbstractContextManager[Any]]) -> Iterator[Injections]:
        """Inside of a context of each."""
        with ExitStack() as stack:
            for injection in self:
                stack.enter_context(context(injection))
            yield self

    @contextmanager
    def recording(self, last: int = 1, to: CopyDevice = None) -> Iterator[dict[str, Recording]]:
        """All recorded inside, by the injection's name."""
        with ExitStack() as stack:
            named = self._by_name().items()
            yield {name: stack.enter_context(injection.recording(last, to)) for name, injection in named}

    def remove(self) -> None:
        """Take all hooks off."""
        for injection in self:
            injection.remove()

    def _by_name(self) -> dict[str, Injection]:
        """By name; two of one name can come together when a part or a copy of it is made a part of another model."""
        named: dict[str, Injection] = {}
        for injection in self:
            if injection.name in named:
                places = [i.sites[0].name for i in self if i.name == injection.name]
                raise InjectionError(
                    f"{len(places)} injections here are named {injection.name!r} (their first sites: "
                    f"{', '.join(map(repr, places))}).\n  use them by index, or inject with name=..."
                )
            named[injection.name] = injection
        return named

    def __repr__(self) -> str:
        return "\n".join(map(repr, self)) or "<no injections>"

    def _repr_html_(self) -> str:
        rows = [(i.name, len(i.sites), i.p, i.step_count, repr(i.schedule)) for i in self]
        return html_table(_HEADER, rows, "injections")


def find(model: nn.Module) -> Injections:
    """Every injection alive on `model`, copied, wrapped or unpickled as it may be.

    Args:
        model: any module.

    Returns:
        Handles, in the order of their first sites; they work on this very model.

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
