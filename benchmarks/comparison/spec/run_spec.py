"""All that one training run depends on; its hash is the run's key."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt


class Part(BaseModel):
    """A part of a spec: never changed, and no field that nobody knows."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Data(Part):
    """Where the images come from."""

    name: str
    """`digits`, `digits-noisy`, `synthetic-cue`, `cifar10`, `cifar100` or `imagefolder:PATH`."""
    train_size: PositiveInt | None = None
    """Training images, as many of each class; all that there are if None."""
    validation_size: PositiveInt | None = None
    """Images to tune on and to draw curves of; a fifth of those that are not for testing if None."""
    image_size: PositiveInt | None = None
    """Side of the square images in pixels; the data's own if None."""
    augmentation: Literal["none", "shift", "crop-flip"] = "none"
    """Of training images: `shift` by up to 2 pixels, or a crop after padding by an eighth, and a flip."""
    label_noise: float | None = Field(default=None, ge=0, lt=1)
    """The fraction of training labels that are replaced by another class (`digits-noisy`: 0.2)."""
    root: str = "data"
    """The folder that `cifar10` and `cifar100` are in, or are downloaded to; notes on `imagefolder` are kept there."""
    strict: bool = False
    """Whether an unreadable image is an error; it is left out and counted otherwise."""
    workers: NonNegativeInt = 0
    """Processes that read images for one run; 0 reads them in the training process."""


class Model(Part):
    """An architecture of timm's or torchvision's."""

    name: str
    """As in `resnet18`; `timm:resnet18` and `torchvision:resnet18` say whose."""
    kwargs: dict[str, Any] = {}
    """What its constructor gets besides the number of classes (and of channels, with timm)."""
    identity: tuple[str, ...] = ()
    """Modules that are replaced by `nn.Identity`, such as a first max-pool when the images are small."""


class Optimizer(Part):
    """The optimizer; its learning rate goes down to 0 on half a cosine, or in steps."""

    name: Literal["AdamW", "SGD"] = "AdamW"
    lr: PositiveFloat = 0.01
    weight_decay: NonNegativeFloat = 0.05
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Of SGD, with Nesterov's; AdamW has none."""
    decay: Literal["cosine", "steps"] = "cosine"
    """`steps` divides the rate by 10 after half and after three quarters of the epochs."""


class Arm(Part):
    """A regularizer and where it sits; the arm without one has neither."""

    name: str
    kind: Literal["none", "regularizer", "recipe", "peer"] = "regularizer"
    call: str = ""
    """The regularizer or recipe without its rate, as `DropBlock(block_size=3)` or `timm.DropBlock2d(block_size=3)`."""
    p: float | None = None
    """The rate, or whatever it is that the schedule drives, at the end of the ramp."""
    layers: tuple[str, ...] = ()
    schedule: str = "LinearSchedule"
    """How the rate gets there: a schedule's name over all steps, or `none` for the full rate from the first step."""
    equal: Literal["p", "fraction"] = "p"
    """A peer's rate is `p`, or the rate at which it really drops the fraction `p`."""


class Run(Part):
    """One training run."""

    stage: Literal["tuning", "final"] = "final"
    """A tuning run is scored on the validation images, a final one on the test images."""
    data: Data
    model: Model
    arm: Arm
    optimizer: Optimizer = Optimizer()
    epochs: PositiveInt
    batch_size: PositiveInt = 20
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    precision: Literal["float32", "bfloat16"] = "float32"
    """`bfloat16` trains under autocast."""
    compile: bool = False
    device: str = "cpu"
    world: PositiveInt = 1
    """Processes that share the run's batches (DistributedDataParallel)."""
    max_steps: PositiveInt | None = None
    """Stop after so many optimizer steps, to see that everything works."""
    seed: NonNegativeInt
    """Of the training set, the weights, the batch order, the augmentation and the masks, each with its own stream."""

    @property
    def key(self) -> str:
        """SHA-256 of all of it, in 32 hexadecimal digits."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @property
    def cell(self) -> str:
        """What it is compared within: the same for all arms and seeds of one data set, size and model."""
        return cell_of(self.data, self.model)


def cell_of(data: Data, model: Model) -> str:
    """As in `resnet18 on digits, 100 images`."""
    return f"{model.name} on {data.name}, {data.train_size or 'all'} images"
