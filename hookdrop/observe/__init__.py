"""Look at any layer: what passes through it, whether it is healthy, and class activation maps.

Figures need `pip install 'hookdrop[observe]'`.
"""

from hookdrop.measure.recording import Record, Recording
from hookdrop.observe.cam import CamComparison, compare_cam, grad_cam
from hookdrop.observe.capturing import Seen, capture
from hookdrop.observe.comparing import Comparison, Difference, compare
from hookdrop.observe.health import LayerStatistics, statistics
from hookdrop.observe.plots import plot_schedule

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
