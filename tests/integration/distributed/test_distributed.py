"""Several ranks: DDP, FSDP2, tensor parallelism, sharded checkpoints, and seeds.

The checks are in `programs/two_ranks.py`, which runs once; an error in a check fails all tests, with its traceback.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from hookdrop import AlphaDropout, DropBlock, LinearSchedule, NEFTune, Regularizer, ShapeError, StateError, find, inject
from tests.integration.distributed.programs.nets import Net, injected, output
from tests.integration.distributed.programs.two_ranks import CHECKS
from tests.support.programs import ROOT, locked_folder
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


@pytest.mark.parametrize("drop", [AlphaDropout(0.5), NEFTune(5.0)], ids=lambda drop: drop.title)
def test_a_partial_sum_raises_with_the_order_that_works(drop: Regularizer, tmp_path: Path) -> None:
    """One gloo process: before `parallelize_module`, the hook would get the terms of the sum."""
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
    drop = inject(net := Net(), DropBlock(0.4, 3), layers=["stem", "blocks.0.norm"], schedule=LinearSchedule(10))
    with pytest.raises(StateError):
        dcp.load({"drop": drop}, checkpoint_id=two_ranks[0] / "saved")
    assert (find(net).step_count, drop.target_p) == (0, 0.4)
