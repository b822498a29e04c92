"""`dropblock_detector` on torchvision's detectors, whose inputs are lists of images and targets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookdrop import InjectionError, LayerError, inject, plan
from hookdrop.recipes import dropblock_detector, dropblock_resnet

torchvision = pytest.importorskip("torchvision")

detection = torchvision.models.detection
utils = detection.backbone_utils
FrozenBatchNorm2d = torchvision.ops.FrozenBatchNorm2d

SIDE = 64


def small(name: str, trainable_layers: int = 3) -> nn.Module:
    """A detector with a small backbone whose norms are frozen, as after loading pretrained weights."""
    backbone = utils.resnet_fpn_backbone(backbone_name="resnet18", weights=None, trainable_layers=trainable_layers)
    few = {"min_size": SIDE, "max_size": SIDE, "num_classes": 3}
    if "RCNN" in name:
        few |= {"box_detections_per_img": 4, "box_batch_size_per_image": 8, "rpn_post_nms_top_n_test": 8}
    else:
        few |= {"detections_per_img": 4}
    return getattr(detection, name)(backbone, **few)


def batch() -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    box = torch.tensor([[8.0, 8.0, 40.0, 40.0]])
    target = {"boxes": box, "labels": torch.ones(1, dtype=torch.int64), "masks": torch.ones(1, SIDE, SIDE).byte()}
    return [torch.rand(3, SIDE, SIDE) for _ in range(2)], [target, target]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "parts"), [("MaskRCNN", "both"), ("FCOS", "fpn")])
def test_inject_train_and_remove(name: str, parts: str) -> None:
    """The checks of `benchmarks/zoo.py`: eval output, measured rate, gradients, and removal, bit for bit."""
    from models.catalog import Example
    from models.check import Check

    model, (images, targets) = small(name), batch()
    record = Check(model, Example((images,), (images, targets)), recipe=dropblock_detector(0.1, 3, parts)).run()
    assert record["status"] == "passed", record
    assert record["elements"]


def test_backbone_has_the_sites_of_dropblock_resnet() -> None:
    """Ghiasi et al. 2018, section 4.2: DropBlock is applied to ResNet in ResNet-FPN."""
    model = small("RetinaNet")
    expected = [(site.name, site.p, site.at) for site in plan(model, dropblock_resnet(p=0.2)).sites]
    assert [(site.name, site.p, site.at) for site in plan(model, dropblock_detector(p=0.2)).sites] == expected
    assert {name.split(".")[2] for name, _, _ in expected} == {"layer3", "layer4"}
    norms = [site.module for site in plan(model, dropblock_detector()).sites if ".bn" in site.name]
    assert norms
    assert all(isinstance(norm, FrozenBatchNorm2d) for norm in norms)


def test_feature_pyramid_has_one_site_for_each_level() -> None:
    sites = inject(small("FCOS"), dropblock_detector(p=0.1, parts="fpn")).sites
    assert [(site.name, site.p) for site in sites] == [(f"backbone.fpn.layer_blocks.{i}.0", 0.1) for i in (3, 2, 1, 0)]


def test_frozen_layers_are_regularized_without_gradients() -> None:
    """With one trainable layer, layer3 has no gradients, but what layer4 receives from it has dropped blocks."""
    model = small("FasterRCNN", trainable_layers=1).train()
    images, targets = batch()
    drop = inject(model, dropblock_detector(p=0.2, block_size=1))
    with drop.recording(last=0) as measured:
        sum(model(images, targets).values()).backward()
    assert all(site.elements for site in measured.totals.sites.values())
    gradients = {name for name, p in model.named_parameters() if p.grad is not None and "body" in name}
    assert gradients
    assert all("layer4" in name for name in gradients)


@pytest.mark.parametrize("parts", ["backbone", "fpn"])
def test_detectors_without_residual_stages_or_a_pyramid_raise(parts: str) -> None:
    with torch.device("meta"):
        model = detection.ssd300_vgg16(weights=None, weights_backbone=None)
    with pytest.raises((LayerError, InjectionError)):
        inject(model, dropblock_detector(parts=parts))


@pytest.mark.parametrize("parts", ["neck", None])
def test_other_parts_raise(parts: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="parts must be one of 'backbone', 'fpn', 'both'"):
        dropblock_detector(parts=parts)
