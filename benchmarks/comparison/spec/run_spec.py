"""The specification of a training run: its hash is the run's key, its seed the root of independent random streams."""

import hashlib
import json
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt


class ConfigError(ValueError):
    """An invalid comparison; nothing was trained."""


def suggest(name: str, known: Iterable[str]) -> str:
    """A line with the closest known names, or with all of them if none is close."""
    by_lower = {one.lower(): one for one in known}
    if close := get_close_matches(name.lower(), by_lower, n=3, cutoff=0.5):
        return f"  did you mean: {', '.join(by_lower[one] for one in close)}"
    names = list(by_lower.values())
    return f"  available:    {', '.join(names[:20])}{' ...' if len(names) > 20 else ''}"


def seed_of(seed: int, *stream: str | int) -> int:
    """The seed of a named stream, for example `seed_of(3, "order", epoch)`."""
    text = "/".join(map(str, (seed, *stream)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, *stream: str | int) -> torch.Generator:
    """A CPU generator at the start of a named stream."""
    return torch.Generator().manual_seed(seed_of(seed, *stream))


class Part(BaseModel):
    """Base class of specs: frozen, without extra fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Data(Part):
    name: str  # digits, synthetic-cue, emoji or imagefolder:PATH
    train_size: PositiveInt | None = None  # training images, balanced over classes; None uses all
    validation_size: PositiveInt | None = None  # for tuning and curves; None uses a fifth of all but the test images
    image_size: PositiveInt | None = None  # side length in pixels; None uses the dataset's default
    augmentation: Literal["none", "crop-flip"] = "none"
    """`crop-flip` pads by an eighth, crops and flips."""
    root: str = "data"
    """Folder of the packages of `emoji`."""


class Model(Part):
    name: str  # such as resnet18 or timm:resnet18
    kwargs: dict[str, Any] = {}  # arguments of the constructor besides the numbers of classes and of channels
    pretrained: bool | Literal["package"] = False
    """True starts from timm's weights, downloaded if missing; `package` from those in a Python package."""
    identity: tuple[str, ...] = ()  # modules to replace with nn.Identity, such as the max-pool for small images


class Optimizer(Part):
    """The optimizer, whose learning rate has a cosine decay to 0."""

    name: Literal["AdamW"] = "AdamW"
    lr: PositiveFloat = 0.01
    weight_decay: NonNegativeFloat = 0.05


class Arm(Part):
    """A regularizer and its sites, or none."""

    name: str
    kind: Literal["none", "regularizer", "recipe", "peer", "probe"] = "regularizer"
    call: str = ""  # such as DropBlock(p=0.1, block_size=3) or timm.DropBlock2d(drop_prob=0.1, block_size=3)
    p: float | None = None  # the target rate, or another scheduled parameter; it replaces the one in `call`
    layers: tuple[str, ...] = ()
    schedule: str = "LinearSchedule"  # of the rate over all steps; `none` is the full rate from the first step
    equal: Literal["p", "fraction"] = "p"  # of a peer: the rate p, or the rate at which it drops the fraction p
    lr: PositiveFloat | None = None  # of a probe: the learning rate of its only layer


class Training(Part):
    optimizer: Optimizer = Optimizer()
    epochs: PositiveInt
    batch_size: PositiveInt = 20
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    channels_last: bool = False  # of images and convolution weights, which is faster for most convolutions
    device: str = "cpu"
    max_steps: PositiveInt | None = None  # stop every run after this many optimizer steps, for a smoke test


class Run(Training):
    stage: Literal["tuning", "final"] = "final"  # scored on validation images, or on test images
    data: Data
    model: Model
    arm: Arm
    seed: NonNegativeInt  # of separate streams for the training set, weights, batch order, augmentation and masks

    @property
    def key(self) -> str:
        """The first 32 hexadecimal digits of the SHA-256 of the spec."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @property
    def cell(self) -> str:
        """The title of its cell, shared by all arms and seeds of one dataset, size and model."""
        return cell_of(self.data, self.model)


def cell_of(data: Data, model: Model) -> str:
    """Format a cell title, such as `resnet18 on digits, 100 images`."""
    return f"{model.name} on {data.name}, {data.train_size or 'all'} images"
