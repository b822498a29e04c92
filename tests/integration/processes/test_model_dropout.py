"""The dropout that models come with: found, changed, given back; and residual dropout for those that have none."""

from __future__ import annotations

import subprocess
import sys


class TestTheReport:
    def test_says_which_source_it_can_not_read(self) -> None:
        code = (
            "import torch\nfrom hookdrop.recipes import report_dropout\n"
            "class Net(torch.nn.Module):\n    def forward(self, x): return x\n"
            "print(report_dropout(Net()))"
        )
        told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
        assert "the source of Net.forward is not available" in told
