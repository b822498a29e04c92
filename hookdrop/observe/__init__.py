"""Look at any layer: what passes through it, whether it is healthy, and class activation maps.

Figures need `pip install 'hookdrop[observe]'`.
"""

from hookdrop.injection.recording import Record, Recording
from hookdrop.observe.cam import CamComparison, compare_cam, grad_cam
from hookdrop.observe.capture import Seen, capture
from hookdrop.observe.compare import Comparison, Difference, compare
from hookdrop.observe.plots import plot_schedule
from hookdrop.observe.statistics import LayerStatistics, statistics

__all__ = [
    "CamComparison",
    "Comparison",
    "Difference",
    "LayerStatistics",
    "Record",
    "Recording",
    "Seen",
    "capture",
    "compare",
    "compare_cam",
    "grad_cam",
    "plot_schedule",
    "statistics",
]
