"""`dropblock_unet`, validated against SA-UNet and SD-UNet written out, and checked on the U-Nets of other libraries."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from hookdrop import HookdropWarning, LayerError, functional, inject, plan
from hookdrop.recipes import dropblock_resnet, dropblock_unet
from tests.support.models import from_torchvision, toy
from tests.support.tensors import all_equal
from tests.support.training import train_step

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
    planned = plan(model, dropblock_unet(), example_input=torch.zeros(2, *shape))
    return {site.name for site in planned.sites}


class TestThePapers:
    @pytest.mark.parametrize("norm", [True, False], ids=["SA-UNet", "SD-UNet"])
    def test_outputs_and_gradients_match_the_written_out_model(self, norm: bool) -> None:
        model, x = UNet(norm), torch.randn(2, 3, 32, 32)
        twin, plain = copy.deepcopy(model), train_step(copy.deepcopy(model), x)[0]
        for block in (*twin.encoder, twin.bottom, *twin.decoder):
            for index, layer in enumerate(block):
                if isinstance(layer, nn.Conv2d):
                    block[index] = toy(lambda m, x: functional.drop_block(m.conv(x), 0.18, 3), conv=layer)
        drop = inject(model, dropblock_unet(p=0.18, block_size=3))
        assert len(drop.sites) == 10
        theirs = train_step(twin, x)
        assert all_equal(train_step(model, x), theirs)
        assert not torch.equal(theirs[0], plain)

    def test_block_larger_than_the_map_warns_and_drops_p(self) -> None:
        model, x = UNet(), torch.randn(64, 3, 16, 16)
        with pytest.warns(HookdropWarning, match="covers the whole 4x4 map"):
            drop = inject(model, dropblock_unet(p=0.2, block_size=7), example_input=x)
        # 64 * 32 channels: 5.6 standard errors
        assert drop.probe(x).sites["bottom.0"].dropped == pytest.approx(0.2, abs=0.05)


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
    from models.check import Check

    make, count, shape, without = FAMILIES[name]
    model, x = make(), torch.randn(2, *shape)
    record = Check(model, Example((x,), (x,)), recipe=dropblock_unet(p=0.1, block_size=3)).run()
    assert record["status"] == "passed", record
    assert record["sites"] == {"DropBlock": count}
    last = [conv for conv in model.modules() if isinstance(conv, _ConvNd)][-1]
    planned = plan(model, dropblock_unet(), example_input=x).sites
    assert not any(last in site.module.modules() for site in planned)
    for part in without:
        assert any(part in f".{name}" for name, _ in model.named_modules())
        assert not any(part in f".{site.name}" for site in planned)


def test_pooling_that_is_only_registered_first_changes_nothing() -> None:
    model = UNet()
    model._modules = {"pool": nn.AdaptiveAvgPool2d(1), **model._modules}
    assert len(sites(model)) == 10


def test_layers_before_a_pooling_have_sites() -> None:
    model = nn.Sequential(*double_conv(3, 4, True), nn.AdaptiveAvgPool2d(1), nn.Conv2d(4, 4, 1), nn.ReLU())
    assert sites(model) == {"0", "3"}


class TestBackbone:
    def test_can_be_combined_with_dropblock_resnet(self) -> None:
        model = torchvision_segmentation("fcn_resnet50", aux_loss=True)()
        names = [{site.name for site in inject(model, recipe()).sites} for recipe in (dropblock_unet, dropblock_resnet)]
        assert not names[0] & names[1]

    def test_model_with_sites_only_in_the_backbone_raises(self) -> None:
        halves = [nn.Sequential(nn.Conv2d(n, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU()) for n in (3, 4, 4)]
        with pytest.raises(LayerError, match="outside a backbone"):
            inject(nn.Sequential(nn.Sequential(*halves), nn.Conv2d(4, 2, 1)), dropblock_unet())


def test_traced_model_keeps_its_sites() -> None:
    assert sites(torch.fx.symbolic_trace(UNet())) == sites(UNet())


def test_shared_blocks_and_convolutions_have_one_site() -> None:
    block, conv = double_conv(3, 3, True), nn.Conv2d(3, 3, 3, padding=1)
    assert sites(nn.Sequential(block, block, nn.Conv2d(3, 2, 1))) == {"0.0", "0.3"}
    blocks = [nn.Sequential(conv, nn.BatchNorm2d(3), nn.ReLU()) for _ in range(2)]
    assert sites(nn.Sequential(*blocks, nn.Conv2d(3, 2, 1))) == {"0.0"}
