"""Choose an example input for a model, and change its batch size."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hookdrop.core.tensor_tree import describe, map_tensors, tensors

IMAGE = (3, 224, 224)


@dataclass(frozen=True)
class Example:
    """An input of a model."""

    value: Any
    """A tensor, a tuple of arguments or a mapping of keyword arguments."""
    source: str
    """Where it comes from, as `plan` shows it."""
    is_assumed: bool = False
    """Whether the model may expect another input."""

    axis: int = 0
    """The axis of the samples in the first tensor, 0 or 1."""

    @property
    def batch(self) -> int:
        """The batch size: a size of the first tensor."""
        return next((x.shape[self.axis] for x in tensors(self.value) if x.dim() > self.axis), 1)

    def resized(self, batch: int) -> Any:
        """Return the input with another batch size: tensors with an axis of that size repeat their rows."""
        rows = torch.arange(batch, device="cpu") % self.batch
        return self._with_batch(lambda x: x[rows.to(x.device)])

    def varied(self, rows: Sequence[int]) -> Any:
        """Return the input with these of several samples, which differ in their numbers, if need be in the tokens."""
        generator, order = torch.Generator().manual_seed(0), itertools.count()

        def vary(x: Tensor) -> Tensor:
            x, is_first = x[torch.arange(max(rows) + 1, device=x.device) % len(x)], next(order) == 0
            if x.is_floating_point():
                scale = 1.0 if x[0].numel() < 2 or not x[0].std() else x[0].std()
                x = x + torch.randn(x.shape, generator=generator, device="cpu").to(x) * scale
            elif is_first and (x[1:] == x[:-1]).unsqueeze(1).flatten(1).all(1).any():
                x[1::2] = int(not x.any())
            return x[list(rows)]

        return self._with_batch(vary)

    def one_replaced(self) -> tuple[Any, Any, int, int]:
        """Return the input with several samples, the same with one of them replaced, its index, and their number."""
        given = tensors(self.value)
        # Integers beside others may be indices of samples, which then stay.
        keeps = len(given) > 1 and not all(x.is_floating_point() for x in given) and self.batch > 1
        size = self.batch if keeps else 3
        index, rows = (size - 1) // 2, [*range(size)]
        return self.varied(rows), self.varied([*rows[:index], index + 1, *rows[index + 1 :]]), index, size

    def _with_batch(self, fn: Callable[[Tensor], Tensor]) -> Any:
        """Apply `fn` to the tensors with the batch on the axis of the first one, or on the other, as in masks."""
        size = self.batch

        def change(x: Tensor) -> Tensor:
            axes = [axis for axis in (self.axis, 1 - self.axis) if x.shape[axis : axis + 1] == (size,)]
            return fn(x.movedim(axes[0], 0)).movedim(0, axes[0]) if axes else x

        return map_tensors(self.value, change)


_FIXES: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "x.float()": ("has another dtype than the model", lambda x: x.float()),
    "x[None]": ("has no batch axis", lambda x: x[None]),
    "x.movedim(-1, 1)": ("has its channels last", lambda x: x.movedim(-1, 1)),
    "x.movedim(-1, 0)[None]": ("has its channels last and no batch axis", lambda x: x.movedim(-1, 0)[None]),
    "x[:, :1]": ("has more than the one channel that the model takes", lambda x: x[:, :1]),
    "x[:, :3]": ("has more than the 3 channels that the model takes", lambda x: x[:, :3]),
    "x[:, :1].expand(-1, 3, -1, -1)": (
        "does not have the 3 channels that the model takes",
        lambda x: x[:, :1].expand(-1, 3, -1, -1),
    ),
}


def fault_of(example: Any, run: Callable[[Any], object]) -> str:
    """Return what is wrong with an example, with the fix, if `run` then accepts it; empty if nothing helps."""
    first = next(iter(tensors(example)), torch.zeros(()))
    fixes: list[tuple[str, str, Callable[[], Any]]] = [
        ("example_input=(x,)", "is one argument of the model", lambda: (example,)),
        ("example_input=tuple(x)", "is several arguments", lambda: tuple(example)),
        ("x[0]", "is a batch with targets", lambda: example[0]),
    ][: 3 * isinstance(example, tuple | list) or isinstance(example, Mapping)]

    def fixed(fix: Callable[[Tensor], Tensor]) -> Callable[[], Any]:
        return lambda: map_tensors(example, lambda x: fix(x) if x is first else x)

    fixes += [(code, fault, fixed(fix)) for code, (fault, fix) in _FIXES.items()]
    for code, fault, changed in fixes:
        with suppress(Exception):
            run(changed())
            return f"the example {fault}: pass {code}"
    return ""


def examples(model: nn.Module, given: Any) -> Iterator[Example]:
    """Yield the inputs to try, the best first: the given one, what the library offers, an assumed image."""
    if given is not None:
        yield Example(given, f"example_input {describe(given)}")
        return
    first = next(model.parameters(), torch.zeros(0))
    dtype = first.dtype if first.is_floating_point() else torch.get_default_dtype()

    def image(size: tuple[int, ...]) -> Tensor:
        return torch.zeros(2, *size, dtype=dtype, device=first.device)

    for part in model.modules():
        settings = getattr(part, "pretrained_cfg", None) or getattr(part, "default_cfg", None) or {}
        size = getattr(settings, "get", lambda key: None)("input_size")
        if size:  # the model itself, or inside wrappers
            inner = (getattr(layer, "img_size", None) for layer in part.children())  # of `create_model(img_size=...)`
            built = [(size[0], *own) for own in inner if isinstance(own, tuple) and tuple(size[1:]) != own]
            for own in (*built[:1], tuple(size)):
                yield Example(image(own), f"timm's input size {own}")
            break
        if part is not model and list(part.parameters(recurse=False)):
            break
    dummy = getattr(model, "dummy_inputs", None)
    if isinstance(dummy, dict) and tensors(dummy):
        yield Example(map_tensors(dummy, lambda x: x.to(first.device)), "the model's dummy_inputs")
    yield Example(image(IMAGE), f"an assumed image {IMAGE}", is_assumed=True)
