"""A callback for the Trainer of transformers: `InjectionCallback(InjectionSpec(...)).register(trainer)`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from hookdrop.core.errors import warn
from hookdrop.core.registry import hooks_of
from hookdrop.core.spec import InjectionSpec
from hookdrop.extras import needs
from hookdrop.integrations.placement import Placement

with needs("transformers"):
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_callback import CallbackHandler, ExportableState
    from transformers.trainer_utils import TrainOutput

Self = TypeVar("Self", bound="InjectionCallback")


class InjectionCallback(Placement, TrainerCallback, ExportableState):
    """Place hooks when the training starts, advance their schedules, and log their rates.

    The hooks are placed on the model that the Trainer trains, also one from `model_init`, and the schedules follow
    `state.global_step`, also with gradient accumulation and in a resumed run. The total is `state.max_steps`, so that
    `LinearSchedule(steps=1.0)` ends with the training whether epochs or steps are set.

    Args:
        spec: an `InjectionSpec`, or a mapping of its settings; any number of them.
        specs: more mappings, as a list, for configuration files and for the checkpoints of the Trainer.
        log: whether to add `Injection.metrics()` to the Trainer's logs; requires `register`.
        seed_per_rank: whether the ranks of a distributed job draw different masks.

    Raises:
        TypeError, ValueError: a spec is invalid.
        StateError: a setting is not a plain value, as the Trainer's checkpoints require.

    Example:
        >>> ramp = "LinearSchedule(steps=1.0)"
        >>> InjectionCallback(InjectionSpec("residual_dropout(p=0.1)", schedule=ramp))
        <InjectionCallback: 1 spec>
    """

    def __init__(
        self,
        *spec: InjectionSpec | Mapping[str, Any],
        specs: Sequence[Mapping[str, Any]] = (),
        log: bool = True,
        seed_per_rank: bool = True,
    ) -> None:
        super().__init__(spec, specs, seed_per_rank=seed_per_rank)
        self.log = log
        # Now, because the first checkpoint would be too late for an error.
        self._settings = [spec.to_dict() for spec in self._specs]

    def register(self: Self, trainer: Trainer) -> Self:
        """Add this callback to a Trainer and return it; `train` then removes the hooks if it fails."""
        if trainer.state.global_step and not trainer.is_in_train:
            warn(
                f"InjectionCallback: this Trainer has already trained {trainer.state.global_step} steps, without its "
                "hooks.\n  call register(trainer) before trainer.train(); the next train() places the hooks"
            )
        trainer.callback_handler.callbacks[:0] = [_Reinstate(self, trainer.callback_handler), self]
        # There is no event for exceptions, and callbacks that report logs receive them before this one may.
        trainer.train = partial(self._train, trainer.train)  # type: ignore[method-assign]
        trainer.log = partial(self._log, trainer, trainer.log)  # type: ignore[method-assign]
        trainer.compute_loss = partial(self._compute_loss, trainer, trainer.compute_loss)  # type: ignore[method-assign]
        return self

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Place the hooks at the current step."""
        # The Trainer expects an entry of each callback, also in the state of a checkpoint saved without it.
        stored: Any = state.stateful_callbacks
        stored.setdefault(type(self).__name__, self.state())
        model = kwargs["model"]
        self._place(model, state.max_steps, args.process_index, args.world_size)
        refuses = any(not {"layer_input", "rows"}.isdisjoint(hook.regularizer.needs) for _, hook in hooks_of(model))
        for module in model.modules() if refuses and not getattr(args, "use_cache", False) else ():
            # The Trainer sets this in the config of the model only, which need not be that of its decoder.
            if getattr(getattr(module, "config", None), "use_cache", False):
                module.config.use_cache = False
        self._seek(state.global_step)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Set the schedules to the current step, once per optimizer step."""
        if self._injection is None:  # added during the training
            self.on_train_begin(args, state, control, **kwargs)
        self._seek(state.global_step)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Leave the hooks on the model, until the next training."""
        self._leave()

    def state(self) -> dict[str, Any]:
        """The specs and the state of the injections, for the Trainer's checkpoints."""
        settings = {"specs": self._settings, "log": self.log, "seed_per_rank": self.seed_per_rank}
        return {"args": settings, "attributes": {"pending": self.state_dict()}}

    def _train(self, train: Callable[..., TrainOutput], *args: Any, **kwargs: Any) -> TrainOutput:
        try:
            return train(*args, **kwargs)
        except BaseException:
            self._remove()
            raise

    def _compute_loss(
        self, trainer: Any, compute_loss: Callable[..., Any], model: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Compute the loss, and in training add the loss terms of penalties."""
        result = compute_loss(model, *args, **kwargs)
        penalty = self._penalty() if model.training else None
        if penalty is None:
            return result
        scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
        if scaled is None:
            by_tokens = trainer.model_accepts_loss_kwargs and kwargs.get("num_items_in_batch") is not None
            scaled = by_tokens or trainer.compute_loss_func is not None
        # The Trainer divides the loss by the number of accumulated batches, unless it is a share of all tokens already.
        share = penalty / (trainer.current_gradient_accumulation_steps if scaled else 1) / max(trainer.args.n_gpu, 1)
        return (result[0] + share, *result[1:]) if isinstance(result, tuple) else result + share

    def _log(self, trainer: Trainer, log: Callable[..., None], logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        if self.log and trainer.is_in_train:
            logs.update(self._metrics())
        log(logs, *args, **kwargs)


class _Reinstate(TrainerCallback):
    """Put a registered callback back, with the restored state, if the Trainer has built another from a checkpoint.

    The Trainer does so with `restore_callback_states_from_checkpoint`. Without this, the specs of the checkpoint would
    replace those of the program.
    """

    def __init__(self, callback: InjectionCallback, handler: CallbackHandler) -> None:
        self.callback, self.handler = callback, handler

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        callbacks = self.handler.callbacks
        registered = [each.callback for each in callbacks if isinstance(each, _Reinstate)]
        rebuilt = [each for each in callbacks if isinstance(each, InjectionCallback) and each not in registered]
        if rebuilt and self.callback not in callbacks:
            self.callback.pending = rebuilt[0].pending
            callbacks[callbacks.index(rebuilt[0])] = self.callback
