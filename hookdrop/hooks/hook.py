"""The hook of one site.

A hook holds no module, no model, no generator and no closure: it is copied and pickled with the module that it
sits on, and the copies of one injection's hooks share a copy of its state.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.utils.hooks import RemovableHandle

from hookdrop.diagnostics.judge import Judge
from hookdrop.diagnostics.measurement import measured
from hookdrop.diagnostics.rank_seeds import announce
from hookdrop.errors import InjectionError, ShapeError
from hookdrop.hooks import checkpointing as replay
from hookdrop.hooks.graph_breaks import MEASURING, outside_of_graphs, prepare_for_compiling
from hookdrop.hooks.state import State
from hookdrop.hooks.tracing import is_exporting, is_symbolic, left_behind_text, tell_of_export, traced_text
from hookdrop.regularizers import Regularizer, like
from hookdrop.utils.tensor_tree import TensorKey, change, change_arguments

_tracing_state = torch._C._get_tracing_state


class _Again(NamedTuple):
    """What is set, while a forward is run again as it was."""

    rate: float | None
    idle: bool
    unknown: tuple[int, Any] | None
    """The random state, and what it is asked for, if no forward had it."""


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
        self.judge = Judge()
        self.looked_at = False
        self.doubted = False
        self.seen: torch.Size | None = None
        """The shape of a tensor that came by; in compiled code nothing is told of it before the next `refresh`."""
        self.in_force: float | None = None
        """The rate, but for the moments in which a forward is run again."""
        self.rate: Tensor | None = None
        """The same for compiled code."""
        self.again: _Again | None = None
        """What to do at the end of a call that runs a forward again."""
        self.on = self.sampling = False
        """Whether the hook works in training mode, and in eval mode."""
        self.idle = False
        """Whether the rate does nothing: a bool, for compiled code would compile anew for every rate that it reads."""
        self.graph_break = regularizer.graph_break
        self.handle: RemovableHandle | None = None
        state.join(self)
        self.refresh()
        prepare_for_compiling(_regularize, self.graph_break)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.judge, self.fired = Judge(), False
        self.state.join(self)
        # The original's rate may be a context's; the copy's is what is set.
        self.refresh()
        prepare_for_compiling(_regularize, self.graph_break)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) and is_symbolic(output):
            return self.state.tell("symbolic", left_behind_text(self.where))
        if not self.is_on(module, output):
            return None
        return self._edited(lambda: change(output, self.tensor, self.regularize))

    def place(self, module: nn.Module) -> None:
        """Sit on `module`."""
        self.handle = module.register_forward_hook(self)

    def remove(self) -> None:
        """Leave the module."""
        if self.handle is not None:
            self.handle.remove()
        self.handle = None

    @property
    def placed(self) -> bool:
        """Whether it was placed and not removed."""
        return self.handle is not None

    @property
    def sits_somewhere(self) -> bool:
        """Whether the module that it was placed on still exists."""
        return self.handle is not None and self.handle.hooks_dict_ref() is not None

    def is_on(self, module: nn.Module, value: Any) -> bool:
        """Note the call, and tell whether there is something to do in it."""
        if is_compiling():
            return self._is_on_in_graph(module)
        self.fired = True
        training = module.training
        if not (training or self.sampling or torch.is_grad_enabled()):
            return False
        state, on = self.state, self.on if training else self.sampling
        if (state.forwards.rates or (on and not self.idle)) and replay.running_again():
            return self._is_on_again(on, training, value)
        if not self.judge.done:
            self.judge.look(module, self.site, state)
        if on and _tracing_state() is not None:
            raise InjectionError(traced_text(self.where))
        if (training or on) and replay.may_run_again():
            state.forwards.note((self.site, training, replay.random_state(value)), (on, self.regularizer.rate))
        # At a rate that does nothing only the first tensor is looked at, for its shape.
        return on and (not self.idle or not self.looked_at)

    def _is_on_in_graph(self, module: nn.Module) -> bool:
        # Counting would compile anew for each count, and so would what is read for it.
        state, exporting = self.state, is_exporting()
        # An export is no call of the layer, and PyTorch warns of notes that are made in it.
        if not exporting:
            self.fired = True
            if module.training:
                self.judge.trained = True
        if not (self.on if module.training else self.sampling):
            return False
        if exporting:
            tell_of_export(state.name)
        return not self.idle or not self.looked_at

    def _is_on_again(self, on: bool, training: bool, value: Any) -> bool:
        """The same for a call in a backward pass: as it was in the forward pass, at the rate of then."""
        random_state = replay.random_state(value)
        forward = self.state.forwards.rate_of((self.site, training, random_state))
        # What `refresh` set, for another thread may be running a forward again just now.
        neutral = self.regularizer.neutral
        now = _Again(self.in_force, self.in_force == neutral, None if forward else (random_state, value))
        on, rate = forward or (on, now.rate)
        if not on or rate == neutral:
            return False
        self.again = now
        if rate is not None:
            self.regularizer.set_rate(rate)
            self.idle = False
        return True

    def _is_over_again(self, now: _Again) -> None:
        """Set what was set, and tell if a mask was drawn that is not the forward's."""
        self.again, self.idle = None, now.idle
        if now.rate is not None:
            self.regularizer.set_rate(now.rate)
        if now.unknown is None or not self.state.forwards.complete:
            return
        before, value = now.unknown
        if replay.random_state(value) != before:
            self.state.tell("drawn anew", _drawn_anew_text(self.state.name, self.site))

    def regularize(self, x: Tensor) -> Tensor:
        """`x` regularized; in compiled code by the rate as a tensor, since a Python float would be frozen in."""
        if not is_compiling():
            return _regularize(self, x)
        if self.state.meters:
            return outside_of_graphs[MEASURING](self, x)
        if self.graph_break:
            return outside_of_graphs[self.graph_break](self, x)
        return _regularize_in_graph(self, x)

    def rate_at(self, multiplier: float) -> float | None:
        """The rate that is set, under a multiplier."""
        return None if self.target is None else self.target * multiplier * self.p_scale

    def rate_in_force(self, multiplier: float, largest: float) -> float | None:
        """The same, or that of the context in force, given the largest target of the injection."""
        override = self.state.override
        if self.target is None or override is None or override.p is None:
            return self.rate_at(multiplier)
        return (override.p * (self.target / largest) if largest else override.p) * self.p_scale

    def refresh(self, largest: float = 0.0) -> None:
        """Bring the rate up to date with the state."""
        rate = self.rate_in_force(float(self.state.schedule(self.state.step_count)), largest)
        if rate is not None:
            self.regularizer.set_rate(rate)
            if not self.graph_break:
                # Another tensor, not another value: a graph that waits for its backward pass may hold the old one.
                # A number, whatever the mode that it is made in: not one of inference, nor a fake one.
                with torch.inference_mode(False), torch._C._DisableTorchDispatch():
                    self.rate = torch.tensor(rate, dtype=torch.float64, device="cpu")
        self.in_force, self.idle = rate, rate == self.regularizer.neutral
        self.switch()

    def switch(self) -> None:
        """Bring up to date whether there is anything to do."""
        self.on = self.state.on
        self.sampling = self.on and self.state.sampling

    def doubts(self) -> dict[str, str]:
        """What is probably not meant of the shape that was seen, by kind: fifty blocks of one kind say the same."""
        found = [] if self.seen is None else self.regularizer.doubts(self.seen)
        see_all = "\n  all sites: print(plan(..., example_input=x))"
        return {re.sub(r"\d+", "#", doubt): f"{self.where}: {doubt}{see_all}" for doubt in found}

    def tell_doubts(self) -> None:
        """Warn of them, once."""
        self.doubted = True
        for kind, text in self.doubts().items():
            self.state.tell(kind, text)

    @property
    def where(self) -> str:
        """What sits where, for messages."""
        place = repr(self.site) if self.site else "the model itself"
        return f"{self.regularizer.title} at {place}{'' if self.at == 'output' else f' ({self.at})'}"

    def describe(self) -> str:
        """The regularizer as text, with its target rate and not the moment's."""
        aimed = copy.deepcopy(self.regularizer)
        if self.target is not None:
            aimed.set_rate(self.target)
        return repr(aimed)

    @property
    def p(self) -> float | None:
        """The rate in force; while it is off, the one that does nothing."""
        return self.regularizer.rate if self.state.on or self.regularizer.rate is None else self.regularizer.neutral

    def __getattr__(self, name: str) -> Any:
        # What torch.jit.script asks of a hook first.
        script = (
            "torch.jit.script does not take a module with hooks.\n"
            "  script it without them: with hookdrop.without_hooks(model): torch.jit.script(model)"
        )
        raise AttributeError(script if name == "__name__" else f"{type(self).__name__!r} has no attribute {name!r}")

    def _edited(self, edit: Callable[[], Any]) -> Any:
        try:
            return edit()
        except ShapeError as error:
            error.args = (f"{self.where}{' ' if str(error).startswith('got ') else ': '}{error}",)
            raise
        except Exception as error:
            error.add_note(f"in hookdrop's {self.where}")
            raise
        finally:
            if self.again is not None:
                self._is_over_again(self.again)


class InputHook(SiteHook):
    """A forward pre-hook that regularizes one tensor of a layer's arguments."""

    at = "input"

    def __call__(self, module: nn.Module, args: Any, kwargs: Any = None) -> Any:
        if not (args and isinstance(args[0], Tensor)) and is_symbolic((*args, *(kwargs or {}).values())):
            return self.state.tell("symbolic", left_behind_text(self.where))
        if not self.is_on(module, (args, kwargs)):
            return None
        changed = self._edited(lambda: change_arguments(module, args, kwargs or {}, self.tensor, self.regularize))
        # Registered anew by somebody else it may be called without the keywords, and must then return none.
        return changed[0] if kwargs is None else changed

    def place(self, module: nn.Module) -> None:
        self.handle = module.register_forward_pre_hook(self, with_kwargs=True)


def _regularize(hook: SiteHook, x: Tensor) -> Tensor:
    if not hook.looked_at:
        _look_at(hook, x)
    if hook.idle:
        return x
    if hook.state.meters:
        return measured(hook.regularizer, x, hook.site, hook.state.meters)
    return like(x, hook.regularizer.regularize(x))


def _regularize_in_graph(hook: SiteHook, x: Tensor) -> Tensor:
    """The same as it is traced: with nothing in it that differs from call to call."""
    hook.regularizer.check(x.shape)
    if not is_exporting():
        hook.seen = x.shape
    if hook.idle:
        return x
    given = hook.regularizer
    return like(x, given.regularize(x) if hook.rate is None else given.regularize_at(x, hook.rate))


def _drawn_anew_text(name: str, site: str) -> str:
    return (
        f"{name!r}: {site!r} ran within a backward pass, from a random state that no forward of it had. If that is an "
        "activation checkpoint, what it drops is not what its forward dropped, and the gradients are wrong.\n"
        "  it must keep the random state: leave out preserve_rng_state=False; "
        "and inject or replace before the forward, not between it and its backward."
    )


def _look_at(hook: SiteHook, x: Tensor) -> None:
    """Check the first tensor's shape, also while idle: better than at step 1,000 of a ramp."""
    hook.regularizer.check(x.shape)
    hook.looked_at = True
    # A symbol (make_fx) holds the trace that it is of, which can be neither copied nor pickled.
    if all(type(size) is int for size in x.shape):
        hook.seen = x.shape
        hook.tell_doubts()
    # The ranks of a job know of one another's seeds from the first mask on, whoever of them asks.
    announce(x.device)
