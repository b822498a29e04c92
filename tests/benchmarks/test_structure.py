"""`benchmarks/structure.py`: the figures of the package's structure stay within their limits."""

from __future__ import annotations

import subprocess
import sys

import structure
from tests.support.programs import ROOT


def test_figures_stay_within_their_limits() -> None:
    figures = structure.measure(ROOT)
    assert figures["entries at the root"] <= 16
    assert figures["import levels"] <= 9
    assert figures["modules at `import hookdrop`"] <= 65
    assert figures["`# type: ignore`"] <= 20
    assert figures["public members of Injection"] <= 22
    assert figures["public members of Regularizer"] <= 16
    assert figures["lines of guards/"] <= 700


def test_structure_prints_a_table() -> None:
    done = subprocess.run([sys.executable, structure.__file__], capture_output=True, text=True, check=True)
    assert "lines of the package" in done.stdout
