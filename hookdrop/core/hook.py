"""The forward hook of one site.

A hook holds no reference to its module or model, no generator and no closure: it is copied and pickled with the
module, and the copied hooks of one injection share a copy of its state. Each call passes the rate to the regularizer as
an argument, not through shared state, so threads and recomputes do not interfere.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from hookdrop.core import compiling, tensor_tree
from hookdrop.core import torch_internals as internals
from hookdrop.core.errors import InjectionError, ShapeError
from hookdrop.core.parts import PARTS, REGULARIZERS
from hookdrop.core.regularizer import FROM_AROUND, NO_RATE, CurrentRate, P, Rate, Regularizer, at_rate, rate_of
from hookdrop.core.sink import CompanionHook, PlacedHook, RateSink
from hookdrop.core.state import InjectionState
from hookdrop.core.torch_internals import graph_task, is_tracing

Listener = Callable[["SiteHook", nn.Module, Any], None]
"""Called with (hook, module, value) before the hook acts. It may warn, raise, or unsubscribe itself."""


def note_call(hook: SiteHook, module: nn.Module, value: Any) -> None:
    """Record that a layer ran. Unsubscribes once the layer has run in training mode."""
    hook.called = True
    if module.training:
        hook.trained = hook.state.live.trained = True
        hook.unsubscribe(note_call)


first_listeners: list[Listener] = [note_call]
"""Every new hook starts with these. Most unsubscribe themselves after its first calls; one watches penalties."""


class SiteHook(PlacedHook, RateSink):
    """A forward hook that regularizes what `tensor` selects of a layer's output, or a pre-hook for its arguments."""

    companions: list[CompanionHook]  # further hooks of the site, on other modules
    not_copied: ClassVar[tuple[str, ...]] = (
        *("called", "trained", "last_shape", "listeners"),
        *("train_rate", "eval_rate", "graph_break"),
    )
    """The attributes that copies do not inherit."""
    state: InjectionState
    on_new_shape: Callable[[SiteHook], None] | None = None  # called if a shape is not that of the call before

    def __init__(self, site: Any, plan: Any, state: InjectionState) -> None:
        self.site, self.p_scale, self.tensor, self.state = site.name, site.p_scale, plan.spec.tensor, state
        self.at: str = site.at  # `"output"` for a hook after the forward, any other place for a pre-hook
        # The plan checked that it, or its recipe, can be pickled, and a deep copy takes ten times as long.
        regularizer: Regularizer = pickle.loads(pickle.dumps(site.regularizer))
        self.regularizer = regularizer
        self.collected: Any = PARTS["collected"](regularizer) if FROM_AROUND & {*regularizer.needs} else None
        """What the regularizer needs from modules around the layer."""
        self.adds_to_loss = regularizer._adds_to_loss  # a penalty, which does not change the tensor
        self.companions = []
        self.target = self.initial_target = rate_of(regularizer)
        self.rate: Rate = type(regularizer).rate or P
        cls = type(regularizer)
        self.replays = REGULARIZERS.places.get(cls.__name__) == f"{cls.__module__}:{cls.__name__}"
        """Whether compiled code that recomputes this hook draws the same random numbers."""
        self._start()

    def _start(self) -> None:
        """Initialize the attributes that copies do not inherit."""
        self.called = self.trained = False
        self.last_shape: torch.Size | None = None
        self.listeners: tuple[Listener, ...] = tuple(first_listeners)
        self.state.live.members.add(self)
        self.state.live.known_sites.add(self.site)
        if self.adds_to_loss:
            self.state.live.loss_terms = self.state.live.loss_terms or PARTS["loss_terms"]()
        value = None if self.target is None else self.target * self.state.multiplier * self.p_scale
        rate = NO_RATE if value is None else CurrentRate(value, value == self.rate.neutral)
        self.set_rate(rate, self.state.on, self.state.sampling)
        reason = self.regularizer.graph_break
        self.graph_break = compiling.graph_break(_act, reason) if reason else None
        """How compiled code runs the regularizer if it cannot be part of the graph."""

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in self.not_copied}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    # --- a call

    def __call__(self, module: nn.Module, args: Any, *rest: Any) -> Any:
        # PyTorch passes (args, kwargs), (args, output) or (args, kwargs, output), other code perhaps no kwargs.
        after = self.at == "output"
        first = rest[-1] if after else args and args[0]
        if not isinstance(first, Tensor) and compiling.is_symbolic(first if after else (args, rest)):
            return self.state.warn_once(
                "symbolic",
                f"{self.where} is not part of the graph: torch.fx traces into modules with children, and omits their "
                "hooks.\n  hook leaf modules, which keep their hooks, or inject into the GraphModule.",
            )
        compiled, rate = is_compiling(), self.train_rate if module.training else self.eval_rate
        if rate is None and not module.training and not compiled and not torch.is_grad_enabled():
            self.called = True  # inference: there is nothing to check
            return None
        kwargs = rest[0] if len(rest) > after else {}
        value = (args, kwargs, first) if after else (args, kwargs)
        changed = self._call_in_graph(module, value, rate) if compiled else self._call(module, value, rate)
        # Without kwargs, a pre-hook must return only `args`.
        return changed[0] if changed is not None and not after and not rest else changed

    def _call(self, module: nn.Module, value: Any, rate: CurrentRate | None) -> Any:
        if self.listeners:
            _NOTIFY.call(self, module, value)
        if graph_task() != -1:
            return PARTS["recompute"](self, module, value, rate)
        if (rate is not None or module.training) and may_be_recomputed():
            PARTS["note_forward"](self, module, value, rate)
        if rate is None:
            return None
        if is_tracing():
            raise InjectionError(
                f"{self.where} inside torch.jit.trace: the trace would keep it at its current rate, even in eval mode."
                f"\n  trace {compiling.ALTERNATIVES}"
            )
        if rate.neutral:
            return None
        return self.edit(module, value, lambda x, **context: self.apply(x, rate, **context))

    def _call_in_graph(self, module: nn.Module, value: Any, rate: CurrentRate | None) -> Any:
        # Branch on nothing that changes with the step, which would trigger a recompilation at every step.
        exporting = compiling.is_exporting()
        # An export does not count as a call, and PyTorch warns if it sets attributes.
        if not exporting:
            self.called = True
            if module.training:
                self.trained = self.state.live.trained = True
        if rate is None:
            return None
        if exporting:
            compiling.warn_of_export(self.state.name)
        return self.edit(module, value, lambda x, **context: self.apply_in_graph(x, rate, **context))

    def edit(self, module: nn.Module, value: Any, fn: Callable[..., Tensor]) -> Any:
        """Apply `fn` to the site's tensor in `value`, and add the site to errors."""
        try:
            return self.map(module, value, fn)
        except ShapeError as error:
            error.args = (f"{self.where}{' ' if str(error).startswith('got ') else ': '}{error}",)
            raise
        except Exception as error:
            if is_compiling():  # the compiler cannot trace the next lines, and would hide the error
                raise
            self.explain(error)
            raise

    def explain(self, error: Exception) -> None:
        """Add the site to an error, or raise another one that says what to do."""
        if "randomness error mode" in str(error):
            raise InjectionError(
                f"{self.where} draws random numbers, which torch.func.vmap does not allow by default.\n"
                '  vmap(..., randomness="different")   Opacus\' functorch sampler runs layers with weights again, '
                "without their masks: hook a layer without weights"
            ) from error
        error.add_note(f"in hookdrop's {self.where}")

    def map(self, module: nn.Module, value: Any, fn: Callable[..., Tensor]) -> Any:
        """Apply `fn` to the site's tensor in `value`, with what the regularizer needs besides."""
        if self.collected is not None:
            fn = partial(fn, **self.collected.values(self))
        if self.at == "output":
            return tensor_tree.map_tensor(value[2], self.tensor, fn)
        args, kwargs = value
        return tensor_tree.map_arguments(module, args, kwargs, self.tensor, fn)

    def act(self, x: Tensor, rate: CurrentRate, **context: Any) -> Tensor:
        """Regularize one tensor."""
        if self.on_new_shape is not None and x.shape != self.last_shape:
            self.last_shape = torch.Size(map(int, x.shape))
            self.on_new_shape(self)
        if self.adds_to_loss:
            self.state.live.loss_terms.collect(self, x, rate.value, context)
        observe = self.state.live.observe
        if observe is not None:
            return observe(self, x, rate, **context)
        return regularized(self.regularizer, x, rate.value, **context)

    apply = act
    """What a call in eager code does with its tensor: `act`; `SkipHook` and `RowsHook` replace it."""

    def apply_in_graph(self, x: Tensor, rate: CurrentRate, **context: Any) -> Tensor:
        """Like `apply`, for compiled code: branches on nothing that changes with the step."""
        outside = self.graph_break if self.state.live.observe is None else _OBSERVED
        if outside is not None:
            y: Tensor = outside.call(self, x, rate, **context)
            return y
        self.regularizer.check(x.shape)
        if not compiling.is_exporting():
            self.last_shape = x.shape
        if rate.neutral:
            return x
        if not self.replays:
            compiling.warn_of_redraws(self.where)
        if self.adds_to_loss:
            self.state.live.loss_terms.collect_in_graph(self, x, rate.tensor, context)
        return regularized(self.regularizer, x, rate.tensor, **context)

    def unsubscribe(self, listener: Listener) -> None:
        self.listeners = tuple(other for other in self.listeners if other is not listener)

    # --- the rate

    def set_rate(self, rate: CurrentRate, on: bool, sampling: bool) -> None:
        """Set the rate of training mode if `on`, and of eval mode if also `sampling`, which changes only forwards."""
        self.train_rate = rate if on else None
        self.eval_rate = rate if on and sampling and not self.adds_to_loss else None

    def valid_target(self, value: object) -> float:
        """Return `value` as a float, or raise if it is out of the regularizer's range."""
        return self.rate.valid(value, self.regularizer.title)

    @property
    def p(self) -> float | None:
        """The current rate in training mode; the neutral rate while the hook is disabled."""
        if self.target is None:
            return None
        return self.rate.neutral if self.train_rate is None else self.train_rate.value

    # --- registration

    def place(self, module: nn.Module, *, prepend: bool = False) -> None:
        if self.collected is not None:
            self.collected.place(self, module)
        if self.at == "output":
            self.handle = module.register_forward_hook(self)
        else:
            self.handle = module.register_forward_pre_hook(self, with_kwargs=True, prepend=prepend)
        if self.adds_to_loss:
            self.state.live.loss_terms.watch_calls(self, module)

    def accompany(self, register: Callable[..., Any], function: Any, *settings: Any, **flags: bool) -> CompanionHook:
        """Register a companion that calls `function(self, *settings, ...)`."""
        companion = CompanionHook(self, function, *settings)
        companion.handle = register(companion, **flags)
        self.companions.append(companion)
        return companion

    def remove(self) -> None:
        super().remove()
        for companion in self.companions:
            companion.remove()
        self.train_rate = self.eval_rate = None  # it may still be in a copied table

    @property
    def is_attached(self) -> bool:
        return self.handle is not None and self.handle.hooks_dict_ref() is not None

    def describe(self, rate: float | None = None) -> str:
        return repr(at_rate(self.regularizer, self.target if rate is None else rate))

    @property
    def where(self) -> str:
        """The regularizer and the site, for messages."""
        place = repr(self.site) if self.site else "the model itself"
        return f"{self.regularizer.title} at {place}{'' if self.at == 'output' else f' ({self.at})'}"

    def __getattr__(self, name: str) -> Any:
        # torch.jit.script reads `__name__` first, so this error can explain what to do.
        script = (
            "torch.jit.script does not support modules with hookdrop hooks.\n"
            "  use: with hookdrop.without_hooks(model): torch.jit.script(model)"
        )
        raise AttributeError(script if name == "__name__" else f"{type(self).__name__!r} has no attribute {name!r}")


def regularized(regularizer: Regularizer, x: Tensor, rate: Any, **context: Any) -> Tensor:
    y = regularizer.regularize(x, rate, **context)
    if regularizer.keeps_shape and not (isinstance(y, Tensor) and y.shape == x.shape and y.dtype == x.dtype):
        got = f"{tuple(y.shape)} {y.dtype}" if isinstance(y, Tensor) else type(y).__name__
        must = "a regularizer must preserve shape and dtype"
        raise ShapeError(f"got {tuple(x.shape)} {x.dtype} and returned {got}: {must}.")
    return y


def may_be_recomputed() -> bool:
    """Whether this may be a checkpointed forward: gradients are off, or saved-tensors hooks are active."""
    if not torch.is_grad_enabled():
        return not torch.is_inference_mode_enabled()
    if internals.saved_tensors_hooks is not None:
        return internals.saved_tensors_hooks(True) is not None
    return bool(PARTS["is_checkpointed"]())  # PyTorch 2.6 and 2.7 cannot report them


def _notify(hook: SiteHook, module: nn.Module, value: Any) -> None:
    for listener in hook.listeners:
        listener(hook, module, value)


def _act(hook: SiteHook, x: Tensor, rate: CurrentRate, **context: Any) -> Tensor:
    # Not `hook.apply`: a `SkipHook` saves its input differently in compiled code than in eager code.
    return hook.act(x, rate, **context)


_NOTIFY = compiling.GraphBreak(_notify, "hookdrop checks the first calls.")
_OBSERVED = compiling.GraphBreak(
    _act,
    "recording() needs tensor values, so it breaks the graph of code that is compiled for the first time inside.\n"
    "  call the compiled model once before recording().",
)
