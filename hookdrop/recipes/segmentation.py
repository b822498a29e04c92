"""DropBlock in encoder-decoder networks for segmentation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from hookdrop.errors import LayerError
from hookdrop.injection.plan import Plan
from hookdrop.recipes.branches import has_submodules
from hookdrop.recipes.conv_blocks import conv_blocks
from hookdrop.recipes.recipe import Factory, Recipe, RecipeSite, plan_sites, require_sites
from hookdrop.recipes.residual_stages import example_call
from hookdrop.regularizers import DropBlock
from hookdrop.schedules import Schedule
from hookdrop.utils.select import layers_by_name, named_layers


@Recipe
def dropblock_unet(
    model: nn.Module,
    p: float = 0.1,
    block_size: int = 7,
    backbone: bool = False,
    regularizer: Factory = DropBlock,
    *,
    schedule: Schedule | str | None = None,
    total_steps: int | None = None,
    name: str = "dropblock_unet",
    on_existing: str = "error",
    portable: bool = False,
    example_input: Any = None,
) -> Plan:
    """Inject DropBlock into a segmentation network: after every convolution, before its norm, as in SA-UNet.

    The sites are the convolutions with a norm or an activation in the encoder and in the decoder. The output layer,
    upsampling and projections without a norm, global pooling and attention gates are not regularized. Guo et al. 2020,
    "SA-UNet", arXiv:2004.03696, and, for models with a backbone, Ghiasi et al. 2018, arXiv:1810.12890, section 4.3.

    Args:
        model: a U-Net (of MONAI, of diffusers, or your own), torchvision's FCN, DeepLabV3 or LR-ASPP, a model of
            segmentation-models-pytorch, or another network with convolution blocks that ends with a convolution.
        p: drop probability. SA-UNet uses 0.18 and 0.13, its first version SD-UNet 0.1.
        block_size: edge of the dropped blocks, in pixels of the feature map, at every resolution.
        backbone: whether to regularize a backbone too: a classification network as encoder. Ghiasi et al. found the
            convolutions on top of it more effective. `dropblock_resnet(model)` regularizes its last two stages.
        regularizer: called with `p=` and `block_size=` for each site.
        schedule, total_steps, name, on_existing, portable, example_input: as in `inject`.

    Raises:
        LayerError: the model has no such convolution, or ends with a linear layer.
        InjectionError: torch.fx traced the model.

    Example:
        >>> import torchvision
        >>> model = torchvision.models.segmentation.fcn_resnet50(weights=None, weights_backbone=None, num_classes=2)
        >>> [site.name for site in dropblock_unet(model, p=0.1).sites]
        ['classifier.0']
    """
    if not isinstance(backbone, bool):
        raise TypeError(f"dropblock_unet: backbone must be True or False, got {backbone!r}.")
    settings = {"p": p, "block_size": block_size}
    left_out = () if backbone else tuple(f"{name}." for name in _backbones(model))
    found = [conv for conv in _convolutions(model) if not conv.startswith(left_out)]
    wanted = "convolutions that a norm or an activation follows" + (", outside the backbone" if left_out else "")
    require_sites("dropblock_unet", model, found, wanted, _example(model, left_out))
    _check_ends_with_convolution(model)
    return plan_sites(
        model,
        [RecipeSite(conv, settings) for conv in found],
        regularizer,
        schedule=schedule,
        total_steps=total_steps,
        name=name,
        on_existing=on_existing,
        portable=portable,
        example_input=example_input,
    )


def _convolutions(model: nn.Module) -> list[str]:
    """Return the convolutions to regularize. A gate or a projection of the skip is pointwise, without an activation."""
    layers = layers_by_name(model)
    blocks = [block for block in conv_blocks(model) if not block.pointwise or (block.norm and block.activated)]
    found = list({id(layers[block.conv]): layers[block.conv] for block in blocks}.values())  # a shared one once
    # In MONAI's residual UNet, the last upsampling returns one channel for each class, and has a skip to the output.
    last = found[-1].module if found else None
    if isinstance(last, _ConvTransposeNd) and last.out_channels == _output_channels(model):
        found.pop()
    return [layer.name for layer in found]


def _output_channels(model: nn.Module) -> int:
    return [part for part in model.modules() if isinstance(part, _ConvNd)][-1].out_channels


def _backbones(model: nn.Module) -> Iterator[str]:
    """Yield the classification networks: `backbone`, or `encoder` in segmentation-models-pytorch."""
    for layer in named_layers(model):
        prefix = f"{layer.name}." if layer.name else ""
        if has_submodules(layer.module, "backbone"):
            yield f"{prefix}backbone"
        if has_submodules(layer.module, "encoder", "decoder", "segmentation_head"):
            yield f"{prefix}encoder"


def _example(model: nn.Module, left_out: tuple[str, ...]) -> str:
    return "dropblock_unet(model, backbone=True)" if left_out else example_call(model)


def _check_ends_with_convolution(model: nn.Module) -> None:
    layers = named_layers(model)
    last = [layer for layer in layers if next(layer.module.parameters(recurse=False), None) is not None][-1]
    if isinstance(last.module, nn.Linear):
        raise LayerError(
            f"dropblock_unet: {type(model).__name__} ends with the linear layer {last.name!r}, so it is not a "
            "segmentation network.\n  for a classifier: dropblock_resnet(model)"
        )
