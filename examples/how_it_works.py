"""Draw what a hook does, for the start page: docs/pictures/how_it_works_*.svg and ramp.webp.

    pip install 'hookdrop[observe]' scikit-learn
    python examples/how_it_works.py --out docs/pictures

takes ten seconds on one core.
"""

from __future__ import annotations

import argparse
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import Tensor, nn

from hookdrop import DropBlock, LinearSchedule, inject

P, BLOCK, STEPS = 0.3, 9, 100
COLORS = {"light": ("#1f2328", "#cf222e", "#0969da"), "dark": ("#e6edf3", "#ff7b72", "#79c0ff")}
"""Text, dropped elements, and the line of the ramp."""


def photograph() -> Tensor:
    """Return a part of a photograph of scikit-learn in gray: (1, 1, 64, 64) in [0, 1]."""
    flower = torch.tensor(load_sample_images().images[1]) / 255
    crop = flower[60:380, 160:480].mean(2)[None, None]
    return nn.functional.interpolate(crop, 64, mode="area")


def recorded(image: Tensor, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the image before a hook, the mask, and the image after it, at a step of the ramp."""
    model = nn.Sequential(nn.Identity())
    drop = inject(model, DropBlock(P, BLOCK), layers="0", schedule=LinearSchedule(steps=STEPS))
    drop.seek(step)
    torch.manual_seed(3)
    with drop.recording() as record:
        model(image)
    site = record["0"]
    return site.before[0, 0], site.mask[0, 0], site.after[0, 0]


def picture(image: Tensor, colors: tuple[str, str, str], path: Path) -> None:
    """Draw the layer's output, the mask, what the next layer gets, and the ramp, readable at half the size."""
    text, dropped, line = colors
    before, mask, after = recorded(image, STEPS)
    figure = Figure(figsize=(7.6, 8.2), layout="constrained")
    for axes, title, shown in zip(
        figure.subplots(2, 2).flat,
        ("1  a layer's output", f"2  the mask, p = {P}", "3  what the next layer gets", "4  p during training"),
        (before, mask.float(), after, None),
        strict=True,
    ):
        axes.set_title(title, fontsize=19, color=text, loc="left", pad=10)
        for spine in axes.spines.values():
            spine.set_color(text)
        if shown is not None:
            cmap: Any = ListedColormap([dropped, "#d0d7de"]) if shown is not before and shown is not after else "gray"
            axes.imshow(shown.numpy(), cmap=cmap, vmin=0, vmax=1)
            axes.set_xticks([])
            axes.set_yticks([])
            continue
        axes.plot([0, STEPS, 1.4 * STEPS], [0, P, P], color=line, linewidth=5)
        axes.set(xlim=(0, 1.4 * STEPS), ylim=(0, 1.6 * P), xticks=[], yticks=[0, P])
        axes.tick_params(labelsize=18, colors=text)
        axes.set_xlabel("optimizer steps", fontsize=18, color=text)
        axes.text(3, 1.28 * P, "model.eval():\nnothing is dropped", fontsize=17, color=text)
    # A fixed salt, so that the same picture has the same file.
    with mpl.rc_context({"svg.hashsalt": "hookdrop", "svg.fonttype": "path"}):
        figure.savefig(path, transparent=True, metadata={"Date": None})


def animation(image: Tensor, path: Path) -> None:
    """Draw a ramp from 0 to p on the photograph, as an animated WebP."""
    frames = []
    for step in range(4, STEPS + 1, 4):
        before, mask, _ = recorded(image, step)
        colored = before[..., None].expand(-1, -1, 3).clone()
        colored[~mask] = torch.tensor([0.81, 0.13, 0.18])
        figure = Figure(figsize=(3.6, 4.0), dpi=100, layout="constrained")
        axes = figure.subplots()
        axes.imshow(colored.numpy())
        axes.set_title(f"step {step} of {STEPS}: p = {P * step / STEPS:.2f}", fontsize=14)
        axes.axis("off")
        buffer = BytesIO()
        figure.savefig(buffer, format="png")
        frames.append(Image.open(buffer).convert("RGB"))
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=[*[180] * (len(frames) - 1), 1500], loop=0)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("docs/pictures"), help="output folder")
    out: Path = parser.parse_args(argv).out
    out.mkdir(parents=True, exist_ok=True)
    image = photograph()
    for theme, colors in COLORS.items():
        picture(image, colors, out / f"how_it_works_{theme}.svg")
    animation(image, out / "ramp.webp")


if __name__ == "__main__":
    main()
