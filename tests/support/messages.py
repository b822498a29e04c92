"""The first lines of the errors and warnings in the source of hookdrop, with `...` in place of values.

`python -m tests.support.messages` prints the section "Other messages" of docs/errors.md.
"""

import ast
import re
from collections.abc import Iterator

from hookdrop.guards.messages import MESSAGES
from tests.support.programs import ROOT

_LEAST = 12  # characters: a shorter text is made elsewhere, or is that of another error


def first_lines() -> dict[str, str]:
    """Each text, with the place of one that raises or warns."""
    found = {_first_line(re.sub(r"\{.*?\}", "...", text)): f"messages.py: {kind}" for kind, text in MESSAGES.items()}
    for path in sorted((ROOT / "hookdrop").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            for text in map(_text, _raised(node)):
                found.setdefault(_first_line(text), f"{path.relative_to(ROOT)}:{node.lineno}")  # type: ignore[attr-defined]
    return {text: place for text, place in found.items() if len(text.replace("...", "")) >= _LEAST}


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


def unquoted(page: str) -> list[str]:
    """The texts that no line of the page quotes, with any values."""
    return sorted(text for text in first_lines() if not re.search(re.escape(text).replace(r"\.\.\.", ".*"), page))


def split(page: str) -> tuple[str, list[str]]:
    """A page without the lines of its section "Other messages", and these lines."""
    before, _, rest = page.partition("\n## Other messages\n")
    head, lines, after = rest.split("```console\n")[0], *rest.split("```console\n")[1].split("```", 1)
    return before + head + after, lines.splitlines()


if __name__ == "__main__":
    print("\n".join(unquoted(split((ROOT / "docs" / "errors.md").read_text())[0])))
