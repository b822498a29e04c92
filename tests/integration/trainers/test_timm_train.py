"""timm's own train.py, with the lines of `docs/trainers/timm.md` pasted in, on a folder of images.

timm's packages do not contain the script. To run these tests, set TIMM_TRAIN to a copy:

    git clone --depth=1 https://github.com/huggingface/pytorch-image-models
    TIMM_TRAIN=pytorch-image-models/train.py pytest tests/integration/trainers/test_timm_train.py
"""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from tests.support.code_blocks import blocks_of
from tests.support.programs import ROOT

pytest.importorskip("timm")
pytest.importorskip("torchvision")
import numpy as np
import timm
from PIL import Image

SCRIPT = os.environ.get("TIMM_TRAIN")
PAGE = ROOT / "docs" / "trainers" / "timm.md"

pytestmark = pytest.mark.skipif(SCRIPT is None, reason="set TIMM_TRAIN to timm's train.py, which its packages lack")


def patched(script: str) -> str:
    """The script with the lines of the page, each before the line that the page names."""
    inject = next(block.text for block in blocks_of(PAGE) if block.kind == "code")
    seed, log = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    for line, place in (
        (textwrap.indent(inject, "    "), "    if lr_scheduler is not None and start_epoch > 0:\n"),
        (log, "                utils.update_summary(\n"),
    ):
        assert script.count(place) == 1
        script = script.replace(place, line + place)
    loop = "        for epoch in range(start_epoch, num_epochs):\n"
    assert script.count(loop) == 1
    return script.replace(loop, loop + seed)


SETTINGS = (
    "--data-dir images --model resnet10t --num-classes 2 --img-size 32 --batch-size 4 --epochs 3 --lr 0.01 --opt adamw "
    "--model-ema --device cpu --workers 0 --no-prefetcher --checkpoint-hist 9 --output ."
)


def train(folder: Path, out: str, *arguments: object) -> str:
    command = [sys.executable, "train.py", *SETTINGS.split(), "--experiment", out, *map(str, arguments)]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(patched(Path(str(SCRIPT)).read_text()))
    for part in ("train", "validation"):
        for label in ("circle", "square"):
            (tmp_path / "images" / part / label).mkdir(parents=True)
            for i in range(8):
                pixels = np.random.default_rng(i).integers(256, size=(40, 40, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / "images" / part / label / f"{i}.png")
    return tmp_path


def test_rates_rise_and_a_resumed_run_is_bit_equal(folder: Path) -> None:
    """With its average. Checkpoints load into a plain model."""
    printed = train(folder, "whole")
    assert "2 sites, p=0 of 0.1, step 0 of LinearSchedule(steps=12)" in printed
    rows = csv.DictReader((folder / "whole" / "summary.csv").read_text().splitlines())
    assert [float(row["train_hookdrop/dropblock/p"]) for row in rows] == pytest.approx([0.1 / 3, 0.2 / 3, 0.1])
    printed = train(folder, "resumed", "--resume", folder / "whole" / "checkpoint-0.pth.tar")
    assert "step 4 of LinearSchedule(steps=12)" in printed
    whole, resumed = (
        torch.load(folder / run / "checkpoint-2.pth.tar", weights_only=False) for run in ("whole", "resumed")
    )
    for part in ("state_dict", "state_dict_ema"):
        assert whole[part].keys() == resumed[part].keys()
        assert all(torch.equal(value, resumed[part][name]) for name, value in whole[part].items())
    timm.create_model("resnet10t", num_classes=2, checkpoint_path=str(folder / "whole" / "checkpoint-2.pth.tar"))
