"""Copies are whole: deepcopy, EMA, pickle, torch.save, a fresh process."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from conftest import Small
from torch import nn
from torch.optim.swa_utils import AveragedModel

import hookdrop
from hookdrop import DropBlock, Dropout, Injection, InjectionError, LinearSchedule, find, inject
from hookdrop.hooks import SiteHook


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
before = {{id(hook): key for m in model.modules() for key, hook in m._forward_hooks.items()}}
others = [m.register_forward_hook(lambda *args: None) for m in (list(model.layer1.modules()) * 3)[:20]]
assert len(others) == 20
after = {{id(hook): key for m in model.modules() for key, hook in m._forward_hooks.items()}}
assert before.items() <= after.items(), "a later hook took the place of a loaded one"
assert len(after) == len(before) + 20
torch.manual_seed(1)
images = torch.load({images!r})
torch.manual_seed(1)
torch.save(model(images), {out!r})
drop.remove()
assert sum(len(m._forward_hooks) for m in model.modules()) == 20
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
