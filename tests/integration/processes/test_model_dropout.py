"""`report_dropout` of a model without source code."""

from __future__ import annotations

import subprocess
import sys


class TestReportDropout:
    def test_unreadable_source_is_reported(self) -> None:
        code = (
            "import torch\nfrom hookdrop.recipes import report_dropout\n"
            "class Net(torch.nn.Module):\n    def forward(self, x): return x\n"
            "print(report_dropout(Net()))"
        )
        output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
        assert "the source of Net.forward is not available" in output
