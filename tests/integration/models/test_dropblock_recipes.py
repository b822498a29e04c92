"""Recipes, validated against written-out models and against timm's own."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from timm.layers import DropBlock2d
from torch import Tensor, nn

import hookdrop
from hookdrop import (
    DropBlock,
    HookdropWarning,
    InjectionError,
    LayerError,
    LinearSchedule,
    find,
    functional,
    inject,
    recipes,
)
from hookdrop.recipes import dropblock_resnet, stochastic_depth, timm_dropblock
from tests.support.compiling import fresh_compiler as fresh_compiler
from tests.support.models import randomize_norms
from tests.support.tensors import all_equal
from tests.support.training import train_step

timm = pytest.importorskip("timm")


torchvision = pytest.importorskip("torchvision")


RECIPES = [getattr(recipes, name) for name in recipes.__all__ if isinstance(getattr(recipes, name), recipes.Recipe)]


RESNETS = {
    "torchvision, basic blocks": lambda: torchvision.models.resnet18(num_classes=5),
    "torchvision, bottlenecks": lambda: torchvision.models.resnet50(num_classes=5),
    "torchvision, grouped bottlenecks": lambda: torchvision.models.resnext50_32x4d(num_classes=5),
    "timm, basic blocks": lambda: timm.create_model("resnet18", num_classes=5),
    "timm, bottlenecks": lambda: timm.create_model("resnet26", num_classes=5),
    "timm, a deep stem and pooled projections": lambda: timm.create_model("resnet26d", num_classes=5),
}


class TestTheDropBlockPaper:
    """Ghiasi et al. 2018, section 4.1, validated against a written-out model."""

    @staticmethod
    def written_out(model: nn.Module, p: float, block_size: int) -> Callable[[Tensor], Tensor]:
        """The forward of the model with DropBlock in groups 3 and 4: on skips, convolutions and projections."""

        def block(b: Any, x: Tensor, rate: float) -> Tensor:
            drop = lambda t: functional.drop_block(t, rate, block_size)  # noqa: E731
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
    def test_outputs_and_gradients_match_the_written_out_model(self, name: str) -> None:
        torch.manual_seed(0)
        model, x = randomize_norms(RESNETS[name]()), torch.randn(2, 3, 128, 128)
        twin = copy.deepcopy(model)
        dropblock_resnet(model, p=0.2, block_size=3)
        theirs = train_step(twin, x, self.written_out(twin, 0.2, 3))
        assert all_equal(train_step(model, x), theirs)

    def test_dropblock_changes_the_outputs(self) -> None:
        torch.manual_seed(0)
        model, x = torchvision.models.resnet18(num_classes=5), torch.randn(2, 3, 128, 128)
        plain = train_step(copy.deepcopy(model), x)[0]
        dropblock_resnet(model, p=0.2, block_size=3)
        assert not torch.equal(train_step(model, x)[0], plain)

    def test_sites_are_the_norms_and_skips_of_groups_3_and_4(self) -> None:
        model = torchvision.models.resnet50()
        sites = {site.name: site.p for site in dropblock_resnet(model, p=0.4).sites}
        blocks = [f"layer3.{i}" for i in range(6)] + [f"layer4.{i}" for i in range(3)]
        expected = {f"{block}.bn{i}" for block in blocks for i in (1, 2, 3)}
        expected |= {f"{block}.downsample" if block.endswith(".0") else block for block in blocks}
        assert set(sites) == expected
        assert all(p == (0.1 if name.startswith("layer3") else 0.4) for name, p in sites.items())

    def test_rate_increases_linearly_over_steps(self) -> None:
        drop = dropblock_resnet(torchvision.models.resnet18(), p=0.1, steps=10)
        assert (drop.p, drop.keep_prob) == (0.0, 1.0)
        drop.step(5)
        assert drop.sites[0].p == pytest.approx(0.25 * 0.05)
        drop.step(5)
        assert drop.keep_prob == 0.9

    def test_resnet_inside_another_model_is_found(self) -> None:
        model = nn.ModuleDict({"backbone": torchvision.models.resnet18(), "head": nn.Linear(1000, 2)})
        assert all(site.name.startswith("backbone.layer") for site in dropblock_resnet(model).sites)

    def test_model_without_resnet_groups_raises(self) -> None:
        with pytest.raises(LayerError, match=r"looks for a ResNet"):
            dropblock_resnet(torchvision.models.vgg11())


class TestTimmsDropBlock:
    """`drop_block_rate=` of timm, with timm's module, under the same seed."""

    @pytest.mark.parametrize(
        "name",
        [
            "resnet18",
            "resnet26d",
            "seresnet50",
            "res2net50_26w_4s",
            "skresnet18",
            "resnest14d",
            "gcresnext26ts",
        ],
    )
    def test_outputs_and_gradients_match_timm(self, name: str) -> None:
        torch.manual_seed(0)
        native = randomize_norms(timm.create_model(name, drop_block_rate=0.3, num_classes=5))
        clean = timm.create_model(name, num_classes=5)
        clean.load_state_dict(native.state_dict())
        drop = timm_dropblock(
            clean, 0.3, regularizer=lambda p, block_size, gamma_scale: DropBlock2d(p, block_size, gamma_scale)
        )
        assert drop.sites
        x = torch.randn(2, 3, 128, 128)
        theirs = train_step(native, x)
        assert all_equal(train_step(clean, x), theirs)
        without = timm.create_model(name, num_classes=5)
        without.load_state_dict(native.state_dict())
        assert not torch.equal(train_step(without, x)[0], theirs[0])

    def test_gamma_scale_multiplies_the_rate_of_hookdrops_dropblock(self) -> None:
        drop = timm_dropblock(timm.create_model("resnet18"), p=0.2)
        settings = [(site.name.split(".")[0], site.p, site.regularizer) for site in drop.sites]
        assert settings == [
            ("layer3", 0.05, "DropBlock(p=0.05, block_size=5)"),
            ("layer3", 0.05, "DropBlock(p=0.05, block_size=5)"),
            ("layer4", 0.2, "DropBlock(p=0.2, block_size=3)"),
            ("layer4", 0.2, "DropBlock(p=0.2, block_size=3)"),
        ]

    def test_model_with_drop_block_rate_raises(self) -> None:
        with pytest.raises(InjectionError, match=r"already has it: layer3\.0\.drop_block is a DropBlock2d"):
            timm_dropblock(timm.create_model("resnet18", drop_block_rate=0.1))


class TestEveryRecipe:
    def test_docstring_cites_a_source_and_has_an_example(self) -> None:
        for recipe in RECIPES:
            assert "arXiv" in recipe.__doc__ or "timm" in recipe.__doc__
            assert ">>> " in recipe.__doc__

    def test_plan_does_not_change_the_model(self) -> None:
        model = torchvision.models.resnet18()
        plan = hookdrop.plan(model, stochastic_depth(p=0.2), example_input=torch.zeros(2, 3, 64, 64))
        assert len(find(model)) == 0
        assert plan.sites[-1].shape == (2, 512, 2, 2)
        assert str(plan).startswith("8 sites of ResNet")
        assert len(plan.apply().sites) == 8

    @pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.__name__)
    def test_model_without_matching_layers_raises(self, recipe: Any) -> None:
        with pytest.raises(LayerError, match=rf"{recipe.__name__} found no matching layer in Linear: it looks for"):
            recipe(nn.Linear(2, 2))

    @pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.__name__)
    def test_recipes_accept_the_options_of_inject(self, recipe: Any) -> None:
        assert {"name", "on_existing", "example_input"} <= set(inspect.signature(recipe).parameters)

    @pytest.mark.parametrize("regularizer", [DropBlock(0.1), 3])
    def test_regularizer_instance_instead_of_a_factory_raises(self, regularizer: Any) -> None:
        with pytest.raises(TypeError, match=r"must be a class or function that accepts \(p=0.1, block_size=7\)"):
            dropblock_resnet(torchvision.models.resnet18(), regularizer=regularizer)

    def test_factory_with_other_arguments_raises(self) -> None:
        model = torchvision.models.resnet18()
        with pytest.raises(
            TypeError, match=r"calls Dropout2d\(p=0.1, block_size=7\), but it does not accept them"
        ) as excinfo:
            dropblock_resnet(model, regularizer=hookdrop.Dropout2d)
        assert "regularizer=lambda p, block_size: Dropout2d(...)" in str(excinfo.value)
        assert len(find(model)) == 0

    @pytest.mark.parametrize(
        ("given", "error", "message"),
        [
            ({"p": 20}, ValueError, "write p=0.2"),
            ({"p": DropBlock(0.1)}, TypeError, "p must be a number, got DropBlock"),
            ({"schedule": 10}, TypeError, "schedule must be a hookdrop schedule, got 10"),
            ({"on_existing": "keep"}, ValueError, "on_existing must be one of 'error', 'replace', 'stack'"),
            ({"mode": "col"}, ValueError, "mode must be one of 'row', 'batch'"),
            ({"name": ""}, InjectionError, "name must be a non-empty string"),
            ({"layers": "layer4"}, TypeError, "unexpected keyword argument 'layers'"),
        ],
    )
    def test_invalid_arguments_raise_and_leave_the_model_unchanged(
        self, given: dict[str, Any], error: type[Exception], message: str
    ) -> None:
        model = torchvision.models.resnet18()
        with pytest.raises(error, match=message) as excinfo:
            own = {key: given[key] for key in given.keys() & {"p", "mode"}}
            inject(model, stochastic_depth(**own), **{key: given[key] for key in given.keys() - own.keys()})
        assert "No hook was placed" in str(excinfo.value)
        assert len(find(model)) == 0

    def test_injecting_twice_raises_unless_replaced(self) -> None:
        model = torchvision.models.resnet18()
        dropblock_resnet(model)
        with pytest.raises(InjectionError, match="12 sites already carry 'dropblock_resnet'"):
            dropblock_resnet(model)
        assert len(dropblock_resnet(model, p=0.2, on_existing="replace").sites) == 12
        assert len(find(model)) == 1

    def test_two_recipes_can_be_combined(self) -> None:
        model = timm.create_model("resnet18")
        timm_dropblock(model)
        inject(model, stochastic_depth())
        assert [injection.name for injection in find(model)] == ["stochastic_depth", "timm_dropblock"]

    def test_recipe_returns_a_regular_injection(self) -> None:
        model = torchvision.models.resnet18(num_classes=5)
        clean, x = copy.deepcopy(model), torch.randn(2, 3, 128, 128)
        drop = dropblock_resnet(model, block_size=3, steps=10).follow(torch.optim.SGD(model.parameters(), 0.1))
        assert torch.equal(model.eval()(x), clean.eval()(x))
        drop.seek(10)
        assert drop.probe(x).dropped == pytest.approx(0.06, abs=0.03)
        drop.remove()
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())

    def test_from_config_reproduces_the_recipe(self) -> None:
        model = torchvision.models.resnet18(num_classes=5)
        twin, x = copy.deepcopy(model), torch.randn(2, 3, 128, 128)
        config = dropblock_resnet(model, p=0.3, block_size=3).config
        hookdrop.from_config(twin, config)
        assert all_equal(train_step(model, x), train_step(twin, x))
        assert find(twin)["dropblock_resnet"].config == config

    def test_recipe_inside_a_trace_raises(self) -> None:
        model = torchvision.models.resnet18()

        def step() -> None:
            dropblock_resnet(model)

        with pytest.raises((InjectionError, torch._dynamo.exc.Unsupported, torch._dynamo.exc.UserError)):
            torch.compile(step, fullgraph=True, backend="eager")()

    @pytest.mark.parametrize("recipe", [dropblock_resnet, stochastic_depth], ids=lambda recipe: recipe.__name__)
    @pytest.mark.parametrize("name", ["", "backbone."])
    def test_traced_model_raises(self, recipe: Any, name: str) -> None:
        """Tracing removes the blocks, so sites would be missing and a skip would have no module."""
        traced = torch.fx.symbolic_trace(torchvision.models.resnet18())
        model = nn.ModuleDict({"backbone": traced}) if name else traced
        with pytest.raises(InjectionError, match=f"{name.strip('.')}.* is an fx GraphModule") as excinfo:
            recipe(model)
        assert "inject before tracing" in str(excinfo.value)
        assert len(find(model)) == 0

    def test_traced_module_without_sites_is_accepted(self) -> None:
        traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(1000, 2)))
        model = nn.Sequential(torchvision.models.resnet18(), traced)
        assert len(inject(model, stochastic_depth()).sites) == 8


def test_schedule_controls_the_rate_of_a_recipe() -> None:
    drop = inject(torchvision.models.resnet18(), stochastic_depth(p=0.2), schedule=LinearSchedule(steps=2))
    drop.step()
    assert drop.p == pytest.approx(0.1)


def test_example_input_warns_if_a_block_covers_the_map() -> None:
    plan = dropblock_resnet.plan(torchvision.models.resnet18(), example_input=torch.zeros(1, 3, 64, 64))
    assert any("covers the whole" in text for text in plan.warnings)
    with pytest.warns(HookdropWarning, match="covers the whole"):
        plan.apply()
