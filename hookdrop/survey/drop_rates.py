"""Find the dropout that a model already has: the attributes that its random drops read their rates from.

For one forward in training mode, each number in [0, 1] that the model stores gets a value of its own. The value that
arrives at a random drop (`F.dropout`, attention, `bernoulli_`, a comparison with `torch.rand`) then shows which
attribute it came from, under any name and through any call, also where the rate is 0 now.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hookdrop.regularizers import DropPath, Regularizer
from hookdrop.survey.branches import added, has_weights, is_affine
from hookdrop.survey.heads import attention_cores
from hookdrop.survey.isolation import attributes_of
from hookdrop.survey.ops import DROPOUTS
from hookdrop.survey.trace import Node, Op, Trace, Training, record
from hookdrop.utils.select import has_forward

_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_COMPUTED = {"timm.layers.drop.DropBlock2d": "drop_prob", "torchvision.ops.drop_block.DropBlock2d": "p"}
"""Modules whose rate no forward shows: they draw block seeds, whose probability they compute from it."""
ATTENTION = {"scaled_dot_product_attention": 4, "multi_head_attention_forward": 10}
"""Position of `dropout_p`."""
_DRAWS = {"rand", "rand_like", "uniform"}
_FILLS = {"full", "full_like", "new_full"}
_COMPARISONS = {"lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge}
_RAISED = 1e-3
"""The value of a rate of 0 during the run, because a forward may skip a drop at 0."""
_HARMLESS = 1e-9
"""A rate at which nothing is dropped, and at which float32 does not show the scale."""


@dataclass(frozen=True)
class DropRate:
    """An attribute that a random drop reads its rate from."""

    layer: str
    """Full name of the module."""
    attribute: str
    """`"p"`, or `"config.layerdrop"` for an attribute of an object that the module holds."""


@dataclass(frozen=True)
class DropRates:
    """The dropout of a model."""

    rates: tuple[DropRate, ...]
    """In the order of `named_modules()`."""
    out_of_reach: Mapping[str, tuple[str, ...]]
    """Random drops that read no attribute: descriptions, with the names of the modules that run them."""
    runners: Mapping[DropRate, tuple[str, ...]] = field(default_factory=dict)
    """The names of the modules whose own forward runs the drops of a rate, which need not be those that hold it."""
    per_sample: frozenset[DropRate] = frozenset()
    """Those that drop whole samples, as in stochastic depth."""
    aside: frozenset[DropRate] = frozenset()
    """Those that drop no hidden states: only attention weights, or the input of an adapter."""


def known_drop_rates(model: nn.Module) -> list[DropRate]:
    """Return the rates of the modules whose class defines them, without a forward."""
    found = [(name, _known_attribute(module)) for name, module in model.named_modules()]
    return [DropRate(name, key) for name, key in found if key is not None]


def find_drop_rates(model: nn.Module, example: Any, *, fake: bool = True) -> DropRates:
    """Run `model` once in training mode without gradients, and return all rates that its drops read.

    Args:
        model: a model without wrappers and without hooks of hookdrop.
        example: a tensor, a tuple of arguments, or a mapping of keyword arguments.
        fake: whether the tensors have no values, only shapes.

    Raises:
        InjectionError: the model does not run on the example in training mode.
    """
    trace, arrivals = arrivals_of(model, example, fake=fake)
    order = {name: index for index, (name, _) in enumerate(model.named_modules())}
    rates = sorted(dict.fromkeys([*known_drop_rates(model), *arrivals.ops]), key=lambda rate: order[rate.layer])
    out_of_reach = {what: tuple(layers) for what, layers in arrivals.out_of_reach.items()}
    attention = _attention_drops(trace)
    aside = [rate for rate, ops in arrivals.ops.items() if all(op in attention or _adapts(trace, op) for op in ops)]
    runners = {rate: tuple(dict.fromkeys(op.call.name for op in ops if op.call)) for rate, ops in arrivals.ops.items()}
    return DropRates(tuple(rates), out_of_reach, runners, frozenset(arrivals.per_sample), frozenset(aside))


def arrivals_of(
    model: nn.Module, example: Any, *, fake: bool, training: Training = True, only: Collection[DropRate] = ()
) -> tuple[Trace, Arrivals]:
    """Run `model` once with rates that can be told apart, and return where they arrive.

    Args:
        model, example, fake: as for `find_drop_rates`.
        training: as for `record`.
        only: the drop rates to follow, which are then close to 0; by default, all numbers that may be one.
    """
    with _marked(model, only) as sources, _Decisions():
        trace = record(model, example, fake=fake, training=training)
    arrivals = Arrivals(model, sources)
    arrivals.read(trace)
    return trace, arrivals


def _known_attribute(module: nn.Module) -> str | None:
    if isinstance(module, Regularizer):
        return module.rate.attribute if module.rate is not None and module.rate.kind == "drop" else None
    if isinstance(module, nn.MultiheadAttention) or (isinstance(module, nn.RNNBase) and module.num_layers > 1):
        return "dropout"
    names = [f"{cls.__module__}.{cls.__qualname__}" for cls in type(module).__mro__]
    return "p" if isinstance(module, _DROPOUT) else next((_COMPUTED[name] for name in names if name in _COMPUTED), None)


class _Zero(int):
    """An integer 0 that is known by its identity: it may be an index or an axis, so its value has to stay."""

    source: tuple[DropRate, float]


Sources = Mapping[float, tuple[DropRate, float]]
"""The attributes, with their values before the run, by their values in the run."""


@contextmanager
def _marked(model: nn.Module, only: Collection[DropRate]) -> Iterator[Sources]:
    """Give each number in [0, 1] that the model stores another value, or only `only`, whose values are then near 0."""
    saved: list[tuple[dict[str, Any], str, Any]] = []
    sources: dict[float, tuple[DropRate, float]] = {}
    seen: set[int] = set()

    def mark(table: dict[str, Any], layer: str, path: str = "") -> None:
        if id(table) in seen:
            return
        seen.add(id(table))
        for key, value in list(table.items()):
            new: Any = None
            source = DropRate(layer, path + key)
            if source in only:
                new = _HARMLESS + 1e-14 * (len(saved) + 1)
                sources[new] = source, 0.0
            elif not only and type(value) is float and 0.0 <= value < 1.0:
                new = (value or _RAISED) * (1 + 1e-12 * (len(saved) + 1))  # above, so that `int(value * size)` stays
                sources[new] = source, value
            elif not only and type(value) is int and value == 0:
                new = _Zero()
                new.source = source, 0.0
            elif not path and (attributes := attributes_of(value)) is not None:
                mark(attributes, layer, f"{key}.")
            if new is not None:
                saved.append((table, key, value))
                table[key] = new

    try:
        for name, module in model.named_modules():
            mark(vars(module), name)
        yield sources
    finally:
        for table, key, value in saved:
            table[key] = value


class _Decisions(TorchFunctionMode):
    """Decides comparisons with a uniform random number, as if it were 0.5, because fake tensors have no values."""

    def __init__(self) -> None:
        super().__init__()
        self._draws: dict[int, Tensor] = {}
        self._outcomes: dict[int, tuple[Tensor, bool]] = {}
        """Both by id, and kept, so that no other tensor gets the id."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "").strip("_")
        if name in ("bool", "item") and id(args[0]) in self._outcomes:
            return self._outcomes[id(args[0])][1]
        if name in DROPOUTS:  # at 0, it would return its input, which is no operation
            args = [_RAISED if isinstance(arg, _Zero) else arg for arg in args]
            kwargs = {key: _RAISED if isinstance(arg, _Zero) else arg for key, arg in (kwargs or {}).items()}
        output = function(*args, **kwargs or {})
        if name in _DRAWS:
            self._draws[id(output)] = output
        elif name in _COMPARISONS and len(args) == 2:
            values = [0.5 if id(arg) in self._draws else arg for arg in args]
            if not any(isinstance(value, Tensor) for value in values):
                self._outcomes[id(output)] = output, _COMPARISONS[name](*values)
        return output


def active_rate(op: Op) -> Any:
    """Return the rate of a functional dropout; 0 in eval mode."""
    if op.name in ATTENTION:
        return op.argument(ATTENTION[op.name], "dropout_p", 0.0) if op.kwargs.get("training", True) else 0.0
    return op.argument(1, "p", 0.5) if op.argument(2, "training", op.kwargs.get("train", True)) else 0.0


class Arrivals:
    """The numbers that arrive at random drops."""

    def __init__(self, model: nn.Module, sources: Sources) -> None:
        self.ops: dict[DropRate, list[Op]] = {}
        """The drops of each rate."""
        self.per_sample: list[DropRate] = []
        self.out_of_reach: dict[str, list[str]] = {}
        self._modules = dict(model.named_modules())
        self._sources, self._complements = sources, {1 - value: source for value, source in sources.items()}
        self.scales = {*self._complements, *(1 / kept for kept in self._complements)}
        """The numbers that a drop may multiply by, so that the mean stays."""

    def read(self, trace: Trace) -> None:
        """Find the drops among the operations."""
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
                self._at_draw(op, op.argument(1, "p", filled.get(op.args[0])), _keeps(trace, op))
            elif op.name in {*_COMPARISONS, "add"} and len(op.args) > 1:
                operands = [arg for arg in op.args[:2] if arg not in draws]
                if len(operands) == 1:
                    keeps = _keeps(trace, op)
                    is_less = op.name == "add" or (op.name in ("lt", "le")) == (op.args[0] in draws)
                    self._at_draw(op, operands[0], keeps if is_less or keeps is None else not keeps)

        # The outermost parts that the forward did not run.
        for name, module in self._modules.items():
            parent = name.rpartition(".")[0]
            while parent and not has_forward(self._modules[parent]):
                parent = parent.rpartition(".")[0]
            is_part = has_forward(module) and any(module.children())
            if is_part and name not in trace.calls_of and parent in trace.calls_of:
                self.out_of_reach.setdefault("the example does not run", []).append(name)

    def _at_drop(self, op: Op, rate: Any) -> None:
        """A function that drops with probability `rate`."""
        if (source := self._source(rate, self._sources)) is not None:
            self.ops.setdefault(source[0], []).append(op)
        elif isinstance(rate, Node) or rate:
            self._miss(op, f"with a rate of {'a tensor' if isinstance(rate, Node) else f'{rate:g}'}")

    def _at_draw(self, op: Op, number: Any, keeps: bool | None) -> None:
        """A random choice with probability `number`: that of keeping, of dropping, or, for None, of either."""
        direct, complement = self._source(number, self._sources), self._source(number, self._complements)
        source, is_direct = direct or complement, direct is not None
        if source is None:
            if isinstance(number, float) and 0.0 < number < 1.0:
                self._miss(op, f"with a probability of {number:g}")
        elif keeps is not is_direct and (keeps is not None or not is_direct or source[1] < 0.5):
            self.ops.setdefault(source[0], []).append(op)
            shape = op.outputs[0].shape
            if len(shape) > 1 and op.outputs[0].size == shape[0]:
                self.per_sample.append(source[0])
        else:
            self._miss(op, f"with {source[0].attribute}, which may be the probability to keep")

    @staticmethod
    def _source(number: Any, sources: Sources) -> tuple[DropRate, float] | None:
        if isinstance(number, _Zero):
            return number.source
        return sources.get(number) if isinstance(number, float) else None

    def _miss(self, op: Op, how: str) -> None:
        assert op.call is not None
        layers = self.out_of_reach.setdefault(f"{op.call.type} calls {op.name} {how}", [])
        if op.call.name not in layers:
            layers.append(op.call.name)


def _keeps(trace: Trace, op: Op) -> bool | None:
    """Whether 1 keeps, where a random choice multiplies or selects, or drops, where it masks; None if neither shows."""
    keeps, node = True, op.outputs[0]
    while users := trace.users.get(node):
        op = users[0]
        if op.name in ("mul", "masked_fill"):
            return keeps == (op.name == "mul")
        if op.name == "where":
            return keeps == (isinstance(op.args[1], Node) and op.args[1].is_data)
        if op.name in ("logical_not", "bitwise_not", "invert", "rsub"):
            keeps = not keeps
        elif len(op.inputs) > 1:
            return None
        node = op.outputs[0]
    return None


def _attention_drops(trace: Trace) -> set[Op]:
    """Return the drops of attention weights: inside fused attention, or between a softmax and a product."""
    found = {op for op in trace.ops if op.name in ATTENTION}
    for core in attention_cores(trace):
        for op in (node.op for node in core.inputs):
            drops: set[Op] = set()
            while op is not None and op.name != "softmax" and len(op.inputs) == 1:
                drops |= {op} if op.name in DROPOUTS else set()
                op = op.inputs[0].op
            found |= drops if op is not None and op.name == "softmax" else set()
    return found


def _adapts(trace: Trace, drop: Op) -> bool:
    """Whether a drop only acts on the input of an adapter: linear layers beside a layer, as in LoRA."""
    source, out = drop.inputs[0], drop.outputs[0]
    for op in trace.ops[trace.ops.index(drop) :]:
        inside = [term for term in added(op) or () if trace.leads(out, term)]
        if len(inside) == 1:
            (other,) = (term for term in op.inputs if term not in inside)
            around = trace.path(source, [other])
            path = [node.op for node in trace.path(out, inside) if node.op is not None]
            return any(node.op and has_weights(node.op) for node in around) and all(map(is_affine, path))
    return False
