"""What happens before the first run: check data, models and layers; count runs, and estimate power."""

from comparison.analysis.inference import detectable, pairs_needed, smallest_p
from comparison.analysis.schema import LEVEL
from comparison.analysis.text import plural
from comparison.data.catalog import check
from comparison.engines.store import Store
from comparison.run.run_setup import RunSetup, at_final_rate, prepare, steps_of
from comparison.run.training import batch_of, step
from comparison.spec.config import NONE
from comparison.spec.run_spec import ConfigError
from comparison.spec.study import Study


def check_study(study: Study) -> tuple[dict[str, list[str]], dict[str, str], list[str]]:
    """Load every dataset, build every model, plan every arm, and try a training step on two images.

    Return notes on the data by cell, such as that all seeds share their images, the plans of the arms in the first, and
    the sizes of each cell.
    """
    remarks, plans, sizes, errors = dict[str, list[str]](), dict[str, str](), list[str](), list[str]()
    for data, model in study.config.cells():
        where = f"{model.name} on {data.name}"
        try:
            run = study.run(data, model, NONE, 0)
            remarks[run.cell] = check(data, study.seeds)
            sizes.append(f"{where}: {_sizes(prepare(run))}")
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
                    plans.setdefault(arm.name, str(setup.plan))
    if errors:
        raise ConfigError("\n\n".join([*errors, "Nothing was trained."]))
    return remarks, plans, sizes


def _sizes(setup: RunSetup) -> str:
    train, test = len(setup.split.train), len(setup.split.test)
    images = f"{train} training images, {steps_of(setup.run, train)} optimizer steps, {test} test images"
    return f"{images}: one of these is {100 / test:.2g} points of accuracy."


def _text(where: str, error: Exception) -> str:
    """The message without its last line, which the combined message has once."""
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    text = f"{where}: {kind}{error}".removesuffix("\nNothing was trained.")
    return text.removesuffix("\nNo hook was placed; the model is unchanged.")


def outlook(study: Study, store: Store) -> str:
    """How many runs are missing, and which differences this number of pairs can show."""
    known, lines = store.records(), list[str]()
    tuning = [run for search in study.searches().values() for run in search.runs()]
    finals = [run for entry in study.entries({}) for run in entry.runs.values()]
    for title, wanted in (("tuning runs", {run.key for run in tuning}), ("final runs", {run.key for run in finals})):
        stored = len(wanted & known.keys())
        lines += [f"{title}: {len(wanted) - stored} to train; {stored} in the store"] if wanted else []
    pairs, arms = study.config.seeds, sum(arm.kind not in ("none", "probe") for arm in study.arms)
    smallest = min(1.0, arms * smallest_p(pairs))
    lines.append(
        f"{plural(pairs, 'pair')} detect differences of {detectable(pairs):.2g} standard deviations of the paired "
        f"differences with 80 % power: {detectable(pairs):.2g} points of accuracy if the pairs vary by 1 point. The "
        f"smallest p after Holm's correction over {plural(arms, 'arm')} is {smallest:.2g}."
    )
    if smallest > LEVEL:
        lines.append(f"No difference can be significant at 5 %: use `seeds: {pairs_needed(arms)}` or more.")
    return "\n".join(lines)
