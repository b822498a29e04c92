"""Streaming statistics of layers: numbers, no tensors are kept."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.optim import optimizer as optimizers

from hookdrop.core.arguments import count
from hookdrop.core.selection import Entries
from hookdrop.core.tables import text_table
from hookdrop.core.tensor_tree import TensorKey
from hookdrop.core.torch_internals import parameters_of
from hookdrop.measure.figures import channel_axis, get_figure
from hookdrop.measure.observing import total
from hookdrop.observe.watch import Receiver, Tensors, Watch
from hookdrop.survey.isolation import forked_rng

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MANY, FAR, LARGE_UPDATE = 0.1, 1e4, 0.1  # what is worth a sentence: of the units, of the last gradient, of a weight


@dataclass(frozen=True)
class LayerStatistics:
    """What was measured of one layer. None is unknown."""

    samples: int
    mean: float
    std: float
    largest: float  #: The largest absolute value.
    zeros: float  #: The fraction of elements that are zero.
    units: int  #: Channels of maps, or features.
    dead: int  #: Units that were zero for every sample.
    saturated: int  #: Units of a bounded activation of which 90 % of the values were within 1 % of a bound.
    not_finite: int  #: Samples with NaN or infinite values.
    gradient: float | None  #: The mean norm of the gradient of the output, times the loss scale of a `GradScaler`.
    bad_gradients: int  #: Measured backward passes whose gradient was NaN or infinite; the mean leaves them out.
    weight_gradient: float | None  #: The norm of the gradient of the trained parameters inside.
    weight: float | None  #: The norm of these parameters.
    update: float | None  #: The norm of what the last measured step changed.

    @property
    def badness(self) -> tuple[float, ...]:
        """What the table is sorted by: first by elements that are not finite, then by dead and saturated units."""
        return self.not_finite, (self.dead + self.saturated) / max(self.units, 1), -(self.gradient or math.inf)

    def doubts(self, usual: float) -> Iterator[tuple[str, float, str]]:
        """Yield what to do, how bad it is, and what looks unhealthy; `usual` is the gradient of the last layer."""
        if self.not_finite:  # in the order of the calls: the first layer is the cause
            fact = f"{{}} returned NaN or infinite values for {self.not_finite} of {self.samples} samples"
            yield "not finite", 0.0, fact
        of_all = f"for all {self.samples} samples"
        for number, what, when in ((self.dead, "zero", of_all), (self.saturated, "saturated", "nearly all the time")):
            if number > MANY * self.units:
                yield what, number / self.units, f"{number} of {self.units} units of {{}} were {what} {when}"
        if self.bad_gradients:
            fact = f"the gradient of {{}} was NaN or infinite in {self.bad_gradients} measured backward passes"
            yield "bad gradient", -1.0 if self.not_finite else 0.0, fact
        if self.gradient == 0.0:
            yield "none", 0.0, "no gradient reaches {}"
        elif self.gradient and max(self.gradient / usual, usual / self.gradient) > FAR:
            far = math.log(self.gradient / usual)
            fact = f"the gradient of {{}} has a norm of {self.gradient:.3g}, and that of the last layer {usual:.3g}"
            yield "small" if far < 0 else "large", abs(far), fact
        if self.update and self.weight and self.update > LARGE_UPDATE * self.weight:
            share = self.update / self.weight
            yield "fast", share, f"one step changed the parameters of {{}} by {share:.0%}"


_ADVICE = {
    "not finite": "lower the learning rate, clip gradients, or look at what comes in: capture(..., what='input')",
    "bad gradient": "look at the loss, unless a GradScaler skipped these steps",
    "zero": "lower the learning rate, or use an activation with a slope below zero, such as nn.LeakyReLU",
    "none": "look for a layer after it that is dead or saturated, or for a loss that does not use it",
    "saturated": "scale down what comes in: smaller initial weights, a norm before it, or a lower learning rate",
    "small": "add a skip connection or a norm between it and the loss",
    "large": "clip the gradients, or lower the learning rate",
    "fast": "lower the learning rate, or warm it up",
    "never": "check the model, or exclude these layers",
}


class statistics(Watch[LayerStatistics]):
    """Measure whether layers are healthy, in the forwards and optimizer steps inside a `with` block.

    It maps the names of layers to `LayerStatistics`. `print` it for a table, the worst layers first.
    The numbers stay on the device of the model until they are read. Once a layer runs in training mode, its calls in
    eval mode do not count. What an activation checkpoint recomputes counts once. Compiled code runs uncompiled inside.
    In a distributed job, each rank measures its own samples.

    Args:
        model: any `nn.Module`, wrapped or not.
        layers, exclude, tensor: which layers and which of their outputs, as in `inject`.
        every: how many forwards of the model there are for each one that is measured, the first included; those in
            training and in eval mode are counted apart. So are the steps of each optimizer, which need a copy of the
            parameters.
        channel_dim: the axis of the units. None is the axis of the channels or features of the layer, or of the watched
            layer with weights that ran before it; without any, 1 for maps (N, C, H, W), and the last one otherwise.

    Raises:
        LayerError: an entry matches nothing, or a layer did not run.
        ValueError, TypeError: an argument is invalid.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
        >>> _ = nn.init.constant_(model[0].bias[:6], -100.0)
        >>> with statistics(model) as health:
        ...     _ = model(torch.randn(16, 4))
        >>> print(health.doubts()[0])
        6 of 8 units of '1' were zero for all 16 samples
          lower the learning rate, or use an activation with a slope below zero, such as nn.LeakyReLU
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Entries = "**",
        *,
        exclude: Entries | None = (),
        every: int = 10,
        tensor: TensorKey = None,
        channel_dim: int | None = None,
    ) -> None:
        if channel_dim is not None and not count(channel_dim, "channel_dim", "statistics", -5):
            raise ValueError("statistics: channel_dim must not be 0, the axis of the samples.")
        super().__init__(model, layers, exclude, tensor)
        self.every, self._channel_dim = count(every, "every", "statistics"), channel_dim
        self._axis: int | None = None  # 1 or -1: the axis of the units of the last layer that shows it
        self._inside = {name: list(module.parameters()) for name, module in self.layers.items()}
        self._parameters = {p for inside in self._inside.values() for p in inside}
        self._steps: Counter[torch.optim.Optimizer] = Counter()
        self._old: dict[torch.optim.Optimizer, dict[Tensor, Tensor]] = {}  # in a measured step
        self._norms: dict[Tensor, list[Tensor]] = {}
        """Of each parameter: the norms of its gradient, of itself, and of its last update."""

    def __enter__(self) -> Self:
        super().__enter__()
        assert self._hooks is not None
        self._hooks.callback(optimizers.register_optimizer_step_pre_hook(self._before_step).remove)
        self._hooks.callback(optimizers.register_optimizer_step_post_hook(self._after_step).remove)
        self._hooks.callback(self._old.clear)
        return self

    def after(self, name: str, found: Tensors) -> Receiver | None:
        module, sums = self.layers[name], self.seen.get(name)
        if not found or (sums is not None and module.training < sums.training):
            return None
        if sums is None or module.training > sums.training:
            sums = self.seen[name] = _Sums(module)
        sums.samples += len(found[0])
        for x in filter(Tensor.numel, found):
            x = x.detach().float() if x.element_size() < 4 else x.detach()
            x = x if x.dim() > 1 else x[:, None]
            sums.add(x, self._axis_of_units(module, x))
        return sums.add_gradient

    def _axis_of_units(self, module: nn.Module, x: Tensor) -> int:
        """Return the given axis, or that with an entry for each bias or row of the weight, as in a layer before."""
        given = self._channel_dim
        if given is not None and -x.dim() < given < x.dim() and given % x.dim():
            return given % x.dim()
        own = parameters_of(module)
        weight = next((p for p in (own.get("bias"), own.get("weight")) if p is not None and p.dim()), None)
        axes = [] if weight is None or x.dim() < 3 else [i for i in (1, -1) if x.shape[i] == len(weight)]
        self._axis = axes[0] if len(axes) == 1 else self._axis
        return channel_axis(x.shape) if self._axis is None or x.dim() < 3 else self._axis % x.dim()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer in self._old:  # a step inside that of a subclass
            return
        params, self._old[optimizer] = [p for group in optimizer.param_groups for p in group["params"]], {}
        if self._steps[optimizer] % self.every == 0:
            trained = [p for p in params if p in self._parameters and p.requires_grad]
            self._old[optimizer] = {p: p.detach().clone() for p in trained}
            if not _closure(args, kwargs):  # some optimizers change or delete the gradients
                self._norms |= {p: [_norm(p.grad)] for p in trained if p.grad is not None}
        self._steps[optimizer] += 1

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for p, old in self._old.pop(optimizer, {}).items():
            known = [_norm(p.grad)] if _closure(args, kwargs) and p.grad is not None else self._norms.get(p, [])[:1]
            if known:
                self._norms[p] = [*known, _norm(p), _norm(old.sub_(p.detach()))]

    def value(self, name: str) -> LayerStatistics:
        sums: _Sums = self.seen[name]
        norms = [list(map(total, self._norms[p])) for p in self._inside[name] if len(self._norms.get(p, ())) == 3]
        return sums.result([math.hypot(*column) for column in zip(*norms, strict=True)])

    def metrics(self) -> dict[str, float]:
        """Return all known numbers for any logger: `{"observe/layer3.0/dead": 40.0, ...}`."""
        known = ((f"observe/{name}/{key}", x) for name, one in self.items() for key, x in vars(one).items())
        return {key: float(x) for key, x in known if x is not None}

    def doubts(self) -> list[str]:
        """Return what looks unhealthy, the worst layers first, and what to do about it.

        Of a layer and one inside it for which the same is true, only the inner one is named.
        """
        found = dict(self)
        usual = [one.gradient for one in found.values() if one.gradient][-1:] or [math.nan]
        told = [(name, *doubt) for name, one in found.items() for doubt in one.doubts(usual[0])]
        inside = {(name.rpartition(".")[0], *doubt) for name, *doubt in told}
        facts: dict[str, list[str]] = {kind: [] for kind in _ADVICE}
        for name, kind, badness, fact in sorted(told, key=lambda one: -one[2]):
            if (name, kind, badness, fact) not in inside:
                facts[kind].append(fact.format(repr(name)))
        never = self.never(with_parameters=True)
        facts["never"] = [never] * bool(never)
        return [
            "\n".join(
                [*some[:3], *[f"and so on, in {len(some) - 3} more layers"] * (len(some) > 3), f"  {_ADVICE[kind]}"]
            )
            for kind, some in facts.items()
            if some
        ]

    def __repr__(self) -> str:
        worst_first = sorted(self.items(), key=lambda item: item[1].badness, reverse=True)
        rows = [(name, *(vars(one)[column] for column in _COLUMNS)) for name, one in worst_first]
        return text_table(("layer", *_COLUMNS), rows)

    def plot(self, figure: Any = None) -> Figure:
        """Draw bars of the layers, in the order of their first calls, in a matplotlib `Figure` or a new one."""
        found, names = [*self.values()], [name or "the model" for name in self]
        drawn: Figure = get_figure(figure, 9.0, 1.2 + 0.2 * len(names))
        shown = {
            "dead or saturated units (%)": [100 * one.badness[1] for one in found],
            "standard deviation": [one.std for one in found],
            "norm of the gradient": [one.gradient or math.nan for one in found],
        }
        table = drawn.subplots(1, len(shown), sharey=True)
        for axes, (title, values) in zip(table, shown.items(), strict=True):
            axes.barh(names, values)
            axes.set_title(title, fontsize=9)
            axes.tick_params(labelsize=7)
        table[0].set(xlim=(0, 100))
        table[0].invert_yaxis()
        table[0].margins(y=0.01)
        if any(one.gradient for one in found):
            table[2].set_xscale("log")
        return drawn


_HIDDEN = ("bad_gradients", "weight_gradient", "weight")
_COLUMNS = [field.name for field in fields(LayerStatistics) if field.name not in _HIDDEN]


class _Sums:
    """What is known of the output of a layer, in tensors on its device."""

    def __init__(self, module: nn.Module) -> None:
        self.training, self.bounds = module.training, _bounds(module)
        self.samples = self.elements = self.backwards = 0
        self.mean: Any = 0.0
        self.squares: Any = 0.0  # the sum of (x - mean)^2
        self.largest: Any = 0.0
        self.zeros: Any = 0
        self.not_finite: Any = 0
        self.gradient: Any = 0.0  # the sum of the norms that are finite
        self.gradients: Any = 0
        self.units: dict[int, _Units] = {}  # by their number, since a layer may be called with several shapes

    def add(self, x: Tensor, axis: int) -> None:
        inner, before, new = [i for i in range(1, x.dim()) if i != axis], self.elements, x.numel()
        # Of each sample and unit. Few passes over `x`: `var_mean` alone takes 50 times as long as a sum on a CPU.
        total, low, high = (x.sum(inner), x.amin(inner), x.amax(inner)) if inner else (x, x, x)
        exact = torch.float32 if x.device.type == "mps" else torch.float64
        mean = total.sum(dtype=exact) / new
        squares = (x - mean.to(x.dtype)).square_().sum()
        self.elements = before + new
        shift = mean - self.mean
        self.mean = self.mean + shift * (new / self.elements)
        self.squares = self.squares + squares + shift.square() * (before * new / self.elements)
        self.zeros = self.zeros + (new - x.count_nonzero())
        largest = torch.maximum(low.abs(), high.abs())
        self.largest = largest.amax().clamp(min=self.largest)
        self.not_finite = self.not_finite + largest.isfinite().all(1).logical_not().sum()
        units = self.units.setdefault(x.shape[axis], _Units())
        units.values += new // x.shape[axis]
        units.alive = units.alive | (largest != 0).any(0)
        if self.bounds is not None:  # zero is no bound that an activation is stuck at, but a dead unit
            stuck = ((x <= self.bounds[0]) | (x >= self.bounds[1])) & (x != 0)
            units.stuck = units.stuck + stuck.movedim(axis, 0).flatten(1).sum(1)

    def add_gradient(self, index: int, gradient: Tensor) -> None:
        norm = _norm(gradient)
        self.backwards += 1
        self.gradients = self.gradients + norm.isfinite()
        self.gradient = self.gradient + norm.nan_to_num(0.0, 0.0)

    def result(self, norms: Sequence[float]) -> LayerStatistics:
        elements, units = max(self.elements, 1), self.units.values()
        alive = [torch.as_tensor(one.alive, device="cpu") for one in units]
        saturated = [(one.alive & (10 * one.stuck >= 9 * one.values)).sum() for one in units if self.bounds]
        numbers = (self.mean, (self.squares / elements) ** 0.5, self.largest, self.zeros / elements)
        dead = sum(one.numel() - int(total(one.sum())) for one in alive)
        finite = int(total(self.gradients))
        facts: list[Any] = [self.samples, *map(total, numbers), sum(self.units), dead]
        facts += [int(sum(map(total, saturated))), int(total(self.not_finite))]
        facts += [total(self.gradient) / finite if finite else None, self.backwards - finite]
        return LayerStatistics(*facts, *(norms or (None, None, None)))


@dataclass
class _Units:
    """The units of an output, which are channels or features."""

    values: int = 0  # of each
    alive: Any = False  # whether it was ever not zero
    stuck: Any = 0  # how many values were near a bound of the activation


def _closure(args: Any, kwargs: Any) -> Any:
    """Return the function that computes the gradients inside an optimizer step, if there is one."""
    return (*args[1:], kwargs.get("closure"))[0]


def _norm(x: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x.detach(), dtype=torch.promote_types(x.dtype, torch.float32))
    return norm


def _bounds(module: nn.Module) -> tuple[float, float] | None:
    """Return the range that an activation function leaves only where it is saturated; None of any other module.

    It is a module without parameters whose output is bounded, and depends on each element alone; or a recurrent one.
    """
    if isinstance(module, nn.RNNBase | nn.RNNCellBase) and not getattr(module, "proj_size", 0):
        return (-0.98, 0.98) if getattr(module, "nonlinearity", "tanh") == "tanh" else None
    if any(True for _ in (*module.children(), *module.parameters(), *module.buffers())):
        return None
    far = torch.tensor([-2e4, -1e4, 1e4, 2e4], device="cpu")
    with suppress(Exception), torch.no_grad(), forked_rng():
        forward = copy.deepcopy(module).forward  # it may count its calls
        values = [float(forward(x)) for x in far[:, None]]
        flat = math.isclose(values[0], values[1], rel_tol=1e-3) and math.isclose(values[2], values[3], rel_tol=1e-3)
        low, high = values[0], values[3]
        if flat and -1e3 < low < high < 1e3 and forward(far).tolist() == values:
            return low + 0.01 * (high - low), high - 0.01 * (high - low)
    return None
