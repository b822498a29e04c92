"""Copies are whole: deepcopy, EMA, pickle, torch.save, fresh and spawned processes."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Small
from torch import nn
from torch.optim.swa_utils import AveragedModel, update_bn

import hookdrop
from hookdrop import (
    DropBlock,
    Dropout,
    HookdropWarning,
    Injection,
    InjectionError,
    LinearSchedule,
    Regularizer,
    find,
    inject,
    without_hooks,
)
from hookdrop.hooks.hook import SiteHook


@pytest.fixture
def drop(model: Small) -> Injection:
    injection = inject(model, DropBlock(0.4, 3), layers="layer1.*", schedule=LinearSchedule(10), p_scale="depth")
    injection.seek(5)
    return injection


def run(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(1)
    return model(images)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_carries_the_hooks_and_has_its_own(
    model: Small, drop: Injection, images: torch.Tensor, how: str
) -> None:
    twin = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    (own,) = find(twin)
    assert torch.equal(run(model, images), run(twin, images))
    assert [site.p for site in own.sites] == [site.p for site in drop.sites] == [0.1, 0.2]
    own.seek(10)
    assert (drop.step_count, own.step_count) == (5, 10)
    drop.remove()
    assert own.p == 0.4
    assert not torch.equal(run(model, images), run(twin, images))
    own.remove()
    assert torch.equal(run(model, images), run(twin, images))
    assert not any(isinstance(hook, SiteHook) for m in twin.modules() for hook in m._forward_hooks.values())


def test_removing_the_originals_leaves_the_copys_hooks_and_the_other_way_round(model: Small, drop: Injection) -> None:
    twin = copy.deepcopy(model)
    drop.remove()
    assert len(find(twin)[0].sites) == 2
    assert find(model) == ()

    again = copy.deepcopy(twin)
    find(again)[0].remove()
    assert len(find(twin)[0].sites) == 2


def test_a_copy_of_a_part_carries_the_parts_hooks_alone(model: Small, drop: Injection) -> None:
    part = copy.deepcopy(model.layer1[0])
    assert [site.name for site in find(part)[0].sites] == ["layer1.0"]
    assert sum(1 for _ in part.modules()) == sum(1 for _ in model.layer1[0].modules())


def test_disable_is_copied_and_contexts_are_not(model: Small, drop: Injection, images: torch.Tensor) -> None:
    with drop.disabled():
        inside = copy.deepcopy(model)
    with drop.sampling(p=0.9):
        sampled = pickle.loads(pickle.dumps(model))
    drop.disable()
    off = copy.deepcopy(model)
    drop.enable()
    assert [find(twin)[0].p for twin in (inside, sampled, off)] == [0.2, 0.2, 0.0]
    assert [site.p for site in find(sampled)[0].sites] == [0.1, 0.2]
    sampled.eval()
    assert torch.equal(run(sampled, images), run(sampled.eval(), images))
    with find(sampled)[0].sampling():
        assert not torch.equal(sampled(images), sampled(images))


def test_a_copy_made_while_measuring_does_not_measure(model: Small, drop: Injection, images: torch.Tensor) -> None:
    with drop.measuring() as m:
        copy.deepcopy(model)(images)
    assert m.calls == 0


def test_timms_ema(model: Small, drop: Injection, images: torch.Tensor) -> None:
    from timm.utils import ModelEmaV3

    ema = ModelEmaV3(model, decay=0.5)
    ema.update(model)
    assert torch.equal(ema.module(images), ema.module(images))
    (own,) = find(ema)
    with own.sampling():
        assert not torch.equal(ema.module(images), ema.module(images))
    own.remove()
    assert drop.p == 0.2
    assert len(find(model)) == 1


def test_sampling_on_an_ema_copy_at_rate_0_is_an_error(model: Small) -> None:
    """The copy's step count is its own: it was made at step 0 and never stepped."""
    from timm.utils import ModelEmaV3

    drop = inject(model, DropBlock(0.4, 3), layers="layer1.*", schedule=LinearSchedule(10))
    ema = ModelEmaV3(model)
    drop.step(10)
    with pytest.raises(InjectionError, match=r"sampling at rate 0(.|\n)*an EMA, has a count of its own"):
        with find(ema)[0].sampling():
            pass
    find(ema)[0].load_state_dict(drop.state_dict())
    with find(ema)[0].sampling():
        assert find(ema)[0].p == 0.4


def test_averaged_model_is_quiet_with_disabled(model: Small, drop: Injection, images: torch.Tensor) -> None:
    """AveragedModel copies in train mode, and is stochastic as it stands."""
    averaged = AveragedModel(model)
    assert not torch.equal(averaged(images), averaged(images))
    with find(averaged).disabled():
        assert torch.equal(averaged(images), averaged(images))


def test_update_bn_inside_disabled_is_that_of_an_unhooked_averaged_model(
    model: Small, drop: Injection, images: torch.Tensor
) -> None:
    """Else the statistics would be those of dropped activations: `update_bn` runs the model in train mode."""
    hooked, again = AveragedModel(model), AveragedModel(model)
    drop.remove()
    clean = AveragedModel(model)
    batches = [images, 2 * images + 1, images.flip(0)]
    with find(hooked).disabled():
        update_bn(batches, hooked)
    update_bn(batches, clean)
    update_bn(batches, again)
    assert all(torch.equal(a, b) for a, b in zip(hooked.buffers(), clean.buffers(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(again.buffers(), clean.buffers(), strict=True))
    assert find(hooked)[0].p == 0.2
    assert not torch.equal(hooked(images), hooked(images))


@pytest.mark.parametrize("wrapper", ["ModelEmaV2", "ModelEmaV3", "AveragedModel"])
def test_an_average_that_only_validates_is_not_told_to_train(wrapper: str, model: Small, images: torch.Tensor) -> None:
    """Its weights are written to and it runs in eval mode only, as it should."""
    inject(model, Dropout(0.4), layers="layer1.*")
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    if wrapper == "AveragedModel":
        average: nn.Module = AveragedModel(model)
        update = average.update_parameters
    else:
        average = getattr(pytest.importorskip("timm").utils, wrapper)(model)
        update = average.update
    small = images[:, :, :4, :4]
    for _ in range(25):
        model(small).sum().backward()
        optimizer.step()
        update(model)
        average.eval()
        with torch.no_grad():
            average.module(small)
    assert find(average).check() == []


class Owner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Small()
        self.drop = inject(self.net, Dropout(0.5), layers="fc", schedule=LinearSchedule(4))
        self.own = inject(self, Dropout(0.5), layers="net.layer1.*", name="own")


def test_a_handle_kept_as_attribute_is_copied_with_its_model(images: torch.Tensor) -> None:
    """As a LightningModule keeps it."""
    owner = Owner()
    for twin in (copy.deepcopy(owner), pickle.loads(pickle.dumps(owner))):
        twin.drop.step(2)
        assert (owner.drop.step_count, twin.drop.step_count) == (0, 2)
        assert twin.drop == find(twin.net)["dropout"]
        assert twin.drop.p == 0.25
        twin.own.remove()
        assert len(find(owner)) == 2
        assert len(find(twin)) == 1


FRESH = """
import pickle, sys
import torch
from torch import nn
sys.path.insert(0, {tests!r})
from hookdrop import find

model = torch.load({path!r}, weights_only=False)
(drop,) = find(model)
assert [round(site.p, 12) for site in drop.sites] == [0.1, 0.2], drop.sites
hooked = [(module, *module._forward_hooks) for module in (model.layer1[0], model.layer1[1])]
for module, key in hooked:
    hook = module._forward_hooks[key]
    # Enough to come to every number that was given away before.
    for _ in range(key + 2):
        module.register_forward_hook(lambda *args: None)
    assert module._forward_hooks[key] is hook, "a later hook took the place of a loaded one"
torch.manual_seed(1)
images = torch.load({images!r})
torch.manual_seed(1)
torch.save(model(images), {out!r})
drop.remove()
assert [len(module._forward_hooks) for module, key in hooked] == [key + 2 for module, key in hooked]
"""


def test_torch_save_and_load_in_a_fresh_process(
    model: Small, drop: Injection, images: torch.Tensor, tmp_path: Path
) -> None:
    """Handle ids start anew in a process: later hooks must not overwrite the loaded ones."""
    paths = {name: str(tmp_path / name) for name in ("path", "images", "out")}
    torch.save(model, paths["path"])
    torch.save(images, paths["images"])
    code = FRESH.format(tests=str(Path(__file__).parent), **paths)
    subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", textwrap.dedent(code)], check=True)
    assert torch.equal(torch.load(paths["out"]), run(model, images))


def test_a_state_dict_knows_nothing_of_hookdrop(model: Small, drop: Injection, tmp_path: Path) -> None:
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    clean = Small()
    clean.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True), strict=True)
    assert find(clean) == ()


def test_pickling_a_model_whose_hook_was_injected_with_a_foreign_module(model: Small) -> None:
    inject(model, nn.Dropout2d(0.5), layers="layer1.*", schedule=LinearSchedule(4))
    twin = pickle.loads(pickle.dumps(model))
    find(twin)[0].step(4)
    assert [site.p for site in find(twin)[0].sites] == [0.5, 0.5]


def test_data_parallel_and_wrapped_models_are_found_through(model: Small, drop: Injection) -> None:
    assert find(nn.DataParallel(model)) == (drop,)
    assert hookdrop.eject(nn.DataParallel(model)) == 2


def test_eject_works_on_copies(model: Small, drop: Injection) -> None:
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert hookdrop.eject(twin) == 2
        assert find(twin) == ()
    assert find(model) == (drop,)


class Counts(Regularizer):
    """Holds something that can be changed, as a hook made of a closure would."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.p = p
        self.calls: list[int] = []

    def regularize(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append(len(self.calls))
        return x


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_what_a_regularizer_holds_is_copied_not_shared(model: Small, images: torch.Tensor, how: str) -> None:
    """A closure is shared by the copies of a hook; the objects that a hook is made of are not."""
    inject(model, Counts(), layers="fc")
    model(images)
    twin = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    twin(images)
    twin(images)

    def calls(what: Small) -> list[int]:
        (hook,) = what.fc._forward_hooks.values()
        return hook.regularizer.calls

    assert (calls(model), calls(twin)) == ([0], [0, 1, 2])


def test_a_shallow_copy_shares_the_hooks(model: Small, drop: Injection) -> None:
    """PyTorch gives it the same dictionary of hooks, as it does DataParallel's replicas."""
    twin = copy.copy(model.layer1)
    assert find(twin) == (drop,)
    drop.remove()
    assert find(twin) == ()


def test_a_copy_of_a_handle(model: Small, drop: Injection) -> None:
    """Alone: a shallow one is as good as the original, a deep one copies a model that nobody keeps."""
    assert copy.copy(drop) == drop
    for alone in (copy.deepcopy(drop), pickle.loads(pickle.dumps(drop))):
        assert "whose model is gone" in repr(alone)
        with pytest.raises(InjectionError, match=r"is gone(.|\n)*find\(model\)"):
            alone.probe(torch.ones(2, 3, 8, 8))
        assert "is gone" in alone.check()[0]
    assert len(find(model)) == 1


@pytest.mark.parametrize("order", [("drop", "model"), ("model", "drop")])
def test_a_handle_is_copied_with_its_model_in_any_order(model: Small, drop: Injection, order: tuple[str, str]) -> None:
    both: dict[str, Any] = {"drop": drop, "model": model}
    for twin in (copy.deepcopy({k: both[k] for k in order}), pickle.loads(pickle.dumps({k: both[k] for k in order}))):
        assert find(twin["model"]) == (twin["drop"],)
        twin["drop"].seek(10)
        assert (twin["drop"].p, drop.p) == (0.4, 0.2)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copied_optimizer_loses_the_follow_hook_and_it_is_told(how: str) -> None:
    """As in a checkpoint of whole objects, or a search that clones its trainings."""
    model = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    inject(model, Dropout(0.5), layers="0", schedule=LinearSchedule(1000)).follow(optimizer)
    optimizer.step()
    training = {"model": model, "optimizer": optimizer}
    training = copy.deepcopy(training) if how == "deepcopy" else pickle.loads(pickle.dumps(training))
    (own,) = find(training["model"])

    def train() -> None:
        for _ in range(30):
            training["model"](torch.ones(2)).sum().backward()
            training["optimizer"].step()

    with pytest.warns(HookdropWarning, match=r"still at step 1 of LinearSchedule(.|\n)*drop.follow\(optimizer\)"):
        train()
    own.follow(training["optimizer"])
    train()
    assert own.step_count == 31
    assert own.check() == []


def test_another_optimizer_than_the_one_that_is_followed() -> None:
    """The one that is followed is still there, and rests: told, and found by a check after it."""
    model = nn.Sequential(nn.Linear(2, 2))
    optimizer, other = (torch.optim.SGD(model.parameters(), 0.1) for _ in range(2))
    drop = inject(model, Dropout(0.5), layers="0", schedule=LinearSchedule(1000)).follow(optimizer)

    def train() -> None:
        for _ in range(30):
            model(torch.ones(2)).sum().backward()
            other.step()

    with pytest.warns(HookdropWarning, match="still at step 0"):
        train()
    assert "still at step 0" in drop.check()[0]


def test_a_copy_made_in_inference_mode_can_be_stepped_outside(model: Small, images: torch.Tensor) -> None:
    """Its weights are inference tensors; its rate is none."""
    drop = inject(model, DropBlock(0.4, 3), layers="layer1.*", schedule=LinearSchedule(10))
    drop.seek(5)
    with torch.inference_mode():
        twin = copy.deepcopy(model)
    (hook,) = twin.layer1[0]._forward_hooks.values()
    assert not hook.train_rate.tensor.is_inference()
    with torch.inference_mode():
        find(twin).step()
    assert not hook.train_rate.tensor.is_inference()
    find(twin).step()
    assert find(twin)[0].step_count == 7
    with torch.inference_mode():
        assert not torch.equal(twin(images), twin(images))


def test_a_copy_made_without_hooks_has_none(model: Small, drop: Injection) -> None:
    with without_hooks(model):
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    assert [find(twin) for twin in copies] == [(), ()]
    assert find(model) == (drop,)


class Activations(torch.utils.data.Dataset[Any]):
    """A data set that carries a hooked model to its workers."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> tuple[int, float]:
        (drop,) = find(self.model)
        drop.step()
        return drop.step_count, (self.model(torch.ones(64, 3, 8, 8)) == 0).float().mean().item()


def train_in_a_process(model: nn.Module, results: Any) -> None:
    """Seek, train one step on the shared weights, and tell what was seen."""
    (drop,) = find(model)
    before = drop.step_count, drop.p
    drop.seek(10)
    model(torch.ones(4, 3, 8, 8)).sum().backward()
    with torch.no_grad():
        model[0].weight.add_(1.0)
    with drop.measuring() as m:
        model(torch.ones(64, 3, 8, 8))
    ((key, hook),) = model[1]._forward_hooks.items()
    for _ in range(key + 2):
        model[1].register_forward_hook(lambda *_: None)
    kept = model[1]._forward_hooks[key] is hook
    drop.remove()
    results.put((before, drop.step_count, m.dropped, kept, find(model) == ()))


def test_spawned_processes() -> None:
    """A DataLoader's workers, and a training on shared weights, as torch.multiprocessing's example has it."""
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Hardtanh(1.0, 2.0))
    drop = inject(model, DropBlock(0.4, 3, normalize=None), layers="1", schedule=LinearSchedule(10))
    drop.seek(5)
    loader = torch.utils.data.DataLoader(
        Activations(model), batch_size=None, num_workers=1, multiprocessing_context="spawn"
    )
    steps, dropped = zip(*loader, strict=True)
    assert steps == (6, 7)
    assert list(dropped) == pytest.approx([0.24, 0.28], abs=0.05)

    model.share_memory()
    weight = model[0].weight.detach().clone()
    context = torch.multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=train_in_a_process, args=(model, results))
    process.start()
    before, after, measured, kept, removed = results.get(timeout=120)
    process.join()
    assert (before, after, kept, removed) == ((5, 0.2), 10, True, True)
    assert measured == pytest.approx(0.4, abs=0.05)
    assert torch.equal(model[0].weight, weight + 1.0)
    assert (drop.step_count, drop.p) == (5, 0.2)
    assert find(model) == (drop,)
