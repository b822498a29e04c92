"""Glob patterns for dotted names."""

from __future__ import annotations

import re
from functools import lru_cache

from hookdrop.errors import LayerError


@lru_cache(maxsize=1024)
def glob_expression(pattern: str) -> re.Pattern[str]:
    """Compile a glob over dotted names into a regular expression.

    `*`, `?`, `[12]` and `[!a]` match within one segment. `**.` at the start or in the middle matches zero or more
    segments; `.**` at the end and `**` alone match one or more.

    Example:
        >>> bool(glob_expression("**.bn[12]").fullmatch("layer1.0.bn2"))
        True
    """
    segments = pattern.split(".")
    parts = []
    for index, segment in enumerate(segments):
        last = index == len(segments) - 1
        if segment == "**":
            parts.append(r"[^.]+(?:\.[^.]+)*" if last else r"(?:[^.]+\.)*")
        else:
            parts.append(_segment_expression(segment) + ("" if last else r"\."))
    try:
        return re.compile("".join(parts))
    except re.error as error:
        raise LayerError(f"cannot parse the glob {pattern!r}: {error}.") from None


def _segment_expression(segment: str) -> str:
    out, i = "", 0
    while i < len(segment):
        character = segment[i]
        end = segment.find("]", i + 2 + segment.startswith("!", i + 1)) if character == "[" else -1
        if end > 0:
            inside = segment[i + 1 : end]
            negated = inside.startswith("!")
            body = re.sub(r"([\\\[\]^&~|])", r"\\\1", inside[negated:])
            out += f"(?![.])[{'^' if negated else ''}{body}]"
            i = end
        else:
            out += {"*": "[^.]*", "?": "[^.]"}.get(character, re.escape(character))
        i += 1
    return out
