"""The lines of glue in the table of `docs/trainers/index.md`, without hookdrop and with it."""

from __future__ import annotations

import inspect
import re

import pytest
import torch
from torch import nn

import hookdrop
from tests.integration.trainers.by_hand import FollowingRamp, Ramp
from tests.support.programs import ROOT

TRAINERS = ROOT / "docs" / "trainers"

GLUE = {
    "plain": """
        schedule = LinearSchedule(steps=
        drop = inject(model, DropBlock(p=0.1, block_size=3)
    """,
    "accelerate": """
        steps = epochs *
        drop = inject(model
        drop.follow(optimizer)
        accelerator.register_for_checkpointing(drop)
        accelerator.log(drop.metrics()
    """,
    "timm": """
        drop = hookdrop.inject(model
                               schedule=hookdrop.LinearSchedule(steps=
        drop.seek(start_epoch
        train_metrics.update(drop.metrics())
    """,
    "ignite": """
        steps = epochs *
        drop = inject(model
        drop.follow(optimizer)
        logger.attach_output_handler(
                                     output_transform=lambda _: parts["drop"].metrics())
    """,
    "monai": """
        drop = inject(model
                      schedule=LinearSchedule(
        drop.follow(optimizer)
        logger = TensorBoardStatsHandler(
    """,
    "skorch": """
        class Regularize(Callback):
            def __init__(self, epochs):
                self.epochs = epochs
            def on_train_begin(
                train_set, _ =
                steps = self.epochs *
                net.drop_ = inject(
                                   schedule=LinearSchedule(
            def on_epoch_end(
                for name, value in net.drop_.metrics()
                    net.history.record(name, value)
    """,
    "composer": """
        class Regularize(Callback):
            def fit_start(
                duration =
                steps = duration
                self.drop = inject(
                                   schedule=LinearSchedule(
            def batch_start(
                self.drop.seek(
                logger.log_metrics(
    """,
    "ultralytics": """
        def regularize(trainer):
            batches, accumulate =
            drop = inject(trainer.model
                          schedule=LinearSchedule(
            drop.seek(
            trainer.drop = drop.follow(
        model.add_callback("on_pretrain_routine_end", regularize)
        model.add_callback("on_train_epoch_end", lambda trainer: trainer.lr
    """,
    "lightning": """
        class Regularize(lightning.Callback):
            def on_fit_start(
                steps = trainer.estimated_stepping_batches
                self.drop = inject(
                                   schedule=LinearSchedule(
            def on_train_batch_start(
                self.drop.seek(
                module.log_dict(
        callback, saving = Regularize()
    """,
    "transformers": """
        class Regularize(TrainerCallback):
            def on_train_begin(
                self.drop = inject(
                                   schedule=LinearSchedule(
            def on_step_begin(
                self.drop.seek(
        class LoggingTrainer(Trainer):
            def log(
                super().log({**logs
        callback = Regularize()
    """,
    "fastai": """
        class Regularize(Callback):
            run_valid = False
            def before_fit(
                self.total =
                self.drop = inject(
                                   schedule=LinearSchedule(
            def before_batch(
                self.drop.seek(
            def after_fit(
                self.drop.remove()
    """,
}
"""The beginnings of the lines of a page that place the hooks, count the steps, resume and log. Imports do not count."""

READY_MADE = {
    "fastai": ("spec = InjectionSpec(", "learn.fit(2, cbs=InjectionCallback(spec))"),
    "lightning": ("spec = InjectionSpec(", "callback = InjectionCallback(spec)"),
    "transformers": ("spec = InjectionSpec(", "callback = InjectionCallback(spec)"),
}

SEEKING = {"lightning", "transformers", "fastai", "composer"}
"""These trainers restore a step counter."""


def lines_of(*classes: type) -> int:
    """The lines of code: without blank lines and docstrings."""
    source = "\n".join(map(inspect.getsource, classes))
    return sum(bool(line.strip()) and not line.strip().startswith('"""') for line in source.splitlines())


def beginnings(trainer: str) -> list[str]:
    return [line.strip() for line in GLUE[trainer].splitlines() if line.strip()]


@pytest.mark.parametrize("trainer", sorted(GLUE))
def test_table_counts_the_lines_of_the_page(trainer: str) -> None:
    page = (TRAINERS / f"{trainer}.md").read_text()
    lines = {line.strip() for line in page.splitlines()}
    glue = list(READY_MADE.get(trainer, beginnings(trainer)))
    for beginning in glue:
        assert any(line.startswith(beginning) for line in lines), beginning
    by_hand = lines_of(Ramp) if trainer in SEEKING else lines_of(Ramp) + lines_of(FollowingRamp) - 1
    expected = [len(beginnings(trainer)) + by_hand, len(glue)]
    row = re.search(rf"^\| \[[^\]]*\]\({trainer}\.md\) \| (\d+) \| (\d+) \|", (TRAINERS / "index.md").read_text(), re.M)
    assert row is not None
    assert [int(number) for number in row.groups()] == expected


def test_the_lines_by_hand_work() -> None:
    rates: dict[str, list[float]] = {}
    for kind in ("hookdrop", "by hand"):
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        drop = (
            hookdrop.inject(model, hookdrop.Dropout2d(0.2), layers="0", schedule=hookdrop.LinearSchedule(steps=3))
            if kind == "hookdrop"
            else FollowingRamp(model, ["0"], 0.2, steps=3)
        )
        drop.follow(optimizer)
        rates[kind] = []
        for _ in range(5):
            model(torch.randn(1, 3, 8, 8)).sum().backward()
            optimizer.step()
            rates[kind].append(next(value for name, value in drop.metrics().items() if name.endswith("p")))
        drop.load_state_dict(drop.state_dict())
    assert rates["by hand"] == pytest.approx(rates["hookdrop"])
    images = torch.randn(4, 3, 8, 8)
    assert not torch.equal(model(images), model(images))
    assert torch.equal(model.eval()(images), model(images))
