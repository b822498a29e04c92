"""The examples run end to end with tiny settings and report correct results."""

import importlib
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import hookdrop

pytest.importorskip("tensorboard")
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

pytest.importorskip("pydantic")
from tests.support import emoji_packages
from tests.support.programs import ROOT, load

np = pytest.importorskip("numpy")
timm = pytest.importorskip("timm")
EXAMPLES = ROOT / "examples"

finetune = load(EXAMPLES / "finetune_timm.py")
mc_dropout = load(EXAMPLES / "mc_dropout.py")
TINY = "--image-size 32 --limit 48 --batch-size 16 --epochs 3 --device cpu"
DROPBLOCK = "--regularizer 'DropBlock(p=0.2, block_size=3)' --layers 'layer[123].*' --exclude layer3.0"
DROPOUT = "--regularizer 'Dropout(p=0.3)' --layers layer1.0 layer2.0"


def run(out: Path, *texts: str) -> dict[str, float]:
    return finetune.main([*shlex.split(" ".join((TINY, *texts))), "--out", str(out)])


def saved(out: Path) -> dict[str, Any]:
    return torch.load(out / "last.pt", weights_only=True)


def differences(a: Any, b: Any) -> list[str]:
    leaves_a, leaves_b = (dict(pytree.tree_flatten_with_path(state)[0]) for state in (a, b))
    assert leaves_a.keys() == leaves_b.keys()
    same = lambda a, b: torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)
    return [pytree.keystr(path) for path, value in leaves_a.items() if not same(value, leaves_b[path])]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run with a ramp over the whole training."""
    out = tmp_path_factory.mktemp("whole")
    run(out, DROPBLOCK)
    return out


def image_folder(root: Path, train: tuple[str, str], val: tuple[str, str]) -> Path:
    rng = np.random.default_rng(0)
    for part, classes, count in (("train", train, 16), ("val", val, 4)):
        for name in classes:
            (root / part / name).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(256, size=(40, 50, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / part / name / f"{i}.png")
    return root


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return image_folder(tmp_path_factory.mktemp("images"), ("circle", "square"), ("circle", "square"))


def test_finetune_logs_curves_with_the_rate(whole: Path) -> None:
    events = EventAccumulator(str(whole / "tensorboard")).Reload()
    scalars = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert {"loss", "lr", "model accuracy", "ema accuracy", "hookdrop/dropblock/keep_prob"} <= scalars.keys()
    assert scalars["hookdrop/dropblock/step"] == [(3, 3), (6, 6), (9, 9)]
    assert [value for _, value in scalars["hookdrop/dropblock/p"]] == pytest.approx([0.2 / 3, 0.4 / 3, 0.2])
    report = (whole / "report.md").read_text()
    assert "* regularizer: DropBlock(p=0.2, block_size=3)" in report
    assert len(re.findall(r"^\| \d", report, re.MULTILINE)) == 3
    assert "## Measured rates" in report


def test_final_weights_load_into_a_plain_model(whole: Path) -> None:
    args = finetune.parse_args(["--image-size", "32"])
    for file, reported in (("model.pt", "model accuracy"), ("ema.pt", "ema accuracy")):
        model = timm.create_model("test_resnet", num_classes=10).eval()
        model.load_state_dict(torch.load(whole / file, weights_only=True))
        sets = finetune.datasets(args)
        finetune.set_transforms(args, model, *sets)
        images, labels = zip(*sets[1]["val"], strict=True)
        with torch.no_grad():
            right = model(torch.stack(images)).argmax(dim=1) == torch.tensor(labels)
        assert right.float().mean().item() == pytest.approx(saved(whole)["history"][-1][reported], abs=0.0021)


def test_finetune_prints_the_measured_rate(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(tmp_path, DROPOUT, f"--data {folder} --limit 30 --epochs 1 --ramp 0")
    settings = saved(tmp_path)["settings"]
    assert (settings["classes"], settings["images"]) == (["circle", "square"], 30)
    assert saved(tmp_path)["model"]["fc.bias"].shape == (2,)
    assert [result["asked"], result["dropped"]] == pytest.approx([0.3, 0.3], abs=0.02)
    printed = capsys.readouterr().out
    assert printed.startswith("2 sites of ResNet\n")
    assert "eval output bit-identical with and without hooks" in printed
    assert f"accuracy {result['model accuracy']:.2%}, EMA" in printed


def test_finetune_on_emoji_reports_both_vendors(tmp_path: Path) -> None:
    emoji_packages.write(tmp_path / "data")
    result = run(tmp_path, f"--data emoji --data-dir {tmp_path / 'data'} --epochs 1 --image-size 32 --batch-size 8")
    assert {"model accuracy", "ema accuracy on other vendor"} <= result.keys()
    train, val = finetune.datasets(finetune.parse_args(["--data", "emoji", "--data-dir", str(tmp_path / "data")]))
    same, other = ([path.name for path in part.paths] for part in val.values())
    assert same == other
    assert set(same).isdisjoint(path.name for path in train.paths)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_resumed_run_with_scaler_worker_and_incomplete_group_ends_bit_equal(folder: Path, tmp_path: Path) -> None:
    # 30 images are 7 batches of 4: three optimizer steps of two batches, and one remaining batch.
    settings = f"{DROPOUT} --ramp 0.5 --amp fp16 --batch-size 4 --accumulate 2 --workers 1 --data {folder} --limit 30"
    settings += " --seed 1"  # no gradient overflows with this seed, so no step is skipped
    run(tmp_path / "whole", settings)
    run(tmp_path / "parts", settings, "--stop-after-epoch 2")
    assert saved(tmp_path / "parts")["scaler"]["_growth_tracker"] == saved(tmp_path / "parts")["step"] == 6
    assert not (tmp_path / "parts" / "model.pt").exists()
    run(tmp_path / "parts", settings, "--resume auto")
    assert saved(tmp_path / "whole")["epoch"] == 3
    for file in ("last.pt", "model.pt", "ema.pt"):
        a, b = (torch.load(tmp_path / name / file, weights_only=True) for name in ("whole", "parts"))
        assert differences(a, b) == []


def test_resume_from_a_checkpoint_in_another_folder(whole: Path, tmp_path: Path) -> None:
    """The run is complete, so only the final weights are written."""
    result = run(tmp_path, DROPBLOCK, f"--resume {whole / 'last.pt'}")
    last = saved(whole)["history"][-1]
    assert differences(last, {key: result[key] for key in last}) == []
    assert (tmp_path / "model.pt").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--epochs 4 --limit 49 --resume auto", "limit: 48 saved, 49 now\n  epochs: 3 saved, 4 now"),
        ("", "already exists: continue it with --resume auto"),
    ],
)
def test_existing_run_is_not_overwritten(whole: Path, words: str, said: str) -> None:
    before = (whole / "last.pt").read_bytes()
    with pytest.raises(SystemExit, match=said):
        run(whole, DROPBLOCK, words)
    assert (whole / "last.pt").read_bytes() == before


def test_image_folder_with_different_validation_classes_is_rejected(tmp_path: Path) -> None:
    folder = image_folder(tmp_path / "data", ("circle", "square"), ("square", "star"))
    with pytest.raises(SystemExit, match="have different classes"):
        run(tmp_path / "out", f"--data {folder}")


@pytest.mark.parametrize(
    ("flags", "error", "text"),
    [
        ("--regularizer 'Dropout(p=0.1)' --layers layer9", hookdrop.LayerError, "'layer9'\n  did you mean"),
        ("--regularizer 'DropBlok(p=0.1)' --layers layer1", ValueError, "did you mean: DropBlock"),
        ("--model test_vit --regularizer 'DropBlock(p=0.1)' --layers 'blocks.*'", hookdrop.ShapeError, "have no map"),
        ("--layers layer1", SystemExit, "2"),
        ("--accumulate 4", SystemExit, "48 training images are fewer than one step of 4 x 16"),
        ("--data emoji --data-dir nowhere", SystemExit, "npm install --prefix nowhere emoji-datasource-google@16.0.0"),
        ("--pretrained package", SystemExit, "requires --model tf_efficientnet_lite0, got test_resnet"),
    ],
)
def test_invalid_arguments_raise_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, error: type[BaseException], text: str
) -> None:
    monkeypatch.setattr(finetune, "train_epoch", lambda run: pytest.fail("training started"))
    with pytest.raises(error, match=text):
        run(tmp_path / "out", flags)
    assert not (tmp_path / "out" / "last.pt").exists()


@pytest.mark.parametrize("module", [finetune, mc_dropout], ids=["finetune_timm", "mc_dropout"])
def test_documented_commands_name_existing_layers(module: ModuleType) -> None:
    lines = [line.strip() for line in (module.__doc__ or "").replace("\\\n", " ").splitlines()]
    runs = [shlex.split(line, comments=True)[2:] for line in lines if line.startswith("python examples/")]
    found = [module.parse_args(arguments) for arguments in runs]
    assert len(found) >= 3
    for args in found:
        with torch.device("meta"):
            model = timm.create_model(args.model)
        assert len(hookdrop.plan(model, args.regularizer, layers=args.layers).sites) >= 2


FAST = ["--train-images", "60", "--steps", "20", "--samples", "3", "--device", "cpu"]


def test_mc_dropout_prints_and_writes_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = mc_dropout.main([*FAST, "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert f"{result['errors']} errors in 500 test images: accuracy {1 - result['errors'] / 500:.1%}" in printed
    assert f"ranks these {result['errors']} errors" in printed
    assert "sampling left parameters and batch norm statistics unchanged: True" in printed
    assert "eval output is bit-identical before and after sampling: True" in printed
    for row in (*result["by measure"], *result["by kind"]):
        assert f"\n{row} " in printed
    assert json.loads((tmp_path / "report.json").read_text()) == result
    with Image.open(tmp_path / "images.png") as picture:
        assert picture.size == (1200, 400)


def test_mc_dropout_loads_finetuned_weights(whole: Path) -> None:
    settings = ["--checkpoint", str(whole / "model.pt"), "--samples", "2", "--device", "cpu"]
    result = mc_dropout.main(settings)
    assert result["accuracy"] == pytest.approx(saved(whole)["history"][-1]["model accuracy"], abs=0.0021)


@pytest.fixture(scope="module")
def demo() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)  # as for a program that is started there; its workers import it
        yield importlib.import_module("demo")


def test_demo_plans_ramps_removes_trains_and_writes_a_page(demo: ModuleType, tmp_path: Path, capsys: Any) -> None:
    page = demo.main(["--out", str(tmp_path), "--seeds", "1", "--epochs", "1", "--workers", "1"]).read_text()
    printed = capsys.readouterr().out
    rates = [tuple(map(float, pair)) for pair in re.findall(r"p = (\S+), measured (\S+)", printed)]
    assert [requested for requested, _ in rates] == [0.0, 0.05, 0.1]
    for requested, measured in rates:
        assert measured == pytest.approx(requested, rel=0.2)  # over three standard errors
    assert "layer3.5.bn2" in page
    assert printed.count("are bit-equal") == page.count("are bit-equal") == 1
    assert "1 of 1 trained models" in page
    assert page.count("<svg") == 2
    assert "No clear difference" in printed


@pytest.mark.parametrize(
    ("after", "sentence", "chance"),
    [
        ([24.0, 24.5, 24.2, 24.1, 24.9, 24.3], "better: .* lower in 6 of 6", "3%"),
        ([27.0, 27.5, 27.2, 27.1, 27.9, 27.3], "worse: .* lower in 0 of 6", "3%"),
        ([25.9, 26.2, 25.8, 26.1, 25.7, 26.4], "No clear difference", "p = "),
        ([26.0] * 6, "No clear difference", "p = 1;"),
    ],
)
def test_the_verdict_of_the_demo_agrees_with_scipy(demo: ModuleType, after: Any, sentence: str, chance: str) -> None:
    found = demo.verdict([26.0] * 6, after)
    logs = np.log(np.array(after) / 26.0)
    stats = pytest.importorskip("scipy.stats")
    p = stats.permutation_test((logs,), np.mean, permutation_type="samples", n_resamples=np.inf).pvalue
    assert (p <= 0.05) == ("No clear" not in found.sentence)
    assert re.search(sentence, found.sentence)
    assert chance in found.limits
