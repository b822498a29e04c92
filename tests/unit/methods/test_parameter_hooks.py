"""`at="parameters"`: weights are regularized for the duration of a call, and never change."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad
from torch.nn.utils import parametrizations, prune, spectral_norm
from torch.utils.checkpoint import checkpoint

import hookdrop
from hookdrop import Dropout, GaussianNoise, HookdropWarning, InjectionError, LayerError, Mixout, find, inject, plan
from hookdrop.core import torch_internals
from hookdrop.functional import mixout
from hookdrop.recipes import neftune
from tests.support.models import toy
from tests.support.training import seeded

LAYERS = {
    "Linear": (lambda: nn.Linear(6, 5), lambda: (torch.randn(3, 6),), ["weight"]),
    "Conv2d": (lambda: nn.Conv2d(2, 3, 3), lambda: (torch.randn(2, 2, 5, 5),), ["weight"]),
    "Embedding": (lambda: nn.Embedding(9, 4), lambda: (torch.arange(6),), ["weight"]),
    "LSTM": (lambda: nn.LSTM(4, 5, 2), lambda: (torch.randn(3, 2, 4),), ["weight_hh_l0", "weight_hh_l1"]),
    "GRU": (lambda: nn.GRU(4, 5), lambda: (torch.randn(3, 2, 4),), ["weight_hh_l0"]),
    "attention": (lambda: nn.MultiheadAttention(8, 2), lambda: (torch.randn(3, 2, 8),) * 3, ["in_proj_weight"]),
}


def placed(layer, regularizer=None, **settings):
    model = nn.Sequential(layer)
    return model, inject(model, regularizer or Dropout(p=0.5), layers="0", at="parameters", **settings)


def first(output):
    return output[0] if isinstance(output, tuple) else output


def shows_its_parameters(layer):
    return type(layer._parameters) is dict and all(getattr(layer, name) is x for name, x in layer._parameters.items())


@pytest.fixture
def linear():
    return nn.Linear(6, 5)


@pytest.fixture
def x():
    return torch.randn(3, 6)


class TestLayers:
    @pytest.mark.parametrize("kind", LAYERS)
    def test_output_is_that_of_a_layer_with_the_regularized_weights(self, kind):
        make, arguments, names = LAYERS[kind]
        layer, args = make(), arguments()
        twin, before, clean = copy.deepcopy(layer), layer.state_dict(), layer.eval()(*args)
        layer.train()
        _, drop = placed(layer, tensor="weight_hh_*" if "weight_hh_l0" in names else None)
        found = seeded(layer, *args)
        torch.manual_seed(3)
        with torch.no_grad():
            for name in names:
                getattr(twin, name).copy_(Dropout(p=0.5)(getattr(twin, name)))
        torch.testing.assert_close(found, twin(*args), rtol=0, atol=0)
        assert drop.sites[0].called
        torch.testing.assert_close([layer.state_dict(), layer.eval()(*args)], [before, clean], rtol=0, atol=0)
        drop.remove()
        assert not layer._forward_pre_hooks
        assert not layer._forward_hooks

    def test_forward_sees_parameters_that_state_dict_and_optimizer_have(self, linear, x):
        inside = []

        class Watched(nn.Linear):
            def forward(self, x):
                inside.append((dict(self.named_parameters()), self.state_dict(), self.weight))
                return super().forward(x)

        layer = Watched(6, 5)
        own = dict(layer.named_parameters())
        model, _ = placed(layer)
        model(x).sum().backward()
        parameters, state, used = inside[0]
        assert all(parameters[name] is own[name] for name in own)
        torch.testing.assert_close(state, layer.state_dict(), rtol=0, atol=0)
        assert used is not own["weight"]
        assert shows_its_parameters(layer)


class TestContexts:
    @pytest.mark.parametrize("twin", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
    @pytest.mark.parametrize("regularizer", [Dropout(p=0.5), Mixout(p=0.5)])
    def test_copies_have_their_own_hooks(self, linear, x, twin, regularizer):
        model, drop = placed(linear, regularizer)
        with torch.no_grad():
            linear.weight.add_(1.0)
        other = twin(model)
        assert torch.equal(seeded(other, x), seeded(model, x))
        drop.remove()
        assert find(other)
        assert not torch.equal(seeded(other, x), seeded(model, x))

    def test_functional_call_and_grad_reach_the_given_weights(self, linear, x):
        model, _ = placed(linear)
        given = {"0.weight": torch.ones(5, 6), "0.bias": torch.zeros(5)}
        found = seeded(functional_call, model, given, (x,))
        torch.testing.assert_close(found, x @ seeded(Dropout(p=0.5), given["0.weight"]).T)
        gradient = grad(lambda weights: functional_call(model, weights, (x,)).sum())(given)["0.weight"]
        assert 0 < (gradient == 0).float().mean() < 1

    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
    @pytest.mark.parametrize("then", ["eval", "remove", "without_hooks", "replace"])
    def test_an_interrupted_call_leaves_no_regularized_weight(self, error, then, x):
        """PyTorch runs no hooks after a KeyboardInterrupt."""

        class Interrupted(nn.Linear):
            fails = True

            def forward(self, x):
                if self.fails:
                    raise error
                return super().forward(x)

        layer = Interrupted(6, 6)
        model, _ = placed(layer)
        inject(model, GaussianNoise(std=0.1), layers="0", at="parameters", on_existing="stack")
        with pytest.raises(error):
            model(x)
        assert shows_its_parameters(layer) == (error is ValueError)
        assert layer.weight is dict(layer.named_parameters())["weight"]
        layer.fails = False
        if then == "remove":
            find(model).remove()
        elif then == "replace":
            inject(model, Dropout(p=0.5), layers="0", at="parameters", on_existing="replace")
        elif then == "without_hooks":
            with hookdrop.without_hooks(model):
                pass
        else:
            torch.testing.assert_close(model.eval()(x), nn.functional.linear(x, *layer.parameters()), rtol=0, atol=0)
        assert shows_its_parameters(layer)

    @pytest.mark.parametrize("twin", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
    @pytest.mark.parametrize("kind", [nn.Linear, nn.LSTM])
    def test_a_copy_made_during_an_interrupted_call_has_its_own_weights(self, kind, twin, x, monkeypatch):
        model, drop = placed(kind(6, 6), tensor="weight_hh*" if kind is nn.LSTM else "weight")
        expected = first(model.eval()(x))
        monkeypatch.setattr(kind, "forward", lambda self, x: (_ for _ in ()).throw(KeyboardInterrupt))
        with torch.no_grad(), pytest.raises(KeyboardInterrupt):
            model.train()(x)
        copied = twin(model)
        monkeypatch.undo()
        torch.testing.assert_close(first(copied.eval()(x)), expected, rtol=0, atol=0)
        find(copied).remove()
        drop.remove()
        assert all(map(shows_its_parameters, (model[0], copied[0])))

    @pytest.mark.parametrize("layer", [nn.Linear(6, 6), nn.LSTM(6, 6)], ids=["Linear", "LSTM"])
    def test_samples_in_inference_mode_equal_those_without_gradients(self, layer, x):
        model, drop = placed(layer, tensor="weight*")
        with drop.sampling(), torch.inference_mode():
            found = first(seeded(model.eval(), x))
        with drop.sampling(), torch.no_grad():
            assert torch.equal(found, first(seeded(model, x)))

    def test_stacked_regularizers_act_one_after_the_other(self, linear, x):
        """The last one that is injected comes first."""
        model, _ = placed(linear)
        inject(model, GaussianNoise(std=0.1), layers="0", at="parameters", on_existing="stack")
        expected = seeded(nn.Sequential(GaussianNoise(std=0.1), Dropout(p=0.5)), linear.weight)
        torch.testing.assert_close(seeded(model, x), nn.functional.linear(x, expected, linear.bias), rtol=0, atol=0)
        assert shows_its_parameters(linear)

    def test_threads_that_call_one_layer_at_once_raise(self, x):
        """The other thread would compute with the weights of this call, and see them restored before its own end."""

        class Slow(nn.Linear):
            def forward(self, x):
                with ThreadPoolExecutor(1) as other, pytest.raises(InjectionError, match="two threads"):
                    other.submit(self, x).result()
                return super().forward(x)

        model, _ = placed(Slow(6, 5))
        model(x)

    def test_pruned_and_normalized_weights_are_computed_from_regularized_ones(self, linear, x):
        prune.random_unstructured(linear, "weight", 0.5)
        model, _ = placed(linear)
        expected = x @ (seeded(Dropout(p=0.5), linear.weight_orig) * linear.weight_mask).T + linear.bias
        torch.testing.assert_close(seeded(model, x), expected)

    def test_handle_records_and_rebuilds_sites_of_parameters(self):
        rnn, x = nn.LSTM(4, 5, 2), torch.randn(3, 2, 4)
        model, drop = placed(rnn, tensor="weight_hh_*")
        with drop.recording(last=2) as recording:
            model(x)
        assert [tuple(one.mask.shape) for one in recording.calls("0")] == [(20, 5), (20, 5)]
        spec = hookdrop.InjectionSpec.from_dict(drop.spec.to_dict())
        twin = nn.Sequential(copy.deepcopy(rnn))
        find(twin).remove()
        inject(twin, spec).load_state_dict(drop.state_dict())
        torch.testing.assert_close(seeded(twin, x), seeded(model, x), rtol=0, atol=0)
        with find(model).disabled():
            torch.testing.assert_close(model(x), rnn.eval()(x), rtol=0, atol=0)
        assert drop.check() == []

    def test_one_mask_for_the_batch_refuses_fixed_masks_of_several_samples(self, x):
        model = nn.Sequential(nn.Linear(6, 20), nn.ReLU())
        drop = inject(model, hookdrop.Masksembles(n=2, scale=2.0), layers="1")
        inject(model, Dropout(p=0.5), layers="0", at="parameters")
        with pytest.raises(InjectionError):
            find(model).predict(x, samples=2, activation=None)
        assert drop.predict(x, samples=2, activation=None).samples == 2


def body(layer, x, weight=None):
    weight = layer.weight if weight is None else weight
    return torch.tanh(x @ weight.T) @ weight


def with_weight(forward):
    return toy(forward, weight=nn.Parameter(torch.randn(6, 6)))


class Function(torch.autograd.Function):
    forward = staticmethod(lambda ctx, layer, x: body(layer, x))  # as reversible networks, it runs the layer again


MODES = {reentrant: partial(checkpoint, use_reentrant=reentrant) for reentrant in (False, True)}
INSIDE = [
    lambda layer, x: Function.apply(layer, x),
    *(lambda layer, x, mode=mode: MODES[mode](body, layer, x) for mode in MODES),
]
BEFORE = [lambda layer, x, mode=mode: MODES[mode](body, layer, x, layer.weight) for mode in MODES]


class TestCheckpointInsideTheLayer:
    """Its recompute runs after the call, and would read the parameter as it is."""

    @pytest.mark.parametrize("around", [None, *MODES.values()])
    @pytest.mark.parametrize("forward", BEFORE + INSIDE)
    def test_is_exact_or_refused(self, forward, around):
        def gradients(forward, around=None):
            torch.manual_seed(0)
            model, x = nn.Sequential(with_weight(forward)), torch.randn(3, 6, requires_grad=True)
            inject(model, Dropout(p=0.5), layers="0", at="parameters")
            seeded(partial(around, model) if around else model, x).square().sum().backward()
            assert shows_its_parameters(model[0])
            return [model[0].weight.grad, x.grad]

        if torch.__version__ < (2, 8) and (forward, around) == (INSIDE[1], MODES[True]):
            pytest.skip("an error that leaves both checkpoints fails an assertion of this PyTorch")
        if forward in BEFORE:
            torch.testing.assert_close(gradients(forward, around), gradients(body), rtol=0, atol=0)
        else:
            with pytest.raises(InjectionError, match="a checkpoint inside the layer(.|\n)*weight = self.weight"):
                gradients(forward, around)

    @pytest.mark.parametrize("kind", [nn.Linear, nn.LSTM])
    def test_in_place_of_the_forward_is_refused(self, kind, x):
        model, _ = placed(kind(6, 6), tensor="weight*")
        model[0].forward = partial(MODES[False], model[0].forward)
        with pytest.raises(InjectionError, match="another autograd function, reads 'weight"):
            model(x)
        assert shows_its_parameters(model[0])

    @pytest.mark.parametrize("forward", INSIDE)
    def test_before_pytorch_2_8_and_without_gradients(self, forward, x, monkeypatch):
        monkeypatch.setattr(torch_internals, "saved_tensors_hooks", None)
        model, drop = placed(with_weight(forward))
        with pytest.raises(InjectionError, match="a checkpoint inside"):
            model(x.requires_grad_())
        assert drop.predict(x, samples=2, activation=None).samples == 2  # nothing is recomputed

    @pytest.mark.filterwarnings("ignore:The .grad attribute")  # of Dynamo, for any tensor that is not a leaf
    def test_a_function_that_the_layer_compiles_reads_the_regularized_weight(self, x):
        compiled = torch.compile(body, backend="eager", fullgraph=True)
        model, _ = placed(with_weight(lambda layer, x: compiled(layer, x) - body(layer, x)))
        assert all(model(x).allclose(torch.zeros(())) for _ in range(2))
        torch.compiler.reset()


def quantized():
    layer = nn.Module()
    layer.weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.int8), requires_grad=False)
    layer.forward = lambda x: x
    return layer


DROPOUT = Dropout(p=0.5)
REFUSED = [
    *(
        (lambda: nn.Linear(2, 2), regularizer, {}, InjectionError, "acts on activations")
        for regularizer in (hookdrop.DropPath(p=0.1), hookdrop.HeadDropout(p=0.1), hookdrop.DropBlock(p=0.1, block_size=3))
    ),
    *((lambda: nn.Linear(2, 2), DROPOUT, {"tensor": name}, LayerError, None) for name in ("kernel", "bias_*")),
    (lambda: nn.Linear(2, 2), DROPOUT, {"tensor": 0}, TypeError, None),
    (lambda: nn.LSTM(4, 5), DROPOUT, {}, LayerError, r"weight_ih_l0 \(20, 4\), weight_hh_l0 \(20, 5\)"),
    (lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), DROPOUT, {}, LayerError, r"name its layers: '0\.0', '0\.1'"),
    (lambda: nn.LazyLinear(3), DROPOUT, {}, LayerError, "lazy"),
    (nn.ReLU, DROPOUT, {}, LayerError, "its own are: none"),
    (quantized, DROPOUT, {}, LayerError, "quantized"),
    (lambda: nn.Linear(3, 3, device="meta"), Mixout(p=0.5), {}, InjectionError, "meta device"),
    (lambda: nn.Linear(2, 2), Mixout(p=0.5), {"at": "input"}, InjectionError, "acts on the parameters of a layer, got at='input'"),
    (lambda: nn.Linear(2, 2), neftune(alpha=5.0), {"layers": None}, TypeError, "remove at="),
]  # fmt: skip


class TestRefusals:
    @pytest.mark.parametrize(("make", "regularizer", "settings", "error", "says"), REFUSED)
    def test_what_has_no_weights_to_regularize(self, make, regularizer, settings, error, says):
        with pytest.raises(error, match=says):
            inject(nn.Sequential(make()), regularizer, **{"layers": "0", "at": "parameters"} | settings)

    def test_parametrized_weights_with_the_layer_to_hook_instead(self, linear, x):
        model = nn.Sequential(parametrizations.weight_norm(linear))
        with pytest.raises(LayerError, match="parametrizations"):
            inject(model, Dropout(p=0.5), layers="0", at="parameters")
        assert inject(model, Dropout(p=0.5), layers="0.parametrizations.*").probe(x).dropped > 0

    def test_weights_that_are_no_parameters_any_more(self, linear, x):
        model, _ = placed(linear)
        prune.random_unstructured(linear, "weight", 0.5)
        with pytest.raises(InjectionError, match="no longer a parameter"):
            model(x)

    def test_plan_names_the_weights_and_those_that_are_tied(self):
        chosen = {"layers": "0", "at": "parameters", "tensor": "weight_hh_*"}
        assert "weight_hh_l0 (20, 5)" in str(plan(nn.Sequential(nn.LSTM(4, 5)), Dropout(p=0.5), **chosen))
        model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))
        model[1].weight = model[0].weight
        planned = plan(model, Dropout(p=0.5), layers="0", at="parameters", example_input=torch.arange(3))
        assert any("'1.weight'" in text for text in planned.warnings)
        assert planned.sites[0].shape == (5, 4)
        shared = nn.Sequential(layer := nn.Linear(4, 4), layer)
        assert not plan(shared, Dropout(p=0.5), layers="0", at="parameters").warnings

    @pytest.mark.parametrize(
        ("forward", "user"),
        [
            (lambda m, x: m.head(m.fc(x), m.fc.weight), "'head' uses 'fc.weight' outside of the calls of its layer"),
            (lambda m, x: m.fc(x) @ m.fc.weight.T, "the model itself uses 'fc.weight' outside"),
            (lambda m, x: m.fc(x) + nn.Linear.forward(m.fc, x), "the model itself uses 'fc.weight' outside"),
            (lambda m, x: m.fc(x) * m.fc.weight.shape[0], ""),
        ],
    )
    def test_weights_that_are_used_outside_of_the_call_of_their_layer(self, forward, user):
        head, norm = toy(lambda m, x, weight: x @ weight.T), spectral_norm(nn.Linear(3, 3))
        model = toy(lambda m, x: m.norm(forward(m, x)), fc=nn.Linear(3, 3), head=head, norm=norm)
        settings = {"layers": nn.Linear, "at": "parameters", "tensor": "weight*", "example_input": torch.ones(1, 3)}
        warnings = plan(model, Dropout(p=0.5), **settings).warnings
        assert (user in warnings[0]) if user else not warnings
        with pytest.warns(HookdropWarning, match="call the layer there") if user else nullcontext():
            inject(model, Dropout(p=0.5), **settings)

    def test_a_layer_that_calls_itself(self, x):
        class Tree(nn.Linear):
            def forward(self, x, depth=1):
                return super().forward(self(x, depth - 1) if depth else x)

        model, _ = placed(Tree(6, 6))
        with pytest.raises(InjectionError):
            model(x)
        assert shows_its_parameters(model[0])

    def test_a_function_of_ones_own_regularizes_in_every_forward(self, linear, x):
        model, _ = placed(linear, torch.tanh)
        for _ in range(3):
            assert torch.equal(model(x), nn.functional.linear(x, linear.weight.tanh(), linear.bias))
            assert shows_its_parameters(linear)

    def test_a_function_that_works_in_place_leaves_the_parameter(self, linear, x):
        before = linear.weight.detach().clone()
        model, _ = placed(linear, torch.relu_)
        with torch.no_grad():
            model(x)
        assert torch.equal(linear.weight, before)

    def test_a_forward_that_changes_its_weight_in_place_warns(self):
        model, _ = placed(nn.Embedding(9, 4, max_norm=0.1))
        with pytest.warns(HookdropWarning, match="max_norm"):
            model(torch.arange(6))

    @pytest.mark.filterwarnings("error")
    def test_a_warning_that_is_an_error_leaves_no_regularized_weight(self, linear, x):
        model, _ = placed(toy(lambda m, x: setattr(m.weight, "data", m.weight.data / 2), weight=linear.weight))
        with pytest.raises(HookdropWarning, match="changed a regularized parameter"):
            model(x)
        assert shows_its_parameters(model[0])


class TestMixout:
    def test_equals_the_formula_of_the_paper(self):
        x, start = torch.randn(50, 40), torch.randn(50, 40)
        kept = (seeded(Dropout(p=0.3), torch.ones(50, 40)) > 0).float()
        torch.testing.assert_close(seeded(mixout, x, start, 0.3), (kept * x + (1 - kept) * start - 0.3 * start) / 0.7)
        assert torch.equal(mixout(x, start, 1.0), start)

    def test_starts_at_the_weights_of_the_injection(self, linear, x):
        model, drop = placed(linear, Mixout(p=0.5))
        torch.testing.assert_close(model(x), nn.functional.linear(x, *linear.parameters()))
        start = linear.weight.detach().clone()
        with torch.no_grad():
            linear.weight.mul_(2.0)
        expected = start + seeded(Dropout(p=0.5), linear.weight - start)
        torch.testing.assert_close(seeded(model, x), nn.functional.linear(x, expected, linear.bias))
        assert drop.spec.to_dict() == {"regularizer": "Mixout(p=0.5)", "layers": ["0"], "name": "mixout"}

    def test_state_from_other_starting_weights_warns(self, linear):
        _, drop = placed(linear, Mixout(p=0.5))
        state = drop.state_dict()
        drop.load_state_dict(state)
        with torch.no_grad():
            linear.weight.mul_(2.0)
        _, later = placed(linear, Mixout(p=0.5), on_existing="replace")
        with pytest.warns(HookdropWarning, match="other weights at the injection"):
            later.load_state_dict(state)

    def test_is_placed_at_parameters_without_being_told(self, linear, x):
        assert "at the parameters" in str(plan(nn.Sequential(linear), Mixout(p=0.5), layers="0"))
        with pytest.raises(TypeError):
            Mixout(p=0.5)(x)
