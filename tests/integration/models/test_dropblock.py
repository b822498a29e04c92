"""The recipes of DropBlock, validated against papers written out, and checked on the models of other libraries."""

import copy
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from hookdrop import InjectionError, LayerError, functional, inject, plan
from hookdrop.recipes import dropblock_detector, dropblock_resnet, dropblock_unet
from tests.support.models import from_timm, from_torchvision, randomize_norms, toy
from tests.support.tensors import all_equal
from tests.support.training import train_step

timm = pytest.importorskip("timm")
torchvision = pytest.importorskip("torchvision")

Factory = Callable[[], nn.Module]


def double_conv(channels: int, width: int, norm: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for size in (channels, width):
        layers += [nn.Conv2d(size, width, 3, padding=1), *([nn.BatchNorm2d(width)] if norm else []), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """The U-Net of SA-UNet (with norms) or of SD-UNet (without), with two levels."""

    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        self.encoder = nn.ModuleList([double_conv(3, 8, norm), double_conv(8, 16, norm)])
        self.bottom = double_conv(16, 32, norm)
        self.up = nn.ModuleList([nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)])
        self.decoder = nn.ModuleList([double_conv(32, 16, norm), double_conv(16, 8, norm)])
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.encoder:
            x = block(x)
            skips.append(x)
            x = nn.functional.max_pool2d(x, 2)
        x = self.bottom(x)
        for up, block in zip(self.up, self.decoder, strict=True):
            x = block(torch.cat([up(x), skips.pop()], 1))
        return self.head(x)


def sites(model: nn.Module, shape: tuple[int, ...] = (3, 64, 64)) -> set[str]:
    return {site.name for site in plan(model, dropblock_unet(), example_input=torch.zeros(2, *shape)).sites}


@pytest.mark.parametrize("norm", [True, False], ids=["SA-UNet", "SD-UNet"])
def test_outputs_and_gradients_match_the_written_out_u_net(norm: bool) -> None:
    model, x = UNet(norm), torch.randn(2, 3, 32, 32)
    twin, plain = copy.deepcopy(model), train_step(copy.deepcopy(model), x)[0]
    for block in (*twin.encoder, twin.bottom, *twin.decoder):
        for index, layer in enumerate(block):
            if isinstance(layer, nn.Conv2d):
                block[index] = toy(lambda m, x: functional.drop_block(m.conv(x), 0.18, 3), conv=layer)
    assert len(inject(model, dropblock_unet(p=0.18, block_size=3)).sites) == 10
    theirs = train_step(twin, x)
    assert all_equal(train_step(model, x), theirs)
    assert not torch.equal(theirs[0], plain)


def torchvision_segmentation(name: str, **settings: Any) -> Factory:
    return from_torchvision(name, weights_backbone=None, num_classes=3, **settings)


def monai(name: str, *arguments: Any, **settings: Any) -> Factory:
    return lambda: getattr(pytest.importorskip("monai.networks.nets"), name)(*arguments, **settings)


RGB, GRAY, VOLUME = (3, 64, 64), (1, 32, 32), (1, 32, 32, 32)
LEVELS, DYNAMIC = ((8, 16, 16), (2, 2)), ([3] * 3, [1, 2, 2], [2, 2])
FAMILIES: dict[str, tuple[Factory, int, tuple[int, ...], list[str]]] = {
    "hand-written": (UNet, 10, RGB, [".up."]),
    "DeepLabV3": (torchvision_segmentation("deeplabv3_mobilenet_v3_large"), 6, RGB, ["classifier.0.convs.4.1", ".backbone."]),
    "UNet, residual": (monai("UNet", 2, 1, 3, *LEVELS, num_res_units=2), 8, GRAY, [".model.2."]),
    "BasicUNet": (monai("BasicUNet", 2, 1, 3, (8, 8, 8, 16, 16, 8)), 18, GRAY, []),
    "DynUNet": (monai("DynUNet", 2, 1, 3, *DYNAMIC, filters=[8, 8, 16], res_block=True), 10, GRAY, ["conv3", "transp_conv"]),
    "DynUNet, 3d": (monai("DynUNet", 3, 1, 3, *DYNAMIC, filters=[8, 8, 16]), 10, VOLUME, []),
    "SegResNet": (monai("SegResNet", 2, 8, 1, 3, blocks_down=(1, 1, 1), blocks_up=(1, 1)), 10, GRAY, []),
    "AttentionUnet": (monai("AttentionUnet", 2, 1, 3, *LEVELS), 10, GRAY, [".attention."]),
}  # fmt: skip
"""A model of torchvision or MONAI, its number of sites, the shape of a sample, and parts that have no site: transposed
convolutions without a norm, global pooling, the last block with a skip to the output, projections of skips, and gates."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str) -> None:
    """The checks of `benchmarks/zoo.py`: eval output, measured rate, gradients, and removal, bit for bit.

    The last convolution of the model is not inside a site.
    """
    from models.catalog import Example
    from models.check import check

    make, count, shape, without = FAMILIES[name]
    model, x = make(), torch.randn(2, *shape)
    record = check(model, Example((x,), (x,)), dropblock_unet(p=0.1, block_size=3))
    assert record["status"] == "passed", record
    assert record["sites"] == {"DropBlock": count}
    last = [conv for conv in model.modules() if isinstance(conv, _ConvNd)][-1]
    planned = plan(model, dropblock_unet(), example_input=x).sites
    assert not any(last in site.module.modules() for site in planned)
    for part in without:
        assert any(part in f".{name}" for name, _ in model.named_modules())
        assert not any(part in f".{site.name}" for site in planned)


def test_tracing_and_pooling_that_is_only_registered_first_change_nothing() -> None:
    model = UNet()
    assert sites(torch.fx.symbolic_trace(model)) == (found := sites(model))
    model._modules = {"pool": nn.AdaptiveAvgPool2d(1), **model._modules}
    assert sites(model) == found
    assert len(found) == 10


def test_layers_before_a_pooling_have_sites() -> None:
    model = nn.Sequential(*double_conv(3, 4, True), nn.AdaptiveAvgPool2d(1), nn.Conv2d(4, 4, 1), nn.ReLU())
    assert sites(model) == {"0", "3"}


class TestBackbone:
    def test_can_be_combined_with_dropblock_resnet(self) -> None:
        model = torchvision_segmentation("fcn_resnet50", aux_loss=True)()
        names = [{site.name for site in inject(model, recipe()).sites} for recipe in (dropblock_unet, dropblock_resnet)]
        assert not names[0] & names[1]

    def test_model_with_sites_only_in_the_backbone_raises(self) -> None:
        """Also if it returns all of its maps."""
        a, b, c = (nn.Sequential(nn.Conv2d(n, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU()) for n in (3, 4, 4))
        encoder = toy(lambda m, x: [y := m.a(x), z := m.b(y), m.c(z)], a=a, b=b, c=c)
        returns_all = toy(lambda m, x: m.head(m.encoder(x)[-1]), encoder=encoder, head=nn.Conv2d(4, 2, 1))
        for model in (nn.Sequential(nn.Sequential(a, b, c), nn.Conv2d(4, 2, 1)), returns_all):
            with pytest.raises(LayerError, match="outside a backbone"):
                inject(model, dropblock_unet(), example_input=torch.zeros(2, 3, 64, 64))


def test_shared_blocks_and_convolutions_have_one_site() -> None:
    block, conv = double_conv(3, 3, True), nn.Conv2d(3, 3, 3, padding=1)
    assert sites(nn.Sequential(block, block, nn.Conv2d(3, 2, 1))) == {"0.0", "0.3"}
    blocks = [nn.Sequential(conv, nn.BatchNorm2d(3), nn.ReLU()) for _ in range(2)]
    assert sites(nn.Sequential(*blocks, nn.Conv2d(3, 2, 1))) == {"0.0"}


Drop = Callable[[Tensor], Tensor]
SMALL = {"channels": (8, 16, 16, 32), "stem_width": 8}


def conv_norm(layers: Any, x: Tensor, drop: Drop) -> Tensor:
    for layer in layers:
        if isinstance(layer, nn.Sequential):
            x = conv_norm(layer, x, drop)
        else:
            x = drop(layer(x)) if isinstance(layer, nn.BatchNorm2d) else layer(x)
    return x


def mobilenet_v2(b: Any, x: Tensor, drop: Drop) -> Tensor:
    skip = drop(x) if b.use_res_connect else 0.0
    return conv_norm(b.conv, x, drop) + skip


def pre_activation(b: Any, x: Tensor, drop: Drop) -> Tensor:
    skip = drop(x) if b.downsample is None else None
    x = b.norm1(x)
    skip = drop(b.downsample(x)) if skip is None else skip
    return drop(b.conv2(drop(b.norm2(b.conv1(x))))) + skip


CNNS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor], str, str]] = {
    "MobileNetV2 of torchvision": (
        from_torchvision("mobilenet_v2", num_classes=5), mobilenet_v2, r"features\.([7-9]|1[0-3])", r"features\.1[4-7]",
    ),
    "ResNetV2 of timm": (
        from_timm("resnetv2_18", num_classes=5), pre_activation, r"stages\.2\.blocks\.\d", r"stages\.3\.blocks\.\d",
    ),
}  # fmt: skip
"""A model, its written-out block, and the names of the blocks of its last two stages."""


@pytest.mark.parametrize("name", CNNS)
def test_outputs_and_gradients_match_written_out_blocks(name: str) -> None:
    make, block, before, last = CNNS[name]
    model, x = randomize_norms(make()), torch.randn(2, 3, 128, 128)
    twin, plain = copy.deepcopy(model), train_step(copy.deepcopy(model), x)[0]
    for pattern, rate in ((before, 0.05), (last, 0.2)):
        drop = partial(functional.drop_block, p=rate, block_size=3)
        for module in [module for path, module in twin.named_modules() if re.fullmatch(pattern, path)]:
            module.forward = partial(block, module, drop=drop)
    theirs = train_step(twin, x)
    drop = inject(model, dropblock_resnet(p=0.2, block_size=3), example_input=x)
    assert all_equal(train_step(model, x), theirs)
    assert not torch.equal(theirs[0], plain)
    drop.remove()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_stages_of_a_dilated_network_end_where_the_dilation_changes() -> None:
    model = torchvision.models.segmentation.lraspp_mobilenet_v3_large(weights=None, weights_backbone=None)
    rates = {re.match(r"backbone\.\d+", site.name)[0]: site.p for site in inject(model, dropblock_resnet(p=0.2)).sites}
    assert {name for name, p in rates.items() if p == 0.2} == {f"backbone.{i}" for i in (13, 14, 15)}
    assert {name for name, p in rates.items() if p == 0.05} == {f"backbone.{i}" for i in range(7, 13)}


def test_gates_and_skips_have_no_other_site() -> None:
    """The sites are the norms of the last stages' blocks, without those of gates, and one for each skip."""
    with torch.device("meta"):
        model = timm.create_model("skresnet18")
    for site in plan(model, dropblock_resnet()).sites:
        assert not re.search(r"\.(se|attn)\.", site.name)
        if site.at == "output" and "downsample" not in site.name and not isinstance(site.module, nn.Identity):
            assert "norm" in type(site.module).__name__.lower()


RESNETS = {
    "torchvision, bottlenecks": lambda: torchvision.models.ResNet(
        torchvision.models.resnet.Bottleneck, [1, 1, 2, 2], num_classes=5, width_per_group=16
    ),
    "timm, a deep stem and pooled projections": from_timm("resnet26d", num_classes=5, **SMALL),
}


def written_out(model: nn.Module, p: float, block_size: int) -> Callable[[Tensor], Tensor]:
    """The forward of the model with DropBlock in groups 3 and 4: on skips, convolutions and projections."""

    def block(b: Any, x: Tensor, rate: float) -> Tensor:
        drop = lambda t: functional.drop_block(t, rate, block_size)
        skip = drop(x) if b.downsample is None else x
        out = F.relu(drop(b.bn1(b.conv1(x))))
        out = drop(b.bn2(b.conv2(out)))
        if hasattr(b, "conv3"):
            out = drop(b.bn3(b.conv3(F.relu(out))))
        return F.relu(out + (skip if b.downsample is None else drop(b.downsample(x))))

    def forward(x: Tensor) -> Tensor:
        m: Any = model
        x = m.maxpool(F.relu(m.bn1(m.conv1(x))))
        for group, rate in ((m.layer1, 0.0), (m.layer2, 0.0), (m.layer3, p / 4), (m.layer4, p)):
            for b in group:
                x = block(b, x, rate)
        return m.fc(x.mean((2, 3)))

    return forward


@pytest.mark.parametrize("name", RESNETS)
def test_outputs_and_gradients_match_the_dropblock_paper(name: str) -> None:
    """Ghiasi et al. 2018, section 4.1."""
    torch.manual_seed(0)
    model, x = randomize_norms(RESNETS[name]()), torch.randn(2, 3, 128, 128)
    twin = copy.deepcopy(model)
    inject(model, dropblock_resnet(p=0.2, block_size=3))
    assert all_equal(train_step(model, x), train_step(twin, x, written_out(twin, 0.2, 3)))


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
    from models.check import check

    model, (images, targets) = small(name), batch()
    record = check(model, Example((images,), (images, targets)), dropblock_detector(0.1, 3, parts))
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
