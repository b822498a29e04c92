"""Each line of the pages "I want to ..." and "Coming from" runs, and its hooks drop in a training step of the model."""

import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import hookdrop
from hookdrop import find
from hookdrop.survey.isolation import call
from tests.integration.models.test_dropblock import UNet
from tests.support.code_blocks import blocks_of
from tests.support.models import toy
from tests.support.programs import ROOT
from tests.support.transformers_models import SPEECH, bert, llama, whisper

PAGE = ROOT / "docs" / "start" / "goals.md"
ROWS = re.findall(r"^\| (\[.+\]\(.+\)) \| `([^`]+)` \|$", PAGE.read_text(), re.M)
COMING_FROM = (ROOT / "docs" / "start" / "coming_from.md").read_text()
LINES = re.findall(r"^\| .+ \| `([^`]+)` \|$", COMING_FROM, re.M)
INPUTS = {
    **dict.fromkeys(["model", "vit", "tv_vit", "unet"], "images"), **dict.fromkeys(["rnn", "conv1d"], "sequences"),
    **dict.fromkeys(["lstm", "llm", "lora", "bert"], "tokens"), "whisper": "speech",
}  # fmt: skip


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """What the lines name."""
    timm, torchvision, peft = map(pytest.importorskip, ("timm", "torchvision", "peft"))
    torch.manual_seed(0)
    small = {"channels": (8, 8, 16, 16), "stem_width": 8, "num_classes": 10}
    model, ema = (timm.create_model("resnet18", **small) for _ in range(2))
    vit = timm.create_model("test_vit", img_size=256, num_classes=10, proj_drop_rate=0.1)
    detector = torchvision.models.detection.fasterrcnn_mobilenet_v3_large_320_fpn
    with warnings.catch_warnings(action="ignore"):
        lora = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"]))
    other = nn.Sequential(nn.Linear(8, 8))
    drop = hookdrop.inject(other, hookdrop.Dropout(p=0.1), layers="0", name="kept")
    parts = {"embed": nn.Embedding(99, 16), "lstm": nn.LSTM(16, 16, batch_first=True), "head": nn.Linear(16, 99)}
    found: dict[str, Any] = {
        "model": model,
        "ema": ema,
        "vit": vit,
        "unet": UNet(),
        "detector": detector(weights=None, weights_backbone=None, num_classes=3),
        "lstm": toy(lambda m, tokens: m.head(m.lstm(m.embed(tokens))[0]), **parts),
        "llm": llama(),
        "lora": lora,
        "bert": bert(),
        "whisper": whisper(),
        "tv_vit": torchvision.models.VisionTransformer(256, 64, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=16),
        "rnn": nn.Sequential(nn.LSTM(8, 8, batch_first=True)),
        "conv1d": nn.Sequential(nn.Conv1d(5, 8, 3), nn.SELU()),
        "functional": hookdrop.functional,
        "x": torch.randn(2, 3, 16, 16),
        "sequences": torch.randn(2, 5, 8),
        "images": torch.randn(4, 3, 256, 256),
        "tokens": torch.randint(5, 90, (4, 7)),
        "speech": SPEECH,
        "optimizer": torch.optim.SGD([*model.parameters(), *vit.parameters()], 0.1),
        "loader": [torch.randn(2, 3, 64, 64)],
        "other": other,
        "drop": drop,
        "checkpoint": {"drop": drop.state_dict()},
    }
    for block in blocks_of(PAGE):
        exec(block.text, found)
    return found


@pytest.mark.parametrize("line", [*(line for _, line in ROWS), *LINES])
def test_the_line_runs(names: dict[str, Any], line: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if "drop.probe" in line:
        line = line.replace("images", "torch.randn(4, 8)")  # what the model of this handle takes
    torch.manual_seed(0)
    models = [one for one in names.values() if isinstance(one, nn.Module) and one is not names["other"]]
    try:
        exec(line, dict(names))
        for name, kind in INPUTS.items():
            if drop := find(names[name]):
                call(names[name].train(), names[kind])
                assert not [problem for problem in drop.check() if "schedule" not in problem]
        assert any(map(find, models)) or not line.startswith("inject(")
    finally:
        for model in models:
            find(model).remove()
            model.train()


def test_every_row_has_a_line_and_a_page() -> None:
    assert len(ROWS) == len(re.findall(r"^\| (?!goal|-)", PAGE.read_text(), re.M)) >= 25
    assert len(LINES) == len(re.findall(r"^\| (?!there|--).*", COMING_FROM, re.M)) > 30
