"""What the core announces. Guards and other observers append functions, which are called in this order.

Each hook also has its own listeners (`hook.first_listeners`), most of which watch only its first calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

planned: list[Callable[[Any], None]] = []
"""Called with the `Plan`, once its sites are chosen: may add warnings."""

placed: list[Callable[[Any, Any, Any], None]] = []
"""Called with (plan, state, sinks) when all sinks of an injection are placed."""

rates_set: list[Callable[[Any], None]] = []
"""Called with the state after its step, a target or a switch was set; contexts announce nothing."""

MOVES = 10
moved: list[Callable[[Any, Any, Any], None]] = []
"""Called with (model, states, sinks) at every `MOVES`-th change of a step; the model may be None."""

removing: list[Callable[[Any, Any, Any], None]] = []
"""Called with (model, states, sinks) before a removal that the user requested; the model may be None."""

replacing: list[Callable[[Any, Any], None]] = []
"""Called with (model, sinks) before an injection replaces others, with what these have at other sites."""

removed: list[Callable[[Any], None]] = []
"""Called with the state whose last sink is removed."""

checks: list[Callable[[Any, Any, Any], Mapping[str, str]]] = []
"""Called with (model, state, sinks) for `check()`. Each returns messages by kind."""


def announce(event: list[Callable[..., None]], *arguments: Any) -> None:
    for function in event:
        function(*arguments)
