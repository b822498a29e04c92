"""Imports of `hookdrop.observe` in a new process."""

from __future__ import annotations

import subprocess
import sys


class TestImports:
    def test_observing_does_not_import_the_compiler(self) -> None:
        code = (
            "import sys, torch\nfrom hookdrop.observe import capture, stats\nmodel = torch.nn.Sequential(torch.nn.Linear(2, 2))\n"
            "for look in (capture, stats):\n    with look(model, '*') as seen:\n        model(torch.ones(1, 2))\n"
            "    assert list(seen) == ['0']\nassert 'torch._dynamo' not in sys.modules"
        )
        subprocess.run([sys.executable, "-c", code], check=True)
