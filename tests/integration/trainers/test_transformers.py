"""`hookdrop.integrations.transformers.InjectionCallback`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging

from hookdrop import HookdropWarning, InjectionSpec, LinearSchedule, StateError, find
from hookdrop.integrations.transformers import InjectionCallback
from tests.support import transformers_models
from tests.support.programs import ROOT
from tests.support.ranks import run_ranks

BRANCHES = InjectionSpec("residual_dropout(p=0.3)", schedule="LinearSchedule(steps=1.0)")
EMBEDDING = InjectionSpec("TokenDropout(p=0.1)", layers="**.embed_tokens", schedule="LinearSchedule(4)", name="tokens")

pytestmark = pytest.mark.filterwarnings("ignore:.*checkpointing.*:FutureWarning")


@pytest.fixture(autouse=True)
def quiet() -> None:
    logging.set_verbosity_error()
    torch.manual_seed(0)


class SeedSteps(TrainerCallback):
    """Make the masks of a step independent of the steps before it, as a resumed run has not drawn those."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        torch.manual_seed(state.global_step)


def on(event: str, do: Callable[..., object]) -> TrainerCallback:
    """Call `do` with the state and the other arguments of an event, such as `model` and `logs`."""
    made = TrainerCallback()
    setattr(made, event, lambda args, state, control, **given: do(state, **given))
    return made


class Rates(TrainerCallback):
    def __init__(self) -> None:
        self.rates: list[float | None] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        self.rates.append(find(model)["residual_dropout"].p)


def llama() -> LlamaForCausalLM:
    torch.manual_seed(1)
    return transformers_models.llama(use_cache=True)


def trainer(folder: Path, *callbacks: Any, model: Any = None, cls: Any = Trainer, **settings: Any) -> Trainer:
    tokens = [{"input_ids": torch.arange(8) + i, "labels": torch.arange(8) + i} for i in range(16)]
    defaults: dict[str, Any] = {
        "num_train_epochs": 2, "per_device_train_batch_size": 4, "report_to": [], "save_strategy": "no",
        "disable_tqdm": True, "use_cpu": True, "logging_strategy": "no", "learning_rate": 0.01,
    }  # fmt: skip
    args = TrainingArguments(output_dir=str(folder), **(defaults | settings))
    model = {"model_init": llama} if model is None else {"model": model}
    made = cls(args=args, train_dataset=tokens, eval_dataset=tokens, callbacks=[SeedSteps()], **model)
    for callback in callbacks:
        callback.register(made) if isinstance(callback, InjectionCallback) else made.add_callback(callback)
    return made


RESTORED: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4, "restore_callback_states_from_checkpoint": True}
"""Settings of a run that saves after half of its steps, and restores the callbacks."""


class TestSteps:
    def test_epochs_and_steps_define_the_total(self, tmp_path: Path) -> None:
        for settings, total in (({}, 8), ({"max_steps": 5}, 5), ({"gradient_accumulation_steps": 2}, 4)):
            callback, rates = InjectionCallback(BRANCHES), Rates()
            trainer(tmp_path, callback, rates, **settings).train()
            assert callback.injection.schedule == LinearSchedule(steps=total)
            assert rates.rates == pytest.approx([0.3 * step / total for step in range(total)])

    def test_a_schedule_that_is_longer_than_the_training_warns(self, tmp_path: Path) -> None:
        spec = InjectionSpec("residual_dropout(p=0.3)", schedule="LinearSchedule(9)")
        with pytest.warns(HookdropWarning, match="ends at step 9, but the training at step 8"):
            trainer(tmp_path, InjectionCallback(spec)).train()

    def test_each_training_with_model_init_has_its_own_hooks(self, tmp_path: Path) -> None:
        """As in a hyperparameter search."""
        made = trainer(tmp_path, InjectionCallback(BRANCHES))
        for _ in range(2):
            made.train()
            assert [drop.name for drop in find(made.model)] == ["residual_dropout"]

    def test_a_new_callback_replaces_the_hooks_of_an_earlier_training(self, tmp_path: Path) -> None:
        model = llama()
        for spec, total in ((BRANCHES, 8), (EMBEDDING, 4)):
            trainer(tmp_path, callback := InjectionCallback(spec), model=model).train()
            assert str(total) in str(callback.injection.schedule)
            assert [drop.name for drop in find(model)] == [callback.injection.name]

    def test_a_callback_that_is_added_during_the_training(self, tmp_path: Path) -> None:
        added, rates = InjectionCallback(BRANCHES), Rates()

        def add(state: Any, **given: Any) -> None:
            if state.global_step == 3:
                made.add_callback(added)
                made.add_callback(rates)

        made = trainer(tmp_path, on("on_step_end", add))
        made.train()
        assert rates.rates == pytest.approx([0.3 * step / 8 for step in range(3, 8)])

    def test_the_cache_of_a_decoder_with_a_config_of_its_own_is_off(self, tmp_path: Path) -> None:
        model = transformers_models.t5(use_cache=True)
        assert model.decoder.config.use_cache
        trainer(tmp_path, InjectionCallback(InjectionSpec("layer_drop(p=0.3)")), model=model, max_steps=2).train()
        assert not model.decoder.config.use_cache


class TestResume:
    @pytest.mark.parametrize("restore", [False, True])
    def test_a_resumed_run_ends_bit_equal(self, restore: bool, tmp_path: Path) -> None:
        settings = RESTORED | {"save_steps": 3, "restore_callback_states_from_checkpoint": restore}
        whole = trainer(tmp_path, InjectionCallback(BRANCHES), InjectionCallback(EMBEDDING), **settings)
        whole.train()
        callbacks, rates = [InjectionCallback(BRANCHES), InjectionCallback(EMBEDDING)], Rates()
        resumed = trainer(tmp_path, *callbacks, rates, **settings)
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
        assert [(drop.name, drop.step_count) for callback in callbacks for drop in callback.injection] == [
            ("residual_dropout", 7), ("tokens", 7)
        ]  # fmt: skip
        assert rates.rates == pytest.approx([0.3 * step / 8 for step in range(3, 8)])
        for name, value in whole.model.state_dict().items():
            assert torch.equal(value, resumed.model.state_dict()[name]), name

    def test_target_rates_changed_during_the_training_are_restored(self, tmp_path: Path) -> None:
        def change(state: Any, model: nn.Module, **given: Any) -> None:
            if state.global_step == 2:
                next(iter(find(model))).target_p = 0.2

        trainer(tmp_path, InjectionCallback(BRANCHES), on("on_step_end", change), **RESTORED).train()
        resumed = trainer(tmp_path, InjectionCallback(BRANCHES), **RESTORED)
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
        assert next(iter(find(resumed.model))).target_p == 0.2

    @pytest.mark.parametrize("restore", [False, True])
    def test_a_checkpoint_saved_without_the_callback(self, restore: bool, tmp_path: Path) -> None:
        settings = RESTORED | {"restore_callback_states_from_checkpoint": restore}
        trainer(tmp_path, **settings).train()
        resumed = trainer(tmp_path, callback := InjectionCallback(BRANCHES), **settings)
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
        assert callback.injection.step_count == 7

    def test_a_removed_callback_places_nothing(self, tmp_path: Path) -> None:
        made = trainer(tmp_path, callback := InjectionCallback(BRANCHES))
        made.remove_callback(callback)
        made.train()
        assert not find(made.model)


def test_reporters_receive_the_metrics(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    for log in (True, False):
        made = trainer(tmp_path, logging_strategy="steps", logging_steps=1)
        made.add_callback(on("on_log", lambda state, logs, **given: seen.append(dict(logs))))
        InjectionCallback(BRANCHES, log=log).register(made)
        made.train()
        find(made.model).remove()
        assert not any("hookdrop" in name for name in made.evaluate(made.train_dataset))
    rates = [row["hookdrop/residual_dropout/p"] for row in seen if {"loss", "hookdrop/residual_dropout/p"} <= {*row}]
    assert rates == pytest.approx([0.3 * step / 8 for step in range(8)])


def test_ranks_draw_different_masks_at_equal_rates(tmp_path: Path) -> None:
    """The Trainer seeds all ranks with the same number, so their masks would be equal."""
    run_ranks(ROOT / "tests/integration/trainers/programs/transformers_ranks.py", tmp_path, ranks=2)
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert first["rates"] == second["rates"] == pytest.approx([0.3 * step / 4 for step in range(4)])
    assert first["step"] == second["step"] == 3
    assert first["dropped"] != second["dropped"]


class TestErrors:
    @pytest.mark.parametrize("step", [0, 3])
    def test_an_exception_leaves_no_hooks(self, step: int, tmp_path: Path) -> None:
        def fail(state: Any, **given: Any) -> None:
            if state.global_step == step:
                raise FloatingPointError

        made = trainer(tmp_path, InjectionCallback(BRANCHES), on("on_pre_optimizer_step", fail))
        with pytest.raises(FloatingPointError):
            made.train()
        assert not find(made.model)

    def test_a_setting_that_a_checkpoint_cannot_hold(self) -> None:
        with pytest.raises(StateError, match="layers=<class '(?s:.)*cannot be saved"):
            InjectionCallback(InjectionSpec("Dropout(p=0.1)", layers=nn.Linear))
