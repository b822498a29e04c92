"""What is wrong with an example that a model does not accept."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hookdrop import Dropout, Dropout2d, InjectionError, ShapeError, inject, plan
from hookdrop.recipes import dropblock_resnet


class Net(nn.Module):
    """Takes (N, 3, H, W) with maps of any size, as an argument or by name."""

    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        self.conv, self.bn, self.fc = nn.Conv2d(channels, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.fc(self.bn(self.conv(pixels)).mean((2, 3)))


FAULTS = [
    ((3, 9, 8), r"has no batch axis: pass x\[None\]"),
    ((2, 9, 8, 3), r"has its channels last: pass x.movedim\(-1, 1\)"),
    ((9, 8, 3), r"has its channels last and no batch axis: pass x.movedim\(-1, 0\)\[None\]"),
    ((2, 4, 9, 8), r"has more than the 3 channels that the model takes: pass x\[:, :3\]"),
    ((2, 1, 9, 8), r"does not have the 3 channels that the model takes: pass x\[:, :1\].expand\(-1, 3, -1, -1\)"),
]


@pytest.mark.parametrize(("shape", "fault"), FAULTS)
def test_the_error_says_how_to_correct_the_example(shape: tuple[int, ...], fault: str) -> None:
    for example in (x := torch.randn(shape)), *([(x,), {"pixels": x}] if len(shape) == 3 and shape[0] == 3 else []):
        with pytest.raises(InjectionError, match=rf"the example {fault}"):
            plan(Net(), Dropout(0.1), layers="conv", example_input=example)


def test_the_dtype_and_the_channels_of_a_gray_model() -> None:
    for dtype in (torch.uint8, torch.float64):
        with pytest.raises(InjectionError, match=r"the example has another dtype than the model: pass x.float\(\)"):
            plan(Net(), Dropout(0.1), layers="conv", example_input=torch.ones(2, 3, 9, 9, dtype=dtype))
    with pytest.raises(InjectionError, match=FAULTS[2][1]):  # a recipe that surveys a part does not replace the example
        plan(Net(), dropblock_resnet(0.1), example_input=torch.randn(9, 8, 3))
    with pytest.raises(InjectionError, match=r"has more than the one channel that the model takes: pass x\[:, :1\]"):
        inject(Net(1), Dropout(0.1), layers="conv", example_input=torch.randn(2, 3, 9, 8))


def test_an_example_with_another_fault_keeps_the_general_advice() -> None:
    with pytest.raises(InjectionError, match="pass a tensor, a tuple of arguments or a dict"):
        plan(nn.Linear(8, 2), Dropout(0.1), layers=nn.Linear, example_input=torch.randn(2, 9))
    with pytest.raises(InjectionError, match="pass a tensor, not its shape"):
        plan(Net(), Dropout(0.1), layers="conv", example_input=(2, 3, 9, 9))


def test_a_single_image_that_the_model_accepts() -> None:
    """A convolution takes it, and its maps have no batch axis; tokens are no images."""
    with pytest.raises(ShapeError, match=r"needs \(N, C, H, W\)(?s:.)*the example has no batch axis: pass x\[None\]"):
        plan(nn.Sequential(nn.Conv2d(3, 4, 3)), Dropout2d(0.1), layers="0", example_input=torch.randn(3, 9, 9))
    with pytest.raises(ShapeError) as caught:
        plan(nn.Sequential(nn.Linear(4, 4)), Dropout2d(0.1), layers="0", example_input=torch.randn(2, 5, 4))
    assert "batch axis" not in str(caught.value)
