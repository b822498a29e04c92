"""Build timm and torchvision models by name, each with an example input, without downloading anything."""

from __future__ import annotations

import inspect
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hookdrop.survey.facts import survey
from hookdrop.utils.errors import HookdropError, LayerError, nearest, needs
from hookdrop.utils.select import Entry
from hookdrop.utils.tables import shape_text
from hookdrop.utils.tensor_tree import tensors

LIBRARIES = ("timm", "torchvision")

# Input sizes of torchvision's models: the first row applies whose text is part of the builder's module path.
_TORCHVISION_SIZES = (
    (".video.resnet", (3, 16, 112, 112)),
    (".video.", (3, 16, 224, 224)),
    (".inception", (3, 299, 299)),
    ("", (3, 224, 224)),
)


@dataclass
class LoadedModel:
    """A model with random weights and an example input."""

    name: str
    library: str
    model: nn.Module
    example_input: Any

    def __str__(self) -> str:
        shapes = ", ".join(map(shape_text, self.summary()["input"]))
        return f"{self.name} from {self.library}, input {shapes}"

    def summary(self) -> dict[str, Any]:
        """Return name, library, and input shapes, for JSON."""
        shapes = [tuple(x.shape) for x in tensors(self.example_input)]
        return {"model": self.name, "library": self.library, "input": shapes}

    def entries(self, texts: list[str]) -> list[Entry]:
        """Convert command-line texts to `layers` entries: `type:Name` becomes the class with this name."""
        found = [_classes(self.model, text[5:]) if text.startswith("type:") else [text] for text in texts]
        return [entry for entries in found for entry in entries]


def load(text: str, size: str = "") -> LoadedModel:
    """Build the model that `text` names: `resnet50` (timm's if both have one), `timm:resnet50`, `torchvision:resnet50`.

    `size` replaces the model's default input size: `320`, `320x256`, or `3x320x320`. Missing dimensions keep their
    defaults.
    """
    sizes = _sizes(size)
    name, library = _find(text)
    # Seed the weights (a detector's boxes depend on them) without changing the global RNG state.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model, example = _build(name, library, sizes)
    return LoadedModel(name, library, model, example)


def _build(name: str, library: str, sizes: tuple[int, ...]) -> tuple[nn.Module, Any]:
    """Build on the meta device, which takes no memory, if a forward works there; otherwise on the CPU."""
    make = _from_timm if library == "timm" else _from_torchvision
    with suppress(Exception):  # any error: a model's code may depend on tensor values
        with torch.device("meta"):
            model, example = make(name, sizes)
        survey(model, example)
        return model, example
    try:
        return make(name, sizes)
    except HookdropError:
        raise
    except Exception as error:
        raise HookdropError(f"{library} can't build {name!r}: {type(error).__name__}: {error}") from error


def _find(text: str) -> tuple[str, str]:
    """Return the name and the library, by default timm."""
    prefix, colon, rest = text.partition(":")
    requested, name = (prefix, rest) if colon and prefix in LIBRARIES else ("", text)
    with needs("cli"):
        import timm
        import torchvision
    known = {"timm": timm.list_models(), "torchvision": torchvision.models.list_models()}
    # In timm, a tag after a dot (resnet50.a1_in1k) selects weights.
    tagged = ["timm"] if name.partition(".")[0] in known["timm"] else []
    libraries = [library for library in LIBRARIES if name in known[library]] or tagged
    for library in libraries:
        if requested in ("", library):
            return name, library
    near = {library: ", ".join(map(repr, nearest(name, known[library]))) for library in LIBRARIES}
    lines = [f"  {library + ':':13}{names}" for library, names in near.items() if names]
    hint = "did you mean:" if lines else "see timm.list_models() and torchvision.models.list_models()."
    unknown = f"there is no model {name!r} in {requested or 'timm or torchvision'}."
    raise HookdropError("\n".join([unknown, f"  {hint}", *lines]))


def _from_timm(name: str, sizes: tuple[int, ...]) -> tuple[nn.Module, Any]:
    import timm

    model = timm.create_model(name, pretrained=False)
    default = tuple(model.pretrained_cfg.get("input_size") or (3, 224, 224))
    return model, torch.zeros(1, *_resized(default, sizes))


def _from_torchvision(name: str, sizes: tuple[int, ...]) -> tuple[nn.Module, Any]:
    import torchvision

    build = torchvision.models.get_model_builder(name)
    weights = {"weights", "weights_backbone"} & set(inspect.signature(build).parameters)
    model = build(**dict.fromkeys(weights))
    default = next(size for part, size in _TORCHVISION_SIZES if part in build.__module__)
    image = torch.zeros(_resized(default, sizes))
    if ".detection." in build.__module__:
        return model, ([image],)
    if ".optical_flow." in build.__module__:
        return model, (image[None], image[None])
    return model, image[None]


def _sizes(text: str) -> tuple[int, ...]:
    parts = text.split("x") if text else []
    if not all(part.isdecimal() and int(part) for part in parts):
        raise HookdropError(f"can't read the input size {text!r}: write 320, 320x256, or 3x320x320.")
    return tuple(map(int, parts)) * (2 if len(parts) == 1 else 1)


def _resized(default: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[int, ...]:
    if len(sizes) > len(default):
        raise HookdropError(f"the input size has {len(default)} dimensions ({shape_text(default)}), got {len(sizes)}.")
    return default[: len(default) - len(sizes)] + sizes


def _classes(model: nn.Module, name: str) -> list[Entry]:
    """Return the model's classes with this name, without those derived from another one of them."""
    classes = {cls for module in model.modules() for cls in type(module).__mro__ if issubclass(cls, nn.Module)}
    found = [cls for cls in classes if cls.__name__ == name]
    if not found:
        names = sorted({type(module).__name__ for module in model.modules()})
        near = ", ".join(f"type:{cls}" for cls in nearest(name, names))
        hint = f"did you mean: {near}" if near else f"available:    {', '.join(names)}"
        raise LayerError(f"{type(model).__name__} has no module of type {name!r}.\n  {hint}")
    roots = [cls for cls in found if sum(issubclass(cls, other) for other in found) == 1]
    return sorted(roots, key=lambda cls: cls.__module__)
