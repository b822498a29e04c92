"""The mistakes that people make, and what they read then; and bad input, after which nothing has changed."""

from __future__ import annotations

import copy
import gc
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Small
from torch import nn

from hookdrop import (
    DropBlock,
    Dropout,
    Dropout1d,
    Dropout2d,
    DropPath,
    FeatureAlphaDropout,
    HookdropError,
    HookdropWarning,
    InjectionError,
    LambdaSchedule,
    LayerError,
    LinearSchedule,
    Regularizer,
    ShapeError,
    eject,
    find,
    inject,
    plan,
    without_hooks,
)
from hookdrop.diagnostics.training import UPDATES_TO_JUDGE

UNCHANGED = "No hook was placed; the model is unchanged."


def train(model: nn.Module, x: torch.Tensor, times: int = 1) -> None:
    for _ in range(times):
        model(x)


def optimize(model: nn.Module, steps: int) -> None:
    """A training that knows nothing of hookdrop."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for _ in range(steps):
        model(torch.ones(2)).sum().backward()
        optimizer.step()


class Tokens(nn.Module):
    """(N, 196, 8) tokens, as a ViT has them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


class NHWC(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stage1, self.stage2 = nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.stage2(self.stage1(x)[:, ::2, ::2])


class Iterates(nn.Module):
    """Calls the children of its container, never the container."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.heads = nn.ModuleList([nn.Linear(8, 2), nn.Linear(8, 2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return sum(head(x) for head in self.heads)


class TestSchedules:
    def test_a_schedule_never_driven_is_told_after_20_updates(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2))
        inject(model, Dropout(0.5), layers="0", schedule=LinearSchedule(10))
        optimize(model, UPDATES_TO_JUDGE)
        with pytest.warns(HookdropWarning) as caught:
            optimize(model, 2 * UPDATES_TO_JUDGE)
        assert len(caught) == 1
        assert str(caught[0].message) == (
            "'dropout' is still at step 0 of LinearSchedule(steps=10): its schedule is not advancing, because nothing calls step(), seek() or follow().\n"
            "  after inject: drop.follow(optimizer)   or after each optimizer.step(): drop.step()   "
            "or: drop.seek(global_step)"
        )

    def test_accumulated_gradients_and_recurrent_calls_are_not_taken_for_updates(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2))
        inject(model, Dropout(0.5), layers="0", schedule=LinearSchedule(10))
        train(model, torch.ones(2), 5000)

    @pytest.mark.parametrize("how", ["loaded", "copied", "another optimizer", "stopped following"])
    def test_a_schedule_that_is_not_driven_any_more_is_told_too(self, how: str) -> None:
        model = nn.Sequential(nn.Linear(2, 2))
        drop = inject(model, Dropout(0.5), layers="0", schedule=LinearSchedule(1000))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        drop.follow(optimizer)
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        if how == "loaded":
            state = drop.state_dict()
            drop.remove()
            drop = inject(model, Dropout(0.5), layers="0", schedule=LinearSchedule(1000))
            drop.load_state_dict(state)
        if how == "copied":
            model = copy.deepcopy(model)
        if how == "stopped following":
            drop.follow(None)
        with pytest.warns(HookdropWarning, match="is still at step 1 of LinearSchedule"):
            optimize(model, 2 * UPDATES_TO_JUDGE)

    def test_a_schedule_that_is_over_needs_nobody(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2))
        drop = inject(model, Dropout(0.5), layers="0", schedule=LinearSchedule(10))
        drop.seek(10)
        optimize(model, 3 * UPDATES_TO_JUDGE)

    def test_a_rebuilt_optimizer_is_reported_at_its_first_step(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2))
        drop = inject(model, Dropout(0.5), layers="0", schedule=LinearSchedule(1000))
        drop.follow(torch.optim.SGD(model.parameters(), 0.1))
        gc.collect()
        with pytest.warns(HookdropWarning, match="the optimizer that it followed is gone"):
            optimize(model, 1)

    def test_the_optimizer_of_a_schedule_that_is_over_may_go(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2))
        drop = inject(model, Dropout(0.5), layers="0", schedule=LinearSchedule(1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        drop.follow(optimizer)
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        del optimizer
        gc.collect()
        model(torch.ones(2))
        assert drop.check() == []

    @pytest.mark.parametrize("layer", ["a layer without weights", "a frozen layer"])
    @pytest.mark.parametrize("start", ["never driven", "loaded", "followed", "an optimizer that is gone"])
    def test_it_is_told_where_hooks_see_no_updates(self, layer: str, start: str) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        drop = inject(model, Dropout(0.5), layers="1" if "without" in layer else "0", schedule=LinearSchedule(1000))
        model[0].requires_grad_(layer != "a frozen layer")
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        if start == "loaded":
            drop.load_state_dict(drop.state_dict() | {"step_count": 7})
        if start == "followed":
            drop.follow(optimizer)
        if "gone" in start:
            drop.follow(torch.optim.SGD(model.parameters(), 0.1))
            gc.collect()

        def update(times: int) -> None:
            for _ in range(times):
                model(torch.ones(2, 2)).sum().backward()
                optimizer.step()

        if start == "followed":
            update(3 * UPDATES_TO_JUDGE)
            drop.follow(None)
        text = "the optimizer that it followed is gone" if "gone" in start else "its schedule is not advancing"
        with pytest.warns(HookdropWarning, match=text) as caught:
            update(2 * UPDATES_TO_JUDGE)
        assert len(caught) == 1
        assert any(text in problem for problem in drop.check())
        drop.seek(1000)
        assert drop.check() == []

    def test_a_schedule_that_is_stepped_rarely_is_driven(self) -> None:
        """As by epochs."""
        model = nn.Sequential(nn.ReLU(), nn.Linear(2, 2))
        drop = inject(model, Dropout(0.5), layers="0", schedule=LinearSchedule(100))
        for _ in range(5):
            optimize(model, UPDATES_TO_JUDGE)
            drop.step()
        assert drop.check() == []

    @pytest.mark.parametrize("ask", ["summary", "remove"])
    def test_a_schedule_never_driven_is_told_when_asked_once(self, ask: str) -> None:
        model = nn.Sequential(nn.Identity())
        drop = inject(model, Dropout(0.5), layers="0", schedule=LinearSchedule(10))
        train(model, torch.ones(2))
        assert len(drop.check()) == 1
        with pytest.warns(HookdropWarning, match="its schedule is not advancing"):
            getattr(drop, ask)()
        drop.remove()

    @pytest.mark.parametrize(
        "drive", [lambda d, o: d.step(), lambda d, o: d.seek(d.step_count + 1), lambda d, o: d.follow(o)]
    )
    def test_a_schedule_that_somebody_drives_is_fine(self, drive: Callable[..., Any]) -> None:
        model = nn.Sequential(nn.Linear(2, 2))
        drop = inject(model, Dropout(0.5), layers="0", schedule=LinearSchedule(10))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        drive(drop, optimizer)
        for _ in range(3 * UPDATES_TO_JUDGE):
            model(torch.ones(2)).sum().backward()
            optimizer.step()
            if drop._follower is None:
                drive(drop, optimizer)
        assert drop.check() == []
        drop.metrics()

    def test_step_while_following(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2))
        drop = inject(model, Dropout(0.5), layers="0", schedule=LinearSchedule(10))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        drop.follow(optimizer)
        with pytest.raises(InjectionError, match="this call would count them twice"):
            drop.step()


class TestNotebooks:
    def test_a_cell_run_twice(self, model: Small) -> None:
        def cell(**kwargs: Any) -> Any:
            return inject(model, DropBlock(0.1, 3), layers="layer?.*", **kwargs)

        cell()
        with pytest.raises(InjectionError) as error:
            cell()
        assert str(error.value).splitlines() == [
            "4 sites already carry 'dropblock' (a re-run cell?).",
            '  replace them: inject(..., on_existing="replace")   keep both: on_existing="stack", name="dropblock2"',
            UNCHANGED,
        ]
        cell(on_existing="replace")
        assert len(find(model)) == 1
        with pytest.raises(InjectionError, match="an injection named 'dropblock' already"):
            cell(on_existing="stack")
        cell(on_existing="stack", name="second")
        assert [drop.name for drop in find(model)] == ["dropblock", "second"]

    def test_the_same_name_at_other_sites(self, model: Small) -> None:
        inject(model, Dropout(0.1), layers="layer1.*")
        with pytest.raises(InjectionError, match="name='dropout2'"):
            inject(model, Dropout(0.1), layers="layer2.*")


class TestSelection:
    def test_double_star_where_a_star_was_meant(self, model: Small) -> None:
        """`layer1.**` takes the blocks and all that is in them."""
        drafted = plan(model, Dropout(0.1), layers="layer1.**")
        (warning,) = drafted.warnings
        assert warning == (
            "8 of 10 sites lie inside other sites: a value passes up to 2 of them ('layer1.0' > 'layer1.0.conv1'), "
            "which comes to a rate of 0.19 there.\n  for one level only: a pattern that ends in '.*', not '.**'."
        )
        with pytest.warns(HookdropWarning, match="lie inside other sites"):
            drafted.apply()

    def test_a_listing_warns_of_nothing_that_a_hook_would_do(self, model: Small, images: torch.Tensor) -> None:
        """`print(plan(model, layers="**"))` is what errors recommend."""
        model.fc.requires_grad_(False)
        for listed in (model, Iterates(), nn.TransformerEncoderLayer(8, 2)):
            assert plan(listed, layers="**").warnings == []
            assert plan(listed, Dropout(0.1), layers="**").warnings
        assert plan(model, layers="**", example_input=images).warnings == []

    def test_peft_style_suffixes(self, model: Small) -> None:
        with pytest.raises(LayerError, match=re.escape("did you mean: '**.bn1' (4 modules)")):
            inject(model, Dropout(0.1), layers=["bn1", "bn2"])

    def test_an_exclude_that_takes_nothing_away(self, model: Small) -> None:
        """`exclude="layer1"` is one module, not what is in it."""
        drafted = plan(model, Dropout(0.1), layers="layer?.*", exclude="layer1")
        assert drafted.warnings == ["exclude 'layer1' matches none of the chosen layers; what is inside: 'layer1.**'."]

    def test_a_container_that_is_iterated_named_in_full(self) -> None:
        with pytest.raises(LayerError, match=r"'heads' is a ModuleList, which is never called(.|\n)*inside of it"):
            inject(Iterates(), Dropout(0.1), layers="heads")
        with pytest.raises(LayerError, match="'blocks' .Sequential. is not called in a forward"):
            inject(Iterates(), Dropout(0.1), layers="blocks", example_input=torch.ones(2, 8))

    def test_a_container_that_is_iterated_matched_by_a_pattern(self) -> None:
        drafted = plan(Iterates(), Dropout(0.1), layers="*", example_input=torch.ones(2, 8))
        assert [site.name for site in drafted.sites] == ["blocks"]
        assert "skipped 1 module that the model never calls (containers): 'heads'." in drafted.warnings
        assert any("1 site never called in an eval forward" in text for text in drafted.warnings)
        with pytest.raises(LayerError, match="matches only modules that are never called"):
            plan(Iterates(), Dropout(0.1), layers="head*[s]")

    def test_a_container_that_is_iterated_without_an_example(self) -> None:
        """Found out from the first steps of the training."""
        model = Iterates()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", HookdropWarning)
            drop = inject(model, Dropout(0.1), layers=["blocks", "heads.0"])
        model(torch.ones(2, 8))
        with pytest.warns(HookdropWarning, match="'blocks' never ran, so nothing is dropped there"):
            drop.summary()

    def test_sites_that_never_run_are_told_after_ten_steps(self) -> None:
        model = Iterates()
        drop = inject(model, Dropout(0.1), layers="blocks", schedule=LinearSchedule(100))
        for _ in range(9):
            model(torch.ones(2, 8))
            drop.step()
        with pytest.warns(HookdropWarning, match="'blocks' never ran"):
            drop.step()
        drop.step()

    @pytest.mark.parametrize("ask", ["summary", "remove"])
    def test_sites_that_never_run_are_told_without_a_schedule_too(self, ask: str) -> None:
        """From the model's weights, which a training without an optimizer of PyTorch's has written to by then."""
        model = Iterates()
        drop = inject(model, Dropout(0.1), layers="blocks")
        drop.state_dict()
        for _ in range(UPDATES_TO_JUDGE):
            model(torch.ones(2, 8)).sum().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 1e-3 * parameter.grad
        with pytest.warns(HookdropWarning, match="'blocks' never ran"):
            getattr(drop, ask)()

    def test_multihead_attentions_projection_is_never_called(self) -> None:
        """Its owner uses its weights; this is known without an example."""
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 1)
        with pytest.raises(LayerError, match="'layers.0.self_attn.out_proj' is a NonDynamicallyQuantizableLinear"):
            inject(model, Dropout(0.1), layers="layers.0.self_attn.out_proj")
        with pytest.raises(LayerError, match="matches only modules that are never called"):
            inject(model, Dropout(0.1), layers="**.out_proj")


class TestShapes:
    def test_vit_tokens_given_to_dropblock(self) -> None:
        model, x = Tokens(), torch.randn(2, 196, 8)
        with pytest.raises(ShapeError) as error:
            inject(model, DropBlock(0.1, 7), layers="blocks.*", example_input=x)
        assert str(error.value).startswith(
            "DropBlock at 'blocks.0' got (2, 196, 8): tokens have no map.\n  use TokenDropout"
        )
        assert str(error.value).endswith(UNCHANGED)
        assert find(model) == ()

    def test_vit_tokens_at_the_first_forward_also_at_rate_0(self) -> None:
        model = Tokens()
        inject(model, DropBlock(0.1, 7), layers="blocks.1", schedule=LinearSchedule(100))
        model.eval()(torch.randn(2, 196, 8))
        with pytest.raises(ShapeError, match=r"DropBlock at 'blocks.1' got \(2, 196, 8\): tokens have no map"):
            model.train()(torch.randn(2, 196, 8))

    @pytest.mark.parametrize("regularizer", [DropBlock(0.1, 3), Dropout2d(0.1)], ids=repr)
    def test_nhwc_maps(self, regularizer: nn.Module) -> None:
        x = torch.randn(2, 14, 14, 24)
        drafted = plan(NHWC(), regularizer, layers="*", example_input=x)
        assert [site.reading for site in drafted.sites] == ["C=14 H=14 W=24", "C=7 H=7 W=24"]
        (warning,) = drafted.warnings
        assert "'stage1': reads (2, 14, 14, 24) as C=14 H=14 W=24; that looks like NHWC: " in warning
        assert warning.endswith("(and 1 more site like it)")

    def test_nhwc_maps_at_the_first_forward_said_once(self) -> None:
        model = NHWC()
        inject(model, DropBlock(0.1, 3), layers="*")
        with pytest.warns(HookdropWarning) as caught:
            train(model, torch.randn(2, 14, 14, 24), 3)
        (warning,) = caught
        assert "DropBlock at 'stage1': reads (2, 14, 14, 24) as C=14 H=14 W=24; that looks like NHWC" in str(
            warning.message
        )
        assert "channel_dim=-1" in str(warning.message)

    def test_what_a_plan_warned_of_is_not_said_again_by_the_first_forward(self) -> None:
        model, x = NHWC(), torch.randn(2, 14, 14, 24)
        with pytest.warns(HookdropWarning, match="looks like NHWC"):
            inject(model, DropBlock(0.1, 3), layers="*", example_input=x)
        model(x)

    def test_channel_dim_settles_it(self) -> None:
        drafted = plan(NHWC(), DropBlock(0.1, 3, channel_dim=-1), layers="*", example_input=torch.randn(2, 14, 14, 24))
        assert [site.reading for site in drafted.sites] == ["C=24 H=14 W=14", "C=24 H=7 W=7"]
        assert drafted.warnings == []

    def test_a_block_that_covers_the_map(self, model: Small) -> None:
        drafted = plan(model, DropBlock(0.1, 9), layers="layer1.*", example_input=torch.randn(1, 3, 7, 8))
        assert drafted.warnings == [
            "DropBlock at 'layer1.0': block_size=9 covers the whole 7x8 map: DropBlock drops blocks of 7x8 there, "
            "which is Dropout2d. (and 1 more site like it)"
        ]

    def test_the_wrong_rank(self, model: Small, images: torch.Tensor) -> None:
        with pytest.raises(ShapeError, match=r"Dropout1d at 'layer1.0' got \(4, 8, 16, 16\)(.|\n)*use Dropout2d"):
            inject(model, Dropout1d(0.1), layers="layer1.*", example_input=images)
        inject(model, Dropout1d(0.1), layers="layer1.0")
        with pytest.raises(ShapeError, match="Dropout1d at 'layer1.0' got"):
            model(images)

    def test_every_call_of_a_layer_is_looked_at(self) -> None:
        """A head that is called with maps of several sizes, the last of them fine."""

        class Pyramid(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.head = nn.Identity()

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.head(x[:, :, ::4, ::4]).sum() + self.head(x).sum()

        drafted = plan(Pyramid(), DropBlock(0.1, 3), layers="head", example_input=torch.ones(1, 2, 12, 12))
        assert (drafted.sites[0].calls, drafted.sites[0].shape) == (2, (1, 2, 12, 12))
        assert "covers the whole 3x3 map" in drafted.warnings[0]

    def test_a_function_that_changes_the_shape(self, model: Small, images: torch.Tensor) -> None:
        inject(model, torch.Tensor.sum, layers="fc")
        with pytest.raises(
            ShapeError, match=r"sum at 'fc' got \(4, 10\) torch.float32 and returned \(\) torch.float32"
        ):
            model(images)


class TestPlans:
    def test_dropout_into_batch_norm(self, model: Small, images: torch.Tensor) -> None:
        """Disharmony by variance shift, arXiv:1801.05134; before the norm is the convolution's output."""
        drafted = plan(model, Dropout(0.5), layers="**.conv1", example_input=images)
        assert "4 sites straight before a batch norm at p >= 0.3: 'layer1.0.conv1'" in drafted.warnings[-1]
        assert plan(model, Dropout(0.1), layers="**.conv1", example_input=images).warnings == []
        assert plan(model, Dropout(0.5), layers="**.bn1", example_input=images).warnings == []

    def test_frozen_layers_that_are_still_dropped(self, model: Small, images: torch.Tensor) -> None:
        model.layer1.requires_grad_(False)
        drafted = plan(model, Dropout(0.1), layers="layer?.*", example_input=images)
        assert drafted.warnings == [
            "2 sites on frozen layers, whose output is still regularized: 'layer1.0', 'layer1.1'."
        ]

    def test_transformer_encoder_layers_leave_their_fused_path(self) -> None:
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 1)
        drafted = plan(model, Dropout(0.1), layers="layers.0.linear2")
        assert "leaves its fused eval path" in drafted.warnings[0]

    def test_drop_path_on_a_whole_block(self) -> None:
        """It would drop the signal with the branch."""
        import timm

        vit = timm.create_model("vit_tiny_patch16_224", img_size=64)
        x = torch.randn(2, 3, 64, 64)
        drafted = plan(vit, DropPath(0.1), layers="blocks.*", example_input=x)
        assert "DropPath at 'blocks.0': the output still holds the input" in drafted.warnings[0]
        assert plan(vit, DropPath(0.1), layers=["blocks.*.attn", "blocks.*.mlp"], example_input=x).warnings == []
        efficient = timm.create_model("efficientnet_b0")
        assert plan(efficient, DropPath(0.1), layers="blocks.*.*.bn3", example_input=x).warnings == []
        resnet = timm.create_model("resnet18")
        assert plan(resnet, DropPath(0.1), layers="layer2.*", example_input=x).warnings
        assert plan(resnet, DropPath(0.1), layers="layer?.*.bn2", example_input=x).warnings == []

    def test_one_of_several_tensors_is_said(self) -> None:
        lstm = nn.LSTM(3, 4)
        drafted = plan(lstm, Dropout(0.1), layers=lstm, example_input=torch.ones(2, 1, 3))
        assert drafted.sites[0].reading == " (1 of 3 tensors)"

    def test_modules_given_themselves_are_counted_by_name(self, model: Small) -> None:
        drafted = plan(model, Dropout(0.1), layers=[model.layer1[0].bn1, model.layer1[1].bn1])
        assert drafted.counts == {"'layer1.0.bn1'": 1, "'layer1.1.bn1'": 1}

    def test_a_plan_of_a_module_that_was_replaced_since(self, model: Small) -> None:
        drafted = plan(model, Dropout(0.1), layers="fc")
        model.fc = nn.Linear(8, 3)
        with pytest.raises(InjectionError, match="'fc' was replaced since the plan was made"):
            drafted.apply()

    def test_calls_and_shapes_are_filled_in(self, images: torch.Tensor) -> None:
        import torchvision

        model = torchvision.models.resnet50(weights=None)
        drafted = plan(model, Dropout(0.1), layers="layer1.0.relu", example_input=images)
        (site,) = drafted.sites
        assert (site.calls, site.shape, site.type) == (3, (4, 256, 4, 4), "ReLU")

    def test_what_a_plan_prints(self, model: Small, images: torch.Tensor) -> None:
        drafted = plan(
            model, DropBlock(0.2, 3), layers=["layer1.*"], schedule=LinearSchedule(9), p_scale="depth",
            example_input=images,
        )  # fmt: skip
        assert str(drafted).splitlines() == [
            "2 sites of Small, LinearSchedule(steps=9)",
            "site      type   shape      read as        calls    p  regularizer",
            "--------  -----  ---------  -------------  -----  ---  ------------------------------",
            "layer1.0  Block  4x8x16x16  C=8 H=16 W=16      1  0.1  DropBlock(p=0.2, block_size=3)",
            "layer1.1  Block  4x8x16x16  C=8 H=16 W=16      1  0.2  DropBlock(p=0.2, block_size=3)",
            "'layer1.*': 2 layers",
        ]
        assert "<table>" in drafted._repr_html_()

    def test_a_plan_touches_nothing(self, model: Small, images: torch.Tensor) -> None:
        model.train()
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        rng = torch.get_rng_state()
        drafted = plan(model, DropBlock(0.2, 3), layers="layer1.*", example_input=images)
        assert find(model) == ()
        assert all(m.training for m in model.modules())
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        assert all(torch.equal(b, before[n]) for n, b in model.named_buffers())
        assert torch.equal(torch.get_rng_state(), rng)
        assert len(drafted.apply().sites) == 2

    def test_a_plan_without_a_regularizer_lists_and_does_not_apply(self, model: Small) -> None:
        drafted = plan(model, layers="**")
        assert len(drafted.sites) == 24
        with pytest.raises(InjectionError, match="this plan has no regularizer"):
            drafted.apply()

    def test_a_plan_can_be_applied_again_after_removal(self, model: Small, images: torch.Tensor) -> None:
        drafted = plan(model, DropBlock(0.2, 3), layers="layer1.*", schedule=LinearSchedule(2))
        first = drafted.apply()
        first.step(2)
        first.remove()
        second = drafted.apply()
        assert (second.p, second.step_count) == (0.0, 0)

    def test_example_inputs_of_all_kinds(self) -> None:
        class Two(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.fc = nn.Linear(3, 3)

            def forward(self, a: torch.Tensor, b: Any = None) -> torch.Tensor:
                return self.fc(a if b is None else a + b[0])

        x = torch.ones(2, 3)
        for example in (x, (x,), (x, [x]), {"a": x}, {"a": x, "b": [x]}):
            assert plan(Two(), Dropout(0.1), layers="fc", example_input=example).sites[0].shape == (2, 3)


class TestLater:
    def test_sites_lost_to_surgery(self, model: Small, images: torch.Tensor) -> None:
        drop = inject(model, Dropout(0.1), layers=["fc", "layer1.*"])
        model(images)
        model.fc = nn.Linear(8, 3)
        (problem,) = drop.check()
        assert problem.startswith("'dropout': 1 of 3 sites carry no hook any more: 'fc'.")
        with pytest.warns(HookdropWarning, match="carry no hook any more"):
            drop.summary()
        drop.summary()
        again = inject(model, Dropout(0.1), layers=["fc", "layer1.*"], on_existing="replace")
        model(images)
        assert again.check() == []

    def test_always_in_eval_is_told_after_20_updates(self) -> None:
        """As transformers' from_pretrained gives models, or with frozen batch norm."""
        model = nn.Sequential(nn.Linear(2, 2)).eval()
        inject(model, Dropout(0.1), layers="0")
        with pytest.warns(HookdropWarning, match="'0' only ran in eval mode"):
            optimize(model, 2 * UPDATES_TO_JUDGE)

    def test_check_right_after_inject_finds_nothing(self, model: Small, images: torch.Tensor) -> None:
        """Only once something has run or stepped can a site that has not be reported."""
        drop = inject(model, Dropout(0.1), layers=["fc", "layer1.*"], schedule=LinearSchedule(10))
        assert drop.check() == []
        drop.step()
        assert "never ran" in drop.check()[0]
        model(images)
        assert drop.check() == []

    def test_saving_and_logging_raise_no_warnings(self, model: Small) -> None:
        """`state_dict` and `metrics` run in every step of a training, under `-W error` too."""
        drop = inject(model, Dropout(0.1), layers="fc", schedule=LinearSchedule(100))
        model.fc = nn.Identity()
        drop.step(20)
        drop.state_dict()
        drop.metrics()
        with pytest.warns(HookdropWarning, match="carry no hook any more"):
            drop.summary()

    def test_an_own_regularizer_that_forgets_to_return(self, model: Small, images: torch.Tensor) -> None:
        inject(model, Forgets(), layers="fc")
        with pytest.raises(ShapeError, match="Forgets at 'fc' got .* and returned NoneType"):
            model(images)

    def test_an_error_inside_a_regularizer_names_the_site(self, model: Small, images: torch.Tensor) -> None:
        inject(model, torch.linalg.inv, layers="fc")
        with pytest.raises(RuntimeError) as error:
            model(images)
        assert error.value.__notes__ == ["in hookdrop's linalg_inv at 'fc'"]

    def test_always_in_eval(self, model: Small, images: torch.Tensor) -> None:
        drop = inject(model, Dropout(0.1), layers="layer?.*")
        model.layer2.eval()
        model(images)
        (problem,) = drop.check()
        assert "'layer2.0', 'layer2.1' only ran in eval mode" in problem
        assert [site.calls for site in drop.probe(images).sites.values()] == [3, 3, 0, 0]

    def test_nothing_is_said_of_a_fresh_injection(self, model: Small, images: torch.Tensor) -> None:
        drop = inject(model, Dropout(0.1), layers="layer?.*")
        model.eval()(images)
        assert drop.check() == []
        drop.summary()
        drop.state_dict()

    def test_a_thousand_rounds_leave_nothing_behind(self, model: Small) -> None:
        from hookdrop.hooks.hook import SiteHook

        def alive() -> int:  # other tests may have left some to a compiler's caches
            gc.collect()
            return sum(type(thing) is SiteHook for thing in gc.get_objects())

        before = alive()
        for _ in range(1000):
            inject(model, Dropout(0.1), layers="fc").remove()
        assert alive() == before


def no_rate(x: torch.Tensor) -> torch.Tensor:
    return x


class OwnWeights(Regularizer):
    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.p, self.weight = p, nn.Parameter(torch.ones(1))

    def regularize(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class NoRate(Regularizer):
    def regularize(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Forgets(Regularizer):
    """To return what it made."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.p = p

    def regularize(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[return]
        x * 0


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "unknown layer": ({"layers": "layer7"}, LayerError, "does not have"),
    "unknown glob": ({"layers": "layer7.*"}, LayerError, "does not have"),
    "unknown type": ({"layers": nn.LSTM}, LayerError, "matches no module"),
    "unknown instance": ({"layers": nn.Linear(1, 1)}, LayerError, "not part of this"),
    "empty layers": ({"layers": []}, LayerError, "is empty"),
    "no layers": ({"layers": None}, LayerError, "say where"),
    "excluded to nothing": ({"exclude": "**"}, LayerError, "nothing is left"),
    "a class as regularizer": ({"regularizer": DropBlock}, TypeError, r"the class DropBlock(.|\n)*write DropBlock\(p=0.1\)"),
    "None as regularizer": ({"regularizer": None}, TypeError, "regularizer is None"),
    "a number as regularizer": ({"regularizer": 0.1}, TypeError, "must be a module, a function"),
    "a local lambda": ({"regularizer": lambda x: x}, InjectionError, r"can't be pickled(.|\n)*instead of a lambda"),
    "a lambda in a schedule": (
        {"schedule": LambdaSchedule(lambda s: 1.0)}, InjectionError, "the schedule can't be pickled",
    ),
    "a module with parameters": ({"regularizer": nn.Linear(1, 1)}, InjectionError, r"owns parameters or buffers \(weight"),
    "a module with buffers": ({"regularizer": nn.BatchNorm2d(3, affine=False)}, InjectionError, "owns parameters or buffers"),
    "a schedule without a rate": (
        {"regularizer": no_rate, "schedule": LinearSchedule(3)}, InjectionError, "no rate to drive",
    ),
    "a module without a rate scheduled": (
        {"regularizer": nn.ReLU(), "schedule": LinearSchedule(3)}, InjectionError, "no rate to drive",
    ),
    "p_scale without a rate": ({"regularizer": no_rate, "p_scale": "depth"}, InjectionError, "no rate that could be scaled"),
    "p_scale that matches nothing": ({"p_scale": {"fc": 0.5}}, LayerError, r"'fc', which matches none of the 2 chosen"),
    "p_scale twice": ({"p_scale": {"layer1.0": 0.5, "**.0": 1}}, LayerError, "matches 'layer1.0' twice"),
    "p_scale unknown": ({"p_scale": "deep"}, ValueError, "must be 'depth', 'depth_from_zero'"),
    "p_scale a number": ({"p_scale": 0.5}, ValueError, "multiply p by it"),
    "p_scale negative": ({"p_scale": {"layer1.0": -1}}, ValueError, "must be at least 0"),
    "p_scale no number": ({"p_scale": {"layer1.0": "a"}}, TypeError, "must be a number"),
    "p_scale of one site from zero": ({"layers": "fc", "p_scale": "depth_from_zero"}, ValueError, "factor 0"),
    "a rate above 1 by p_scale": ({"p_scale": {"layer1.0": 20}}, ValueError, r"got 2.(.|\n)*at 'layer1.0': p 0.1 x p_scale 20"),
    "a rate above 1 by schedule": ({"schedule": LinearSchedule(5, end=20)}, ValueError, "x schedule 20"),
    "a schedule that is none": ({"schedule": 1000}, TypeError, r"write: schedule=LinearSchedule\(steps=N\)"),
    "a schedule class": ({"schedule": LinearSchedule}, TypeError, r"write: schedule=LinearSchedule\(steps=N\)"),
    "a function as schedule": ({"schedule": abs}, TypeError, r"write: schedule=LambdaSchedule\(abs\)"),
    "at unknown": ({"at": "outputs"}, ValueError, "'output', 'input', got 'outputs'"),
    "on_existing unknown": ({"on_existing": "keep"}, ValueError, "'error', 'replace', 'stack'"),
    "a name that is none": ({"name": ""}, InjectionError, "name must be a text"),
    "a name with a slash": ({"name": "a/b"}, InjectionError, "without '/'"),
    "layers beside a mapping": ({"regularizer": {"fc": Dropout(0.1)}}, LayerError, "not both"),
    "a site under two keys": (
        {"regularizer": {"layer1.*": Dropout(0.1), "**.0": Dropout(0.2)}, "layers": None}, LayerError,
        r"'layer1.0' is under two keys of the mapping, 'layer1.\*' and '\*\*.0'",
    ),
    "an empty mapping": ({"regularizer": {}, "layers": None}, LayerError, "is empty"),
    "code in a text": ({"regularizer": "DropBlock(p=__import__('os').getpid())"}, ValueError, "it is not run"),
    "an unknown text": ({"regularizer": "Dropoot(p=0.1)"}, ValueError, "did you mean: Dropout"),
    "an example that the model rejects": (
        {"example_input": torch.ones(4, 5)}, InjectionError, r"does not take this example, \(4, 5\) float32",
    ),
    "an example of another kind": ({"example_input": "cat.jpg"}, InjectionError, "does not take this example, str"),
    "a shape as example": (
        {"example_input": (4, 3, 8, 8)}, InjectionError, r"give a tensor, not its shape: torch.randn\(4, 3, 8, 8\)",
    ),
    "a bad range in a glob": ({"layers": "[z-a]*"}, LayerError, "can't read the glob"),
    "an own regularizer with parameters": ({"regularizer": OwnWeights()}, InjectionError, "owns parameters"),
    "an own regularizer without its rate": ({"regularizer": NoRate()}, InjectionError, "no attribute 'p'"),
    "a key of two entries": (
        {"regularizer": {("fc", "conv1"): Dropout(0.1), (): Dropout(0.2)}, "layers": None}, LayerError,
        "must be one entry",
    ),
    "a wrong rank in the example": (
        {"regularizer": Dropout1d(0.1), "example_input": torch.ones(1, 3, 8, 8)}, ShapeError, "use Dropout2d",
    ),
    "a tensor that is not there": ({"tensor": 1, "example_input": torch.ones(1, 3, 8, 8)}, ShapeError, "leave tensor=None"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("training", [True, False])
def test_bad_input_is_told_and_nothing_has_changed(model: Small, case: str, training: bool) -> None:
    changes, error, says = BAD[case]
    model.train(training)
    model.layer2[0].train(not training)
    settings: dict[str, Any] = {"regularizer": Dropout(0.1), "layers": "layer1.*"} | changes
    flags, rng = [m.training for m in model.modules()], torch.get_rng_state()
    with pytest.raises(error, match=says) as caught:
        inject(model, settings.pop("regularizer"), **settings)
    if case != "None as regularizer":
        assert str(caught.value).endswith(UNCHANGED)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert [m.training for m in model.modules()] == flags
    assert torch.equal(torch.get_rng_state(), rng)


def test_a_failure_half_way_takes_the_first_hooks_off_again(model: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("no more hooks")

    monkeypatch.setattr(model.layer2[1], "register_forward_hook", refuse)
    with pytest.raises(RuntimeError, match="no more hooks"):
        inject(model, Dropout(0.1), layers="layer?.*")
    assert find(model) == ()


def test_a_warning_turned_into_an_error_leaves_no_hook(model: Small) -> None:
    with pytest.raises(HookdropWarning):
        inject(model, Dropout(0.1), layers="layer1.**")
    assert find(model) == ()


class TestKeras:
    """Keras never puts its layers in eval mode. These classes stand in for its own."""

    @staticmethod
    def layer(name: str, *parts: nn.Module) -> nn.Module:
        base = type("Layer", (nn.Sequential,), {"__module__": "keras.src.layers.layer"})
        return type(name, (base,), {"__module__": "keras.src.layers.core"})(*parts)

    def test_its_layers_are_refused(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), self.layer("Dense", nn.ReLU()))
        with pytest.raises(
            InjectionError, match=r"'1' \(Dense\) belongs to a Keras layer(.|\n)*keras.layers.Dropout"
        ) as e:
            inject(model, Dropout(0.5), layers="*")
        assert str(e.value).endswith(UNCHANGED)
        with pytest.raises(InjectionError, match=r"'1\.0' \(ReLU\) belongs to a Keras layer"):
            inject(model, Dropout(0.5), layers="1.0")
        assert find(model) == ()

    def test_other_layers_are_hooked(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), self.layer("TorchModuleWrapper", nn.ReLU()), self.layer("Dense"))
        inject(model, Dropout(0.5), layers=["0", "1.0"])
        assert len(plan(model, layers="**").sites) == 4
        with pytest.raises(InjectionError, match=r"TorchModuleWrapper\) belongs"):
            inject(model, Dropout(0.5), layers="1")


class TestLazyModules:
    """Their first forward creates their parameters."""

    def test_they_are_hooked_before_their_first_forward(self) -> None:
        model = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d())
        drop = inject(model, Dropout(0.5), layers="*", schedule=LinearSchedule(10))
        drop.seek(10)
        assert drop.check()
        drop.state_dict()
        out = model(torch.ones(1000, 4))
        assert isinstance(model[0], nn.Linear)
        assert (out == 0).float().mean() == pytest.approx(0.5, abs=0.05)
        drop.remove()
        assert not any(m._forward_hooks for m in model.modules())

    def test_a_lazy_layer_that_is_not_the_first(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.LazyConv2d(8, 3))
        inject(model, Dropout(0.5), layers="*")
        print(plan(model, Dropout(0.5), layers="**", on_existing="stack"))

    @pytest.mark.parametrize("try_out", ["example_input", "probe"])
    def test_no_forward_is_tried_out(self, try_out: str) -> None:
        model, x = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d()), torch.ones(2, 4)
        with pytest.raises(InjectionError, match=r"lazy parameters \('0\.weight'(.|\n)*first: model\(x\)"):
            if try_out == "probe":
                inject(model, Dropout(0.5), layers="0").probe(x)
            else:
                inject(model, Dropout(0.5), layers="0", example_input=x)
        assert isinstance(model[0].weight, nn.UninitializedParameter)
        assert isinstance(model[1].running_mean, nn.UninitializedBuffer)
        assert len(find(model)) == (try_out == "probe")


def test_script_modules() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.scripted = torch.jit.script(nn.ReLU())
            self.plain = nn.ReLU()

    model = Mixed()
    with pytest.raises(InjectionError, match="'scripted' is a ScriptModule"):
        inject(model, Dropout(0.1), layers="*")
    with pytest.raises(InjectionError, match="can't carry Python hooks"):
        inject(model.scripted, Dropout(0.1), layers="*")
    inject(model, Dropout(0.1), layers="plain")


def test_every_error_is_one_of_ours_or_a_plain_value_or_type_error() -> None:
    for changes, error, _ in BAD.values():
        assert issubclass(error, HookdropError | ValueError | TypeError), changes


def test_drop_path_by_depth_is_timms_linspace(model: Small) -> None:
    drop = inject(model, DropPath(0.3), layers="layer?.*", p_scale="depth_from_zero")
    expected = torch.linspace(0, 0.3, 4, dtype=torch.float64).tolist()
    assert [site.p for site in drop.sites] == pytest.approx(expected)


def test_p_scale_as_a_function(model: Small) -> None:
    drop = inject(model, Dropout(0.4), layers="layer?.*", p_scale=lambda name, index, count: (index + 1) / count)
    assert [site.p for site in drop.sites] == [0.1, 0.2, pytest.approx(0.3), 0.4]


@pytest.mark.parametrize(
    ("regularizer", "reading"),
    [
        (DropPath(0.1), "N=4"),
        (Dropout2d(0.1), "C=8 H=16 W=16"),
        (FeatureAlphaDropout(0.1), "C=8 H=16 W=16"),
        (DropBlock(0.1, 3), "C=8 H=16 W=16"),
        (Dropout(0.1), ""),
    ],
    ids=lambda value: repr(value),
)
def test_how_the_axes_are_read(model: Small, images: torch.Tensor, regularizer: nn.Module, reading: str) -> None:
    drafted = plan(model, regularizer, layers="layer1.*", example_input=images)
    assert {site.reading for site in drafted.sites} == {reading}


def test_inputs_are_what_a_plan_at_the_input_looks_at(model: Small, images: torch.Tensor) -> None:
    drafted = plan(model, Dropout(0.1), layers=["conv1", "fc"], at="input", example_input=images)
    assert [site.shape for site in drafted.sites] == [(4, 3, 16, 16), (4, 8)]
    assert "at the input" in str(drafted)
    with pytest.raises(ShapeError, match=r"DropBlock at 'fc' \(input\) got \(4, 8\)"):
        inject(model, DropBlock(0.1), layers="fc", at="input")
        model(images)


@pytest.mark.parametrize("use", [find, eject, lambda m: plan(m, layers="**"), lambda m: without_hooks(m).__enter__()])
def test_something_else_than_a_model(use: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match="must be a torch.nn.Module, got str"):
        use("resnet50")


def test_probe_of_a_model_that_does_not_take_the_input(model: Small, images: torch.Tensor) -> None:
    """Everything is put back after an error too."""
    drop = inject(model, Dropout(0.1), layers="fc", schedule=LinearSchedule(10))
    model.eval()
    with pytest.raises(InjectionError, match=r"does not take this example, \(3, 3\) float32"):
        drop.probe(torch.ones(3, 3), step=5)
    assert (drop.step_count, model.training) == (0, False)
