"""`benchmarks/sweep.py`: limits, how a run resumes, and the report; and `placement.py`."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

import placement
import sweep
from hookdrop.survey import convs
from models.check import NotRunnable
from sweep import Sweep
from tests.support.programs import ROOT
from tests.unit.survey import test_branches

ABOUT = Sweep("cases", "All cases", "python cases.py")
NAMES = ("passes", "fails", "crashes", "hangs", "has no input")
RESULTS = ROOT / "benchmarks" / "results"


def check(name: str, options: object) -> dict[str, Any]:
    """Pass, fail, end the process, or take too long, depending on the name; child processes import it."""
    if name == "fails":
        raise ValueError("first line\nsecond line")
    if name == "crashes":
        os._exit(3)
    if name == "has no input":
        raise NotRunnable("no input")
    if name == "hangs":
        time.sleep(600)
    return {"status": "passed", "family": "some"}


def run(out: Path, *arguments: str, check: sweep.Check = check) -> int:
    options = sweep.parser("", out="unused", memory=8.0).parse_args(["--out", str(out), *arguments])
    return sweep.main(options, ABOUT, NAMES, check)


def statuses(out: Path) -> dict[str, str]:
    return {one["name"]: one["status"] for one in json.loads((out / "cases.json").read_text())["models"]}


def test_crashes_and_timeouts_do_not_end_a_run(tmp_path: Path) -> None:
    assert run(tmp_path, "--timeout", "30", "--only", "passes|fails|crashes|input") == 1
    assert run(tmp_path, "--timeout", "1", "--only", "hangs") == 1
    expected = ("passed", "failed", "crashed", "not run", "not run")
    assert statuses(tmp_path) == dict(zip(NAMES, expected, strict=True))  # in the order of the names
    page = (tmp_path / "cases.md").read_text()
    assert "| fails | ValueError: first line second line |" in page
    assert "| crashes | the process ended with exit status 3 |" in page
    assert "| hangs | not finished after 1 s |" in page
    assert str(ROOT) not in page


def test_interrupted_run_resumes_with_the_next_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inside = ("--workers", "0", "--only", "passes|fails|input")
    run(tmp_path, "--workers", "0", "--only", "^passes$")
    (journal,) = tmp_path.glob("*.jsonl")
    journal.write_text(journal.read_text() + '{"name": "fails", "stat')  # killed while writing
    assert run(tmp_path, *inside) == 1
    assert "3 names, 1 done" in capsys.readouterr().out
    assert list(statuses(tmp_path).values()) == ["passed", "failed", "not run"]
    assert run(tmp_path, *inside, "--again", "failed", "not run", check=lambda *given: {"status": "passed"}) == 0
    assert set(statuses(tmp_path).values()) == {"passed"}


class TestReport:
    RECORDS = (
        {"name": "timm:a", "family": "x", "status": "passed", "sites": {"Dropout": 2}, "asked": 0.1, "dropped": 0.098}
        | {"elements": 3000, "warnings": {"w|w": 1}},
        {"name": "timm:b", "family": "x", "status": "passed", "sites": {"Dropout": 1}, "asked": 0.1, "dropped": 0.102}
        | {"elements": 1000, "finite": False},
        {"name": "timm:c", "family": "y", "status": "meta", "error": "needs a|b"},
    )

    def test_page_has_totals_rates_reasons_and_families(self) -> None:
        head = {"hardware": "a machine", "versions": {"python": "3"}}
        page = sweep.markdown(ABOUT, {**head, "models": self.RECORDS})
        for text in (
            "timm: 2 of 3 models (66.7%) passed; 1 meta.",
            "Sites: 3 Dropout.",
            "of each of 2 models dropped 9.9000% of 4,000 elements; the requested rate is 10.0000%.",
            "1 models return NaN",
            "| w\\|w | 1 |",
            "| timm:c | needs a\\|b |",
            "| x | 2 | 2 | 0 |",
        ):
            assert text in page

    @pytest.mark.parametrize("path", sorted(RESULTS.glob("transformers/*.json")), ids=lambda path: path.stem)
    def test_committed_pages_are_those_of_their_records(self, path: Path) -> None:
        command = f"python benchmarks/transformers_zoo.py --recipe {path.stem}"
        about = Sweep(path.stem, f"`{path.stem}` in every family of transformers", command)
        assert sweep.markdown(about, json.loads(path.read_text())) == path.with_suffix(".md").read_text()

    @pytest.mark.parametrize("path", [*RESULTS.glob("transformers/*.json"), *RESULTS.glob("zoo/**/*.json")])
    def test_committed_reports_have_each_name_once_and_all_reasons(self, path: Path) -> None:
        found = json.loads(path.read_text())["models"]
        assert len(found) == len({record["name"] for record in found})
        without = [record for record in found if record["status"] not in ("passed", "batch", "no layers")]
        assert all(record["error"] and record["status"] in sweep.STATUSES for record in without)


OWNERS = {
    "residuals._Search._projection": "timm:test_resnet",
    "residuals._Search._first_of_two": "transformers:reformer",
    "residuals._Search._computes": "timm:efficientvim_m1",
    "residuals._Search._is_joined": "timm:rexnet_100",
    "residuals._Search._leaks": "timm:nasnetalarge",
    "residuals._is_projection": "timm:resnetv2_18",
    "branches._without_long_skips": "transformers:sam3_lite_text_text_model",
    "branches._usable_ends": "transformers:pegasus_x",
    "branches._home_name": "transformers:nystromformer",
    "trace.Trace.repeated": "transformers:hubert",
    "layers._around_parts": "transformers:patchtsmixer",
    "layers._kind": "timm:efficientvit_b0",
    "layers._keeps": "transformers:beam",
    "convs._outermost": "timm:bat_resnext26ts",
    "convs._skip_module": "timm:botnet26t_256",
    "convs._branch": "torchvision:mnasnet0_5",
    "convs._blocks_without_skip": "torchvision:mnasnet0_5",
    "convs._dilation": "torchvision:lraspp_mobilenet_v3_large",
    "convs._widens": "torchvision:fcn_resnet50",
    "convs.ConvGraph._is_near": "timm:iformer_t",
    "convs._after_pooling": "torchvision:deeplabv3_mobilenet_v3_large",
    "convs._backbones": "torchvision:lraspp_mobilenet_v3_large",
    "convs._is_pointwise": "transformers:parakeet_encoder",
    "heads._are_weights": "transformers:openai_privacy_filter",
    "heads._has_constant": "transformers:ijepa",
    "heads._weighs_positions": "timm:edgenext_xx_small",
    "heads._is_routed": "transformers:inkling2_loop_text",
    "methods.branches._apart": "transformers:olmo_hybrid",
}
"""A model that needs each special rule of the survey. `is_affine` is for adapters: test_adapters_are_no_branches."""


class TestAblation:
    @pytest.fixture
    def ablation(self) -> Any:
        return pytest.importorskip("ablation")  # needs transformers

    def test_rule_is_off_wherever_it_is_imported_and_only_there(self, ablation: Any) -> None:
        rule = "hookdrop.survey.convs._blocks_without_skip"
        with ablation.without(rule):
            assert convs._blocks_without_skip is ablation.RULES[rule]
        assert convs._blocks_without_skip is not ablation.RULES[rule]

    def test_every_rule_has_a_model(self, ablation: Any) -> None:
        rules = {rule.removeprefix("hookdrop.").removeprefix("survey.") for rule in ablation.RULES}
        assert rules == {*OWNERS, "residuals.is_affine"}

    @pytest.mark.parametrize("rule", OWNERS)
    def test_model_has_other_sites_without_the_rule(self, ablation: Any, rule: str) -> None:
        (full,) = [name for name in ablation.RULES if name.endswith(f".{rule}")]
        # An experiment on random values may end differently.
        assert any(ablation.check_model(OWNERS[rule], rules=[full])["rules"] for _ in range(3))

    def test_adapters_need_a_rule(self, ablation: Any) -> None:
        with ablation.without("hookdrop.survey.residuals.is_affine"), pytest.raises(AssertionError):
            test_branches.test_adapters_are_no_branches()

    def test_report_names_the_families_that_change_without_each_rule(self, ablation: Any, tmp_path: Path) -> None:
        arguments = ["--all", "--workers", "0", "--out", str(tmp_path), "--only", "^timm:test_(resnet|vit)$"]
        assert ablation.main(arguments) == 0
        found = json.loads((tmp_path / "ablation.json").read_text())["rules"]
        assert list(found) == list(ablation.RULES)
        assert found["hookdrop.survey.residuals._Search._projection"] == ["resnet"]
        assert found["hookdrop.survey.heads._has_constant"] == ["vision_transformer"]
        page = (tmp_path / "ablation.md").read_text()
        assert "| hookdrop.survey.residuals._Search._projection | 1 | resnet |" in page


RECORDS = json.loads((ROOT / "benchmarks" / "results" / "placement.json").read_text())["models"]
FOUND = {record["name"]: record for record in RECORDS}


@pytest.mark.parametrize("name", ["resnet18", "efficientnet_lite0", "vgg11", "ese_vovnet19b_dw"])
def test_results_match_the_committed_file(name: str) -> None:
    assert {"name": name, **placement.compare(name), "seconds": FOUND[name]["seconds"]} == FOUND[name]


def test_documented_numbers_match_the_committed_file() -> None:
    equal = [r["stochastic_depth"] for r in FOUND.values() if r["stochastic_depth"].startswith("equal")]
    taken = [r for r in FOUND.values() if r["stochastic_depth"] not in ("untaken", "unused")]
    page = (ROOT / "docs" / "evidence" / "recipes.md").read_text()
    assert f"{len(equal):,} of the {len(taken):,} architectures" in page
    for text in ("equal, i / (n - 1)", "equal, i / n", "equal, p everywhere", "untaken", "unused"):
        assert f"| {sum(r['stochastic_depth'] == text for r in FOUND.values())} |" in page
