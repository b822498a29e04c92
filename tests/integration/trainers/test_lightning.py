"""`hookdrop.integrations.lightning.InjectionCallback`."""

import copy
import csv
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("lightning")
import lightning
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.tuner import Tuner

from hookdrop import Dropout, InjectionError, InjectionSpec, LayerError, StateError, find, inject
from hookdrop.integrations.lightning import InjectionCallback

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning:lightning", "ignore::DeprecationWarning", "ignore:.*LeafSpec",
    "error::hookdrop.HookdropWarning",
)  # fmt: skip

BLOCK = InjectionSpec("DropBlock(p=0.3, block_size=3)", layers="model.0", schedule="LinearSchedule(steps=1.0)")
HEAD = InjectionSpec("Dropout(p=0.5)", layers="model.4", schedule="LinearSchedule(steps=4)", at="input")


@pytest.fixture(autouse=True)
def quiet_in_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where Lightning saves checkpoints
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.manual_seed(0)


class Classifier(lightning.LightningModule):
    """A small CNN; `optimizers` optimizers are stepped manually if there are several."""

    def __init__(self, optimizers: int = 1, fails_at: int | None = None) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3))
        self.count, self.fails_at = optimizers, fails_at
        self.automatic_optimization = optimizers == 1
        self.rates: list[float | None] = []
        self.lr = 0.05

    def training_step(self, batch: Any, index: int) -> Tensor:
        if self.fails_at == self.global_step:
            raise FloatingPointError("the loss is nan")
        self.rates.append(next(iter(find(self))).p if find(self) else None)
        loss = nn.functional.cross_entropy(self.model(batch[0]), batch[1])
        if not self.automatic_optimization:
            self.manual_backward(loss)
            first, *_ = self.optimizers()
            first.step()
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        made = [torch.optim.SGD(self.parameters(), self.lr, momentum=0.9) for _ in range(self.count)]
        return made[0] if self.count == 1 else made


def data() -> DataLoader:
    x = torch.randn(24, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, torch.arange(24) % 3), batch_size=4)


def trainer(*callbacks: Any, **settings: Any) -> Any:
    quiet = dict.fromkeys(["logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"], False)
    defaults = {"max_epochs": 2, "accelerator": "cpu", "num_sanity_val_steps": 0}
    return lightning.Trainer(callbacks=list(callbacks), **(quiet | defaults | settings))


def rates(steps: int, p: float = 0.3) -> Any:
    return pytest.approx([p * step / steps for step in range(steps)])


class TestSteps:
    @pytest.mark.parametrize(
        ("settings", "batches", "each"),
        [({}, 12, 1), ({"max_epochs": -1, "max_steps": 8}, 8, 1), ({"accumulate_grad_batches": 2}, 12, 2)],
    )
    def test_fractions_cover_the_training(self, settings: dict[str, int], batches: int, each: int) -> None:
        """Accumulated batches count once."""
        callback, model = InjectionCallback(BLOCK), Classifier()
        trainer(callback, **settings).fit(model, data())
        assert str(callback.injection.schedule) == f"LinearSchedule(steps={batches // each})"
        assert model.rates == pytest.approx([0.3 * (batch // each * each) / batches for batch in range(batches)])

    def test_the_optimizer_that_trains_the_module_counts(self) -> None:
        class TwoParts(Classifier):
            def configure_optimizers(self) -> Any:
                return [torch.optim.SGD(self.model[i].parameters(), 0.05) for i in (0, 4)]

        spec = InjectionSpec("Dropout(p=0.2)", layers=[""])
        for module, steps in (("model.0", 6), ("model.4", 0)):  # `training_step` only steps the first optimizer
            callback = InjectionCallback(spec, module=module)
            trainer(callback, max_epochs=1).fit(TwoParts(optimizers=2), data())
            assert callback.injection.step_count == steps

    def test_new_callbacks_replace_the_hooks_of_an_earlier_fit(self) -> None:
        model, part = Classifier(), InjectionSpec("Dropout2d(p=0.1)", layers="2", name="part")
        for _ in range(2):
            trainer(InjectionCallback(BLOCK), InjectionCallback(part, module="model")).fit(model, data())
            assert [drop.name for drop in find(model)] == ["dropblock", "part"]
        inject(model, Dropout(p=0.1), layers="model.3", name="by hand")
        trainer(InjectionCallback(HEAD)).fit(model, data())
        assert sorted(drop.name for drop in find(model)) == ["by hand", "dropout"]

    def test_a_second_fit_places_the_hooks_once_and_validate_alone_none(self) -> None:
        callback, model = InjectionCallback(BLOCK), Classifier()
        trainer(callback).validate(model, data(), verbose=False)
        assert not find(model)
        for _ in range(2):
            trainer(callback).fit(model, data())
        assert len(find(model)) == 1
        assert model.rates[12:] == model.rates[:12] == rates(12)


class TestResume:
    @staticmethod
    def save(*callbacks: Any, **settings: Any) -> Classifier:
        """Train, and save the checkpoint of each epoch in `epoch=0.ckpt`, ..."""
        saves = ModelCheckpoint(".", save_top_k=-1, filename="{epoch}")
        trainer(*callbacks, saves, enable_checkpointing=True, **settings).fit(model := Classifier(), data())
        return model

    def test_a_resumed_run_ends_bit_equal(self) -> None:
        whole = self.save(InjectionCallback(BLOCK, HEAD), SeedSteps(), max_epochs=3)
        for epoch in (1, 2):
            resumed, callback = Classifier(), InjectionCallback(BLOCK, HEAD)
            trainer(callback, SeedSteps(), max_epochs=3).fit(resumed, data(), ckpt_path=f"epoch={epoch - 1}.ckpt")
            assert [drop.step_count for drop in callback.injection] == [17, 17]
            assert resumed.rates == whole.rates[6 * epoch :]
            torch.testing.assert_close(resumed.state_dict(), whole.state_dict(), rtol=0, atol=0)

    def test_a_callback_that_is_used_again_restores_the_rate_of_the_checkpoint(self) -> None:
        self.save(callback := InjectionCallback(HEAD))
        state = torch.load("epoch=0.ckpt", weights_only=False)
        state["callbacks"][callback.state_key]["injections"]["dropout"]["target_p"] = [0.25]
        torch.save(state, "changed.ckpt")
        trainer(callback).fit(Classifier(), data(), ckpt_path="changed.ckpt", weights_only=False)
        assert callback.injection.target_p == 0.25

    def test_a_checkpoint_with_other_specs_raises_before_the_first_step(self) -> None:
        self.save(InjectionCallback(BLOCK))
        model = Classifier()
        with pytest.raises(StateError):
            trainer(InjectionCallback(HEAD), max_epochs=9).fit(model, data(), ckpt_path="epoch=1.ckpt")
        assert not model.rates
        assert not find(model)


class SeedSteps(lightning.Callback):
    """Checkpoints of Lightning do not contain the state of the random generators."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        # The loaders draw a seed before the first batch, but not in a resumed run.
        torch.manual_seed(trainer.global_step)


class TestStatistics:
    def swa(self, *callbacks: Any) -> dict[str, Tensor]:
        torch.manual_seed(5)
        model = Classifier()
        average = StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)
        trainer(*callbacks, average, max_epochs=2).fit(model, data())
        return {name: value.clone() for name, value in model.state_dict().items()}

    def test_nothing_is_dropped_while_swa_collects_statistics(self) -> None:
        """At rate 0 during training, the statistics of the extra epoch equal those without hooks, bit for bit.

        Fractions of the training leave out this epoch.
        """
        late = InjectionSpec("DropBlock(p=0.7, block_size=3)", layers="model.0", schedule="LateSchedule(cutoff=1.0)")
        plain, hooked = self.swa(), self.swa(callback := InjectionCallback(late))
        assert (str(callback.injection.schedule), callback.injection.p) == ("LateSchedule(cutoff=12)", 0.7)
        assert callback.injection.metrics()["hookdrop/dropblock/enabled"] == 1.0
        for name in ("model.1.running_var", "model.1.running_mean"):
            assert torch.equal(plain[name], hooked[name])

    def test_an_average_beside_it_has_no_hooks(self) -> None:
        callback, model = InjectionCallback(BLOCK), Classifier()
        for _ in range(2):  # the average of a second fit is copied while the first one's hooks would be on the model
            average = WeightAveraging()
            trainer(callback, average).fit(model, data())
            assert len(find(model)) == 1
            assert average._average_model is not None
            assert not find(average._average_model)


class TestLearningRateFinder:
    def test_it_leaves_no_trace(self) -> None:
        """A callback searches when the fit starts, before or after the other callbacks start; a Tuner before the fit."""
        for order in (1, -1):
            search = LearningRateFinder(num_training_steps=12, early_stop_threshold=None)
            model, callback = Classifier(), InjectionCallback(BLOCK)
            trainer(*[callback, search][::order], enable_checkpointing=True).fit(model, data())
            assert set(model.rates[:-12]) == {None}
            assert model.rates[-12:] == rates(12)

    def test_a_tuner_leaves_no_trace(self) -> None:
        model, callback = Classifier(), InjectionCallback(BLOCK)
        used = trainer(callback, enable_checkpointing=True)
        before = copy.deepcopy(model.state_dict())
        Tuner(used).lr_find(model, data(), num_training=12, early_stop_threshold=None)
        assert set(model.rates) == {None}
        assert not find(model)
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
        model.rates.clear()
        used.fit(model, data())
        assert model.rates == rates(12)


class Report(lightning.Callback):
    """Each rank writes its rates and a mask to a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer: Any, module: Any) -> None:
        dropped = (module.model[0](torch.ones(4, 1, 8, 8)) == 0).flatten().tolist()
        facts = {"rates": module.rates, "step": next(iter(find(module))).step_count, "dropped": dropped}
        (self.folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(facts))


def test_ranks_draw_different_masks_at_equal_rates(tmp_path: Path) -> None:
    """The processes start with the random state of this one, so their masks would be equal."""
    callbacks, forked = (InjectionCallback(BLOCK), Report(tmp_path)), DDPStrategy(start_method="forkserver")
    trainer(*callbacks, strategy=forked, devices=2).fit(Classifier(), data())
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert first["rates"] == second["rates"] == rates(6)
    assert first["step"] == second["step"] == 5
    assert first["dropped"] != second["dropped"]


CONFIG = """
trainer:
  max_epochs: 2
  accelerator: cpu
  logger: false
  enable_progress_bar: false
  callbacks:
    - class_path: hookdrop.integrations.lightning.InjectionCallback
      init_args:
        specs:
          - regularizer: DropBlock(p=0.3, block_size=3)
            layers: model.0
            schedule: LinearSchedule(steps=1.0)
          - regularizer: {model.4: Dropout(p=0.5)}
            at: input
"""


def test_specs_in_a_configuration_file(tmp_path: Path) -> None:
    pytest.importorskip("jsonargparse")
    from lightning.pytorch.cli import LightningCLI

    file, saved = tmp_path / "given.yaml", tmp_path / "saved" / "config.yaml"
    file.write_text(CONFIG)
    for config in (file, saved):  # Lightning saves the configuration of each fit
        args = ["--config", str(config), f"--trainer.default_root_dir={config.parent / 'saved'}"]
        cli = LightningCLI(Classifier, args=args, run=False)
        cli.trainer.fit(cli.model, data())
        callback = next(each for each in cli.trainer.callbacks if isinstance(each, InjectionCallback))
        schedules = [str(drop.schedule) for drop in callback.injection]
        assert schedules == ["LinearSchedule(steps=12)", "ConstantSchedule()"]


def test_metrics_are_logged_unless_disabled(tmp_path: Path) -> None:
    loggers = {log: CSVLogger(tmp_path, name=f"log={log}") for log in (True, False)}
    for log, logger in loggers.items():
        callback = InjectionCallback(BLOCK, log=log)
        trainer(callback, logger=logger, log_every_n_steps=1).fit(Classifier(), data())
    assert not (Path(loggers[False].log_dir) / "metrics.csv").exists()
    with (Path(loggers[True].log_dir) / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["hookdrop/dropblock/p"]]
    assert [float(row["hookdrop/dropblock/p"]) for row in rows] == rates(12)


class TestErrors:
    def test_an_exception_leaves_no_hooks(self) -> None:
        """Nor warnings about sites that did not run, and schedules that did not advance."""
        for step in (0, 3):
            model = Classifier(fails_at=step)
            with pytest.raises(FloatingPointError):
                trainer(InjectionCallback(HEAD, BLOCK)).fit(model, data())
            assert not find(model)

    @pytest.mark.parametrize(
        ("wrong", "settings", "error", "text"),
        [
            (InjectionSpec("Dropout(p=0.1)", layers="model.9"), {}, LayerError, "model.9"),
            (HEAD, {"module": "model1"}, LayerError, "`module` names a module that Classifier does not have"),
            (BLOCK, {}, InjectionError, "set max_epochs or max_steps of the Trainer"),
        ],
    )
    def test_a_callback_that_does_not_fit_places_nothing(
        self, wrong: InjectionSpec, settings: dict[str, str], error: type[Exception], text: str
    ) -> None:
        model = Classifier()
        with pytest.raises(error, match=text):
            trainer(InjectionCallback(HEAD, wrong, **settings), max_epochs=-1).fit(model, data())
        assert not find(model)

    def test_two_callbacks_for_one_module_or_with_one_name_are_refused(self) -> None:
        with pytest.raises(RuntimeError, match="state_key"):
            trainer(InjectionCallback(HEAD), InjectionCallback(BLOCK))
        model = Classifier()
        other = InjectionCallback(InjectionSpec("Dropout(p=0.2)", layers="4", at="input"), module="model")
        with pytest.raises(InjectionError, match=r"already carries 'dropout'(?s:.)*name=\"dropout2\""):
            trainer(InjectionCallback(HEAD), other).fit(model, data())
        assert not model.rates
        assert not find(model)
