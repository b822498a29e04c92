"""Detached copies of activations, safe from in-place edits."""

from __future__ import annotations

import torch
from torch import Tensor

from hookdrop.errors import LayerError

Place = torch.device | str | None
"""Where copies go; None is where the tensor is."""


class NotKept(LayerError, KeyError):
    """A layer was asked for of which nothing was kept: a `KeyError` as a dict's is, with a text that can be read."""

    __str__ = Exception.__str__


def place(to: Place, owner: str) -> Place:
    """`to`, if there is such a device."""
    if to is not None:
        try:
            torch.empty(0, device=to)
        except (RuntimeError, TypeError, AssertionError, NotImplementedError) as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(
                f'{owner}: to must be a device such as "cpu" or "cuda:0", or None, got {to!r}.\n  PyTorch: {reason}'
            ) from None
    return to


def copied(x: Tensor, to: Place = None) -> Tensor:
    """`x` without its graph, in memory of its own: an in-place operation that follows must not change it."""
    with torch.inference_mode(False), torch.no_grad():
        return x.detach().to(device=x.device if to is None else to, copy=True)
