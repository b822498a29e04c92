"""`predict`: Monte Carlo statistics of a model with active hooks, for a batch or a loader; `samples`: sample by sample."""

import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.special import entr
from torch.utils.data import DataLoader, TensorDataset

import hookdrop
from hookdrop import Dropout, Injection, InjectionError, Masksembles, Prediction, find, inject
from tests.support.models import Small, toy
from tests.support.training import halve, seeded

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def classifier(p: float = 0.4) -> tuple[nn.Sequential, Injection]:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).eval()
    return model, inject(model, Dropout(p), layers="1")


def predict(model: nn.Module, regularizer: Any, layers: Any, data: Any = X, **settings: Any) -> Prediction:
    return inject(model, regularizer, layers=layers).predict(data, **settings)


class TestStatistics:
    @pytest.mark.parametrize("activation", ["softmax", "sigmoid", None])
    def test_one_forward_per_sample_equals_a_loop_over_sampling(self, activation: str | None) -> None:
        """The same random numbers give the same samples, whose statistics are computed at once here."""
        model, drop = classifier()
        found = seeded(drop.predict, X, samples=12, activation=activation)
        state = torch.get_rng_state()
        torch.manual_seed(3)
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

    @pytest.mark.parametrize(("shape", "dim"), [((2, 5), -1), ((2, 7, 5), -1), ((2, 5, 6, 4), 1), ((2, 5, 3, 6, 4), 1)])
    def test_class_axis(self, shape: tuple[int, ...], dim: int) -> None:
        found = predict(nn.Sequential(nn.Identity()), Dropout(0.5), "0", torch.randn(shape), samples=8)
        assert torch.allclose(found.mean.sum(dim), torch.ones(()), atol=1e-5)
        assert found.entropy.shape == found.mutual_information.shape == found.mean.sum(dim).shape


class TestModel:
    def test_batch_norm_modes_and_weights_are_unchanged(self, model: Small, images: Tensor) -> None:
        drop = inject(model, hookdrop.DropBlock(0.4, 3), layers="layer1.*")
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

    def test_only_the_injections_of_the_handle_drop(self) -> None:
        model, values = nn.Sequential(nn.Dropout(0.5), nn.Identity(), nn.Identity()).train(), []
        inject(model, Dropout(0.5), layers="1", name="other")
        drop = inject(model, Dropout(0.5), layers="2")
        for handle, seen in ((drop, [0.0, 2.0]), (find(model), [0.0, 4.0])):
            handle.predict(torch.ones(4, 8), samples=8, output=lambda out: values.append(out.unique()) or out)
            assert torch.cat(values).unique().tolist() == seen
            values.clear()

    def test_rate_without_effect_raises_before_the_loader_is_read_and_errors_restore_the_model(self) -> None:
        model, read = nn.Sequential(nn.Identity()), []
        drop = inject(model, Dropout(0.4), layers="0", schedule=hookdrop.LinearSchedule(10))
        with pytest.raises(InjectionError):
            drop.predict(read.append(x) or x for x in [X])
        assert read == []
        assert drop.predict(X.bfloat16(), p=0.4).mean.dtype == torch.float32
        with pytest.raises(ZeroDivisionError):
            drop.predict(X, p=0.4, output=lambda out: 1 / 0)
        assert model.training
        assert torch.equal(model.eval()(X), X)


class TestInput:
    @pytest.mark.parametrize(
        "batches",
        [
            [[X, torch.zeros(4)], (X[:3],), X[:1]],
            DataLoader(TensorDataset(X, torch.zeros(4)), batch_size=3),
            [X[:2], X[:0], X[2:]],
        ],
        ids=["pairs and tensors", "a DataLoader", "an empty batch"],
    )
    def test_loader_gives_the_rows_of_its_batches(self, batches: Any) -> None:
        _, drop = classifier()
        found = seeded(lambda: drop.predict((batch for batch in batches), samples=9))
        torch.manual_seed(3)
        parts = [drop.predict(x if isinstance(x, Tensor) else x[0], samples=9) for x in batches]
        for name in ("mean", "variance", "entropy", "mutual_information"):
            assert torch.equal(getattr(found, name), torch.cat([getattr(part, name) for part in parts]))

    def test_mapping_is_passed_as_keyword_arguments_and_a_tuple_as_others(self) -> None:
        """Labels are passed if the forward names them. The output is an object with logits, as in transformers."""
        seen: list[set[str]] = []
        output = dataclasses.make_dataclass("Output", ["loss", "logits"])

        def forward(m: Any, input_ids: Tensor, attention_mask: Any = None, **others: Any) -> Any:
            seen.append({"input_ids", *others})
            return output(None, m.embedding(input_ids).mean(1))

        model = toy(forward, embedding=nn.Embedding(10, 3))
        drop = inject(model, Dropout(0.5), layers="embedding")
        batch = {"input_ids": torch.randint(10, (4, 6)), "attention_mask": torch.ones(4, 6), "labels": torch.ones(4)}
        assert drop.predict(batch, samples=10).mean.shape == (4, 3)
        assert drop.predict([batch, (batch, 0)], samples=2).mean.shape == (8, 3)
        assert set().union(*seen) == {"input_ids"}
        labeled = lambda m, input_ids, labels, **_: m.embedding(input_ids).mean(1) + labels[:, None]
        named = toy(labeled, embedding=nn.Embedding(10, 3))
        drop = inject(named, Dropout(0.5), layers="embedding")
        for data in (batch, (batch["input_ids"], batch["labels"])):
            assert drop.predict(data, samples=2).mean.shape == (4, 3)

    def test_loaders_of_inputs_and_targets_whose_inputs_are_a_dict_a_tuple_or_a_tensor(self) -> None:
        """pytorch-forecasting's and widedeep's models take a dict as one argument; a collated tuple is a list."""
        of_dict = toy(lambda m, x: m.fc(x["wide"]), fc=nn.Linear(8, 3))
        of_two = toy(lambda m, a, b: m.fc(a + b), fc=nn.Linear(8, 3))
        of_one = toy(lambda m, pair: m.fc(pair[0]), fc=nn.Linear(8, 3))
        pairs = (X, X), [X, X], {"a": X, "b": X}
        inputs = [(of_dict, {"wide": X}), *((of_two, given) for given in pairs), (of_one, [X, X])]
        for model, given in inputs:
            drop = inject(model, Dropout(0.5), layers="fc", on_existing="replace")
            assert drop.predict([(given, 0)] * 2, samples=2).mean.shape == (8, 3)
        called = drop.predict([([X, X], 0)], samples=2, call=lambda a, b: of_one((a, b))[:2])
        assert called.mean.shape == (2, 3)
        says = r"predict: .* does not take tuple(.|\n)*of a batch with targets: predict\(x\)"
        with pytest.raises(TypeError, match=says):
            drop.predict((X, torch.zeros(4)))

    def test_tensors_in_a_list_are_moved_to_the_device_of_the_model(self) -> None:
        model = toy(lambda m, images: m.fc(images[0]), fc=nn.Linear(8, 3))
        elsewhere = SimpleNamespace(to=lambda device: X)
        drop = inject(model, Dropout(0.5), layers="fc")
        assert drop.predict(([elsewhere],), samples=2).mean.shape == (4, 3)

    @pytest.mark.parametrize("settings", [{"samples": 0}, {"samples": 1}, {"samples": 2.5}, {"activation": "tanh"}])
    def test_invalid_setting_raises(self, settings: Any) -> None:
        _, drop = classifier()
        with pytest.raises((TypeError, ValueError), match=next(iter(settings))):
            drop.predict(X, **settings)


def returns(function: Any) -> nn.Module:
    return toy(lambda m, x: function(m.drop(x)), drop=nn.Identity())


class TestOutput:
    def predict(self, function: Any, **settings: Any) -> Prediction:
        return predict(returns(function), Dropout(0.5), "drop", samples=4, **settings)

    def test_output_picks_the_tensor(self) -> None:
        assert self.predict(lambda x: {"out": x}, output=lambda out: out["out"]).mean.shape == (4, 8)
        assert self.predict(lambda x: x[:, :, None], output=lambda out: out.mT).entropy.shape == (4, 1)

    def test_other_outputs_raise_and_name_what_the_model_returns(self) -> None:
        for one_class in (lambda x: x[:, :1], lambda x: x[:, 0]):
            with pytest.raises(ValueError, match='activation="sigmoid"'):
                self.predict(one_class)
            assert self.predict(one_class, activation="sigmoid").entropy is not None
        with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
            predict(returns(halve), Dropout(0.5), "drop", [X, X[:, :6]])
        for settings in ({}, {"output": lambda out: out}):
            with pytest.raises(TypeError, match="out"):
                self.predict(lambda x: {"out": x}, **settings)
        for function in (Tensor.sum, lambda x: x.argmax(-1)):  # without rows, or without floating-point numbers
            with pytest.raises(hookdrop.ShapeError):
                self.predict(function)


class FixedMasks(hookdrop.Regularizer):
    """As Masksembles: group i of n rows gets mask i."""

    rate, n, independent_samples = None, 4, 4

    def regularize(self, x: Tensor, rate: None) -> Tensor:
        return x * torch.arange(self.n, dtype=x.dtype).repeat_interleave(x.shape[0] // self.n)[:, None]


class TestFixedMasks:
    def test_each_row_gets_each_mask(self) -> None:
        found = predict(nn.Sequential(nn.Identity()), FixedMasks(), "0", samples=8, activation=None)
        assert torch.allclose(found.mean, X * 1.5)
        assert torch.allclose(found.variance, X**2 * torch.arange(4.0).repeat(2).var())

    def test_samples_that_are_no_multiple_of_the_masks_and_rows_that_cannot_be_repeated_raise(self) -> None:
        with pytest.raises(ValueError, match="samples=4"):
            predict(nn.Sequential(nn.Identity()), FixedMasks(), "0")
        model = nn.Sequential(nn.Identity(), nn.Identity())
        drop = inject(model, {"0": FixedMasks(), "1": hookdrop.DropPath(0.5, mode="batch")})
        with pytest.raises(InjectionError, match="but another"):
            drop.predict(X, samples=8)
        with pytest.raises(InjectionError, match="but the arg"):
            predict(returns(halve), FixedMasks(), "drop", [X, (torch.tensor(1.0),)], samples=4)


def detect(m: Any, images: list[Tensor]) -> list[dict[str, Tensor]]:
    """Takes a list of images, and returns a dict for each, as torchvision's detectors do."""
    m.seen.append((m.training, torch.is_grad_enabled()))
    rows = m.backbone(torch.stack(images))
    return [{"scores": row[row > 0], "boxes": torch.zeros(int((row > 0).sum()), 4)} for row in rows]


class Writer(nn.Sequential):
    """A language model with a `generate` that samples tokens."""

    def generate(self, tokens: Tensor, length: int = 3) -> Tensor:
        for _ in range(length):
            tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], 1)
        return tokens


@pytest.fixture
def detector() -> Iterator[tuple[Any, Injection]]:
    model = toy(detect, backbone=nn.Linear(8, 8), seen=[])
    with inject(model, Dropout(0.5), layers="backbone", at="input") as drop:
        yield model, drop


def test_outputs_are_those_of_the_model_inside_sampling(detector: tuple[Any, Injection]) -> None:
    model, drop = detector
    found = seeded(lambda: list(drop.samples(list(X), 5)))
    torch.manual_seed(3)
    model.eval()
    with drop.sampling(), torch.no_grad():
        expected = [model(list(X)) for _ in range(5)]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert len({tuple(len(image["boxes"]) for image in sample) for sample in found}) > 1


def test_leaving_the_loop_leaves_the_model_as_it_was(detector: tuple[Any, Injection]) -> None:
    """Between the samples, too, the caller's code runs with its own modes."""
    model, drop = detector
    model.train()
    for number, _ in enumerate(drop.samples(list(X), 5)):
        assert model.training
        assert torch.is_grad_enabled()
        torch.testing.assert_close(model.eval().backbone(X), X @ model.backbone.weight.T + model.backbone.bias)
        model.train()
        if number == 1:
            break
    assert model.seen == [(False, False)] * 2
    assert model.training


def test_generated_tokens_and_their_arguments() -> None:
    model = Writer(nn.Embedding(9, 8), nn.Linear(8, 9))
    drop, tokens = inject(model, Dropout(0.5), layers="0"), torch.tensor([[1], [2]])
    found = [*drop.samples({"tokens": tokens, "length": 6}, 8, call=model.generate)]
    assert {one.shape for one in found} == {(2, 7)}
    assert any(not torch.equal(one, found[0]) for one in found)
    assert {one.shape for one in drop.samples((tokens,), 2, call=model.generate)} == {(2, 4)}


def test_rate_and_errors() -> None:
    model = nn.Sequential(nn.Identity())
    drop = inject(model, Dropout(0.5), layers="0", schedule=hookdrop.LinearSchedule(10))
    with pytest.raises(InjectionError, match="sampling at rate 0"):
        next(drop.samples(X))
    (all_dropped,) = drop.samples(X, 1, p=1.0)
    assert not all_dropped.any()
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        drop.samples(X, 0)
    masks = inject(_wide := nn.Sequential(nn.Linear(8, 16)), Masksembles(n=2), layers="0")
    with pytest.raises(ValueError, match=r"2 fixed masks, so samples must (.|\n)*drop.predict\(x, samples=2\)"):
        next(masks.samples(X))
    with pytest.raises(RuntimeError):
        next(inject(_model := nn.Sequential(nn.Linear(8, 3)), Dropout(0.5), layers="0").samples(X[:, :3]))
    assert torch.equal(model.eval()(X), X)
