"""All timm and torchvision models by name: their families, and how to build them for their smallest valid input.

Weights are random; nothing is downloaded.
"""

import inspect
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import timm
import torch
import torchvision
from timm.models import _registry
from torch import Tensor, nn

BATCH = 2
SIDES = (32, 48, 64, 96, 112, 128, 160, 192, 224, 240, 256, 288, 320, 384, 448, 512, 1024)  # to try, in this order
# The names that torchvision builders give to the image size.
_SIZE_KEYWORDS = {".vision_transformer": "image_size", ".maxvit": "input_size"}


def names() -> list[str]:
    """Return all architectures of both libraries, such as `timm:resnet18`."""
    libraries = {"timm": timm.list_models(), "torchvision": torchvision.models.list_models()}
    return [f"{library}:{model}" for library, models in libraries.items() for model in models]


def family(name: str) -> str:
    """Return the module that defines a model, such as `resnet` (timm) or `torchvision.resnet`."""
    library, _, model = name.partition(":")
    if library == "timm":
        return str(_registry._model_to_module[model])
    return str(_builder(name).__module__).replace("torchvision.models", "torchvision")


@dataclass(frozen=True)
class Example:
    """The arguments of a forward in eval mode and in training mode, and the seed."""

    eval: tuple[Any, ...]
    train: tuple[Any, ...]
    seed: int = 0


@dataclass(frozen=True)
class Trial:
    """A model name with an input shape and the builder's keywords for it."""

    name: str
    shape: tuple[int, ...]  # of one sample
    keywords: dict[str, Any] = field(default_factory=dict)

    def build(self, device: str = "cpu") -> nn.Module:
        torch.manual_seed(0)
        library, _, model = self.name.partition(":")
        with torch.device(device):
            if library == "timm":
                return timm.create_model(model, pretrained=False, **self.keywords)
            weights = {"weights", "weights_backbone"} & _parameters_of(self.name)
            return _builder(self.name)(**dict.fromkeys(weights), **self.keywords)  # None: random weights

    def example(self, device: str = "cpu") -> Example:
        """Create a batch of `BATCH` samples."""
        # One seed per model: similar models with the same seed would draw the same masks.
        seed = zlib.crc32(self.name.encode())
        torch.manual_seed(seed)
        x = torch.randn(BATCH, *self.shape, device=device)
        if ".detection." in family(self.name):
            images = [image.sigmoid() for image in x]
            return Example((images,), (images, [_target(self.shape[-1], device) for _ in images]), seed)
        if ".optical_flow." in family(self.name):
            arguments = (x.tanh(), x.flip(0).tanh(), 2)
            return Example(arguments, arguments, seed)
        return Example((x,), (x,), seed)

    def about(self) -> dict[str, Any]:
        """Return the fields of the record that describe the trial."""
        built = {"built": self.keywords} if self.keywords else {}
        return {"input": "x".join(map(str, (BATCH, *self.shape))), **built}


def trials(name: str, skeleton: nn.Module) -> Iterator[Trial]:
    """Yield the ways to build `name`, smallest input first; the default model states its native input size."""
    return _timm_trials(name, skeleton) if name.startswith("timm:") else _torchvision_trials(name)


def skeleton_of(name: str) -> nn.Module:
    """Build the default model on the meta device, or on the CPU if its constructor needs values."""
    try:
        return Trial(name, ()).build("meta")
    except NotImplementedError:
        return Trial(name, ()).build()


def accepted(trial: Trial, skeleton: nn.Module) -> bool:
    """Return whether a training forward works on the meta device, or cannot be tried there."""
    if not next(skeleton.parameters()).is_meta:
        return True
    try:
        model = trial.build("meta") if trial.keywords else skeleton
        model.train()
        with torch.no_grad():
            model(*trial.example("meta").train)
    except Exception as error:  # models reject small inputs with any kind of error
        needs_values = ("meta tensor", "aten::", "Meta")
        text = f"{type(error).__name__}: {error}"
        return isinstance(error, NotImplementedError) or any(words in text for words in needs_values)
    return True


def _timm_trials(name: str, skeleton: nn.Module) -> Iterator[Trial]:
    own = tuple(getattr(skeleton, "pretrained_cfg", {}).get("input_size") or (3, 224, 224))
    accepts_size = False
    with suppress(Exception):  # builders raise different errors for unknown keywords
        Trial(name, own, {"img_size": own[-1]}).build("meta")
        accepts_size = True
    for side in sorted({*SIDES, own[-1]}):
        shape = own if side == own[-1] else (own[0], side, side)
        yield Trial(name, shape)
        if accepts_size and side != own[-1]:
            yield Trial(name, shape, {"img_size": side})
        if side > own[-1]:
            return


def _torchvision_trials(name: str) -> Iterator[Trial]:
    module = family(name)
    if ".video." in module:
        clips = ((4, 32), (8, 32), (8, 64), (16, 64), (16, 112), (16, 224))
        yield from (Trial(name, (3, frames, side, side)) for frames, side in clips)
    elif ".detection." in module:
        # Random weights give low scores. Without a threshold there are always boxes to compare; eight are enough.
        prefix = "box_" if "rcnn" in module else ""
        few = {f"{prefix}score_thresh": 0.0, f"{prefix}detections_per_img": 8}
        fixed = ".ssd" in module
        for side in (64,) if fixed else (64, 128, 224):
            yield Trial(name, (3, side, side), few if fixed else {"min_size": side, "max_size": side, **few})
    elif ".optical_flow." in module:
        yield from (Trial(name, (3, side, side)) for side in (128, 256))
    else:
        keyword = next((keyword for part, keyword in _SIZE_KEYWORDS.items() if part in module), None)
        default = {"init_weights": True} if "init_weights" in _parameters_of(name) else {}
        for side in (*SIDES[:12], 299):
            value = (side, side) if keyword == "input_size" else side
            yield Trial(name, (3, side, side), {keyword: value} if keyword and side != 224 else default)


def _target(side: int, device: str) -> dict[str, Tensor]:
    box = [side * 0.25, side * 0.25, side * 0.75, side * 0.75]
    mask = torch.zeros(1, side, side, dtype=torch.uint8, device=device)
    mask[:, side // 4 : side * 3 // 4, side // 4 : side * 3 // 4] = 1
    return {
        "boxes": torch.tensor([box], device=device),
        "labels": torch.ones(1, dtype=torch.int64, device=device),
        "masks": mask,
        "keypoints": torch.tensor([[[side / 2, side / 2, 1.0]] * 17], device=device),
    }


def _parameters_of(name: str) -> set[str]:
    return set(inspect.signature(_builder(name)).parameters)


def _builder(name: str) -> Any:
    return torchvision.models.get_model_builder(name.removeprefix("torchvision:"))
