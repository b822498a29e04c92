"""Run one eval forward to find which layers are called, how often, and with which shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hookdrop.errors import ShapeError
from hookdrop.guards.problems import without_bookkeeping
from hookdrop.survey.isolation import call, restored_after, set_eval
from hookdrop.utils.names import unwrapped
from hookdrop.utils.tensor_tree import TensorKey, fits, map_arguments, map_tensor, tensors
from hookdrop.utils.torch_internals import BatchNorm


@dataclass
class LayerCalls:
    """The calls of a layer in one forward."""

    calls: int = 0
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    """The distinct shapes of the selected tensor, in the order of the calls."""
    mismatch: str = ""
    """Why no tensor could be selected; empty if one was."""
    tensor_count: int = 0
    """The number of tensors in the output that could be regularized; 0 if there is only one."""
    resembles_input: bool = False
    """Whether the output is similar to the input, as for a whole residual block."""
    feeds_norm: bool = False
    """Whether the output is the input of a batch norm."""

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The last shape, or None."""
        return self.shapes[-1] if self.shapes else None


def dry_run(
    model: nn.Module,
    modules: Sequence[nn.Module],
    example: Any,
    at: Sequence[str] | None = None,
    tensor: TensorKey = None,
) -> list[LayerCalls]:
    """Run `model` once on `example` in eval mode without gradients, and restore its state.

    `at` selects the input or the output of each module; None selects all outputs.

    Raises:
        InjectionError: the model does not accept the example.
    """
    recorder = _Recorder(tensor)
    wanted = dict(zip(map(id, modules), at or ["output"] * len(modules), strict=True))
    for module in model.modules():
        recorder.watch(module, wanted.get(id(module)))
    try:
        with without_bookkeeping(model), restored_after(model, trains=False), torch.no_grad():
            set_eval(model)
            call(unwrapped(model), example)
    finally:
        recorder.stop()
    return [recorder.seen[id(module)] for module in modules]


class _Recorder:
    def __init__(self, tensor: TensorKey) -> None:
        self.tensor = tensor
        self.seen: dict[int, LayerCalls] = {}
        self.outputs: dict[int, tuple[Tensor, LayerCalls]] = {}
        self.handles: list[Any] = []

    def watch(self, module: nn.Module, at: str | None) -> None:
        # Registered first, so that the recorder sees what a hookdrop hook would see.
        if isinstance(module, BatchNorm):
            self.handles.append(module.register_forward_pre_hook(self._into_norm))
        if at is not None:
            self.seen[id(module)] = LayerCalls()
        if at == "output":
            self.handles.append(module.register_forward_hook(self._on_output))
        elif at is not None:
            self.handles.append(module.register_forward_pre_hook(self._on_input, with_kwargs=True))

    def stop(self) -> None:
        for handle in self.handles:
            handle.remove()

    def _into_norm(self, module: nn.Module, args: Any) -> None:
        if args and id(args[0]) in self.outputs:
            self.outputs[id(args[0])][1].feeds_norm = True

    def _on_input(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._record(module, lambda look: map_arguments(module, args, kwargs, self.tensor, look))

    def _on_output(self, module: nn.Module, args: Any, output: Any) -> None:
        seen = self._record(module, lambda look: map_tensor(output, self.tensor, look))
        several = sum(map(fits, tensors(output)))
        seen.tensor_count = several if several > 1 and self.tensor is None else 0
        seen.resembles_input |= _resembles_input(module, args, output)
        if isinstance(output, Tensor):
            # Kept alive until the end, so that no other tensor gets its id.
            self.outputs[id(output)] = (output, seen)

    def _record(self, module: nn.Module, visit: Any) -> LayerCalls:
        seen = self.seen[id(module)]
        seen.calls += 1

        def look(x: Tensor) -> Tensor:
            if tuple(x.shape) not in seen.shapes:
                seen.shapes.append(tuple(x.shape))
            return x

        try:
            visit(look)
        except ShapeError as error:
            seen.mismatch = str(error)
        return seen


def _resembles_input(module: nn.Module, args: Any, output: Any) -> bool:
    """Whether the output of a composite module is close to its input: a branch added to a shortcut."""
    # The output of a norm is similar to its input too; fused norm and activation layers have children without weights.
    has_parts = any(True for child in module.children() for _ in child.parameters())
    output = next((tensor for tensor in tensors(output) if fits(tensor)), None)
    if not has_parts or not args or not fits(args[0]) or output is None:
        return False
    x = args[0]
    if x.shape != output.shape or x.is_meta or x.numel() == 0:
        return False
    return bool(torch.cosine_similarity(x.flatten().float(), output.flatten().float(), dim=0) > _MIN_SIMILARITY)


# With random weights, whole blocks of ResNet, ConvNeXt, EfficientNet, ViT, Swin and MLP-Mixer are above this cosine
# similarity, and the ends of their branches are below.
_MIN_SIMILARITY = 0.5
