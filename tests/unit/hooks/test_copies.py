"""Copies of hooked models are complete and independent: deepcopy, EMA, pickle, torch.save."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from multiprocessing.context import set_spawning_popen
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from hookdrop import DropBlock, Dropout, Injection, InjectionError, LinearSchedule, find, inject
from hookdrop.recipes.base import Recipe, RecipeSite
from tests.support.injections import half_ramped
from tests.support.models import Small
from tests.support.training import run


@pytest.fixture
def drop(model: Small) -> Injection:
    return half_ramped(model)


@dataclass(frozen=True)
class skips(Recipe):
    """A recipe with an identity skip."""

    def sites(self, model: nn.Module, survey: Any) -> list[RecipeSite]:
        return [RecipeSite("layer1.0", Dropout(0.5), at="skip", branch="conv1")]


PORTABLE = {
    "output": lambda model: inject(model, Dropout(0.5), layers="layer1.*", portable=True),
    "input": lambda model: inject(model, Dropout(0.5), layers="layer1.*", at="input", portable=True),
    "skip": lambda model: inject(model, skips(), portable=True),
}


@pytest.mark.parametrize("at", PORTABLE)
@pytest.mark.parametrize("protocol", [2, 5])
def test_portable_hooks_are_in_copies_but_not_in_pickles(
    model: Small, images: torch.Tensor, at: str, protocol: int
) -> None:
    clean = run(model, images)
    drop = PORTABLE[at](model)
    average = copy.deepcopy(model)
    (own,) = find(average)
    assert [site.name for site in own.sites] == [site.name for site in drop.sites]
    assert torch.equal(run(average, images), run(model, images))
    own.seek(3)
    assert drop.step_count == 0
    for hooked in (model, copy.deepcopy(average).half()):  # the second as ultralytics does it
        pickled = pickle.dumps(hooked, protocol)
        assert b"hookdrop.hooks" not in pickled
        loaded = pickle.loads(pickled).float()
        assert not find(loaded)
    assert torch.equal(run(pickle.loads(pickle.dumps(model, protocol)), images), clean)
    set_spawning_popen(object())
    try:
        to_a_process = pickle.dumps(model)
    finally:
        set_spawning_popen(None)
    assert find(pickle.loads(to_a_process)).p == 0.5
    drop.remove()
    assert torch.equal(run(model, images), clean)


class Owner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Small()
        self.drop = inject(self.net, Dropout(0.5), layers="fc", schedule=LinearSchedule(4))
        self.own = inject(self, Dropout(0.5), layers="net.layer1.*", name="own")


def test_handle_stored_as_attribute_is_copied_with_its_model(images: torch.Tensor) -> None:
    """As in a LightningModule."""
    owner = Owner()
    for twin in (copy.deepcopy(owner), pickle.loads(pickle.dumps(owner))):
        twin.drop.step(2)
        assert (owner.drop.step_count, twin.drop.step_count) == (0, 2)
        assert twin.drop == find(twin.net)["dropout"]
        assert twin.drop.p == 0.25
        twin.own.remove()
        assert len(find(owner)) == 2
        assert len(find(twin)) == 1


class Counts(Dropout):
    """A regularizer with mutable state."""

    calls: Any = 0

    def regularize(self, x: torch.Tensor, rate: Any) -> torch.Tensor:
        self.calls += 1
        return x


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_regularizer_state_is_copied_not_shared(model: Small, images: torch.Tensor, how: str) -> None:
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


def test_copy_made_in_inference_mode_can_be_stepped_outside(model: Small, images: torch.Tensor) -> None:
    """The copied weights are inference tensors, but the rate must not be one."""
    drop = inject(model, DropBlock(0.4, 3), layers="layer1.*", schedule=LinearSchedule(10))
    drop.seek(5)
    with torch.inference_mode():
        twin = copy.deepcopy(model)
    with torch.inference_mode():
        find(twin).step()
    find(twin).step()
    assert next(iter(find(twin))).step_count == 7
    with torch.inference_mode():
        assert not torch.equal(twin(images), twin(images))


def test_averaged_model_adds_no_keys_and_is_deterministic_inside_disabled(
    model: Small, drop: Injection, images: torch.Tensor
) -> None:
    """AveragedModel copies the model in training mode, so it is stochastic by default."""
    assert model.state_dict().keys() == Small().state_dict().keys()
    averaged = AveragedModel(model)
    assert not torch.equal(averaged(images), averaged(images))
    with find(averaged).disabled():
        assert torch.equal(averaged(images), averaged(images))
