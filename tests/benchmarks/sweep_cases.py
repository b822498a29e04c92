"""Cases for test_sweep.py, in a module that child processes import."""

from __future__ import annotations

import os
import time
from typing import Any


def check(name: str, options: object) -> dict[str, Any]:
    """Pass, fail, end the process, or take too long, depending on the name."""
    if name == "fails":
        raise ValueError("first line\nsecond line")
    if name == "crashes":
        os._exit(3)
    if name == "hangs":
        time.sleep(600)
    return {"status": "passed", "family": "some"}
