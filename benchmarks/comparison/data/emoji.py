"""Emoji that two vendors drew: train on the images of one vendor, test on unseen emoji of both.

The images come from two npm packages of the same version, `emoji-datasource-google` (Noto, Apache License 2.0) and
`emoji-datasource-twitter` (Twemoji, CC BY 4.0): 1,906 emoji in nine categories, 64x64 pixels, without skin-tone
variants. The category is the class. npm downloads them below `root`, with the command `FETCH`.

The emoji are split, not the images: 606 fixed emoji, stratified by category, are used for testing, and neither vendor's
image of them is trained on. The test images of both vendors are two test sets with separate results. Gender variants of
an emoji ("man cook", "woman cook") count as different emoji, and may be on both sides of the split.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from comparison.data.task import DataError, Task, hold_out, stored
from comparison.spec.run_spec import Data

VENDORS = ("google", "twitter")
"""The training vendor, and the one that is only tested."""
VERSION = "16.0.0"
PACKAGES = " ".join(f"emoji-datasource-{vendor}@{VERSION}" for vendor in VENDORS)
FETCH = f"npm install --no-save --ignore-scripts {PACKAGES}"
SIDE, TEST_EMOJI, WHITE = 64, 606, 255
HALF = (0.5, 0.5, 0.5)
"""Mean and standard deviation for pixels in [0, 1], as EfficientNet-Lite was trained with."""


def load(data: Data) -> Task:
    """Load the images below `data.root`, on a white background."""
    root, side = Path(data.root), data.image_size or SIDE
    emoji = _emoji(root)
    classes = sorted({one["category"] for one in emoji})
    labels_E = torch.tensor([classes.index(one["category"]) for one in emoji])
    pool, test = hold_out(data.name, labels_E, classes, min(TEST_EMOJI, len(emoji) // 3))
    paths = [folder(root, vendor) / "img" / vendor / "64" / one["image"] for vendor in VENDORS for one in emoji]
    how = f"download the images again: {FETCH} --prefix {root}"
    try:
        contents = [path.read_bytes() for path in paths]
        x_NCHW = torch.stack([_pixels(path, side) for path in paths])
    except OSError as error:
        raise DataError(f"cannot read an emoji: {error}.", how) from error
    source = stored(x_NCHW, side, data.augmentation, fill=WHITE, statistics=(HALF, HALF))
    both, other = torch.cat([test, test + len(emoji)]), torch.arange(2 * len(test)) >= len(test)
    sets = {f"{VENDORS[0]}, the training vendor": ~other, f"{VENDORS[1]}, the other vendor": other}
    sha256 = hashlib.sha256(b"".join(contents)).hexdigest()
    return Task(data.name, len(classes), labels_E.repeat(len(VENDORS)), pool, both, source, sets, sha256)


def folder(root: Path, vendor: str) -> Path:
    """The folder in which npm installs a vendor's package."""
    return root / "node_modules" / f"emoji-datasource-{vendor}"


def _emoji(root: Path) -> list[dict[str, Any]]:
    """The emoji that both vendors drew, in the order of the first vendor's package."""
    for package in (folder(root, vendor) for vendor in VENDORS):
        how = f"download it:   {FETCH} --prefix {root}"
        try:
            version = json.loads((package / "package.json").read_text())["version"]
        except FileNotFoundError:
            raise DataError(f"the package {package.name!r} is not in {str(root.absolute())!r} (`root`).", how) from None
        if version != VERSION:
            raise DataError(f"{package.name} has version {version}, but these results need {VERSION}.", how)
    listed = json.loads((folder(root, VENDORS[0]) / "emoji.json").read_text())
    drawn = [one for one in listed if all(one[f"has_img_{vendor}"] for vendor in VENDORS)]
    return [one for one in drawn if one["category"] != "Component"]  # five swatches of skin tones


def _pixels(path: Path, side: int) -> Tensor:
    with Image.open(path) as image:
        drawn = image.convert("RGBA")
    page = Image.new("RGBA", drawn.size, "white")
    page.alpha_composite(drawn)
    x_CHW: Tensor = v2.functional.pil_to_tensor(page.convert("RGB"))
    resized: Tensor = v2.functional.resize(x_CHW, [side, side], antialias=True)
    return resized
