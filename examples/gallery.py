"""Draw every regularizer, schedule and recipe: docs/gallery.md and docs/gallery/*.png.

    pip install 'hookdrop[observe]' scikit-learn timm torchvision
    make gallery        (python examples/gallery.py --out docs)

takes a minute on one core and draws the same figures each time.
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

import hookdrop
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
    TokenDropout,
    inject,
    parse,
    recipes,
)

EDGE, PATCH, COLUMNS = 64, 8, 4


@dataclass
class View:
    """The axes of a regularizer's tensor, if not (N, C, H, W), and the conversion from and to images (N, 3, H, W)."""

    note: str
    to_tensor: Callable[[Tensor], Tensor]
    to_images: Callable[[Tensor], Tensor]


MAPS = View("", lambda x: x, lambda x: x)
TOKENS = View(
    f"(N, L, C): the images as tokens of {PATCH}x{PATCH} pixels, the first as class token",
    lambda x: unfold(x, PATCH, stride=PATCH).transpose(1, 2),
    lambda x: fold(x.transpose(1, 2), EDGE, PATCH, stride=PATCH),
)
EMBEDDINGS = View(
    f"(N, L, d): the images as embeddings of L = {(EDGE // PATCH) ** 2} tokens, each {PATCH}x{PATCH} pixels",
    TOKENS.to_tensor,
    TOKENS.to_images,
)
HEADS = View(
    "(N, L, H d): the images as tokens of three heads, which are red, green and blue",
    TOKENS.to_tensor,
    TOKENS.to_images,
)
SCORES = View(
    "(N, H, L, S): the images as scores of three heads with a row for each query; -inf is black",
    MAPS.to_tensor,
    MAPS.to_images,
)
PATCHES = View(
    f"(N, C, L): the images as channels, each a patch of {PATCH}x{PATCH} pixels", TOKENS.to_tensor, TOKENS.to_images
)
WEIGHTS = View("parameters: the images, which were the same in gray at the injection", MAPS.to_tensor, MAPS.to_images)
ROWS = View(
    "(N, T, C): the images as sequences, with a row per time step",
    lambda x: x.permute(0, 2, 1, 3).flatten(2),
    lambda x: x.unflatten(2, (3, EDGE)).permute(0, 2, 1, 3),
)

EXAMPLES: dict[str, tuple[str, View]] = {
    "Dropout": ("Dropout(p=0.2)", MAPS),
    "Dropout2d": ("Dropout2d(p=0.3)", MAPS),
    "DropBlock": ("DropBlock(p=0.2, block_size=9)", MAPS),
    "DropBlock, one mask for all channels": ("DropBlock(p=0.2, block_size=9, per_channel=False)", MAPS),
    "DropPath": ("DropPath(p=0.4)", MAPS),
    "ShakeDrop": ("ShakeDrop(p=0.4)", MAPS),
    "AlphaDropout": ("AlphaDropout(p=0.2)", MAPS),
    "FeatureAlphaDropout": ("FeatureAlphaDropout(p=0.3)", MAPS),
    "GaussianDropout": ("GaussianDropout(p=0.2)", MAPS),
    "GaussianNoise": ("GaussianNoise(std=0.2)", MAPS),
    "UniformNoise": ("UniformNoise(beta=0.5)", MAPS),
    "Cutout": ("Cutout(size=24)", MAPS),
    "TokenDropout": ("TokenDropout(p=0.3, prefix=1)", TOKENS),
    "LockedDropout": ("LockedDropout(p=0.2, time_dim=1)", ROWS),
    "NEFTune": ("NEFTune(alpha=15)", EMBEDDINGS),
    "HeadDropout": ("HeadDropout(p=0.5, heads=3)", HEADS),
    "DropKey": ("DropKey(p=0.2)", SCORES),
    "MixStyle": ("MixStyle(p=1.0, alpha=0.5)", MAPS),
    "DSU": ("DSU(p=1.0)", MAPS),
    "Mixout": ("Mixout(p=0.5)", WEIGHTS),
    "Masksembles": ("Masksembles(n=4, scale=2.0, channel_dim=1)", PATCHES),
}
GRADIENTS = {
    "ClipActivationGrad": ("ClipActivationGrad(max_value=1.0)", "ClipActivationGrad(max_norm=20.0, per_sample=True)"),
    "ClampActivationGrad": ("ClampActivationGrad(min=0.0)",),
    "ScaleActivationGrad": ("ScaleActivationGrad(factor=-1.0)", "ScaleActivationGrad(factor=0.0)"),
    "NoiseActivationGrad": ("NoiseActivationGrad(std=0.5)",),
}
PENALTIES = ("ActivationPenalty(l2=1.0, slowness=0.0)", "ActivationPenalty(l2=0.0, slowness=1.0)")
LAYER_DROP = "LayerDrop(p=0.5)"
SAME_FIGURE = {"Dropout1d": "Dropout2d", "Dropout3d": "Dropout2d"}
"""Regularizers that differ from another one only in the number of axes."""
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
    """Write the page and the figures, and return the paths of the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("docs"), help="folder for gallery.md and gallery/")
    options = parser.parse_args(argv)
    folder = options.out / "gallery"
    folder.mkdir(parents=True, exist_ok=True)
    page, written = [HEAD], []
    for name, text, figure in sections(folder):
        if figure is not None:
            save(figure, folder / f"{name}.png")
        written.append(folder / f"{name}.png")
        heading = [line for line in text.splitlines() if line.startswith("#")][-1].strip("# ")
        page.append(f"{text}\n\n![{heading}](gallery/{name}.png)\n")
    (options.out / "gallery.md").write_text("\n".join(page))
    return written


def save(figure: Figure, path: Path) -> None:
    """Save with 128 colors, a quarter of the size."""
    buffer = BytesIO()
    figure.savefig(buffer, dpi=64, bbox_inches="tight", pad_inches=0.05)
    Image.open(buffer).convert("RGB").quantize(128).save(path, optimize=True)


HEAD = """# Gallery

The effect of each regularizer, schedule and recipe; the [cards](methods/index.md) describe them. The images are four
crops of two photographs, with C = (red, green, blue).
"""


def sections(folder: Path) -> Iterator[tuple[str, str, Figure | None]]:
    """Yield (file name, text, figure); the figure is None if another program wrote the file."""
    images = photographs()
    yield "overview", OVERVIEW, draw_overview(images[1:2])
    title = "## Regularizers\n\n"
    for name, (text, view) in EXAMPLES.items():
        others = [other for other, drawn in SAME_FIGURE.items() if drawn == name]
        note = f" on {view.note}" if view.note else ""
        head = f"{title}### {', '.join([name, *others])}\n\n`{text}`{note}."
        yield slug(name), head, before_and_after(parse(text), images, view)
        title = ""
    head = f"### LayerDrop\n\n`{LAYER_DROP}` on a layer that inverts colors: two forward passes."
    yield "layerdrop", head, draw_layer_drop(images)
    title = (
        "## Gradient regularizers\n\nThe forward pass is unchanged. These modify the gradient in the backward pass.\n\n"
    )
    for name, texts in GRADIENTS.items():
        calls = " and ".join(f"`{text}`" for text in texts)
        yield slug(name), f"{title}### {name}\n\n{calls}.", draw_gradients(texts)
        title = ""
    calls = " and ".join(f"`{text}`" for text in PENALTIES)
    title = "## Penalties\n\nThey add a term to the loss.\n\n"
    text = f"{title}### ActivationPenalty\n\nActivations, and the gradients of {calls}; time runs down."
    yield "activationpenalty", text, draw_penalties()
    yield "schedules", "## Schedules\n\nThe multiplier of the rate by optimizer step.", draw_schedules()
    yield from recipe_sections(images)
    path = folder / "see.png"
    see = [sys.executable, str(Path(__file__).with_name("see.py")), "--out", str(path)]
    # The number of threads changes the last bits of sums, and so the figure.
    subprocess.run(see, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    Image.open(path).convert("RGB").quantize(128).save(path, optimize=True)
    yield "see", SEE, None


OVERVIEW = """## Overview

One image with three channels under six regularizers."""
SEE = """## Observing

`examples/see.py`: a schedule, the masks of DropBlock in a training step (`drop.recording()`), and Grad-CAM of two
trained models (`observe.compare_cam`)."""


def slug(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name.lower()).replace("--", "-")


def photographs() -> Tensor:
    """Return four crops of the two photographs in scikit-learn: (4, 3, EDGE, EDGE) in [0, 1]."""
    china, flower = (torch.tensor(image).permute(2, 0, 1) / 255 for image in load_sample_images().images)
    corners = [(china, 100, 60), (flower, 40, 180), (china, 180, 0), (flower, 150, 60)]
    crops = [photo[None, :, top : top + 240, left : left + 240] for photo, top, left in corners]
    return torch.cat([interpolate(crop, EDGE, mode="area") for crop in crops])


def before_and_after(regularizer: Regularizer, images: Tensor, view: View) -> Figure:
    """Draw the images before and after the regularizer."""
    torch.manual_seed(2)
    x = view.to_tensor(images)
    context = {"start": x.mean(1, keepdim=True).expand_as(x)} if "start" in regularizer.needs else {}
    after = view.to_images(regularizer.train()(x, **context))
    return draw_rows({"before": images, "after": after.clamp(0, 1)})


def draw_layer_drop(images: Tensor) -> Figure:
    """Draw the input and the output of a layer, and two forward passes of which one skips it."""
    torch.manual_seed(2)
    layer_drop, output = parse(LAYER_DROP).train(), 1 - images
    forwards = {f"step {step}": layer_drop(output, layer_input=images) for step in (1, 2)}
    return draw_rows({"input": images, "output": output, **forwards})


def draw_overview(image: Tensor) -> Figure:
    """Draw one image after several regularizers, with the settings as title."""
    texts = [EXAMPLES[name][0] for name in ("Dropout", "Dropout2d", "DropBlock", "Cutout", "GaussianNoise")]
    texts.insert(3, "DropBlock(p=0.2, block_size=9, per_channel=False)")
    figure = Figure(figsize=(11, 2.1), layout="constrained")
    for i, (axes, text) in enumerate(zip(figure.subplots(1, 7), ["", *texts], strict=True)):
        torch.manual_seed(5 + i)
        after = parse(text).train()(image) if text else image
        axes.imshow(after[0].clamp(0, 1).permute(1, 2, 0).numpy(), interpolation="nearest")
        axes.set_title(text.rstrip(")").replace("(", "\n").replace(", per", ",\nper") or "image", fontsize=9)
        axes.set(xticks=[], yticks=[])
    return figure


def draw_rows(rows: dict[str, Tensor]) -> Figure:
    figure = Figure(figsize=(COLUMNS * 1.2 + 0.4, len(rows) * 1.2), layout="constrained")
    for axes, (label, image) in zip(grid(figure, len(rows)), cells(rows), strict=True):
        axes.imshow(image.detach().permute(1, 2, 0).numpy(), interpolation="nearest")
        axes.set_ylabel(label)
    return figure


def cells(rows: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for label, images in rows.items():
        yield from ((label if index == 0 else "", image) for index, image in enumerate(images))


def grid(figure: Figure, rows: int) -> list[Any]:
    """Create axes without ticks, row by row."""
    found = figure.subplots(rows, COLUMNS, squeeze=False).flatten().tolist()
    for axes in found:
        axes.set(xticks=[], yticks=[])
    return found


def draw_gradients(texts: tuple[str, ...]) -> Figure:
    """Draw a gradient before and after each regularizer."""
    torch.manual_seed(1)
    incoming = interpolate(torch.randn(COLUMNS, 1, 8, 8), EDGE, mode="bicubic")
    rows = {"before": incoming}
    for text in texts:
        x = torch.zeros(COLUMNS, 1, EDGE, EDGE, requires_grad=True)
        parse(text).train()(x).backward(incoming)
        rows[text.partition("(")[2].rstrip(")").partition(",")[0]] = x.grad
    return draw_signed(rows, "gradient")


def draw_penalties() -> Figure:
    """Draw activations, as sequences with a row per time step, and the gradients of the two terms."""
    torch.manual_seed(1)
    rows = {"h": interpolate(torch.randn(COLUMNS, 1, 8, 8), EDGE, mode="bicubic")}
    for text, label, scale in zip(PENALTIES, ("l2", "slowness"), (1.0, 16.0), strict=True):
        x = rows["h"].flatten(1, 2).requires_grad_()
        (gradient,) = torch.autograd.grad(parse(text).penalize(x, 1.0), x)
        rows[label] = gradient.unflatten(1, (1, EDGE)) * x.numel() * scale / 2.0
    return draw_signed(rows, "value, or gradient with a factor")


def draw_signed(rows: dict[str, Tensor], label: str) -> Figure:
    """Draw the first channel of images in rows; blue is negative, red is positive."""
    figure = Figure(figsize=(COLUMNS * 1.2 + 1.2, len(rows) * 1.2), layout="constrained")
    all_axes = grid(figure, len(rows))
    for axes, (name, image) in zip(all_axes, cells(rows), strict=True):
        drawn = axes.imshow(image[0].detach().numpy(), cmap="RdBu_r", norm=TwoSlopeNorm(0.0, -3.0, 3.0))
        axes.set_ylabel(name.replace("=", "\n= "))  # two lines, to fit the height of a row
    figure.colorbar(drawn, ax=all_axes, label=label, fraction=0.02)
    return figure


def draw_schedules() -> Figure:
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    for axes, schedule in zip(figure.subplots(2, 4, sharex=True, sharey=True).flatten(), SCHEDULES, strict=True):
        is_step = isinstance(schedule, EarlySchedule | LateSchedule)
        axes.plot(schedule.simulate(121), color="#2166ac", drawstyle="steps-post" if is_step else "default")
        axes.set_title(type(schedule).__name__ + (", delay" if getattr(schedule, "delay", 0) else ""), fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("steps", fontsize=9)
    figure.supylabel("multiplier", fontsize=9)
    return figure


def recipe_sections(images: Tensor) -> Iterator[tuple[str, str, Figure]]:
    torch.manual_seed(0)
    model = torchvision.models.resnet18(weights=None)
    x = interpolate(images, 224, mode="bilinear")
    drop = inject(model, recipes.dropblock_resnet(p=0.2, block_size=5))
    with drop.recording() as recorded:
        model.train()(x)
    yield "dropblock-resnet", DROPBLOCK, recorded.plot_masks(["layer3.1", "layer3.1.bn2", "layer4.0.bn1"], channels=8)
    settings = {"weights": None, "weights_backbone": None}
    model = torchvision.models.segmentation.deeplabv3_mobilenet_v3_large(**settings)
    drop = inject(model, recipes.dropblock_unet(p=0.2, block_size=5))
    with drop.recording() as recorded:
        model.train()(x)
    names = ["classifier.0.convs.1.0", "classifier.0.project.0", "classifier.1"]
    yield "dropblock-unet", UNET, recorded.plot_masks(names, channels=8)
    model = torchvision.models.detection.retinanet_resnet50_fpn(**settings)
    drop = inject(model, recipes.dropblock_detector(p=0.2, block_size=5, parts="both"))
    with drop.recording() as recorded:
        model.train().backbone(x)
    names = ["backbone.body.layer3.1", "backbone.body.layer4.0.bn1", "backbone.fpn.layer_blocks.0.0"]
    yield "dropblock-detector", DETECTOR, recorded.plot_masks(names, channels=8)
    yield "stochastic-depth", DEPTH, draw_rates_by_depth()
    yield "patch-dropout", PATCH_DROPOUT, draw_patch_dropout(images)


DROPBLOCK = """## Recipes

### dropblock_resnet

`inject(resnet18, recipes.dropblock_resnet(p=0.2, block_size=5))`: the masks of one training step at
an identity skip and after a convolution of group 3, and after a convolution of group 4."""
UNET = """### dropblock_unet

`inject(deeplabv3_mobilenet_v3_large, recipes.dropblock_unet(p=0.2, block_size=5))`: the masks of one training
step after three convolutions of the decoder."""
DETECTOR = """### dropblock_detector

`inject(retinanet_resnet50_fpn, recipes.dropblock_detector(p=0.2, block_size=5, parts="both"))`: the masks of one
training step at an identity skip of group 3, after a convolution of group 4, and at a level of the feature pyramid."""
DEPTH = """### stochastic_depth

`recipes.stochastic_depth(p=0.2)`: the rate of each residual branch."""

PATCH_DROPOUT = f"""### patch_dropout

`recipes.patch_dropout(p=0.5)`: the patches of {PATCH}x{PATCH} pixels that the transformer sees, at their places.
The gray ones are removed, so they cost no time."""


def draw_patch_dropout(images: Tensor) -> Figure:
    tokens = TOKENS.to_tensor(images)
    remove, after = TokenDropout(p=0.5, prefix=0, remove=True), torch.full_like(tokens, 0.5)
    positions = torch.arange(tokens.shape[1], dtype=torch.float32).expand(len(tokens), -1).unsqueeze(-1)
    torch.manual_seed(2)
    kept = remove(positions).long().expand(-1, -1, tokens.shape[2])
    torch.manual_seed(2)
    return draw_rows({"before": images, "after": TOKENS.to_images(after.scatter(1, kept, remove(tokens)))})


def draw_rates_by_depth() -> Figure:
    figure = Figure(figsize=(8, 2.4), layout="constrained")
    models = {"resnet50": torchvision.models.resnet50(), "vit_b_16": torchvision.models.vit_b_16()}
    for axes, (name, model) in zip(figure.subplots(1, 2, sharey=True), models.items(), strict=True):
        sites = hookdrop.plan(model, recipes.stochastic_depth(p=0.2)).sites
        axes.bar(range(len(sites)), [site.p for site in sites], color="#2166ac")
        axes.set(title=name, xlabel="branch, from input to output")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("p")
    return figure


if __name__ == "__main__":
    main()
