"""Recipes, validated against written-out models and against timm's own."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import subprocess
import sys
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
from tests.support.recipes import randomize_norms
from tests.support.tensors import all_equal

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


def train_step(model: nn.Module, forward: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """Return output, gradients and batch-norm statistics of one forward and backward from seed 0."""
    model.train().zero_grad()
    x = x.clone().requires_grad_()
    torch.manual_seed(0)
    out = forward(x)
    out.square().sum().backward()
    grads = [parameter.grad for parameter in model.parameters()]
    return [out.detach(), x.grad, *grads, *(buffer.clone() for buffer in model.buffers())]


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
        theirs = train_step(twin, self.written_out(twin, 0.2, 3), x)
        assert all_equal(train_step(model, model, x), theirs)

    def test_dropblock_changes_the_outputs(self) -> None:
        torch.manual_seed(0)
        model, x = torchvision.models.resnet18(num_classes=5), torch.randn(2, 3, 128, 128)
        plain = train_step(copy.deepcopy(model), model, x)[0]
        dropblock_resnet(model, p=0.2, block_size=3)
        assert not torch.equal(train_step(model, model, x)[0], plain)

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
        theirs = train_step(native, native, x)
        assert all_equal(train_step(clean, clean, x), theirs)
        without = timm.create_model(name, num_classes=5)
        without.load_state_dict(native.state_dict())
        assert not torch.equal(train_step(without, without, x)[0], theirs[0])

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
        plan = stochastic_depth.plan(model, p=0.2, example_input=torch.zeros(1, 3, 64, 64))
        assert len(find(model)) == 0
        assert plan.sites[-1].shape == (1, 512, 2, 2)
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
            stochastic_depth(model, **given)
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
        stochastic_depth(model)
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
        assert all_equal(train_step(model, model, x), train_step(twin, twin, x))
        assert find(twin)["dropblock_resnet"].config == config

    def test_recipe_inside_a_trace_raises(self, compiler: Any) -> None:
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
        assert len(stochastic_depth(model).sites) == 8

    def test_recipes_only_need_torch(self) -> None:
        code = (
            "import sys; sys.modules.update(timm=None, torchvision=None, transformers=None); "
            "import hookdrop, torch; print(sorted(n for n in hookdrop.recipes.__all__ if n.islower())[0])"
        )
        assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


class KeywordBlock(nn.Module):
    """A basic block that calls its first convolution by keyword."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        b = self.block
        return F.relu(b.bn2(b.conv2(F.relu(b.bn1(b.conv1(input=x))))) + x)


class CheckpointedBlock(nn.Module):
    """A basic block with its branch and the addition inside a checkpoint, as in mmdetection."""

    def __init__(self, block: Any, reentrant: bool) -> None:
        super().__init__()
        self.block, self.reentrant = block, reentrant

    def forward(self, x: Tensor) -> Tensor:
        b = self.block
        inner = lambda x: b.bn2(b.conv2(F.relu(b.bn1(b.conv1(x))))) + x  # noqa: E731
        return F.relu(torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=self.reentrant))


@pytest.fixture
def compiler() -> Any:
    """Start and end without compiled code."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class TestSkip:
    """Identity skips: two pre-hooks that compute f(x) + D(x)."""

    @pytest.fixture
    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return torchvision.models.resnet18(num_classes=5)

    @pytest.fixture
    def x(self) -> Tensor:
        return torch.randn(2, 3, 128, 128)

    @staticmethod
    def only_skips(model: nn.Module, p: float = 0.5) -> hookdrop.Injection:
        """Apply the recipe only to the skips."""
        plan = dropblock_resnet.plan(model, p=p, block_size=2)
        plan.sites = [site for site in plan.sites if site.at == "skip"]
        return plan.apply()

    def test_only_the_skip_is_dropped(self, model: Any, x: Tensor) -> None:
        self.only_skips(model, p=1.0)
        block = model.train().layer4[1]
        x = torch.rand(2, 512, 4, 4)
        branch = block.bn2(block.conv2(F.relu(block.bn1(block.conv1(x)))))
        assert torch.equal(block(x), F.relu(branch))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_skip_is_exact_in_every_dtype(self, model: Any, dtype: torch.dtype) -> None:
        model = model.to(dtype).train()
        twin = copy.deepcopy(model.layer4[1])
        self.only_skips(model)
        x = torch.randn(2, 512, 4, 4, dtype=dtype)
        torch.manual_seed(1)
        out = model.layer4[1](x)
        torch.manual_seed(1)
        dropped = functional.drop_block(x, 0.5, 2)
        branch = twin.bn2(twin.conv2(F.relu(twin.bn1(twin.conv1(x)))))
        assert torch.equal(out, F.relu(branch + dropped))

    def test_hooks_hold_no_tensor_after_a_forward(self, model: Any, x: Tensor) -> None:
        self.only_skips(model)
        model.train()(x).sum().backward()
        hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
        assert hooks
        assert all(getattr(hook, "kept", None) is None for hook in hooks)

    def test_copies_and_pickles_keep_the_skip(self, model: Any, x: Tensor) -> None:
        self.only_skips(model)
        expected = train_step(copy.deepcopy(model), model, x)[0]
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(train_step(twin, twin, x)[0], expected)
            assert find(twin)["dropblock_resnet"].remove() is None
            assert not any(module._forward_pre_hooks for module in twin.modules())

    def test_activation_checkpointing_replays_the_skip(self, model: Any, x: Tensor) -> None:
        self.only_skips(model)
        twin = copy.deepcopy(model)

        def checkpointed(x: Tensor) -> Tensor:
            x = twin.layer1(twin.maxpool(twin.relu(twin.bn1(twin.conv1(x)))))
            x = torch.utils.checkpoint.checkpoint(twin.layer3, twin.layer2(x), use_reentrant=False)
            x = torch.utils.checkpoint.checkpoint(twin.layer4, x, use_reentrant=False)
            return twin.fc(twin.avgpool(x).flatten(1))

        ours, theirs = train_step(twin, checkpointed, x), train_step(model, model, x)
        grads = len(list(model.parameters())) + 2  # recomputation updates the batch-norm statistics twice
        assert all_equal(ours[:grads], theirs[:grads])

    def test_skip_compiles_into_one_graph(self, model: Any, compiler: Any) -> None:
        block = model.train().layer4[1]
        self.only_skips(model, p=1.0)
        x = torch.rand(2, 512, 4, 4)
        compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
        branch = block.bn2(block.conv2(F.relu(block.bn1(block.conv1(x)))))
        torch.testing.assert_close(compiled(x), F.relu(branch))

    def test_replaced_first_layer_of_the_branch_raises(self, model: Any, x: Tensor) -> None:
        self.only_skips(model)
        model.layer4[1].conv1 = nn.Conv2d(512, 512, 3, padding=1)
        with pytest.raises(InjectionError, match=r"'conv1', the first layer of the residual branch, was replaced"):
            model.train()(x)

    def test_eval_output_is_unchanged(self, model: Any, x: Tensor) -> None:
        clean = copy.deepcopy(model).eval()(x)
        self.only_skips(model)
        assert torch.equal(model.eval()(x), clean)

    def test_disabled_and_remove_apply_to_the_skip(self, model: Any, x: Tensor) -> None:
        clean = train_step(copy.deepcopy(model), model, x)[0]
        drop = self.only_skips(model)
        with drop.disabled():
            assert torch.equal(train_step(model, model, x)[0], clean)
        assert not torch.equal(train_step(model, model, x)[0], clean)
        drop.remove()
        assert torch.equal(train_step(model, model, x)[0], clean)
        assert not model.layer4[1].conv1._forward_pre_hooks

    def test_nested_calls_of_a_block_restore_their_own_input(self, model: Any) -> None:
        """A block that runs inside itself: the input is stored with the tensor, not with the hook."""
        self.only_skips(model, p=1.0)
        block = model.train().layer4[1]
        x, y = torch.rand(2, 512, 4, 4), torch.rand(2, 512, 4, 4)
        alone = block(x)
        inner: list[Tensor] = []

        def once_more(*_: Any) -> None:
            if not inner:
                inner.append(y)
                block(y)

        handle = block.bn1.register_forward_hook(once_more)
        assert torch.equal(block(x), alone)
        assert inner
        handle.remove()

    def test_branch_called_by_keyword_receives_the_original_input(self, model: Any) -> None:
        self.only_skips(model, p=1.0)
        block = model.train().layer4[1]
        x = torch.rand(2, 512, 4, 4)
        expected = block(x)
        by_keyword = KeywordBlock(block).train()
        self.move_hooks(block, by_keyword)
        assert torch.equal(by_keyword(x), expected)

    @staticmethod
    def move_hooks(block: nn.Module, other: nn.Module) -> None:
        for name in ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"):
            setattr(other, name, getattr(block, name))

    @pytest.mark.parametrize("compiled", ["conv1", "forward", "block"])
    @pytest.mark.filterwarnings("ignore::hookdrop.HookdropWarning")
    def test_skip_is_correct_if_only_one_part_is_compiled(self, model: Any, compiler: Any, compiled: str) -> None:
        self.only_skips(model, p=1.0)
        block = model.train().layer4[1]
        x = torch.rand(2, 512, 4, 4)
        expected = block(x)
        if compiled == "conv1":
            block.conv1.compile(backend="eager")
        elif compiled == "forward":
            block.forward = torch.compile(block.forward, backend="eager")
        else:
            block.compile(backend="eager")
        for _ in range(2):
            torch.testing.assert_close(block(x), expected)

    @pytest.mark.parametrize("other", ["a user hook", "an injection at the block's input", "the block itself"])
    def test_modified_input_before_the_branch_raises(self, model: Any, other: str) -> None:
        """Otherwise the branch would silently receive D(x)."""
        self.only_skips(model)
        block = model.train().layer4[1]
        if other == "a user hook":
            block.register_forward_pre_hook(lambda module, args: (args[0].clone(),))
        elif other == "an injection at the block's input":
            inject(model, hookdrop.Dropout(0.1), layers="layer4.1", at="input", on_existing="stack")
        else:
            block.conv1.register_forward_pre_hook(lambda module, args: (args[0].clone(),), prepend=True)
        with pytest.raises(InjectionError, match="the block modified its input before"):
            block(torch.rand(2, 512, 4, 4))

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_checkpoint_inside_the_block(self, model: Any, reentrant: bool) -> None:
        """Non-reentrant: the gradients are correct. Reentrant: the input of the branch is lost, which raises."""
        self.only_skips(model)
        twin = copy.deepcopy(model)
        block, plain = CheckpointedBlock(model.layer4[1], reentrant).train(), twin.train().layer4[1]
        self.move_hooks(model.layer4[1], block)
        x = torch.rand(2, 512, 4, 4, requires_grad=True)
        torch.manual_seed(2)
        expected = torch.autograd.grad(plain(x).sum(), [x, plain.conv1.weight])
        torch.manual_seed(2)
        out = block(x)
        if reentrant:
            with pytest.raises(InjectionError, match="a checkpoint inside the block"):
                out.sum().backward()
        else:
            assert all_equal(list(torch.autograd.grad(out.sum(), [x, block.block.conv1.weight])), list(expected))

    def test_frozen_block_keeps_its_own_input(self, model: Any) -> None:
        """Even if the previous block returned its own skip tensor."""
        self.only_skips(model)
        first, second = model.train().layer3[1], model.layer4[1].eval()
        x = torch.rand(2, 512, 4, 4)
        hook = next(iter(first._forward_pre_hooks.values()))
        skip_tensor = hook.apply(x, hook.train_rate)
        assert skip_tensor is not x
        seen: list[Tensor] = []
        second.conv1.register_forward_hook(lambda module, args, output: seen.append(args[0]))
        second(skip_tensor)
        assert seen[0] is skip_tensor

    def test_copies_and_pickles_of_the_skip_tensor_exclude_the_input(self, model: Any) -> None:
        self.only_skips(model)
        hook = next(iter(model.layer4[1]._forward_pre_hooks.values()))
        x = torch.rand(2, 512, 4, 4)
        skip_tensor = hook.apply(x, hook.train_rate)
        saved = io.BytesIO()
        torch.save(skip_tensor, saved)
        assert saved.tell() < 1.5 * x.numel() * 4
        assert copy.deepcopy(skip_tensor)._hookdrop_skipped is None

    def test_chain_of_in_place_blocks_keeps_only_one_input(self, model: Any) -> None:
        self.only_skips(model)
        hooks = [next(iter(model.get_submodule(name)._forward_pre_hooks.values())) for name in ("layer3.1", "layer4.1")]
        x = torch.rand(2, 512, 4, 4)
        middle = hooks[0].apply(x, hooks[0].train_rate)
        last = hooks[1].apply(middle, hooks[1].train_rate)
        assert last._hookdrop_skipped.x is middle
        assert not hasattr(middle, "_hookdrop_skipped")

    def test_pre_activation_block_is_not_recognized(self) -> None:
        block = torchvision.models.resnet18().layer4[1]
        parts = dict(block.named_children())
        block._modules.clear()
        block._modules.update({name: parts[name] for name in ("bn1", "conv1", "bn2", "conv2", "relu")})
        model = nn.ModuleDict({"layer4": nn.Sequential(block)})
        with pytest.raises(LayerError, match="found no matching layer"):
            dropblock_resnet(model)

    def test_plan_shows_the_skip(self, model: Any) -> None:
        plan = dropblock_resnet.plan(model)
        assert "layer4.1 (skip)" in str(plan)
        assert plan.at == "mixed"


def test_schedule_controls_the_rate_of_a_recipe() -> None:
    drop = stochastic_depth(torchvision.models.resnet18(), p=0.2, schedule=LinearSchedule(steps=2))
    drop.step()
    assert drop.p == pytest.approx(0.1)


def test_example_input_warns_if_a_block_covers_the_map() -> None:
    plan = dropblock_resnet.plan(torchvision.models.resnet18(), example_input=torch.zeros(1, 3, 64, 64))
    assert any("covers the whole" in text for text in plan.warnings)
    with pytest.warns(HookdropWarning, match="covers the whole"):
        plan.apply()
