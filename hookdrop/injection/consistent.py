"""Consistent samples: in each sample, all rows of all batches have the mask of a batch with one row."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from hookdrop.hooks.hook import CurrentRate, SiteHook, regularized
from hookdrop.regularizers import rows_alone
from hookdrop.survey.isolation import forked_rng, uncompiled
from hookdrop.utils.errors import InjectionError, ShapeError


class ConsistentMasks:
    """Called in place of the regularizers in one forward. Their masks depend on the seed, site, call and sample."""

    def __init__(self, sample: int, rows: int) -> None:
        self.sample, self.rows, self.calls = sample, rows, Counter[SiteHook]()

    def __call__(self, hook: SiteHook, x: Tensor, rate: CurrentRate, **context: Any) -> Tensor:
        call, one = self.calls[hook], hook.regularizer
        self.calls[hook] += 1
        if one.in_backward or rows_alone(one) > 1 or not x.numel():
            return regularized(one, x, rate.value, **context)
        rows = 1 if hook.at == "parameters" else self.rows
        if rows not in (1, len(x)):
            raise ShapeError(
                f"got {tuple(x.shape)}: consistent=True needs one row of axis 0 for each of the {self.rows} inputs.\n"
                "  pass one input at a time, such as DataLoader(..., batch_size=1)"
            )
        # A batch of one may have any layout: windows, frames, time steps first.
        axis = int(rows > 1)
        by_row = {name: t.unsqueeze(axis) for name, t in context.items() if isinstance(t, Tensor) and len(t) == len(x)}
        with forked_rng(x):
            _seed(x.device, f"{torch.initial_seed()} {hook.state.name} {hook.site} {hook.at} {call} {self.sample}")
            draw = vmap(lambda x, own: regularized(one, x, rate.value, **context | own), randomness="same")
            y: Tensor = draw(x.unsqueeze(axis), by_row)
        return y.squeeze(axis)

    @contextmanager
    def replacing(self, hooks: Sequence[SiteHook]) -> Iterator[None]:
        """Draw the masks of these hooks in the forward inside."""
        for hook in hooks:
            if hook.regularizer.mixes_samples or "rows" in hook.regularizer.needs:
                raise InjectionError(
                    f"consistent=True: {hook.where} needs several samples at once, so no row has its own mask.\n"
                    "  leave out consistent=True, or sample each injection on its own: find(model)[name].predict(x)"
                )
        lives = {hook.state.live for hook in hooks}
        if any(live.observe is not None for live in lives):
            raise InjectionError("consistent=True cannot be used inside recording().\n  leave recording() first")
        try:
            for live in lives:
                live.observe = self
            with uncompiled():
                yield
        finally:
            for live in lives:
                live.observe = None


def _seed(device: torch.device, key: str) -> None:
    """Seed the generators of the CPU and of one device: `torch.manual_seed` would also change those of others."""
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little") >> 1
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        module = torch.get_device_module(device)
        generators = getattr(module, "default_generators", None)
        (generators[device.index or 0] if generators else module).manual_seed(seed)
