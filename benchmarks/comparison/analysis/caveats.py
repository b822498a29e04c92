"""Caveats for the findings of a cell: statistical power, controls, and missing runs."""

from __future__ import annotations

import math
from collections.abc import Iterator

from comparison.analysis.inference import LEVEL, more_than_chance
from comparison.analysis.pairs import NOT_RUN
from comparison.analysis.schema import DECIMALS, METRICS, ArmSummary, Cell, Difference, Metric
from comparison.analysis.summary_text import NAMES, UNCLEAR, baseline_name, compared, interval_text, join, plural

SHORT: dict[Metric, str] = {"accuracy": "accuracy", "nll": "NLL", "ece": "ECE"}
UNITS: dict[Metric, str] = {"accuracy": "points of accuracy", "nll": "nats", "ece": "points of ECE"}


def before_findings(cell: Cell) -> list[str]:
    """Caveats to read before the findings."""
    return [sentence for part in (_unfinished, _unpaired) for sentence in part(cell)]


def after_findings(cell: Cell) -> list[str]:
    """Caveats to read after the findings."""
    power = (_intervals, _smallest_p, _detectable)
    parts = (*power, _aa, _none_none, _footprint, _set_aside, _tuned, _fixed, _idle, _timed, _images)
    return [sentence for part in parts for sentence in part(cell)]


def _families(cell: Cell) -> dict[str, list[Difference]]:
    """The families of Holm's correction in one metric; they have the same size in the others."""
    against = [of_arm["accuracy"] for of_arm in compared(cell).values()]
    among = [pair.difference for pair in cell.between if pair.metric == "accuracy"]
    families = {f"from {baseline_name(cell)}": against, "between regularizers": among}
    return {name: family for name, family in families.items() if family}


def _intervals(cell: Cell) -> Iterator[str]:
    if count := len(METRICS) * sum(map(len, _families(cell).values())):
        yield (
            f'"Above" and "below" are based on {plural(count, "uncorrected 95 % interval")} (bootstrap over seeds): '
            f"without any true differences, about {0.05 * count:.2g} of them would still exclude 0."
        )


def _smallest_p(cell: Cell) -> Iterator[str]:
    for name, family in _families(cell).items():
        pairs, smallest = max(len(one.values) for one in family), min(one.p_smallest for one in family)
        corrected = min(1.0, len(family) * smallest)
        text = f"With {plural(pairs, 'pair')}, the smallest possible p of the permutation test is {smallest:.2g}"
        text += f", or {corrected:.2g} after Holm's correction over {plural(len(family), 'difference')} {name}."
        if corrected > LEVEL:
            # 2 / 2**n is the smallest p of n pairs.
            needed = math.ceil(math.log2(2 * len(family) / LEVEL) - 1e-9)
            text += f" No difference can be significant at 5 %; this requires at least {needed} pairs."
        yield text


def _detectable(cell: Cell) -> Iterator[str]:
    found = {metric: [of_arm[metric] for of_arm in compared(cell).values()] for metric in METRICS}
    sizes = [f"{size} {UNITS[metric]}" for metric in METRICS if (size := _sizes(found[metric], DECIMALS[metric]))]
    halves = [one.seeds_for_half for of_metric in found.values() for one in of_metric if one.seeds_for_half]
    if sizes:
        by_arm = " (depending on the arm)" if any(" to " in size for size in sizes) else ""
        yield (
            f"Differences from {baseline_name(cell)} below {join(sizes)}{by_arm} are detected with less than 80 % "
            "power by a paired t test at 5 %, uncorrected and at the observed spread; half of that requires about "
            f"{max(halves)} pairs. Arms that cannot be distinguished are not necessarily equal."
        )
    constant = [NAMES[metric] for metric in METRICS if found[metric] and not _sizes(found[metric], DECIMALS[metric])]
    if constant:
        yield f"{join(constant)}: the minimum detectable effect is unknown, because the pairs have no spread."


def _sizes(found: list[Difference], decimals: int) -> str:
    known = sorted(one.mde for one in found if one.mde is not None)
    return " to ".join(dict.fromkeys(f"{mde:.{decimals}f}" for mde in (*known[:1], *known[-1:])))


def _aa(cell: Cell) -> Iterator[str]:
    equal, seeds, none = cell.controls.aa_equal, cell.controls.aa_seeds, baseline_name(cell)
    if not seeds:
        yield "The A/A control is missing: no run with p = 0 injected shows that hooks alone change nothing."
    elif equal == seeds:
        yield (
            f"Control: with p = 0 injected, weights and outputs are bit-identical to {none} ({plural(seeds, 'seed')})."
        )
    else:
        yield (
            f"Warning: with p = 0 injected, weights or outputs differ from {none} in {seeds - equal} of "
            f"{plural(seeds, 'seed')}. Runs are not reproducible, or the hooks change something; this may contribute "
            "to every difference."
        )


def _none_none(cell: Cell) -> Iterator[str]:
    found, none = cell.controls.none_none, baseline_name(cell)
    start = f"Control: {none} with other seeds against {none}"
    if not found:
        yield f"The control of chance is missing: there are no runs of {none} with other seeds."
    elif len(found["accuracy"].values) < 2:
        yield f"{start} has only one pair and thus no interval."
    elif outside := [metric for metric in METRICS if found[metric].verdict != UNCLEAR]:
        metrics = join([f"{SHORT[metric]} ({interval_text(found[metric], metric)})" for metric in outside])
        which = f"the interval of {metrics} excludes" if len(outside) == 1 else f"the intervals of {metrics} exclude"
        consistent = "not consistent" if more_than_chance(found) else "consistent"
        yield (
            f"{start}: {which} 0, although only the seeds differ. This happens by chance in 1 of 20 intervals; after "
            f"Holm's correction over the {len(METRICS)} metrics, it is {consistent} with chance."
        )
    else:
        yield f"{start}: the intervals of {join(list(SHORT.values()))} cover 0, as expected for 19 of 20."


def _footprint(cell: Cell) -> Iterator[str]:
    same, hooked = cell.controls.unchanged, cell.controls.hooked
    if same < hooked:
        yield (
            f"Warning: in {hooked - same} of {plural(hooked, 'run')} with hooks, the hooks changed state_dict, repr or "
            "eval output."
        )


def _unfinished(cell: Cell) -> Iterator[str]:
    waiting = sum(why.split(": ")[-1] == NOT_RUN for arm in cell.arms[1:] for why in arm.set_aside.values())
    if waiting:
        yield (
            f"Not finished: {plural(waiting, 'pair')} missing. The number of seeds was fixed in advance; stopping "
            "early based on the results would make intervals and p too small."
        )


def _unpaired(cell: Cell) -> Iterator[str]:
    if not cell.controls.paired:
        yield (
            "Warning: some runs did not have the same initial weights and batches as the others of their seed; "
            f"those that differ from {baseline_name(cell)} are excluded."
        )


def _set_aside(cell: Cell) -> Iterator[str]:
    others = cell.arms[1:]
    aside = sum(len(arm.set_aside) for arm in others)
    complete = sum(len(arm.against_none["accuracy"].seeds) for arm in others if arm.against_none)
    if aside:
        reasons = "; ".join(_reasons(arm) for arm in others if arm.set_aside)
        yield f"Excluded: {aside} of {plural(aside + complete, 'pair')}: {reasons}."


def _reasons(arm: ArmSummary) -> str:
    seeds: dict[str, list[str]] = {}
    for seed, why in arm.set_aside.items():
        seeds.setdefault(why, []).append(str(seed))
    parts = [f"seed{'s' if len(of) > 1 else ''} {join(of)} ({why})" for why, of in seeds.items()]
    return f"{arm.name}, {join(parts)}"


def _tuned(cell: Cell) -> Iterator[str]:
    own = [arm for arm in cell.arms if arm.kind != "control" and not arm.like]
    trials = {arm.name: len(arm.tuning.trials) for arm in own if arm.tuning}
    if trials:
        each = join([f"{name} ({plural(count, 'trial')})" for name, count in trials.items()])
        yield f"Tuned on validation images: {each}."
    failed = {arm.name: sum(trial.score is None for trial in arm.tuning.trials) for arm in own if arm.tuning}
    for name, count in failed.items():
        if count:
            untuned = ", and uses its configured settings" if count == trials[name] else ""
            yield f"Warning: {name} had {plural(count, 'trial')} without a score because of failed runs{untuned}."
    if trials and (len(set(trials.values())) > 1 or len(trials) < len(own)):
        yield "Warning: the arms did not have the same tuning budget; more trials are an advantage."
    if edge := [f"{arm.name} ({join(arm.tuning.at_edge)})" for arm in own if arm.tuning and arm.tuning.at_edge]:
        yield f"Tuned to the edge of the search space, so a better value may lie outside: {join(edge)}."
    for like in dict.fromkeys(arm.like for arm in cell.arms if arm.like and arm.kind != "control"):
        taking = [arm.name for arm in cell.arms if arm.like == like and arm.kind != "control"]
        yield f"Not tuned, but with the tuned settings of {like}: {join(taking)}."


def _fixed(cell: Cell) -> Iterator[str]:
    regularized = [arm for arm in cell.arms if arm.kind not in ("none", "control", "reference")]
    if fixed := [arm.name for arm in regularized if not arm.tuning and not arm.like]:
        yield (
            f"The rate of {join(fixed)} was fixed in advance, not tuned: "
            "the results do not show which regularizer is best at its best rate."
        )


def _images(cell: Cell) -> Iterator[str]:
    if compared(cell):
        yield (
            f"The seeds differ in {join(cell.varied)}; "
            f"all use the same {plural(cell.test_images, 'test image')}. This is one dataset and model."
        )
    yield from cell.remarks


def _idle(cell: Cell) -> Iterator[str]:
    for arm in cell.arms:
        if arm.kind in ("none", "control") or arm.rate_at_end is None:
            continue
        if arm.asked == 0:
            yield f"Warning: the rate of {arm.name} was 0 in the measured epochs."
        elif arm.ramp_end is None:
            yield f"Warning: the rate of {arm.name} never reached its target; it ended at {arm.rate_at_end:.3g}."


def _timed(cell: Cell) -> Iterator[str]:
    times = [arm.time.median for arm in cell.arms if arm.kind == "control" and arm.time]
    if times:
        yield (
            f"Time: the controls do the same work as {baseline_name(cell)} and took {min(times):.2f} to "
            f"{max(times):.2f} times as long; ratios this close to 1 are noise."
        )
