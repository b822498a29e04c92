"""pytorch-grad-cam held to what its answers need: one call of the layer, a gradient, and for CAM itself its premise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hookdrop.errors import LayerError, ShapeError
from hookdrop.hooks.checkpointing import running_again
from hookdrop.injection.select import Layer
from hookdrop.observe.read_only_hooks import first_tensor
from hookdrop.utils.axes import as_map
from hookdrop.utils.optional_dependencies import needs
from hookdrop.utils.tensor_tree import change, describe

if TYPE_CHECKING:
    import numpy

METHODS = {
    "gradcam": "GradCAM",
    "gradcam++": "GradCAMPlusPlus",
    "xgradcam": "XGradCAM",
    "hirescam": "HiResCAM",
    "layercam": "LayerCAM",
    "eigencam": "EigenCAM",
    "cam": "",
}
"""By what they are called here, the classes of the library; CAM itself it has not."""


class Logits(nn.Module):
    """The model as the library wants it: one tensor (N, classes) comes out, and nobody's gradients are set to None."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        out = self.model(x)
        logits = first_tensor(out)
        if logits is None or logits.dim() != 2 or len(logits) != len(x):
            raise ShapeError(f"the model must give (N, classes), got {describe(out)} for {len(x)} pictures.")
        return logits.float()  # NumPy has no bfloat16

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: the parameters have no gradients of ours."""


class Spot:
    """The forward hook of the layer; the library watches `tensor`, through which the layer's output goes."""

    def __init__(self, layer: Layer, image: tuple[int, int], grid: tuple[int, int] | None) -> None:
        self.name, self.module = layer.name, layer.module
        self.tensor, self.calls = nn.Identity(), 0
        self._image, self._grid = image, grid
        self.of_tokens = False
        """Whether its output was (N, L, C)."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if running_again():
            return None
        self.calls += 1
        return change(output, None, self.tensor)

    def as_map(self, x: Tensor) -> Tensor:
        """(N, C, h, w) of an output, or of its gradient, which nobody writes to afterwards."""
        self.of_tokens = x.dim() == 3
        try:
            return as_map(x, self._image, self._grid).detach().float().clone()
        except ShapeError as error:
            error.args = (f"{self.name!r} {error}",)
            raise


def library_class(method: str, spot: Spot) -> Any:
    """The class of a method, which raises `LayerError` where the library would go on with too little."""
    with needs("observe"):
        import pytorch_grad_cam
    base: Any = pytorch_grad_cam.base_cam.BaseCAM if method == "cam" else getattr(pytorch_grad_cam, METHODS[method])

    class Checked(base):  # type: ignore[misc]  # known when it runs
        def compute_cam_per_layer(self, *args: Any) -> Any:
            if spot.calls != 1:
                raise LayerError(
                    f"{spot.name!r} was called {spot.calls} times in a forward: which of the maps is meant can't be "
                    "told.\n  choose a layer that is called once, such as the block that it is in"
                )
            if self.uses_gradients and not self.activations_and_grads.gradients:
                raise LayerError(f"no gradient flows through {spot.name!r} from what the model says.")
            return super().compute_cam_per_layer(*args)

    class Cam(Checked):
        def __init__(self, model: nn.Module, layers: list[nn.Module], reshape_transform: Any) -> None:
            super().__init__(model, layers, reshape_transform, uses_gradients=False)

        def get_cam_weights(
            self, x: Tensor, layers: Any, targets: Any, activations: numpy.ndarray[Any, Any], gradients: None
        ) -> numpy.ndarray[Any, Any]:
            head = _head(self.model, torch.from_numpy(activations), self.outputs.detach().cpu(), spot.name)
            for target, output in zip(targets, self.outputs, strict=True):
                target(output)  # is there such a class?
            weights: numpy.ndarray[Any, Any] = head.weight[[one.category for one in targets]].float().cpu().numpy()
            return weights

    return Cam if method == "cam" else Checked


def _head(model: nn.Module, maps: Tensor, logits: Tensor, name: str) -> nn.Linear:
    """The linear layer that makes the logits of the maps' means.

    Raises:
        LayerError: there is none, so that its weights are no class activation map.
    """
    means = maps.mean((2, 3))
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.weight.shape == (logits.shape[1], means.shape[1]):
            said = nn.functional.linear(
                means, *(None if p is None else p.cpu().float() for p in (module.weight, module.bias))
            )
            if torch.allclose(said, logits, rtol=1e-2, atol=1e-2 * float(logits.abs().max())):
                return module
    raise LayerError(
        f'method="cam" is for models in which global average pooling and one linear layer follow {name!r}; the logits '
        'here are not that.\n  use method="gradcam", which is the same where both can be used'
    )
