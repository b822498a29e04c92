"""Seeds of ranks: `seed_per_rank`, and warnings about ranks with equal seeds. The ranks share a store in one process."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from hookdrop import Dropout, inject, seed_per_rank
from hookdrop.training import seeding
from tests.support.models import Small


@pytest.fixture
def unseeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(seeding, "_last", None)


def test_per_rank_seeds_have_fixed_values_that_no_two_ranks_of_neighboring_jobs_share() -> None:
    """`seed + rank` would share seeds; the CPU generator uses the lowest 32 bits of a seed."""
    seeds = {seed_per_rank(seed, rank=rank) % 2**32 for seed in range(-4, 16) for rank in range(32)}
    assert len(seeds) == 20 * 32
    assert [seed_per_rank(0, rank=rank) for rank in (0, 1)] == [9077812382499248585, 6507704258292572590]
    assert seed_per_rank(-1, rank=0) == seed_per_rank(2**64 - 1, rank=0)  # equal for torch.manual_seed, too


def test_seed_per_rank_seeds_only_pytorch(unseeded: None) -> None:
    before = random.getstate(), np.random.get_state()[1].tolist()
    seed = seed_per_rank(3)
    first = torch.rand(3)
    torch.manual_seed(seed)
    assert torch.equal(torch.rand(3), first)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    assert 0 <= seed < 2**63


def test_seed_per_rank_is_idempotent(unseeded: None) -> None:
    torch.manual_seed(3)
    seed = seed_per_rank()
    torch.rand(5)
    assert seed_per_rank() == seed == torch.initial_seed()
    assert seed_per_rank(rank=1) == seed_per_rank(3, rank=1)
    torch.manual_seed(4)
    assert seed_per_rank() == seed_per_rank(4) != seed


def test_the_rank_comes_from_torchrun_before_init(unseeded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = seed_per_rank(3)
    monkeypatch.setenv("RANK", "1")
    assert seed_per_rank(3) == seed_per_rank(3, rank=1) != alone == seed_per_rank(3, rank=0)
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(ValueError):
        seed_per_rank(3)


def test_invalid_arguments_seed_nothing() -> None:
    before = torch.get_rng_state()
    for arguments in ({"seed": 0.5}, {"seed": 0, "rank": -1}, {"seed": 0, "rank": 0, "group": object()}):
        with pytest.raises((TypeError, ValueError)):
            seed_per_rank(**arguments)
    assert torch.equal(torch.get_rng_state(), before)


@contextmanager
def acting_as(rank: int, store: Any, ranks: int = 4) -> Iterator[None]:
    """Act as one of several ranks that share a store."""
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=store)
    try:
        yield
    finally:
        dist.destroy_process_group()


def rank_with_same_seed(rank: int, seed: int, store: Any, model: Small) -> str:
    """Seed `rank`, and report the rank that has the same seed."""
    with acting_as(rank, store):
        torch.manual_seed(seed)
        found = seeding.find_rank_with_same_seed(model)
    return "" if found is None else f"{found[0]} as {found[1]}"


def test_earlier_seeds_of_a_rank_are_ignored(model: Small) -> None:
    store = dist.HashStore()
    turns = [(0, 1), (1, 1), (0, 1), (1, 2), (0, 1), (1, 1), (0, 2), (1, 1), (2, 1), (1, 1)]
    found = [rank_with_same_seed(rank, seed, store, model) for rank, seed in turns]
    assert found == ["", "1 as 0", "0 as 1", "", "", "1 as 0", "", "", "2 as 1", "1 as 2"]


def test_each_device_type_has_its_own_seeds(model: Small, monkeypatch: pytest.MonkeyPatch) -> None:
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
            found.append(seeding.find_rank_with_same_seed(device))
    with acting_as(1, store):
        # Nothing is drawn on the meta device: the CPU's seed counts.
        found.append(seeding.find_rank_with_same_seed(torch.device("meta")))
    assert found == [None, None, (2, 1, 6), None, (1, 3, 0)]


def test_a_rank_is_never_reported_against_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the first of two ranks with one seed is seeded again, only the second has that seed."""
    shared, device = dist.HashStore(), torch.device("cpu")
    stores = [dist.PrefixStore("job", shared) for _ in range(2)]

    def seed_and_find(rank: int, seed: int) -> object:
        monkeypatch.setattr(seeding, "default_store", lambda: stores[rank])
        torch.manual_seed(seed)
        with acting_as(rank, dist.HashStore()):
            return seeding.find_rank_with_same_seed(device)

    found = [seed_and_find(0, 1), seed_and_find(1, 1), seed_and_find(0, 2), seed_and_find(1, 1)]
    assert found == [None, (1, 0, 1), None, None]


class BrokenStore(dist.Store):
    """A store whose server rank has exited."""

    def set(self, *_: str) -> bytes:
        raise dist.DistNetworkError("Broken pipe")

    compare_set = set  # type: ignore[assignment]


@pytest.mark.parametrize("store", [BrokenStore, FakeStore])
def test_an_unavailable_store_is_not_an_error(model: Small, store: Any) -> None:
    drop = inject(model, Dropout(0.5), layers="layer1.*")
    with acting_as(0, store()):
        assert not any("identical masks" in problem for problem in drop.check())


def test_equal_seeds_do_not_warn_before_training_or_while_disabled(model: Small, images: torch.Tensor) -> None:
    """Programs build models from one seed and print a summary before they seed the ranks."""
    drop, store = inject(model, Dropout(0.5), layers="layer1.*"), dist.HashStore()
    torch.manual_seed(0)
    with acting_as(1, store):
        seeding.find_rank_with_same_seed(model)
    with acting_as(0, store):
        model(images)
        drop.enabled = False
        assert drop.check() == []
        drop.enabled = True
        assert "'dropout': ranks 0 and 1 draw identical masks" in drop.check()[0]


class CountingStore(dist.Store):
    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self.store, self.requests = store, 0

    def set(self, key: str, value: str) -> None:
        self.requests += 1
        self.store.set(key, value)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        self.requests += 1
        return self.store.compare_set(key, expected, value)


def test_a_rank_announces_its_seed_once_for_any_number_of_sites() -> None:
    counting = CountingStore(dist.HashStore())
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(50)))
    drop = inject(model, Dropout(0.5), layers="*")
    with acting_as(0, counting):
        torch.manual_seed(0)
        for _ in range(3):
            model(torch.ones(2, 4))
        announced = counting.requests
        assert announced == 4
        assert drop.check() == []
        assert counting.requests > announced  # another rank may have announced the same seed since
