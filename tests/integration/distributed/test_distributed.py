"""Several ranks: DDP, FSDP2, tensor parallelism, sharded checkpoints, and seeds.

Each rank of a program in `tests/integration/distributed/programs/` writes its results to a file, which the tests here read.
"""

from __future__ import annotations

import json
import re
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

from hookdrop import (
    AlphaDropout,
    DropBlock,
    Dropout,
    Injection,
    LinearSchedule,
    NEFTune,
    Regularizer,
    ShapeError,
    StateError,
    find,
    inject,
    seed_per_rank,
)
from tests.integration.distributed.programs.nets import Net, output
from tests.support.programs import ROOT, locked_folder
from tests.support.ranks import run_ranks

PROGRAMS = ROOT / "tests" / "integration" / "distributed" / "programs"

Facts = dict[str, Any]
"""What one rank found in one check."""
Results = list[dict[str, Facts]]
"""What each rank found, by the name of the check."""


def run_program(folder: Path, program: str, *arguments: object, ranks: int) -> Results:
    """The results of a program; it runs once."""
    files = [folder / f"rank{rank}.json" for rank in range(ranks)]
    if not files[0].exists():
        run_ranks(PROGRAMS / f"{program}.py", folder, *arguments, ranks=ranks)
    return [json.loads(file.read_text()) for file in files]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Results]:
    with locked_folder(tmp_path_factory, "two_ranks") as folder:
        return folder, run_program(folder, "two_ranks", ranks=2)


@pytest.fixture(scope="module")
def results(two_ranks: tuple[Path, Results]) -> Results:
    return two_ranks[1]


def by_rank(results: Results, check: str) -> list[Facts]:
    return [of_rank[check] for of_rank in results]


# --- DDP and FSDP2

DDP = ["ddp default before", "ddp default after", "ddp find_unused_parameters before", "ddp static_graph after"]
FSDP = ["fsdp before reshard=True", "fsdp after reshard=False", "fsdp checkpointed"]
WRAPPED = pytest.mark.parametrize("how", [*DDP, *FSDP])


@WRAPPED
def test_gradients_equal_the_mean_over_unwrapped_models(results: Results, how: str) -> None:
    for facts in by_rank(results, how):
        assert len(facts["errors"]) == 3
        assert max(facts["errors"]) <= 1e-7
        assert facts["size"] > 1e-3


@WRAPPED
def test_a_branch_dropped_on_one_or_all_ranks_has_zero_gradients(results: Results, how: str) -> None:
    """DDP would wait for a gradient that is None."""
    first, second = by_rank(results, how)
    assert first["branch"] == second["branch"] == [0.0, 0.0]
    assert [True, False] in [
        sorted(pair, reverse=True) for pair in zip(first["dropped"], second["dropped"], strict=True)
    ]


@WRAPPED
def test_masks_differ_between_ranks_seeded_per_rank(results: Results, how: str) -> None:
    first, second = (facts["masks"] for facts in by_rank(results, how))
    times = 2 if "checkpointed" in how else 1  # forwards per step
    assert len(first) == len(second) == 3 * times
    assert first[0] == second[0]  # the schedule starts at rate 0
    assert not set(first[times:]) & set(second[times:])
    assert len(set(first)) == 3
    assert first[0::times] == first[times - 1 :: times]  # the recompute has the mask of its forward


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_dropped_layers_heads_and_subsets_need_no_find_unused_parameters(results: Results, how: str) -> None:
    """A layer is skipped on one rank, on both and on none; the gradients are the mean over unwrapped models."""
    first, second = by_rank(results, f"language model {how}")
    assert max(first["error"], second["error"]) <= 1e-6
    pairs = set(zip(first["skipped"], second["skipped"], strict=True))
    assert {(True, False), (False, True)} & pairs
    assert {(True, True), (False, False)} & pairs


def test_penalties_are_part_of_the_loss_of_each_rank(tmp_path: Path) -> None:
    """The gradients are the mean over models without hooks, with the penalty by hand; also with sharded activations."""
    for facts in run_program(tmp_path, "penalties", ranks=2):
        assert len(facts) == 6
        assert max(facts.values()) <= 1e-6


def test_branches_are_skipped_on_all_ranks_together(results: Results) -> None:
    """With one seed per step, also if ranks have batches of different sizes and checkpoints recompute."""
    ranks = by_rank(results, "branches")
    assert ranks[0]["own"] != ranks[1]["own"]
    same = ranks[0]["same"]
    assert same == ranks[1]["same"]
    steps = [tuple(same[i : i + 6]) for i in range(0, len(same), 6)]
    assert all(step[:3] == step[3:] for step in steps)  # forward and recompute
    assert len(set(steps)) > 3
    assert not any(rank["problems"] for rank in ranks)


@WRAPPED
def test_schedules_and_weights_agree_on_all_ranks(results: Results, how: str) -> None:
    first, second = by_rank(results, how)
    assert (first["step"], first["p"]) == (second["step"], second["p"]) == (3, pytest.approx(0.3))
    assert first["weights"] == second["weights"]
    for facts in (first, second):
        assert facts["found"] == ["always", "sometimes", "dropblock"]
        assert facts["check"] == facts["warnings"] == []


@pytest.mark.parametrize("when", ["before", "after"])
def test_fsdp_preserves_tensor_types(results: Results, when: str) -> None:
    """Under mixed precision; `fully_shard` changes the class of each hooked module."""
    for facts in by_rank(results, f"bfloat16 {when}"):
        ((given, returned),) = facts["pairs"]
        assert given == returned
        assert given.startswith("('Tensor', 'torch.bfloat16'")
        assert facts["classes"] == ["FSDPBlock", "Conv2d"]
        assert (facts["step"], facts["asked"]) == (2, pytest.approx(0.3))
        # 13,824 elements in blocks of 9, three forwards: the standard deviation is about .007.
        assert facts["dropped"] == pytest.approx(0.3, abs=0.03)


def test_hooks_placed_on_the_meta_device_work_after_to_empty(results: Results) -> None:
    for facts in by_rank(results, "meta"):
        assert facts["dropped"] == pytest.approx(0.4, abs=0.03)
        assert facts["check"] == []


@pytest.mark.parametrize("how", ["DistributedDataParallel fused=True", "fully_shard fused=False"])
def test_a_step_skipped_for_an_overflow_on_one_rank_counts_on_no_rank(results: Results, how: str) -> None:
    """Two accumulated batches count once, then the overflow, then one more."""
    for facts in by_rank(results, f"scaler {how}"):
        assert facts["counts"] == [1, 1, 2]
        assert facts["p"] == pytest.approx(0.08)
        assert facts["scale"] == 2.0  # halved by the overflow
        assert facts["warnings"] == []


def test_follow_counts_the_steps_of_a_sharded_optimizer(results: Results) -> None:
    for facts in by_rank(results, "zero"):
        assert (facts["step"], facts["p"]) == (3, pytest.approx(0.12))
        assert facts["warnings"] == []


def test_a_schedule_that_is_not_advancing_warns_under_fsdp(results: Results) -> None:
    """Under FSDP2, forwards do not show weight updates; optimizer steps do."""
    for facts in by_rank(results, "not advancing"):
        (warning,) = facts["before"]
        assert "its schedule is not advancing" in warning
        assert any("its schedule is not advancing" in problem for problem in facts["problems"])


def test_compiled_ddp_drops_at_the_rates_of_the_schedule(results: Results) -> None:
    first, second = by_rank(results, "compiled")
    for facts in (first, second):
        # 25,600 elements in blocks of 9: the standard deviation is about .008.
        assert facts["dropped"] == pytest.approx([0.0, 0.2, 0.4, 0.4], abs=0.04)
        assert facts["step"] == 4
    assert not set(first["masks"][1:]) & set(second["masks"][1:])
    assert first["weights"] == second["weights"]


# --- tensor parallelism


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("name", ["Dropout", "Dropout1d", "DropPath", "GaussianNoise", "AlphaDropout"])
def test_a_dtensor_stays_a_dtensor(results: Results, name: str, local: bool) -> None:
    for facts in by_rank(results, "tensor parallel"):
        facts = facts[f"{name} {local}"]
        given, returned = facts["kinds"]
        assert given == returned
        assert given[:2] == (["Tensor", ""] if local else ["DTensor", "(Shard(dim=2),)"])
        assert facts["changed"] > 0.99
        # 32 samples: the standard deviation for DropPath is .09.
        assert facts["zeroed"] == pytest.approx(0.5 if name in ("Dropout", "Dropout1d", "DropPath") else 0.0, abs=0.2)
        assert facts["gradient"] > 0


@pytest.mark.parametrize("drop", [Dropout(0.5), AlphaDropout(0.5), NEFTune(5.0)], ids=lambda drop: drop.title)
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


def test_probe_counts_all_shards_of_a_dtensor(results: Results) -> None:
    """On each rank, a sum over a DTensor is a partial sum."""
    for facts in by_rank(results, "tensor parallel"):
        # 192 channels in three forwards: the standard deviation is .02.
        assert facts["Dropout1d False"]["dropped"] == pytest.approx(0.5, abs=0.1)
        assert facts["Dropout1d False"]["mean ratio"] == pytest.approx(1.0, abs=0.2)


def test_dropblock_accepts_local_tensors_and_rejects_dtensors(results: Results) -> None:
    for facts in by_rank(results, "tensor parallel"):
        assert facts["DropBlock True"]["zeroed"] == pytest.approx(0.4, abs=0.1)
        assert "x is a DTensor, sharded over several ranks" in facts["DropBlock False"]["error"]
        assert "DropBlock at '0'" in facts["DropBlock False"]["error"]


# --- seeds


def test_each_rank_of_a_job_gets_its_own_seed(results: Results) -> None:
    first, second = by_rank(results, "seeds")
    for rank, facts in enumerate((first, second)):
        assert facts["seed"] == facts["again"] == seed_per_rank(5, rank=rank)
        assert facts["next"] == seed_per_rank(6, rank=rank)
        assert facts["rank"] == second["seed"]
    assert first["mask"] != second["mask"]


# --- equal seeds


def test_check_finds_equal_seeds_without_waiting(results: Results) -> None:
    first, second = by_rank(results, "check")
    assert first["alone"] == second["alone"] == []  # rank 1 checks before rank 0 has announced its seed
    (text,) = first["after"]
    assert re.search(r"ranks 0 and 1 draw identical masks.* seeded with 11\.\n.*hookdrop\.seed_per_rank\(\)", text)
    assert first["both"] == second["both"] == [text]
    assert first["seeded"] == second["seeded"] == []


def test_each_rank_warns_once_about_equal_seeds(results: Results) -> None:
    ranks = by_rank(results, "warns once")
    for facts in ranks:
        (warning,) = facts["during"] + [[99, text] for text in facts["later"]]
        assert "ranks 0 and 1 draw identical masks" in warning[1]
        assert facts["before"] == []
        assert facts["warnings"] == []
    # The rank that is second to reach the tenth step knows both seeds.
    assert min(facts["during"][0][0] for facts in ranks if facts["during"]) == 10


def test_a_group_declares_that_equal_seeds_are_intended(results: Results) -> None:
    """A rank does not: `rank=LOCAL_RANK` on two machines is a mistake."""
    for facts in by_rank(results, "equal seeds intended"):
        assert facts["group"] == {"seed": seed_per_rank(3, rank=0), "problems": []}
        assert facts["rank"]["seed"] == facts["group"]["seed"]
        assert len(facts["rank"]["problems"]) == 1
        assert "not in `group`; nothing was seeded" in facts["not a member"]


# --- checkpoints


@pytest.fixture(scope="module")
def three_ranks(two_ranks: tuple[Path, Results], tmp_path_factory: pytest.TempPathFactory) -> Results:
    with locked_folder(tmp_path_factory, "resumed") as folder:
        return run_program(folder, "resumed", two_ranks[0], ranks=3)


def test_a_checkpoint_of_two_ranks_resumes_on_three(results: Results, three_ranks: Results) -> None:
    before, _ = by_rank(results, "saved")
    assert before["keys"] == []  # the state of the model contains nothing of hookdrop
    for facts in by_rank(three_ranks, "resumed"):
        assert facts["ranks"] == 3
        assert facts["output"] == pytest.approx(before["output"], abs=1e-6)
        assert facts["loaded"] == [5, pytest.approx(0.1), 0.2]
        assert facts["trained"] == [7, pytest.approx(0.14)]
        assert facts["nested"] == facts["own"]
        assert facts["check"] == facts["warnings"] == []


WITHOUT_PROCESS_GROUP = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")


def injected_net() -> tuple[Net, Injection]:
    net = Net()
    return net, inject(net, DropBlock(0.4, 3), layers="blocks.*.norm", schedule=LinearSchedule(10))


@WITHOUT_PROCESS_GROUP
def test_a_checkpoint_of_two_ranks_resumes_in_one_process(two_ranks: tuple[Path, Results]) -> None:
    """A checkpoint of a sharded model, loaded into an unwrapped one."""
    folder, results = two_ranks
    net, drop = injected_net()
    weights = net.state_dict()
    dcp.load({"model": weights, "drop": drop}, checkpoint_id=folder / "saved")
    net.load_state_dict(weights)
    assert output(net) == pytest.approx(by_rank(results, "saved")[0]["output"], abs=1e-6)
    assert (drop.step_count, drop.p, drop.target_p) == (5, pytest.approx(0.1), 0.2)
    drop.step(5)
    assert drop.p == 0.2


@WITHOUT_PROCESS_GROUP
def test_asynchronous_saves_and_conversions_keep_the_state(two_ranks: tuple[Path, Results], tmp_path: Path) -> None:
    folder, _ = two_ranks
    dcp_to_torch_save(folder / "saved", tmp_path / "whole.pt")
    net, drop = injected_net()
    dcp.load({"all": find(net), "drop": drop}, checkpoint_id=folder / "async")
    assert (drop.step_count, drop.target_p) == (5, 0.2)
    net, drop = injected_net()
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    net.load_state_dict(whole["model"])
    drop.load_state_dict(whole["drop"])
    assert (drop.step_count, drop.target_p) == (5, 0.2)


@WITHOUT_PROCESS_GROUP
def test_a_checkpoint_of_other_sites_raises_and_changes_nothing(two_ranks: tuple[Path, Results]) -> None:
    net = Net()
    drop = inject(net, DropBlock(0.4, 3), layers=["stem", "blocks.0.norm"], schedule=LinearSchedule(10))
    with pytest.raises(
        StateError, match=r"only in the state: 'blocks\.1\.norm'(.|\n)*'blocks\.2\.norm'(.|\n)*only here: +'stem'"
    ):
        dcp.load({"drop": drop}, checkpoint_id=two_ranks[0] / "saved")
    assert (drop.step_count, drop.target_p) == (0, 0.4)
