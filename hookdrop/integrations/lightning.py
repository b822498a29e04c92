"""A callback for Lightning: `Trainer(callbacks=[InjectionCallback(InjectionSpec(...))])`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from hookdrop.core.errors import InjectionError
from hookdrop.core.selection import select
from hookdrop.core.spec import InjectionSpec
from hookdrop.extras import needs
from hookdrop.integrations.placement import Placement

with needs("lightning"):
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import StochasticWeightAveraging


class InjectionCallback(Placement, Callback):
    """Place hooks when the training starts, advance their schedules, log their rates, and save and restore their state.

    The hooks are placed after the model is built, and the schedule follows the optimizer's steps, also with gradient
    accumulation and in a resumed run; of several optimizers, it follows the first that trains the module. Nothing is
    dropped while StochasticWeightAveraging collects batch-norm statistics. If `fit` raises an exception, the hooks are
    removed.

    Args:
        spec: an `InjectionSpec`, or a mapping of its settings; any number of them. A `module` has one callback, which
            takes all of its specs.
        specs: more mappings, as a list, for configuration files and LightningCLI.
        module: name of the part of the LightningModule to regularize; None for all of it.
        log: whether to log `Injection.metrics()`.
        seed_per_rank: whether the ranks of a distributed job draw different masks.

    Raises:
        TypeError, ValueError: a spec is invalid.

    Example:
        >>> ramp = "LinearSchedule(steps=1.0)"
        >>> InjectionCallback(InjectionSpec("Dropout(p=0.1)", layers="head", schedule=ramp))
        <InjectionCallback: 1 spec>
    """

    def __init__(
        self,
        *spec: InjectionSpec | Mapping[str, Any],
        specs: Sequence[Mapping[str, Any]] = (),
        module: str | None = None,
        log: bool = True,
        seed_per_rank: bool = True,
    ) -> None:
        super().__init__(spec, specs, seed_per_rank=seed_per_rank)
        self.module = module
        # Lightning sets `log` of every callback to the method of the LightningModule.
        self._logs = log
        self._disabled = ExitStack()
        self._is_collecting = False

    @property
    def state_key(self) -> str:
        """The key of the state in a checkpoint. One callback has all specs of a module, so its state has all names."""
        return self._generate_state_key(module=self.module)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remove the hooks of an earlier fit, before Lightning loads a state into them or an average copies them."""
        if stage == "fit":
            self._remove_earlier(pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Place the hooks, after the callbacks that search a learning rate or a batch size when the fit starts."""
        part = pl_module if self.module is None else select(pl_module, self.module, source="`module`").layers[0].module
        self._place(part, self._total_steps(trainer), trainer.global_rank, trainer.world_size)
        if len(trainer.optimizers) > 1 and self.injection is not None:
            own, every = {*part.parameters()}, trainer.optimizers
            training = [one for one in every if any(not own.isdisjoint(group["params"]) for group in one.param_groups)]
            self.injection.follow([*training, *every][0])

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Set the schedules to the current step."""
        # StochasticWeightAveraging adds an epoch without backward passes, in train mode, for batch-norm statistics.
        if getattr(trainer.fit_loop, "_skip_backward", False) and not self._is_collecting:
            self._is_collecting = True
            if self.injection is not None:
                self._disabled.enter_context(self.injection.disabled())
        if len(trainer.optimizers) == 1:
            self._seek(trainer.global_step)
        if self._logs and trainer.loggers:
            pl_module.log_dict(self._metrics(), batch_size=1, rank_zero_only=True)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Add the loss terms of penalties; with manual optimization, the module reads them.

        In place, because a callback cannot return another loss. It is the result of a division or multiplication by a
        number, of which autograd saves nothing.
        """
        penalty = self._penalty() if pl_module.automatic_optimization else None
        if penalty is not None:
            share, scaler = penalty / trainer.accumulate_grad_batches, getattr(trainer.precision_plugin, "scaler", None)
            loss.add_(share if scaler is None else scaler.scale(share))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Drop again after an epoch that collected batch-norm statistics."""
        self._disabled.close()
        self._is_collecting = False

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the hooks on the model, for a later fit to replace."""
        self._leave()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Remove the hooks of a failed training."""
        self.on_train_epoch_end(trainer, pl_module)
        self._remove()

    def _total_steps(self, trainer: Trainer) -> int | None:
        if not any(spec.is_relative for spec in self._specs):
            return None
        loop, extended = trainer.fit_loop, trainer.fit_loop.max_epochs
        # StochasticWeightAveraging has added an epoch without optimizer steps.
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        ends = [each.swa_end + 1 for each in callbacks if isinstance(each, StochasticWeightAveraging)]
        try:
            loop.max_epochs = None if extended is None else min([extended, *ends])
            # Read only once, and only if needed: it may create the data loaders.
            total = trainer.estimated_stepping_batches
        finally:
            loop.max_epochs = extended
        if not math.isfinite(total) or total < 1:
            raise InjectionError(
                "InjectionCallback: a schedule has fractions of the training, but the Trainer does not know its "
                "length.\n"
                "  set max_epochs or max_steps of the Trainer, or use a schedule in steps, such as "
                "LinearSchedule(steps=1000)"
            )
        return int(total)
