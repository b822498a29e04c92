"""Show the effect of DropBlock in one figure: a small CNN on scikit-learn's digits, trained without and with it.

    pip install 'hookdrop[observe]' scikit-learn
    python examples/see.py --out see.png

takes half a minute on one core and draws the same figure each time. It also prints the numbers in the figure.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from typing import Any

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate

from hookdrop import DropBlock, Injection, LinearSchedule, inject, observe

MAP = "block3"


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of each of the two training runs")
    parser.add_argument("--p", type=float, default=0.3, help="DropBlock's rate at the end of its ramp")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="see.png", help="output file")
    return parser.parse_args(argv)


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return training images (N, 1, 16, 16), training labels, test images and test labels."""
    data = load_digits()
    images = torch.tensor(data.images / 16, dtype=torch.float32)[:, None]
    images, labels = interpolate(images, scale_factor=2, mode="bilinear"), torch.tensor(data.target)
    return images[:1000], labels[:1000], images[1000:], labels[1000:]


def block(channels: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU(inplace=True))


class Net(nn.Sequential):
    """A CNN that ends in 8x8 maps, global average pooling and one linear layer, as class activation mapping assumes."""

    def __init__(self) -> None:
        super().__init__()
        self.block1, self.block2 = block(1, 16), block(16, 32)
        self.pool = nn.MaxPool2d(2)
        self.block3 = block(32, 32)
        self.mean = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(32, 10)


def no_op() -> None:
    pass


def train(model: nn.Module, x: Tensor, labels: Tensor, steps: int, after_step: Callable[[], None] = no_op) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    order = torch.Generator().manual_seed(0)  # separate, so that both runs use the same batches
    model.train()
    for _ in range(steps):
        chosen = torch.randint(len(x), (64,), generator=order)
        optimizer.zero_grad()
        cross_entropy(model(x[chosen]), labels[chosen]).backward()
        optimizer.step()
        scheduler.step()
        after_step()


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, labels: Tensor) -> float:
    return float((model.eval()(x).argmax(1) == labels).float().mean())


def draw(
    drop: Injection,
    steps: int,
    recording: observe.Recording,
    maps: observe.CamComparison,
) -> Figure:
    figure = Figure(figsize=(15, 11), layout="constrained")
    upper, cams = figure.subfigures(2, 1, height_ratios=(1, 1.15))
    schedule, masks = upper.subfigures(1, 2, width_ratios=(1, 2))
    observe.plot_schedule(drop, steps * 5 // 4, figure=schedule)
    recording.plot_features(MAP, sample=1, channels=8, figure=masks)
    maps.plot(10, figure=cams)
    for subfigure, title in ((schedule, "The schedule"), (cams, CAMS)):
        subfigure.suptitle(title, fontsize=10)
    return figure


CAMS = "Grad-CAM: trained without (before) and with DropBlock (after)"


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse_args(argv)
    torch.manual_seed(args.seed)
    x, labels, test_x, test_labels = digits()
    without = Net()
    regularized = copy.deepcopy(without)
    train(without, x, labels, args.steps)

    schedule = LinearSchedule(steps=args.steps)
    drop = inject(regularized, DropBlock(p=args.p, block_size=3), layers=MAP, schedule=schedule, example_input=x[:2])
    train(regularized, x, labels, args.steps, drop.step)
    print(drop)

    found = {
        "without": accuracy(without, test_x, test_labels),
        "with DropBlock": accuracy(regularized, test_x, test_labels),
    }
    print(*(f"accuracy {name}: {value:.1%}" for name, value in found.items()), sep="\n")
    maps = observe.compare_cam(without, regularized, test_x[:200], MAP, test_labels[:200].tolist())
    wide = float(maps.wide_before.mean()), float(maps.wide_after.mean())
    print(f"mean image area with Grad-CAM above half of its maximum: {wide[0]:.1%} without, {wide[1]:.1%} with")

    with drop.recording() as recording:
        train(regularized, x, labels, 10)
    print(recording)

    draw(drop, args.steps, recording, maps).savefig(args.out, dpi=80)
    return {**found, "wide": wide, "dropped": recording[MAP].dropped}


if __name__ == "__main__":
    main()
