"""The sentences of a report: the verdict, the findings and the caveats, limited to what the results support."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from comparison.analysis.inference import LEVEL, more_than_chance
from comparison.analysis.pairs import NOT_RUN
from comparison.analysis.schema import DECIMALS, METRICS, SHORT, Cell, Difference, Metric

UNITS: dict[Metric, str] = {"accuracy": "points of accuracy", "nll": "nats", "ece": "points of ECE"}
_AGAINST = ("is better than", "is worse than", "cannot be told apart from")


def verdict(cell: Cell) -> str:
    """One sentence: the best and the worst arm in accuracy, and what cannot be told apart."""
    none, where = f"“{cell.arms[0].name}”", f"On “{cell.title}”,"
    found = {name: of_arm["accuracy"] for name, of_arm in compared(cell).items()}
    if not found:
        return f"{where} no regularizer has a complete pair with {none}."
    best, *_, worst = ranked = sorted(found, key=lambda name: -found[name].mean) * (2 if len(found) == 1 else 1)
    high, low = (f"“{name}” ({interval_text(found[name], 'accuracy')})" for name in (best, worst))
    unclear = [name for name in ranked if not found[name].clear]
    if len(found) == 1:
        return f"{where} {high} {_against(found[best])} {none} in accuracy."
    if len(unclear) == len(found):
        return (
            f"{where} no regularizer can be told apart from {none} in accuracy; the mean difference is highest with "
            f"{high} and lowest with {low}."
        )
    text = f"{where} accuracy against {none} is highest with {high} and lowest with {low}"
    same: list[str] = []
    if found[best].mean <= 0:
        text = f"{where} accuracy is highest with {none}; the closest is {high} and the lowest {low}"
    else:
        pairs = [pair for pair in cell.between if pair.metric == "accuracy" and best in (pair.a, pair.b)]
        same = [pair.b if pair.a == best else pair.a for pair in pairs if not pair.difference.clear]
    parts = [f"{_most(unclear, ranked)} cannot be told apart from {none}"] if unclear else []
    others = [name for name in ranked if name != best]
    parts += [f"{_most(same, others)} cannot be told apart from “{best}”"] if same else []
    return "; ".join([text, *parts]) + "."


def findings(cell: Cell) -> Iterator[str]:
    """What to know besides the verdict: each metric, with Holm's correction and with other test images."""
    none = cell.arms[0].name if cell.arms else "none"
    if waiting := sum(why.split(": ")[-1] == NOT_RUN for arm in cell.arms[1:] for why in arm.set_aside.values()):
        yield (
            f"Not finished: {plural(waiting, 'pair')} missing. The number of seeds was fixed in advance; stopping "
            "early based on the results would make intervals and p too small."
        )
    if not cell.controls.paired:
        yield (
            "Warning: some runs did not have the same initial weights and batches as the others of their seed; "
            f"those that differ from {none} are excluded."
        )
    for metric in METRICS if compared(cell) else ():
        found = {name: of_arm[metric] for name, of_arm in compared(cell).items()}
        sides = {text: [name for name, one in found.items() if _against(one, metric) == text] for text in _AGAINST}
        parts = [f"{names(of)} {text} {none}" for text, of in sides.items() if of]
        holm = [f"{name} (p = {one.p_holm:.2g})" for name, one in found.items() if one.p_holm <= LEVEL]
        differ = f"these differ at 5 %: {join(holm)}" if holm else "none differs at 5 %"
        tests = plural(len(found), "test")
        yield f"{SHORT[metric]}: {'; '.join(parts)}. After Holm's correction over {tests}, {differ}."
        if lost := [name for name, one in found.items() if one.clear and one.low_images <= 0 <= one.high_images]:
            yield f"{SHORT[metric]}: with other test images, {names(lost)} might not differ from {none}."
        if pairs := [pair.difference for pair in cell.between if pair.metric == metric]:
            clear, corrected = sum(one.clear for one in pairs), sum(one.p_holm <= LEVEL for one in pairs)
            yield (
                f"{SHORT[metric]}: {clear} of {plural(len(pairs), 'pair')} of regularizers can be told apart, "
                f"{corrected} after Holm's correction."
            )


def caveats(cell: Cell) -> list[str]:
    """What limits the findings: power, excluded runs, tuning and data."""
    return [sentence for part in (_power, _set_aside, _tuned, _rates, _images) for sentence in part(cell)]


def _against(found: Difference, metric: Metric = "accuracy") -> str:
    return _AGAINST[(0 if found.better(metric) else 1) if found.clear else 2]


def _power(cell: Cell) -> Iterator[str]:
    against, none = compared(cell), cell.arms[0].name
    among = [pair.difference for pair in cell.between if pair.metric == "accuracy"]
    families = {f"from {none}": [of["accuracy"] for of in against.values()], "between regularizers": among}
    if count := len(METRICS) * sum(map(len, families.values())):
        yield (
            f"Verdicts are based on {plural(count, 'uncorrected 95 % interval')} (bootstrap over seeds): "
            f"without any true differences, about {0.05 * count:.2g} of them would still exclude 0."
        )
    yield from (_smallest_p(name, family) for name, family in families.items() if family)
    sizes = {metric: sorted(of[metric].mde or 0 for of in against.values() if of[metric].mde) for metric in METRICS}
    if known := [f"{_range(sizes[metric], DECIMALS[metric])} {UNITS[metric]}" for metric in METRICS if sizes[metric]]:
        half = max(one.seeds_for_half or 0 for of in against.values() for one in of.values())
        yield (
            f"Differences from {none} below {join(known)} are detected with less than 80 % power (paired t test at "
            f"5 %, observed spread, depending on the arm); half of that requires about {half} pairs. Arms that cannot "
            "be told apart are not necessarily equal."
        )


def _smallest_p(name: str, family: Sequence[Difference]) -> str:
    pairs, smallest = max(len(one.values) for one in family), min(one.p_smallest for one in family)
    corrected = min(1.0, len(family) * smallest)
    text = f"With {plural(pairs, 'pair')}, the smallest possible p of the permutation test is {smallest:.2g}"
    text += f", or {corrected:.2g} after Holm's correction over {plural(len(family), 'difference')} {name}."
    if corrected > LEVEL:
        needed = math.ceil(math.log2(2 * len(family) / LEVEL) - 1e-9)  # 2 / 2**n is the smallest p of n pairs
        text += f" No difference can be significant at 5 %; this requires at least {needed} pairs."
    return text


def controls(cell: Cell) -> list[tuple[str, bool | None, str]]:
    """Each control: the question, whether it holds (None: not measured), and the numbers behind it."""
    found, none = cell.controls, cell.arms[0].name if cell.arms else "none"
    chance = found.none_none
    outside = [f"{_inside(metric)} {interval_text(one, metric)}" for metric, one in (chance or {}).items() if one.clear]
    return [
        (
            f"Is the arm with p = 0 injected (A/A) bit-identical to {none}, in weights and outputs?",
            found.aa_equal == found.aa_seeds if found.aa_seeds else None,
            f" ({found.aa_equal} of {plural(found.aa_seeds, 'seed')})",
        ),
        (
            f"Is the difference between {none} with other seeds and {none} consistent with chance?",
            None if chance is None else not more_than_chance(chance),
            f" (after Holm's correction; 0 is outside the 95 % interval of {join(outside)})" if outside else "",
        ),
        ("Did all arms of a seed have the same initial weights and batches?", found.paired, ""),
        (
            "Were state_dict, repr and eval output bit-identical with hooks and after remove()?",
            found.unchanged == found.hooked if found.hooked else None,
            f" ({found.unchanged} of {plural(found.hooked, 'run')})",
        ),
    ]


def control_sentences(cell: Cell) -> Iterator[str]:
    """The answers to the questions of the controls."""
    for question, holds, numbers in controls(cell):
        answer = "not measured" if holds is None else f"{'yes' if holds else 'no'}{numbers}"
        yield f"{'Warning' if holds is False else 'Control'}: {question} {answer}."


def _set_aside(cell: Cell) -> Iterator[str]:
    others = cell.arms[1:]
    aside = sum(len(arm.set_aside) for arm in others)
    complete = sum(len(arm.against_none["accuracy"].seeds) for arm in others if arm.against_none)
    if aside:
        reasons = "; ".join(f"{arm.name}, {_reasons(arm.set_aside)}" for arm in others if arm.set_aside)
        yield f"Excluded: {aside} of {plural(aside + complete, 'pair')}: {reasons}."


def _reasons(set_aside: Mapping[int, str]) -> str:
    seeds: dict[str, list[str]] = {}
    for seed, why in set_aside.items():
        seeds.setdefault(why, []).append(str(seed))
    return join([f"seed{'s' if len(of) > 1 else ''} {join(of)} ({why})" for why, of in seeds.items()])


def _tuned(cell: Cell) -> Iterator[str]:
    arms = [arm for arm in cell.arms if arm.kind != "control"]
    own = [arm for arm in arms if not arm.like]
    trials = {arm.name: len(arm.tuning.trials) for arm in own if arm.tuning}
    if trials:
        each = [f"{name} ({plural(count, 'trial')})" for name, count in trials.items()]
        yield f"Tuned on validation images: {join(each)}."
    for arm in own:
        if arm.tuning and (failed := sum(trial.score is None for trial in arm.tuning.trials)):
            untuned = "" if arm.tuning.chosen else ", and uses its configured settings"
            yield f"Warning: {arm.name} had {plural(failed, 'trial')} without a score because of failed runs{untuned}."
    if trials and (len(set(trials.values())) > 1 or len(trials) < len(own)):
        yield "Warning: the arms did not have the same tuning budget; more trials are an advantage."
    if edge := [f"{arm.name} ({join(arm.tuning.at_edge)})" for arm in own if arm.tuning and arm.tuning.at_edge]:
        yield f"Tuned to the edge of the search space, so a better value may lie outside: {join(edge)}."
    for like in dict.fromkeys(arm.like for arm in arms if arm.like):
        taking = [arm.name for arm in arms if arm.like == like]
        yield f"Not tuned, but with the tuned settings of {like}: {join(taking)}."
    if fixed := [arm.name for arm in own if not arm.tuning and arm.kind not in ("none", "reference")]:
        yield (
            f"The rate of {join(fixed)} was fixed in advance, not tuned: "
            "the results do not show which regularizer is best at its best rate."
        )


def _rates(cell: Cell) -> Iterator[str]:
    for arm in cell.arms:
        if arm.kind not in ("none", "control") and arm.rate_at_end is not None:
            if arm.asked == 0:
                yield f"Warning: the rate of {arm.name} was 0 in the measured epochs."
            elif arm.ramp_end is None:
                yield f"Warning: the rate of {arm.name} never reached its target; it ended at {arm.rate_at_end:.3g}."
    if times := [arm.time.median for arm in cell.arms if arm.kind == "control" and arm.time]:
        yield (
            f"Time: the controls do the same work as {cell.arms[0].name} and took {min(times):.2f} to {max(times):.2f} "
            "times as long; ratios this close to 1 are noise."
        )


def _images(cell: Cell) -> Iterator[str]:
    if compared(cell):
        yield (
            f"The seeds differ in {join(cell.varied)}; all use the same {plural(cell.test_images, 'test image')}. "
            "This is one dataset and model."
        )
    yield from cell.remarks


def compared(cell: Cell) -> dict[str, dict[Metric, Difference]]:
    """The differences from none, without controls and references."""
    return {arm.name: arm.against_none for arm in cell.arms if arm.compared and arm.against_none}


def interval_text(found: Difference, metric: Metric) -> str:
    """Mean and interval over seeds, such as `+1.25 [+0.50, +2.00]`; a single pair has no interval."""
    mean, low, high = (f"{value:+.{DECIMALS[metric]}f}" for value in (found.mean, found.low, found.high))
    return f"{mean} [{low}, {high}]" if len(found.values) > 1 else f"{mean} [1 pair]"


def names(arms: Sequence[str]) -> str:
    """Quoted names, such as `“a”, “b” and “c”`."""
    return join([f"“{name}”" for name in arms])


def _most(arms: Sequence[str], of: Sequence[str]) -> str:
    """Quoted names, or the exceptions if there are few and the names are many."""
    missing = [name for name in of if name not in arms]
    if len(arms) < 4 or len(missing) > 2:
        return names(arms)
    return f"all others but {names(missing)}" if missing else "all others"


def join(items: Sequence[str]) -> str:
    """Join items as in `a, b and c`."""
    return " and ".join(filter(None, [", ".join(items[:-1]), *items[-1:]]))


def plural(count: int, word: str) -> str:
    """Format a count, such as `1 pair` or `2 pairs`."""
    return f"{count} {word}{'' if count == 1 else 's'}"


def _range(values: Sequence[float], decimals: int) -> str:
    return " to ".join(dict.fromkeys(f"{value:.{decimals}f}" for value in (values[0], values[-1])))


def _inside(metric: Metric) -> str:
    """The name of a metric within a sentence."""
    return SHORT[metric].lower() if metric == "accuracy" else SHORT[metric]
