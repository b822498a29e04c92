"""Check data, models and layers before the first run."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

import hookdrop
from comparison.data.catalog import check, load
from comparison.data.task import DataError
from comparison.run import models
from comparison.run.run_setup import at_final_rate, steps_of
from comparison.run.training import batch_of, step
from comparison.spec import arms
from comparison.spec.config import Config
from comparison.spec.errors import ConfigError
from comparison.spec.run_spec import Data, Model
from comparison.spec.study import Study
from comparison.spec.yaml_lines import Lines

EXPECTED_ERRORS = (DataError, ConfigError, hookdrop.HookdropError, ValueError, TypeError, ImportError)


@dataclass
class Findings:
    """The result of checking all cells and arms."""

    errors: list[str] = field(default_factory=list)
    remarks: dict[str, list[str]] = field(default_factory=dict)
    """Notes on the data by cell, such as the number of skipped images."""
    plans: dict[str, str] = field(default_factory=dict)
    """The plan of each arm in the first cell, as a table of sites."""


def check_study(study: Study, lines: Lines) -> Findings:
    """Load every dataset, build every model, plan every arm, and try a training step on two images."""
    found = Findings()
    config = study.config
    if config.batch_size % study.world:
        at = lines.where(("batch_size",))
        found.errors.append(f"{at}: batch_size={config.batch_size} is not divisible by {study.world} processes")
    for data, model in config.cells():
        where = lines.where(("data", _index(config.data, data)))
        try:
            cell = study.run(data, model, study.arms[0], 0).cell
            found.remarks[cell] = _check_data(data, config)
        except EXPECTED_ERRORS as error:
            found.errors.append(_strip_footer(f"{where}: {error}"))
            continue
        _check_model(study, data, model, lines, found)
    return found


def _check_data(data: Data, config: Config) -> list[str]:
    remarks = check(data, config.seeds)
    task = load(data)
    split = task.split(data.train_size, data.validation_size, config.first_seed)
    if len(split.train) < config.batch_size:
        remarks.append(
            f"{data.name}: each epoch is a single batch of {len(split.train)} images (batch_size={config.batch_size})."
        )
    return remarks


def _check_model(study: Study, data: Data, model: Model, lines: Lines, found: Findings) -> None:
    config, task = study.config, load(data)
    where = lines.where(("models", config.models.index(model)))
    split = task.split(data.train_size, data.validation_size, config.first_seed)
    with torch.random.fork_rng(devices=[]):
        try:
            built = models.build(model, task.classes, task.shape[0])
        except EXPECTED_ERRORS as error:
            found.errors.append(_strip_footer(f"{where}: {error}"))
            return
        run = study.run(data, model, study.arms[0], 0)
        example = torch.zeros(2, *task.shape)
        for arm in study.arms[1:]:
            at = lines.where(("arms", [one.name for one in config.all_arms()].index(arm.name)))
            try:
                settings = arms.arguments(arm, built, steps_of(run, len(split.train)), example)
                if settings is not None:
                    plan = str(hookdrop.plan(built, **settings))
                    found.plans.setdefault(arm.name, plan)
            except EXPECTED_ERRORS as error:
                found.errors.append(_strip_footer(f"{at}, {arm.name} on {model.name}: {error}"))
    _try_steps(study, data, model, lines, found)


def _try_steps(study: Study, data: Data, model: Model, lines: Lines, found: Findings) -> None:
    """Take one training step on two images with each arm at its full rate."""
    if found.errors:
        return
    names = [one.name for one in study.config.all_arms()]
    for arm in study.arms:
        at = lines.where(("models",) if arm.name not in names else ("arms", names.index(arm.name)))
        small = {"batch_size": 2, "compile": False}
        try:
            with torch.random.fork_rng(devices=[]):
                setup = at_final_rate(study.run(data, model, arm, 0).model_copy(update=small))
                step(setup, *batch_of(setup))
        except Exception as error:  # third-party models may raise anything
            found.errors.append(f"{at}: cannot train {model.name} with {arm.name}: {type(error).__name__}: {error}")


def _index(all_data: list[Data], data: Data) -> int:
    return [one.name for one in all_data].index(data.name)


def _strip_footer(text: str) -> str:
    """Remove the last line, which the combined message has once."""
    return text.removesuffix("\nNothing was trained.").removesuffix("\nNo hook was placed; the model is unchanged.")
