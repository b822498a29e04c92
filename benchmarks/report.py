"""Merge the records of a sweep into a JSON file and a Markdown page."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import machine_info

STATUSES = {
    "passed": "all checks passed",
    "batch": 'all checks passed with `mode="batch"`; the default skips layers with a warning, or raises an error',
    "partial": "the sites are right; the recipe warns that it skips other layers",
    "meta": "too large for the memory limit: checked on the meta device only, without values",
    "differs": "the library's own sites or rates are others",
    "refused": "the recipe raises an error",
    "failed": "a check failed",
    "crashed": "the process ended",
    "no layers": "no layer mixes tokens, or none drops in the library's own model",
    "not built": "the tiny config gives no model",
    "not run": "not finished in time, or no inputs found that run and train the model without hooks",
}
COVERED, FAILURES = ("passed", "batch"), ("failed", "crashed")
NOT_COUNTED = ("no layers", "not built", "not run")
LONGEST_LIST = 100
"""Longer lists of models in families are left to the JSON file."""


@dataclass(frozen=True)
class Sweep:
    """What a sweep is about: the name of its files, the title of its page, its command, and what it checks."""

    name: str
    title: str
    command: str
    about: str = ""
    recipe: str = ""


def records(paths: Sequence[Path], name: str = "*") -> list[dict[str, Any]]:
    """Return the last record of each model in the journals of these folders, or in these JSON reports."""
    found: dict[str, dict[str, Any]] = {}
    for path in paths:
        for file in [path] if path.is_file() else sorted(path.glob(f"{name}-*-of-*.jsonl")):
            lines = json.loads(file.read_text())["models"] if file.suffix == ".json" else _lines(file)
            found |= {one["name"]: one for one in lines}
    return list(found.values())


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Read a journal; a process that ended while writing leaves half a line."""
    for text in path.read_text().splitlines():
        with suppress(json.JSONDecodeError):
            yield json.loads(text)


def merge(sweep: Sweep, paths: Sequence[Path], names: Sequence[str], hardware: str = "") -> dict[str, Any]:
    """Merge records in the order of `names`, with totals; hardware and versions are those of the first JSON report."""
    order = {name: index for index, name in enumerate(names)}
    found = sorted(records(paths, sweep.name), key=lambda record: order.get(record["name"], len(order)))
    machine = machine_info()
    head = {
        **({"recipe": sweep.recipe} if sweep.recipe else {}),
        "hardware": machine["cpu"],
        "versions": {"python": machine["python"], **machine["versions"]},
        "kernel": machine["kernel"],
    }
    for path in reversed([path for path in paths if path.suffix == ".json"]):
        head |= {key: value for key, value in json.loads(path.read_text()).items() if key in head}
    head |= {"hardware": hardware} if hardware else {}
    return {**head, "totals": totals(found), "models": found}


def totals(found: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Count the models of each status."""
    counts = Counter(record["status"] for record in found)
    return {status: counts[status] for status in STATUSES}


def coverage(counts: dict[str, int]) -> tuple[int, int]:
    """Return the number of models that passed, and of those that were built and ran without hooks."""
    return sum(counts[status] for status in COVERED), sum(counts[status] for status in set(counts) - {*NOT_COUNTED})


def write(out: Path, sweep: Sweep, results: dict[str, Any]) -> None:
    """Write the JSON file, with one line for each model, and the page."""
    head = json.dumps({**results, "models": []}, indent=1, allow_nan=False).removesuffix("[]\n}")
    rows = ",\n  ".join(json.dumps(record, allow_nan=False) for record in results["models"])
    (out / f"{sweep.name}.json").write_text(f"{head}[\n  {rows}\n ]\n}}\n")
    (out / f"{sweep.name}.md").write_text(markdown(sweep, results))


def summary(sweep: Sweep, results: dict[str, Any]) -> str:
    """Summarize the coverage, in one line for each library."""
    libraries = Counter(_library(record) for record in results["models"])
    return "\n\n".join(
        _coverage_of(library, [record for record in results["models"] if _library(record) == library])
        for library in libraries
    )


def _library(record: dict[str, Any]) -> str:
    return str(record["name"].partition(":")[0]) if ":" in record["name"] else ""


def _coverage_of(library: str, found: Sequence[dict[str, Any]]) -> str:
    counts = totals(found)
    covered, counted = coverage(counts)
    others = [f"{counts[status]:,} {status}" for status in STATUSES if counts[status] and status not in COVERED]
    text = f"{covered:,} of {counted:,} models ({covered / max(counted, 1):.1%}) passed"
    return "; ".join([f"{library}: {text}" if library else text, *others]) + "."


def markdown(sweep: Sweep, results: dict[str, Any]) -> str:
    """Format the page."""
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    found, counts = results["models"], totals(results["models"])
    parts = [
        f"# {sweep.title}",
        f"Output of `{sweep.command}` on {results['hardware']}; {versions}.",
        summary(sweep, results),
        sweep.about,
        *_statistics(found),
        _table(("status", "models", "meaning"), [(s, counts[s], text) for s, text in STATUSES.items() if counts[s]]),
        *(_list(sweep, status, [one for one in found if one["status"] == status]) for status in STATUSES),
        _families([one for one in found if "family" in one]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _statistics(found: Sequence[dict[str, Any]]) -> list[str]:
    """Summarize sites, drop rates, warnings and problems over the records that have them."""
    sites: Counter[str] = Counter()
    kinds: dict[str, Counter[str]] = {"warnings": Counter(), "problems": Counter()}
    for record in found:
        sites.update(record["sites"] if isinstance(record.get("sites"), dict) else {})
        for key, counter in kinds.items():
            counter.update(set(record.get(key, ())))
    paragraphs = [f"Sites: {', '.join(f'{count:,} {kind}' for kind, count in sites.most_common())}." if sites else ""]
    if trained := [record for record in found if "dropped" in record]:
        elements = sum(record["elements"] for record in trained)
        dropped, asked = (sum(one[key] * one["elements"] for one in trained) / elements for key in ("dropped", "asked"))
        paragraphs.append(
            f"One training step of each of {len(trained):,} models dropped {dropped:.4%} of {elements:,} elements; "
            f"the requested rate is {asked:.4%}."
        )
    if not_finite := sum(record.get("finite") is False for record in found):
        paragraphs.append(f"With random weights, {not_finite} models return NaN or infinity; their bits are compared.")
    texts = {"warnings": "Warnings of `plan` and `inject`", "problems": "Problems found by `check`"}
    tables = {key: _table(("message", "models"), counter.most_common()) for key, counter in kinds.items() if counter}
    return paragraphs + [f"{texts[key]}:\n\n{table}" for key, table in tables.items()]


def _list(sweep: Sweep, status: str, found: Sequence[dict[str, Any]]) -> str:
    """List the models of a status with their reasons; if there are families, their table counts those that passed."""
    in_families = bool(found) and "family" in found[0]
    if not found or (in_families and status == "passed"):
        return ""
    if in_families and len(found) > LONGEST_LIST:
        text = f"The last table counts them by family, and {sweep.name}.json has the reasons."
    elif any("error" in one for one in found):
        text = _table(("model", "reason"), [(one["name"], one.get("error", "")) for one in found])
    else:
        text = ", ".join(one["name"] for one in found) + "."
    return f"## {status.capitalize()}: {len(found)}\n\n{text}"


def _families(found: Sequence[dict[str, Any]]) -> str:
    """Return the number of models of each status by family."""
    shown = [status for status, count in totals(found).items() if count]
    by_family: dict[str, list[dict[str, Any]]] = {}
    for record in found:
        by_family.setdefault(record["family"], []).append(record)
    rows = [
        (family, len(records), *(totals(records)[status] for status in shown))
        for family, records in sorted(by_family.items(), key=lambda item: ("." in item[0], item[0]))
    ]
    return f"## Families\n\n{_table(('family', 'models', *shown), rows)}" if rows else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *([str(cell).replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
