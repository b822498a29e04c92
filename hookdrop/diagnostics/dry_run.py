"""One eval forward that shows which layers are called, how often, and with what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hookdrop.diagnostics.first_call import without_bookkeeping
from hookdrop.diagnostics.isolation import call, preserved, set_eval
from hookdrop.errors import ShapeError
from hookdrop.utils.tensor_tree import TensorKey, change, change_arguments, fits, tensors
from hookdrop.utils.torch_internals import BatchNorm
from hookdrop.utils.wrappers import unwrapped


@dataclass
class Seen:
    """What a layer was seen doing in one forward."""

    calls: int = 0
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    """The chosen tensor's shapes, each once, in the order of the calls."""
    misfit: str = ""
    """Why there is no chosen tensor."""
    of_several: int = 0
    """How many tensors that could be regularized the layer gives, if more than one."""
    keeps_input: bool = False
    """Whether the output still looks like the input, as that of a whole residual block does."""
    feeds_norm: bool = False
    """Whether the output goes straight into a batch norm."""

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The last of the shapes; None if there was none."""
        return self.shapes[-1] if self.shapes else None


def dry_run(
    model: nn.Module,
    modules: Sequence[nn.Module],
    example: Any,
    at: Sequence[str] | None = None,
    tensor: TensorKey = None,
) -> list[Seen]:
    """Run `model` once on `example` without gradients, in eval mode, and put everything back.

    `at` says for each module whether its output is looked at, as it is if None, or its input.

    Raises:
        InjectionError: the model does not take the example.
    """
    recorder = _Recorder(tensor)
    wanted = dict(zip(map(id, modules), at or ["output"] * len(modules), strict=True))
    for module in model.modules():
        recorder.watch(module, wanted.get(id(module)))
    try:
        with without_bookkeeping(model), preserved(model, trains=False), torch.no_grad():
            set_eval(model)
            call(unwrapped(model), example)
    finally:
        recorder.stop()
    return [recorder.seen[id(module)] for module in modules]


class _Recorder:
    def __init__(self, tensor: TensorKey) -> None:
        self.tensor = tensor
        self.seen: dict[int, Seen] = {}
        self.made: dict[int, tuple[Tensor, Seen]] = {}
        self.handles: list[Any] = []

    def watch(self, module: nn.Module, at: str | None) -> None:
        # Before the wanted modules' own hooks: what is seen is what a hook of ours would get.
        if isinstance(module, BatchNorm):
            self.handles.append(module.register_forward_pre_hook(self._into_norm))
        if at is not None:
            self.seen[id(module)] = Seen()
        if at == "output":
            self.handles.append(module.register_forward_hook(self._on_output))
        elif at is not None:
            self.handles.append(module.register_forward_pre_hook(self._on_input, with_kwargs=True))

    def stop(self) -> None:
        for handle in self.handles:
            handle.remove()

    def _into_norm(self, module: nn.Module, args: Any) -> None:
        if args and id(args[0]) in self.made:
            self.made[id(args[0])][1].feeds_norm = True

    def _on_input(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._note(module, lambda look: change_arguments(module, args, kwargs, self.tensor, look))

    def _on_output(self, module: nn.Module, args: Any, output: Any) -> None:
        seen = self._note(module, lambda look: change(output, self.tensor, look))
        several = sum(map(fits, tensors(output)))
        seen.of_several = several if several > 1 and self.tensor is None else 0
        seen.keeps_input |= _like_its_input(module, args, output)
        if isinstance(output, Tensor):
            # Held until the end, so that no other tensor gets its id.
            self.made[id(output)] = (output, seen)

    def _note(self, module: nn.Module, visit: Any) -> Seen:
        seen = self.seen[id(module)]
        seen.calls += 1

        def look(x: Tensor) -> Tensor:
            if tuple(x.shape) not in seen.shapes:
                seen.shapes.append(tuple(x.shape))
            return x

        try:
            visit(look)
        except ShapeError as error:
            seen.misfit = str(error)
        return seen


def _like_its_input(module: nn.Module, args: Any, output: Any) -> bool:
    """Whether a module with parts of its own gives back what is nearly its input: a branch added to a shortcut."""
    # A norm's output is like its input too; a norm with an activation in it has children, but no weights in them.
    has_parts = any(True for child in module.children() for _ in child.parameters())
    if not has_parts or not args or not fits(args[0]) or not fits(output):
        return False
    x = args[0]
    if x.shape != output.shape or x.is_meta or x.numel() == 0:
        return False
    return bool(torch.cosine_similarity(x.flatten().float(), output.flatten().float(), dim=0) > _ALIKE)


# With random weights whole blocks of ResNet, ConvNeXt, EfficientNet, ViT, Swin and MLP-Mixer are above it, the ends of
# their branches below.
_ALIKE = 0.5
