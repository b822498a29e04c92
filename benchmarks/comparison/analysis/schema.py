"""What a comparison found, as the report and the terminal show it; all of it is JSON."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from comparison.spec.tuning import Tuning

Metric = Literal["accuracy", "nll", "ece"]
METRICS: tuple[Metric, ...] = ("accuracy", "nll", "ece")
TITLES = {"accuracy": "Accuracy, %", "nll": "NLL, nats", "ece": "ECE, %"}
BETTER: dict[Metric, int] = {"accuracy": 1, "nll": -1, "ece": -1}
"""1 where more is better, -1 where less is."""
DECIMALS = {"accuracy": 2, "nll": 3, "ece": 2}


class Found(BaseModel):
    """A part of what was found."""

    model_config = ConfigDict(extra="forbid")


class Difference(Found):
    """Paired differences `a - b` of one metric, seed by seed."""

    seeds: list[int]
    """Those of complete pairs."""
    values: list[float]
    mean: float
    low: float
    high: float
    """Bootstrap 95 % interval over seeds; one pair has none: both limits are its difference."""
    low_images: float
    high_images: float
    """The same over seeds and test images."""
    p: float
    """Of the exact permutation test (sign flips), two-sided."""
    p_holm: float
    """The same after Holm's correction: over all differences to none of this metric and cell, or over all between."""
    p_smallest: float
    """What `p` could not be smaller than with so many pairs."""
    mde: float | None
    """Minimum detectable effect: found with 80 % power at 5 %, two-sided, given the spread seen.

    None for one pair, and where all differences are the same.
    """
    seeds_for_half: int | None
    """Pairs that it would take to find half of `mde`."""
    verdict: Literal["above", "below", "cannot be distinguished"]
    """By the interval over seeds; better or worse depends on the metric."""


class Band(Found):
    """Lower quartile, median and upper quartile over the seeds, at each x."""

    x: list[float]
    low: list[float]
    median: list[float]
    high: list[float]


class Bin(Found):
    """Predictions of a range of confidence, over all seeds."""

    confidence: float
    """Their mean."""
    accuracy: float
    """The fraction that is right."""
    count: int


class Site(Found):
    """What one site was asked to drop in the last steps, and what it dropped."""

    name: str
    asked: float
    dropped: float


class Spread(Found):
    """Lower quartile, median and upper quartile of ratios measured in turn."""

    low: float
    median: float
    high: float


class Mask(Found):
    """What was dropped on one map of one sample."""

    site: str
    rows: list[list[int]]
    """1 where the map was kept, 0 where it was dropped."""


class ArmFound(Found):
    """What was found of one arm."""

    name: str
    kind: Literal["none", "regularizer", "recipe", "peer", "control"]
    call: str
    """As it would be written, with its rate."""
    layers: list[str]
    sites: int
    flags: list[str]
    """What hookdrop warned of, such as a block that covers its whole map."""
    command: str
    """A shell command that makes this row."""
    runs: int
    asked: float | None
    """Mean rate asked for in the forwards that were measured; None without a regularizer that drops."""
    dropped: float | None
    dropped_half: float | None
    """Half the width of the 95 % t interval of `dropped` over the seeds."""
    rate_at_end: float | None
    ramp_end: int | None
    """The optimizer step at which the rate was first within 1e-9 of its target; None if never."""
    realised: list[Site]
    values: dict[Metric, list[float]]
    """One a seed that finished, in the order of `seeds`."""
    seeds: list[int]
    means: dict[Metric, float]
    against_none: dict[Metric, Difference] | None
    set_aside: dict[int, str]
    """Seeds whose pair with none is incomplete, and why."""
    train_loss: Band
    validation_accuracy: Band
    validation_nll: Band
    rate: Band
    """Over optimizer steps."""
    calibration: list[Bin]
    tuning: Tuning | None
    like: str = ""
    """The arm whose tuned settings it has, if it was not tuned itself."""
    time: Spread | None
    """Of a training step at the final rate / of one of none."""
    memory: Spread | None
    """Peak of a training step, likewise."""
    mask: Mask | None


class Contrast(Found):
    """Two arms that are not none."""

    a: str
    b: str
    metric: Metric
    difference: Difference


class Controls(Found):
    """What has to come out if the comparison itself is sound."""

    aa_equal: int
    """Seeds whose arm with p = 0 injected ended bit-equal to none: weights and outputs."""
    aa_seeds: int
    """Seeds for which both finished."""
    none_none: dict[Metric, Difference] | None
    """None with other seeds - none."""
    paired: bool
    """Whether all arms of a seed saw the same batches from the same weights."""
    unchanged: int
    """Runs after which state_dict, repr and eval output were bit-equal with hooks and after `remove()`."""
    hooked: int
    """Runs with hooks."""


class Cell(Found):
    """One data set, training-set size and model."""

    title: str
    slug: str
    """For ids and file names."""
    epochs: int
    steps: int
    train_images: int
    test_images: int
    skipped_images: int
    arms: list[ArmFound]
    between: list[Contrast]
    controls: Controls
    varied: list[str] = ["training set", "weights", "batch order", "augmentation", "masks"]
    """What differs between seeds."""
    remarks: list[str] = []
    """Of the data, such as that all seeds train on the same images."""
    words: list[str]
    """What may be said, in sentences: the findings first, then what goes with them."""
    findings: int | None = None
    """How many of the sentences are findings; all of them if None."""


class FailureFound(Found):
    """A run without an outcome."""

    cell: str
    arm: str
    seed: int
    stage: str
    kind: str
    message: str
    key: str


class Environment(Found):
    """What runs were made with."""

    runs: int
    details: dict[str, Any]
    """Nested at most once."""


class Summary(Found):
    """A whole comparison."""

    title: str
    created: str
    """ISO 8601, UTC."""
    command: str
    config: str
    """The YAML text."""
    seeds: int
    """Fixed before the first run, unless there are amendments."""
    amendments: list[str] = []
    """What was changed after the first run, and why."""
    cells: list[Cell]
    failures: list[FailureFound]
    environments: list[Environment]
    """More than one if runs of other revisions or machines are among them."""
    seconds: float
    """Of training, all runs together."""
