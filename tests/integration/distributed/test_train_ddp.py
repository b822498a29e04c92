"""`examples/train_ddp.py`: DDP, FSDP2 and one process resume each other's checkpoints."""

from __future__ import annotations

import json
import re
import shlex
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

from tests.support.programs import ROOT, load, locked_folder
from tests.support.ranks import run_ranks

EXAMPLES = ROOT / "examples"
TINY = "--image-size 32 --epochs 3 --batch-size 96 --device cpu --regularizer 'DropBlock(p=0.2, block_size=3)' --layers layer2.0"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    pytest.importorskip("timm")
    pytest.importorskip("torchvision")
    pytest.importorskip("sklearn")
    return load(EXAMPLES / "train_ddp.py")


def in_one_process(example: ModuleType, *arguments: str) -> str:
    with redirect_stdout(StringIO()) as printed:
        example.main([*shlex.split(TINY), *arguments])
    return printed.getvalue()


@pytest.fixture(scope="module")
def three_runs(example: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """An epoch of DDP, an epoch of FSDP2 in bfloat16, both on two ranks, and an epoch in one process."""
    with locked_folder(tmp_path_factory, "train_ddp") as folder:
        if not (folder / "printed.json").exists():
            first, second, last = (
                [*shlex.split(f"{TINY} {more}"), "--out", str(folder / "out")]
                for more in ("--stop-after-epoch 1", "--fsdp --bf16 --resume --stop-after-epoch 2", "--resume")
            )
            printed = [run_ranks(EXAMPLES / "train_ddp.py", *arguments, ranks=2) for arguments in (first, second)]
            (folder / "printed.json").write_text(json.dumps([*printed, in_one_process(example, *last)]))
        return folder / "out", json.loads((folder / "printed.json").read_text())


def test_the_example_resumes_with_other_ranks_and_wrappers(three_runs: tuple[Path, list[str]]) -> None:
    _, printed = three_runs
    losses = []
    for i, text in enumerate(printed, start=1):
        assert text.count("1 site of ResNet") == 1, "only rank 0 prints"
        (line,) = [line for line in text.splitlines() if line.startswith("epoch ")]
        matched = re.match(r"epoch (\d): loss ([\d.]+), accuracy .*p=([\d.]+) of 0.2, step (\d+) of", line)
        assert matched, line
        assert (int(matched[1]), int(matched[4])) == (i, 13 * i)
        assert float(matched[3]) == pytest.approx(0.2 * i / 3, abs=1e-4)
        losses.append(float(matched[2]))
        assert (f"{i - 1} of 3 epochs completed" in text) is (i > 1)
    assert losses == sorted(losses, reverse=True)


def test_it_saves_plain_weights_and_one_checkpoint(example: ModuleType, three_runs: tuple[Path, list[str]]) -> None:
    out, printed = three_runs
    model = example.timm.create_model("test_resnet", num_classes=10)
    model.load_state_dict(torch.load(out / "model.pt", weights_only=True), strict=True)
    images = example.Digits(train=False, size=32)
    with torch.no_grad():
        right = model.eval()(torch.stack([images[i][0] for i in range(500)])).argmax(1) == images.labels
    assert f"accuracy {right.float().mean():.2%}" in printed[2]
    assert sorted(path.name for path in out.iterdir()) == ["epoch-0003", "model.pt"]
    assert re.search(r"measured on rank 0(.|\n)*eval output bit-identical", printed[2])


def test_a_resumed_run_ends_bit_equal(example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example.Digits, "__len__", lambda self: 64)
    whole, parts = (["--batch-size=16", f"--out={tmp_path / name}"] for name in ("whole", "parts"))
    for settings in (whole, [*parts, "--stop-after-epoch=2"], [*parts, "--resume"]):
        in_one_process(example, *settings)
    weights = [torch.load(tmp_path / name / "model.pt", weights_only=True) for name in ("whole", "parts")]
    torch.testing.assert_close(*weights, rtol=0, atol=0)
    with pytest.raises(SystemExit, match="already exists: continue it with --resume"):
        in_one_process(example, *whole)
    with pytest.raises(SystemExit, match="the checkpoint has different settings"):
        in_one_process(example, *whole, "--resume", "--lr=0.5")
    assert not dist.is_initialized()


def test_ranks_share_no_image(example: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each rank has equally many; otherwise the ranks of FSDP would deadlock. Batches must be divisible, too."""
    images = [(torch.zeros(1), 100 + i) for i in range(10)]
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    labels = []
    for rank in range(4):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        shard = example.Shard(images)
        assert len(shard) == 3
        labels += [shard[i][1] for i in range(3)]
    assert sorted(label for label in labels if label >= 0) == list(range(100, 110))
    with pytest.raises(SystemExit, match="--batch-size 30 is not divisible by 4 ranks"):
        example.run(example.parse_args(["--batch-size=30", "--out", str(tmp_path)]), torch.device("cpu"))
