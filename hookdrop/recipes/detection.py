"""DropBlock in object detectors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from hookdrop.injection.plan import Plan
from hookdrop.recipes.branches import has_submodules
from hookdrop.recipes.dropblock import RESIDUAL_CNN, paper_sites
from hookdrop.recipes.recipe import Factory, Recipe, RecipeSite, plan_sites, require_sites
from hookdrop.recipes.residual_stages import example_call
from hookdrop.regularizers import DropBlock
from hookdrop.schedules import LinearSchedule
from hookdrop.utils.select import named_layers
from hookdrop.utils.validation import one_of

_PARTS = ("backbone", "fpn", "both")


@Recipe
def dropblock_detector(
    model: nn.Module,
    p: float = 0.1,
    block_size: int = 7,
    parts: str = "backbone",
    steps: int | float | None = None,
    regularizer: Factory = DropBlock,
    *,
    total_steps: int | None = None,
    name: str = "dropblock_detector",
    on_existing: str = "error",
    portable: bool = False,
    example_input: Any = None,
) -> Plan:
    """Inject DropBlock into a detector: into the last two stages of its backbone, into its feature pyramid, or both.

    In the backbone the sites and rates are those of `dropblock_resnet`: Ghiasi et al. 2018, arXiv:1810.12890, section
    4.2, apply DropBlock "to ResNet in ResNet-FPN" of RetinaNet. In the feature pyramid they are the 3x3 convolutions
    whose outputs are the levels, with rate `p`: PP-YOLO (Long et al. 2020, arXiv:2007.12099) regularizes only its FPN.

    Args:
        model: Faster R-CNN, Mask R-CNN, Keypoint R-CNN, RetinaNet or FCOS of torchvision, with ResNet or MobileNet
            backbone, or another model with such a backbone or a `FeaturePyramidNetwork`.
        p: drop probability in the last stage and in the feature pyramid; the stage before it uses a quarter.
        block_size: edge of the dropped squares, in pixels of the feature map.
        parts: `"backbone"`, `"fpn"` or `"both"`.
        steps: optimizer steps over which keep_prob falls linearly from 1 to 1 - p, or a fraction of the training; None
            uses `p` from the start.
        regularizer: called with `p=` and `block_size=` for each site.
        total_steps, name, on_existing, portable, example_input: as in `inject`.

    Raises:
        LayerError: the model has no such part.
        InjectionError: torch.fx traced the model.

    Example:
        >>> import torchvision
        >>> model = torchvision.models.detection.retinanet_resnet50_fpn(weights=None, weights_backbone=None)
        >>> dropblock_detector(model, p=0.1, block_size=5)
        <Injection 'dropblock_detector': 36 sites, p=0.1 of 0.1, step 0 of ConstantSchedule()>
        >>> [site.name for site in dropblock_detector.plan(model, parts="fpn").sites][0]
        'backbone.fpn.layer_blocks.0'
    """
    one_of(parts, "parts", "dropblock_detector", _PARTS)
    backbone = paper_sites(model, p, block_size) if parts != "fpn" else []
    settings = {"p": p, "block_size": block_size}
    pyramid = [RecipeSite(name, settings) for name in _pyramid_levels(model)] if parts != "backbone" else []
    wanted = {"backbone": RESIDUAL_CNN, "fpn": "a FeaturePyramidNetwork with inner_blocks and layer_blocks"}
    found = {"backbone": backbone, "fpn": pyramid}
    for part in wanted if parts == "both" else (parts,):
        names = [site.name for site in found[part]]
        require_sites("dropblock_detector", model, names, wanted[part], example_call(model))
    schedule = None if steps is None else LinearSchedule(steps=steps)
    return plan_sites(
        model,
        [*backbone, *pyramid],
        regularizer,
        schedule=schedule,
        total_steps=total_steps,
        name=name,
        on_existing=on_existing,
        portable=portable,
        example_input=example_input,
    )


def _pyramid_levels(model: nn.Module) -> Iterator[str]:
    """Yield the convolutions whose outputs are the levels of torchvision's `FeaturePyramidNetwork`."""
    for layer in named_layers(model):
        if has_submodules(layer.module, "inner_blocks", "layer_blocks"):
            prefix = f"{layer.name}." if layer.name else ""
            levels = layer.module.get_submodule("layer_blocks")
            yield from (f"{prefix}layer_blocks.{name}" for name, _ in levels.named_children())
