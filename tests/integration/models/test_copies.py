"""EMA and averaged copies of a model keep its injection."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from hookdrop import (
    DropBlock,
    Dropout,
    Injection,
    InjectionError,
    LinearSchedule,
    find,
    inject,
)
from tests.support.copies import half_ramped
from tests.support.nets import Small


@pytest.fixture
def drop(model: Small) -> Injection:
    return half_ramped(model)


def test_timm_ema_copies_the_injection(model: Small, drop: Injection, images: torch.Tensor) -> None:
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


def test_sampling_on_an_ema_copy_at_rate_0_raises(model: Small) -> None:
    """The copy has its own step count: it was made at step 0 and never stepped."""
    from timm.utils import ModelEmaV3

    drop = inject(model, DropBlock(0.4, 3), layers="layer1.*", schedule=LinearSchedule(10))
    ema = ModelEmaV3(model)
    drop.step(10)
    with pytest.raises(InjectionError, match=r"sampling at rate 0(.|\n)*an EMA, has its own step count"):
        with find(ema)[0].sampling():
            pass
    find(ema)[0].load_state_dict(drop.state_dict())
    with find(ema)[0].sampling():
        assert find(ema)[0].p == 0.4


@pytest.mark.parametrize("wrapper", ["ModelEmaV2", "ModelEmaV3", "AveragedModel"])
def test_averaged_model_used_only_for_validation_does_not_warn(
    wrapper: str, model: Small, images: torch.Tensor
) -> None:
    """Its weights change, and it runs only in eval mode, as intended."""
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
