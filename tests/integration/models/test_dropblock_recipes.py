"""Recipes: the places of papers and libraries, held against written-out models and against timm's own."""

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


def awake(model: nn.Module) -> nn.Module:
    """The model with no weight of a norm at 0, where branches would start with nothing in them."""
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def train_step(model: nn.Module, forward: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """Output, gradients and batch-norm statistics after one forward and backward from seed 0."""
    model.train().zero_grad()
    x = x.clone().requires_grad_()
    torch.manual_seed(0)
    out = forward(x)
    out.square().sum().backward()
    grads = [parameter.grad for parameter in model.parameters()]
    return [out.detach(), x.grad, *grads, *(buffer.clone() for buffer in model.buffers())]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


class TestTheDropBlockPaper:
    """Ghiasi et al. 2018, section 4.1, against a model that is written out."""

    @staticmethod
    def written_out(model: nn.Module, p: float, block_size: int) -> Callable[[Tensor], Tensor]:
        """The model's forward with DropBlock in groups 3 and 4: on skips, after convolutions and on projections."""

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
    def test_outputs_and_gradients_are_the_written_out_models(self, name: str) -> None:
        torch.manual_seed(0)
        model, x = awake(RESNETS[name]()), torch.randn(2, 3, 128, 128)
        twin = copy.deepcopy(model)
        dropblock_resnet(model, p=0.2, block_size=3)
        theirs = train_step(twin, self.written_out(twin, 0.2, 3), x)
        assert equal(train_step(model, model, x), theirs)

    def test_something_was_dropped_in_that(self) -> None:
        torch.manual_seed(0)
        model, x = torchvision.models.resnet18(num_classes=5), torch.randn(2, 3, 128, 128)
        plain = train_step(copy.deepcopy(model), model, x)[0]
        dropblock_resnet(model, p=0.2, block_size=3)
        assert not torch.equal(train_step(model, model, x)[0], plain)

    def test_every_block_of_groups_3_and_4_has_its_convolutions_and_its_skip(self) -> None:
        model = torchvision.models.resnet50()
        sites = {site.name: site.p for site in dropblock_resnet(model, p=0.4).sites}
        blocks = [f"layer3.{i}" for i in range(6)] + [f"layer4.{i}" for i in range(3)]
        wanted = {f"{block}.bn{i}" for block in blocks for i in (1, 2, 3)}
        wanted |= {f"{block}.downsample" if block.endswith(".0") else block for block in blocks}
        assert set(sites) == wanted
        assert all(p == (0.1 if name.startswith("layer3") else 0.4) for name, p in sites.items())

    def test_the_rate_rises_linearly_in_steps(self) -> None:
        drop = dropblock_resnet(torchvision.models.resnet18(), p=0.1, steps=10)
        assert (drop.p, drop.keep_prob) == (0.0, 1.0)
        drop.step(5)
        assert drop.sites[0].p == pytest.approx(0.25 * 0.05)
        drop.step(5)
        assert drop.keep_prob == 0.9

    def test_a_resnet_inside_another_model_is_found(self) -> None:
        model = nn.ModuleDict({"backbone": torchvision.models.resnet18(), "head": nn.Linear(1000, 2)})
        assert all(site.name.startswith("backbone.layer") for site in dropblock_resnet(model).sites)

    def test_a_name_in_front_of_the_groups_is_no_group(self) -> None:
        with pytest.raises(LayerError, match=r"looks for a ResNet"):
            dropblock_resnet(torchvision.models.vgg11())


class TestTimmsDropBlock:
    """`drop_block_rate=` of timm itself, with its own module, under one seed."""

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
    def test_outputs_and_gradients_are_timms(self, name: str) -> None:
        torch.manual_seed(0)
        native = awake(timm.create_model(name, drop_block_rate=0.3, num_classes=5))
        clean = timm.create_model(name, num_classes=5)
        clean.load_state_dict(native.state_dict())
        drop = timm_dropblock(
            clean, 0.3, regularizer=lambda p, block_size, gamma_scale: DropBlock2d(p, block_size, gamma_scale)
        )
        assert drop.sites
        x = torch.randn(2, 3, 128, 128)
        theirs = train_step(native, native, x)
        assert equal(train_step(clean, clean, x), theirs)
        without = timm.create_model(name, num_classes=5)
        without.load_state_dict(native.state_dict())
        assert not torch.equal(train_step(without, without, x)[0], theirs[0])

    def test_our_own_has_the_gamma_scale_in_its_rate(self) -> None:
        drop = timm_dropblock(timm.create_model("resnet18"), p=0.2)
        settings = [(site.name.split(".")[0], site.p, site.regularizer) for site in drop.sites]
        assert settings == [
            ("layer3", 0.05, "DropBlock(p=0.05, block_size=5)"),
            ("layer3", 0.05, "DropBlock(p=0.05, block_size=5)"),
            ("layer4", 0.2, "DropBlock(p=0.2, block_size=3)"),
            ("layer4", 0.2, "DropBlock(p=0.2, block_size=3)"),
        ]

    def test_a_model_that_has_it_on_is_refused(self) -> None:
        with pytest.raises(InjectionError, match=r"on already: layer3\.0\.drop_block is a DropBlock2d"):
            timm_dropblock(timm.create_model("resnet18", drop_block_rate=0.1))


class TestEveryRecipe:
    def test_has_a_docstring_with_its_paper_or_its_library_and_an_example(self) -> None:
        for recipe in RECIPES:
            assert "arXiv" in recipe.__doc__ or "timm" in recipe.__doc__
            assert ">>> " in recipe.__doc__

    def test_plans_without_touching_the_model(self) -> None:
        model = torchvision.models.resnet18()
        plan = stochastic_depth.plan(model, p=0.2, example_input=torch.zeros(1, 3, 64, 64))
        assert len(find(model)) == 0
        assert plan.sites[-1].shape == (1, 512, 2, 2)
        assert str(plan).startswith("8 sites of ResNet")
        assert len(plan.apply().sites) == 8

    @pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.__name__)
    def test_finds_nothing_in_a_linear_layer_and_says_what_it_looks_for(self, recipe: Any) -> None:
        with pytest.raises(LayerError, match=rf"{recipe.__name__} finds nothing to do in Linear: it looks for"):
            recipe(nn.Linear(2, 2))

    @pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.__name__)
    def test_takes_what_inject_takes_beside_layers(self, recipe: Any) -> None:
        assert {"name", "on_existing", "example_input"} <= set(inspect.signature(recipe).parameters)

    @pytest.mark.parametrize("regularizer", [DropBlock(0.1), 3])
    def test_wants_a_factory_and_not_a_regularizer(self, regularizer: Any) -> None:
        with pytest.raises(TypeError, match=r"must be a class or a function that is called as \(p=0.1, block_size=7\)"):
            dropblock_resnet(torchvision.models.resnet18(), regularizer=regularizer)

    def test_a_factory_that_takes_other_settings_is_told_which(self) -> None:
        model = torchvision.models.resnet18()
        with pytest.raises(
            TypeError, match=r"called as Dropout2d\(p=0.1, block_size=7\), which it does not take"
        ) as told:
            dropblock_resnet(model, regularizer=hookdrop.Dropout2d)
        assert "regularizer=lambda p, block_size: Dropout2d(...)" in str(told.value)
        assert len(find(model)) == 0

    @pytest.mark.parametrize(
        ("given", "error", "message"),
        [
            ({"p": 20}, ValueError, "write p=0.2"),
            ({"p": DropBlock(0.1)}, TypeError, "p must be a number, got DropBlock"),
            ({"schedule": 10}, TypeError, "schedule must be a hookdrop schedule, got 10"),
            ({"on_existing": "keep"}, ValueError, "on_existing must be one of 'error', 'replace', 'stack'"),
            ({"mode": "col"}, ValueError, "mode must be one of 'row', 'batch'"),
            ({"name": ""}, InjectionError, "name must be a text"),
            ({"layers": "layer4"}, TypeError, "unexpected keyword argument 'layers'"),
        ],
    )
    def test_a_slip_is_an_error_that_leaves_the_model_as_it_was(
        self, given: dict[str, Any], error: type[Exception], message: str
    ) -> None:
        model = torchvision.models.resnet18()
        with pytest.raises(error, match=message) as told:
            stochastic_depth(model, **given)
        assert "No hook was placed" in str(told.value)
        assert len(find(model)) == 0

    def test_a_rerun_cell_is_refused_and_replaced(self) -> None:
        model = torchvision.models.resnet18()
        dropblock_resnet(model)
        with pytest.raises(InjectionError, match="12 sites already carry 'dropblock_resnet'"):
            dropblock_resnet(model)
        assert len(dropblock_resnet(model, p=0.2, on_existing="replace").sites) == 12
        assert len(find(model)) == 1

    def test_two_recipes_go_together(self) -> None:
        model = timm.create_model("resnet18")
        timm_dropblock(model)
        stochastic_depth(model)
        assert [injection.name for injection in find(model)] == ["stochastic_depth", "timm_dropblock"]

    def test_is_an_injection_like_any_other(self) -> None:
        model = torchvision.models.resnet18(num_classes=5)
        clean, x = copy.deepcopy(model), torch.randn(2, 3, 128, 128)
        drop = dropblock_resnet(model, block_size=3, steps=10).follow(torch.optim.SGD(model.parameters(), 0.1))
        assert torch.equal(model.eval()(x), clean.eval()(x))
        drop.seek(10)
        assert drop.probe(x).dropped == pytest.approx(0.06, abs=0.03)
        drop.remove()
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())

    def test_its_config_makes_it_again(self) -> None:
        model = torchvision.models.resnet18(num_classes=5)
        twin, x = copy.deepcopy(model), torch.randn(2, 3, 128, 128)
        config = dropblock_resnet(model, p=0.3, block_size=3).config
        hookdrop.from_config(twin, config)
        assert equal(train_step(model, model, x), train_step(twin, twin, x))
        assert find(twin)["dropblock_resnet"].config == config

    def test_inside_of_a_trace_it_is_refused(self, compiler: Any) -> None:
        model = torchvision.models.resnet18()

        def step() -> None:
            dropblock_resnet(model)

        with pytest.raises((InjectionError, torch._dynamo.exc.Unsupported, torch._dynamo.exc.UserError)):
            torch.compile(step, fullgraph=True, backend="eager")()

    @pytest.mark.parametrize("recipe", [dropblock_resnet, stochastic_depth], ids=lambda recipe: recipe.__name__)
    @pytest.mark.parametrize("name", ["", "backbone."])
    def test_a_traced_model_is_refused(self, recipe: Any, name: str) -> None:
        """Its blocks are gone: some of the sites would be missing, and a skip has no module any more."""
        traced = torch.fx.symbolic_trace(torchvision.models.resnet18())
        model = nn.ModuleDict({"backbone": traced}) if name else traced
        with pytest.raises(InjectionError, match=f"{name.strip('.')}.* is an fx GraphModule") as told:
            recipe(model)
        assert "inject before tracing" in str(told.value)
        assert len(find(model)) == 0

    def test_a_model_is_not_refused_for_another_part_that_is_traced(self) -> None:
        traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(1000, 2)))
        model = nn.Sequential(torchvision.models.resnet18(), traced)
        assert len(stochastic_depth(model).sites) == 8

    def test_needs_no_library_but_torch(self) -> None:
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
    """A basic block with its branch and the addition inside of a checkpoint, as in mmdetection."""

    def __init__(self, block: Any, reentrant: bool) -> None:
        super().__init__()
        self.block, self.reentrant = block, reentrant

    def forward(self, x: Tensor) -> Tensor:
        b = self.block
        inner = lambda x: b.bn2(b.conv2(F.relu(b.bn1(b.conv1(x))))) + x  # noqa: E731
        return F.relu(torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=self.reentrant))


@pytest.fixture
def compiler() -> Any:
    """Nothing compiled before or after."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class TestTheSkip:
    """Identity skips: two pre-hooks that make f(x) + D(x)."""

    @pytest.fixture
    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return torchvision.models.resnet18(num_classes=5)

    @pytest.fixture
    def x(self) -> Tensor:
        return torch.randn(2, 3, 128, 128)

    @staticmethod
    def only_skips(model: nn.Module, p: float = 0.5) -> hookdrop.Injection:
        """The recipe at its skips alone."""
        plan = dropblock_resnet.plan(model, p=p, block_size=2)
        plan.sites = [site for site in plan.sites if site.at == "skip"]
        return plan.apply()

    def test_drops_what_the_skip_carries_and_nothing_of_the_branch(self, model: Any, x: Tensor) -> None:
        self.only_skips(model, p=1.0)
        block = model.train().layer4[1]
        x = torch.rand(2, 512, 4, 4)
        branch = block.bn2(block.conv2(F.relu(block.bn1(block.conv1(x)))))
        assert torch.equal(block(x), F.relu(branch))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_is_exact_in_every_dtype(self, model: Any, dtype: torch.dtype) -> None:
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

    def test_holds_no_tensor_after_a_forward(self, model: Any, x: Tensor) -> None:
        self.only_skips(model)
        model.train()(x).sum().backward()
        hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
        assert hooks
        assert all(getattr(hook, "kept", None) is None for hook in hooks)

    def test_follows_copies_and_pickles(self, model: Any, x: Tensor) -> None:
        self.only_skips(model)
        wanted = train_step(copy.deepcopy(model), model, x)[0]
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(train_step(twin, twin, x)[0], wanted)
            assert find(twin)["dropblock_resnet"].remove() is None
            assert not any(module._forward_pre_hooks for module in twin.modules())

    def test_is_replayed_by_activation_checkpointing(self, model: Any, x: Tensor) -> None:
        self.only_skips(model)
        twin = copy.deepcopy(model)

        def checkpointed(x: Tensor) -> Tensor:
            x = twin.layer1(twin.maxpool(twin.relu(twin.bn1(twin.conv1(x)))))
            x = torch.utils.checkpoint.checkpoint(twin.layer3, twin.layer2(x), use_reentrant=False)
            x = torch.utils.checkpoint.checkpoint(twin.layer4, x, use_reentrant=False)
            return twin.fc(twin.avgpool(x).flatten(1))

        ours, theirs = train_step(twin, checkpointed, x), train_step(model, model, x)
        grads = len(list(model.parameters())) + 2  # statistics of batch norms are updated twice
        assert equal(ours[:grads], theirs[:grads])

    def test_goes_into_one_graph(self, model: Any, compiler: Any) -> None:
        block = model.train().layer4[1]
        self.only_skips(model, p=1.0)
        x = torch.rand(2, 512, 4, 4)
        compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
        branch = block.bn2(block.conv2(F.relu(block.bn1(block.conv1(x)))))
        torch.testing.assert_close(compiled(x), F.relu(branch))

    def test_a_branch_whose_first_layer_was_replaced_is_an_error(self, model: Any, x: Tensor) -> None:
        self.only_skips(model)
        model.layer4[1].conv1 = nn.Conv2d(512, 512, 3, padding=1)
        with pytest.raises(InjectionError, match=r"'conv1', the first layer of the residual branch, was replaced"):
            model.train()(x)

    def test_in_eval_mode_nothing_is_touched(self, model: Any, x: Tensor) -> None:
        clean = copy.deepcopy(model).eval()(x)
        self.only_skips(model)
        assert torch.equal(model.eval()(x), clean)

    def test_is_off_and_on_with_its_injection(self, model: Any, x: Tensor) -> None:
        clean = train_step(copy.deepcopy(model), model, x)[0]
        drop = self.only_skips(model)
        with drop.disabled():
            assert torch.equal(train_step(model, model, x)[0], clean)
        assert not torch.equal(train_step(model, model, x)[0], clean)
        drop.remove()
        assert torch.equal(train_step(model, model, x)[0], clean)
        assert not model.layer4[1].conv1._forward_pre_hooks

    def test_a_block_that_is_run_twice_at_once_gives_each_its_own(self, model: Any) -> None:
        """The block inside itself: what is kept is kept with the tensor, not with the hook."""
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

    def test_is_given_back_where_the_branch_is_called_by_keyword(self, model: Any) -> None:
        self.only_skips(model, p=1.0)
        block = model.train().layer4[1]
        x = torch.rand(2, 512, 4, 4)
        wanted = block(x)
        by_keyword = KeywordBlock(block).train()
        self.move_hooks(block, by_keyword)
        assert torch.equal(by_keyword(x), wanted)

    @staticmethod
    def move_hooks(block: nn.Module, other: nn.Module) -> None:
        for name in ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"):
            setattr(other, name, getattr(block, name))

    @pytest.mark.parametrize("compiled", ["conv1", "forward", "block"])
    @pytest.mark.filterwarnings("ignore::hookdrop.HookdropWarning")
    def test_is_right_where_one_of_the_two_is_compiled_alone(self, model: Any, compiler: Any, compiled: str) -> None:
        self.only_skips(model, p=1.0)
        block = model.train().layer4[1]
        x = torch.rand(2, 512, 4, 4)
        wanted = block(x)
        if compiled == "conv1":
            block.conv1.compile(backend="eager")
        elif compiled == "forward":
            block.forward = torch.compile(block.forward, backend="eager")
        else:
            block.compile(backend="eager")
        for _ in range(2):
            torch.testing.assert_close(block(x), wanted)

    @pytest.mark.parametrize(
        "other", ["a hook of somebody else", "an injection at the block's input", "the block itself"]
    )
    def test_another_tensor_on_the_way_to_the_branch_is_an_error(self, model: Any, other: str) -> None:
        """It would be given D(x) in silence."""
        self.only_skips(model)
        block = model.train().layer4[1]
        if other == "a hook of somebody else":
            block.register_forward_pre_hook(lambda module, args: (args[0].clone(),))
        elif other == "an injection at the block's input":
            inject(model, hookdrop.Dropout(0.1), layers="layer4.1", at="input", on_existing="stack")
        else:
            block.conv1.register_forward_pre_hook(lambda module, args: (args[0].clone(),), prepend=True)
        with pytest.raises(InjectionError, match="the block modified its input before"):
            block(torch.rand(2, 512, 4, 4))

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_a_checkpoint_inside_of_the_block(self, model: Any, reentrant: bool) -> None:
        """Without re-entry the gradients are right; with it the branch's input is lost, which is told."""
        self.only_skips(model)
        twin = copy.deepcopy(model)
        block, plain = CheckpointedBlock(model.layer4[1], reentrant).train(), twin.train().layer4[1]
        self.move_hooks(model.layer4[1], block)
        x = torch.rand(2, 512, 4, 4, requires_grad=True)
        torch.manual_seed(2)
        wanted = torch.autograd.grad(plain(x).sum(), [x, plain.conv1.weight])
        torch.manual_seed(2)
        out = block(x)
        if reentrant:
            with pytest.raises(InjectionError, match="a checkpoint inside the block"):
                out.sum().backward()
        else:
            assert equal(list(torch.autograd.grad(out.sum(), [x, block.block.conv1.weight])), list(wanted))

    def test_a_frozen_block_keeps_its_own_input(self, model: Any) -> None:
        """Although the block before it gave out what it had made of its input."""
        self.only_skips(model)
        first, second = model.train().layer3[1], model.layer4[1].eval()
        x = torch.rand(2, 512, 4, 4)
        hook = next(iter(first._forward_pre_hooks.values()))
        lent = hook.apply(x, hook.train_rate)
        assert lent is not x
        seen: list[Tensor] = []
        second.conv1.register_forward_hook(lambda module, args, output: seen.append(args[0]))
        second(lent)
        assert seen[0] is lent

    def test_copies_and_pickles_of_what_goes_out_have_no_input_with_them(self, model: Any) -> None:
        self.only_skips(model)
        hook = next(iter(model.layer4[1]._forward_pre_hooks.values()))
        x = torch.rand(2, 512, 4, 4)
        lent = hook.apply(x, hook.train_rate)
        saved = io.BytesIO()
        torch.save(lent, saved)
        assert saved.tell() < 1.5 * x.numel() * 4
        assert copy.deepcopy(lent)._hookdrop_skipped is None

    def test_a_chain_of_blocks_that_add_in_place_keeps_one_input_alone(self, model: Any) -> None:
        self.only_skips(model)
        hooks = [next(iter(model.get_submodule(name)._forward_pre_hooks.values())) for name in ("layer3.1", "layer4.1")]
        x = torch.rand(2, 512, 4, 4)
        middle = hooks[0].apply(x, hooks[0].train_rate)
        last = hooks[1].apply(middle, hooks[1].train_rate)
        assert last._hookdrop_skipped.x is middle
        assert not hasattr(middle, "_hookdrop_skipped")

    def test_a_block_that_begins_with_its_norm_is_no_block_of_the_recipe(self) -> None:
        block = torchvision.models.resnet18().layer4[1]
        parts = dict(block.named_children())
        block._modules.clear()
        block._modules.update({name: parts[name] for name in ("bn1", "conv1", "bn2", "conv2", "relu")})
        model = nn.ModuleDict({"layer4": nn.Sequential(block)})
        with pytest.raises(LayerError, match="finds nothing to do"):
            dropblock_resnet(model)

    def test_says_in_the_plan_that_it_is_a_skip(self, model: Any) -> None:
        plan = dropblock_resnet.plan(model)
        assert "layer4.1, its skip" in str(plan)
        assert plan.at == "mixed"


def test_a_schedule_drives_a_recipe_that_takes_one() -> None:
    drop = stochastic_depth(torchvision.models.resnet18(), p=0.2, schedule=LinearSchedule(steps=2))
    drop.step()
    assert drop.p == pytest.approx(0.1)


def test_a_block_that_covers_the_map_is_told_of_with_an_example_input() -> None:
    plan = dropblock_resnet.plan(torchvision.models.resnet18(), example_input=torch.zeros(1, 3, 64, 64))
    assert any("covers the whole" in text for text in plan.warnings)
    with pytest.warns(HookdropWarning, match="covers the whole"):
        plan.apply()
