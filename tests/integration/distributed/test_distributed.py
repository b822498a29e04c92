"""Several ranks: DDP, FSDP2, tensor parallelism, sharded checkpoints, seeds, and the example that uses them.

What needs more than one rank runs in programs of their own (`tests/integration/distributed/programs/`), started by torchrun as a person
would; each rank writes down what it found, and the tests here read it.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.testing._internal.distributed.fake_pg import FakeStore

from hookdrop import (
    DropBlock,
    Dropout,
    HookdropWarning,
    Injection,
    LinearSchedule,
    StateError,
    find,
    inject,
    seed_per_rank,
)
from hookdrop.diagnostics import rank_seeds
from tests.integration.distributed.programs.nets import Net, output
from tests.support.nets import Small
from tests.support.paths import ROOT

PROGRAMS = ROOT / "tests" / "integration" / "distributed" / "programs"


EXAMPLES = ROOT / "examples"


Facts = dict[str, Any]


def python(*arguments: object, ranks: int = 0) -> str:
    """What a program prints, under torchrun on so many ranks; an assertion with its traceback, if it fails."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
    command = [sys.executable, *launcher, *map(str, arguments)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@contextmanager
def shared(factory: pytest.TempPathFactory, name: str) -> Iterator[Path]:
    """A folder that pytest-xdist's workers have in common, for one of them at a time."""
    root = factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    (root / name).mkdir(exist_ok=True)
    with open(root / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield root / name


def ran(folder: Path, program: str, *arguments: object, ranks: int) -> list[dict[str, Facts]]:
    """What each rank found."""
    files = [folder / f"rank{rank}.json" for rank in range(ranks)]
    if not files[0].exists():
        python(PROGRAMS / f"{program}.py", folder, *arguments, ranks=ranks)
    return [json.loads(file.read_text()) for file in files]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Facts]]]:
    with shared(tmp_path_factory, "two_ranks") as folder:
        return folder, ran(folder, "two_ranks", ranks=2)


@pytest.fixture(scope="module")
def found(saved: tuple[Path, list[dict[str, Facts]]]) -> list[dict[str, Facts]]:
    """What each of two ranks found, by the name of the check."""
    return saved[1]


def of(found: list[dict[str, Facts]], check: str) -> list[Facts]:
    return [by_rank[check] for by_rank in found]


# --- DDP and FSDP2

DDP = [
    f"ddp {kind} {when}"
    for kind in ("default", "find_unused_parameters", "static_graph")
    for when in ("before", "after")
]


FSDP = [f"fsdp {when} reshard={reshard}" for when in ("before", "after") for reshard in (True, False)]


WRAPPED = pytest.mark.parametrize("how", [*DDP, *FSDP, "fsdp checkpointed"])


@WRAPPED
def test_gradients_are_the_mean_of_those_of_unwrapped_models(found: list[dict[str, Facts]], how: str) -> None:
    for facts in of(found, how):
        assert len(facts["errors"]) == 3
        assert max(facts["errors"]) <= 1e-7
        assert facts["size"] > 1e-3


@WRAPPED
def test_a_branch_that_is_dropped_on_all_ranks_or_on_one_alone_keeps_its_gradients(
    found: list[dict[str, Facts]], how: str
) -> None:
    """They are zeros: without any, DDP would wait for them."""
    first, second = of(found, how)
    assert first["branch"] == second["branch"] == [0.0, 0.0]
    assert [True, False] in [
        sorted(pair, reverse=True) for pair in zip(first["dropped"], second["dropped"], strict=True)
    ]


@WRAPPED
def test_masks_differ_between_ranks_seeded_per_rank(found: list[dict[str, Facts]], how: str) -> None:
    first, second = (facts["masks"] for facts in of(found, how))
    times = 2 if "checkpointed" in how else 1  # forwards a step
    assert len(first) == len(second) == 3 * times
    assert first[0] == second[0]  # the schedule starts at rate 0
    assert not set(first[times:]) & set(second[times:])
    assert len(set(first)) == 3


def test_a_checkpointed_block_under_fsdp_draws_its_mask_again(found: list[dict[str, Facts]]) -> None:
    for facts in of(found, "fsdp checkpointed"):
        assert facts["masks"][0::2] == facts["masks"][1::2]


@WRAPPED
def test_schedules_and_weights_agree_on_all_ranks(found: list[dict[str, Facts]], how: str) -> None:
    first, second = of(found, how)
    assert (first["step"], first["p"]) == (second["step"], second["p"]) == (3, pytest.approx(0.3))
    assert first["weights"] == second["weights"]
    for facts in (first, second):
        assert facts["found"] == ["always", "sometimes", "dropblock"]
        assert facts["check"] == facts["warnings"] == []


@pytest.mark.parametrize("when", ["before", "after"])
def test_fsdp_keeps_the_type_of_tensors(found: list[dict[str, Facts]], when: str) -> None:
    """Under a policy of mixed precision; `fully_shard` has made a class of its own for each hooked module."""
    for facts in of(found, f"bfloat16 {when}"):
        ((given, returned),) = facts["pairs"]
        assert given == returned
        assert given.startswith("('Tensor', 'torch.bfloat16'")
        assert facts["classes"] == ["FSDPBlock", "Conv2d"]
        assert (facts["step"], facts["asked"]) == (2, pytest.approx(0.3))
        # 13,824 elements in blocks of 9, three forwards: the standard deviation is about .007.
        assert facts["dropped"] == pytest.approx(0.3, abs=0.03)


def test_hooks_placed_on_the_meta_device_work_once_there_is_memory(found: list[dict[str, Facts]]) -> None:
    for facts in of(found, "meta"):
        assert facts["dropped"] == pytest.approx(0.4, abs=0.03)
        assert facts["check"] == []


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("how", ["DistributedDataParallel", "fully_shard"])
def test_a_step_that_is_skipped_for_an_overflow_on_one_rank_counts_on_none(
    found: list[dict[str, Facts]], how: str, fused: bool
) -> None:
    """Two accumulated batches count once, then the overflow, then one more."""
    for facts in of(found, f"scaler {how} fused={fused}"):
        assert facts["counts"] == [1, 1, 2]
        assert facts["p"] == pytest.approx(0.08)
        assert facts["scale"] == 2.0  # it was 4: there was an overflow
        assert facts["warnings"] == []


def test_a_sharded_optimizer_is_followed(found: list[dict[str, Facts]]) -> None:
    for facts in of(found, "zero"):
        assert (facts["step"], facts["p"]) == (3, pytest.approx(0.12))
        assert facts["warnings"] == []


def test_a_schedule_that_nobody_drives_is_told_under_fsdp(found: list[dict[str, Facts]]) -> None:
    """PyTorch does not show in a forward there that weights were updated: the optimizer's steps do."""
    for facts in of(found, "undriven"):
        (told,) = facts["before"]
        assert "its schedule is not advancing" in told
        assert any("its schedule is not advancing" in problem for problem in facts["problems"])


def test_compiled_ddp_drops_at_the_rates_of_the_schedule(found: list[dict[str, Facts]]) -> None:
    first, second = of(found, "compiled")
    for facts in (first, second):
        # 25,600 elements in blocks of 9: the standard deviation is about .008.
        assert facts["dropped"] == pytest.approx([0.0, 0.2, 0.4, 0.4], abs=0.04)
        assert facts["step"] == 4
    assert not set(first["masks"][1:]) & set(second["masks"][1:])
    assert first["weights"] == second["weights"]


# --- tensor parallelism


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize(
    "name", ["Dropout", "Dropout1d", "DropPath", "GaussianDropout", "GaussianNoise", "AlphaDropout"]
)
def test_a_distributed_tensor_stays_one(found: list[dict[str, Facts]], name: str, local: bool) -> None:
    for facts in of(found, "tensor parallel"):
        facts = facts[f"{name} {local}"]
        given, returned = facts["kinds"]
        assert given == returned
        assert given[:2] == (["Tensor", ""] if local else ["DTensor", "(Shard(dim=2),)"])
        assert facts["changed"] > 0.99
        # 32 samples: the standard deviation for DropPath is .09.
        assert facts["zeroed"] == pytest.approx(0.5 if name in ("Dropout", "Dropout1d", "DropPath") else 0.0, abs=0.2)
        assert facts["gradient"] > 0


@pytest.mark.parametrize("name", ["Dropout", "Dropout1d"])
def test_what_is_dropped_of_a_distributed_tensor_is_counted_on_all_ranks(
    found: list[dict[str, Facts]], name: str
) -> None:
    """A sum over it is a part of the sum on each rank."""
    for facts in of(found, "tensor parallel"):
        # 192 channels in three forwards: the standard deviation is .02.
        assert facts[f"{name} False"]["dropped"] == pytest.approx(0.5, abs=0.1)
        assert facts[f"{name} False"]["mean ratio"] == pytest.approx(1.0, abs=0.2)


def test_dropblock_works_on_local_tensors_and_refuses_distributed_ones(found: list[dict[str, Facts]]) -> None:
    for facts in of(found, "tensor parallel"):
        assert facts["DropBlock True"]["zeroed"] == pytest.approx(0.4, abs=0.1)
        assert "x is a DTensor, in parts on several ranks" in facts["DropBlock False"]["error"]
        assert "DropBlock at '0'" in facts["DropBlock False"]["error"]


# --- seeds


@pytest.fixture
def unseeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(rank_seeds, "_last", None)


def test_no_two_ranks_of_neighbouring_jobs_share_a_seed() -> None:
    """As `seed + rank` would: a generator of the CPU is seeded with the lowest 32 bits."""
    seeds = {seed_per_rank(seed, rank=rank) % 2**32 for seed in range(-4, 16) for rank in range(32)}
    assert len(seeds) == 20 * 32


def test_the_seed_of_a_rank_is_the_same_tomorrow() -> None:
    assert [seed_per_rank(0, rank=rank) for rank in (0, 1)] == [9077812382499248585, 6507704258292572590]
    assert seed_per_rank(-1, rank=0) == seed_per_rank(2**64 - 1, rank=0)  # one seed for torch.manual_seed, too


def test_it_seeds_pytorch_and_nothing_else(unseeded: None) -> None:
    before = random.getstate(), np.random.get_state()[1].tolist()
    seed = seed_per_rank(3)
    first = torch.rand(3)
    torch.manual_seed(seed)
    assert torch.equal(torch.rand(3), first)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    assert 0 <= seed < 2**63


def test_without_a_seed_it_is_that_of_manual_seed(unseeded: None) -> None:
    torch.manual_seed(3)
    torch.rand(5)
    assert seed_per_rank() == seed_per_rank(3)


def test_a_cell_that_is_run_twice_seeds_the_same_again(unseeded: None) -> None:
    torch.manual_seed(3)
    seed = seed_per_rank()
    torch.rand(5)
    assert seed_per_rank() == seed == torch.initial_seed()
    assert seed_per_rank(rank=1) == seed_per_rank(3, rank=1)
    torch.manual_seed(4)
    assert seed_per_rank() == seed_per_rank(4) != seed


def test_the_rank_is_that_of_torchrun_before_the_ranks_have_met(
    unseeded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = seed_per_rank(3)
    monkeypatch.setenv("RANK", "1")
    assert seed_per_rank(3) == seed_per_rank(3, rank=1) != alone == seed_per_rank(3, rank=0)
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(ValueError, match=r"RANK='first' is not a rank; nothing was seeded"):
        seed_per_rank(3)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"seed": 0.5}, TypeError, "seed must be an integer, got 0.5"),
        ({"seed": 0, "rank": -1}, ValueError, "rank must be at least 0, got -1"),
        ({"seed": 0, "rank": 0, "group": object()}, ValueError, "pass rank or group, not both"),
    ],
)
def test_what_can_not_be_a_seed_seeds_nothing(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    before = torch.get_rng_state()
    with pytest.raises(error, match=re.escape(text)):
        seed_per_rank(**arguments)
    assert torch.equal(torch.get_rng_state(), before)


def test_each_rank_of_a_job_has_the_seed_of_its_rank(found: list[dict[str, Facts]]) -> None:
    first, second = of(found, "seeds")
    for rank, facts in enumerate((first, second)):
        assert facts["seed"] == facts["again"] == seed_per_rank(5, rank=rank)
        assert facts["next"] == seed_per_rank(6, rank=rank)
        assert facts["rank"] == second["seed"]
    assert first["mask"] != second["mask"]


# --- noticing equal seeds


def test_check_finds_equal_seeds_and_waits_for_nobody(found: list[dict[str, Facts]]) -> None:
    first, second = of(found, "check")
    assert first["alone"] == second["alone"] == []  # rank 1 asked while rank 0 had said nothing
    (text,) = first["after"]
    assert re.search(r"ranks 0 and 1 draw equal masks.* seeded with 11\.\n.*hookdrop\.seed_per_rank\(\)", text)
    assert first["both"] == second["both"] == [text]
    assert first["seeded"] == second["seeded"] == []


def test_equal_seeds_are_told_once_by_each_rank_after_a_few_steps(found: list[dict[str, Facts]]) -> None:
    ranks = of(found, "told once")
    for facts in ranks:
        (told,) = facts["told"] + [[99, text] for text in facts["later"]]
        assert "ranks 0 and 1 draw equal masks" in told[1]
        assert facts["before"] == []
        assert facts["warnings"] == []
    # Who comes second to the tenth step knows of both.
    assert min(facts["told"][0][0] for facts in ranks if facts["told"]) == 10


def test_ranks_that_work_on_the_same_samples_say_so_with_a_group(found: list[dict[str, Facts]]) -> None:
    """And not with a rank: `rank=LOCAL_RANK` on two machines would be a mistake."""
    for facts in of(found, "wanted"):
        assert facts["group"] == {"seed": seed_per_rank(3, rank=0), "told": []}
        assert facts["rank"]["seed"] == facts["group"]["seed"]
        assert len(facts["rank"]["told"]) == 1
        assert "not in `group`; nothing was seeded" in facts["not a member"]


@contextmanager
def acting_as(rank: int, store: Any, ranks: int = 4) -> Iterator[None]:
    """Be one of several ranks, that share a store and never meet."""
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=store)
    try:
        yield
    finally:
        dist.destroy_process_group()


def equal_masks(rank: int, seed: int, store: Any, model: Small) -> str:
    """What rank is said to draw as this one does, if its seed is this."""
    with acting_as(rank, store):
        torch.manual_seed(seed)
        found = rank_seeds.find_rank_with_same_seed(model)
    return "" if found is None else f"{found[0]} as {found[1]}"


def test_what_a_rank_was_seeded_with_before_is_not_held_against_it(model: Small) -> None:
    store = dist.HashStore()
    turns = [(0, 1), (1, 1), (0, 1), (1, 2), (0, 1), (1, 1), (0, 2), (1, 1), (2, 1), (1, 1)]
    said = [equal_masks(rank, seed, store, model) for rank, seed in turns]
    assert said == ["", "1 as 0", "0 as 1", "", "", "1 as 0", "", "", "2 as 1", "1 as 2"]


def test_a_job_that_is_seeded_at_every_step_does_not_fill_the_store(model: Small) -> None:
    store = dist.HashStore()
    keys = []
    with acting_as(0, store):
        for seed in range(5):
            torch.manual_seed(seed)
            rank_seeds.find_rank_with_same_seed(model)
            keys.append(store.num_keys())
    assert keys == [keys[0]] * 5


def test_a_device_has_seeds_of_its_own(model: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    class Module:
        seed, initialized = 5, True
        is_initialized = classmethod(lambda cls: cls.initialized)
        initial_seed = classmethod(lambda cls: cls.seed)

    monkeypatch.setattr(torch, "get_device_module", lambda device: Module)
    store, device, found = dist.HashStore(), torch.device("cuda"), []
    torch.manual_seed(0)
    for rank, seed, initialized in [(0, 5, True), (1, 6, True), (2, 6, True), (3, 6, False)]:
        Module.seed, Module.initialized = seed, initialized
        with acting_as(rank, store):
            found.append(rank_seeds.find_rank_with_same_seed(device))
    with acting_as(1, store):
        found.append(
            rank_seeds.find_rank_with_same_seed(torch.device("meta"))
        )  # where nothing is drawn: that of the CPU
    assert found == [None, None, (2, 1, 6), None, (1, 3, 0)]


class Counting(dist.Store):
    """Counts the requests to a store."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self.store, self.requests = store, 0

    def set(self, key: str, value: str) -> None:
        self.requests += 1
        self.store.set(key, value)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        self.requests += 1
        return self.store.compare_set(key, expected, value)

    def deleteKey(self, key: str) -> bool:  # by the name that C++ looks for
        self.requests += 1
        return self.store.delete_key(key)


def test_a_rank_makes_two_requests_however_many_sites_it_has() -> None:
    """And check() asks anew, since another rank may have announced the same seed meanwhile."""
    shared = dist.HashStore()
    counting = Counting(shared)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(50)))
    drop = inject(model, Dropout(0.5), layers="*")
    with acting_as(0, counting):
        torch.manual_seed(0)
        for _ in range(3):
            model(torch.ones(2, 4))
        assert counting.requests == 2
        assert drop.check() == []
        asked = counting.requests
        drop.check()
        assert asked - 2 == counting.requests - asked == 2
        torch.manual_seed(1)
        inject(model, Dropout(0.5), layers="*", name="second", on_existing="stack")
        model(torch.ones(2, 4))
        assert counting.requests - asked - 2 == 4  # two more withdraw the old seed


def test_a_rank_is_never_said_to_draw_as_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two ranks with one seed the first is seeded anew: the second is then alone with it."""
    shared, device = dist.HashStore(), torch.device("cpu")
    stores, notes = [dist.PrefixStore("job", shared) for _ in range(2)], [None, None]

    def ask(rank: int, seed: int) -> object:
        monkeypatch.setattr(rank_seeds, "default_store", lambda: stores[rank])
        monkeypatch.setattr(rank_seeds, "_announced", notes[rank])
        torch.manual_seed(seed)
        with acting_as(rank, dist.HashStore()):
            found = rank_seeds.find_rank_with_same_seed(device)
        notes[rank] = rank_seeds._announced
        return found

    assert [ask(0, 1), ask(1, 1), ask(0, 2), ask(1, 1)] == [None, (1, 0, 1), None, None]


class Broken(dist.Store):
    """As the store is once the rank that had it is gone."""

    def set(self, key: str, value: str) -> None:
        raise dist.DistNetworkError("Broken pipe")

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        raise dist.DistNetworkError("Broken pipe")


@pytest.mark.parametrize("store", [Broken, FakeStore])
def test_a_store_that_can_not_be_asked_is_no_error(model: Small, store: Any) -> None:
    drop = inject(model, Dropout(0.5), layers="layer1.*")
    with acting_as(0, store()):
        assert not any("equal masks" in problem for problem in drop.check())


def test_one_rank_alone_asks_nobody(model: Small) -> None:
    drop, store = inject(model, Dropout(0.5), layers="layer1.*"), dist.HashStore()
    with acting_as(0, store, ranks=1):
        before = store.num_keys()
        drop.check()
        assert store.num_keys() == before
    drop.check()


def test_nothing_is_told_before_training_or_of_what_is_off(model: Small, images: torch.Tensor) -> None:
    """Models are built from one seed, and then a summary is printed; only then ranks are seeded."""
    drop, store = inject(model, Dropout(0.5), layers="layer1.*"), dist.HashStore()
    torch.manual_seed(0)
    with acting_as(1, store):
        rank_seeds.find_rank_with_same_seed(model)
    with acting_as(0, store):
        drop.summary()
        model(images)
        drop.disable()
        drop.summary()
        drop.enable()
        with pytest.warns(HookdropWarning, match="ranks 0 and 1 draw equal masks"):
            drop.summary()


def test_a_rank_that_has_drawn_a_mask_is_known_to_one_that_asks(images: torch.Tensor) -> None:
    """Though it asks nothing itself, and its schedule stands still."""
    store, models = dist.HashStore(), [Small(), Small()]
    drops = [inject(model, Dropout(0.5), layers="layer1.*") for model in models]
    torch.manual_seed(0)
    with acting_as(1, store):
        models[1](images)
    with acting_as(0, store):
        assert any("ranks 0 and 1 draw equal masks" in problem for problem in drops[0].check())


# --- checkpoints


@pytest.fixture(scope="module")
def on_three(
    saved: tuple[Path, list[dict[str, Facts]]], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Facts]]:
    with shared(tmp_path_factory, "resumed") as folder:
        return ran(folder, "resumed", saved[0], ranks=3)


def test_a_checkpoint_of_two_ranks_goes_on_on_three(
    found: list[dict[str, Facts]], on_three: list[dict[str, Facts]]
) -> None:
    before, _ = of(found, "saved")
    assert before["keys"] == []  # the weights' state knows nothing of hookdrop
    for facts in of(on_three, "resumed"):
        assert facts["ranks"] == 3
        assert facts["output"] == pytest.approx(before["output"], abs=1e-6)
        assert facts["loaded"] == [5, pytest.approx(0.1), 0.2]
        assert facts["trained"] == [7, pytest.approx(0.14)]
        assert facts["nested"] == facts["own"]
        assert facts["check"] == facts["warnings"] == []


ALONE = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")


def plain() -> tuple[Net, Injection]:
    net = Net()
    return net, inject(net, DropBlock(0.4, 3), layers="blocks.*.norm", schedule=LinearSchedule(10))


@ALONE
def test_a_checkpoint_of_two_ranks_goes_on_in_one_process(saved: tuple[Path, list[dict[str, Facts]]]) -> None:
    """A sharded model's, in a model that nothing wraps."""
    folder, found = saved
    net, drop = plain()
    weights = net.state_dict()
    dcp.load({"model": weights, "drop": drop}, checkpoint_id=folder / "saved")
    net.load_state_dict(weights)
    assert output(net) == pytest.approx(of(found, "saved")[0]["output"], abs=1e-6)
    assert (drop.step_count, drop.p, drop.target_p) == (5, pytest.approx(0.1), 0.2)
    drop.step(5)
    assert drop.p == 0.2


@ALONE
def test_a_checkpoint_saved_in_the_background_is_the_same(saved: tuple[Path, list[dict[str, Facts]]]) -> None:
    net, drop = plain()
    dcp.load({"all": find(net), "drop": drop}, checkpoint_id=saved[0] / "async")
    assert (drop.step_count, drop.target_p) == (5, 0.2)


def test_a_checkpoint_as_one_file_has_the_state_as_torch_save_would(
    saved: tuple[Path, list[dict[str, Facts]]], tmp_path: Path
) -> None:
    dcp_to_torch_save(saved[0] / "saved", tmp_path / "whole.pt")
    net, drop = plain()
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    net.load_state_dict(whole["model"])
    drop.load_state_dict(whole["drop"])
    assert (drop.step_count, drop.target_p) == (5, 0.2)


@ALONE
def test_a_checkpoint_of_other_sites_is_an_error_and_changes_nothing(
    saved: tuple[Path, list[dict[str, Facts]]],
) -> None:
    net = Net()
    drop = inject(net, DropBlock(0.4, 3), layers=["stem", "blocks.0.norm"], schedule=LinearSchedule(10))
    with pytest.raises(
        StateError, match=r"only in the state: 'blocks\.1\.norm'(.|\n)*'blocks\.2\.norm'(.|\n)*only here: +'stem'"
    ):
        dcp.load({"drop": drop}, checkpoint_id=saved[0] / "saved")
    assert (drop.step_count, drop.target_p) == (0, 0.4)


# --- examples/train_ddp.py

TINY = "--image-size 32 --epochs 3 --batch-size 96 --device cpu --regularizer 'DropBlock(p=0.2, block_size=3)' --layers layer2.0"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    pytest.importorskip("timm")
    pytest.importorskip("torchvision")
    pytest.importorskip("sklearn")
    spec = importlib.util.spec_from_file_location("example_train_ddp", EXAMPLES / "train_ddp.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def three_runs(example: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """An epoch of DDP on two ranks, one of FSDP2 in bfloat16 on two, and one in one process."""
    runs = [(2, "--stop-after-epoch 1"), (2, "--fsdp --bf16 --resume --stop-after-epoch 2"), (0, "--resume")]
    with shared(tmp_path_factory, "train_ddp") as folder:
        for i, (ranks, more) in enumerate(runs):
            if not (folder / f"{i}.txt").exists():
                arguments = shlex.split(f"{TINY} {more} --out {folder / 'out'}")
                (folder / f"{i}.txt").write_text(python(EXAMPLES / "train_ddp.py", *arguments, ranks=ranks))
        return folder / "out", [(folder / f"{i}.txt").read_text() for i in range(3)]


def test_the_example_goes_on_with_other_ranks_and_other_wrappers(three_runs: tuple[Path, list[str]]) -> None:
    _, printed = three_runs
    losses = []
    for i, text in enumerate(printed, start=1):
        (line,) = [line for line in text.splitlines() if line.startswith("epoch ")]
        matched = re.match(r"epoch (\d): loss ([\d.]+), accuracy .*p=([\d.]+) of 0.2, step (\d+) of", line)
        assert matched, line
        assert (int(matched[1]), int(matched[4])) == (i, 13 * i)
        assert float(matched[3]) == pytest.approx(0.2 * i / 3, abs=1e-4)
        losses.append(float(matched[2]))
        assert (f"{i - 1} of 3 epochs are done" in text) is (i > 1)
    assert losses == sorted(losses, reverse=True)


def test_one_rank_speaks_for_all(three_runs: tuple[Path, list[str]]) -> None:
    for text in three_runs[1]:
        assert text.count("1 site of ResNet") == 1


def test_the_example_leaves_weights_for_a_plain_model_and_one_checkpoint(
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
    assert re.search(r"dropped on rank 0(.|\n)*eval output bit-identical", printed[2])


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
    with pytest.raises(SystemExit, match="is there already: go on with --resume"):
        in_one_process(example, tmp_path / "whole")
    with pytest.raises(SystemExit, match="the checkpoint is of another run"):
        in_one_process(example, tmp_path / "whole", "--resume --lr 0.5")
    assert not dist.is_initialized()


def test_ranks_share_the_validation_images_without_one_twice(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And each has as many, or the ranks of FSDP would wait for one another for ever."""
    images = [(torch.zeros(1), 100 + i) for i in range(10)]
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    labels = []
    for rank in range(4):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        share = example.Share(images)
        assert len(share) == 3
        labels += [share[i][1] for i in range(3)]
    assert sorted(label for label in labels if label >= 0) == list(range(100, 110))


def test_a_batch_that_can_not_be_divided_is_refused(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    with pytest.raises(SystemExit, match="--batch-size 32 can't be divided among 3 ranks"):
        example.run(example.parse_args(["--out", str(tmp_path)]), torch.device("cpu"))
