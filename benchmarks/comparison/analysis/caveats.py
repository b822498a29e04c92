"""What goes with the findings of a cell: what could have been found, controls, and what is missing."""

from __future__ import annotations

import math
from collections.abc import Iterator

from comparison.analysis.inference import LEVEL, more_than_chance
from comparison.analysis.pairs import NOT_RUN
from comparison.analysis.schema import DECIMALS, METRICS, ArmFound, Cell, Difference, Metric
from comparison.analysis.summary_text import NAMES, UNCLEAR, baseline_name, compared, interval_text, listed, plural

SHORT: dict[Metric, str] = {"accuracy": "accuracy", "nll": "NLL", "ece": "ECE"}
UNITS: dict[Metric, str] = {"accuracy": "points of accuracy", "nll": "nats", "ece": "points of ECE"}


def first(cell: Cell) -> list[str]:
    """What has to be known before the findings."""
    return [sentence for part in (_unfinished, _unpaired) for sentence in part(cell)]


def after(cell: Cell) -> list[str]:
    """What goes with the findings."""
    chance = (_intervals, _reachable, _detectable)
    parts = (*chance, _aa, _none_none, _hooks, _set_aside, _tuned, _fixed, _idle, _timed, _images)
    return [sentence for part in parts for sentence in part(cell)]


def _families(cell: Cell) -> dict[str, list[Difference]]:
    """What Holm's correction is over, in one metric; it is as large in the others."""
    against = [of_arm["accuracy"] for of_arm in compared(cell).values()]
    among = [pair.difference for pair in cell.between if pair.metric == "accuracy"]
    families = {f"the differences to {baseline_name(cell)}": against, "the differences between regularizers": among}
    return {name: family for name, family in families.items() if family}


def _intervals(cell: Cell) -> Iterator[str]:
    if count := len(METRICS) * sum(map(len, _families(cell).values())):
        yield (
            f"Above and below go by {plural(count, 'interval')} of 95 % each (bootstrap over seeds), uncorrected: "
            f"if nothing differed, about {0.05 * count:.2g} of them would still exclude 0."
        )


def _reachable(cell: Cell) -> Iterator[str]:
    for name, family in _families(cell).items():
        pairs, smallest = max(len(one.values) for one in family), min(one.p_smallest for one in family)
        corrected = min(1.0, len(family) * smallest)
        said = f"With {plural(pairs, 'pair')} the permutation test's p is {_at_least(smallest)}"
        said += f", and {_at_least(corrected)} with Holm's correction over {len(family)} of {name}"
        if corrected > LEVEL:
            # 2 / 2**n is the smallest p of n pairs.
            needed = math.ceil(math.log2(2 * len(family) / LEVEL) - 1e-9)
            said += f": not even the most extreme could be significant at 5 %. It takes {needed} pairs or more"
        yield f"{said}."


def _at_least(p: float) -> str:
    return f"{p:.2g} or more" if p < 1 else "always 1"


def _detectable(cell: Cell) -> Iterator[str]:
    found = {metric: [of_arm[metric] for of_arm in compared(cell).values()] for metric in METRICS}
    sizes = [f"{size} {UNITS[metric]}" for metric in METRICS if (size := _sizes(found[metric], DECIMALS[metric]))]
    halves = [one.seeds_for_half for of_metric in found.values() for one in of_metric if one.seeds_for_half]
    if sizes:
        by_arm = " (by the arm)" if any(" to " in size for size in sizes) else ""
        yield (
            f"Differences to {baseline_name(cell)} smaller than {listed(sizes)}{by_arm} would be found in fewer than 4 "
            "of 5 such comparisons by a paired t test at 5 %, uncorrected and given the spread seen; half of that "
            f"takes about {max(halves)} pairs. What cannot be distinguished is not thereby equal."
        )
    still = [NAMES[metric] for metric in METRICS if found[metric] and not _sizes(found[metric], DECIMALS[metric])]
    if still:
        yield f"{listed(still)}: the pairs have no spread to go by; how small a difference could be found is not known."


def _sizes(found: list[Difference], decimals: int) -> str:
    known = sorted(one.mde for one in found if one.mde is not None)
    return " to ".join(dict.fromkeys(f"{mde:.{decimals}f}" for mde in (*known[:1], *known[-1:])))


def _aa(cell: Cell) -> Iterator[str]:
    equal, seeds, none = cell.controls.aa_equal, cell.controls.aa_seeds, baseline_name(cell)
    if not seeds:
        yield "No run with p = 0 injected shows that the hooks alone change nothing."
    elif equal == seeds:
        yield f"Control: with p = 0 injected, weights and outputs are bit-equal to {none}'s ({plural(seeds, 'seed')})."
    else:
        yield (
            f"Beware: with p = 0 injected, weights or outputs are not {none}'s in {seeds - equal} of "
            f"{plural(seeds, 'seed')}. Runs do not repeat exactly, or the hooks change something: part of every "
            "difference here may be that."
        )


def _none_none(cell: Cell) -> Iterator[str]:
    found, none = cell.controls.none_none, baseline_name(cell)
    start = f"Control: {none} with other seeds against {none}"
    if not found:
        yield f"No runs of {none} with other seeds show what comes of chance alone."
    elif len(found["accuracy"].values) < 2:
        yield f"{start} is one pair, which has no interval."
    elif outside := [metric for metric in METRICS if found[metric].verdict != UNCLEAR]:
        said = listed([f"{SHORT[metric]} ({interval_text(found[metric], metric)})" for metric in outside])
        which = f"the interval of {said} excludes" if len(outside) == 1 else f"the intervals of {said} exclude"
        more = "more" if more_than_chance(found) else "no more"
        yield (
            f"{start}: {which} 0, though only the seeds differ. Chance does that in 1 of 20 intervals; after Holm's "
            f"correction over the {len(METRICS)} metrics it is {more} than chance explains."
        )
    else:
        yield f"{start}: the intervals of {listed(list(SHORT.values()))} cover 0, as 19 of 20 should."


def _hooks(cell: Cell) -> Iterator[str]:
    same, hooked = cell.controls.unchanged, cell.controls.hooked
    if same < hooked:
        yield (
            f"Beware: in {hooked - same} of {plural(hooked, 'run')} with hooks, state_dict, repr or eval output was "
            "not what it is without them."
        )


def _unfinished(cell: Cell) -> Iterator[str]:
    waiting = sum(why.split(": ")[-1] == NOT_RUN for arm in cell.arms[1:] for why in arm.set_aside.values())
    if waiting:
        yield (
            f"Not finished: {plural(waiting, 'pair')} still to be run. The number of seeds was fixed beforehand; "
            "to stop where the numbers please would make intervals and p too small."
        )


def _unpaired(cell: Cell) -> Iterator[str]:
    if not cell.controls.paired:
        yield (
            "Beware: not all runs of a seed began with the same weights and saw the same batches; "
            f"those that differ from {baseline_name(cell)} are set aside."
        )


def _set_aside(cell: Cell) -> Iterator[str]:
    others = cell.arms[1:]
    aside = sum(len(arm.set_aside) for arm in others)
    complete = sum(len(arm.against_none["accuracy"].seeds) for arm in others if arm.against_none)
    if aside:
        reasons = "; ".join(_reasons(arm) for arm in others if arm.set_aside)
        yield f"Set aside: {aside} of {plural(aside + complete, 'pair')}: {reasons}."


def _reasons(arm: ArmFound) -> str:
    seeds: dict[str, list[str]] = {}
    for seed, why in arm.set_aside.items():
        seeds.setdefault(why, []).append(str(seed))
    parts = [f"seed{'s' if len(of) > 1 else ''} {listed(of)} ({why})" for why, of in seeds.items()]
    return f"{arm.name}, {listed(parts)}"


def _tuned(cell: Cell) -> Iterator[str]:
    own = [arm for arm in cell.arms if arm.kind != "control" and not arm.like]
    trials = {arm.name: len(arm.tuning.trials) for arm in own if arm.tuning}
    if trials:
        each = listed([f"{name} ({plural(count, 'trial')})" for name, count in trials.items()])
        yield f"Tuned on validation images: {each}."
    failed = {arm.name: sum(trial.score is None for trial in arm.tuning.trials) for arm in own if arm.tuning}
    for name, count in failed.items():
        if count:
            kept = " and has the settings that were written" if count == trials[name] else ""
            yield f"Beware: {name} had {plural(count, 'trial')} without a score, as runs failed{kept}."
    if trials and (len(set(trials.values())) > 1 or len(trials) < len(own)):
        yield "Beware: the arms did not have the same tuning budget; one with more trials has an advantage."
    if edge := [f"{arm.name} ({listed(arm.tuning.at_edge)})" for arm in own if arm.tuning and arm.tuning.at_edge]:
        yield f"Chosen at the edge of what was tried, so that a better value may lie outside: {listed(edge)}."
    for like in dict.fromkeys(arm.like for arm in cell.arms if arm.like and arm.kind != "control"):
        taking = [arm.name for arm in cell.arms if arm.like == like and arm.kind != "control"]
        yield f"Not tuned, but with the settings that were chosen for {like}: {listed(taking)}."


def _fixed(cell: Cell) -> Iterator[str]:
    regularized = [arm for arm in cell.arms if arm.kind not in ("none", "control")]
    if fixed := [arm.name for arm in regularized if not arm.tuning and not arm.like]:
        yield (
            f"The rate of {listed(fixed)} was fixed beforehand, not tuned: "
            "nothing here says which regularizer is best at its best rate."
        )


def _images(cell: Cell) -> Iterator[str]:
    if compared(cell):
        yield (
            f"The seeds differ in {listed(cell.varied)}; "
            f"the {plural(cell.test_images, 'test image')} are the same in all. This is one data set and model."
        )
    yield from cell.remarks


def _idle(cell: Cell) -> Iterator[str]:
    for arm in cell.arms:
        if arm.kind in ("none", "control") or arm.rate_at_end is None:
            continue
        if arm.asked == 0:
            yield f"Beware: {arm.name} was asked to drop nothing in the epochs that were measured."
        elif arm.ramp_end is None:
            yield f"Beware: the rate of {arm.name} never reached its target; it ended at {arm.rate_at_end:.3g}."


def _timed(cell: Cell) -> Iterator[str]:
    times = [arm.time.median for arm in cell.arms if arm.kind == "control" and arm.time]
    if times:
        yield (
            f"Time: the controls, which do the work of {baseline_name(cell)}, took {min(times):.2f} to "
            f"{max(times):.2f} of its time; what is as close to 1 as that is noise."
        )
