"""LayerDrop: dropping whole layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hookdrop.errors import InjectionError, LayerError, ShapeError
from hookdrop.kernels.random_numbers import rand
from hookdrop.regularizers.base import BELOW_1, Rate, Regularizer, check_batch_axis
from hookdrop.utils.validation import drop_rate, floating


def layer_drop(output: Tensor, input: Tensor, p: float | Tensor, training: bool = True) -> Tensor:
    """Return the `input` of a layer instead of its `output` with probability `p`, in [0, 1): see `LayerDrop`."""
    return _layer_drop(output, input, BELOW_1.argument(p, "layer_drop"), training)


def _layer_drop(output: Tensor, input: Tensor, p: float | Tensor, training: bool = True) -> Tensor:
    floating(output, "layer_drop")
    if output.shape != input.shape:
        raise ShapeError(
            f"got an output {tuple(output.shape)} of an input {tuple(input.shape)}: only a layer that keeps the shape "
            "can be skipped.\n  hook other layers, or drop residual branches: DropPath(p=...)"
        )
    if not training or (not isinstance(p, Tensor) and p == 0.0):
        return output
    # A 0-d tensor, so that nothing waits for its value. The gradients of a skipped layer are zeros.
    dropped = rand((), torch.float32, output.device) < p
    return torch.where(dropped, input.to(output.dtype), output)


_BRANCHES = (
    "attn",
    "attention",
    "self_attn",
    "self_attention",
    "cross_attn",
    "mlp",
    "ffn",
    "feed_forward",
    "fc1",
    "fc2",
)


class LayerDrop(Regularizer):
    """Skip a layer with probability `p`: it returns its input. One draw per layer and forward, without rescaling.

    Hook layers that keep the shape: transformer layers such as `"model.layers.*"`. If a layer returns several tensors,
    the first is replaced. The layer is computed all the same, so this saves no time. Its parameters get gradients of
    zero instead of none, so DistributedDataParallel needs no `find_unused_parameters`. Each rank draws its own layers.

    Args:
        p: probability of skipping the layer, in [0, 1).
        keep_prob: 1 - p, instead of `p`.

    Shape: any; the layer's output has the shape of its input.

    Raises:
        LayerError: in `inject`, if the layer is a branch of a layer by its name, such as `mlp`.
        ShapeError: in forward, if the layer changes the shape.
        InjectionError: in forward, if the layer fills a KV cache.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> x, fx = torch.zeros(2), torch.ones(2)
        >>> [LayerDrop(p=0.5)(fx, layer_input=x).tolist() for _ in range(4)]
        [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]

    Reference: Fan et al. 2020, "Reducing transformer depth on demand with structured dropout", arXiv:1909.11556.
    """

    rate: ClassVar[Rate] = BELOW_1
    only_at = "output"
    needs = ("layer_input",)

    def __init__(self, p: float | None = None, *, keep_prob: float | None = None) -> None:
        super().__init__()
        self.p = self.rate.valid(drop_rate(p, keep_prob, self.title), self.title)

    def for_layer(self, model: nn.Module, name: str, at: str = "output", survey: Any = None) -> LayerDrop:
        path = name.split(".")
        if path[-1] in _BRANCHES:
            layer = ".".join(path[:-1])
            raise LayerError(
                f"LayerDrop at {name!r}: this is a branch of a layer. Skipped, it would add its input to the residual "
                f"stream.\n  hook the whole layer, layers={layer!r}, or drop the branch: DropPath(p=...)"
            )
        return self

    def check(self, shape: Sequence[int]) -> None:
        check_batch_axis(shape)

    def regularize(self, x: Tensor, rate: Any, layer_input: Tensor | None = None) -> Tensor:
        if layer_input is None:
            raise InjectionError(
                "LayerDrop needs the input of the layer too.\n"
                "  inject it: inject(model, LayerDrop(p=...), layers=...)\n"
                "  or call it: LayerDrop(p=...)(layer(x), layer_input=x)"
            )
        return _layer_drop(x, layer_input, rate)
