"""The hook of one site, and the state that the hooks of one injection share.

A hook holds no module, no model, no generator and no closure: it is copied and pickled with the module that it
sits on, and the copies of one injection's hooks share a copy of its state.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hookdrop.errors import ShapeError, warn
from hookdrop.meter import Measurement, measured
from hookdrop.regularizers import Regularizer
from hookdrop.schedules import Schedule, needs_driving
from hookdrop.values import TensorKey, change, change_arguments, forward_names

# Training forwards of one site at step 0 after which it is clear that nobody drives the schedule. No common
# setting accumulates gradients over that many.
UNDRIVEN_CALLS = 200


@dataclass(frozen=True)
class Override:
    """What a context says instead of what is set: off, or sampling (on in eval too, at a rate of its own)."""

    sampling: bool
    p: float | None = None


@dataclass(eq=False)
class State:
    """What the hooks of one injection share. Copied and pickled with them, less what belongs to contexts."""

    name: str
    sites: tuple[str, ...]
    schedule: Schedule
    step_count: int = 0
    enabled: bool = True
    driven: bool = False
    """Whether anybody has ever called `step`, `seek` or `follow`."""
    moves: int = 0
    """How often the step count was moved since the injection was made, copied or loaded."""
    told: set[str] = field(default_factory=set)
    """The problems that were warned of."""
    removed: bool = False
    override: Override | None = None
    meter: Measurement | None = None
    follower: Any = None
    hidden: int = 0
    """How many `without_hooks` have the hooks off the model just now."""

    def __getstate__(self) -> dict[str, Any]:
        # A copy starts outside of the contexts that the original is in, and follows nothing.
        return self.__dict__ | {"moves": 0, "override": None, "meter": None, "follower": None, "hidden": 0}

    @property
    def on(self) -> bool:
        """Whether hooks work in training mode."""
        return self.enabled if self.override is None else self.override.sampling

    @property
    def sampling(self) -> bool:
        """Whether hooks work in eval mode too."""
        return self.override is not None and self.override.sampling


class SiteHook:
    """A forward hook that regularizes one tensor of a layer's output."""

    at = "output"

    def __init__(self, site: str, regularizer: Regularizer, p_scale: float, tensor: TensorKey, state: State) -> None:
        self.site = site
        self.regularizer = regularizer
        self.p_scale = p_scale
        self.tensor = tensor
        self.state = state
        self.target = regularizer.rate
        self.declared = regularizer.rate
        self.fired = False
        self.trained = False
        self.looked_at = False
        self.undriven = 0
        self.handle: RemovableHandle | None = None
        self.refresh()
        _make_outside_of_graphs()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # The original's rate may be a context's; the copy's is what is set.
        self.refresh()
        _make_outside_of_graphs()

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not self.is_on(module):
            return None
        return self._edited(lambda: change(output, self.tensor, self.regularize))

    def place(self, module: nn.Module) -> None:
        """Sit on `module`."""
        self.handle = module.register_forward_hook(self)

    def remove(self) -> None:
        """Leave the module."""
        if self.handle is not None:
            self.handle.remove()

    def is_on(self, module: nn.Module) -> bool:
        """Note the call, and tell whether there is something to do in it."""
        self.fired = True
        state = self.state
        if not (state.on and (module.training or state.sampling)):
            return False
        if module.training:
            self.trained = True
        if not torch.compiler.is_compiling() and self.undriven <= UNDRIVEN_CALLS:
            self._count_undriven()
        # At rate 0 only the first tensor is looked at, for its shape.
        return not self.idle or not self.looked_at

    def regularize(self, x: Tensor) -> Tensor:
        """`x` regularized; outside of compiled graphs, where a Python float rate would be frozen in."""
        return _outside_of_graphs(self, x) if torch.compiler.is_compiling() else _regularize(self, x)

    def rate_at(self, multiplier: float, largest: float) -> float | None:
        """The rate under a multiplier, or under a context's rate, given the largest target of the injection."""
        if self.target is None:
            return None
        override = self.state.override
        if override is None or override.p is None:
            return self.target * multiplier * self.p_scale
        return (override.p * (self.target / largest) if largest else override.p) * self.p_scale

    def refresh(self, largest: float = 0.0) -> None:
        """Bring the rate up to date with the state."""
        rate = self.rate_at(self.state.schedule(self.state.step_count), largest)
        if rate is not None:
            self.regularizer.set_rate(rate)
        # A bool of its own: compiled code is guarded by what it reads, and would compile anew for every rate.
        self.idle = rate == 0.0

    @property
    def where(self) -> str:
        """What sits where, for messages."""
        return f"{self.regularizer.title} at {self.site!r}{' (input)' if self.at == 'input' else ''}"

    def describe(self) -> str:
        """The regularizer as text, with its target rate and not the moment's."""
        aimed = copy.deepcopy(self.regularizer)
        if self.target is not None:
            aimed.set_rate(self.target)
        return repr(aimed)

    @property
    def p(self) -> float | None:
        """The rate in force."""
        return self.regularizer.rate if self.state.on or self.regularizer.rate is None else 0.0

    def _count_undriven(self) -> None:
        state = self.state
        if state.driven or not needs_driving(state.schedule) or state.sampling:
            return
        self.undriven += 1
        if self.undriven == UNDRIVEN_CALLS and "undriven" not in state.told:
            state.told.add("undriven")
            warn(undriven_text(state))

    def _edited(self, edit: Callable[[], Any]) -> Any:
        try:
            return edit()
        except ShapeError as error:
            error.args = (f"{self.where}{' ' if str(error).startswith('got ') else ': '}{error}",)
            raise


class InputHook(SiteHook):
    """A forward pre-hook that regularizes one tensor of a layer's arguments."""

    at = "input"

    def __call__(self, module: nn.Module, args: Any, kwargs: Any = None) -> Any:
        if not self.is_on(module):
            return None
        names = forward_names(module)
        return self._edited(lambda: change_arguments(names, args, kwargs or {}, self.tensor, self.regularize))

    def place(self, module: nn.Module) -> None:
        self.handle = module.register_forward_pre_hook(self, with_kwargs=True)


def hooks_of(model: nn.Module) -> Iterator[tuple[nn.Module, SiteHook]]:
    """Every hook of hookdrop on `model`, in `named_modules()` order."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model must be a torch.nn.Module, got {type(model).__name__}.")
    for module in model.modules():
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            if isinstance(hook, SiteHook):
                yield module, hook


@contextmanager
def hidden(model: nn.Module) -> Iterator[None]:
    """None of hookdrop's hooks is on `model` inside; their order and ids are what they were after."""
    ours: dict[nn.Module, dict[int, SiteHook]] = {}
    for module, hook in hooks_of(model):
        if hook.handle is not None:
            ours.setdefault(module, {})[hook.handle.id] = hook
    taken = [(getattr(module, name), hooks) for module, hooks in ours.items() for name in _HOOK_DICTS]
    before = [dict(table) for table, _ in taken]
    for table, hooks in taken:
        for key in hooks:
            table.pop(key, None)
    states = {hook.state for hooks in ours.values() for hook in hooks.values()}
    for state in states:
        state.hidden += 1
    try:
        yield
    finally:
        for state in states:
            state.hidden -= 1
        for (table, hooks), entries in zip(taken, before, strict=True):
            inside = dict(table)
            table.clear()
            # What others took off or put on inside stays so; what was removed of ours is not brought back.
            back = (k for k in entries if k in inside or (k in hooks and not hooks[k].state.removed))
            table.update({key: entries[key] for key in back})
            table.update(inside)


_HOOK_DICTS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


def undriven_text(state: State) -> str:
    """What to say of a schedule that nobody drives."""
    return (
        f"{state.name!r} is still at step 0 of {state.schedule}, so its rate does not move: nobody drives it.\n"
        "  after inject: drop.follow(optimizer)   or after each optimizer.step(): drop.step()   "
        "or: drop.seek(global_step)"
    )


def _regularize(hook: SiteHook, x: Tensor) -> Tensor:
    if not hook.looked_at:
        _look_at(hook, x)
    if hook.idle:
        return x
    if hook.state.meter is not None:
        return measured(hook.regularizer, x, hook.site, hook.state.meter)
    return hook.regularizer.regularize(x)


def _look_at(hook: SiteHook, x: Tensor) -> None:
    """Check the first tensor's shape, also at rate 0: better than at step 1,000 of a ramp."""
    hook.regularizer.check(x.shape)
    hook.looked_at = True
    for doubt in hook.regularizer.doubts(x.shape):
        # Said of the first site only: fifty blocks of one kind would say the same in fifty sizes.
        if (kind := re.sub(r"\d+", "#", doubt)) not in hook.state.told:
            hook.state.told.add(kind)
            warn(f"{hook.where}: {doubt}\n  all sites: print(plan(..., example_input=x))")


# Kept out of compiled graphs. Made with the first hook, never while one is traced; `torch.compiler.disable` loads
# the compiler, which is not wanted at import.
_outside_of_graphs: Callable[[SiteHook, Tensor], Tensor] = _regularize


def _make_outside_of_graphs() -> None:
    global _outside_of_graphs
    if _outside_of_graphs is _regularize:
        _outside_of_graphs = torch.compiler.disable(_regularize)  # type: ignore[no-untyped-call]
