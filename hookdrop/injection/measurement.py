"""Measure the effect of regularizers on real tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hookdrop.hooks.hook import CurrentRate, SiteHook, regularized
from hookdrop.regularizers import drops_elements
from hookdrop.survey.isolation import forked_rng
from hookdrop.utils.errors import InjectionError
from hookdrop.utils.tables import html_table, text_table
from hookdrop.utils.torch_internals import functorch_stack

HEADER = ("site", "asked", "dropped", "mean ratio", "calls")


Record: TypeAlias = Callable[[SiteHook, float | None, Tensor, Tensor, Tensor], None]
"""Receives (hook, rate, input, output, dropped) of each tensor that a regularizer processes. The rate is None if the
regularizer has none; `dropped` is True where the output does not depend on the input."""


@dataclass
class SiteMeasurement:
    """The measurement of one site."""

    calls: int = 0
    """The number of tensors that the regularizer processed."""
    elements: int = 0
    zeroed: float = 0.0
    """The number of input elements that the output does not depend on."""
    asked_sum: float | None = 0.0
    """None if the regularizer has no rate."""
    drops: bool = True
    """Whether the regularizer drops elements."""
    magnitude_in: float = 0.0
    magnitude_out: float = 0.0

    @property
    def asked(self) -> float:
        """The current rate, averaged over the calls; 0 if there is none."""
        return self.asked_sum / self.calls if self.calls and self.asked_sum is not None else 0.0

    @property
    def dropped(self) -> float:
        """The fraction of dropped elements."""
        return self.zeroed / self.elements if self.elements else 0.0

    @property
    def mean_ratio(self) -> float:
        """Mean |output| / mean |input|; 1 if the regularizer preserves the mean magnitude."""
        return self.magnitude_out / self.magnitude_in if self.magnitude_in else 1.0


@dataclass
class Measurement:
    """The effect of the regularizers, by site. `print` it for a table.

    `asked`, `dropped` and `mean_ratio` cover all sites, weighted by their numbers of elements.
    """

    labels: dict[SiteHook, str] = field(default_factory=dict, repr=False)
    sites: dict[str, SiteMeasurement] = field(init=False)
    eval_identical: bool | None = None
    """Whether eval output was bit-identical with and without hooks; None if it was not compared."""
    note: str = ""

    def __post_init__(self) -> None:
        self.sites = {label: SiteMeasurement() for label in self.labels.values()}

    @property
    def calls(self) -> int:
        return sum(site.calls for site in self.sites.values())

    @property
    def asked(self) -> float:
        """The current rate, averaged over the elements."""
        elements = sum(site.elements for site in self.sites.values())
        return sum(site.asked * site.elements for site in self.sites.values()) / elements if elements else 0.0

    @property
    def dropped(self) -> float:
        """The fraction of dropped elements over all sites."""
        elements = sum(site.elements for site in self.sites.values())
        return sum(site.zeroed for site in self.sites.values()) / elements if elements else 0.0

    @property
    def mean_ratio(self) -> float:
        """Mean |output| / mean |input| over all sites."""
        before = sum(site.magnitude_in for site in self.sites.values())
        return sum(site.magnitude_out for site in self.sites.values()) / before if before else 1.0

    def record(self, hook: SiteHook, rate: float | None, x: Tensor, y: Tensor, dropped: Tensor) -> None:
        """Record one call; see `Record`."""
        if hook not in self.labels:  # in another part of the model
            return
        site, regularizer = self.sites[self.labels[hook]], hook.regularizer
        site.calls += 1
        site.elements += x.numel()
        site.drops = drops_elements(regularizer)
        # A stopped gradient does not count as a dropped element.
        site.zeroed += _total(dropped.sum()) if site.drops else 0.0
        if site.asked_sum is not None:
            # The p of `Cutout`, for example, is not the fraction of dropped elements.
            asks = rate is not None and (hook.rate.kind == "drop" or not site.drops)
            site.asked_sum = None if not asks else site.asked_sum + (rate or 0.0)
        # A branch that runs on some samples has no output for the others.
        of_all = x.numel() / max(_total((~dropped).sum()), 1.0) if "rows" in regularizer.needs else 1.0
        site.magnitude_in += of_all * _total(x.detach().abs().sum(dtype=torch.float64))
        # Per element: some regularizers remove elements.
        share = x.numel() / y.numel() if y.numel() else 1.0
        site.magnitude_out += share * _total(y.detach().abs().sum(dtype=torch.float64))

    def rows(self) -> list[tuple[str, str, str, str, int]]:
        """Return one row per site and a row for all sites; a dash marks numbers that do not apply."""
        return [*(_row(name, site) for name, site in self.sites.items()), _row("all", self)]

    @property
    def asked_sum(self) -> float | None:
        """None if no regularizer has a rate."""
        return 0.0 if any(site.asked_sum is not None for site in self.sites.values()) else None

    @property
    def drops(self) -> bool:
        """Whether any regularizer drops elements."""
        return any(site.drops for site in self.sites.values())

    def __str__(self) -> str:
        lines = [text_table(HEADER, self.rows())]
        if self.eval_identical is not None:
            lines.append(f"eval output {'' if self.eval_identical else 'NOT '}bit-identical with and without hooks")
        return "\n".join([*lines, self.note] if self.note else lines)

    def _repr_html_(self) -> str:
        return html_table(HEADER, self.rows(), "effect of the regularizers")


def _total(number: Tensor) -> float:
    """Convert to a float, summed over all ranks: a sum over a `DTensor` is partial on each rank."""
    return float(number.full_tensor() if hasattr(number, "full_tensor") else number)


def _row(name: str, what: SiteMeasurement | Measurement) -> tuple[str, str, str, str, int]:
    if not what.calls:
        return name, "-", "-", "-", 0
    asked = "-" if what.asked_sum is None else f"{what.asked:.3f}"
    return name, asked, f"{what.dropped:.3f}" if what.drops else "-", f"{what.mean_ratio:.3f}", what.calls


@contextmanager
def measured_into(hooks: Sequence[SiteHook], record: Record) -> Iterator[None]:
    """Pass what the hooks do in the forwards inside to `record`."""
    lives = list(dict.fromkeys(hook.state.live for hook in hooks))
    for live in lives:
        live.observe = partial(_observe, [*_records(live.observe), record])
    try:
        yield
    finally:
        for live in lives:
            left = [other for other in _records(live.observe) if other != record]
            live.observe = partial(_observe, left) if left else None


def labels_of(hooks: Sequence[SiteHook]) -> dict[SiteHook, str]:
    """Return the name of each site, with that of its injection where several injections share a site."""
    names = [hook.site for hook in hooks]
    return {
        hook: hook.site if names.count(hook.site) == 1 else f"{hook.site} ({hook.state.name}, {hook.at})"
        for hook in hooks
    }


def _records(observe: Any) -> list[Record]:
    return [] if observe is None else observe.args[0]


def _observe(records: list[Record], hook: SiteHook, x: Tensor, rate: CurrentRate, **context: Any) -> Tensor:
    """Regularize and record `x`.

    Dropped elements are those with a zero derivative, whatever their values and whichever library the regularizer is
    from. The derivative is computed in an extra run from the same RNG state, so that the actual run has the same mask
    and leaves the same RNG state as without measuring.
    """
    require_values(x)

    # A copy, because the regularizer may be stateful.
    twin = copy.deepcopy(hook.regularizer)
    with forked_rng(x):
        dropped = _derivative(lambda x: regularized(twin, x, rate.value, **context), x) == 0
    y = regularized(hook.regularizer, x, rate.value, **context)

    def record(x: Tensor, y: Tensor, dropped: Tensor) -> None:
        for each in records:
            each(hook, rate.value, x, y, dropped)

    _for_each_slice(record, x, y, dropped)
    return y


def _derivative(fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    if functorch_stack() is not None:
        computed: Any = torch.func.vjp(fn, x)
        derivative: Tensor = computed[1](torch.ones_like(computed[0]))[0]
        return derivative
    # Hide these saved tensors from a surrounding activation checkpoint, which counts them.
    uncounted = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    with torch.inference_mode(False), torch.enable_grad(), uncounted:
        twin = x.detach().clone().requires_grad_()
        out = fn(twin)
        grad = torch.autograd.grad(out.sum(), twin, allow_unused=True)[0] if out.requires_grad else None
    return torch.zeros_like(x) if grad is None else grad


def _for_each_slice(record: Callable[..., Any], *tensors: Tensor) -> None:
    """Call `record` with concrete tensors; under `torch.func.vmap`, with all slices stacked."""
    if functorch_stack() is None:
        record(*tensors)
    else:
        _Record.apply(record, *(tensor.detach() for tensor in tensors))


class _Record(torch.autograd.Function):
    """A non-differentiable function, through which PyTorch unwraps the tensors from its transforms one by one."""

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


def require_values(x: Tensor) -> None:
    """Raise `InjectionError` if a tensor is on the meta device."""
    if x.is_meta:
        raise InjectionError(
            "tensors on the meta device have no values, so nothing can be measured.\n"
            '  first materialize the model: model.to_empty(device="cpu"), then load its weights'
        )
