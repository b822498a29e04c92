"""`Prediction.plot()` shows the most uncertain rows of every kind of output."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from torch import nn

from hookdrop import Dropout, Prediction, ShapeError, inject

pytest.importorskip("matplotlib")


def predicted(*shape: int, activation: str | None = "softmax") -> Prediction:
    """The rows have increasing means and spreads."""
    model = nn.Sequential(nn.Identity())
    x = torch.arange(1.0, shape[0] + 1).view(-1, *[1] * (len(shape) - 1)) * (0.5 + torch.rand(shape))
    return inject(model, Dropout(0.5), layers="0").predict(x, samples=20, activation=activation)


@pytest.mark.parametrize(
    ("shape", "activation", "panels", "labels"),
    [
        ((20, 5), "softmax", 2, ["mean", "standard deviation"]),
        ((20, 5), "sigmoid", 3, ["mean", "standard deviation", "mutual information"]),
        ((20, 5), None, 2, ["mean", "standard deviation"]),
        ((4, 7, 5), "softmax", 8, ["mean", "standard deviation"]),
        ((4, 5, 6, 8), "softmax", 12, ["most probable class", "standard deviation", "mutual information"]),
        ((4, 1, 6, 8), "sigmoid", 12, ["mean", "standard deviation", "mutual information"]),
        ((4, 5, 6, 8), None, 8, ["mean", "standard deviation"]),
        ((2, 5, 3, 6, 8), "softmax", 6, ["most probable class", "standard deviation", "mutual information"]),
    ],
)
def test_columns_and_rows(shape: tuple[int, ...], activation: str | None, panels: int, labels: list[str]) -> None:
    found = predicted(*shape, activation=activation)
    figure = found.plot()
    bars = [axes for axes in figure.axes if axes.get_label() == "<colorbar>"]
    assert [axes.get_xlabel() for axes in bars] == labels
    images = [axes for axes in figure.axes if axes not in bars]
    assert len(images) == panels
    figure.savefig(io.BytesIO())
    if len(shape) == 2:  # the first line of a picture is the most uncertain row
        uncertainty = found.variance.sqrt() if found.mutual_information is None else found.mutual_information
        first = uncertainty.reshape(len(found.mean), -1).mean(1).argmax()
        assert np.allclose(images[1].images[0].get_array()[0], found.variance[first].sqrt().numpy())


@pytest.mark.parametrize("shape", [(20, 1), (20,)])
def test_single_numbers_have_error_bars_and_the_most_uncertain_are_red(shape: tuple[int, ...]) -> None:
    figure = predicted(*shape, activation=None).plot(rows=5)
    (axes,) = figure.axes
    gray, red = axes.containers
    assert [len(one.lines[0].get_xdata()) for one in (gray, red)] == [15, 5]
    assert red.lines[0].get_ydata().min() > gray.lines[0].get_ydata().mean()
    assert "the 5 most uncertain of 20 rows, by standard deviation" in axes.get_title()


def test_empty_prediction_raises() -> None:
    model = nn.Sequential(nn.Linear(8, 3))
    drop = inject(model, Dropout(0.5), layers="0")
    with pytest.raises(ShapeError, match="it cannot be shown as images"):
        drop.predict(torch.zeros(0, 8)).plot()
