"""A callback for fastai: `learn.fit(5, cbs=InjectionCallback(InjectionSpec(...)))`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from hookdrop.core.spec import InjectionSpec
from hookdrop.extras import needs
from hookdrop.integrations.placement import Placement

with needs("fastai"):
    from fastai.callback.core import Callback
    from fastai.learner import Learner
    from fastai.torch_core import find_bs, num_distrib, rank_distrib


class InjectionCallback(Placement, Callback):  # type: ignore[misc]
    """Place hooks at the first batch of a fit, advance their schedules, and remove them when its epochs end or fail.

    The schedules follow the optimizer's steps, also with `GradientAccumulation` and `start_epoch`, and start over in
    each fit, as fastai's own schedules do: `fine_tune` is two fits. Nothing is dropped in `lr_find` and `validate`.

    Args:
        specs: `InjectionSpec`s, or mappings of their settings.
        log: whether to record `Injection.metrics()` for each batch in `learn.recorder.hps`, beside the learning rate.
        seed_per_rank: whether the ranks of a distributed job draw different masks.

    Raises:
        TypeError, ValueError: a spec is invalid.

    Example:
        >>> spec = InjectionSpec("Dropout(p=0.1)", layers="1", schedule="LinearSchedule(1.0)")
        >>> callback = InjectionCallback(spec)
        >>> callback.injection is None  # the handle, during a fit
        True
    """

    order = 61  # after ParamScheduler, which replaces `recorder.hps` after the fit
    run_valid = False

    def __init__(self, *specs: InjectionSpec | Mapping[str, Any], log: bool = True, seed_per_rank: bool = True) -> None:
        super().__init__(specs, seed_per_rank=seed_per_rank)
        self.log = log
        self._count = 0
        self._recorded: dict[str, list[float]] = {}

    def before_fit(self) -> None:
        """Prepare to remove the hooks when the epochs end; fastai has no event for an exception."""
        self._recorded = {}
        self.learn._with_events = partial(_remove_after_epochs, self, self.learn, self.learn._with_events)

    def before_batch(self) -> None:
        """Place the hooks if this is the first batch of a training."""
        if hasattr(self.learn, "lr_finder"):
            return
        if self.injection is None:
            accumulation = getattr(self.learn, "gradient_accumulation", None)
            # It counts samples, and continues to count across epochs.
            batches_per_step = math.ceil(accumulation.n_acc / find_bs(self.yb)) if accumulation else 1
            total = max(1, self.n_epoch * self.n_iter // batches_per_step)
            self._place(self.model, total, rank_distrib(), num_distrib())
            self._count = self.epoch * self.n_iter // batches_per_step
            self._seek(self._count)
        if self.log:
            for name, value in self._metrics().items():
                self._recorded.setdefault(name, []).append(value)

    def after_loss(self) -> None:
        """Add the loss terms of penalties to a loss that `GradientAccumulation` has already divided."""
        penalty = self._penalty()
        if penalty is not None:
            accumulation = getattr(self.learn, "gradient_accumulation", None)
            share = find_bs(self.yb) / accumulation.n_acc if accumulation else 1.0
            self.learn.loss_grad = self.learn.loss_grad + share * penalty

    def after_cancel_step(self) -> None:
        """Do not count a step that was canceled, as `MixedPrecision` does; `after_step` follows."""
        self._count -= 1

    def after_step(self) -> None:
        """Advance the schedules; batches that only accumulate gradients do not get here."""
        self._count += 1
        self._seek(self._count)

    def after_fit(self) -> None:
        """Hand over what was recorded."""
        if self._recorded and hasattr(self.learn, "recorder"):
            self.learn.recorder.hps = getattr(self.learn.recorder, "hps", {}) | self._recorded


def _remove_after_epochs(
    callback: InjectionCallback, learn: Learner, run: Callable[..., None], f: Callable[[], None], event: str, *args: Any
) -> None:
    """Run `Learner._with_events`, and remove the hooks after the last epoch, or if an exception ends the epochs.

    Exceptions that only cancel a batch or an epoch do not get here.
    """
    has_ended = True
    try:
        run(f, event, *args)
        has_ended = learn.epoch + 1 == learn.n_epoch
    finally:
        if event == "epoch" and has_ended:
            callback._remove()
            vars(learn).pop("_with_events", None)
