"""`hookdrop.integrations.transformers.InjectionCallback`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging

from hookdrop import LayerError, LinearSchedule, StateError, find
from hookdrop.integrations import InjectionSpec
from hookdrop.integrations.transformers import InjectionCallback

BRANCHES = InjectionSpec(recipe="residual_dropout(p=0.3)", schedule="LinearSchedule(steps=1.0)")
EMBEDDING = InjectionSpec(
    "TokenDropout(p=0.1)", layers="**.embed_tokens", schedule="LinearSchedule(steps=4)", name="embedding"
)


pytestmark = pytest.mark.filterwarnings("ignore:.*checkpointing.*:FutureWarning")


@pytest.fixture(autouse=True)
def quiet() -> None:
    logging.set_verbosity_error()
    torch.manual_seed(0)


class SeedSteps(TrainerCallback):
    """Make the masks of a step independent of the steps before it, as a resumed run has not drawn those."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        torch.manual_seed(state.global_step)


class Rates(TrainerCallback):
    def __init__(self) -> None:
        self.rates: list[float | None] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        self.rates.append(find(model)["residual_dropout"].p)


def llama() -> LlamaForCausalLM:
    torch.manual_seed(1)
    size = {
        "vocab_size": 31,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    return LlamaForCausalLM(LlamaConfig(**size, num_key_value_heads=2))


def trainer(folder: Path, *callbacks: Any, model: Any = None, **settings: Any) -> Trainer:
    tokens = [{"input_ids": torch.arange(8) + i, "labels": torch.arange(8) + i} for i in range(16)]
    defaults: dict[str, Any] = {
        "num_train_epochs": 2, "per_device_train_batch_size": 4, "report_to": [], "save_strategy": "no",
        "disable_tqdm": True, "use_cpu": True, "logging_strategy": "no", "learning_rate": 0.01,
    }  # fmt: skip
    args = TrainingArguments(output_dir=str(folder), **(defaults | settings))
    model = {"model_init": llama} if model is None else {"model": model}
    made = Trainer(args=args, train_dataset=tokens, callbacks=[SeedSteps()], **model)
    for callback in callbacks:
        callback.register(made) if isinstance(callback, InjectionCallback) else made.add_callback(callback)
    return made


class TestSteps:
    def test_epochs_and_steps_define_the_total(self, tmp_path: Path) -> None:
        for settings, total in (({"num_train_epochs": 2}, 8), ({"max_steps": 5}, 5)):
            callback, rates = InjectionCallback(BRANCHES), Rates()
            trainer(tmp_path, callback, rates, **settings).train()
            assert callback.injections[0].schedule == LinearSchedule(steps=total)
            assert rates.rates == pytest.approx([0.3 * step / total for step in range(total)])

    def test_accumulated_batches_count_once(self, tmp_path: Path) -> None:
        callback, rates = InjectionCallback(BRANCHES), Rates()
        trainer(tmp_path, callback, rates, gradient_accumulation_steps=2).train()
        assert rates.rates == pytest.approx([0.3 * step / 4 for step in range(4)])

    def test_two_specs(self, tmp_path: Path) -> None:
        callback = InjectionCallback(BRANCHES, EMBEDDING)
        trainer(tmp_path, callback).train()
        assert [drop.name for drop in callback.injections] == ["residual_dropout", "embedding"]

    def test_each_training_with_model_init_has_its_own_hooks(self, tmp_path: Path) -> None:
        """As in a hyperparameter search."""
        callback = InjectionCallback(BRANCHES)
        made = trainer(tmp_path, callback)
        for _ in range(2):
            made.train()
            assert [drop.name for drop in find(made.model)] == ["residual_dropout"]

    def test_gradient_checkpointing_trains_the_same(self, tmp_path: Path) -> None:
        trained = []
        for checkpointing in (False, True):
            made = trainer(tmp_path, InjectionCallback(BRANCHES), activation_checkpointing=checkpointing)
            made.train()
            trained.append(made.model.state_dict())
        for name, value in trained[0].items():
            assert torch.allclose(value, trained[1][name], atol=1e-6), name

    def test_peft_models(self, tmp_path: Path) -> None:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"], r=2))
        callback = InjectionCallback(BRANCHES)
        trainer(tmp_path, callback, model=model).train()
        assert len(callback.injections[0].sites) == 4


class TestResume:
    @pytest.mark.parametrize("restore", [False, True])
    def test_a_resumed_run_ends_bit_equal(self, restore: bool, tmp_path: Path) -> None:
        settings = {"save_strategy": "steps", "save_steps": 3, "restore_callback_states_from_checkpoint": restore}
        whole = trainer(tmp_path, InjectionCallback(BRANCHES, EMBEDDING), **settings)
        whole.train()
        rates = Rates()
        resumed = trainer(tmp_path, InjectionCallback(BRANCHES, EMBEDDING), rates, **settings)
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
        assert rates.rates == pytest.approx([0.3 * step / 8 for step in range(3, 8)])
        for name, value in whole.model.state_dict().items():
            assert torch.equal(value, resumed.model.state_dict()[name]), name

    def test_target_rates_changed_during_the_training_are_restored(self, tmp_path: Path) -> None:
        settings = {"save_strategy": "steps", "save_steps": 4, "restore_callback_states_from_checkpoint": True}

        class Change(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
                if state.global_step == 2:
                    find(model)[0].target_p = 0.2

        trainer(tmp_path, InjectionCallback(BRANCHES), Change(), **settings).train()
        resumed = trainer(tmp_path, InjectionCallback(BRANCHES), **settings)
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
        assert find(resumed.model)[0].target_p == 0.2

    def test_a_checkpoint_with_other_specs_raises_before_the_first_step(self, tmp_path: Path) -> None:
        callback = InjectionCallback(BRANCHES)
        callback.pending = {"dropout": {}}
        made = trainer(tmp_path, callback)
        with pytest.raises(
            StateError, match="the checkpoint has the injections 'dropout', the callback has 'residual_"
        ):
            made.train()
        assert not find(made.model)


class TestLogs:
    def test_reporters_receive_the_metrics(self, tmp_path: Path) -> None:
        seen: list[dict[str, Any]] = []

        class Reporter(TrainerCallback):
            def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
                seen.append(dict(logs))

        for log in (True, False):
            made = trainer(tmp_path, logging_strategy="steps", logging_steps=1)
            made.add_callback(Reporter())
            InjectionCallback(BRANCHES, log=log).register(made)
            made.train()
        rates = [
            row["hookdrop/residual_dropout/p"] for row in seen if "hookdrop/residual_dropout/p" in row and "loss" in row
        ]
        assert rates == pytest.approx([0.3 * step / 8 for step in range(8)])

    @pytest.mark.parametrize("log", [True, False])
    def test_the_history_has_the_rates(self, log: bool, tmp_path: Path) -> None:
        made = trainer(tmp_path, InjectionCallback(BRANCHES, log=log), logging_strategy="steps", logging_steps=4)
        made.train()
        rates = [row["hookdrop/residual_dropout/p"] for row in made.state.log_history if "loss" in row] if log else []
        assert rates == pytest.approx([0.3 * 3 / 8, 0.3 * 7 / 8] if log else [])
        assert any("hookdrop/residual_dropout/p" in row for row in made.state.log_history) == log


class TestErrors:
    def test_a_spec_that_does_not_fit_places_nothing(self, tmp_path: Path) -> None:
        made = trainer(tmp_path, InjectionCallback(BRANCHES, InjectionSpec("Dropout(p=0.1)", layers="nose")))
        with pytest.raises(LayerError, match="nose"):
            made.train()
        assert not find(made.model)

    def test_no_specs(self) -> None:
        with pytest.raises(TypeError, match="at least one spec"):
            InjectionCallback()
