"""What happens before the first run: check data, models and layers; estimate runs, duration and power."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import partial

import torch

from comparison.analysis.inference import detectable, pairs_needed, smallest_p
from comparison.analysis.schema import LEVEL
from comparison.analysis.text import plural
from comparison.data.catalog import check
from comparison.engines.store import Store
from comparison.run.run_setup import at_final_rate, prepare, steps_of
from comparison.run.training import batch_of, step
from comparison.spec.config import NONE
from comparison.spec.run_spec import ConfigError, Run
from comparison.spec.study import Study
from timing import time_call

TIMED_STEPS = 3
START_SECONDS = 8.0
"""Start-up time of a worker (imports), in seconds, as measured on two cores."""


@dataclass
class Findings:
    """Notes on the data by cell, such as the number of skipped images, and the plan of each arm in the first cell."""

    remarks: dict[str, list[str]]
    plans: dict[str, str]


def check_study(study: Study) -> Findings:
    """Load every dataset, build every model, plan every arm, and try a training step on two images."""
    found, errors = Findings({}, {}), list[str]()
    for data, model in study.config.cells():
        where = f"{model.name} on {data.name}"
        try:
            run = study.run(data, model, NONE, 0)
            found.remarks[run.cell] = check(data, study.seeds)
            prepare(run)
        except Exception as error:  # of any library
            errors.append(_text(where, error))
            continue
        for arm in study.arms:
            try:
                setup = at_final_rate(study.run(data, model, arm, study.config.first_seed))
                x_BCHW, y_B = batch_of(setup)
                step(setup, x_BCHW[:2], y_B[:2])
            except Exception as error:
                errors.append(_text(f"{arm.name} on {where}", error))
            else:
                if setup.plan:
                    found.plans.setdefault(arm.name, str(setup.plan))
    if errors:
        raise ConfigError("\n\n".join([*errors, "Nothing was trained."]))
    return found


def _text(where: str, error: Exception) -> str:
    """The message without its last line, which the combined message has once."""
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    text = f"{where}: {kind}{error}".removesuffix("\nNothing was trained.")
    return text.removesuffix("\nNo hook was placed; the model is unchanged.")


def outlook(study: Study, store: Store, workers: int) -> str:
    """How many runs are missing, how long they take, and which differences this number of pairs can show.

    Tuning and final runs start workers, and last as long as their longest run or longer.
    """
    known, measured, lines = store.records(), dict[str, float](), list[str]()
    tuning = [run for search in study.searches().values() for run in search.runs()]
    finals = [run for entry in study.entries({}) for run in entry.runs.values()]
    minutes = study.config.timing / 60
    for title, runs in (("tuning runs", tuning), ("final runs", finals)):
        wanted = {run.key: run for run in runs}
        missing = [run for key, run in wanted.items() if key not in known]
        for run in missing:
            if run.cell not in measured:
                measured[run.cell] = estimate_seconds(run.model_copy(update={"arm": NONE}))
        seconds = [measured[run.cell] for run in missing]
        minutes += (START_SECONDS + max(*seconds, sum(seconds) / workers, 0.0)) / 60 if seconds else 0.0
        each = f", {statistics.fmean(seconds):.1f} s each" if seconds else ""
        lines += [f"{title}: {len(missing)} to train{each}; {len(wanted) - len(missing)} in the store"] if runs else []
    lines.append(f"About {minutes:.0f} minutes with {plural(workers, 'worker')}.")
    pairs, arms = study.config.seeds, sum(arm.kind not in ("none", "probe") for arm in study.arms)
    smallest = min(1.0, arms * smallest_p(pairs))
    lines.append(
        f"{plural(pairs, 'pair')} detect differences of {detectable(pairs):.2g} standard deviations of the paired "
        f"differences with 80 % power: {detectable(pairs):.2g} points of accuracy if the pairs vary by 1 point. The "
        f"smallest p after Holm's correction over {plural(arms, 'arm')} is {smallest:.2g}."
    )
    if smallest > LEVEL:
        lines.append(f"No difference can be significant at 5 %: use --seeds {pairs_needed(arms)} or more.")
    return "\n".join(lines)


def estimate_seconds(run: Run) -> float:
    """Extrapolate the duration of a run from a few steps and one validation."""
    torch.set_num_threads(1)
    setup, device = prepare(run), torch.device(run.device).type
    setup.forward.train()
    job = partial(step, setup, *batch_of(setup))
    job()
    each_step, some = time_call(job, TIMED_STEPS, device)[0], setup.split.validation[:256]
    each_image = time_call(partial(setup.logits, some), 1, device)[0] / len(some)
    steps = min(run.max_steps or 10**12, steps_of(run, len(setup.split.train)))
    return each_step * steps + each_image * len(setup.split.test)
