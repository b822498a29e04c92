"""Measuring what a regularizer does to the tensors that pass."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from hookdrop.diagnostics.isolation import forked_rng
from hookdrop.errors import InjectionError
from hookdrop.regularizers import Regularizer, like
from hookdrop.utils.tables import html_table, text_table

HEADER = ("site", "asked", "dropped", "mean ratio", "calls")


class Meter(Protocol):
    """What is told of every tensor that a regularizer works on."""

    def record(self, name: str, regularizer: Regularizer, x: Tensor, y: Tensor, dropped: Tensor) -> None:
        """Note one call.

        Args:
            name: the site.
            regularizer: what worked, at the rate of the call.
            x: what it was given.
            y: what it made of it.
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

    def record(self, name: str, regularizer: Regularizer, x: Tensor, y: Tensor, dropped: Tensor) -> None:
        """Add one call, as `Meter` says."""
        site = self.sites[name]
        site.calls += 1
        site.elements += x.numel()
        site.drops = regularizer.drops
        # A gradient that is stopped is no element that was dropped.
        site.zeroed += _total(dropped.sum()) if site.drops else 0.0
        if site.asked_sum is not None:
            # Of `Cutout` the fraction that was dropped is not what its p asks for.
            asks = regularizer.rate is not None and (regularizer.probability or not regularizer.drops)
            site.asked_sum = None if not asks else site.asked_sum + (regularizer.rate or 0.0)
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


def measured(regularizer: Regularizer, x: Tensor, name: str, into: Sequence[Meter]) -> Tensor:
    """`regularizer.regularize(x)`, recorded.

    What is dropped is read from the derivative, which is zero just there, whatever the values are and whoever
    wrote the regularizer. The derivative is taken of a second run from the same random state, so that the
    first has the mask that it would have had, and leaves the random state behind that it would have left.
    """
    must_have_values(x)
    # A copy of the regularizer, as it may count; hooks on saved tensors, as an activation checkpoint counts those.
    kept = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    with forked_rng(x), torch.inference_mode(False), torch.enable_grad(), kept:
        twin = x.detach().clone().requires_grad_()
        out = like(twin, copy.deepcopy(regularizer).regularize(twin))
        grad = torch.autograd.grad(out.sum(), twin, allow_unused=True)[0] if out.requires_grad else None
    dropped = torch.ones_like(x, dtype=torch.bool) if grad is None else grad == 0
    y = like(x, regularizer.regularize(x))
    for meter in into:
        meter.record(name, regularizer, x, y, dropped)
    return y


def must_have_values(x: Tensor) -> None:
    """Raise `InjectionError` for a tensor on the meta device."""
    if x.is_meta:
        raise InjectionError(
            "on the meta device there are no values, so nothing can be measured.\n"
            '  first give the model some: model.to_empty(device="cpu"), then its weights'
        )
