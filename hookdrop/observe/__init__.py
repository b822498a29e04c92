"""Inspect a model: layer statistics, class activation maps and figures.

Figures, class activation maps and TensorBoard need `pip install 'hookdrop[observe]'`; the rest only needs PyTorch.
"""

from hookdrop.injection.recording import Record, Recording
from hookdrop.observe.cam import CamComparison, compare_cam, grad_cam
from hookdrop.observe.plots import plot_schedule
from hookdrop.observe.statistics import LayerStats, Stats, stats

__all__ = [
    "CamComparison",
    "LayerStats",
    "Record",
    "Recording",
    "Stats",
    "compare_cam",
    "grad_cam",
    "plot_schedule",
    "stats",
]
