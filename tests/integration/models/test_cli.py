"""The command line with timm and torchvision models: output and errors."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import hookdrop
from hookdrop.cli import main, models
from hookdrop.kernels import native

for _extra in ("timm", "torchvision"):
    pytest.importorskip(_extra)


DROPBLOCK = "DropBlock(p=0.1, block_size=7)"


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket.socket, "connect", None)  # a connection is an error


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*argv: str, is_error: bool = False) -> Any:
        code = main(argv)
        out, err = capsys.readouterr()
        assert (code, out if is_error else err) == (2 * is_error, "")
        return err if is_error else out.splitlines()

    return run


@pytest.fixture
def run_error(run: Any) -> Any:
    def run_error(*argv: str) -> str:
        err: str = run(*argv, is_error=True)
        assert (err.startswith("hookdrop: error: "), "Traceback" in err) == (True, False)
        return err

    return run_error


def cells(lines: list[str], name: str) -> list[str]:
    (row,) = [re.split(r"\s{2,}", line.strip()) for line in lines if line.split()[:1] == [name]]
    return row[1:]


def test_layers_shows_type_shape_calls_and_what_fits(run: Any) -> None:
    lines = run("layers", "torchvision:resnet18", "--only", "layer3.*.bn2", "layer[34].*.relu")
    assert re.split(r"\s{2,}", lines[2]) == ["layer", "type", "shape", "calls", "what fits"]
    maps = "DropBlock, Dropout2d: 256 maps of 14x14; DropPath, Dropout: end of a residual branch"
    assert cells(lines, "layer3.*.bn2") == ["BatchNorm2d (x 2)", "1x256x14x14", "1", maps]
    assert cells(lines, "layer[3-4].*.relu") == ["ReLU (x 4)", "1x256x14x14 to 1x512x7x7", "2"]


def test_only_accepts_globs_and_full_names(run: Any) -> None:
    names = [line.split()[0] for line in run("layers", "resnet18", "layer[12].0.bn?", "--only", "layer4")[4:-1]]
    assert names == ["layer[1-2].0.bn1", "layer[1-2].0.bn2", "layer4"]


@pytest.mark.parametrize(
    ("name", "shapes", "layer", "shape"),
    [
        ("test_vit", "1x3x160x160", "blocks.*", "1x101x64"),
        ("raft_small", "1x3x224x224, 1x3x224x224", "feature_encoder", "2x128x28x28"),
        ("fasterrcnn_mobilenet_v3_large_320_fpn", "3x224x224", "rpn.head.conv", "1x256x5x5"),
    ],
)
def test_example_input_of_each_kind_of_model(run: Any, name: str, shapes: str, layer: str, shape: str) -> None:
    lines = run("layers", name)
    assert lines[0].endswith(f", input {shapes}")
    assert cells(lines, layer)[1] == shape


def test_models_are_on_the_meta_device_or_reproducible_and_keep_the_rng_state() -> None:
    assert all(parameter.is_meta for parameter in models.load("vit_b_32")[1].parameters())
    first = models.load("regnet_y_400mf")[1].state_dict()
    before = torch.manual_seed(7).get_state()
    second = models.load("regnet_y_400mf")[1].state_dict()
    assert all(not value.is_meta and torch.equal(value, second[name]) for name, value in first.items())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("name", "size", "text"),
    [("resnet18", size, "the input size") for size in ("big", "0", "64x", "-64", "1x3x64x64")]
    + [("torchvision:vit_b_16", "64", "Expected 224 but got 64")],
)
def test_input_size_is_used_or_an_error(run: Any, run_error: Any, name: str, size: str, text: str) -> None:
    for other, right, shape in (("resnet18", "3x96x64", "1x3x96x64"), ("test_vit", "64", "1x3x64x64")):
        assert f"input {shape}" in run("layers", other, "--only", "**", "--input-size", right)[0]
    assert text in run_error("layers", name, f"--input-size={size}")


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("resnet18", "resnet18 from timm, "),
        ("torchvision:resnet18", "resnet18 from torchvision, "),
        ("resnet18.a1_in1k", "resnet18.a1_in1k from timm"),
    ],
)
def test_name_in_both_libraries_selects_timm_by_default(run: Any, name: str, title: str) -> None:
    first, *rest = run("layers", name)
    assert first.startswith(title)
    # Only timm's model has a layer for each activation.
    assert any("layer[1-4].*.act1" in line for line in rest) == ("timm" in title)


OPTIONS = ["--layers layer3.* fc --exclude fc", "layer3.* fc --exclude fc", "layer3.* --exclude fc --at output fc"]


@pytest.mark.parametrize("options", OPTIONS)
def test_plan_output(run: Any, options: str) -> None:
    assert run("plan", "resnet18", DROPBLOCK, *options.split()) == [
        "resnet18 from timm, input 1x3x224x224",
        "2 sites of ResNet",
        "site      type        shape        read as          calls    p  regularizer",
        "--------  ----------  -----------  ---------------  -----  ---  ------------------------------",
        "layer3.0  BasicBlock  1x256x14x14  C=256 H=14 W=14      1  0.1  DropBlock(p=0.1, block_size=7)",
        "layer3.1  BasicBlock  1x256x14x14  C=256 H=14 W=14      1  0.1  DropBlock(p=0.1, block_size=7)",
        "'layer3.*': 2 layers",
        "'fc': 1 layer",
    ]


def test_plan_warns_if_a_block_covers_the_map(run: Any) -> None:
    text = "\n".join(run("plan", "resnet18", DROPBLOCK, "--layers", "layer4.*"))
    assert "\nwarning: DropBlock at 'layer4.0': block_size=7 covers the whole 7x7 map" in text


def test_invalid_regularizer_is_reported_before_a_model_is_built(run_error: Any, tmp_path: Path) -> None:
    assert "did you mean: DropBlock" in run_error("plan", "no_such_model", "DropBlok(p=0.1)", "--layers", "fc")
    code = f"Dropout(p=__import__('pathlib').Path({str(tmp_path / 'ran')!r}).touch())"
    assert "nothing was evaluated" in run_error("plan", "no_such_model", code, "--layers", "fc")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ((DROPBLOCK, "resnet18", "fc"), f"write: hookdrop plan resnet18 '{DROPBLOCK}' fc"),
        (("resnet18", "layer3.*", DROPBLOCK), f"write: hookdrop plan resnet18 '{DROPBLOCK}' 'layer3.*'"),
        (("resnet18", DROPBLOCK), "run `hookdrop layers resnet18`, and add names or globs from there, or --layers"),
        (("resnet18", DROPBLOCK, *os.listdir()), "is a file here: quote a glob"),
        (("model.py", DROPBLOCK, "fc"), "a model of your own: print(hookdrop.layers("),
        (("resnet18.zzz", DROPBLOCK), "timm can't build 'resnet18.zzz': RuntimeError: Invalid pretrained tag"),
        (("resnet5", DROPBLOCK), "did you mean: timm:resnet50, ... torchvision:resnet50"),
        (("timm:swin_t", DROPBLOCK), "there is no model"),
        (("hf-hub:timm/resnet18", DROPBLOCK), "there is no model"),
    ],
)
def test_errors_say_what_to_write(run_error: Any, argv: tuple[str, ...], text: str) -> None:
    err = run_error("plan", *argv)
    assert all(part in err for part in text.split("..."))


def test_a_recipe_takes_the_options_of_inject(run: Any, run_error: Any) -> None:
    argv = ("plan", "test_vit", "head_dropout(p=0.2)")
    options = ("--exclude", "blocks.0.**", "--schedule", "LinearSchedule(0.5)", "--p-scale", "depth")
    assert "total_steps=" in run_error(*argv, *options)
    lines = run(*argv, *options, "--total-steps", "100")
    assert "LinearSchedule(steps=0.5) = LinearSchedule(steps=50)" in lines[1]
    assert [cells(lines, f"blocks.{i}.attn.proj")[4] for i in range(1, 6)] == ["0.04", "0.08", "0.12", "0.16", "0.2"]
    assert "chooses its layers: remove layers=" in run_error(*argv, "--layers", "fc")


def test_closed_pipe_causes_no_traceback() -> None:
    command = [sys.executable, "-m", "hookdrop", "layers", "resnet18"]
    # The smallest pipe: a long list does not fit, so writing to the closed pipe fails.
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True, pipesize=4096) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith("resnet18 from timm")
        process.stdout.close()
        assert process.stderr.read() == ""


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    loops = "yes" if native.available() else "no"
    assert capsys.readouterr().out == f"hookdrop {hookdrop.__version__} (compiled loops: {loops})\n"


@pytest.mark.parametrize(
    "argv", ["", "layers", "plan", "plan resnet18", "plan resnet18 --layers fc", "inject x", "layers x --colour red"]
)
def test_incomplete_command_prints_usage_and_an_example(argv: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(argv.split())
    said = rf"usage: hookdrop[\s\S]*\n  for example: hookdrop {'plan' if 'plan' in argv else 'layers'} resnet50"
    assert (end.value.code, bool(re.match(said, capsys.readouterr().err))) == (2, True)
