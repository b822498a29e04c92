"""Copies of hooked models are complete and independent: deepcopy, EMA, pickle, torch.save. Thread safety, and no leaks."""

import copy
import gc
import pickle
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.context import set_spawning_popen
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from hookdrop import DropBlock, Dropout, Injection, InjectionError, LinearSchedule, find, inject, plan, without_hooks
from hookdrop.core.recipe import Recipe, RecipeSite
from tests.support.leaks import no_leaks
from tests.support.models import Small, without_zeros
from tests.support.tensors import zero_fraction
from tests.support.training import half_ramped, optimize, seeded


@pytest.fixture
def drop(model: Small) -> Injection:
    return half_ramped(model)


@dataclass(frozen=True)
class skips(Recipe):
    def sites(self, model: nn.Module, survey: Any) -> list[RecipeSite]:
        return [RecipeSite("layer1.0", Dropout(0.5), at="skip", branch="conv1")]


PORTABLE = {
    "output": lambda model: inject(model, Dropout(0.5), layers="layer1.*", portable=True),
    "input": lambda model: inject(model, Dropout(0.5), layers="layer1.*", at="input", portable=True),
    "skip": lambda model: inject(model, skips(), portable=True),
}


@pytest.mark.parametrize("at", PORTABLE)
@pytest.mark.parametrize("protocol", [2, 5])
def test_portable_hooks_are_in_copies_but_not_in_pickles(model: Small, images: Tensor, at: str, protocol: int) -> None:
    clean = seeded(model, images)
    drop = PORTABLE[at](model)
    average = copy.deepcopy(model)
    (own,) = find(average)
    assert [site.name for site in own.sites] == [site.name for site in drop.sites]
    assert torch.equal(seeded(average, images), seeded(model, images))
    own.seek(3)
    assert drop.step_count == 0
    for hooked in (model, copy.deepcopy(average).half()):  # the second as ultralytics does it
        pickled = pickle.dumps(hooked, protocol)
        assert b"hookdrop.core" not in pickled
        loaded = pickle.loads(pickled).float()
        assert not find(loaded)
    assert torch.equal(seeded(pickle.loads(pickle.dumps(model, protocol)), images), clean)
    set_spawning_popen(object())
    try:
        to_a_process = pickle.dumps(model)
    finally:
        set_spawning_popen(None)
    assert find(pickle.loads(to_a_process)).p == 0.5
    drop.remove()
    assert torch.equal(seeded(model, images), clean)


class Owner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Small()
        self.drop = inject(self.net, Dropout(0.5), layers="fc", schedule=LinearSchedule(4))
        self.own = inject(self, Dropout(0.5), layers="net.layer1.*", name="own")


def test_handle_stored_as_attribute_is_copied_with_its_model(images: Tensor) -> None:
    """As in a LightningModule."""
    owner = Owner()
    for twin in (copy.deepcopy(owner), pickle.loads(pickle.dumps(owner))):
        twin.drop.step(2)
        assert (owner.drop.step_count, twin.drop.step_count) == (0, 2)
        assert twin.drop == find(twin.net)["dropout"]
        assert twin.drop.p == 0.25
        twin.own.remove()
        assert (len(find(owner)), len(find(twin))) == (2, 1)


class Counts(Dropout):
    calls: Any = 0

    def regularize(self, x: Tensor, rate: Any) -> Tensor:
        self.calls += 1
        return x


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_regularizer_state_is_copied_not_shared(model: Small, images: Tensor, how: str) -> None:
    """Hooks built from closures would share their state between copies."""
    inject(model, Counts(0.5), layers="fc")
    model(images)
    twin = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    twin(images)
    twin(images)
    calls = [hook.regularizer.calls for one in (model, twin) for hook in one.fc._forward_hooks.values()]
    assert calls == [1, 3]


def test_copies_of_parts(model: Small, drop: Injection) -> None:
    assert [site.name for site in find(copy.deepcopy(model.layer1[0])).sites] == ["layer1.0"]
    twin = copy.copy(model.layer1)  # shares the hooks, as DataParallel's replicas do
    assert find(twin) == drop
    drop.remove()
    assert not find(twin)


def test_copied_handle_without_its_model(model: Small, drop: Injection) -> None:
    """A shallow copy equals the original; a deep copy holds a copied model that is freed immediately."""
    assert copy.copy(drop) == drop
    for alone in (copy.deepcopy(drop), pickle.loads(pickle.dumps(drop))):
        assert "whose model was deleted" in repr(alone)
        with pytest.raises(InjectionError):
            alone.probe(torch.ones(2, 3, 8, 8))
        assert "was deleted" in alone.check()[0]
    assert len(find(model)) == 1


def test_copy_made_in_inference_mode_can_be_stepped_outside(model: Small, images: Tensor) -> None:
    """The copied weights are inference tensors, but the rate must not be one."""
    inject(model, DropBlock(0.4, 3), layers="layer1.*", schedule=LinearSchedule(10)).seek(5)
    with torch.inference_mode():
        twin = copy.deepcopy(model)
    with torch.inference_mode():
        find(twin).step()
    find(twin).step()
    assert next(iter(find(twin))).step_count == 7
    with torch.inference_mode():
        assert not torch.equal(twin(images), twin(images))


def test_averages_add_no_keys_and_are_deterministic_if_disabled(model: Small, drop: Injection, images: Tensor) -> None:
    """AveragedModel copies the model in training mode, so it is stochastic by default."""
    assert model.state_dict().keys() == Small().state_dict().keys()
    averaged = AveragedModel(model)
    assert not torch.equal(averaged(images), averaged(images))
    with find(averaged).disabled():
        assert torch.equal(averaged(images), averaged(images))


X = torch.ones(64, 8)


def in_threads(*runs: Callable[[], object]) -> None:
    """Run functions concurrently, and re-raise the first error."""
    with ThreadPoolExecutor(len(runs)) as pool:
        for future in [pool.submit(run) for run in runs]:
            future.result(60)


@contextmanager
def fast_switches() -> Iterator[None]:
    """Switch between threads as often as possible."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


class TestThreads:
    def test_inject_copy_and_remove_while_another_thread_trains(self) -> None:
        trained = without_zeros()
        drop = inject(trained, DropBlock(0.5, 1, channel_dim=-1), layers="1", schedule=LinearSchedule(200))
        drop.follow(optimizer := torch.optim.SGD(trained.parameters(), 0.01))
        done = threading.Event()

        def train() -> None:
            try:
                optimize(trained, 200, optimizer, X.view(8, 8, 8))
            finally:
                done.set()

        def others() -> None:
            while not done.is_set():
                with inject(model := without_zeros(), Dropout(0.5), layers="*") as own:
                    model(X)
                    own.enabled = False
                twin = copy.deepcopy(trained)
                assert find(twin).step_count <= drop.step_count
                find(twin).remove()

        with fast_switches():
            in_threads(train, others)
        assert (drop.step_count, drop.p) == (200, 0.5)
        assert drop.check() == []

    def test_data_parallel_replicas(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replicas share the hooks and run in threads; steps count once. Uses PyTorch's replicate with two fake devices."""
        replicate = sys.modules["torch.nn.parallel.replicate"]
        monkeypatch.setattr(replicate, "_get_device_index", lambda device, _: device)
        copies = lambda tensors, devices, detach=False: [[t.clone() for t in tensors] for _ in devices]
        monkeypatch.setattr(replicate, "_broadcast_coalesced_reshape", copies)
        optimizer = torch.optim.SGD((model := without_zeros()).parameters(), 0.01)
        drop = inject(model, Dropout(0.5), layers="1", schedule=LinearSchedule(30)).follow(optimizer)
        for step in range(1, 31):
            with ThreadPoolExecutor(2) as pool:
                sum(pool.map(lambda replica: replica(X).sum(), nn.parallel.replicate(model, [0, 1]))).backward()
            optimizer.step()
            assert drop.step_count == step
        assert model[0].weight.grad is not None
        with drop.recording(last=0) as m:
            outs = [(replica := one)(X) for one in nn.parallel.replicate(model, [0, 1])]
        assert m.totals.calls == 2
        assert [zero_fraction(y) for y in outs] == pytest.approx([0.5, 0.5], abs=0.1)
        assert not torch.equal(*outs)
        assert drop.check() == []
        drop.remove()
        assert not find(replica)


def hide_and_replace(model: nn.Module) -> None:
    inject(model, Dropout(0.5), layers="*")
    with inject(model, Dropout(0.5), layers="*", on_existing="replace"), without_hooks(model):
        pass


def copy_and_remove(model: nn.Module) -> None:
    with inject(model, DropBlock(0.5, 3), layers="*"):
        find(copy.deepcopy(model)).remove()
        copy.deepcopy(model)


def run_and_measure(model: nn.Module) -> None:
    with inject(model, Dropout(0.5), layers="*", schedule=LinearSchedule(4), example_input=X) as drop:
        drop.step(2)
        with drop.recording(last=0):
            model(X).sum().backward()
        drop.probe(X, forwards=1)


def fail(model: nn.Module) -> None:
    with pytest.raises(KeyError), inject(model, Dropout(0.5), layers="*") as drop:
        with pytest.raises(InjectionError):
            inject(model, Dropout(0.5), layers="*")
        with drop.sampling(), without_hooks(model):
            raise KeyError


def delete_the_model(model: nn.Module) -> None:
    """The hooks are not removed explicitly."""
    with inject(another := without_zeros(), Dropout(0.5), layers="*").disabled():
        another(X)


class TestNoLeaks:
    """Repeated injections leave no objects, hooks or listeners behind."""

    def test_repeated_use(self) -> None:
        model, ways = without_zeros(), (hide_and_replace, copy_and_remove, run_and_measure, fail, delete_the_model)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        plan(model, Dropout(0.5), layers="*", example_input=X)  # the survey of a model is kept while it exists
        with no_leaks(model, optimizer):
            for use in ways * 10:
                use(model)
            for _ in range(30):
                drop = inject(model, Dropout(0.5), layers="*", schedule=LinearSchedule(4)).follow(optimizer)
                optimizer.step()
                drop.remove()
            del drop
            # Following an optimizer must not leave wrappers of `torch.compiler.disable` behind.
            assert not any(type(thing).__name__ == "DisableContext" for thing in gc.get_objects())


def test_hooks_and_handles_do_not_keep_the_model_alive() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    drop = inject(model, Dropout(0.5), layers="0")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True), *model.parameters()], 0.1)
    drop.follow(optimizer)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert "whose model was deleted" in repr(drop)
    optimizer.step()
    assert "was deleted" in drop.check()[0]
    drop.remove()
