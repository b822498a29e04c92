"""Check data, models and layers before the first run."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

import hookdrop
from comparison.data.catalog import check, load
from comparison.run import models
from comparison.run.run_setup import at_final_rate, steps_of
from comparison.run.training import batch_of, step
from comparison.spec import arms
from comparison.spec.run_spec import Data, Model
from comparison.spec.study import Study


@dataclass
class Findings:
    """The result of checking all cells and arms."""

    errors: list[str] = field(default_factory=list)
    remarks: dict[str, list[str]] = field(default_factory=dict)
    """Notes on the data by cell, such as the number of skipped images."""
    plans: dict[str, str] = field(default_factory=dict)
    """The plan of each arm in the first cell, as a table of sites."""


def check_study(study: Study) -> Findings:
    """Load every dataset, build every model, plan every arm, and try a training step on two images."""
    found = Findings()
    for data, model in study.config.cells():
        try:
            cell = study.run(data, model, study.arms[0], 0).cell
            found.remarks[cell] = check(data, study.seeds, study.config.batch_size)
            with torch.random.fork_rng(devices=[]):
                _plan(study, data, model, found)
        except Exception as error:  # of any library
            found.errors.append(_text(f"{model.name} on {data.name}", error))
        if not found.errors:
            _try_steps(study, data, model, found)
    return found


def _plan(study: Study, data: Data, model: Model, found: Findings) -> None:
    task = load(data)
    split = task.split(data.train_size, data.validation_size, study.config.first_seed)
    built = models.build(model, task.classes, task.shape[0])
    steps = steps_of(study.run(data, model, study.arms[0], 0), len(split.train))
    example = torch.zeros(2, *task.shape)
    for arm in study.arms[1:]:
        try:
            if (spec := arms.injection(arm, built, example)) is not None:
                plan = hookdrop.plan(built, spec, total_steps=steps, example_input=example)
                found.plans.setdefault(arm.name, str(plan))
        except (hookdrop.HookdropError, ValueError, TypeError, ImportError) as error:
            found.errors.append(_text(f"{arm.name} on {model.name}", error))


def _try_steps(study: Study, data: Data, model: Model, found: Findings) -> None:
    """Take one training step on two images with each arm at its full rate."""
    for arm in study.arms:
        small = {"batch_size": 2, "compile": False}
        try:
            with torch.random.fork_rng(devices=[]):
                setup = at_final_rate(study.run(data, model, arm, 0).model_copy(update=small))
                step(setup, *batch_of(setup))
        except Exception as error:  # third-party models may raise anything
            found.errors.append(_text(f"cannot train {model.name} with {arm.name}", error))


def _text(where: str, error: Exception) -> str:
    """The message without its last line, which the combined message has once."""
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    text = f"{where}: {kind}{error}".removesuffix("\nNothing was trained.")
    return text.removesuffix("\nNo hook was placed; the model is unchanged.")
