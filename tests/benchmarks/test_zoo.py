"""`benchmarks/zoo.py`: the full check of one small model per family, and its detection of broken behavior."""

from __future__ import annotations

import argparse
import json
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hookdrop
from hookdrop import Injection
from hookdrop.hooks.hook import SiteHook
from tests.support.models import Small

pytest.importorskip("timm")
pytest.importorskip("torchvision")
pytest.importorskip("rich")
pytest.importorskip("fcntl")
import fcntl

import timm

import zoo
from models import catalog, report, sweep
from models.catalog import Example, Name, Trial
from models.check import Check, NotRunnable
from models.footprint import bit_equal, fingerprint
from models.sites import choose_regularizers
from models.weights import quick_weights
from tests.support.programs import ROOT

BENCHMARKS = ROOT / "benchmarks"
TIMM_VERSION = "1.0.31"  # the version that SMALL was made with
# A fast model of each family, the side length of its input, and the builder's keywords. Most are the smallest of their
# family at its smallest valid input (`python benchmarks/zoo.py --library timm`).
SMALL: dict[str, tuple[str, int, dict[str, Any]]] = {
    "beit": ("beit_base_patch16_224", 32, {"img_size": 32, "depth": 2}),
    "byoanet": ("lambda_resnet26t", 64, {}),
    "byobnet": ("test_byobnet", 32, {}),
    "cait": ("cait_xxs24_224", 32, {"img_size": 32, "depth": 2}),
    "coat": ("coat_lite_tiny", 32, {"img_size": 32}),
    "convit": ("convit_tiny", 32, {"img_size": 32}),
    "convmixer": ("convmixer_768_32", 32, {}),
    "convnext": ("test_convnext", 32, {}),
    "cpubone": ("cpubone_nano", 32, {}),
    "crossvit": ("crossvit_tiny_240", 32, {}),
    "csatv2": ("csatv2", 64, {}),
    "cspnet": ("cs3darknet_focus_s", 32, {}),
    "cspnext": ("cspnext_tiny", 32, {}),
    "davit": ("davit_tiny", 32, {}),
    "deepseek_vit": ("deepseek_vit_412m", 112, {"depth": 2}),
    "deit": ("deit_tiny_patch16_224", 32, {"img_size": 32}),
    "densenet": ("densenet121", 32, {}),
    "dla": ("dla46x_c", 32, {}),
    "dpn": ("dpn48b", 32, {}),
    "edgenext": ("edgenext_xx_small", 32, {}),
    "efficientformer": ("efficientformer_l1", 224, {"depths": (1, 1, 1, 2)}),
    "efficientformer_v2": ("efficientformerv2_s0", 32, {"img_size": 32}),
    "efficientnet": ("test_efficientnet", 32, {}),
    "efficientvim": ("efficientvim_m1", 32, {}),
    "efficientvit_mit": ("efficientvit_b0", 32, {}),
    "efficientvit_msra": ("efficientvit_m0", 32, {}),
    "eva": ("vit_tiny_patch16_dinov3_qkvb", 32, {}),
    "fasternet": ("fasternet_t0", 32, {}),
    "fastvit": ("fastvit_t8", 32, {}),
    "focalnet": ("focalnet_tiny_srf", 32, {}),
    "gcvit": ("gcvit_xxtiny", 32, {"img_size": 32}),
    "gemma4_vit": ("gemma4_vit_167m", 32, {"depth": 2}),
    "ghostnet": ("ghostnet_050", 32, {}),
    "hardcorenas": ("hardcorenas_b", 32, {}),
    "hgnet": ("hgnetv2_b0", 32, {}),
    "hiera": ("hiera_tiny_224", 32, {"img_size": 32}),
    "hieradet_sam2": ("sam2_hiera_tiny", 32, {}),
    "hrnet": ("hrnet_w18_small", 32, {}),
    "iformer": ("iformer_t", 32, {}),
    "inception_next": ("inception_next_atto", 32, {}),
    "inception_resnet_v2": ("inception_resnet_v2", 96, {}),
    "inception_v3": ("inception_v3", 96, {}),
    "inception_v4": ("inception_v4", 96, {}),
    "lcnetv2": ("lcnetv2_small", 32, {}),
    "levit": ("levit_128s", 32, {"img_size": 32}),
    "lowformer": ("lowformer_b0", 32, {}),
    "mambaout": ("test_mambaout", 32, {}),
    "maxxvit": ("test_coatnet", 32, {"img_size": 32}),
    "metaformer": ("poolformerv2_s12", 32, {}),
    "mlp_mixer": ("gmlp_ti16_224", 32, {"img_size": 32}),
    "mobilenetv3": ("mobilenetv3_small_050", 32, {}),
    "mobilenetv5": ("mobilenetv5_base", 32, {"channel_multiplier": 0.5}),
    "mobilevit": ("mobilevit_xxs", 32, {}),
    "mvitv2": ("mvitv2_tiny", 32, {}),
    "naflexvit": ("naflexvit_base_patch16_parfac_gap", 32, {"depth": 2}),
    "nasnet": ("nasnetalarge", 32, {}),
    "nest": ("nest_tiny", 32, {"img_size": 32}),
    "nextvit": ("nextvit_small", 32, {}),
    "nfnet": ("test_nfnet", 32, {}),
    "pit": ("pit_ti_224", 32, {"img_size": 32}),
    "pnasnet": ("pnasnet5large", 32, {}),
    "pvt_v2": ("pvt_v2_b0", 32, {}),
    "qwen3_vit": ("qwen3_vit_88m", 32, {"depth": 2}),
    "rdnet": ("rdnet_tiny", 32, {}),
    "regnet": ("regnetx_002", 32, {}),
    "repghost": ("repghostnet_050", 32, {}),
    "repvit": ("repvit_m1", 32, {}),
    "res2net": ("res2next50", 32, {}),
    "resnest": ("resnest14d", 32, {}),
    "resnet": ("test_resnet", 32, {}),
    "resnetv2": ("resnetv2_18", 32, {}),
    "rexnet": ("rexnet_100", 32, {}),
    "selecsls": ("selecsls42", 32, {}),
    "senet": ("legacy_seresnet18", 32, {}),
    "sequencer": ("sequencer2d_s", 32, {}),
    "shvit": ("shvit_s1", 32, {}),
    "sknet": ("skresnet18", 32, {}),
    "starnet": ("starnet_s050", 32, {}),
    "swiftformer": ("swiftformer_xs", 32, {}),
    "swin_transformer": ("swin_tiny_patch4_window7_224", 32, {"img_size": 32}),
    "swin_transformer_v2": ("swinv2_tiny_window8_256", 32, {"img_size": 32}),
    "swin_transformer_v2_cr": ("swinv2_cr_tiny_224", 32, {"img_size": 32}),
    "tiny_vit": ("tiny_vit_5m_224", 32, {}),
    "tnt": ("tnt_s_legacy_patch16_224", 32, {"img_size": 32, "depth": 2}),
    "tresnet": ("tresnet_m", 32, {"width_factor": 0.5}),
    "twins": ("twins_svt_small", 32, {}),
    "vgg": ("vgg11", 32, {"mlp_ratio": 0.05}),
    "visformer": ("visformer_tiny", 32, {"img_size": 32}),
    "vision_transformer": ("test_vit", 32, {}),
    "vision_transformer_hybrid": ("vit_tiny_r_s16_p8_224", 32, {"img_size": 32}),
    "vision_transformer_relpos": ("test_vit_relpos", 32, {"img_size": 32}),
    "vision_transformer_sam": ("samvit_base_patch16_224", 32, {"depth": 2, "global_attn_indexes": (1,)}),
    "vitamin": ("vitamin_small_224", 32, {"img_size": 32}),
    "volo": ("volo_d1_224", 32, {"img_size": 32}),
    "vovnet": ("ese_vovnet19b_slim_dw", 32, {}),
    "xception": ("legacy_xception", 32, {}),
    "xception_aligned": ("xception41p", 32, {}),
    "xcit": ("xcit_nano_12_p8_224", 32, {}),
}
# One model for each kind of arguments or outputs.
TORCHVISION = (
    "googlenet",
    "lraspp_mobilenet_v3_large",
    "fasterrcnn_mobilenet_v3_large_320_fpn",
    "quantized_shufflenet_v2_x0_5",
    "raft_small",
    "regnet_x_400mf",
    "swin3d_t",
    "vit_b_32",
)


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: socket.socket, address: Any) -> None:
        raise AssertionError(f"download from {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def options(tmp_path: Path, *arguments: str) -> argparse.Namespace:
    return zoo.parse_options(["--out", str(tmp_path), "--memory", "8", *arguments])


def run(tmp_path: Path, *arguments: str) -> int:
    with warnings.catch_warnings():
        return zoo.main(["--out", str(tmp_path), "--memory", "8", "--library", "timm", *arguments])


def results(tmp_path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((tmp_path / "zoo.json").read_text())
    return found


class TestFamilies:
    @pytest.mark.skipif(timm.__version__ != TIMM_VERSION, reason="SMALL was made with another version of timm")
    def test_table_has_every_timm_family(self) -> None:
        assert len(catalog.names("timm")) == 1371
        assert len(SMALL) == 98
        assert {family: Name("timm", name).family for family, (name, _, _) in SMALL.items()} == {
            family: family for family in catalog.families()
        }

    @pytest.mark.filterwarnings("ignore")  # the record contains the warnings of hookdrop
    @pytest.mark.parametrize("family", SMALL)
    def test_small_model_of_each_family_passes_the_full_check(self, family: str) -> None:
        name, side, keywords = SMALL[family]
        if name not in timm.list_models():
            pytest.skip(f"this timm has no {name}")
        trial = Trial(Name("timm", name), (3, side, side), keywords)
        record = Check(trial.build(), trial.example()).run()
        assert record["status"] == "passed", record
        assert record["sites"]
        assert record["finite"]
        assert "problems" not in record

    @pytest.mark.filterwarnings("ignore")
    @pytest.mark.parametrize("name", TORCHVISION)
    def test_torchvision_models_pass_the_full_check(self, name: str, tmp_path: Path) -> None:
        record = sweep.check_model(Name("torchvision", name), options(tmp_path))
        assert record["status"] == "passed", record
        assert record["family"].startswith("torchvision.")
        assert record["finite"]


class TestRecipes:
    def test_models_pass_or_are_refused(self, tmp_path: Path) -> None:
        only = "^timm:(test_resnet|test_efficientnet|test_vit)$"
        assert run(tmp_path, "--recipe", "dropblock_resnet", "--only", only) == 0
        found = {record["name"]: record for record in results(tmp_path)["models"]}
        assert {name: record["status"] for name, record in found.items()} == {
            "timm:test_efficientnet": "passed",
            "timm:test_resnet": "passed",
            "timm:test_vit": "refused",
        }
        assert "it looks for blocks" in found["timm:test_vit"]["error"]
        assert found["timm:test_resnet"]["asked"] < 0.1  # a quarter of it in the last stage but one
        text = (tmp_path / "zoo.md").read_text()
        assert text.startswith("# dropblock_resnet in timm and torchvision")
        assert "python benchmarks/zoo.py --recipe dropblock_resnet" in text

    def test_wrong_rate_of_a_site_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        trial = Trial(Name("timm", "test_resnet"), (3, 64, 64))
        monkeypatch.setattr(
            hookdrop.DropBlock,
            "regularize",
            lambda self, x, rate: hookdrop.functional.drop_block(x, 0.1, self.block_size),
        )
        record = Check(
            trial.build(), trial.example(), recipe=hookdrop.recipes.dropblock_resnet(p=0.1, block_size=3)
        ).run()
        step, error = failure(record)
        assert step == "train"
        assert error.startswith("DropBlock dropped")


class TestDetection:
    """Each test breaks hookdrop in one way, and the check reports it."""

    @pytest.fixture
    def checked(self, model: Small, images: torch.Tensor) -> Callable[[], dict[str, Any]]:
        return lambda: Check(model, Example((images,), (images,))).run()

    def test_unbroken_model_passes(self, checked: Callable[[], dict[str, Any]]) -> None:
        record = checked()
        assert record["status"] == "passed", record
        assert record["sites"] == {"DropBlock": 8}
        assert record["asked"] == pytest.approx(0.1)
        assert "warnings" not in record

    def test_warnings_and_problems_are_recorded_by_kind(self, model: Small, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Injection, "check", lambda self: ["'dropblock': 2 of 4 sites lost: a.\n  do this."])
        x = torch.randn(2, 3, 2, 3)
        record = Check(model, Example((x,), (x,))).run()
        assert record["status"] == "passed", record
        assert record["warnings"] == {"DropBlock at '...': block_size=# covers the whole #x# map": 1}
        assert record["problems"] == ["'...': # of # sites lost"]

    def test_hook_that_drops_in_eval_mode_fails(
        self, checked: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def always(hook: SiteHook, module: nn.Module, *call: object) -> object:
            hook.called = True
            return hook.edit(module, (call[0], {}, call[-1]), lambda x: hook.regularizer.regularize(x, 0.1))

        monkeypatch.setattr(SiteHook, "__call__", always)
        assert failure(checked()) == ("inject", "eval output differs with hooks")

    def test_hook_that_does_not_fire_fails(
        self, checked: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(SiteHook, "__call__", lambda hook, *call: None)
        assert failure(checked()) == ("inject", "8 sites did not fire")

    def test_inject_that_draws_random_numbers_fails(
        self, checked: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        after(monkeypatch, hookdrop, "inject", lambda model: torch.rand(1))
        assert failure(checked()) == ("inject", "inject changed the RNG state")

    def test_inject_that_adds_a_buffer_fails(
        self, checked: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        after(monkeypatch, hookdrop, "inject", lambda model: model.register_buffer("extra", torch.ones(1)))
        step, error = failure(checked())
        assert step == "inject"
        assert "state_dict keys" in error

    def test_inject_that_changes_a_bit_fails(
        self, checked: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        after(monkeypatch, hookdrop, "inject", lambda model: model.fc.weight.data[0, 0].nextafter_(torch.tensor(9.0)))
        assert failure(checked()) == ("inject", "plan or inject changed a parameter or buffer")

    @pytest.mark.parametrize("factor", [0.0, 0.8, 1.25])
    def test_wrong_rate_fails(
        self, checked: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch, factor: float
    ) -> None:
        monkeypatch.setattr(
            hookdrop.DropBlock,
            "regularize",
            lambda self, x, rate: hookdrop.functional.drop_block(x, rate * factor, self.block_size),
        )
        step, error = failure(checked())
        assert step == "train"
        assert error.startswith("DropBlock dropped")

    def test_detached_activations_fail(
        self, checked: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        apply = SiteHook.apply
        monkeypatch.setattr(SiteHook, "apply", lambda hook, x, rate: apply(hook, x, rate).detach())
        step, error = failure(checked())
        assert step == "train"
        assert error.startswith("different parameters have gradients")

    def test_weights_that_are_not_updated_fail(
        self, checked: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.optim.SGD, "step", lambda self: None)
        assert failure(checked()) == ("remove", "the training step updated no parameter")

    def test_hooks_left_by_remove_fail(
        self, checked: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Injection, "remove", lambda self: None)
        assert failure(checked()) == ("remove", "remove changed hooks")

    def test_remove_that_changes_a_bit_fails(
        self, checked: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        after(
            monkeypatch, Injection, "remove", lambda drop: drop._model().fc.bias.data[0].nextafter_(torch.tensor(9.0))
        )
        assert failure(checked()) == ("remove", "remove changed a parameter or buffer")

    def test_remove_that_leaves_an_attribute_fails(
        self, checked: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        after(monkeypatch, Injection, "remove", lambda drop: setattr(drop._model(), "marked", True))
        assert failure(checked()) == ("remove", "remove changed attributes")

    def test_model_that_does_not_run_without_hookdrop_is_not_a_failure(self, model: Small) -> None:
        x = torch.ones(2, 4, 16, 16)
        with pytest.raises(NotRunnable, match="expected input"):
            Check(model, Example((x,), (x,))).run()


def failure(record: dict[str, Any]) -> tuple[str, str]:
    """Return the step and the message, without the error class and the example."""
    assert record["status"] == "failed"
    assert record["traceback"].startswith("Traceback")
    assert "benchmarks/models/check.py" in record["traceback"]
    assert str(BENCHMARKS) not in record["traceback"]
    return record["step"], record["error"].removeprefix("CheckFailed: ").partition(", such as")[0]


def after(patch: pytest.MonkeyPatch, owner: Any, name: str, also: Callable[[Any], Any]) -> None:
    """Call `also` with the first argument at the end of a function or method."""
    original = getattr(owner, name)

    def extended(first: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(first, *args, **kwargs)
        also(first)
        return result

    patch.setattr(owner, name, extended)


class TestFingerprints:
    @pytest.mark.parametrize("place", [0, 5, 8191, 8192, 20_000, 20_001])
    def test_fingerprint_detects_a_single_bit(self, place: int) -> None:
        layer = nn.Linear(20_002, 1, bias=False)
        before = fingerprint(layer)
        layer.weight.data[0, place].nextafter_(torch.tensor(9.0))
        assert fingerprint(layer) != before

    def test_fingerprint_detects_order_and_sign(self) -> None:
        layer = nn.Linear(20_002, 2, bias=False)
        before = fingerprint(layer)
        swapped, negative = layer.weight.data.clone(), -layer.weight.data
        swapped[0, :2] = swapped[0, [1, 0]]
        for changed in (swapped, negative):
            layer.weight.data = changed
            assert fingerprint(layer) != before

    def test_outputs_are_compared_bit_for_bit(self) -> None:
        nan, zero = torch.tensor([float("nan")]), torch.zeros(1)
        assert bit_equal([nan, zero], [nan.clone(), zero.clone()])
        assert not bit_equal([zero], [-zero])
        assert not bit_equal([zero], [zero[None]])
        assert not bit_equal([zero], [])


class TestSites:
    def test_regularizer_fits_the_rank_of_each_norm(self) -> None:
        trial = Trial(Name("timm", "convnextv2_tiny"), (3, 32, 32))
        chosen = choose_regularizers(hookdrop.plan(trial.build(), layers="**", example_input=trial.example().eval))
        kinds = {name: repr(regularizer) for name, regularizer in chosen.items()}
        assert kinds["stem.1"] == "DropBlock(p=0.1, block_size=3)"
        assert kinds["stages.1.blocks.0.norm"] == "DropBlock(p=0.1, block_size=3, channel_dim=-1)"
        assert kinds["stages.1.blocks.0.mlp.grn"] == "DropBlock(p=0.1, block_size=3, channel_dim=-1)"
        tokens = Trial(Name("timm", "vit_tiny_patch16_224"), (3, 32, 32), {"img_size": 32, "depth": 1, "qk_norm": True})
        chosen = choose_regularizers(hookdrop.plan(tokens.build(), layers="**", example_input=tokens.example().eval))
        assert {type(regularizer) for regularizer in chosen.values()} == {hookdrop.Dropout}
        assert {"norm", "blocks.0.norm1", "blocks.0.attn.q_norm"} <= set(chosen)

    def test_models_without_norms_get_hooks_on_convolutions_and_linear_layers(self) -> None:
        trial = Trial(Name("torchvision", "squeezenet1_1"), (3, 32, 32))
        chosen = choose_regularizers(hookdrop.plan(trial.build(), layers="**", example_input=trial.example().eval))
        assert len(chosen) == 26
        assert {type(regularizer) for regularizer in chosen.values()} == {hookdrop.DropBlock}


class TestBuilding:
    @pytest.mark.parametrize(
        ("name", "shape", "keywords"),
        [
            ("resnet10t", (3, 32, 32), {}),
            ("vit_tiny_patch16_224", (3, 32, 32), {"img_size": 32}),
            ("inception_v4", (3, 96, 96), {}),
        ],
    )
    def test_first_accepted_trial_is_the_smallest_input(
        self, name: str, shape: tuple[int, ...], keywords: dict[str, Any]
    ) -> None:
        skeleton = catalog.skeleton_of(Name("timm", name))
        trials = catalog.trials(Name("timm", name), skeleton)
        assert next(t for t in trials if catalog.accepted(t, skeleton)) == Trial(Name("timm", name), shape, keywords)

    def test_quick_weights_are_random_and_have_the_scale_of_the_initializer(self) -> None:
        original = torch.Tensor.normal_
        with quick_weights():
            layers = [nn.Linear(1024, 1024), nn.Conv2d(256, 256, 3)]
            truncated = timm.layers.trunc_normal_(torch.empty(512, 512), std=0.02)
        assert torch.Tensor.normal_ is original
        weights = [layer.weight.detach() for layer in layers]
        for weight in (*weights, truncated):
            assert weight.unique().numel() > 0.9 * weight.numel()
            assert weight.mean().abs() < 0.05 * weight.std()
        assert weights[0].std().item() == pytest.approx((3 * 1024) ** -0.5, rel=0.02)
        assert weights[1].std().item() == pytest.approx((3 * 9 * 256) ** -0.5, rel=0.02)
        assert truncated.std().item() == pytest.approx(0.02, rel=0.02)

    def test_building_is_deterministic(self) -> None:
        trial = Trial(Name("timm", "test_resnet"), (3, 32, 32))
        assert fingerprint(trial.build()) == fingerprint(trial.build())


@pytest.mark.filterwarnings("ignore")
class TestRuns:
    def test_shards_partition_the_models(self) -> None:
        names = catalog.names()
        parts = [zoo.shard_of(names, (index, 3)) for index in (1, 2, 3)]
        assert sorted(str(name) for part in parts for name in part) == sorted(map(str, names))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1

    @pytest.mark.parametrize("shard", ["0/2", "3/2", "2", "a/b", "1/"])
    def test_invalid_shard_is_rejected(self, shard: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            zoo.parse_options(["--shard", shard])
        assert f"expected I/N with 1 <= I <= N, got '{shard}'" in capsys.readouterr().err

    def test_interrupted_run_resumes_after_the_crashed_model(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        only = ("--only", ":test_(resnet|vit|byobnet)$")
        assert run(tmp_path, *only, "--limit", "1") == 0
        journal = tmp_path / "shard-1-of-1.jsonl"
        first = journal.read_text()
        # Killed during the next model, in the middle of a line.
        journal.write_text(first + '{"started": "timm:test_resnet"}\n{"name": "timm:test_re')
        assert run(tmp_path, *only) == 1
        assert journal.read_text().startswith(first)
        status = {record["name"]: record["status"] for record in results(tmp_path)["models"]}
        assert status == {"timm:test_byobnet": "passed", "timm:test_resnet": "crashed", "timm:test_vit": "passed"}
        assert "the process ended during the check" in (tmp_path / "zoo.md").read_text()
        assert run(tmp_path, *only, "--again", "crashed") == 0
        assert {record["status"] for record in results(tmp_path)["models"]} == {"passed"}
        capsys.readouterr()
        assert run(tmp_path, *only) == 0
        assert "3 models in this shard, 3 done" in capsys.readouterr().out
        assert run(tmp_path, *only, "--limit", "1", "--fresh") == 0
        assert len(results(tmp_path)["models"]) == 1

    def test_model_too_large_for_memory_runs_on_the_meta_device(self, tmp_path: Path) -> None:
        record = sweep.check_model(Name("timm", "test_vit"), options(tmp_path, "--memory", "1"))
        assert record["status"] == "meta", record
        assert record["sites"] == {"Dropout": 13}
        assert record["error"] == "needs about 1.5 GiB, the limit is 1.0 GiB"

    def test_memory_limits_with_shards(self, tmp_path: Path) -> None:
        exclusive, shared = sweep.limits(options(tmp_path, "--shard", "1/2"))
        assert (exclusive / sweep.GIB, shared / sweep.GIB) == (6.0, 2.0)
        assert sweep.limits(options(tmp_path)) == (8 * sweep.GIB, 8 * sweep.GIB)

    def test_large_models_run_exclusively(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def is_unlocked() -> bool:
            with (tmp_path / "large.lock").open("w") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return False
            return True

        def check(trials: object, device: str, recipe: object) -> dict[str, Any]:
            return {"status": "passed", "unlocked": is_unlocked()}

        monkeypatch.setattr(sweep, "check_first_runnable", check)
        name = Name("timm", "test_vit")
        for memory, unlocked in ((8, True), (5, False)):
            arguments = ("--shard", "1/2", "--memory", str(memory))
            assert sweep.check_model(name, options(tmp_path, *arguments))["unlocked"] is unlocked
        assert is_unlocked()

    def test_model_that_accepts_no_input_has_status_clean(self) -> None:
        trials = (Trial(Name("timm", "test_resnet"), shape) for shape in ((5, 32, 32), (3, 0, 0)))
        record = sweep.check_first_runnable(trials, "cpu")
        assert record["status"] == "clean"
        assert record["error"].endswith("[2x3x0x0]")

    def test_timeout_is_recorded_as_failure(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def times_out(trials: object, device: str, recipe: object) -> dict[str, Any]:
            signal.raise_signal(signal.SIGALRM)
            raise AssertionError

        before = signal.getsignal(signal.SIGALRM)
        monkeypatch.setattr(sweep, "check_first_runnable", times_out)
        record = sweep.check_model(Name("timm", "test_vit"), options(tmp_path))
        assert (record["status"], record["error"]) == ("failed", "TimeoutError: not finished after 900 s")
        assert signal.getsignal(signal.SIGALRM) == before

    def test_zoo_runs_as_a_program(self, tmp_path: Path) -> None:
        command = [sys.executable, str(BENCHMARKS / "zoo.py"), "--only", ":test_resnet$", "--out", str(tmp_path)]
        done = subprocess.run([*command, "--shard", "1/2"], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "1/1 passed  timm:test_resnet" in done.stdout
        assert "timm: 1 of" in done.stdout


class TestReport:
    @pytest.fixture
    def folders(self, tmp_path: Path) -> list[Path]:
        """Two shards with records of several statuses."""
        measured: dict[str, Any] = {"family": "resnet", "status": "passed", "asked": 0.1, "sites": {"DropBlock": 20}}
        records: list[dict[str, Any]] = [
            {"name": "timm:resnet18", "dropped": 0.098, "elements": 3000, "finite": True, **measured},
            {"name": "timm:resnet26", "dropped": 0.102, "elements": 1000, "finite": False, **measured},
            {
                "name": "timm:resnet34",
                "family": "resnet",
                "status": "failed",
                "step": "train",
                "error": "CheckFailed: x",
            },
            {"name": "timm:vit_7b_patch16_dinov3", "family": "eva", "status": "meta", "error": "needs a|b"},
            {"name": "torchvision:resnet18", "family": "torchvision.resnet", "status": "clean", "error": "too small"},
        ]
        for index, part in enumerate((records[:2], records[2:])):
            folder = tmp_path / str(index)
            folder.mkdir()
            lines = [json.dumps(line) for line in ({"started": part[0]["name"]}, *part)]
            (folder / f"shard-{index + 1}-of-2.jsonl").write_text("\n".join(lines) + "\n")
        return [tmp_path / "0", tmp_path / "1"]

    def test_report_merges_several_folders(
        self, folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        arguments = ["--report", *map(str, folders), "--out", str(tmp_path), "--hardware", "a machine"]
        assert zoo.main(arguments) == 1
        found = results(tmp_path)
        assert found["hardware"] == "a machine"
        totals = {"passed": 2, "failed": 1, "crashed": 0, "refused": 0, "clean": 0, "meta": 1}
        size = sum(name.family == "resnet" for name in catalog.names("timm"))
        assert found["families"]["resnet"] == {"names": size, **totals, "meta": 0}
        assert found["totals"]["timm"] == totals
        assert len(found["models"]) == 5
        names = len(catalog.names("timm"))
        families = len(catalog.families())
        assert (
            f"timm: 2 of {names} models ({2 / names:.1%}) and 1 of {families} families passed the full check; "
            f"1 failed; 1 checked on the meta device only; {names - 4} not yet checked."
        ) in capsys.readouterr().out

    def test_report_lists_failures_with_reasons(self, folders: list[Path], tmp_path: Path) -> None:
        report.write(tmp_path, report.merge(folders, catalog.names(), "a machine"))
        text = (tmp_path / "zoo.md").read_text()
        assert (
            "## Failed: 1\n\n| model | step | reason |\n|---|---|---|\n| timm:resnet34 | train | CheckFailed: x |"
            in text
        )
        assert "| timm:vit_7b_patch16_dinov3 |  | needs a\\|b |" in text
        assert "| torchvision:resnet18 |  | too small |" in text
        size = sum(name.family == "resnet" for name in catalog.names("timm"))
        assert f"| resnet | {size} | 2 | 1 | 0 | 0 | 0 |" in text
        assert "Sites: 40 DropBlock." in text
        assert "of each of 2 models dropped 9.9000% of 4,000 elements; the requested rate is 10.0000%." in text
        assert "1 models return NaN" in text
        assert str(tmp_path) not in text + (tmp_path / "zoo.json").read_text()
