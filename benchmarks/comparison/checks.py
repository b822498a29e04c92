"""Everything that can be known to be wrong before the first run: data, models, layers."""

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

WRONG = (DataError, ConfigError, hookdrop.HookdropError, ValueError, TypeError, ImportError)


@dataclass
class Findings:
    """What a look at all cells and arms came to."""

    errors: list[str] = field(default_factory=list)
    remarks: dict[str, list[str]] = field(default_factory=dict)
    """What is worth knowing of the data by cell, such as that images are left out."""
    plans: dict[str, str] = field(default_factory=dict)
    """The table of sites by arm, in the first cell."""


def look(study: Study, lines: Lines) -> Findings:
    """Load every data set, make every model, and plan every arm on it; nothing is trained."""
    found = Findings()
    config = study.config
    if config.batch_size % study.world:
        at = lines.where(("batch_size",))
        found.errors.append(f"{at}: {study.world} processes can't share batches of {config.batch_size} evenly")
    for data, model in config.cells():
        where = lines.where(("data", _index(config.data, data)))
        try:
            cell = study.run(data, model, study.arms[0], 0).cell
            found.remarks[cell] = _look_at_data(data, config)
        except WRONG as error:
            found.errors.append(_without_ending(f"{where}: {error}"))
            continue
        _look_at_model(study, data, model, lines, found)
    return found


def _look_at_data(data: Data, config: Config) -> list[str]:
    remarks = check(data, config.seeds)
    task = load(data)
    split = task.split(data.train_size, data.validation_size, config.first_seed)
    if len(split.train) < config.batch_size:
        remarks.append(f"{data.name}: an epoch is one batch of {len(split.train)} images, not {config.batch_size}.")
    return remarks


def _look_at_model(study: Study, data: Data, model: Model, lines: Lines, found: Findings) -> None:
    config, task = study.config, load(data)
    where = lines.where(("models", config.models.index(model)))
    split = task.split(data.train_size, data.validation_size, config.first_seed)
    with torch.random.fork_rng(devices=[]):
        try:
            built = models.build(model, task.classes, task.shape[0])
        except WRONG as error:
            found.errors.append(_without_ending(f"{where}: {error}"))
            return
        run = study.run(data, model, study.arms[0], 0)
        example = torch.zeros(2, *task.shape)
        for arm in study.arms[1:]:
            at = lines.where(("arms", [one.name for one in config.all_arms()].index(arm.name)))
            try:
                planned = arms.plan(arm, built, steps_of(run, len(split.train)), example)
            except WRONG as error:
                found.errors.append(_without_ending(f"{at}, {arm.name} on {model.name}: {error}"))
                continue
            assert planned is not None
            found.plans.setdefault(arm.name, str(planned))
    _try_steps(study, data, model, lines, found)


def _try_steps(study: Study, data: Data, model: Model, lines: Lines, found: Findings) -> None:
    """Take one training step with each arm at its full rate, on two images: what can't be trained is known then."""
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
        except Exception as error:  # of somebody else's model, whatever it is
            found.errors.append(f"{at}, {arm.name} on {model.name} can't be trained: {type(error).__name__}: {error}")


def _index(all_data: list[Data], data: Data) -> int:
    return [one.name for one in all_data].index(data.name)


def _without_ending(text: str) -> str:
    """The end of a message that a list of messages has once."""
    return text.removesuffix("\nNothing was trained.").removesuffix("\nNo hook was placed; the model is unchanged.")
