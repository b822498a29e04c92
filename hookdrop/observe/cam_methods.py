"""pytorch-grad-cam with checks of its requirements: one call of the layer, a gradient, and CAM's pooling and head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hookdrop.errors import LayerError, ShapeError
from hookdrop.hooks.checkpointing import is_recomputing
from hookdrop.injection.select import Layer
from hookdrop.observe.read_only_hooks import first_tensor
from hookdrop.utils.axes import as_map
from hookdrop.utils.optional_dependencies import needs
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
"""The library's classes by method. It has none for CAM."""


class Logits(nn.Module):
    """The model as the library needs it: it returns one tensor (N, classes), and `zero_grad` keeps all gradients."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        out = self.model(x)
        logits = first_tensor(out)
        if logits is None or logits.dim() != 2 or len(logits) != len(x):
            raise ShapeError(f"the model must return (N, classes), got {describe(out)} for {len(x)} pictures.")
        return logits.float()  # NumPy has no bfloat16

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: no gradient of a parameter is computed."""


class WatchedLayer:
    """The forward hook of the layer. It passes the output through `tensor`, which the library watches."""

    def __init__(self, layer: Layer, image: tuple[int, int], grid: tuple[int, int] | None) -> None:
        self.name, self.module = layer.name, layer.module
        self.tensor, self.calls = nn.Identity(), 0
        self._image, self._grid = image, grid
        self.of_tokens = False
        """Whether its output was (N, L, C)."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if is_recomputing():
            return None
        self.calls += 1
        return map_tensor(output, None, self.tensor)

    def as_map(self, x: Tensor) -> Tensor:
        """An output, or its gradient, as (N, C, h, w), safe from in-place edits."""
        self.of_tokens = x.dim() == 3
        try:
            return as_map(x, self._image, self._grid).detach().float().clone()
        except ShapeError as error:
            error.args = (f"{self.name!r} {error}",)
            raise


def library_class(method: str, watched: WatchedLayer) -> Any:
    """The class of a method, which raises `LayerError` where the library would continue without what it needs."""
    with needs("observe"):
        import pytorch_grad_cam
    base: Any = pytorch_grad_cam.base_cam.BaseCAM if method == "cam" else getattr(pytorch_grad_cam, METHODS[method])

    class Checked(base):  # type: ignore[misc]  # known when it runs
        def compute_cam_per_layer(self, *args: Any) -> Any:
            if watched.calls != 1:
                raise LayerError(
                    f"{watched.name!r} was called {watched.calls} times in a forward, so its map is ambiguous.\n"
                    "  choose a layer that is called once, such as the block that contains it"
                )
            if self.uses_gradients and not self.activations_and_grads.gradients:
                raise LayerError(f"no gradient flows through {watched.name!r} from the model's output.")
            return super().compute_cam_per_layer(*args)

    class Cam(Checked):
        def __init__(self, model: nn.Module, layers: list[nn.Module], reshape_transform: Any) -> None:
            super().__init__(model, layers, reshape_transform, uses_gradients=False)

        def get_cam_weights(self, x: Tensor, layers: Any, targets: Any, activations: Any, gradients: None) -> Any:
            head = _head(self.model, torch.from_numpy(activations), self.outputs.detach().cpu(), watched.name)
            for target, output in zip(targets, self.outputs, strict=True):
                target(output)  # raises if there is no such class
            return head.weight[[one.category for one in targets]].float().cpu().numpy()

    return Cam if method == "cam" else Checked


def _head(model: nn.Module, maps: Tensor, logits: Tensor, name: str) -> nn.Linear:
    """The linear layer that computes the logits from the maps' means."""
    means = maps.mean((2, 3))
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.weight.shape == (logits.shape[1], means.shape[1]):
            weight, bias = (None if p is None else p.cpu().float() for p in (module.weight, module.bias))
            computed = nn.functional.linear(means, weight, bias)
            if torch.allclose(computed, logits, rtol=1e-2, atol=1e-2 * float(logits.abs().max())):
                return module
    raise LayerError(
        f'method="cam" is for models in which global average pooling and one linear layer follow {name!r}; these '
        'logits are not.\n  use method="gradcam", which gives the same map where both apply'
    )
