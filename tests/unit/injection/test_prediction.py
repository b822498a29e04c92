"""`predict`: Monte Carlo statistics of a model with active hooks, for a batch or a loader."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.special import entr
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from hookdrop import (
    DropBlock,
    Dropout,
    DropPath,
    Injection,
    InjectionError,
    LinearSchedule,
    Prediction,
    Regularizer,
    ShapeError,
    find,
    inject,
)
from tests.support.injections import halve
from tests.support.models import Small

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def classifier(p: float = 0.4) -> tuple[nn.Sequential, Injection]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).eval()
    return model, inject(model, Dropout(p), layers="1")


def predict(model: nn.Module, regularizer: Any, layers: Any, data: Any = X, **settings: Any) -> Prediction:
    return inject(model, regularizer, layers=layers).predict(data, **settings)


class TestStatistics:
    @pytest.mark.parametrize("activation", ["softmax", "sigmoid", None])
    def test_one_forward_per_sample_equals_a_loop_over_sampling(self, activation: str | None) -> None:
        """The same random numbers give the same samples, whose statistics are computed at once here."""
        model, drop = classifier()
        torch.manual_seed(1)
        found = drop.predict(X, samples=12, activation=activation)
        state = torch.get_rng_state()
        torch.manual_seed(1)
        with drop.sampling(), torch.no_grad():
            out = torch.stack([model(X) for _ in range(12)]).double()
        assert torch.equal(torch.get_rng_state(), state)
        samples = {"softmax": out.softmax(-1), "sigmoid": out.sigmoid(), None: out}[activation]

        def entropy(p: Tensor) -> Tensor:
            return entr(p).sum(-1) if activation == "softmax" else entr(p) + entr(1 - p)

        assert found.samples == 12
        assert torch.allclose(found.mean.double(), samples.mean(0), atol=1e-6)
        assert torch.allclose(found.variance.double(), samples.var(0), atol=1e-6)
        if activation is None:
            assert (found.entropy, found.mutual_information) == (None, None)
        else:
            assert torch.allclose(found.entropy.double(), entropy(samples.mean(0)), atol=1e-6)
            information = entropy(samples.mean(0)) - entropy(samples).mean(0)
            assert torch.allclose(found.mutual_information.double(), information, atol=1e-6)
            assert information.max() > 1e-3

    def test_low_precision_outputs_are_summarized_in_float32(self) -> None:
        model, drop = classifier()
        model.bfloat16()
        found = drop.predict(X.bfloat16(), samples=20)
        assert found.mean.dtype == torch.float32
        assert found.mean.sum(-1) == pytest.approx(1.0, abs=1e-6)
        assert drop.predict(X.bfloat16(), samples=20, output=Tensor.double).variance.dtype == torch.float64

    @pytest.mark.parametrize(
        ("shape", "axis"), [((2, 5), -1), ((2, 7, 5), -1), ((2, 5, 6, 4), 1), ((2, 5, 3, 6, 4), 1)]
    )
    def test_class_axis(self, shape: tuple[int, ...], axis: int) -> None:
        model = nn.Sequential(nn.Identity())
        found = predict(model, Dropout(0.5), "0", torch.randn(shape), samples=8)
        assert torch.allclose(found.mean.sum(axis), torch.ones(()), atol=1e-5)
        assert found.entropy.shape == found.mutual_information.shape == found.mean.sum(axis).shape


class TestModel:
    def test_batch_norm_modes_and_weights_are_unchanged(self, model: Small, images: Tensor) -> None:
        drop = inject(model, DropBlock(0.4, 3), layers="layer1.*")
        model.train()
        frozen = model.layer2[0].eval()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        modes = [module.training for module in model.modules()]
        found = drop.predict(images, samples=3)
        assert found.variance.max() > 0
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert [module.training for module in model.modules()] == modes
        assert not frozen.training
        assert not found.mean.requires_grad
        assert all(weight.grad is None for weight in model.parameters())

    def test_only_this_injection_drops(self) -> None:
        model = nn.Sequential(nn.Dropout(0.5), nn.Identity(), nn.Identity()).train()
        inject(model, Dropout(0.5), layers="1", name="other")
        drop = inject(model, Dropout(0.5), layers="2")
        values = []
        drop.predict(torch.ones(4, 8), samples=8, output=lambda out: values.append(out.unique()) or out)
        assert torch.cat(values).unique().tolist() == [0.0, 2.0]  # both others would give 4 or 8

    def test_error_restores_modes_and_rates(self) -> None:
        model, drop = classifier()
        model.train()
        with pytest.raises(RuntimeError):
            drop.predict(torch.ones(4, 9))
        assert model.training
        model.eval()
        assert torch.equal(model(X), model(X))

    def test_rate_without_effect_raises_before_the_loader_is_read(self) -> None:
        model, read = nn.Sequential(nn.Identity()), []
        drop = inject(model, Dropout(0.4), layers="0", schedule=LinearSchedule(10))
        with pytest.raises(InjectionError, match=r"sampling at rate 0(.|\n)*sampling\(p=0.4\)"):
            drop.predict(read.append(x) or x for x in [X])
        assert read == []
        assert drop.predict(X, p=0.4).variance.max() > 0
        with pytest.raises(ValueError, match=r"must lie in \[0, 1\], got 1.5"):
            drop.predict(X, p=1.5)


class Keywords(nn.Module):
    """Takes keyword arguments and returns an object with logits, as the models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 8), nn.Linear(8, 3)
        self.seen: list[set[str]] = []

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **others: Any) -> Any:
        self.seen.append({"input_ids", *others})
        x = self.embedding(input_ids)
        if attention_mask is not None:
            x = x * attention_mask[..., None]
        return dataclasses.make_dataclass("Output", ["loss", "logits"])(None, self.head(x.mean(1)))


class Labeled(Keywords):
    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        assert labels is not None
        return super().forward(input_ids)


class TestInput:
    def test_loader_gives_the_rows_of_its_batches(self) -> None:
        _, drop = classifier()
        batches = [[X, torch.zeros(4)], (X[:3],), X[:1]]
        torch.manual_seed(0)
        found = drop.predict(batches, samples=9)
        torch.manual_seed(0)
        parts = [drop.predict(x, samples=9) for x in (X, X[:3], X[:1])]
        for name in ("mean", "variance", "entropy", "mutual_information"):
            assert torch.equal(getattr(found, name), torch.cat([getattr(part, name) for part in parts]))
        assert len(found.mean) == 8

    def test_data_loaders_and_generators(self) -> None:
        class Stream(IterableDataset[Tensor]):
            def __iter__(self) -> Iterator[Tensor]:
                return iter(X)

        _, drop = classifier()
        for loader in (
            DataLoader(TensorDataset(X, torch.zeros(4)), batch_size=3),
            DataLoader(Stream(), batch_size=3),
            (x for x in X.split(3)),
        ):
            assert drop.predict(loader, samples=2).mean.shape == (4, 3)

    def test_mapping_is_passed_as_keyword_arguments(self) -> None:
        model = Keywords()
        drop = inject(model, Dropout(0.5), layers="embedding")
        batch = {"input_ids": torch.randint(10, (4, 6)), "attention_mask": torch.ones(4, 6), "labels": torch.ones(4)}
        found = drop.predict(batch, samples=10)
        assert found.mean.shape == (4, 3)
        assert drop.predict([batch, (batch, 0)], samples=2).mean.shape == (8, 3)
        assert set().union(*model.seen) == {"input_ids"}

    def test_labels_are_passed_if_the_forward_names_them(self) -> None:
        batch = {"input_ids": torch.randint(10, (4, 6)), "labels": torch.ones(4)}
        assert predict(Labeled(), Dropout(0.5), "embedding", batch, samples=2).mean.shape == (4, 3)

    def test_tuple_is_passed_as_arguments(self) -> None:
        model = nn.Bilinear(8, 8, 3)
        found = inject(model, Dropout(0.5), layers=model).predict((X, X), samples=5)
        assert found.mean.shape == (4, 3)

    def test_empty_batch_gives_no_rows(self) -> None:
        _, drop = classifier()
        assert drop.predict(X[:0]).mean.shape == (0, 3)

    @pytest.mark.parametrize(
        ("settings", "text"),
        [
            ({"samples": 0}, "samples must be at least 1, got 0"),
            ({"samples": 1}, "samples must be at least 2, got 1: one sample has no variance"),
            ({"samples": 2.5}, "samples must be an integer"),
            ({"activation": "tanh"}, "activation must be one of 'softmax', 'sigmoid', None"),
        ],
    )
    def test_invalid_setting_raises(self, settings: Any, text: str) -> None:
        _, drop = classifier()
        with pytest.raises((TypeError, ValueError), match=text):
            drop.predict(X, **settings)


class Returns(nn.Module):
    """Returns what a function makes of its input."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.drop, self.function = nn.Identity(), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.drop(x))


class TestOutput:
    def predict(self, function: Any, **settings: Any) -> Prediction:
        return predict(Returns(function), Dropout(0.5), "drop", samples=4, **settings)

    def test_output_picks_the_tensor(self) -> None:
        assert self.predict(lambda x: {"out": x}, output=lambda out: out["out"]).mean.shape == (4, 8)
        assert self.predict(lambda x: x[:, :, None], output=lambda out: out.mT).entropy.shape == (4, 1)

    def test_other_outputs_raise_and_name_what_the_model_returns(self) -> None:
        with pytest.raises(TypeError, match=r"the model returns .*out.*\n.*output=lambda out: out"):
            self.predict(lambda x: {"out": x})
        with pytest.raises(TypeError, match="no tensor was picked from"):
            self.predict(lambda x: {"out": x}, output=lambda out: out)

    @pytest.mark.parametrize("function", [Tensor.sum, lambda x: x.argmax(-1)])
    def test_output_without_rows_or_floating_point_numbers_raises(self, function: Any) -> None:
        with pytest.raises(ShapeError, match="a floating-point tensor with one row per input"):
            self.predict(function)

    @pytest.mark.parametrize("function", [lambda x: x[:, :1], lambda x: x[:, 0]])
    def test_softmax_of_one_class_raises(self, function: Any) -> None:
        with pytest.raises(ValueError, match='the softmax needs two classes(.|\n)*activation="sigmoid"'):
            self.predict(function)
        assert self.predict(function, activation="sigmoid").entropy is not None

    def test_batches_with_different_outputs_raise(self) -> None:
        with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
            predict(Returns(halve), Dropout(0.5), "drop", [X, X[:, :6]])

    def test_prediction_prints_its_averages(self) -> None:
        text = (
            r"<Prediction \(4, 8\) from 4 samples; on average: std [\d.]+, entropy [\d.]+, mutual information [\d.]+>"
        )
        assert re.fullmatch(text, repr(self.predict(halve)))
        assert "entropy" not in repr(self.predict(halve, activation=None))


class FixedMasks(Regularizer):
    """Masksembles: group i of n rows gets mask i."""

    rate = None

    def __init__(self, n: int = 4) -> None:
        super().__init__()
        self.n = n

    @property
    def independent_samples(self) -> int:
        return self.n

    def regularize(self, x: Tensor, rate: None) -> Tensor:
        factors = torch.arange(self.n, dtype=x.dtype).repeat_interleave(x.shape[0] // self.n)
        return x * factors[:, None]


class TestFixedMasks:
    def test_each_row_gets_each_mask(self) -> None:
        found = predict(nn.Sequential(nn.Identity()), FixedMasks(), "0", samples=8, activation=None)
        assert torch.allclose(found.mean, X * 1.5)
        assert torch.allclose(found.variance, X**2 * torch.arange(4.0).repeat(2).var())

    def test_samples_that_are_no_multiple_of_the_masks_raise(self) -> None:
        text = r"4 fixed masks, so samples must be a multiple of it, got 30.\n.*samples=4"
        with pytest.raises(ValueError, match=text):
            predict(nn.Sequential(nn.Identity()), FixedMasks(), "0")

    def test_rows_that_cannot_be_repeated_raise(self) -> None:
        model = nn.Sequential(nn.Identity(), nn.Identity())
        drop = inject(model, {"0": FixedMasks(), "1": DropPath(0.5, mode="batch")})
        with pytest.raises(InjectionError, match="4 fixed masks need a forward on 4 copies of each row, but another"):
            drop.predict(X, samples=8)
        with pytest.raises(InjectionError, match="4 fixed masks need a forward on 4 copies of each row, but the arg"):
            predict(Returns(halve), FixedMasks(), "drop", [X, (torch.tensor(1.0),)], samples=4)


class TestGroup:
    def test_all_injections_drop(self) -> None:
        model = nn.Sequential(nn.Identity(), nn.Identity())
        inject(model, Dropout(0.5), layers="0")
        inject(model, DropPath(0.5, mode="batch"), layers="1", name="path")
        values = []
        find(model).predict(
            torch.ones(4, 8), samples=20, output=lambda out: values.append(out.unique()) or out, activation=None
        )
        assert torch.cat(values).unique().tolist() == [0.0, 4.0]
