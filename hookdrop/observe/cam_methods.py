"""pytorch-grad-cam with checks of its requirements: one call of the layer, a gradient, and CAM's pooling and head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hookdrop.errors import LayerError, ShapeError
from hookdrop.hooks.checkpointing import is_recomputing
from hookdrop.observe.read_only_hooks import first_tensor
from hookdrop.utils.axes import as_map
from hookdrop.utils.optional import needs
from hookdrop.utils.select import Layer
from hookdrop.utils.tensor_tree import describe, map_tensor

METHODS = {
    "gradcam": "GradCAM",
    "gradcam++": "GradCAMPlusPlus",
    "xgradcam": "XGradCAM",
    "hirescam": "HiResCAM",
    "layercam": "LayerCAM",
    "eigencam": "EigenCAM",
    "cam": "",
}
"""Class of the library by method. It has no class for CAM."""


class LogitsModel(nn.Module):
    """Adapts a model to the library: it returns one tensor (N, classes), and `zero_grad` keeps all gradients."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        out = self.model(x)
        logits = first_tensor(out)
        if logits is None or logits.dim() != 2 or len(logits) != len(x):
            raise ShapeError(f"the model must return (N, classes), got {describe(out)} for {len(x)} images.")
        return logits.float()  # NumPy has no bfloat16

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: no parameter gradient is computed."""


class CamLayer:
    """The forward hook of the layer. It passes the output through the module `output`, which the library hooks."""

    def __init__(self, layer: Layer, image: tuple[int, int], grid: tuple[int, int] | None) -> None:
        self.name, self.module = layer.name, layer.module
        self.output, self.calls = nn.Identity(), 0
        self._image, self._grid = image, grid
        self.is_tokens = False
        """Whether the output was (N, L, C)."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if is_recomputing():
            return None
        self.calls += 1
        return map_tensor(output, None, self.output)

    def as_map(self, x: Tensor) -> Tensor:
        """Convert an output or its gradient to (N, C, h, w), as a copy that is safe from in-place edits."""
        self.is_tokens = x.dim() == 3
        try:
            return as_map(x, self._image, self._grid).detach().float().clone()
        except ShapeError as error:
            error.args = (f"{self.name!r} {error}",)
            raise


def cam_class(method: str, layer: CamLayer) -> Any:
    """Return the library's class of a method, with a `LayerError` where the library would return a wrong map."""
    with needs("observe"):
        import pytorch_grad_cam
    base: Any = pytorch_grad_cam.base_cam.BaseCAM if method == "cam" else getattr(pytorch_grad_cam, METHODS[method])

    class Checked(base):  # type: ignore[misc]  # a class at runtime
        def compute_cam_per_layer(self, *args: Any) -> Any:
            if layer.calls != 1:
                raise LayerError(
                    f"{layer.name!r} was called {layer.calls} times in one forward; a map needs exactly one call.\n"
                    "  choose a layer that is called once, such as the block that contains it"
                )
            if self.uses_gradients and not self.activations_and_grads.gradients:
                raise LayerError(f"no gradient flows from the model's output to {layer.name!r}.")
            return super().compute_cam_per_layer(*args)

    class Cam(Checked):
        def __init__(self, model: nn.Module, layers: list[nn.Module], reshape_transform: Any) -> None:
            super().__init__(model, layers, reshape_transform, uses_gradients=False)

        def get_cam_weights(self, x: Tensor, layers: Any, targets: Any, activations: Any, gradients: None) -> Any:
            head = _find_head(self.model, torch.from_numpy(activations), self.outputs.detach().cpu(), layer.name)
            for target, output in zip(targets, self.outputs, strict=True):
                target(output)  # raises if the class does not exist
            return head.weight[[target.category for target in targets]].float().cpu().numpy()

    return Cam if method == "cam" else Checked


def _find_head(model: nn.Module, maps: Tensor, logits: Tensor, name: str) -> nn.Linear:
    """Return the linear layer that computes the logits from the means of the maps."""
    means = maps.mean((2, 3))
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.weight.shape == (logits.shape[1], means.shape[1]):
            weight, bias = (None if p is None else p.cpu().float() for p in (module.weight, module.bias))
            computed = nn.functional.linear(means, weight, bias)
            if torch.allclose(computed, logits, rtol=1e-2, atol=1e-2 * float(logits.abs().max())):
                return module
    raise LayerError(
        f'method="cam" requires that only global average pooling and one linear layer follow {name!r}.\n'
        '  use method="gradcam", which gives the same map where both apply'
    )
