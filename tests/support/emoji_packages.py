"""Small packages in the format of emoji-datasource-google and emoji-datasource-twitter."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

VENDORS = ("google", "twitter")
CATEGORIES = {"Flags": 12, "Food & Drink": 21, "Symbols": 30}


def listed() -> list[dict[str, Any]]:
    """An emoji.json: one emoji per image, a skin tone, and an emoji that only one vendor drew."""
    names = [(category, i) for category, count in CATEGORIES.items() for i in range(count)]
    emoji = [{"category": category, "image": f"{category[:2].lower()}{i}.png"} for category, i in names]
    emoji.append({"category": "Component", "image": "tone.png"})
    drawn = [one | {f"has_img_{vendor}": True for vendor in VENDORS} for one in emoji]
    return [*drawn, {"category": "Flags", "image": "new.png", "has_img_google": True, "has_img_twitter": False}]


def png(vendor: str, i: int) -> bytes:
    """A transparent image with an opaque square, whose color identifies vendor and emoji."""
    pixels = np.zeros((64, 64, 4), np.uint8)
    pixels[16:48, 16:48] = (40 * VENDORS.index(vendor), 3 * i, 100, 255)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def files_of(vendor: str, version: str = "16.0.0") -> dict[str, bytes]:
    """The files of a vendor's package."""
    emoji = listed()
    about = {"version": version, "homepage": "https://example.com"}
    images = {f"img/{vendor}/64/{one['image']}": png(vendor, i) for i, one in enumerate(emoji)}
    return {"package.json": json.dumps(about).encode(), "emoji.json": json.dumps(emoji).encode(), **images}


def write(root: Path, version: str = "16.0.0") -> Path:
    for vendor in VENDORS:
        for name, content in files_of(vendor, version).items():
            path = root / "node_modules" / f"emoji-datasource-{vendor}" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    return root
