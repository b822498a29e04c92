"""Merge the records of all shards into RECIPE.json and RECIPE.md."""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers

import peers
from families import tiny

STATUSES = {
    "passed": "all checks passed",
    "batch": 'all checks passed with `mode="batch"`; the default skips layers with a warning, or raises an error',
    "partial": "the sites are right; the recipe warns that it skips other layers",
    "refused": "the recipe raises an error",
    "failed": "a check failed",
    "crashed": "the process ended",
    "no layers": "no layer mixes tokens",
    "not built": "the tiny config gives no model",
    "not run": "no inputs found that call all layers",
}
COVERED = ("passed", "batch")
COUNTED = (*COVERED, "partial", "refused", "failed", "crashed")


def merge(found: Sequence[dict[str, Any]], recipe: str, hardware: str = "") -> dict[str, Any]:
    """Merge the records in the order of the names, and add totals, hardware and versions."""
    order = {name: index for index, name in enumerate(tiny.names())}
    counts = Counter(record["status"] for record in found)
    machine = peers.machine_info()
    versions = {key: machine["versions"][key] for key in ("hookdrop", "torch")}
    return {
        "recipe": recipe,
        "hardware": hardware or machine["cpu"],
        "versions": {"python": platform.python_version(), **versions, "transformers": transformers.__version__},
        "totals": {status: counts[status] for status in STATUSES},
        "families": sorted(found, key=lambda record: order.get(record["name"], len(order))),
    }


def write(out: Path, results: dict[str, Any]) -> None:
    """Write RECIPE.json, with one line for each family, and RECIPE.md."""
    head = {key: value for key, value in results.items() if key != "families"}
    rows = ",\n  ".join(json.dumps(record, allow_nan=False) for record in results["families"])
    text = json.dumps(head, indent=1).removesuffix("\n}")
    (out / f"{results['recipe']}.json").write_text(f'{text},\n "families": [\n  {rows}\n ]\n}}\n')
    (out / f"{results['recipe']}.md").write_text(markdown(results))


def coverage(totals: dict[str, int]) -> tuple[int, int]:
    """Return the number of families that the recipe covers, and of those that have layers and run without hooks."""
    return sum(totals[status] for status in COVERED), sum(totals[status] for status in COUNTED)


def summary(results: dict[str, Any]) -> str:
    """Summarize the coverage in one sentence."""
    covered, counted = coverage(results["totals"])
    share = covered / max(counted, 1)
    outside = sum(results["totals"].values()) - counted
    version = results["versions"]["transformers"]
    return (
        f"{results['recipe']} covers {covered} of {counted} families of transformers {version} ({share:.1%}) that have "
        f"layers with attention or another mixer and run without hooks. {outside} families are not counted."
    )


def markdown(results: dict[str, Any]) -> str:
    """Format the report."""
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    table = [f"| {status} | {results['totals'][status]} | {text} |" for status, text in STATUSES.items()]
    parts = [
        f"# `{results['recipe']}` in every family of transformers",
        f"Output of `python benchmarks/transformers_zoo.py --recipe {results['recipe']}` on {results['hardware']}; "
        f"{versions}.",
        summary(results),
        "\n".join(["| status | families | meaning |", "|---|---|---|", *table]),
        *(_section(results, status) for status in STATUSES if status != "passed"),
        "## Passed\n\n" + ", ".join(r["name"] for r in results["families"] if r["status"] == "passed") + ".",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _section(results: dict[str, Any], status: str) -> str:
    found = [record for record in results["families"] if record["status"] == status]
    title = f"## {status.capitalize()}: {len(found)}\n\n"
    if not any("error" in record for record in found):
        return title + ", ".join(record["name"] for record in found) + "." if found else ""
    rows = [f"| {record['name']} | {record.get('error', '').replace('|', chr(92) + '|')} |" for record in found]
    return title + "| family | reason |\n|---|---|\n" + "\n".join(rows)
