"""Imports of matplotlib in a new process."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("matplotlib")


class TestFigures:
    def test_pyplot_is_not_imported(self) -> None:
        """Importing pyplot would keep figures open and display them twice in notebooks."""
        code = (
            "import sys, torch\nfrom torch import nn\nfrom hookdrop import Dropout, inject, observe\n"
            "assert 'matplotlib' not in sys.modules\n"
            "model = nn.Sequential(nn.Conv2d(1, 2, 3))\ndrop = inject(model, Dropout(0.5), layers='0')\n"
            "with drop.recording() as r, observe.stats(model) as s: model(torch.ones(1, 1, 5, 5))\n"
            "from hookdrop.diagnostics.figures import pixels\n"
            "for figure in (r.plot_features(), r.plot_masks(), s.plot(), observe.plot_schedule(drop, 5)): pixels(figure)\n"
            "assert 'matplotlib.pyplot' not in sys.modules\n"
        )
        subprocess.run([sys.executable, "-c", code], check=True)
