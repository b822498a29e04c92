"""The paper's placement of DropBlock in residual CNNs that are not ResNets, validated against written-out blocks."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hookdrop
from hookdrop import LayerError, functional
from hookdrop.recipes import dropblock_resnet
from hookdrop.recipes.residual_stages import residual_block
from tests.support.models import from_timm, from_torchvision, randomize_norms
from tests.support.tensors import all_equal
from tests.support.training import train_step

timm = pytest.importorskip("timm")
torchvision = pytest.importorskip("torchvision")

Drop = Callable[[Tensor], Tensor]


def conv_norm(layers: Any, x: Tensor, drop: Drop) -> Tensor:
    """Run layers in order, with DropBlock after each norm."""
    for layer in layers:
        if isinstance(layer, nn.Sequential):
            x = conv_norm(layer, x, drop)
        else:
            x = drop(layer(x)) if isinstance(layer, nn.BatchNorm2d) else layer(x)
    return x


def mobilenet_v2(b: Any, x: Tensor, drop: Drop) -> Tensor:
    skip = drop(x) if b.use_res_connect else 0.0
    return conv_norm(b.conv, x, drop) + skip


def torchvision_regnet(b: Any, x: Tensor, drop: Drop) -> Tensor:
    skip = drop(x) if b.proj is None else drop(b.proj(x))
    return F.relu(skip + conv_norm(b.f, x, drop))


def timm_mobilenet(b: Any, x: Tensor, drop: Drop) -> Tensor:
    skip = drop(x) if b.has_skip else 0.0
    x = drop(b.bn1(b.conv_pw(x)))
    x = drop(b.bn2(b.conv_dw(x)))
    return drop(b.bn3(b.conv_pwl(x))) + skip


def pre_activation(b: Any, x: Tensor, drop: Drop) -> Tensor:
    skip = drop(x) if b.downsample is None else None
    x = b.norm1(x)
    skip = drop(b.downsample(x)) if skip is None else skip
    return drop(b.conv2(drop(b.norm2(b.conv1(x))))) + skip


def timm_regnet(b: Any, x: Tensor, drop: Drop) -> Tensor:
    skip = x
    for part in (b.conv1, b.conv2, b.conv3):
        x = drop(part.bn(part.conv(x)))
    return F.relu(x + drop(b.downsample(skip)))


def res2net(b: Any, x: Tensor, drop: Drop) -> Tensor:
    skip = drop(x) if b.downsample is None else x
    x = F.relu(drop(b.bn1(b.conv1(x))))
    outs: list[Tensor] = []
    for part, conv, norm in zip(torch.split(x, b.width, 1), b.convs, b.bns, strict=False):
        part = part if b.is_first or not outs else outs[-1] + part
        outs.append(F.relu(drop(norm(conv(part.contiguous())))))
    last = torch.split(x, b.width, 1)[-1]
    x = torch.cat([*outs, b.pool(last) if b.is_first else last], 1)
    x = drop(b.bn3(b.conv3(x)))
    return F.relu(x + (skip if b.downsample is None else drop(b.downsample(skip))))


def transformers_resnet(b: Any, x: Tensor, drop: Drop) -> Tensor:
    skip = x
    for part in b.layer:
        x = part.activation(drop(part.normalization(part.convolution(x))))
    return F.relu(x + drop(b.shortcut(skip)))


class Logits(nn.Module):
    """ResNet of transformers, which returns a tensor."""

    def __init__(self) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")
        sizes = {"embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 2, 2], "layer_type": "basic"}
        self.model = transformers.ResNetModel(transformers.ResNetConfig(**sizes))

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).last_hidden_state


CNNS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor], str, str]] = {
    "MobileNetV2 of torchvision": (
        from_torchvision("mobilenet_v2", num_classes=5),
        mobilenet_v2,
        r"features\.([7-9]|1[0-3])",
        r"features\.1[4-7]",
    ),
    "RegNet of torchvision": (
        from_torchvision("regnet_x_400mf", num_classes=5),
        torchvision_regnet,
        r"trunk_output\.block3\.[^.]*",
        r"trunk_output\.block4\.[^.]*",
    ),
    "EfficientNet of timm": (
        from_timm("efficientnet_lite0", num_classes=5),
        timm_mobilenet,
        r"blocks\.[34]\.\d",
        r"blocks\.[56]\.\d",
    ),
    "ResNetV2 of timm": (
        from_timm("resnetv2_18", num_classes=5),
        pre_activation,
        r"stages\.2\.blocks\.\d",
        r"stages\.3\.blocks\.\d",
    ),
    "RegNet of timm": (from_timm("regnetx_002", num_classes=5), timm_regnet, r"s3\.b\d", r"s4\.b\d"),
    "Res2Net of timm": (from_timm("res2net50_26w_4s", num_classes=5), res2net, r"layer3\.\d", r"layer4\.\d"),
    "ResNet of transformers": (
        Logits,
        transformers_resnet,
        r"model\.encoder\.stages\.2\.layers\.\d",
        r"model\.encoder\.stages\.3\.layers\.\d",
    ),
}
"""A model, its written-out block, and the names of the blocks of its last two stages."""


def write_out(model: nn.Module, block: Callable[..., Tensor], rates: Mapping[str, float]) -> None:
    """Replace the forward of each block whose name matches a pattern by the written-out one, with DropBlock."""
    for name, module in model.named_modules():
        for pattern, rate in rates.items():
            if re.fullmatch(pattern, name):
                drop = lambda x, rate=rate: functional.drop_block(x, rate, 3)  # noqa: E731
                module.forward = lambda x, module=module, drop=drop: block(module, x, drop)


@pytest.mark.parametrize("name", CNNS)
def test_outputs_and_gradients_match_written_out_blocks(name: str) -> None:
    make, block, before, last = CNNS[name]
    model, x = randomize_norms(make()), torch.randn(2, 3, 128, 128)
    twin, plain = copy.deepcopy(model), train_step(copy.deepcopy(model), x)[0]
    write_out(twin, block, {before: 0.05, last: 0.2})
    theirs = train_step(twin, x)
    drop = dropblock_resnet(model, p=0.2, block_size=3)
    assert all_equal(train_step(model, x), theirs)
    assert not torch.equal(theirs[0], plain)
    drop.remove()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_stages_of_a_dilated_network_end_where_the_dilation_changes() -> None:
    model = torchvision.models.segmentation.lraspp_mobilenet_v3_large(weights=None, weights_backbone=None)
    rates = {re.match(r"backbone\.\d+", site.name)[0]: site.p for site in dropblock_resnet(model, p=0.2).sites}
    assert {name for name, p in rates.items() if p == 0.2} == {f"backbone.{i}" for i in (13, 14, 15)}
    assert {name for name, p in rates.items() if p == 0.05} == {f"backbone.{i}" for i in range(7, 13)}


def test_dilation_does_not_change_the_sites() -> None:
    plain, dilated = timm.create_model("regnetx_002"), timm.create_model("regnetx_002", output_stride=8)
    sites = [[(site.name, site.p) for site in dropblock_resnet.plan(model).sites] for model in (plain, dilated)]
    assert sites[0] == sites[1]


@pytest.mark.parametrize("name", ["seresnet50", "skresnet18", "rexnet_100", "mobilenetv3_small_050", "resnext26ts"])
def test_gates_and_skips_have_no_other_site(name: str) -> None:
    """The sites are the norms of the last stages' blocks, without those of gates, and one for each skip."""
    with torch.device("meta"):
        model = timm.create_model(name)
    for site in dropblock_resnet.plan(model).sites:
        assert not re.search(r"\.(se|attn)\.", site.name)
        if site.at == "output" and not re.search(r"(downsample|shortcut)$", site.name):
            assert "norm" in type(site.module).__name__.lower()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "count", "config"),
    [
        ("ResNet", 16, {"embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 2, 2]}),
        (
            "RegNet",
            16,
            {"embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 2, 2], "groups_width": 8},
        ),
        ("Bit", 16, {"embedding_size": 32, "hidden_sizes": [128, 128, 256, 256], "depths": [1, 1, 2, 2]}),
        ("MobileNetV2", 40, {"depth_multiplier": 0.5}),
    ],
)
def test_cnns_of_transformers_train_and_remove(name: str, count: int, config: dict[str, Any]) -> None:
    """The checks of `benchmarks/zoo.py`: eval output, measured rate, gradients, and removal, bit for bit."""
    from models.catalog import Example
    from models.check import Check

    transformers = pytest.importorskip("transformers")
    model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**config))
    x = torch.randn(2, 3, 64, 64)
    record = Check(model, Example((x,), (x,)), recipe=dropblock_resnet).run()
    assert record["status"] == "passed", record
    assert record["sites"] == {"DropBlock": count}


class TestOtherModelsRaise:
    @pytest.mark.parametrize(
        ("name", "pattern"),
        [("densenet121", "features.denseblock4.*"), ("convnext_atto", "stages.3.*"), ("vgg11_bn", "features.25")],
    )
    def test_error_suggests_the_layers_of_the_last_stage(self, name: str, pattern: str) -> None:
        model = timm.create_model(name)
        with pytest.raises(LayerError, match="it looks for a ResNet") as excinfo:
            dropblock_resnet(model)
        suggested = re.search(r'layers=\["(.*)"\]', str(excinfo.value))[1]
        assert suggested == pattern
        assert hookdrop.inject(model, hookdrop.DropBlock(p=0.1), layers=[suggested]).sites

    def test_model_without_convolutions_gets_no_pattern(self) -> None:
        with pytest.raises(LayerError, match=r"inject\(model, \.\.\., layers=\.\.\.\)"):
            dropblock_resnet(nn.Sequential(nn.Linear(2, 2)))

    @pytest.mark.parametrize(
        ("name", "unknown"),
        [
            ("mobilevit_xxs", "'stages.3.1', 'stages.4.1'"),
            ("coatnet_nano_rw_224", "'stages.2', 'stages.3'"),
            ("mobilenetv4_hybrid_medium", "'blocks.2.4'"),
            ("efficientnet_cc_b0_4e", "'blocks.4'"),
        ],
    )
    def test_model_with_unknown_blocks_in_these_stages_raises(self, name: str, unknown: str) -> None:
        """Only a part of the last stages would be regularized."""
        with torch.device("meta"):
            model = timm.create_model(name)
        with pytest.raises(LayerError, match=rf"recognizes only some blocks of \w+: not {unknown}") as excinfo:
            dropblock_resnet(model)
        assert "layers=[" in str(excinfo.value)

    def test_block_whose_skip_is_unknown_is_not_recognized(self) -> None:
        """In DynUNet of MONAI, `downsample` is a flag for a projection."""
        monai = pytest.importorskip("monai")
        block = monai.networks.blocks.UnetResBlock(2, 4, 8, 3, 1, "instance")
        assert block.downsample is True
        assert residual_block(block) is None
