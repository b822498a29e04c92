"""Hyperparameter search with the same number of trials for each arm, scored on the validation images."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.samplers import BaseSampler, RandomSampler, TPESampler

from comparison.spec.run_spec import Run
from comparison.spec.seeds import seed_of
from comparison.spec.tuning import Trial, Tuning, TuningConfig

FIRST_SEED = 1_000_000
"""First seed of tuning runs; final runs have smaller seeds, the control with other seeds has larger ones."""
LOG_FROM = 10
"""Ranges with at least this ratio of high to low are searched on a log scale."""

optuna.logging.set_verbosity(optuna.logging.WARNING)

Score = Callable[[Sequence[Run]], Mapping[str, float | None]]
"""Trains the missing runs and returns each run's validation NLL by its key; None for a failed run."""


class Search:
    """An ask-and-tell search for one arm with Optuna. It is deterministic: the same scores give the same trials."""

    def __init__(self, config: TuningConfig, run: Run) -> None:
        """`run` is a run of the arm with its configured settings."""
        self.config = config
        space = config.space if run.arm.p is not None else config.space_none
        self.space: Mapping[str, list[float]] = {str(name): values for name, values in space.items()}
        self._run = run
        self._study = optuna.create_study(sampler=_sampler(config, run.arm.name), direction="minimize")
        for point in _grid(self.space) if config.method == "grid" else ():
            # Optuna's GridSampler does not support ask and tell.
            self._study.enqueue_trial(point)
        self.trials: list[Trial] = []

    def ask(self) -> tuple[optuna.Trial, list[Run]]:
        """Return the next trial and its runs, one per tuning seed."""
        trial = self._study.ask({name: _distribution(self.config, v) for name, v in self.space.items()})
        run = with_settings(self._run, trial.params)
        seeds = range(FIRST_SEED, FIRST_SEED + self.config.seeds)
        return trial, [run.model_copy(update={"stage": "tuning", "seed": seed}) for seed in seeds]

    def tell(self, trial: optuna.Trial, losses: Sequence[float | None]) -> None:
        """Score a trial by the mean NLL of its runs; it has no score if a run failed."""
        known = [loss for loss in losses if loss is not None]
        score = statistics.fmean(known) if len(known) == len(losses) else None
        state = optuna.trial.TrialState.FAIL if score is None else optuna.trial.TrialState.COMPLETE
        self._study.tell(trial, score, state)
        self.trials.append(Trial(settings=dict(trial.params), score=score))

    def result(self) -> Tuning:
        """Return the search with its best trial; if all trials failed, nothing is chosen."""
        scored = [trial for trial in self.trials if trial.score is not None]
        chosen = min(scored, key=lambda trial: trial.score or 0.0).settings if scored else {}
        return Tuning(
            method={"grid": "grid", "random": "random search", "tpe": "TPE"}[self.config.method],
            space={name: list(values) for name, values in self.space.items()},
            trials=self.trials,
            seeds=[FIRST_SEED + i for i in range(self.config.seeds)],
            chosen=chosen,
            at_edge=[name for name, value in chosen.items() if self._at_edge(name, value)],
        )

    def _at_edge(self, name: str, value: float) -> bool:
        low, high = min(self.space[name]), max(self.space[name])
        margin = 0.0 if self.config.method == "grid" else 0.02 * (high - low)
        return len(self.space[name]) > 1 and not low + margin < value < high - margin


def tune(searches: Sequence[Search], score: Score) -> list[Tuning]:
    """Run all searches in parallel, one round at a time."""
    for count in rounds(searches[0].config) if searches else ():
        trials = [(search, *search.ask()) for search in searches for _ in range(count)]
        losses = score([run for _, _, runs in trials for run in runs])
        for search, trial, runs in trials:
            search.tell(trial, [losses[run.key] for run in runs])
    return [search.result() for search in searches]


def rounds(config: TuningConfig) -> list[int]:
    """The number of independent trials per arm in each round: TPE runs one at a time, other methods all at once."""
    return [1] * config.budget if config.method == "tpe" else [config.budget]


def with_settings(run: Run, settings: Mapping[str, float]) -> Run:
    """Return the run with tuned settings."""
    places = {"p": "arm", "label_smoothing": "run"}
    arm, optimizer, rest = (
        {name: value for name, value in settings.items() if places.get(name, "optimizer") == place}
        for place in ("arm", "optimizer", "run")
    )
    return run.model_copy(
        update={
            "arm": run.arm.model_copy(update=arm),
            "optimizer": run.optimizer.model_copy(update=optimizer),
            **rest,
        }
    )


def _sampler(config: TuningConfig, arm: str) -> BaseSampler:
    seed = seed_of(0, "tuning", arm) % 2**32
    if config.method == "tpe":
        # Optuna's default of ten random startup trials would use up a small budget.
        return TPESampler(seed=seed, n_startup_trials=max(2, config.budget // 3))
    return RandomSampler(seed)


def _grid(space: Mapping[Any, Sequence[float]]) -> list[dict[str, float]]:
    return [dict(zip(space, point, strict=True)) for point in itertools.product(*space.values())]


def _distribution(config: TuningConfig, values: Sequence[float]) -> BaseDistribution:
    if config.method == "grid":
        return CategoricalDistribution(values)
    low, high = values
    return FloatDistribution(low, high, log=low > 0 and high / low >= LOG_FROM)
