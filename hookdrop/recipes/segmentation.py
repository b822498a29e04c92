"""DropBlock in encoder-decoder networks for segmentation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from hookdrop.recipes.base import Recipe, RecipeSite
from hookdrop.recipes.dropblock import example_call, no_layers
from hookdrop.regularizers import DropBlock, Regularizer
from hookdrop.survey import Survey
from hookdrop.survey.convs import map_convs
from hookdrop.utils.errors import LayerError


@dataclass(frozen=True)
class dropblock_unet(Recipe):
    """DropBlock in a segmentation network: after every convolution, before its norm, as in SA-UNet.

    The sites are the convolutions with a norm or an activation in the encoder and in the decoder, of a U-Net (of MONAI,
    of diffusers, or your own), of FCN, DeepLabV3 or LR-ASPP, or of another network that returns maps. The output layer,
    upsampling and projections without a norm, global pooling and attention gates are not regularized. Guo et al. 2020,
    "SA-UNet", arXiv:2004.03696, and, for models with a backbone, Ghiasi et al. 2018, arXiv:1810.12890, section 4.3.

    Args:
        p: drop probability. SA-UNet uses 0.18 and 0.13, its first version SD-UNet 0.1.
        block_size: edge of the dropped blocks, in pixels of the feature map, at every resolution.
        backbone: whether to regularize a backbone too: a module that takes the image and reduces it to an eighth or
            less, beginning with its first layer, as classification networks do. Ghiasi et al. found the convolutions on
            top of it more effective. `dropblock_resnet(p)` regularizes its last two stages.

    Raises:
        LayerError: the model has no such convolution, or does not return maps.

    Example:
        >>> import torchvision
        >>> from hookdrop import inject
        >>> model = torchvision.models.segmentation.fcn_resnet50(weights=None, weights_backbone=None, num_classes=2)
        >>> [site.name for site in inject(model, dropblock_unet(p=0.1)).sites]
        ['classifier.0']
    """

    p: float = 0.1
    block_size: int = 7
    backbone: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.backbone, bool):
            raise TypeError(f"dropblock_unet: backbone must be True or False, got {self.backbone!r}.")
        self.regularizer()

    def regularizer(self) -> Regularizer:
        """Return the regularizer of a site."""
        return DropBlock(self.p, self.block_size)

    def sites(self, model: nn.Module, survey: Survey) -> Sequence[RecipeSite]:
        trace = survey.trace
        if all(len(node.shape) < 3 for node in trace.calls[0].outputs):
            raise LayerError(
                f"dropblock_unet: {type(model).__name__} returns no maps, so it is not a segmentation network.\n"
                "  for a classifier: dropblock_resnet(p=0.1)"
            )
        convs, backbone = map_convs(trace)
        found = [name for name in convs if self.backbone or not f"{name}.".startswith(backbone)]
        if not found:
            outside = " outside the backbone (or pass backbone=True)" if convs else ""
            wanted = f"convolutions that a norm or an activation follows{outside}"
            raise no_layers(self, model, example_call(trace), wanted)
        return [RecipeSite(name, self.regularizer()) for name in found]
