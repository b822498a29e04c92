"""From the lines of all shards to one table and one JSON."""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peers
from models.catalog import Name

STATUSES = ("passed", "failed", "crashed", "clean", "meta")
BAD = ("failed", "crashed")
_MEANING = {
    "passed": "whole check passed",
    "failed": "failed",
    "crashed": "process ended",
    "clean": "does not run by itself",
    "meta": "on the meta device only",
    "left": "not yet run",
}


def lines(path: Path) -> list[dict[str, Any]]:
    """A shard's lines; the last may have been cut off."""
    found = []
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return found


def records(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """The last record of each model, from all shards in these folders."""
    found: dict[str, dict[str, Any]] = {}
    for folder in folders:
        for path in sorted(folder.glob("shard-*.jsonl")):
            found |= {line["name"]: line for line in lines(path) if "name" in line}
    return list(found.values())


def merge(folders: Sequence[Path], names: Sequence[Name], hardware: str = "") -> dict[str, Any]:
    """All records in the order of `names`, and what they were made with."""
    order = {str(name): place for place, name in enumerate(names)}
    found = sorted(records(folders), key=lambda record: order.get(record["name"], len(order)))
    facts = peers.facts()
    return {
        "hardware": hardware or facts["cpu"],
        "versions": {"python": platform.python_version()} | facts["versions"],
        "kernel": facts["kernel"],
        "families": by_family(names, found),
        "totals": {
            library: totals([r for r in found if r["name"].startswith(library)]) for library in _libraries(names)
        },
        "models": found,
    }


def _libraries(names: Sequence[Name]) -> list[str]:
    return list(dict.fromkeys(name.library for name in names))


def totals(found: Sequence[dict[str, Any]]) -> dict[str, int]:
    """How many models of each status."""
    counts = Counter(record["status"] for record in found)
    return {status: counts[status] for status in STATUSES}


def by_family(names: Sequence[Name], found: Sequence[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """The same by family, with the number of names."""
    sizes = Counter(name.family for name in names)
    return {
        family: {"names": sizes[family], **totals([record for record in found if record["family"] == family])}
        for family in sorted(sizes, key=lambda family: ("." in family, family))
    }


def write(out: Path, results: dict[str, Any]) -> None:
    """zoo.json and zoo.md in the folder `out`; a model a line in both."""
    out.mkdir(parents=True, exist_ok=True)
    head = {key: value for key, value in results.items() if key != "models"}
    models = ",\n  ".join(json.dumps(record, allow_nan=False) for record in results["models"])
    text = json.dumps(head, indent=1, allow_nan=False).removesuffix("\n}")
    (out / "zoo.json").write_text(f'{text},\n "models": [\n  {models}\n ]\n}}\n')
    (out / "zoo.md").write_text(in_full(results))


def in_short(results: dict[str, Any]) -> str:
    """How many models and families ran the whole check."""
    told = []
    for library, counts in results["totals"].items():
        names = sum(row["names"] for row in _rows(results, library).values())
        whole = [row["passed"] > 0 for row in _rows(results, library).values()]
        others = [f"{counts[status]} {_MEANING[status]}" for status in STATUSES[1:] if counts[status]]
        if left := names - sum(counts.values()):
            others.append(f"{left} {_MEANING['left']}")
        told.append(
            f"{library}: {counts['passed']} of {names} models ({counts['passed'] / names:.1%}) and {sum(whole)} of "
            f"{len(whole)} families passed the whole check" + "".join(f"; {other}" for other in others) + "."
        )
    return "\n".join(told)


def _rows(results: dict[str, Any], library: str) -> dict[str, dict[str, int]]:
    theirs = library == "torchvision"
    return {name: row for name, row in results["families"].items() if name.startswith("torchvision.") == theirs}


def in_full(results: dict[str, Any]) -> str:
    """The whole report as Markdown."""
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    parts = [
        "# Every timm and torchvision model",
        f"From `python benchmarks/zoo.py` on {results['hardware']}; {versions}.",
        in_short(results).replace("\n", "\n\n"),
        "The whole check: on real values, at the smallest input that a model takes, `plan` and `inject` change nothing "
        "but hooks, eval output is bit-identical with hooks, every site fires, a training step drops what was asked "
        "for, within five standard errors and five blocks, and gives the same parameters gradients as without hooks; "
        "`remove` changes no bit of parameters, buffers and eval output, and leaves no hook.",
        _numbers(results["models"]),
        *(_listed(results["models"], status) for status in STATUSES[1:]),
        *(f"## Families of {library}\n\n{_table(_rows(results, library))}" for library in results["totals"]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _numbers(found: Sequence[dict[str, Any]]) -> str:
    """What was hooked, and which warnings were given, over all models."""
    sites: Counter[str] = Counter()
    warned: Counter[str] = Counter()
    problems: Counter[str] = Counter()
    for record in found:
        sites.update(record.get("sites", {}))
        warned.update(record.get("warnings", {}).keys())
        problems.update(set(record.get("problems", ())))
    told = [f"Sites: {', '.join(f'{count:,} {kind}' for kind, count in sites.most_common())}." if sites else ""]
    if trained := [record for record in found if "dropped" in record]:
        elements = sum(record["elements"] for record in trained)
        dropped = sum(record["dropped"] * record["elements"] for record in trained) / elements
        asked = sum(record["asked"] * record["elements"] for record in trained) / elements
        told.append(
            f"In one training step of each of {len(trained):,} models {dropped:.4%} of {elements:,} elements were "
            f"dropped; {asked:.4%} were asked for."
        )
    not_finite = sum(record.get("finite") is False for record in found)
    told.append(
        f"With random weights {not_finite} models give NaN or infinity: compared all the same." if not_finite else ""
    )
    for title, counts in (("Warnings of `plan` and `inject`", warned), ("Problems that `check` named", problems)):
        rows = "\n".join(f"| {_cell(kind)} | {count} |" for kind, count in counts.most_common())
        told.append(f"{title}, by the number of models:\n\n| | models |\n|---|---|\n{rows}" if rows else "")
    return "\n\n".join(part for part in told if part)


def _listed(found: Sequence[dict[str, Any]], status: str) -> str:
    rows = [
        f"| {record['name']} | {record.get('step', '')} | {_cell(record.get('error', ''))} |"
        for record in found
        if record["status"] == status
    ]
    title = _MEANING[status].capitalize()
    return f"## {title}: {len(rows)}\n\n| model | step | why |\n|---|---|---|\n" + "\n".join(rows) if rows else ""


def _table(rows: dict[str, dict[str, int]]) -> str:
    head = ["family", "names", *(_MEANING[status] for status in STATUSES)]
    body = [[name, *map(str, row.values())] for name, row in rows.items()]
    body.append(["**all**", *(str(sum(row[key] for row in rows.values())) for key in ("names", *STATUSES))])
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *body))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
