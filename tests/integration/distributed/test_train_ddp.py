"""`examples/train_ddp.py`: DDP, FSDP2 and one process resume each other's checkpoints."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

from tests.support.programs import ROOT, load, locked_folder, run_python

EXAMPLES = ROOT / "examples"
TINY = "--image-size 32 --epochs 3 --batch-size 96 --device cpu --regularizer 'DropBlock(p=0.2, block_size=3)' --layers layer2.0"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    pytest.importorskip("timm")
    pytest.importorskip("torchvision")
    pytest.importorskip("sklearn")
    return load(EXAMPLES / "train_ddp.py")


@pytest.fixture(scope="module")
def three_runs(example: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """An epoch of DDP on two ranks, an epoch of FSDP2 in bfloat16 on two, and an epoch in one process."""
    runs = [(2, "--stop-after-epoch 1"), (2, "--fsdp --bf16 --resume --stop-after-epoch 2"), (0, "--resume")]
    with locked_folder(tmp_path_factory, "train_ddp") as folder:
        for i, (ranks, more) in enumerate(runs):
            if not (folder / f"{i}.txt").exists():
                arguments = shlex.split(f"{TINY} {more} --out {folder / 'out'}")
                (folder / f"{i}.txt").write_text(run_python(EXAMPLES / "train_ddp.py", *arguments, ranks=ranks))
        return folder / "out", [(folder / f"{i}.txt").read_text() for i in range(3)]


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


def test_the_example_saves_plain_weights_and_one_checkpoint(
    example: ModuleType, three_runs: tuple[Path, list[str]]
) -> None:
    out, printed = three_runs
    model = example.timm.create_model("test_resnet", num_classes=10)
    model.load_state_dict(torch.load(out / "model.pt", weights_only=True), strict=True)
    images = example.Digits(train=False, size=32)
    with torch.no_grad():
        right = model.eval()(torch.stack([images[i][0] for i in range(500)])).argmax(1) == images.labels
    assert f"accuracy {right.float().mean():.2%}" in printed[2]
    assert sorted(path.name for path in out.iterdir()) == ["epoch-0003", "model.pt"]
    assert re.search(r"measured on rank 0(.|\n)*eval output bit-identical", printed[2])


@pytest.fixture
def few_digits(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    class Few(example.Digits):
        def __len__(self) -> int:
            return 64

    monkeypatch.setattr(example, "Digits", Few)
    monkeypatch.delenv("RANK", raising=False)


def in_one_process(example: ModuleType, out: Path, more: str = "") -> None:
    example.main([*shlex.split(f"{TINY} --batch-size 16 {more}"), "--out", str(out)])


@pytest.mark.usefixtures("few_digits")
def test_a_resumed_run_of_the_example_ends_bit_equal(example: ModuleType, tmp_path: Path) -> None:
    in_one_process(example, tmp_path / "whole")
    in_one_process(example, tmp_path / "parts", "--stop-after-epoch 2")
    in_one_process(example, tmp_path / "parts", "--resume")
    whole, parts = (torch.load(tmp_path / name / "model.pt", weights_only=True) for name in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    with pytest.raises(SystemExit, match="already exists: continue it with --resume"):
        in_one_process(example, tmp_path / "whole")
    with pytest.raises(SystemExit, match="the checkpoint has different settings"):
        in_one_process(example, tmp_path / "whole", "--resume --lr 0.5")
    assert not dist.is_initialized()


def test_ranks_split_the_validation_images_without_duplicates(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank has equally many; otherwise the ranks of FSDP would deadlock."""
    images = [(torch.zeros(1), 100 + i) for i in range(10)]
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    labels = []
    for rank in range(4):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        shard = example.Shard(images)
        assert len(shard) == 3
        labels += [shard[i][1] for i in range(3)]
    assert sorted(label for label in labels if label >= 0) == list(range(100, 110))


def test_a_batch_size_not_divisible_by_the_ranks_raises(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    with pytest.raises(SystemExit, match="--batch-size 32 is not divisible by 3 ranks"):
        example.run(example.parse_args(["--out", str(tmp_path)]), torch.device("cpu"))
