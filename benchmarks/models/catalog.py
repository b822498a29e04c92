"""Every model of timm and torchvision by name: its family, and how to build it for the smallest input that it takes.

Nothing is ever downloaded: weights are random.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import timm
import torch
import torchvision
from timm.models import _registry
from torch import Tensor, nn

from models.weights import quick_weights

BATCH = 2
# Side lengths to try, in this order; the model's own comes last if it is none of them.
LADDER = (32, 48, 64, 96, 112, 128, 160, 192, 224, 240, 256, 288, 320, 384, 448, 512, 1024)
# How builders of torchvision call the side length that a model is built for.
_SIZE_KEYWORDS = {".vision_transformer": "image_size", ".maxvit": "input_size"}
_FIXED_DETECTORS = (".ssd", ".ssdlite")


@dataclass(frozen=True)
class Name:
    """A model by name."""

    library: str
    name: str

    def __str__(self) -> str:
        return f"{self.library}:{self.name}"

    @property
    def family(self) -> str:
        """The module that it is defined in: `resnet` of timm, `torchvision.resnet` of torchvision."""
        if self.library == "timm":
            return str(_registry._model_to_module[self.name])
        return self.module.replace("torchvision.models", "torchvision")

    @property
    def module(self) -> str:
        """Where the builder of a torchvision model lives."""
        return str(torchvision.models.get_model_builder(self.name).__module__)


@dataclass(frozen=True)
class Trial:
    """A model as it is built for one input."""

    name: Name
    shape: tuple[int, ...]
    """Of one sample."""
    keywords: dict[str, Any] = field(default_factory=dict)

    def build(self, device: str = "cpu") -> nn.Module:
        """The model with random weights."""
        torch.manual_seed(0)
        with quick_weights(), torch.device(device):
            return _build(self.name, self.keywords)

    def example(self, device: str = "cpu") -> Example:
        """A batch for it."""
        # One for each model: like models with one seed would all have the same masks.
        seed = zlib.crc32(str(self.name).encode())
        torch.manual_seed(seed)
        x = torch.randn(BATCH, *self.shape, device=device)
        if ".detection." in self.name.family:
            images = [image.sigmoid() for image in x]
            return Example((images,), (images, [_target(self.shape[-1], device) for _ in images]), seed)
        if ".optical_flow." in self.name.family:
            arguments = (x.tanh(), x.flip(0).tanh(), 2)
            return Example(arguments, arguments, seed)
        return Example((x,), (x,), seed)

    def about(self) -> dict[str, Any]:
        """For the record."""
        return {
            "input": "x".join(map(str, (BATCH, *self.shape))),
            **({"built": self.keywords} if self.keywords else {}),
        }


@dataclass(frozen=True)
class Example:
    """The arguments of a forward in eval mode and in training, and what its random numbers start from."""

    eval: tuple[Any, ...]
    train: tuple[Any, ...]
    seed: int = 0


def names(library: str | None = None) -> list[Name]:
    """Every architecture of both libraries, or of one."""
    found = [Name("timm", name) for name in timm.list_models()]
    found += [Name("torchvision", name) for name in torchvision.models.list_models()]
    return [name for name in found if library in (None, name.library)]


def families(library: str = "timm") -> set[str]:
    """The families of a library."""
    return {name.family for name in names(library)}


def trials(name: Name, skeleton: nn.Module) -> Iterator[Trial]:
    """How `name` may be built, the smallest input first.

    Args:
        name: the model.
        skeleton: it as it is built by default, on the meta device, for what it says about its own input.
    """
    if name.library == "timm":
        yield from _timm_trials(name, skeleton)
    else:
        yield from _torchvision_trials(name)


def skeleton_of(name: Name) -> nn.Module:
    """The model as it is built by default, on the meta device; on the CPU if its code needs values to be built."""
    try:
        return Trial(name, ()).build("meta")
    except NotImplementedError:
        return Trial(name, ()).build()


def accepted(trial: Trial, skeleton: nn.Module) -> bool:
    """Whether a training forward works on the meta device, or can't be tried there."""
    if not next(skeleton.parameters()).is_meta:
        return True
    try:
        model = trial.build("meta") if trial.keywords else skeleton
        model.train()
        with torch.no_grad():
            model(*trial.example("meta").train)
    except Exception as error:  # whatever code of a model does with an input that is too small
        return _needs_values(error)
    return True


def _needs_values(error: Exception) -> bool:
    text = f"{type(error).__name__}: {error}"
    return isinstance(error, NotImplementedError) or "meta tensor" in text or "aten::" in text or "Meta" in text


def _timm_trials(name: Name, skeleton: nn.Module) -> Iterator[Trial]:
    own = tuple(getattr(skeleton, "pretrained_cfg", {}).get("input_size") or (3, 224, 224))
    sized = takes(name, img_size=own[-1])
    for side in sorted({*LADDER, own[-1]}):
        shape = (own[0], side, side)
        if side == own[-1]:
            yield Trial(name, own)
            continue
        yield Trial(name, shape)
        if sized:
            yield Trial(name, shape, {"img_size": side})
        if side > own[-1]:
            return


def _torchvision_trials(name: Name) -> Iterator[Trial]:
    module = name.module
    if ".video." in module:
        clips = ((4, 32), (8, 32), (8, 64), (16, 64), (16, 112), (16, 224))
        yield from (Trial(name, (3, frames, side, side)) for frames, side in clips)
    elif ".detection." in module:
        yield from _detector_trials(name)
    elif ".optical_flow." in module:
        yield from (Trial(name, (3, side, side)) for side in (128, 256))
    else:
        keyword = next((keyword for part, keyword in _SIZE_KEYWORDS.items() if part in module), None)
        plain = {"init_weights": True} if "init_weights" in _parameters_of(name) else {}
        for side in (*LADDER[:12], 299):
            value = (side, side) if keyword == "input_size" else side
            yield Trial(name, (3, side, side), {keyword: value} if keyword and side != 224 else plain)


def _detector_trials(name: Name) -> Iterator[Trial]:
    # Few boxes, but whatever their scores: with random weights all are low, and no box is nothing to compare.
    if any(part in name.module for part in _FIXED_DETECTORS):
        yield Trial(name, (3, 64, 64), {"score_thresh": 0.0, "detections_per_img": 8})
        return
    few: dict[str, Any] = {"score_thresh": 0.0, "detections_per_img": 8}
    if "rcnn" in name.module:
        few = {f"box_{key}": value for key, value in few.items()}
    for side in (64, 128, 224):
        yield Trial(name, (3, side, side), {"min_size": side, "max_size": side, **few})


def _target(side: int, device: str) -> dict[str, Tensor]:
    """One object: a box with its label, mask and keypoints."""
    box = [side * 0.25, side * 0.25, side * 0.75, side * 0.75]
    mask = torch.zeros(1, side, side, dtype=torch.uint8, device=device)
    mask[:, side // 4 : side * 3 // 4, side // 4 : side * 3 // 4] = 1
    return {
        "boxes": torch.tensor([box], device=device),
        "labels": torch.ones(1, dtype=torch.int64, device=device),
        "masks": mask,
        "keypoints": torch.tensor([[[side / 2, side / 2, 1.0]] * 17], device=device),
    }


def takes(name: Name, **keywords: Any) -> bool:
    """Whether the builder takes these keywords."""
    try:
        with quick_weights(), torch.device("meta"):
            _build(name, keywords)
    except Exception:  # each builder refuses in its own way
        return False
    return True


def _build(name: Name, keywords: dict[str, Any]) -> nn.Module:
    if name.library == "timm":
        return timm.create_model(name.name, pretrained=False, **keywords)
    build: Any = torchvision.models.get_model_builder(name.name)
    without = {"weights", "weights_backbone"} & _parameters_of(name)
    return build(**dict.fromkeys(without), **keywords)


def _parameters_of(name: Name) -> set[str]:
    return set(inspect.signature(torchvision.models.get_model_builder(name.name)).parameters)
