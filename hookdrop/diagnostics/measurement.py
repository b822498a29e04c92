"""Measuring what a regularizer does to the tensors that pass."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from hookdrop.diagnostics.isolation import forked_rng
from hookdrop.errors import InjectionError
from hookdrop.hooks.hook import Rate, SiteHook
from hookdrop.hooks.state import InjectionState
from hookdrop.utils.tables import html_table, text_table
from hookdrop.utils.tensor_tree import require_same_shape_and_dtype
from hookdrop.utils.torch_internals import functorch_stack

HEADER = ("site", "asked", "dropped", "mean ratio", "calls")


class Meter(Protocol):
    """Receives every tensor that a regularizer works on."""

    def record(self, hook: SiteHook, rate: float | None, x: Tensor, y: Tensor, dropped: Tensor) -> None:
        """Note one call.

        Args:
            hook: the hook of the site.
            rate: that of the call; None if the regularizer has none.
            x: what came in.
            y: what went on.
            dropped: bool, of the shape of `x`: where `y` does not depend on it.
        """


@dataclass
class SiteMeasurement:
    """What happened at one site."""

    calls: int = 0
    """How often the regularizer worked on a tensor."""
    elements: int = 0
    zeroed: float = 0.0
    """Elements that the output does not depend on any more."""
    asked_sum: float | None = 0.0
    """None if the regularizer has no rate."""
    drops: bool = True
    """Whether dropping is what the regularizer does."""
    magnitude_in: float = 0.0
    magnitude_out: float = 0.0

    @property
    def asked(self) -> float:
        """The rate in force, averaged over the calls; 0 where there is none."""
        return self.asked_sum / self.calls if self.calls and self.asked_sum is not None else 0.0

    @property
    def dropped(self) -> float:
        """The fraction of elements that was dropped."""
        return self.zeroed / self.elements if self.elements else 0.0

    @property
    def mean_ratio(self) -> float:
        """Mean |output| / mean |input|: 1 where a regularizer keeps the mean."""
        return self.magnitude_out / self.magnitude_in if self.magnitude_in else 1.0


@dataclass
class Measurement:
    """What the regularizers did, by site; `print` it.

    `asked`, `dropped` and `mean_ratio` are over all sites, weighted by their elements.
    """

    sites: dict[str, SiteMeasurement] = field(default_factory=dict)
    eval_identical: bool | None = None
    """Whether eval output with hooks was bit-identical to that without; None if it was not looked at."""
    note: str = ""

    @property
    def calls(self) -> int:
        return sum(site.calls for site in self.sites.values())

    @property
    def asked(self) -> float:
        """The rate in force, averaged over the elements."""
        elements = sum(site.elements for site in self.sites.values())
        return sum(site.asked * site.elements for site in self.sites.values()) / elements if elements else 0.0

    @property
    def dropped(self) -> float:
        """The fraction of all elements that was dropped."""
        elements = sum(site.elements for site in self.sites.values())
        return sum(site.zeroed for site in self.sites.values()) / elements if elements else 0.0

    @property
    def mean_ratio(self) -> float:
        """Mean |output| / mean |input| over all sites."""
        before = sum(site.magnitude_in for site in self.sites.values())
        return sum(site.magnitude_out for site in self.sites.values()) / before if before else 1.0

    def record(self, hook: SiteHook, rate: float | None, x: Tensor, y: Tensor, dropped: Tensor) -> None:
        """Add one call, as `Meter` says."""
        site, regularizer = self.sites[hook.site], hook.regularizer
        site.calls += 1
        site.elements += x.numel()
        site.drops = regularizer.drops
        # A gradient that is stopped is no element that was dropped.
        site.zeroed += _total(dropped.sum()) if site.drops else 0.0
        if site.asked_sum is not None:
            # Of `Cutout` the fraction that was dropped is not what its p asks for.
            asks = rate is not None and (regularizer.probability or not regularizer.drops)
            site.asked_sum = None if not asks else site.asked_sum + (rate or 0.0)
        site.magnitude_in += _total(x.detach().abs().sum(dtype=torch.float64))
        site.magnitude_out += _total(y.detach().abs().sum(dtype=torch.float64))

    def rows(self) -> list[tuple[str, str, str, str, int]]:
        """One row a site, then all; a dash where a number would mean nothing."""
        return [*(_row(name, site) for name, site in self.sites.items()), _row("all", self)]

    @property
    def asked_sum(self) -> float | None:
        """None if no regularizer has a rate."""
        return 0.0 if any(site.asked_sum is not None for site in self.sites.values()) else None

    @property
    def drops(self) -> bool:
        """Whether any of the regularizers drops."""
        return any(site.drops for site in self.sites.values())

    def __str__(self) -> str:
        lines = [text_table(HEADER, self.rows())]
        if self.eval_identical is not None:
            lines.append(f"eval output {'' if self.eval_identical else 'NOT '}bit-identical with and without hooks")
        return "\n".join([*lines, self.note] if self.note else lines)

    def _repr_html_(self) -> str:
        return html_table(HEADER, self.rows(), "what the regularizers did")


def _total(number: Tensor) -> float:
    """Of all ranks: the sum over a `DTensor` is a part of it on each."""
    return float(number.full_tensor() if hasattr(number, "full_tensor") else number)


def _row(name: str, what: SiteMeasurement | Measurement) -> tuple[str, str, str, str, int]:
    if not what.calls:
        return name, "-", "-", "-", 0
    asked = "-" if what.asked_sum is None else f"{what.asked:.3f}"
    return name, asked, f"{what.dropped:.3f}" if what.drops else "-", f"{what.mean_ratio:.3f}", what.calls


M = TypeVar("M", bound=Meter)


@contextmanager
def measured_into(state: InjectionState, meter: M) -> Iterator[M]:
    """The forwards inside are recorded in `meter`."""
    live = state.live
    meters: list[Meter] = [*_meters(live.observe), meter]
    live.observe = partial(_observe, meters)
    try:
        yield meter
    finally:
        left = [other for other in _meters(live.observe) if other is not meter]
        live.observe = partial(_observe, left) if left else None


def _meters(observe: Any) -> list[Meter]:
    return [] if observe is None else observe.args[0]


def _observe(meters: list[Meter], hook: SiteHook, x: Tensor, rate: Rate) -> Tensor:
    """`x` regularized and recorded.

    What is dropped is read from the derivative, which is zero just there, whatever the values are and whoever wrote
    the regularizer. It is taken of a second run from the same random state, so that the first run has the mask that
    it would have had, and leaves the random state behind that it would have left.
    """
    must_have_values(x)

    def regularized(x: Tensor) -> Tensor:
        return require_same_shape_and_dtype(x, regularizer.regularize_at(x, rate.value))

    # A copy of the regularizer, as it may count its calls.
    regularizer = copy.deepcopy(hook.regularizer)
    with forked_rng(x):
        dropped = _derivative(regularized, x) == 0
    regularizer = hook.regularizer
    y = regularized(x)

    def record(x: Tensor, y: Tensor, dropped: Tensor) -> None:
        for meter in meters:
            meter.record(hook, rate.value, x, y, dropped)

    _for_each_slice(record, x, y, dropped)
    return y


def _derivative(fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    if functorch_stack() is not None:
        computed: Any = torch.func.vjp(fn, x)
        return computed[1](torch.ones_like(computed[0]))[0]  # type: ignore[no-any-return]
    # An activation checkpoint counts the tensors that are saved inside of it: these are none of them.
    uncounted = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    with torch.inference_mode(False), torch.enable_grad(), uncounted:
        twin = x.detach().clone().requires_grad_()
        out = fn(twin)
        grad = torch.autograd.grad(out.sum(), twin, allow_unused=True)[0] if out.requires_grad else None
    return torch.zeros_like(x) if grad is None else grad


def _for_each_slice(record: Callable[..., Any], *tensors: Tensor) -> None:
    """Call `record` with tensors that have values: under `torch.func.vmap`, with those of all slices together."""
    if functorch_stack() is None:
        record(*tensors)
    else:
        _Record.apply(record, *(tensor.detach() for tensor in tensors))


class _Record(torch.autograd.Function):
    """Nothing to differentiate; PyTorch takes the tensors out of its transforms one by one."""

    @staticmethod
    def forward(record: Callable[..., Any], *tensors: Tensor) -> Tensor:
        _for_each_slice(record, *tensors)
        return tensors[0].new_zeros(())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        return (None,) * 4

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> None:
        return None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], record: Any, *tensors: Tensor) -> tuple[Tensor, None]:
        slices = [
            tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            for tensor, dim in zip(tensors, in_dims[1:], strict=True)
        ]
        return _Record.apply(record, *slices), None


def must_have_values(x: Tensor) -> None:
    """Raise `InjectionError` for a tensor on the meta device."""
    if x.is_meta:
        raise InjectionError(
            "on the meta device there are no values, so nothing can be measured.\n"
            '  first give the model some: model.to_empty(device="cpu"), then its weights'
        )
