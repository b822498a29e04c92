"""Build timm and torchvision models by name, each with an example input, without downloading anything."""

from __future__ import annotations

import inspect
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from hookdrop.survey.facts import survey
from hookdrop.utils.errors import HookdropError, nearest, needs
from hookdrop.utils.tables import shape_text
from hookdrop.utils.tensor_tree import tensors

IMAGE, VIDEO = (3, 224, 224), (3, 16, 224, 224)


def load(text: str, size: str = "") -> tuple[str, nn.Module, Any]:
    """Return a title, the model that `text` names, with random weights, and an example input.

    `resnet50` is timm's if both libraries have one; `torchvision:resnet50` names the library. `size` replaces the last
    dimensions of the model's default input size: `320`, `320x256`, or `3x320x320`.
    """
    library, name = _find(text)
    # Seed the weights (a detector's boxes depend on them) without changing the global RNG state.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model, example = _build(library, name, size)
    shapes = ", ".join(shape_text(x.shape) for x in tensors(example))
    return f"{name} from {library}, input {shapes}", model, example


def _find(text: str) -> tuple[str, str]:
    """Return the library, by default timm, and the name of a model in it."""
    with needs("cli"):
        import timm
        import torchvision
    known = {"timm": timm.list_models(), "torchvision": torchvision.models.list_models()}
    requested, _, name = text.rpartition(":")
    for library in known:
        # In timm, a tag after a dot (resnet50.a1_in1k) selects weights.
        is_tagged = library == "timm" and name.partition(".")[0] in known[library]
        if requested in ("", library) and (name in known[library] or is_tagged):
            return library, name
    near = [f"{library}:{one}" for library, names in known.items() for one in nearest(name, names)]
    hint = f"did you mean: {', '.join(near)}" if near else "see timm.list_models(), torchvision.models.list_models()"
    own = "a model of your own: print(hookdrop.layers(model, example_input)) and hookdrop.plan(...) in Python"
    raise HookdropError(f"there is no model {text!r} in timm or torchvision.\n  {hint}\n  {own}")


def _build(library: str, name: str, size: str) -> tuple[nn.Module, Any]:
    """Build on the meta device, which takes no memory, if a forward works there; otherwise on the CPU."""
    make = _from_timm if library == "timm" else _from_torchvision
    with suppress(Exception):  # any error: a model's code may depend on tensor values
        with torch.device("meta"):
            model, example = make(name, size)
        survey(model, example)
        return model, example
    try:
        return make(name, size)
    except HookdropError:
        raise
    except Exception as error:
        raise HookdropError(f"{library} can't build {name!r}: {type(error).__name__}: {error}") from error


def _from_timm(name: str, size: str) -> tuple[nn.Module, Any]:
    import timm

    model = timm.create_model(name, pretrained=False)
    shape = _sized(tuple(model.pretrained_cfg.get("input_size") or IMAGE), size)
    if size:
        with suppress(TypeError):  # of models for images of any size
            model = timm.create_model(name, pretrained=False, img_size=shape[-2:])
    return model, torch.zeros(1, *shape)


def _from_torchvision(name: str, size: str) -> tuple[nn.Module, Any]:
    import torchvision

    build = torchvision.models.get_model_builder(name)
    weights = {"weights", "weights_backbone"} & set(inspect.signature(build).parameters)
    image = torch.zeros(_sized(VIDEO if ".video." in build.__module__ else IMAGE, size))
    if ".detection." in build.__module__:
        return build(**dict.fromkeys(weights)), ([image],)
    images = 2 if ".optical_flow." in build.__module__ else 1
    return build(**dict.fromkeys(weights)), (image[None],) * images


def _sized(default: tuple[int, ...], text: str) -> tuple[int, ...]:
    parts = text.split("x") if text else []
    sizes = tuple(int(part) for part in parts if part.isdecimal()) * (2 if len(parts) == 1 else 1)
    if len(sizes) < len(parts) or 0 in sizes or len(sizes) > len(default):
        raise HookdropError(
            f"can't read the input size {text!r} of a model with {shape_text(default)}: "
            "write 320, 320x256, or 3x320x320."
        )
    return default[: len(default) - len(sizes)] + sizes
