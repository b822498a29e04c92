"""Find the dropout that a model already has: the attributes that its random drops read their rates from.

For one forward in training mode, each number in [0, 1) that the model stores changes by a tiny amount, a different one
for each. The value that arrives at a random drop (`F.dropout`, attention, `bernoulli_`, a comparison with
`torch.rand`) then shows which attribute it came from, under any name and through any call. A 0 stays 0, and is known by
its identity: a model may not have the parts that another number switches on.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from hookdrop.core.errors import InjectionError
from hookdrop.core.regularizer import Regularizer
from hookdrop.core.selection import has_forward
from hookdrop.regularizers import DropPath
from hookdrop.survey.heads import attention_cores
from hookdrop.survey.isolation import Training, attributes_of
from hookdrop.survey.ops import DROPOUTS
from hookdrop.survey.record import modules_of, record
from hookdrop.survey.residuals import added, has_weights, is_affine
from hookdrop.survey.trace import Node, Op, Trace

_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_COMPUTED = {"timm.layers.drop.DropBlock2d": "drop_prob", "torchvision.ops.drop_block.DropBlock2d": "p"}
"""Modules whose rate no forward shows: they draw block seeds, whose probability they compute from it."""
ATTENTION = {"scaled_dot_product_attention": 4, "multi_head_attention_forward": 10}
"""Position of `dropout_p`."""
_DRAWS = {"rand", "rand_like", "uniform"}
_FILLS = {"full", "full_like", "new_full"}
_COMPARISONS = {"lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge}
_INTEGERS = (torch.int32, torch.int64)
_RAISED = 1e-3
"""The value of a rate of 0 at which the forward skips the drop, while it is looked for."""


@dataclass(frozen=True)
class DropRate:
    """An attribute that a random drop reads its rate from, or a drop whose rate is in the code."""

    layer: str
    """Full name of the module."""
    attribute: str
    """`"p"`, or `"config.layerdrop"` for an attribute of an object that the module holds; the function that drops, such
    as `"dropout"`, if the rate is in the code."""
    constant: float | None = None
    """The rate, if it is in the code: it cannot be changed."""

    def value_in(self, model: nn.Module) -> float:
        """Return the current rate."""
        holder = model.get_submodule(self.layer)
        return float(operator.attrgetter(self.attribute)(holder)) if self.constant is None else self.constant


@dataclass(frozen=True)
class DropRates:
    """The dropout of a model."""

    rates: tuple[DropRate, ...]
    """Those that can be changed, in the order of `named_modules()`."""
    out_of_reach: Mapping[str, tuple[str, ...]]
    """Random drops that read no attribute: descriptions, with the names of the modules that run them."""
    runners: Mapping[DropRate, tuple[str, ...]] = field(default_factory=dict)
    """The names of the modules whose own forward runs the drops of a rate, which need not be those that hold it."""
    per_sample: frozenset[DropRate] = frozenset()
    """Those that drop whole samples, as in stochastic depth."""
    aside: frozenset[DropRate] = frozenset()
    """Those that drop no hidden states: only attention weights, or the input of an adapter."""

    @property
    def constants(self) -> list[DropRate]:
        """The drops of functions whose rates are in the code, in the order of execution."""
        return [rate for rate in self.runners if rate.constant is not None]


def known_drop_rates(model: nn.Module) -> list[DropRate]:
    """Return the rates of the modules whose class defines them, without a forward."""
    found = [(name, _known_attribute(module)) for name, module in modules_of(model).items()]
    return [DropRate(name, key) for name, key in found if key is not None]


def find_drop_rates(model: nn.Module, example: Any, *, fake: bool = True, skipped: bool = False) -> DropRates:
    """Run a model without wrappers and hooks in training mode, as `record` does, and return all rates that drops read.

    `skipped` is whether to look also for rates of 0 at which the forward skips the drop, in a second run.

    Raises:
        InjectionError: the model does not run on the example in training mode.
    """
    values = {rate: value for *_, value, rate in _numbers(model) if type(value) in (int, float)}
    numbers = [rate for rate, value in values.items() if 0 <= value < 1 and (type(value) is float or value == 0)]

    def run(marked: Collection[DropRate], raised: Collection[DropRate] = ()) -> Arrivals:
        marked, raised = {*marked}, {*raised}

        def change(rate: DropRate, value: float, index: int) -> Any:
            if rate in raised or (rate in marked and value):
                return (value or _RAISED) * (1 + 1e-12 * index)  # above, so that `int(value * size)` stays
            return _ZEROS[type(value)](value) if rate in marked else None

        return Arrivals(model, example, change, fake=fake)

    def drops_if_drawn(rate: DropRate) -> bool:
        """Whether the forward does less if a draw with this probability comes true."""

        def length(number: float) -> int:
            return len(Arrivals(model, example, lambda one, *_: number if one == rate else None, fake=fake).trace.ops)

        with suppress(InjectionError):  # such as that of a model of which nothing is left
            return length(1 - _RAISED) < length(_RAISED)
        return True

    found = _without_culprits(run, numbers)
    drops = [(found, found.ops)]
    zeros = [one for one in numbers if type(values[one]) is float and not values[one] and one not in found.ops]
    if skipped and zeros:
        more = _without_culprits(lambda raised: run(zeros, raised), zeros)
        drops.append((more, {rate: more.ops[rate] for rate in zeros if rate in more.ops}))
    for one, own in drops:
        for rate in one.choices & own.keys():
            if not drops_if_drawn(rate):  # it chooses otherwise, such as teacher forcing
                del own[rate]
    rates = [*known_drop_rates(model), *(rate for _, own in drops for rate in own if rate.constant is None)]
    hidden = dict.fromkeys(found.hidden)
    out_of_reach = {"the example does not run": found.unused, "dropout inside code that torch.jit compiled": hidden}
    order = {name: index for index, name in enumerate(modules_of(model))}
    return DropRates(
        tuple(sorted(dict.fromkeys(rates), key=lambda rate: order[rate.layer])),
        {what: tuple(names) for what, names in out_of_reach.items() if names},
        {rate: tuple(dict.fromkeys(op.call.name for op in ops if op.call))
         for _, own in drops for rate, ops in own.items()},
        frozenset(rate for one, _ in drops for rate in one.per_sample),
        frozenset(rate for one, own in drops for rate, ops in own.items() if all(map(one.is_aside, ops))),
    )  # fmt: skip


def _without_culprits(run: Callable[[Sequence[DropRate]], Arrivals], numbers: Sequence[DropRate]) -> Arrivals:
    """Run with as many of these numbers as possible: those that make the run fail are found by halves, and left out."""
    while True:
        try:
            return run(numbers)
        except InjectionError:
            run([])  # raises if it is the model that fails
        works, fails = 0, len(numbers)
        while fails - works > 1:
            middle = (works + fails) // 2
            try:
                run(numbers[:middle])
                works = middle
            except InjectionError:
                fails = middle
        numbers = [*numbers[:works], *numbers[fails:]]


def _known_attribute(module: nn.Module) -> str | None:
    if isinstance(module, Regularizer):
        return module.rate.attribute if module.rate is not None and module.rate.kind == "drop" else None
    if isinstance(module, nn.MultiheadAttention) or (isinstance(module, nn.RNNBase) and module.num_layers > 1):
        return "dropout"
    names = [f"{cls.__module__}.{cls.__qualname__}" for cls in type(module).__mro__]
    return "p" if isinstance(module, _DROPOUT) else next((_COMPUTED[name] for name in names if name in _COMPUTED), None)


class _Zero:
    """A 0 that is known by its identity."""

    source: tuple[DropRate, float]


_ZEROS: Mapping[type, type] = {kind: type("_Zero", (_Zero, kind), {}) for kind in (int, float)}
Sources = Mapping[float, tuple[DropRate, float]]
"""The attributes, with their values before the run, by their values in the run."""
Change = Callable[[DropRate, float, int], Any]
Number = tuple[dict[str, Any], str, float, DropRate]
"""The table and the key of a number, its value, and its name."""


def _numbers(model: nn.Module) -> Iterator[Number]:
    """Yield each number that the model stores."""
    seen: set[int] = set()

    def within(table: dict[str, Any], layer: str, path: str = "") -> Iterator[Number]:
        if id(table) in seen:
            return
        seen.add(id(table))
        for key, value in list(table.items()):
            if issubclass(type(value), int | float):  # `isinstance` runs code of proxies
                yield table, key, value, DropRate(layer, path + key)
            elif not path and (attributes := attributes_of(value)) is not None:
                yield from within(attributes, layer, f"{key}.")

    for name, module in modules_of(model).items():
        yield from within(vars(module), name)


@contextmanager
def _changed(model: nn.Module, change: Change) -> Iterator[Sources]:
    """Replace the numbers for which `change` returns another, given the name, the value and an index."""
    saved: list[tuple[dict[str, Any], str, float]] = []
    sources: dict[float, tuple[DropRate, float]] = {}
    try:
        for table, key, value, rate in list(_numbers(model)):
            new = change(rate, value, len(saved) + 1)
            if new is not None:
                saved.append((table, key, value))
                table[key] = new
                if isinstance(new, _Zero):
                    new.source = rate, value
                else:
                    sources[new] = rate, value
        yield sources
    finally:
        for table, key, value in saved:
            table[key] = value


@contextmanager
def at_zero(model: nn.Module, rates: Collection[DropRate]) -> Iterator[None]:
    """Set these rates to 0 inside."""
    with _changed(model, lambda rate, value, index: 0.0 if rate in rates else None):
        yield


class _Decisions(TorchFunctionMode):
    """Decides comparisons with a uniform random number, as if it were 0.5, because fake tensors have no values."""

    def __init__(self) -> None:
        super().__init__()
        self._draws, self._outcomes = WeakTensorKeyDictionary(), WeakTensorKeyDictionary()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "").strip("_")
        if name in ("bool", "item") and args[0] in self._outcomes:
            return self._outcomes[args[0]]
        if name in DROPOUTS:  # at 0, it would return its input, which is no operation
            args = [_RAISED if isinstance(arg, _Zero) else arg for arg in args]
            kwargs = {key: _RAISED if isinstance(arg, _Zero) else arg for key, arg in (kwargs or {}).items()}
        output = function(*args, **kwargs or {})
        if name in _DRAWS:
            self._draws[output] = True
        elif name in _COMPARISONS and len(args) == 2:
            values = [0.5 if isinstance(arg, Tensor) and arg in self._draws else arg for arg in args]
            if not any(isinstance(value, Tensor) for value in values):
                self._outcomes[output] = _COMPARISONS[name](*values)
        return output


def active_rate(op: Op) -> Any:
    """Return the rate of a functional dropout; 0 in eval mode."""
    if op.name in ATTENTION and op.is_hidden:  # kernels have other arguments, of which one is a fraction
        return next((arg for arg in op.args if type(arg) is float), 0.0)
    if op.name in ATTENTION:
        return op.argument(ATTENTION[op.name], "dropout_p", 0.0) if op.kwargs.get("training", True) else 0.0
    return op.argument(1, "p", 0.5) if op.argument(2, "training", op.kwargs.get("train", True)) else 0.0


def constants_in(trace: Trace) -> set[DropRate]:
    """Return the drops of functions at rates that are numbers, wherever these come from."""
    drops = [op for op in trace.ops if op.call is not None and (op.name in DROPOUTS or op.name in ATTENTION)]
    rates = [(op, active_rate(op)) for op in drops]
    return {_constant(op, rate) for op, rate in rates if rate and not isinstance(rate, Node)}


def _constant(op: Op, rate: Any) -> DropRate:
    assert op.call is not None
    return DropRate(op.call.name, op.name, rounded(rate))


def rounded(rate: float) -> float:
    """Return a rate without the small changes of numbers from which it may be computed."""
    return round(float(rate), 6)


class Arrivals:
    """The numbers that arrive at random drops in one forward, with other numbers: see `_changed`."""

    def __init__(
        self, model: nn.Module, example: Any, change: Change, *, fake: bool, training: Training = True
    ) -> None:
        with _changed(model, change) as sources, _Decisions():
            self.trace = record(model, example, fake=fake, training=training)
        self.ops: dict[DropRate, list[Op]] = {}
        """The drops of each rate."""
        self.per_sample: list[DropRate] = []
        self.choices: set[DropRate] = set()
        """Those whose draws decide which way the forward goes."""
        self.unused: list[str] = []
        """The outermost parts that the forward did not run."""
        self.hidden: list[str] = []
        """The modules that run drops of hidden code at rates that are in it."""
        self._modules = modules_of(model)
        self._sources, self._complements = sources, {1 - value: source for value, source in sources.items()}
        self.scales = {*self._complements, *(1 / kept for kept in self._complements)}
        """The numbers that a drop may multiply by, so that the mean stays."""
        self._read(self.trace)

    def _read(self, trace: Trace) -> None:
        draws: set[Node] = set()
        filled: dict[Node, Any] = {}
        for op in trace.ops:
            if op.call is None:
                continue
            module = self._modules[op.call.name]
            if (known := _known_attribute(module)) is not None:
                rate = DropRate(op.call.name, known)
                if op.name in DROPOUTS or op.name in ATTENTION:
                    self.ops.setdefault(rate, []).append(op)
                elif isinstance(module, DropPath):
                    self.per_sample.append(rate)
            elif op.name in _DRAWS:
                draws.update(op.outputs)
            elif op.name in _FILLS:
                filled[op.outputs[0]] = op.kwargs["fill_value"] if "fill_value" in op.kwargs else op.args[-1]
            elif op.name in DROPOUTS or op.name in ATTENTION:
                self._at_drop(op, active_rate(op))
            elif op.name == "bernoulli":
                self._at_draw(op, op.argument(1, "p", filled.get(op.args[0])), *_use(trace, op))
            elif op.name in {*_COMPARISONS, "add"} and len(op.args) > 1:
                operands = [arg for arg in op.args[:2] if arg not in draws]
                if len(operands) == 1:
                    keeps, user = _use(trace, op)
                    is_less = op.name == "add" or (op.name in ("lt", "le")) == (op.args[0] in draws)
                    self._at_draw(op, operands[0], keeps if is_less or keeps is None else not keeps, user)
        for name, module in self._modules.items():
            parent = name.rpartition(".")[0]
            while parent and not has_forward(self._modules[parent]):
                parent = parent.rpartition(".")[0]
            is_part = has_forward(module) and any(module.children())
            is_seen = name in trace.calls_of or isinstance(module, torch.jit.ScriptModule)
            if is_part and not is_seen and parent in trace.calls_of:
                self.unused.append(name)

    def _at_drop(self, op: Op, rate: Any) -> None:
        """A function that drops with probability `rate`."""
        if (source := self._source(rate, self._sources)) is not None:
            self.ops.setdefault(source[0], []).append(op)
        elif rate and op.is_hidden and op.call:
            self.hidden.append(op.call.name)
        elif rate and not isinstance(rate, Node):
            self.ops.setdefault(_constant(op, rate), []).append(op)

    def _at_draw(self, op: Op, number: Any, keeps: bool | None, user: Op | None) -> None:
        """A random choice with probability `number`: that of keeping, of dropping, or, for None, of either.

        `user` is the operation that it acts in, None if it decides which way the forward goes.
        """
        direct, complement = self._source(number, self._sources), self._source(number, self._complements)
        source, is_direct = direct or complement, direct is not None
        if source is None and op.is_hidden and op.call:
            self.hidden.append(op.call.name)
        if source is None or (keeps is is_direct or (keeps is None and is_direct and source[1] >= 0.5)):
            return  # no number of the model, or it may be the probability to keep
        if user is None:
            self.choices.add(source[0])
        elif any(node.is_data and node.dtype in _INTEGERS for node in user.inputs):
            return  # it chooses tokens, such as those that a model has to predict
        self.ops.setdefault(source[0], []).append(op)
        shape = op.outputs[0].shape
        if len(shape) > 1 and op.outputs[0].size == shape[0]:
            self.per_sample.append(source[0])

    def is_aside(self, drop: Op) -> bool:
        """Whether a drop acts on no hidden states: only on attention weights, or on the input of an adapter."""
        return drop in self._attention_drops or self._adapts(drop)

    @cached_property
    def _attention_drops(self) -> set[Op]:
        """The drops of attention weights: inside fused attention, or between a softmax and a product."""
        found = {op for op in self.trace.ops if op.name in ATTENTION}
        for op in (node.op for core in attention_cores(self.trace) for node in core.inputs):
            drops: set[Op] = set()
            while op is not None and op.name != "softmax" and len(op.inputs) == 1:
                drops |= {op} if op.name in DROPOUTS else set()
                op = op.inputs[0].op
            found |= drops if op is not None and op.name == "softmax" else set()
        return found

    def _adapts(self, drop: Op) -> bool:
        """Whether a drop only acts on the input of an adapter: linear layers beside a layer, as in LoRA."""
        source, out = drop.inputs[0], drop.outputs[0]
        for op in self.trace.ops[self.trace.ops.index(drop) :]:
            inside = [term for term in added(op) or () if self.trace.leads(out, term)]
            if len(inside) == 1:
                (other,) = (term for term in op.inputs if term not in inside)
                around = self.trace.path(source, [other])
                path = [node.op for node in self.trace.path(out, inside) if node.op is not None]
                return any(node.op and has_weights(node.op) for node in around) and all(map(is_affine, path))
        return False

    @staticmethod
    def _source(number: Any, sources: Sources) -> tuple[DropRate, float] | None:
        if isinstance(number, _Zero):
            return number.source
        return sources.get(number) if isinstance(number, float) else None


def _use(trace: Trace, op: Op) -> tuple[bool | None, Op | None]:
    """Return whether 1 keeps, where a random choice multiplies or selects, or drops, where it masks; and what uses it.

    None for the first if neither shows, and for both if no operation does.
    """
    keeps, node = True, op.outputs[0]
    while users := trace.users.get(node):
        op = users[0]
        if op.name in ("mul", "masked_fill"):
            return keeps == (op.name == "mul"), op
        if op.name == "where":
            return keeps == (isinstance(op.args[1], Node) and op.args[1].is_data), op
        if op.name in ("logical_not", "bitwise_not", "invert", "rsub"):
            keeps = not keeps
        elif len(op.inputs) > 1:
            return None, op
        node = op.outputs[0]
    return None, None
