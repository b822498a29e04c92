"""The first lines of the errors and warnings in the source of hookdrop, with `...` in place of values.

`python -m tests.support.messages` prints the messages of docs/errors/other.md: those that no case of the error catalog provokes.
"""

import ast
import re
from collections.abc import Iterator

from hookdrop.guards.messages import MESSAGES
from tests.support.error_catalog import messages
from tests.support.programs import ROOT


def first_lines() -> dict[str, str]:
    """Each text, with the place of one that raises or warns. A shorter one is made elsewhere, or is that of another error."""
    found = {_first_line(re.sub(r"\{.*?\}", "...", text)): f"messages.py: {kind}" for kind, text in MESSAGES.items()}
    for path in sorted((ROOT / "hookdrop").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            for text in map(_text, _raised(node)):
                found.setdefault(_first_line(text), f"{path.relative_to(ROOT)}:{node.lineno}")  # type: ignore[attr-defined]
    return {text: place for text, place in found.items() if len(text.replace("...", "")) >= 12}


def _raised(node: ast.AST) -> Iterator[ast.expr]:
    """The text of an error that is raised, of a warning, or of a warning of a plan."""
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and not ast.unparse(node.exc).startswith("_"):
        yield from node.exc.args[:1]
    elif isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        if name.split(".")[-1] in ("warn", "warn_once") or name.endswith("warnings.append"):
            yield from node.args[-1:]


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    return _text(node.left) + _text(node.right) if isinstance(node, ast.BinOp) else "..."


def _first_line(text: str) -> str:
    return re.sub(r"(\.\.\.)+\.?", "...", text.partition("\n")[0]).strip()


def matches(text: str, message: str) -> bool:
    """Whether a text is a part of the first line of a message; `...` stands for any text."""
    return re.search(re.escape(text).replace(r"\.\.\.", ".*"), message.partition("\n")[0]) is not None


def unprovoked() -> list[str]:
    """The texts that are not in a message of the error catalog, with any values."""
    provoked = [text for found in messages().values() for text in found]
    return sorted(text for text in first_lines() if not any(matches(text, message) for message in provoked))


if __name__ == "__main__":
    print("\n".join(unprovoked()))
