"""Automatic warnings during training, what `check` reports, and no false alarms."""

import copy
import gc
import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import reduce
from typing import Any

import pytest
import torch
from torch import nn

import hookdrop
from hookdrop import DropBlock, Dropout, DropPath, HookdropWarning, Injection, LinearSchedule, ShapeError, inject, plan
from hookdrop.guards import progress
from hookdrop.guards.messages import MESSAGES
from hookdrop.guards.plan import Planned
from hookdrop.guards.problems import Comparison
from hookdrop.guards.progress import UPDATES_BEFORE_WARNING
from hookdrop.recipes import set_dropout
from tests.support.models import Small, mlp, toy
from tests.support.programs import ROOT
from tests.support.training import optimize, sgd, train


def training(steps: int = 1000, layer: str = "0") -> tuple[nn.Sequential, Injection, torch.optim.Optimizer]:
    """A model with Dropout and a schedule at one layer, of which "1" has no weights, and an optimizer."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    return model, inject(model, Dropout(0.5), layers=layer, schedule=LinearSchedule(steps)), sgd(model)


class TestSchedules:
    def test_schedule_that_is_not_advancing_warns_after_20_updates(self) -> None:
        model, *_ = training(10)
        optimize(model, UPDATES_BEFORE_WARNING)
        with pytest.warns(HookdropWarning) as caught:
            optimize(model, 2 * UPDATES_BEFORE_WARNING)
        assert len(caught) == 1
        assert "is still at step 0 of LinearSchedule(steps=10)" in str(caught[0].message)

    @pytest.mark.parametrize("base", [torch.optim.SGD, object], ids=["PyTorch", "fastai"])
    def test_an_optimizer_that_writes_to_data_is_noticed_after_20_updates(self, base: Any) -> None:
        def step(self: Any, closure: Any = None) -> None:
            for weight in model.parameters():
                weight.data.add_(weight.grad, alpha=-0.1)

        model, *_ = training(10)
        train(model, torch.ones(2), 30)  # no update
        given = (model.parameters(), 0.1) if base is torch.optim.SGD else ()
        optimizer = type("WritesToData", (base,), {"step": step})(*given)
        optimize(model, UPDATES_BEFORE_WARNING, optimizer)
        with pytest.warns(HookdropWarning, match=r"still at step 0 of LinearSchedule\(steps=10\)") as caught:
            optimize(model, UPDATES_BEFORE_WARNING, optimizer)
        assert len(caught) == 1

    def test_gradient_accumulation_and_recurrent_calls_do_not_count_as_updates(self) -> None:
        train(training(10)[0], torch.ones(2), 1000)

    @pytest.mark.parametrize("how", ["loaded", "copied", "another optimizer", "stopped following"])
    def test_schedule_that_stops_advancing_warns(self, how: str) -> None:
        model, drop, optimizer = training()
        drop.follow(optimizer)
        optimize(model, 1, optimizer)
        if how == "loaded":
            state = drop.state_dict()
            drop.remove()
            inject(model, Dropout(0.5), layers="0", schedule=LinearSchedule(1000)).load_state_dict(state)
        if how == "copied":
            model = copy.deepcopy(model)
        if how == "stopped following":
            drop.follow(None)
        why = "the optimizer that it follows" if how == "another optimizer" else "nothing calls step"
        fix = r"drop.follow\(None\).follow" if how == "another optimizer" else r"drop.follow\(optimizer\)"
        with pytest.warns(HookdropWarning, match=f"(?s)still at step 1 of LinearSchedule.*because {why}.*{fix}"):
            optimize(model, 2 * UPDATES_BEFORE_WARNING)

    @pytest.mark.parametrize(("own", "others"), [(1, 5), (5, 1)])
    def test_an_optimizer_of_another_model_warns_if_it_steps_more_or_less_often(self, own: int, others: int) -> None:
        """As the discriminator's beside a generator."""
        (model, drop, optimizer), other = training(), mlp()
        drop.follow(sgd_of_other := sgd(other))

        def both() -> None:
            for _ in range(2 * UPDATES_BEFORE_WARNING):
                optimize(model, own, optimizer)
                optimize(other, others, sgd_of_other, torch.ones(2, 8))

        with pytest.warns(HookdropWarning, match=r"(?s)has no parameter of the model.*follow\(None\).follow") as caught:
            both()
        assert len(caught) == 1
        drop.follow(None).follow(optimizer).seek(0)
        assert drop.check() == []

    def test_finished_schedule_does_not_warn(self) -> None:
        """Also if the followed optimizer is deleted."""
        model, drop, optimizer = training(1)
        drop.follow(optimizer)
        optimize(model, 1, optimizer)
        del optimizer
        gc.collect()
        optimize(model, 3 * UPDATES_BEFORE_WARNING)
        assert drop.check() == []

    @pytest.mark.parametrize("layer", ["without weights", "frozen"])
    @pytest.mark.parametrize("start", ["never stepped", "loaded", "no longer followed", "deleted optimizer"])
    def test_schedule_that_is_not_advancing_warns_if_the_layer_is_not_updated(self, layer: str, start: str) -> None:
        model, drop, optimizer = training(layer="1" if layer == "without weights" else "0")
        model[0].requires_grad_(layer != "frozen")
        if start == "loaded":
            drop.load_state_dict(drop.state_dict() | {"step_count": 7})
        if start == "no longer followed":
            drop.follow(optimizer)
            optimize(model, 3 * UPDATES_BEFORE_WARNING, optimizer)
            drop.follow(None)
        gone = start == "deleted optimizer"
        if gone:
            drop.follow(sgd(model))
            gc.collect()
        text = "the optimizer that it followed no longer exists" if gone else "its schedule is not advancing"
        with pytest.warns(HookdropWarning, match=text) as caught:
            optimize(model, 2 * UPDATES_BEFORE_WARNING, optimizer)
        assert len(caught) == 1
        assert any(text in problem for problem in drop.check())
        drop.seek(1000)
        assert drop.check() == []

    def test_schedule_that_is_stepped_once_per_epoch_warns_at_the_second_step(self) -> None:
        model, drop, _ = training(100, "1")
        for _ in range(2):
            optimize(model, UPDATES_BEFORE_WARNING)
            drop.step()
        with pytest.warns(HookdropWarning, match="advanced 2 times during 41 updates.*not epochs") as caught:
            optimize(model, 2 * UPDATES_BEFORE_WARNING)
        assert len(caught) == 1

    @pytest.mark.parametrize("drive", [lambda drop: drop.step(20), lambda drop: drop.seek(drop.step_count + 20)])
    def test_schedule_that_catches_up_after_each_epoch_does_not_warn(self, drive: Callable[[Any], None]) -> None:
        model, drop, _ = training(100, "1")
        for _ in range(4):
            optimize(model, UPDATES_BEFORE_WARNING)
            drive(drop)
        assert drop.check() == []

    @pytest.mark.parametrize("can_be_epochs", [True, False])
    def test_schedule_in_epochs_warns_at_100_times_its_end(self, can_be_epochs: bool, monkeypatch: Any) -> None:
        model, drop, optimizer = training(3, "1")
        drop.follow(optimizer)
        optimize(model, 299, optimizer)
        if not can_be_epochs:
            monkeypatch.setattr(progress, "MOST_EPOCHS", 2)
        warns = pytest.warns(HookdropWarning, match=r"LinearSchedule\(steps=3\) ended long ago.*step 300")
        with warns if can_be_epochs else nullcontext():
            optimizer.step()
        optimize(model, 100, optimizer)

    def test_schedule_that_advances_at_every_batch_warns(self) -> None:
        """With accumulated gradients, it would end early. Two steps for one update are no coincidence after 20."""
        model, drop, optimizer = training()

        def train_on_batches(count: int) -> None:
            for batch in range(count):
                model(torch.ones(2)).sum().backward()
                drop.step()
                if batch % 2:
                    optimizer.step()

        with pytest.warns(HookdropWarning, match="advanced 40 times during 20 updates") as caught:
            train_on_batches(100)
        assert len(caught) == 1

    def test_lost_hooks_are_reported_instead_of_the_schedule(self) -> None:
        model, drop, optimizer = training(layer="2")
        drop.follow(optimizer)
        optimize(model, 1, optimizer)
        model[2] = nn.Linear(2, 2)
        with pytest.warns(HookdropWarning) as caught:
            optimize(model, 3 * UPDATES_BEFORE_WARNING)
        assert [str(w.message).partition(":")[2][:29] for w in caught] == [" 1 of 1 sites lost their hook"]
        assert len(drop.check()) == 1

    @pytest.mark.parametrize("drive", [lambda d, o: d.step(), lambda d, o: d.seek(d.step_count + 1), Injection.follow])
    def test_stepped_or_followed_schedule_does_not_warn(self, drive: Callable[..., Any]) -> None:
        model, drop, optimizer = training(10)
        drive(drop, optimizer)
        for _ in range(3 * UPDATES_BEFORE_WARNING):
            optimize(model, 1, optimizer)
            if not drop._states[0].followed:
                drive(drop, optimizer)
        assert drop.check() == []
        drop.metrics()

    def test_rebuilt_optimizer_warns_at_its_first_step(self) -> None:
        model, drop, _ = training()
        drop.follow(sgd(model))
        gc.collect()
        with pytest.warns(HookdropWarning, match="the optimizer that it followed no longer exists"):
            optimize(model, 1)


def test_activation_called_1100_times_per_forward_does_not_warn() -> None:
    model = toy(lambda m, x: reduce(lambda x, _: m.act(m.fc(x)), range(1100), x), fc=nn.Linear(4, 4), act=nn.Tanh())
    drop = inject(model, Dropout(0.01), layers="act", schedule=LinearSchedule(100)).follow(optimizer := sgd(model))
    optimize(model, 2, optimizer, torch.ones(1, 4))
    assert drop.step_count == 2


@pytest.mark.parametrize("hooked", ["model", "average"])
def test_hooked_weight_average_does_not_warn(hooked: str) -> None:
    """Nor does a hooked student whose copy is its teacher, in eval mode."""
    model = mlp()
    drop = inject(model, Dropout(0.5), layers="0") if hooked == "model" else None
    average = copy.deepcopy(model).eval()
    drop = drop or inject(average, Dropout(0.5), layers="0")
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(30):
        target = average(torch.ones(2, 8)).detach() if hooked == "model" else 0.0
        (model(torch.ones(2, 8)) - target).square().sum().backward()
        optimizer.step()
        with torch.no_grad():
            for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)
    if hooked == "average":
        with drop.sampling():
            average(torch.ones(2, 8))


class TestChecks:
    def test_check_right_after_inject_reports_nothing(self, model: Small, images: torch.Tensor) -> None:
        """Sites that have not run are reported only after another site has run or the schedule has advanced."""
        drop = inject(model, Dropout(0.1), layers=["fc", "layer1.*"], schedule=LinearSchedule(10))
        assert drop.check() == []
        drop.step()
        assert "never ran" in drop.check()[0]
        model(images)
        assert drop.check() == []

    def test_state_dict_and_metrics_never_warn(self, model: Small) -> None:
        """They run at every training step, possibly under `-W error`."""
        drop = inject(model, Dropout(0.1), layers="fc", schedule=LinearSchedule(100))
        model.fc = nn.Identity()
        drop.step(20)
        drop.state_dict()
        drop.metrics()
        assert not hookdrop.find(model), "no hook is left, so only the handle can report it"
        with pytest.warns(HookdropWarning, match="1 of 1 sites lost their hook or rate: 'fc'"):
            drop.remove()

    def test_replaced_dropout_of_the_model_is_reported(self) -> None:
        model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5))
        drop = inject(model, set_dropout(p=0.2), example_input=torch.ones(2), schedule=LinearSchedule(50))
        assert drop.check() == []
        model[1] = nn.Dropout(0.7)
        (problem,) = drop.check()
        assert problem.startswith("'set_dropout': 1 of 2 sites lost their hook or rate: '1'")
        model[0] = nn.Identity()
        assert [one.partition(":")[2][:7] for one in drop.check()] == [" 2 of 2"]

    def test_layers_always_in_eval_mode_are_reported(self, model: Small, images: torch.Tensor) -> None:
        """Unless the whole model only ran in eval mode."""
        drop = inject(model, Dropout(0.1), layers="layer?.*")
        model.eval()(images)
        assert drop.check() == []
        model.train().layer2.eval()
        model(images)
        (problem,) = drop.check()
        assert "'layer2.0', 'layer2.1' only ran in eval mode" in problem
        assert [site.calls for site in drop.probe(images).sites.values()] == [3, 3, 0, 0]


def test_sites_whose_rows_are_not_all_samples_warn_at_the_first_training_forward() -> None:
    forward = lambda m, x: m.after(m.inside(x.flatten(0, 1)).view(x.shape))
    model, x = toy(forward, inside=nn.Linear(2, 2), after=nn.Linear(2, 2)), torch.ones(2, 4, 2)
    drop = inject(model, DropPath(0.5), layers="*")
    model.eval()(x)
    with pytest.warns(HookdropWarning, match=r"'inside' has 8 and 'after' 2(.|\n)*example_input"):
        model.train()(x)
    model(x)
    drop.remove()
    for right in (DropPath(0.5, "batch"), DropPath(0.5)):
        with inject(model, right, layers="*", example_input=x):
            model(x)


TABLE = (ROOT / "docs/project/guards.md").read_text()
ROWS = {kind: cells for kind, *cells in re.findall(r"^\| `(\w+)` \| (.+) \| (.+) \|$", TABLE, flags=re.M)}
DETECTED_BY = (Planned, Comparison, progress.Progress, progress)


def test_every_guard_has_a_row() -> None:
    assert list(ROWS) == list(MESSAGES)


@pytest.mark.parametrize("kind", MESSAGES)
def test_the_code_documents_the_detection_and_the_row_names_a_test(kind: str) -> None:
    _, test = ROWS[kind]
    (found,) = [place for place in DETECTED_BY if hasattr(place, kind) or kind in getattr(place, "__annotations__", {})]
    assert getattr(found, kind).__doc__
    path, _, names = test.strip("`").partition("::")
    text = (ROOT / "tests" / path).read_text()
    assert all(re.search(rf"(class|def) {name}\b", text) for name in names.split("::"))


def test_rates_that_look_like_keep_prob_warn() -> None:
    warnings_of = lambda regularizer: plan(nn.Sequential(nn.Identity()), regularizer, layers="0").warnings
    for regularizer in (DropBlock(0.95, 3), DropPath(0.8)):
        assert f"did you mean keep_prob={regularizer.p:g}?" in warnings_of(regularizer)[0]
    for other in (DropPath(0.79), DropPath(0.96), Dropout(0.9), DropPath(keep_prob=0.9)):
        assert warnings_of(other) == []


IMAGES = torch.randn(4, 3, 16, 16)
CNN = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


@pytest.mark.parametrize(
    ("regularizer", "settings", "says"),
    [
        (hookdrop.Dropout2d(p=1), {"layers": "1"}, r"rate of 1 site reaches 1, .*: '1'.*p=0.01"),
        (nn.Dropout(1.0), {"layers": "2", "schedule": LinearSchedule(9)}, "rate of 1 site reaches 1"),
        (Dropout(0.5), {"layers": "[24]", "schedule": LinearSchedule(9, end=2.0)}, "rate of 2 sites reaches 1"),
        (Dropout(0.5), {"layers": "5"}, r"Dropout at '5' drops what the model returns, .*layers='5', at=\"input\""),
        (DropPath(0.5), {"layers": "5", "schedule": LinearSchedule(9)}, "DropPath at '5' drops what"),
    ],
)
def test_p_of_1_and_dropout_on_the_output_warn_in_plan_inject_and_check(
    regularizer: Any, settings: Any, says: str
) -> None:
    model = nn.Sequential(*CNN)
    (planned,) = plan(model, regularizer, example_input=IMAGES, **settings).warnings
    assert re.search(says, planned, re.DOTALL)
    with pytest.warns(HookdropWarning) as caught:
        drop = inject(model, regularizer, example_input=IMAGES, **settings)
    assert [str(one.message) for one in caught] == drop.check() == [planned]
    if "reaches" in says:
        drop.target_p = 0.01
        assert drop.check() == []
    drop.remove()  # does not warn again


def test_uses_of_a_rate_of_1_and_of_outputs_that_are_no_predictions_do_not_warn() -> None:
    def warnings_of(parts: Any, regularizer: Any, layers: str, **settings: Any) -> list[str]:
        return plan(nn.Sequential(*parts), regularizer, layers=layers, example_input=IMAGES, **settings).warnings

    for one in ("Cutout(3, p=1.0)", "MixStyle(1.0)", "UniformNoise(1.0)", "ScaleActivationGrad(1.0)"):
        assert warnings_of(CNN, one, "0") == []
    rates = hookdrop.LambdaSchedule(tenth)  # whose values are the rates
    assert warnings_of(CNN, Dropout(1.0), "1", schedule=rates) == []
    neck = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
    for backbone in (CNN[:3], CNN[:5], (nn.Linear(16, 8), nn.LayerNorm(8)), neck):
        assert warnings_of(backbone, Dropout(0.1), "*") == []
    assert warnings_of(CNN, hookdrop.GaussianNoise(), "5") == warnings_of(CNN, Dropout(0), "5") == []
    assert all(warnings_of(CNN, Dropout(0.1), "5", at=at) == [] for at in ("input", "parameters"))


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(16, 4), nn.LogSoftmax(-1)),
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.Upsample(scale_factor=2), nn.Sigmoid()),
        toy(lambda m, x: {"features": x, "logits": m.head(x) / 2.0}, head=nn.Linear(16, 4)),
    ],
)
def test_what_functions_make_of_predictions_is_a_prediction(model: nn.Module) -> None:
    name = next(iter(dict(model.named_children())))
    for layers in dict(model.named_children()):
        (found,) = plan(model, Dropout(0.1), layers=layers, example_input=IMAGES).warnings
        assert f"the predictions of {name!r}" in found


def tenth(step: int) -> float:
    return 0.1


SKIPS = toy(lambda m, x: x * (torch.rand(len(x), 1) > m.chance) if m.training else x, chance=0.1)  # whole samples


@pytest.mark.parametrize("drops", [nn.Dropout(0.1), SKIPS, DropPath(0.1)])
@pytest.mark.parametrize("place", ["0", "1", "2"], ids=["layer", "gain", "itself"])
def test_layers_that_already_drop_warn(drops: nn.Module, place: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), toy(lambda m, x: x * torch.ones(4)), drops, nn.Linear(4, 4))
    (warning,) = plan(model, Dropout(0.1), layers=place, example_input=torch.ones(2, 4)).warnings
    assert f"Dropout at '{place}': '2' already drops there" in warning
    assert not plan(model, Dropout(0.1), layers="3", example_input=torch.ones(2, 4)).warnings


@pytest.mark.parametrize("drops", [nn.Dropout(0.0), nn.Identity(), nn.ReLU(), nn.Sequential()])
def test_layers_that_drop_nothing_do_not_warn(drops: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(4, 4), drops)
    assert not plan(model, Dropout(0.1), layers="*", example_input=torch.ones(2, 4)).warnings


def test_drop_path_on_whole_blocks_warns(model: Small, images: torch.Tensor) -> None:
    drafted = plan(model, DropPath(0.1), layers="layer1.*", example_input=images)
    (warning,) = [text for text in drafted.warnings if "whole residual block" in text]
    assert warning.startswith("DropPath at 'layer1.0': the output includes the input")
    assert warning.endswith("such as attn, mlp or bn3. (and 1 more site like it)")


def test_drop_path_on_whole_blocks_with_a_projection_warns() -> None:
    branch = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1))
    block = toy(lambda m, x: m.branch(x) + m.skip(x), branch=branch, skip=nn.Conv2d(3, 4, 1))
    model, x = nn.Sequential(block, nn.ReLU()), torch.ones(2, 3, 4, 4)
    for name, warns in (("0", True), ("0.branch", False)):
        warnings = plan(model, DropPath(0.1), layers=name, example_input=x).warnings
        assert any("whole residual block" in text for text in warnings) == warns


def nhwc() -> nn.Module:
    forward = lambda m, x: m.stage2(m.stage1(x)[:, ::2, ::2])
    return toy(forward, stage1=nn.Linear(24, 24), stage2=nn.Linear(24, 24))


X = torch.randn(2, 14, 14, 24)


class TestShapes:
    def test_first_forward_checks_shapes_even_at_rate_0(self) -> None:
        model, tokens = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(2, 196, 8)
        drop = inject(model, DropBlock(0.1, 7), layers="1", schedule=LinearSchedule(100))
        model.eval()(tokens)
        with pytest.raises(ShapeError, match="DropBlock at '1' got"):
            drop.probe(tokens)
        with pytest.raises(ShapeError, match="DropBlock at '1' got"):
            model.train()(tokens)

    def test_plan_warns_about_nhwc_maps_unless_channel_dim_is_given(self) -> None:
        drafted = plan(nhwc(), DropBlock(0.1, 3, channel_dim=-1), layers="*", example_input=X)
        assert ([site.reading for site in drafted.sites], drafted.warnings) == (["C=24 H=14 W=14", "C=24 H=7 W=7"], [])
        for regularizer in (DropBlock(0.1, 3), hookdrop.Dropout2d(0.1)):
            drafted = plan(nhwc(), regularizer, layers="*", example_input=X)
            assert [site.reading for site in drafted.sites] == ["C=14 H=14 W=24", "C=7 H=7 W=24"]
            (warning,) = drafted.warnings
            assert "'stage1': reads (2, 14, 14, 24) as C=14 H=14 W=24; that looks like NHWC: " in warning
            assert warning.endswith("(and 1 more site like it)")

    def test_nhwc_maps_warn_once(self) -> None:
        """At the first forward, or before it in the plan."""
        for settings in ({}, {"example_input": X}):
            model = nhwc()
            with warnings.catch_warnings(record=True, action="always") as caught:
                inject(model, DropBlock(0.1, 3), layers="*", **settings)
                train(model, X, 3)
            assert ["looks like NHWC" in str(one.message) for one in caught] == [True]

    @pytest.mark.parametrize("settings", [{}, {"example_input": torch.zeros(2, 3, 5, 5)}])
    def test_maps_that_become_smaller_than_the_block_warn_once(self, settings: dict[str, Any]) -> None:
        model, sizes = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()), [16, 7, 16, 5, 16, 4]
        with warnings.catch_warnings(record=True, action="always") as caught:
            drop = inject(model, DropBlock(0.1, 6), layers="*", **settings)
            _ = [model(torch.zeros(2, 3, size, size)) for size in sizes]
        assert ["covers the whole 5x5 map" in str(one.message) for one in caught] == [True]
        assert not drop.check()

    def test_plan_checks_every_call_of_a_layer(self) -> None:
        """The first of two maps that a head is called with is too small."""
        pyramid = toy(lambda m, x: m.head(x[:, :, ::4, ::4]).sum() + m.head(x).sum(), head=nn.Identity())
        drafted = plan(pyramid, DropBlock(0.1, 3), layers="head", example_input=torch.ones(1, 2, 12, 12))
        assert (drafted.sites[0].calls, drafted.sites[0].shape) == (2, (1, 2, 12, 12))
        assert "covers the whole 3x3 map" in drafted.warnings[0]


CLIPPED = hookdrop.ClipActivationGrad(1.0, per_sample=True)
OF_ROWS = [DropPath(0.5), hookdrop.FeatureAlphaDropout(0.5), hookdrop.Masksembles(2, 1.5), CLIPPED]
OF_ELEMENTS = [Dropout(0.5), DropPath(0.5, mode="batch"), hookdrop.GaussianNoise(0.1), hookdrop.ClipActivationGrad(1.0)]


@pytest.mark.parametrize("regularizer", OF_ROWS + OF_ELEMENTS, ids=repr)
def test_a_packed_sequence_is_refused_by_what_treats_rows_as_samples(regularizer: nn.Module) -> None:
    drop = inject(model := nn.Sequential(nn.LSTM(3, 16)), regularizer, layers="0")
    with pytest.raises(ShapeError) if regularizer in OF_ROWS else nullcontext():
        model(nn.utils.rnn.pack_sequence([torch.randn(5, 3), torch.randn(2, 3)]))
    assert drop.sites[0].called or regularizer in OF_ROWS


def test_a_strided_nested_tensor_is_refused_with_the_layout_that_works() -> None:
    model = nn.Sequential(nn.Linear(3, 4))
    inject(model, Dropout(0.5), layers="0")
    parts = [torch.randn(5, 3), torch.randn(2, 3)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of PyTorch, about this layout
        strided = torch.nested.nested_tensor(parts)
        with pytest.raises(ShapeError):
            model(strided)
    assert model(torch.nested.nested_tensor(parts, layout=torch.jagged)).is_nested
