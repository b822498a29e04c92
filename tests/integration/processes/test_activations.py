"""`observe.capture`: names in, detached tensors out, and nothing left on the model."""

from __future__ import annotations

import subprocess
import sys


class TestModelsThatRunInOtherWays:
    def test_the_compiler_is_not_imported_where_nothing_is_compiled(self) -> None:
        code = (
            "import sys, torch\nfrom hookdrop.observe import capture, stats\nmodel = torch.nn.Sequential(torch.nn.Linear(2, 2))\n"
            "for look in (capture, stats):\n    with look(model, '*') as seen:\n        model(torch.ones(1, 2))\n"
            "    assert list(seen) == ['0']\nassert 'torch._dynamo' not in sys.modules"
        )
        subprocess.run([sys.executable, "-c", code], check=True)
