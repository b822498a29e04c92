"""A picture of every regularizer, schedule and recipe: docs/gallery.md and docs/gallery/*.png.

A minute on one core, and the same pictures each time:

    make gallery        (python examples/gallery.py --out docs)

needs `pip install 'hookdrop[observe]' scikit-learn timm torchvision`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import torchvision
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import Tensor
from torch.nn.functional import fold, interpolate, unfold

from hookdrop import (
    ChainedSchedule,
    ConstantSchedule,
    CosineSchedule,
    EarlySchedule,
    ExponentialSchedule,
    LateSchedule,
    LinearSchedule,
    Regularizer,
    Schedule,
    parse,
    recipes,
)

EDGE, PATCH, SHOWN = 64, 8, 4


@dataclass
class View:
    """What the axes of a regularizer's tensor are, shown as pictures."""

    note: str
    tensor: Callable[[Tensor], Tensor]
    """From images (N, 3, H, W)."""
    images: Callable[[Tensor], Tensor]
    """And back."""


MAPS = View("(N, C, H, W): four crops of two photographs, C are red, green and blue", lambda x: x, lambda x: x)
TOKENS = View(
    f"(N, L, C): the pictures as tokens of {PATCH}x{PATCH} pixels, the first of them the class token",
    lambda x: unfold(x, PATCH, stride=PATCH).transpose(1, 2),
    lambda x: fold(x.transpose(1, 2), EDGE, PATCH, stride=PATCH),
)
ROWS = View(
    "(N, T, C): the pictures as sequences, their rows are the steps in time",
    lambda x: x.permute(0, 2, 1, 3).flatten(2),
    lambda x: x.unflatten(2, (3, EDGE)).permute(0, 2, 1, 3),
)

SHOWN_AS: dict[str, tuple[str, View]] = {
    "Dropout": ("Dropout(p=0.2)", MAPS),
    "Dropout2d": ("Dropout2d(p=0.3)", MAPS),
    "DropBlock": ("DropBlock(p=0.2, block_size=9)", MAPS),
    "DropBlock, one mask for all channels": ("DropBlock(p=0.2, block_size=9, per_channel=False)", MAPS),
    "DropPath": ("DropPath(p=0.4)", MAPS),
    "AlphaDropout": ("AlphaDropout(p=0.2)", MAPS),
    "FeatureAlphaDropout": ("FeatureAlphaDropout(p=0.3)", MAPS),
    "GaussianDropout": ("GaussianDropout(p=0.2)", MAPS),
    "GaussianNoise": ("GaussianNoise(std=0.2)", MAPS),
    "UniformNoise": ("UniformNoise(beta=0.5)", MAPS),
    "Cutout": ("Cutout(size=24)", MAPS),
    "TokenDropout": ("TokenDropout(p=0.3, prefix=1)", TOKENS),
    "LockedDropout": ("LockedDropout(p=0.2, time_dim=1)", ROWS),
    "MixStyle": ("MixStyle(p=1.0, alpha=0.5)", MAPS),
}
GRADIENTS = {
    "ClipActivationGrad": ("ClipActivationGrad(max_value=1.0)", "ClipActivationGrad(max_norm=20.0, per_sample=True)"),
    "ClampActivationGrad": ("ClampActivationGrad(min=0.0)",),
    "ScaleActivationGrad": ("ScaleActivationGrad(factor=-1.0)", "ScaleActivationGrad(factor=0.0)"),
    "NoiseActivationGrad": ("NoiseActivationGrad(std=0.5)",),
}
SAME_PICTURE = {"Dropout1d": "Dropout2d", "Dropout3d": "Dropout2d"}
"""What differs by the number of axes alone."""
SCHEDULES: tuple[Schedule, ...] = (
    ConstantSchedule(),
    LinearSchedule(steps=100),
    LinearSchedule(steps=60, delay=40),
    CosineSchedule(steps=100),
    ExponentialSchedule(steps=100),
    EarlySchedule(cutoff=50),
    LateSchedule(cutoff=50),
    ChainedSchedule([LinearSchedule(steps=50), LinearSchedule(steps=50, start=1.0, end=0.2)], milestones=[50]),
)


def main(argv: list[str] | None = None) -> list[Path]:
    """Write the pictures and the page; the pictures' paths."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("docs"), help="where gallery.md and gallery/ go")
    options = parser.parse_args(argv)
    folder = options.out / "gallery"
    folder.mkdir(parents=True, exist_ok=True)
    page, written = [HEAD], []
    for name, text, figure in everything(folder):
        if figure is not None:
            save(figure, folder / f"{name}.png")
        written.append(folder / f"{name}.png")
        heading = [line for line in text.splitlines() if line.startswith("#")][-1].strip("# ")
        page.append(f"{text}\n\n![{heading}](gallery/{name}.png)\n")
    (options.out / "gallery.md").write_text("\n".join(page))
    return written


def save(figure: Figure, path: Path) -> None:
    """In 128 colours, a fourth of the bytes."""
    drawn = BytesIO()
    figure.savefig(drawn, dpi=64, bbox_inches="tight", pad_inches=0.05)
    Image.open(drawn).convert("RGB").quantize(128).save(path, optimize=True)


HEAD = """# Gallery

What each regularizer, schedule and recipe does, and what `hookdrop.observe` shows. Made by `make gallery`.
"""


def everything(folder: Path) -> Iterator[tuple[str, str, Figure | None]]:
    """(file name, text above it, picture); no picture where another program has written it."""
    images = photographs()
    title = "## Regularizers\n\n"
    for name, (text, view) in SHOWN_AS.items():
        others = [other for other, shown in SAME_PICTURE.items() if shown == name]
        same = f" {' and '.join(others)} are the same on (N, C, L) and (N, C, D, H, W)." if others else ""
        head = f"{title}### {', '.join([name, *others])}\n\n{summary(text)}\n\n`{text}` on {view.note}.{same}"
        yield slug(name), head, before_and_after(parse(text), images, view)
        title = ""
    title = "## Of gradients\n\nThe tensor passes as it is; these act on its gradient, in the backward pass.\n\n"
    for name, texts in GRADIENTS.items():
        calls = " and ".join(f"`{text}`" for text in texts)
        yield slug(name), f"{title}### {name}\n\n{summary(texts[0])}\n\n{calls}.", gradients(texts)
        title = ""
    yield "schedules", "## Schedules\n\nThe part of the rate in force; steps are the optimizer's.", ramps()
    yield from recipes_shown(images)
    path = folder / "see.png"
    see = [sys.executable, str(Path(__file__).with_name("see.py")), "--out", str(path)]
    # Sums on another number of threads end in other last bits, and so in another picture.
    subprocess.run(see, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    Image.open(path).convert("RGB").quantize(128).save(path, optimize=True)
    yield "see", SEE, None


SEE = """## Seeing

`examples/see.py`: a schedule, what DropBlock did in a training step (`drop.recording()`), numbers of each layer
(`observe.stats`), and Grad-CAM of two trainings (`observe.compare_cam`)."""


def summary(text: str) -> str:
    """The first line of the docstring of what `text` spells."""
    return (parse(text).__doc__ or "").splitlines()[0]


def slug(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name.lower()).replace("--", "-")


def photographs() -> Tensor:
    """Four crops of the two photographs that scikit-learn ships: (4, 3, EDGE, EDGE) in [0, 1]."""
    china, flower = (torch.tensor(image).permute(2, 0, 1) / 255 for image in load_sample_images().images)
    corners = [(china, 100, 60), (flower, 40, 180), (china, 180, 0), (flower, 150, 60)]
    crops = [photo[None, :, top : top + 240, left : left + 240] for photo, top, left in corners]
    return torch.cat([interpolate(crop, EDGE, mode="area") for crop in crops])


def before_and_after(regularizer: Regularizer, images: Tensor, view: View) -> Figure:
    """The pictures before, and after it."""
    torch.manual_seed(2)
    after = view.images(regularizer.train()(view.tensor(images)))
    return strips({"before": images, "after": after.clamp(0, 1)})


def strips(rows: dict[str, Tensor]) -> Figure:
    figure = Figure(figsize=(SHOWN * 1.2 + 0.4, len(rows) * 1.2), layout="constrained")
    for axes, (label, image) in zip(grid(figure, len(rows)), picture_cells(rows), strict=True):
        axes.imshow(image.detach().permute(1, 2, 0).numpy(), interpolation="nearest")
        axes.set_ylabel(label)
    return figure


def picture_cells(rows: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for label, images in rows.items():
        yield from ((label if index == 0 else "", image) for index, image in enumerate(images))


def grid(figure: Figure, rows: int) -> list[Any]:
    """Axes without ticks, row by row."""
    cells = figure.subplots(rows, SHOWN, squeeze=False).flatten().tolist()
    for axes in cells:
        axes.set(xticks=[], yticks=[])
    return cells


def gradients(texts: tuple[str, ...]) -> Figure:
    """A gradient as it arrives, and as it goes on; blue is below 0, red above."""
    torch.manual_seed(1)
    arriving = interpolate(torch.randn(SHOWN, 1, 8, 8), EDGE, mode="bicubic")
    rows = {"arrives": arriving}
    for text in texts:
        x = torch.zeros(SHOWN, 1, EDGE, EDGE, requires_grad=True)
        parse(text).train()(x).backward(arriving)
        rows[text.partition("(")[2].rstrip(")").partition(",")[0]] = x.grad
    figure = Figure(figsize=(SHOWN * 1.2 + 1.2, len(rows) * 1.2), layout="constrained")
    cells = grid(figure, len(rows))
    for axes, (label, image) in zip(cells, picture_cells(rows), strict=True):
        drawn = axes.imshow(image[0].detach().numpy(), cmap="RdBu_r", norm=TwoSlopeNorm(0.0, -3.0, 3.0))
        axes.set_ylabel(label.replace("=", "\n= "))  # as high as a row, not higher
    figure.colorbar(drawn, ax=cells, label="gradient", fraction=0.02)
    return figure


def ramps() -> Figure:
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    for axes, schedule in zip(figure.subplots(2, 4, sharex=True, sharey=True).flatten(), SCHEDULES, strict=True):
        at_once = isinstance(schedule, EarlySchedule | LateSchedule)
        axes.plot(schedule.simulate(121), color="#2166ac", drawstyle="steps-post" if at_once else "default")
        axes.set_title(type(schedule).__name__ + (", delay" if getattr(schedule, "delay", 0) else ""), fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("steps", fontsize=9)
    figure.supylabel("part of the rate", fontsize=9)
    return figure


def recipes_shown(images: Tensor) -> Iterator[tuple[str, str, Figure]]:
    torch.manual_seed(0)
    model = torchvision.models.resnet18(weights=None)
    x = interpolate(images, 224, mode="bilinear")
    drop = recipes.dropblock_resnet(model, p=0.2, block_size=5)
    with drop.recording() as recorded:
        model.train()(x)
    yield "dropblock-resnet", DROPBLOCK, recorded.plot_masks(["layer3.1", "layer3.1.bn2", "layer4.0.bn1"], channels=8)
    yield "stochastic-depth", DEPTH, rates_by_depth()


DROPBLOCK = """## Recipes

### dropblock_resnet

`recipes.dropblock_resnet(resnet18, p=0.2, block_size=5)`: masks at an identity skip and after a convolution of group 3,
and after a convolution of group 4, of one training step."""
DEPTH = """### stochastic_depth

`recipes.stochastic_depth(model, p=0.2)`: the rate of each residual branch."""


def rates_by_depth() -> Figure:
    figure = Figure(figsize=(8, 2.4), layout="constrained")
    models = {"resnet50": torchvision.models.resnet50(), "vit_b_16": torchvision.models.vit_b_16()}
    for axes, (name, model) in zip(figure.subplots(1, 2, sharey=True), models.items(), strict=True):
        sites = recipes.stochastic_depth.plan(model, p=0.2).sites
        axes.bar(range(len(sites)), [site.p for site in sites], color="#2166ac")
        axes.set(title=name, xlabel="branch, from the input on")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("p")
    return figure


if __name__ == "__main__":
    main()
