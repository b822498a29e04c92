"""Class activation maps and figures, which need `pip install 'hookdrop[observe]'`."""

from hookdrop.injection.recording import Record, Recording
from hookdrop.observe.cam import CamComparison, compare_cam, grad_cam
from hookdrop.observe.plots import plot_schedule

__all__ = ["CamComparison", "Record", "Recording", "compare_cam", "grad_cam", "plot_schedule"]
