"""Loss terms: the formula, its shapes and settings; collected in training forwards, read once, and never kept for long."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from itertools import product
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

import hookdrop
from hookdrop import ActivationPenalty, HookdropWarning, InjectionError, Penalty, Rate, ShapeError, find, inject, plan
from hookdrop.functional import activation_penalty
from hookdrop.methods import penalties
from hookdrop.testing import check_regularizer
from tests.support.models import toy
from tests.support.tensors import all_equal
from tests.support.training import gradients_of

X = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())


def penalized(**settings: Any) -> tuple[nn.Sequential, hookdrop.Injection]:
    model = net()
    return model, inject(model, ActivationPenalty(), layers=["0", "2"], **settings)


def by_hand(h: Tensor, l2: float = 2.0, slowness: float = 1.0, time_dim: int = 1) -> Tensor:
    """As in main.py of awd-lstm-lm, where time is axis 0."""
    h = h.transpose(0, time_dim)
    return l2 * h.pow(2).mean() + slowness * (h[1:] - h[:-1]).pow(2).mean()


def of_layers(model: nn.Sequential, x: Tensor = X) -> Tensor:
    """The penalty at the layers 0 and 2."""
    first = model[0].forward(x)
    return by_hand(first) + by_hand(model[2].forward(torch.tanh(first)))


class TestSum:
    def test_the_gradient_is_that_of_the_penalty_written_out(self) -> None:
        """The output is that of the layer itself."""
        model, drop = penalized()
        expected = gradients_of(model, lambda: model(X).square().mean() + of_layers(model))
        drop.penalty()
        torch.testing.assert_close(gradients_of(model, lambda: model(X).square().mean() + drop.penalty()), expected)
        assert torch.equal(model(X), net()(X))

    def test_a_reading_sums_all_forwards_of_all_threads_and_clears_the_sum(self) -> None:
        model, drop = penalized()
        with drop.recording() as recorded:
            threads = [Thread(target=model, args=(x,)) for x in (X, 2 * X, X)]
            _ = [thread.start() for thread in threads], [thread.join() for thread in threads]
        assert recorded.totals.calls == 6
        found = drop.penalty()
        torch.testing.assert_close(found, 2 * of_layers(model) + of_layers(model, 2 * X))
        assert found.shape == ()
        assert drop.penalty() == 0
        assert not drop.penalty().requires_grad

    def test_find_sums_over_names_and_skips_those_without_a_penalty(self) -> None:
        model, drop = penalized()
        other = inject(model, ActivationPenalty(l2=1.0, slowness=0.0), layers="1", name="other")
        inject(model, hookdrop.Dropout(p=0.5), layers="3")
        model(X)
        expected = of_layers(model) + torch.tanh(model[0].forward(X)).pow(2).mean()
        torch.testing.assert_close(find(model).penalty(), expected)
        assert drop.penalty() == other.penalty() == 0

    def test_a_handle_without_a_penalty_raises(self) -> None:
        model = net()
        drop = inject(model, hookdrop.Dropout(p=0.5), layers="1")
        says = r"'dropout' adds no term to the loss.\n  inject\(model, ActivationPenalty"
        with pytest.raises(InjectionError, match=says):
            drop.penalty()
        drop.remove()
        for one, says in ((find(model), "this model adds no term"), (drop, r"penalty\(\): 'dropout' was removed")):
            with pytest.raises(InjectionError, match=says):
                one.penalty()

    def test_the_sum_is_on_the_device_of_the_last_term(self) -> None:
        """Tensors on the meta device stand for those of another accelerator."""
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, device="meta"))
        drop = inject(model, ActivationPenalty(), layers=["0", "1"])
        assert drop.penalty().device.type == "meta"
        model[1](model[0](X).to("meta"))
        assert drop.penalty().device.type == "meta"
        with torch.no_grad():
            model[0](X)
        assert drop.penalty().device.type == "meta"


class TestWhatIsCollected:
    def test_eval_mode_disabled_no_grad_probe_and_rate_0_collect_nothing(self) -> None:
        """Also in a trained model, where other regularizers warn that they drop without gradients."""
        model, drop = penalized()
        train(model, 3, drop.penalty)
        with drop.disabled():
            model(X)
        with torch.no_grad():
            model(X)
        hookdrop.update_bn([X], model)
        assert "'activationpenalty' adds terms to the loss, and changes no forward" in str(drop.probe(X))
        model.eval()
        model(X)
        with drop.sampling():
            model(X)
        assert drop.penalty() == 0
        model.train()
        drop.target_p = 0.0
        model(X)
        assert drop.penalty() == 0

    def test_torch_func_differentiates_a_penalty_that_is_read_inside(self) -> None:
        model, drop = penalized()
        weights = {name: weight.detach() for name, weight in model.named_parameters()}

        def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
            return functional_call(model, weights, (x,)).square().mean() + drop.penalty()

        whole = torch.func.grad(loss)(weights, X)
        each = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, X.unsqueeze(1))
        for found, x in ((whole, X), ({name: grad[1] for name, grad in each.items()}, X[1:2])):
            expected = gradients_of(model, lambda x=x: model(x).square().mean() + drop.penalty())
            torch.testing.assert_close(list(found.values()), expected)

    def test_weights_of_functional_calls_are_no_updates(self) -> None:
        """As in MAML, whose inner steps make new weights."""
        model, drop = penalized()
        several = [{name: weight * scale for name, weight in model.named_parameters()} for scale in (1, 2, 3)]
        terms = [(functional_call(model, weights, (X,)), drop.penalty())[1] for weights in several]
        [functional_call(model, weights, (X,)) for weights in several]
        torch.testing.assert_close(drop.penalty(), sum(terms))

    @pytest.mark.filterwarnings("ignore:predict")
    def test_predict_refuses_a_penalty_alone(self) -> None:
        _, drop = penalized()
        with pytest.raises(InjectionError, match="leaves the forward unchanged, so all samples would be equal"):
            drop.predict(X)


class TestCopiesAndCheckpoints:
    @pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
    def test_copies_have_the_penalty_but_none_of_the_terms(self, twin_of: Callable[[nn.Module], nn.Module]) -> None:
        model, drop = penalized()
        model(X)
        twin = twin_of(model)
        assert find(twin).penalty() == 0
        twin(X)
        torch.testing.assert_close(find(twin).penalty(), drop.penalty())
        with pytest.warns(HookdropWarning, match="nothing read the loss terms"):
            train(twin, 25)

    @pytest.mark.parametrize("early_stop", [True, False])
    @pytest.mark.parametrize("part", [slice(0, 4), slice(0, 2), slice(2, 4)])
    def test_a_checkpoint_counts_once_with_the_right_gradient(self, part: slice, early_stop: bool) -> None:
        model, drop = penalized()
        expected = gradients_of(model, lambda: model(X).square().mean() + drop.penalty())

        def checkpointed() -> Tensor:
            with torch.utils.checkpoint.set_checkpoint_early_stop(early_stop):
                y = model[: part.start](X) if part.start else X
                y = checkpoint(model[part], y, use_reentrant=False)
                y = model[part.stop :](y) if part.stop < 4 else y
            return y.square().mean() + drop.penalty()

        assert all_equal(gradients_of(model, checkpointed), expected)
        assert drop.penalty() == 0

    def test_a_reentrant_checkpoint_is_refused_because_its_term_would_have_no_gradient(self) -> None:
        model, drop = penalized()
        with pytest.raises(InjectionError, match=r"a reentrant checkpoint runs(.|\n)*use_reentrant=False"):
            checkpoint(model, X.clone().requires_grad_(), use_reentrant=True)
        with drop.disabled():
            checkpoint(model, X.clone().requires_grad_(), use_reentrant=True)


class Failing(nn.Module):
    error: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return x


quiet = pytest.mark.filterwarnings("ignore:The .grad attribute")  # of Dynamo, for a tensor that is not a leaf


@quiet
@pytest.mark.parametrize("compiled", ["", "0", "1", "whole"])
def test_a_forward_that_raised_adds_nothing(compiled: str) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), Failing()) for _ in range(2)))
    drop = inject(model, ActivationPenalty(), layers="*.0")
    run = torch.compile(model, backend="aot_eager") if compiled == "whole" else model
    if compiled in ("0", "1"):
        model[int(compiled)].compile(backend="aot_eager")
    run(X)
    expected = drop.penalty()
    errors = RuntimeError("out of memory"), KeyboardInterrupt()
    for part, error, forwards in product(("0.1", "1.1"), errors, (0, 1, 2)):
        model.get_submodule(part).error = error
        with pytest.raises(type(error)):
            run(X)
        _ = [run(X) for _ in range(forwards)]
        torch.testing.assert_close(drop.penalty(), forwards * expected)
    torch.compiler.reset()


def train(model: nn.Module, steps: int, read: Any = lambda: 0.0, batches: int = 1, **settings: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, **settings)
    for _ in range(steps):
        for _ in range(batches):
            (model(X).square().mean() + read()).backward()
        optimizer.step()
        optimizer.zero_grad()


@quiet
@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("settings", [{"fused": False}, {"fused": True}, {"batches": 2}])
def test_a_penalty_that_is_not_read_for_20_updates_warns_once(settings: dict[str, Any], compiles: bool) -> None:
    model, drop = penalized()
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiles else model
    train(run, 19, **settings)
    assert not drop.check()
    with pytest.warns(HookdropWarning, match=r"updated 20 times, and nothing read(.|\n)*drop.penalty\(\)") as caught:
        train(run, 30, **settings)
    assert len(caught) == 1
    assert "nothing read the loss terms" in "".join(drop.check())
    torch.compiler.reset()


def test_unread_terms_of_earlier_updates_are_forgotten_so_that_a_late_reading_works() -> None:
    """Their graphs are used up: a backward pass through them would fail."""
    model, drop = penalized()
    train(model, 5)
    found = gradients_of(model, lambda: model(X).square().mean() + drop.penalty())
    drop.remove()
    torch.testing.assert_close(found, gradients_of(model, lambda: model(X).square().mean() + of_layers(model)))


class Marker(torch.autograd.Function):
    """The identity, whose node of the graph can be referenced weakly."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, nodes: list[weakref.ref[Any]]) -> Tensor:
        nodes.append(weakref.ref(ctx))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def living(nodes: list[weakref.ref[Any]]) -> int:
    gc.collect()
    return sum(node() is not None for node in nodes)


def test_unread_terms_do_not_keep_earlier_graphs_alive() -> None:
    """Only that of the last forward, which may still be read."""
    model, drop = penalized()
    nodes: list[weakref.ref[Any]] = []
    model.register_forward_pre_hook(lambda _, args: Marker.apply(args[0].clone().requires_grad_(), nodes))
    train(model, 10)
    assert (len(nodes), living(nodes)) == (10, 1)
    drop.penalty()
    assert living(nodes) == 0
    model(X)
    drop.remove()
    assert living(nodes) == 0


def test_the_step_of_a_discriminator_between_forward_and_reading_keeps_the_terms() -> None:
    """As in a GAN: the generator runs, the discriminator is updated, and then the loss of the generator is read."""
    model = nn.ModuleDict({"critic": nn.Linear(8, 1), "generator": net()})
    drop = inject(model, ActivationPenalty(), layers="generator.0")
    critic, generator = (torch.optim.SGD(model[name].parameters(), 1e-3) for name in ("critic", "generator"))
    for _ in range(25):
        fake = model["generator"](X)
        model["critic"](fake.detach()).mean().backward()
        critic.step()
        penalty = drop.penalty()
        assert penalty > 0
        (model["critic"](fake).mean() + penalty).backward()
        generator.step()
    assert not drop.check()


def test_the_number_of_unread_terms_is_bounded_without_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penalties, "MOST_UNREAD", 10)
    model, drop = penalized()
    with pytest.warns(HookdropWarning, match=r"more than 10 loss terms were not read(.|\n)*drop.disabled") as caught:
        _ = [model(X) for _ in range(9)]
    assert len(caught) == 1
    torch.testing.assert_close(drop.penalty(), 5 * of_layers(model))


class TestFormula:
    @pytest.mark.parametrize("time_dim", [0, 1, -2])
    @pytest.mark.parametrize(("l2", "slowness"), [(2.0, 1.0), (0.0, 3.0), (0.5, 0.0)])
    def test_value_and_gradient_are_those_of_the_authors(self, l2: float, slowness: float, time_dim: int) -> None:
        x = torch.randn(5, 7, 3, dtype=torch.float64, requires_grad=True)
        found, expected = activation_penalty(x, l2, slowness, time_dim), by_hand(x, l2, slowness, time_dim)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(*(torch.autograd.grad(term, x)[0] for term in (found, expected)))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_low_precision_is_computed_in_float32(self, dtype: torch.dtype) -> None:
        """The squares overflow float16, and their sum has no digits left in bfloat16."""
        x = (torch.randn(4, 500, 8) + 300.0).to(dtype).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            term = activation_penalty(x)
        assert term.dtype == torch.float32
        torch.testing.assert_close(term, by_hand(x.float()))
        assert torch.autograd.grad(term, x)[0].dtype == dtype

    @pytest.mark.parametrize(("shape", "term"), [((0, 5, 3), 0), ((4, 0, 3), 0), ((4, 1, 3), 2)])
    def test_few_elements_and_a_single_time_step_without_slowness(self, shape: tuple[int, ...], term: int) -> None:
        assert activation_penalty(torch.ones(shape)) == term

    def test_in_place_layers_after_the_site_change_neither_the_value_nor_the_gradient(self) -> None:
        model, x = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True)), torch.randn(4, 6, 3)
        expected = torch.autograd.grad(by_hand(model[0](x)), model[0].weight)[0]
        drop = inject(model, ActivationPenalty(), layers="0")
        model(x)
        torch.testing.assert_close(torch.autograd.grad(drop.penalty(), model[0].weight)[0], expected)


class TestShapes:
    @pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
    @pytest.mark.parametrize("batch_first", [False, True])
    def test_the_batch_of_an_rnn_is_not_taken_for_time(self, kind: type[nn.RNNBase], batch_first: bool) -> None:
        """fastai#1460 had the batch as the time axis."""
        model = nn.Sequential(kind(4, 4, batch_first=batch_first))
        right, wrong = int(batch_first), 1 - int(batch_first)
        with pytest.raises(hookdrop.LayerError, match=rf"batch_first={batch_first}(.|\n)*write time_dim={right}"):
            inject(model, ActivationPenalty(time_dim=wrong), layers="0")
        inject(model, ActivationPenalty(time_dim=wrong, slowness=0), layers="0").remove()
        drop = inject(model, ActivationPenalty(time_dim=right - 3), layers="0")
        output, _ = model(torch.randn(5, 7, 4))
        torch.testing.assert_close(drop.penalty(), by_hand(output, time_dim=right))

    def test_the_first_tensor_of_an_lstm_or_the_chosen_one_is_penalized(self) -> None:
        x = torch.randn(2, 5, 3)
        for tensor, factor in ((None, 1), ("extra", 9), ("all", 1 + 4 + 9)):
            model = nn.Sequential(toy(lambda m, x: {"hidden": (x, 2 * x), "extra": 3 * x}))
            drop = inject(model, ActivationPenalty(), layers="0", tensor=tensor)
            model(x)
            torch.testing.assert_close(drop.penalty(), factor * by_hand(x))

    def test_axes_that_are_probably_not_time_warn(self) -> None:
        model, image = nn.Sequential(nn.Identity()), torch.zeros(2, 3, 8, 8)
        warned = plan(model, ActivationPenalty(), layers="0", example_input=image).warnings
        assert "as T=3; for a map use ActivationPenalty(slowness=0)" in "".join(warned)
        inject(model, ActivationPenalty(time_dim=-1), layers="0")
        with pytest.warns(HookdropWarning, match="reads the last axis of"):
            model(image[0])

    def test_packed_sequences_have_a_mean_of_squares_but_no_next_step(self) -> None:
        model, packed = nn.Sequential(nn.LSTM(4, 4)), pack_padded_sequence(torch.randn(5, 2, 4), [5, 3])
        drop = inject(model, ActivationPenalty(time_dim=0), layers="0")
        with pytest.raises(ShapeError, match=r"PackedSequence(.|\n)*slowness=0"):
            model(packed)
        drop.remove()
        with inject(model, hookdrop.Dropout(0.5, shared=(1,)), layers="0"), pytest.raises(ShapeError):
            model(packed)
        drop = inject(model, ActivationPenalty(slowness=0), layers="0")
        output, _ = model(packed)
        torch.testing.assert_close(drop.penalty(), 2 * output.data.pow(2).mean())


class Sparsity(Penalty):
    rate = Rate("l1", high=1e6, kind="factor")

    def __init__(self, l1: float = 0.01) -> None:
        super().__init__()
        self.l1 = l1

    def penalize(self, x: Tensor, rate: Any) -> Tensor:
        return rate * x.abs().mean()


def test_a_penalty_of_a_user_passes_the_checks() -> None:
    check_regularizer(Sparsity(), expected_failures={"compiled_code_equals_eager_code": "in tests/integration/compile"})


class Returning(Sparsity):
    def __init__(self, term: Any = None) -> None:
        super().__init__()
        self.term = term

    def penalize(self, x: Tensor, rate: Any) -> Tensor:
        return self.term


class Change(Penalty):
    """Of what the layer changes, for all samples or for those on which it ran."""

    rate = Rate("scale", high=1e6, kind="factor")

    def __init__(self, needs: tuple[str, ...] = ("layer_input",)) -> None:
        super().__init__()
        self.scale, self.needs = 0.5, needs

    def penalize(self, x: Tensor, rate: Any, layer_input: Tensor | None = None) -> Tensor:
        return rate * (x if layer_input is None else x - layer_input).square().mean()


def test_a_penalty_of_parameters_and_one_that_needs_the_input_of_the_layer() -> None:
    model = net()
    with inject(model, Sparsity(0.5), layers="0", at="parameters", tensor="weight") as drop:
        assert torch.equal(model(X), net()(X))
        torch.testing.assert_close(drop.penalty(), 0.5 * model[0].weight.abs().mean())
    with inject(model, Change(), layers="0") as drop:
        assert torch.equal(model(X), net()(X))
        torch.testing.assert_close(drop.penalty(), 0.5 * (model[0].forward(X) - X).square().mean())
        assert not drop._sinks[0].eval_rate


class Undefined(Penalty):
    rate = None


@pytest.mark.parametrize(
    ("penalty", "error", "says"),
    [
        (Returning(torch.ones(3)), ShapeError, r"at '0': penalize returned a tensor of shape \(3,\), but a loss term"),
        (Returning(None), ShapeError, "at '0': penalize returned NoneType, but a loss term is a 0-d tensor"),
        (Undefined(), NotImplementedError, r"Undefined must define penalize\(self, x, rate\)"),
    ],
)
def test_a_term_that_is_not_a_scalar_raises(penalty: Penalty, error: type[Exception], says: str) -> None:
    model = nn.Sequential(nn.Identity())
    inject(model, penalty, layers="0")
    with pytest.raises(error, match=says):
        model(torch.ones(2))
