"""The results of a comparison, as stored in summary.json. The names of the fields are part of the file format."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict

from comparison.spec.tuning import Tuning

Metric = Literal["accuracy", "nll", "ece"]
METRICS: tuple[Metric, ...] = ("accuracy", "nll", "ece")
SHORT: dict[Metric, str] = {"accuracy": "Accuracy", "nll": "NLL", "ece": "ECE"}
TITLES: dict[Metric, str] = {"accuracy": "Accuracy, %", "nll": "NLL, nats", "ece": "ECE, %"}
BETTER: dict[Metric, int] = {"accuracy": 1, "nll": -1, "ece": -1}  # 1 if higher is better, -1 if lower is
DECIMALS: dict[Metric, int] = {"accuracy": 2, "nll": 3, "ece": 2}
LEVEL = 0.05  # of all tests
UNCLEAR: Literal["cannot be distinguished"] = "cannot be distinguished"
NO_CALL: Literal["no clear difference"] = "no clear difference"
Call = Literal["better", "worse", "no clear difference"]


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

    seeds: list[int]  # of the complete pairs
    values: list[float]
    mean: float
    low: float  # bootstrap 95 % interval over seeds; for a single pair, both limits are its difference
    high: float
    low_images: float  # the interval over seeds and test images
    high_images: float
    p: float  # two-sided, of the exact permutation test (sign flips)
    p_holm: float  # with Holm's correction over all differences from none, or between regularizers, in this metric
    p_smallest: float  # possible for this number of pairs
    mde: float | None
    """Minimum detectable effect: detected with 80 % power at 5 %, two-sided, at the observed spread; None without."""
    seeds_for_half: int | None  # the number of pairs that would halve `mde`
    verdict: Literal["above", "below", "cannot be distinguished"]  # from the interval over seeds, not corrected

    def called(self, metric: Metric) -> Call:
        """Whether `a` is better: p after the correction decides, and its uncorrected interval must exclude 0 too."""
        if self.verdict == UNCLEAR or self.p_holm > LEVEL:
            return NO_CALL
        return "better" if (self.verdict == "above") == (BETTER[metric] > 0) else "worse"


class Spread(Part):
    """Quartiles of the ratios of interleaved measurements."""

    low: float
    median: float
    high: float

    def called(self, noise: float) -> Call:
        """Whether a time is better than 1: if its quartiles exclude 1, and its median differs by more than `noise`."""
        if self.low <= 1 <= self.high or abs(self.median - 1) <= noise:
            return NO_CALL
        return "better" if self.median < 1 else "worse"


class ArmSummary(Part):
    name: Name
    kind: Literal["none", "regularizer", "recipe", "peer", "control", "reference"]
    """A reference, such as a linear probe, is not a regularizer: Holm's correction does not include it."""
    call: str  # with its rate
    layers: list[str]
    sites: int
    flags: list[str]  # hookdrop's warnings, such as a block that covers its whole map
    runs: int
    asked: float | None  # mean requested rate in the measured forwards; None if nothing is dropped
    dropped: float | None
    dropped_half: float | None  # half-width of the 95 % t interval of `dropped` over the seeds
    rate_at_end: float | None
    values: dict[Metric, list[float]]  # one value per finished seed, in the order of `seeds`
    seeds: list[int]
    means: dict[Metric, float]
    against_none: dict[Metric, Difference] | None
    set_aside: dict[int, str]  # seeds without a complete pair, and the reasons
    tuning: Tuning | None
    like: Name = ""  # the arm whose tuned settings it uses, if any
    time: Spread | None  # of a training step at the final rate, relative to none
    memory: Spread | None  # peak memory of a training step, relative to none

    @property
    def compared(self) -> bool:
        """Whether it takes part in the comparison: not a control or a reference."""
        return self.kind not in ("control", "reference")


class Contrast(Part):
    a: Name
    b: Name
    metric: Metric
    difference: Difference


class Controls(Part):
    """The results of the controls, which validate the comparison."""

    aa_equal: int  # seeds whose run with p = 0 injected ended bit-identical to none: weights and outputs
    aa_seeds: int  # seeds for which both runs finished
    none_none: dict[Metric, Difference] | None  # none with other seeds minus none
    paired: bool  # whether all arms of a seed had the same initial weights and batches
    unchanged: int  # runs with bit-identical state_dict, repr and eval output with hooks and after `remove()`
    hooked: int  # runs with hooks

    @property
    def hold(self) -> bool:
        """Whether all deterministic controls hold; the interval of none against none excludes 0 once in 20 times."""
        return self.aa_equal == self.aa_seeds and self.paired and self.unchanged == self.hooked


class Cell(Part):
    """One combination of dataset, training set size and model."""

    title: Name
    epochs: int
    steps: int
    train_images: int
    test_images: int
    arms: list[ArmSummary]
    between: list[Contrast]
    controls: Controls
    varied: list[str] = ["training set", "weights", "batch order", "augmentation", "masks"]  # between seeds
    remarks: list[str] = []  # notes on the data, such as that all seeds train on the same images
    fit: tuple[float, float] | None = None  # mean training loss of the runs of none, of the first step and last epoch
    chance: float | None = None  # accuracy of always answering the most frequent class of the test images, in percent

    @property
    def time_noise(self) -> float | None:
        """The largest quartile deviation from 1 of the times of the controls, which do what none does; None without."""
        times = [arm.time for arm in self.arms if arm.kind == "control" and arm.time]
        return max((max(1 - one.low, one.high - 1) for one in times), default=None)


class FailedRun(Part):
    cell: Name
    arm: Name
    seed: int
    stage: str
    kind: str
    message: str
    key: str


class Environment(Part):
    """Software and hardware of some runs, with at most one level of nesting."""

    runs: int
    details: dict[str, Any]


class Summary(Part):
    title: str
    created: str  # ISO 8601, UTC
    command: str
    config: str  # the YAML text
    seeds: int  # fixed before the first run
    cells: list[Cell]
    failures: list[FailedRun]
    environments: list[Environment]  # more than one if runs used different revisions or machines
    seconds: float  # total training time of all runs
