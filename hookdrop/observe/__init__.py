"""Inspect a model: activations, layer statistics, gradients, class activation maps and figures.

Figures, class activation maps and TensorBoard need `pip install 'hookdrop[observe]'`; the rest only needs PyTorch.
"""

from hookdrop.injection.recording import Record, Recording
from hookdrop.observe.activations import Captured, capture
from hookdrop.observe.cam import grad_cam
from hookdrop.observe.cam_comparison import CamComparison, compare_cam, plot_cam
from hookdrop.observe.layer_statistics import LayerStats
from hookdrop.observe.parameter_gradients import GradientEdit, clamp, edit_parameter_gradients, scale, zero
from hookdrop.observe.plots import plot_features, plot_masks, plot_schedule
from hookdrop.observe.statistics import Stats, stats

__all__ = [
    "CamComparison",
    "Captured",
    "GradientEdit",
    "LayerStats",
    "Record",
    "Recording",
    "Stats",
    "capture",
    "clamp",
    "compare_cam",
    "edit_parameter_gradients",
    "grad_cam",
    "plot_cam",
    "plot_features",
    "plot_masks",
    "plot_schedule",
    "scale",
    "stats",
    "zero",
]
