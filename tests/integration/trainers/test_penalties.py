"""The callbacks for trainers add the loss terms of penalties: the weights equal those of the terms written by hand."""

import importlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from hookdrop import HookdropWarning, InjectionSpec, find
from tests.support.tensors import all_equal

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning:lightning", "ignore::DeprecationWarning", "ignore:.*LeafSpec",
    "error::hookdrop.HookdropWarning",
)  # fmt: skip

X, Y = torch.randn(48, 8, generator=torch.Generator().manual_seed(0)), torch.arange(48) % 3


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


def callbacks(cls: Any, penalty: str, layers: str) -> list[Any]:
    return [cls(InjectionSpec("ActivationPenalty(l2=2.0, slowness=0)", layers=layers))] if penalty == "callback" else []


def keep(layer: nn.Module) -> list[Tensor]:
    """Return a list that always has the last output of the layer."""
    kept: list[Tensor] = []
    layer.register_forward_hook(lambda layer, args, output: kept.__setitem__(slice(None), [output]))
    return kept


def weights(model: nn.Module) -> list[Tensor]:
    return [weight.detach() for weight in model.parameters()]


def assert_close(found: nn.Module, expected: nn.Module, other: nn.Module) -> None:
    """The weights are the expected ones, and not those of a training without a penalty."""
    for one, two in zip(weights(found), weights(expected), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)
    assert not all(torch.allclose(*pair, rtol=1e-3) for pair in zip(weights(found), weights(other), strict=True))


def fit_lightning(folder: Path, penalty: str, automatic: bool = True, scaled: bool = False, **more: Any) -> nn.Module:
    lightning = pytest.importorskip("lightning")
    from lightning.pytorch.plugins import MixedPrecision

    from hookdrop.integrations.lightning import InjectionCallback
    from tests.integration.trainers.test_lightning import trainer

    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.automatic_optimization = net(), automatic
            self.kept = keep(self.model[0])

        def training_step(self, batch: Any, index: int) -> Any:
            # The square root saves its result, which must not be modified in place.
            loss = nn.functional.cross_entropy(self.model(batch[0]), batch[1]).sqrt()
            if penalty == "by hand":
                loss = loss + 2 * self.kept[0].float().pow(2).mean()
            if not automatic:
                self.manual_backward(loss + find(self).penalty() if penalty == "callback" else loss)
                self.optimizers().step()
                self.optimizers().zero_grad()
            return {"loss": loss}

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    if scaled:
        more["plugins"] = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=64.0))
    made = trainer(*callbacks(InjectionCallback, penalty, "model.0"), max_epochs=1, default_root_dir=folder, **more)
    made.fit(model := Classifier(), DataLoader(TensorDataset(X, Y), batch_size=4))
    return model


def fit_fastai(folder: Path, penalty: str, samples: int = 0) -> nn.Module:
    pytest.importorskip("fastai")
    import fastai.callback.progress  # adds no_bar to Learner
    from fastai.callback.training import GradientAccumulation
    from fastai.data.core import DataLoaders
    from fastai.data.load import DataLoader as Loader
    from fastai.learner import Learner
    from fastai.optimizer import OptimWrapper

    from hookdrop.integrations.fastai import InjectionCallback

    assert fastai.callback.progress
    model, data = net(), TensorDataset(X, Y)
    kept = keep(model[0])

    def loss(found: Tensor, labels: Tensor) -> Tensor:
        term = 2 * kept[0].pow(2).mean() if penalty == "by hand" else 0.0
        return nn.functional.cross_entropy(found, labels) + term

    learn = Learner(
        DataLoaders(Loader(data, bs=4), Loader(data, bs=4)), model, loss_func=loss, path=folder,
        opt_func=lambda params, lr: OptimWrapper(params, torch.optim.SGD, lr=lr),
    )  # fmt: skip
    accumulation = [GradientAccumulation(samples)] if samples else []
    with learn.no_bar(), learn.no_logging():
        learn.fit(1, 0.1, cbs=[*callbacks(InjectionCallback, penalty, "0"), *accumulation])
    return model


def fit_transformers(folder: Path, penalty: str, register: bool = True, scaled: Any = None, **settings: Any) -> Any:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from transformers import Trainer
    from transformers.utils import logging as log

    from hookdrop.integrations.transformers import InjectionCallback
    from tests.integration.trainers.test_transformers import trainer
    from tests.support import transformers_models

    log.set_verbosity_error()
    torch.manual_seed(1)
    model = transformers_models.llama()
    kept = keep(model.model.norm)  # whose output is large enough

    class ByHand(Trainer):
        loss_is_scaled_for_ga = scaled

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if scaled is False:
                kwargs.pop("num_items_in_batch")  # the mean over the batch
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            return loss + 2 * kept[0].pow(2).mean() if penalty == "by hand" and model.training else loss

    sgd = {"learning_rate": 0.1, "optim": "sgd", "eval_strategy": "epoch", "lr_scheduler_type": "constant"}
    given = callbacks(InjectionCallback, penalty, "model.norm")
    made = trainer(folder, *(given if register else []), model=model, cls=ByHand, **sgd, **settings)
    if given and not register:
        made.add_callback(given[0])
    made.train()
    return model


@pytest.mark.parametrize(
    ("fit", "settings"),
    [
        (fit_lightning, {}),
        (fit_lightning, {"accumulate_grad_batches": 3}),
        (fit_lightning, {"automatic": False}),
        (fit_lightning, {"scaled": True}),
        (fit_fastai, {}),
        (fit_fastai, {"samples": 12}),
        (fit_transformers, {}),
    ],
)
def test_equals_the_penalty_by_hand(fit: Callable[..., nn.Module], settings: dict[str, Any], tmp_path: Path) -> None:
    assert_close(*(fit(tmp_path, penalty, **settings) for penalty in ("callback", "by hand", "none")))


@pytest.mark.parametrize("scaled", [None, False])
def test_batches_that_transformers_accumulates_add_their_share(scaled: bool | None, tmp_path: Path) -> None:
    """Whether the Trainer divides the loss by their number, or by the number of all tokens."""
    halves = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    found = fit_transformers(tmp_path, "callback", scaled=scaled, **halves)
    assert_close(found, fit_transformers(tmp_path, "by hand"), fit_transformers(tmp_path, "none"))


def test_without_register_transformers_does_not_add_the_penalty_and_it_warns(tmp_path: Path) -> None:
    with pytest.warns(HookdropWarning, match="nothing read the loss terms"):
        found = fit_transformers(tmp_path, "callback", register=False, num_train_epochs=7)
    assert all_equal(weights(found), weights(fit_transformers(tmp_path, "none", num_train_epochs=7)))


@pytest.mark.parametrize("trainer", ["fastai", "lightning", "transformers"])
def test_specs_that_are_malformed_or_missing_are_refused(trainer: str) -> None:
    pytest.importorskip(trainer)
    callback: Any = importlib.import_module(f"hookdrop.integrations.{trainer}").InjectionCallback
    with pytest.raises(TypeError, match=r"no argument 'layer'(?s:.)*layers"):
        callback({"regularizer": "Dropout(p=0.1)", "layer": "1"})
    with pytest.raises(TypeError, match="at least one spec"):
        callback()
    spec = {"regularizer": "Dropout(p=0.1)", "layers": "1"}
    with pytest.raises(TypeError, match=r"InjectionCallback\(\*specs\)"):
        callback([spec, spec])
    for specs in () if trainer == "fastai" else (spec, [spec]):
        assert repr(callback(specs=specs)) == "<InjectionCallback: 1 spec>"
