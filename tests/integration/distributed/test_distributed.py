"""Several ranks: DDP, FSDP2, tensor parallelism, sharded checkpoints, and seeds.

The checks are in `programs/two_ranks.py`, which runs once; an error in a check fails all tests, with its traceback.
"""

import json
import re
import shlex
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from hookdrop import DropBlock, LinearSchedule, NEFTune, ShapeError, StateError, find, inject
from tests.integration.distributed.programs.nets import injected, make_net, output
from tests.integration.distributed.programs.two_ranks import CHECKS
from tests.support.programs import ROOT, load, locked_folder
from tests.support.ranks import run_ranks

PROGRAMS = ROOT / "tests" / "integration" / "distributed" / "programs"
Results = list[dict[str, tuple[Any, list[str]]]]
"""What each check returns and warns of, for each rank."""


def run_program(folder: Path, program: str, *arguments: object, ranks: int) -> Results:
    files = [folder / f"rank{rank}.json" for rank in range(ranks)]
    if not files[0].exists():
        run_ranks(PROGRAMS / f"{program}.py", folder, *arguments, ranks=ranks)
    return [json.loads(file.read_text()) for file in files]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Results]:
    with locked_folder(tmp_path_factory, "two_ranks") as folder:
        return folder, run_program(folder, "two_ranks", ranks=2)


@pytest.mark.parametrize("check", CHECKS)
def test_two_ranks(two_ranks: tuple[Path, Results], check: str) -> None:
    for results in two_ranks[1]:
        assert results[check][1] == []


def test_a_partial_sum_raises_with_the_order_that_works(tmp_path: Path) -> None:
    """One gloo process: before `parallelize_module`, the hook would get the terms of the sum."""
    drop = NEFTune(5.0)
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        net, mesh, plan = nn.Sequential(nn.Linear(8, 8)), init_device_mesh("cpu", (1,)), {"0": RowwiseParallel()}
        with inject(net, drop, layers="0"):
            parallelize_module(net, mesh, plan)
            with pytest.raises(ShapeError, match=r"Partial(.|\n)*inject after parallelize_module"):
                net(torch.rand(4, 6, 8))
        inject(net, drop, layers="0")
        net(torch.rand(4, 6, 8)).sum().backward()
    finally:
        dist.destroy_process_group()


def test_a_checkpoint_of_two_ranks_resumes_on_three(two_ranks: tuple[Path, Results], tmp_path: Path) -> None:
    for results in run_program(tmp_path, "resumed", two_ranks[0], ranks=3):
        assert results["resumed"] == [pytest.approx(two_ranks[1][0]["saved"][0], abs=1e-6), []]


WITHOUT_PROCESS_GROUP = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")


@WITHOUT_PROCESS_GROUP
def test_a_checkpoint_of_two_ranks_resumes_in_one_process(two_ranks: tuple[Path, Results]) -> None:
    """A checkpoint of a sharded model, loaded into an unwrapped one."""
    folder, results = two_ranks
    net, drop = injected()
    weights = net.state_dict()
    dcp.load({"model": weights, "drop": drop}, checkpoint_id=folder / "saved")
    net.load_state_dict(weights)
    assert output(net) == pytest.approx(results[0]["saved"][0], abs=1e-6)
    assert (drop.step_count, drop.p, drop.target_p) == (5, pytest.approx(0.1), 0.2)
    drop.step(5)
    assert drop.p == 0.2


@WITHOUT_PROCESS_GROUP
def test_asynchronous_saves_and_conversions_keep_the_state(two_ranks: tuple[Path, Results], tmp_path: Path) -> None:
    dcp_to_torch_save(two_ranks[0] / "saved", tmp_path / "whole.pt")
    (net, drop), (_, other) = injected(), injected()
    dcp.load({"all": find(net), "drop": drop}, checkpoint_id=two_ranks[0] / "async")
    other.load_state_dict(torch.load(tmp_path / "whole.pt", weights_only=True)["drop"])
    assert (drop.step_count, drop.target_p) == (other.step_count, other.target_p) == (5, 0.2)


@WITHOUT_PROCESS_GROUP
def test_a_checkpoint_of_other_sites_raises_and_changes_nothing(two_ranks: tuple[Path, Results]) -> None:
    drop = inject(net := make_net(), DropBlock(0.4, 3), layers=["stem", "blocks.0.norm"], schedule=LinearSchedule(10))
    with pytest.raises(StateError):
        dcp.load({"drop": drop}, checkpoint_id=two_ranks[0] / "saved")
    assert (find(net).step_count, drop.target_p) == (0, 0.4)


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
