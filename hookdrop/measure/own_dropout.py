"""Observe the dropout that a model already has: what each of its calls does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hookdrop.core.tensor_tree import first_tensor, map_leaves
from hookdrop.measure.observing import Record, dropped_elements, require_values
from hookdrop.methods.dropout_sinks import DropoutSink, ObservedRate
from hookdrop.survey.drop_rates import ATTENTION, active_rate, rounded
from hookdrop.survey.isolation import forked_rng
from hookdrop.survey.ops import DROPOUTS, RECURRENT
from hookdrop.survey.trace import Op


@contextmanager
def observed_into(sinks: Sequence[DropoutSink], record: Record) -> Iterator[None]:
    """Pass what the drops at these rates do in the calls inside to `record`."""
    seen = _Seen()
    with ExitStack() as stack:
        for sink in sinks:
            module = sink.module()
            if module is None:
                continue
            sink.observers.append(record)
            stack.callback(_unobserve, sink, record)
            sink.show()
            if sink.constant is not None:
                seen.constants[module, sink.attribute, sink.constant] = sink
            elif "." not in sink.attribute and not any(module.children()):
                stack.callback(module.register_forward_pre_hook(partial(seen.module, sink)).remove)
        for inner in {inner for module, *_ in seen.constants for inner in module.modules()}:
            stack.callback(inner.register_forward_pre_hook(seen.begin).remove)
            stack.callback(inner.register_forward_hook(seen.end, always_call=True).remove)
        yield stack.enter_context(seen)


def _unobserve(sink: DropoutSink, record: Record) -> None:
    if sink.placed:
        sink.observers.remove(record)
        sink.show()


class _Seen(TorchFunctionMode):
    """Recognizes drops by the rates that arrive at them."""

    def __init__(self) -> None:
        super().__init__()
        self.modules: set[DropoutSink] = set()
        """Those whose module only drops: its forward is one call, however it drops."""
        self.constants: dict[tuple[nn.Module, str, float], DropoutSink] = {}
        """Those whose rate is in the code, by the module, the function and the rate."""
        self._running: list[nn.Module] = []  # the modules with such drops, and those inside them

    def begin(self, module: nn.Module, *_: Any) -> None:
        self._running.append(module)

    def end(self, *_: Any) -> None:
        self._running.pop()

    def module(self, sink: DropoutSink, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Measure the call of a module that returns its input in eval mode, before the call."""
        x, trains = args[0] if args else None, module.training or bool(sink.training_modes)
        observed = isinstance(getattr(module, sink.attribute), ObservedRate)  # not while a survey runs the model
        if not isinstance(x, Tensor) or not sink.p or not trains or not observed:
            return

        def forward(x: Tensor, training: bool = True) -> Any:
            before, module.training = module.training, training
            try:
                return module.forward(x, *args[1:])
            finally:
                module.training = before

        with forked_rng(x):
            if forward(x, False) is x:
                self.modules.add(sink)
                _measure(sink, forward, x)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        op = Op(0, function.__name__.strip("_"), function, args, kwargs, (), None)
        observed = [value for value in (*args, *kwargs.values()) if isinstance(value, ObservedRate)][:1]
        is_drop = op.name in DROPOUTS or op.name in ATTENTION
        sink: DropoutSink | None = observed[0].sink if observed else None
        if not observed and self._running and is_drop:
            sink = self.constants.get((self._running[-1], op.name, rounded(active_rate(op))))
        if sink is None:
            return function(*args, **kwargs)

        def call(rate: float, *first: Any) -> Any:
            given = (*first, *args[len(first) :])
            if sink.constant is not None:
                return function(*given, **kwargs) if rate else _at_0(op, given)
            plain, named = map_leaves((given, kwargs), lambda x: rate if x is observed[0] else x)
            return function(*plain, **named)

        if sink in self.modules or not _drops(op):
            pass
        elif op.name in DROPOUTS:
            _measure(sink, partial(call, sink.p), args[0])
        else:  # inside a fused operation, which is measured by its result
            x = first_tensor(args)
            with forked_rng(x):
                before = first_tensor(call(0.0))
            with forked_rng(x):
                sink.observe(before, first_tensor(call(sink.p)), None)
        return call(sink.p)


def _drops(op: Op) -> bool:
    """Whether a function that gets a rate drops at it."""
    if op.name in RECURRENT:  # its flag follows the rate
        return any(isinstance(rate, ObservedRate) and flag for rate, flag in pairwise(op.args))
    return (op.name in DROPOUTS or op.name in ATTENTION) and bool(active_rate(op))


def _at_0(op: Op, args: tuple[Any, ...]) -> Any:
    """Call fused attention without its dropout."""
    index = ATTENTION[op.name]
    if len(args) > index:
        return op.function(*args[:index], 0.0, *args[index + 1 :], **op.kwargs)
    return op.function(*args, **{**op.kwargs, "dropout_p": 0.0})


def _measure(sink: DropoutSink, drop: Callable[[Tensor], Tensor], x: Tensor) -> None:
    require_values(x)
    dropped = dropped_elements(lambda x: drop(x.clone()), x)  # it may drop in place
    with forked_rng(x):
        sink.observe(x, drop(x.clone()), dropped)
