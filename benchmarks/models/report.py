"""Merge the records of all shards into zoo.json and zoo.md."""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peers
from models.catalog import Name

STATUSES = ("passed", "failed", "crashed", "refused", "clean", "meta")
FAILURES = ("failed", "crashed")
_LABELS = {
    "passed": "passed",
    "failed": "failed",
    "crashed": "crashed",
    "refused": "refused by the recipe",
    "clean": "not runnable",
    "meta": "checked on the meta device only",
    "pending": "not yet checked",
}


def lines(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a shard, and skip a truncated last line."""
    found = []
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return found


def records(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the last record of each model from all shards in these folders."""
    found: dict[str, dict[str, Any]] = {}
    for folder in folders:
        for path in sorted(folder.glob("shard-*.jsonl")):
            found |= {line["name"]: line for line in lines(path) if "name" in line}
    return list(found.values())


def merge(folders: Sequence[Path], names: Sequence[Name], hardware: str = "", recipe: str = "") -> dict[str, Any]:
    """Merge all records in the order of `names`, and add totals, hardware and versions."""
    order = {str(name): index for index, name in enumerate(names)}
    found = sorted(records(folders), key=lambda record: order.get(record["name"], len(order)))
    machine = peers.machine_info()
    return {
        **({"recipe": recipe} if recipe else {}),
        "hardware": hardware or machine["cpu"],
        "versions": {"python": platform.python_version()} | machine["versions"],
        "kernel": machine["kernel"],
        "families": family_totals(names, found),
        "totals": {
            library: totals([r for r in found if r["name"].startswith(library)]) for library in _libraries(names)
        },
        "models": found,
    }


def _libraries(names: Sequence[Name]) -> list[str]:
    return list(dict.fromkeys(name.library for name in names))


def totals(found: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Count the models of each status."""
    counts = Counter(record["status"] for record in found)
    return {status: counts[status] for status in STATUSES}


def family_totals(names: Sequence[Name], found: Sequence[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Count the models of each status by family, with the number of names."""
    sizes = Counter(name.family for name in names)
    return {
        family: {"names": sizes[family], **totals([record for record in found if record["family"] == family])}
        for family in sorted(sizes, key=lambda family: ("." in family, family))
    }


def write(out: Path, results: dict[str, Any]) -> None:
    """Write zoo.json and zoo.md to the folder `out`, one line per model."""
    out.mkdir(parents=True, exist_ok=True)
    head = {key: value for key, value in results.items() if key != "models"}
    models = ",\n  ".join(json.dumps(record, allow_nan=False) for record in results["models"])
    text = json.dumps(head, indent=1, allow_nan=False).removesuffix("\n}")
    (out / "zoo.json").write_text(f'{text},\n "models": [\n  {models}\n ]\n}}\n')
    (out / "zoo.md").write_text(markdown(results))


def summary(results: dict[str, Any]) -> str:
    """Summarize how many models and families passed the full check, one line per library."""
    sentences = []
    for library, counts in results["totals"].items():
        rows = _rows(results, library).values()
        names, families = sum(row["names"] for row in rows), sum(row["passed"] > 0 for row in rows)
        others = [f"{counts[status]} {_LABELS[status]}" for status in STATUSES[1:] if counts[status]]
        if pending := names - sum(counts.values()):
            others.append(f"{pending} {_LABELS['pending']}")
        sentences.append(
            f"{library}: {counts['passed']} of {names} models ({counts['passed'] / names:.1%}) and {families} of "
            f"{len(rows)} families passed the full check" + "".join(f"; {other}" for other in others) + "."
        )
    return "\n".join(sentences)


def _rows(results: dict[str, Any], library: str) -> dict[str, dict[str, int]]:
    is_torchvision = library == "torchvision"
    families = results["families"].items()
    return {name: row for name, row in families if name.startswith("torchvision.") == is_torchvision}


def markdown(results: dict[str, Any]) -> str:
    """Format the full report as Markdown."""
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    recipe = results.get("recipe")
    command = "python benchmarks/zoo.py" + (f" --recipe {recipe}" if recipe else "")
    parts = [
        f"# {recipe} in timm and torchvision" if recipe else "# Every timm and torchvision model",
        f"Output of `{command}` on {results['hardware']}; {versions}.",
        summary(results).replace("\n", "\n\n"),
        "The full check runs each model on real values at its smallest valid input. `plan` and `inject` add hooks and "
        "change nothing else; eval output is bit-identical with hooks; every site fires; a training step drops the "
        "requested fraction within five standard errors plus five blocks, and the same parameters have gradients as "
        "without hooks; `remove` leaves no hook and changes no bit of parameters, buffers or eval output.",
        _statistics(results["models"]),
        # A recipe refuses all transformers: the tables count them by family, and zoo.json has the reasons.
        *(_list_models(results["models"], status) for status in STATUSES[1:] if status != "refused"),
        *(f"## Families of {library}\n\n{_table(_rows(results, library))}" for library in results["totals"]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _statistics(found: Sequence[dict[str, Any]]) -> str:
    """Summarize sites, drop rates and warnings over all models."""
    sites: Counter[str] = Counter()
    warnings: Counter[str] = Counter()
    problems: Counter[str] = Counter()
    for record in found:
        sites.update(record.get("sites", {}))
        warnings.update(record.get("warnings", {}).keys())
        problems.update(set(record.get("problems", ())))
    paragraphs = [f"Sites: {', '.join(f'{count:,} {kind}' for kind, count in sites.most_common())}." if sites else ""]
    if trained := [record for record in found if "dropped" in record]:
        elements = sum(record["elements"] for record in trained)
        dropped = sum(record["dropped"] * record["elements"] for record in trained) / elements
        requested = sum(record["asked"] * record["elements"] for record in trained) / elements
        paragraphs.append(
            f"One training step of each of {len(trained):,} models dropped {dropped:.4%} of {elements:,} elements; "
            f"the requested rate is {requested:.4%}."
        )
    if not_finite := sum(record.get("finite") is False for record in found):
        paragraphs.append(f"With random weights, {not_finite} models return NaN or infinity; their bits are compared.")
    for title, counts in (("Warnings of `plan` and `inject`", warnings), ("Problems found by `check`", problems)):
        rows = "\n".join(f"| {_cell(kind)} | {count} |" for kind, count in counts.most_common())
        paragraphs.append(f"{title}:\n\n| message | models |\n|---|---|\n{rows}" if rows else "")
    return "\n\n".join(part for part in paragraphs if part)


def _list_models(found: Sequence[dict[str, Any]], status: str) -> str:
    rows = [
        f"| {record['name']} | {record.get('step', '')} | {_cell(record.get('error', ''))} |"
        for record in found
        if record["status"] == status
    ]
    title = _LABELS[status].capitalize()
    return f"## {title}: {len(rows)}\n\n| model | step | reason |\n|---|---|---|\n" + "\n".join(rows) if rows else ""


def _table(rows: dict[str, dict[str, int]]) -> str:
    head = ["family", "names", *(_LABELS[status] for status in STATUSES)]
    body = [[name, *map(str, row.values())] for name, row in rows.items()]
    body.append(["**all**", *(str(sum(row[key] for row in rows.values())) for key in ("names", *STATUSES))])
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *body))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
