"""DropBlock with the placements of papers, in classifiers, detectors and segmentation networks."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from hookdrop.core.arguments import one_of
from hookdrop.core.errors import InjectionError, LayerError
from hookdrop.core.recipe import Recipe, RecipeSite
from hookdrop.core.tables import some
from hookdrop.regularizers import DropBlock
from hookdrop.survey.convs import ConvBlock, conv_nets, map_convs, pyramid_levels
from hookdrop.survey.facts import Survey, survey


@dataclass(frozen=True)
class dropblock_resnet(Recipe):
    """DropBlock as in its paper: in groups 3 and 4 of a ResNet, after every convolution and on the skips.

    The sites are the norm of every convolution (before or after the ReLU gives the same result), also of a projection,
    and identity skips. An identity skip has no module: there the block computes f(x) + D(x). Group 3 uses a quarter of
    the rate. In other CNNs, the last two resolutions are groups 3 and 4. Blocks are found by the residual additions in
    a forward, so a model may have any names. Ghiasi et al. 2018, arXiv:1810.12890, section 4.1. The paper lowers
    keep_prob linearly over the training: `schedule=LinearSchedule(steps=1.0)`.

    Args:
        p: drop probability in group 4; group 3 uses a quarter of it. The paper uses 0.1 (keep_prob 0.9).
        block_size: edge of the dropped squares, in pixels of the feature map; 7 in the paper.

    Raises:
        LayerError: the model has no such CNN, or its last two stages also have blocks of another kind.
        InjectionError: no hook can reach an identity skip.

    Example:
        >>> import torchvision
        >>> from hookdrop import LinearSchedule, inject
        >>> model = torchvision.models.resnet18()
        >>> ramp = LinearSchedule(steps=10)
        >>> drop = inject(model, dropblock_resnet(p=0.1, block_size=3), schedule=ramp)
        >>> drop
        <Injection 'dropblock_resnet': 12 sites, p=0 of 0.1, step 0 of LinearSchedule(steps=10)>
        >>> [site.name for site in drop.sites if site.name.startswith("layer4.1")]
        ['layer4.1', 'layer4.1.bn1', 'layer4.1.bn2']
    """

    p: float = 0.1
    block_size: int = 7

    def __post_init__(self) -> None:
        DropBlock(self.p, self.block_size)

    def sites(self, model: nn.Module, survey: Survey) -> Sequence[RecipeSite]:
        prefix, part = _surveyed_part(model, survey)
        sites: dict[tuple[str, str], RecipeSite] = {}
        for block, factor in self._last_stages(model, part):
            group, drop = prefix + block.name, DropBlock(self.p, self.block_size)
            if block.branch is not None:
                sites[group, "skip"] = RecipeSite(group, drop, factor, group, "skip", block.branch)
            for layer in block.layers:
                sites.setdefault((layer, ""), RecipeSite(prefix + layer, drop, factor, group))
        return list(sites.values())

    def _last_stages(self, model: nn.Module, survey: Survey) -> list[tuple[ConvBlock, float]]:
        found: list[tuple[ConvBlock, float]] = []
        for net in conv_nets(survey.trace, survey.residuals):
            stages = net.stages
            if len(stages) > 1:
                if others := net.others_since(stages[-2][0]):
                    raise LayerError(
                        f"{type(self).__name__} recognizes only some blocks of {type(model).__name__}: not "
                        f"{some(others)}.{_YOURSELF}"
                    )
                found += [(block, 0.25) for block in stages[-2]] + [(block, 1.0) for block in stages[-1]]
        if not found:
            raise _no_layers(self, model, "blocks of convolutions and norms with residual additions, as in a ResNet")
        if hidden := [block.name for block, _ in found if block.branch == ""]:
            raise InjectionError(
                f"{type(self).__name__}: no hook can reach the identity skips of {type(model).__name__} that are added "
                f"in {some(hidden) if any(hidden) else 'its own forward'}: the tensor of the skip is not the input of "
                "a module around one residual branch.\n"
                "  inject before torch.fx traces the model; in your own model, put each block into its own module"
            )
        return found


@dataclass(frozen=True)
class dropblock_detector(dropblock_resnet):
    """DropBlock in a detector: in the last two stages of its backbone, in its feature pyramid, or in both.

    In the backbone the sites and rates are those of `dropblock_resnet`: Ghiasi et al. 2018, arXiv:1810.12890, section
    4.2, apply DropBlock "to ResNet in ResNet-FPN" of RetinaNet. In the feature pyramid they are the 3x3 convolutions
    whose outputs are the levels, with rate `p`: PP-YOLO (Long et al. 2020, arXiv:2007.12099) regularizes only its FPN.

    Args:
        p: drop probability in the last stage and in the feature pyramid; the stage before it uses a quarter.
        block_size: edge of the dropped squares, in pixels of the feature map.
        parts: `"backbone"`, `"fpn"` or `"both"`.

    Raises:
        LayerError: the model has no such part.

    Example:
        >>> import torchvision
        >>> from hookdrop import inject, plan
        >>> detection = torchvision.models.detection
        >>> model = detection.retinanet_resnet50_fpn(weights=None, weights_backbone=None)
        >>> inject(model, dropblock_detector(p=0.1, block_size=5))
        <Injection 'dropblock_detector': 36 sites, p=0.1 of 0.1, step 0 of ConstantSchedule()>
        >>> [site.name for site in plan(model, dropblock_detector(parts="fpn")).sites][0]
        'backbone.fpn.layer_blocks.2.0'
    """

    parts: str = "backbone"

    def __post_init__(self) -> None:
        one_of(self.parts, "parts", "dropblock_detector", ("backbone", "fpn", "both"))
        super().__post_init__()

    def sites(self, model: nn.Module, survey: Survey) -> Sequence[RecipeSite]:
        sites = [*super().sites(model, survey)] if self.parts != "fpn" else []
        if self.parts != "backbone":
            prefix, part = _surveyed_part(model, survey)
            if not (levels := pyramid_levels(part.trace)):
                raise _no_layers(self, model, "a feature pyramid: convolutions of sums with enlarged maps")
            sites += [RecipeSite(prefix + name, DropBlock(self.p, self.block_size)) for name in levels]
        return sites


@dataclass(frozen=True)
class dropblock_unet(Recipe):
    """DropBlock in a segmentation network: after every convolution, before its norm, as in SA-UNet.

    The sites are the convolutions with a norm or an activation in the encoder and in the decoder, of a U-Net (of MONAI,
    of diffusers, or your own), of FCN, DeepLabV3 or LR-ASPP, or of another network that returns maps. The output layer,
    upsampling and projections without a norm, global pooling and attention gates are not regularized. Guo et al. 2020,
    "SA-UNet", arXiv:2004.03696. Neither is a backbone: a module that takes the image and reduces it to an eighth or
    less, beginning with its first layer, as classification networks do. Ghiasi et al. 2018, arXiv:1810.12890, section
    4.3, found the convolutions on top of it more effective. `dropblock_resnet(p)` regularizes its last two stages.

    Args:
        p: drop probability. SA-UNet uses 0.18 and 0.13, its first version SD-UNet 0.1.
        block_size: edge of the dropped blocks, in pixels of the feature map, at every resolution.

    Raises:
        LayerError: the model has no such convolution, or does not return maps.

    Example:
        >>> import torchvision
        >>> from hookdrop import inject
        >>> untrained = dict(weights=None, weights_backbone=None)
        >>> model = torchvision.models.segmentation.fcn_resnet50(**untrained, num_classes=2)
        >>> [site.name for site in inject(model, dropblock_unet(p=0.1)).sites]
        ['classifier.0']
    """

    p: float = 0.1
    block_size: int = 7

    def __post_init__(self) -> None:
        DropBlock(self.p, self.block_size)

    def sites(self, model: nn.Module, survey: Survey) -> Sequence[RecipeSite]:
        trace = survey.trace
        if all(len(node.shape) < 3 for node in trace.outputs):
            raise LayerError(
                f"dropblock_unet: {type(model).__name__} returns no maps, so it is not a segmentation network.\n"
                "  for a classifier: dropblock_resnet(p=0.1)"
            )
        convs, backbone = map_convs(trace)
        found = [name for name in convs if not f"{name}.".startswith(backbone)]
        if not found:
            raise _no_layers(self, model, "convolutions outside a backbone that a norm or an activation follows")
        return [RecipeSite(name, DropBlock(self.p, self.block_size)) for name in found]


def _surveyed_part(model: nn.Module, found: Survey) -> tuple[str, Survey]:
    """Return the survey of the model or, if it cannot run without values, of the part of it that takes images."""
    try:
        found.trace  # noqa: B018 (runs the model)
        return "", found
    except InjectionError:
        if getattr(found, "is_given", False):  # by the user: the error says what is wrong with it
            raise
        for name, part in model.named_children():
            with contextlib.suppress(InjectionError):
                return f"{name}.", survey(part)
        raise


_YOURSELF = """
  choose the layers yourself: inject(model, DropBlock(p=0.1), layers=...)
  see all:                    print(hookdrop.layers(model))"""


def _no_layers(recipe: Recipe, model: nn.Module, wanted: str) -> LayerError:
    """Return the error for a model without a site."""
    fact = f"{type(recipe).__name__} found no matching layer in {type(model).__name__}: it looks for {wanted}."
    return LayerError(fact + _YOURSELF)
