"""The results of a comparison, as stored in summary.json. The names of the fields are part of the file format."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict

from comparison.spec.tuning import Tuning

Metric = Literal["accuracy", "nll", "ece"]
METRICS: tuple[Metric, ...] = ("accuracy", "nll", "ece")
TITLES = {"accuracy": "Accuracy, %", "nll": "NLL, nats", "ece": "ECE, %"}
BETTER: dict[Metric, int] = {"accuracy": 1, "nll": -1, "ece": -1}
"""1 if higher is better, -1 if lower is."""
DECIMALS = {"accuracy": 2, "nll": 3, "ece": 2}


def without_commas(name: str) -> str:
    """Write `a, b, c` as `a (b; c)`, so that a list of names can be read."""
    first, comma, rest = name.partition(", ")
    return f"{first} ({rest.replace(', ', '; ')})" if comma else name


Name = Annotated[str, BeforeValidator(without_commas)]
"""The name of an arm or a cell, which never contains a comma."""


class Part(BaseModel):
    """Base class of all parts of a summary; fields of older files are ignored."""

    model_config = ConfigDict(extra="ignore")


class Difference(Part):
    """Paired differences `a - b` in one metric."""

    seeds: list[int]
    """Seeds of the complete pairs."""
    values: list[float]
    mean: float
    low: float
    high: float
    """Bootstrap 95 % interval over seeds; for a single pair, both limits are its difference."""
    low_images: float
    high_images: float
    """The interval over seeds and test images."""
    p: float
    """Two-sided p of the exact permutation test (sign flips)."""
    p_holm: float
    """p after Holm's correction over all differences from none, or between regularizers, in this metric and cell."""
    p_smallest: float
    """The smallest possible p for this number of pairs."""
    mde: float | None
    """Minimum detectable effect: detected with 80 % power at 5 %, two-sided, at the observed spread.

    None for a single pair, or if all differences are equal.
    """
    seeds_for_half: int | None
    """Number of pairs that would halve `mde`."""
    verdict: Literal["above", "below", "cannot be distinguished"]
    """From the interval over seeds; whether above is better depends on the metric."""


class Band(Part):
    """Lower quartile, median and upper quartile over the seeds, at each x."""

    x: list[float]
    low: list[float]
    median: list[float]
    high: list[float]


class Bin(Part):
    """A calibration bin over all seeds."""

    confidence: float
    """Mean confidence."""
    accuracy: float
    """Fraction of correct predictions."""
    count: int


class Site(Part):
    """The requested rate and the dropped fraction of a site in the last steps."""

    name: str
    asked: float
    dropped: float


class Spread(Part):
    """Quartiles of the ratios of interleaved measurements."""

    low: float
    median: float
    high: float


class ArmSummary(Part):
    """The results of an arm."""

    name: Name
    kind: Literal["none", "regularizer", "recipe", "peer", "control", "reference"]
    """A reference, such as a linear probe, is not a regularizer: Holm's correction does not include it."""
    call: str
    """The call with its rate."""
    layers: list[str]
    sites: int
    flags: list[str]
    """hookdrop's warnings, such as a block that covers its whole map."""
    command: str
    """A shell command that reproduces this row."""
    runs: int
    asked: float | None
    """Mean requested rate in the measured forwards; None if nothing is dropped."""
    dropped: float | None
    dropped_half: float | None
    """Half-width of the 95 % t interval of `dropped` over the seeds."""
    rate_at_end: float | None
    ramp_end: int | None
    """The first optimizer step with the rate within 1e-9 of its target; None if never."""
    realised: list[Site]
    values: dict[Metric, list[float]]
    """One value per finished seed, in the order of `seeds`."""
    seeds: list[int]
    means: dict[Metric, float]
    against_none: dict[Metric, Difference] | None
    set_aside: dict[int, str]
    """Seeds without a complete pair, and the reasons."""
    train_loss: Band
    validation_accuracy: Band
    validation_nll: Band
    rate: Band
    """Over optimizer steps."""
    calibration: list[Bin]
    tuning: Tuning | None
    like: Name = ""
    """The arm whose tuned settings it uses, if any."""
    time: Spread | None
    """Time of a training step at the final rate, relative to none."""
    memory: Spread | None
    """Peak memory of a training step, relative to none."""


class Contrast(Part):
    """The difference between two regularizers."""

    a: Name
    b: Name
    metric: Metric
    difference: Difference


class Controls(Part):
    """The results of the controls, which validate the comparison."""

    aa_equal: int
    """Number of seeds whose run with p = 0 injected ended bit-identical to none: weights and outputs."""
    aa_seeds: int
    """Number of seeds for which both runs finished."""
    none_none: dict[Metric, Difference] | None
    """None with other seeds minus none."""
    paired: bool
    """Whether all arms of a seed had the same initial weights and batches."""
    unchanged: int
    """Number of runs with bit-identical state_dict, repr and eval output with hooks and after `remove()`."""
    hooked: int
    """Number of runs with hooks."""


class Cell(Part):
    """One combination of dataset, training set size and model."""

    title: Name
    epochs: int
    steps: int
    train_images: int
    test_images: int
    skipped_images: int
    arms: list[ArmSummary]
    between: list[Contrast]
    controls: Controls
    varied: list[str] = ["training set", "weights", "batch order", "augmentation", "masks"]
    """What differs between seeds."""
    remarks: list[str] = []
    """Notes on the data, such as that all seeds train on the same images."""
    words: list[str] = []
    """Sentences: the verdict, the findings, the caveats."""


class FailedRun(Part):
    """A run without an outcome."""

    cell: Name
    arm: Name
    seed: int
    stage: str
    kind: str
    message: str
    key: str


class Environment(Part):
    """Software and hardware of some runs."""

    runs: int
    details: dict[str, Any]
    """At most one level of nesting."""


class Summary(Part):
    """The results of a comparison."""

    title: str
    created: str
    """ISO 8601, UTC."""
    command: str
    config: str
    """The YAML text."""
    seeds: int
    """Fixed before the first run, unless there are amendments."""
    amendments: list[str] = []
    """Changes after the first run, with their reasons."""
    notes: list[str] = []
    """To be read first, such as that arms are left out."""
    cells: list[Cell]
    failures: list[FailedRun]
    environments: list[Environment]
    """More than one if runs used different revisions or machines."""
    seconds: float
    """Total training time of all runs."""
