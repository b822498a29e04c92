"""`set_dropout` samples, measures and records the dropout that a model already has, and changes nothing else."""

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hookdrop import Dropout, Injection, InjectionError, LayerError, LinearSchedule, find, inject, without_hooks
from hookdrop.core.torch_internals import HOOK_TABLES
from hookdrop.recipes import set_dropout
from tests.support.models import toy
from tests.support.tensors import all_equal
from tests.support.training import gradients_of, seeded

X = torch.randn(64, 8)


class Block(nn.Module):
    """A layer with functional dropout, and a batch norm inside, which has to stay in eval mode."""

    def __init__(self, p: float = 0.3) -> None:
        super().__init__()
        self.p, self.linear, self.norm = p, nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.norm(self.linear(x)), self.p, self.training)


def drops(m: Any, x: Tensor, p: float | None = None) -> Tensor:
    return F.dropout(m.norm(m.linear(x)), m.p if p is None else p, m.training)


def toy_block(forward: Callable[..., Any], **attributes: Any) -> nn.Module:
    block = toy(forward, p=0.3, linear=nn.Linear(8, 8), norm=nn.BatchNorm1d(8), **attributes)
    block.register_buffer("calls", torch.zeros(()))
    return block


def by_arithmetic(m: Any, x: Tensor) -> Tensor:
    x, keep = m.norm(m.linear(x)), 1 - m.p
    return x.div(keep) * torch.rand_like(x).lt(keep) if m.training else x


def of_a_configuration(m: Any, x: Tensor) -> Tensor:
    """Also drops whole layers, at another rate."""
    return x if m.training and torch.rand([]) < m.config.layerdrop else x + drops(m, x, m.config.dropout)


def attention(m: Any, x: Tensor, p: float | None = None) -> Tensor:
    q, k, v = m.qkv(x[None, None]).chunk(3, -1)
    return F.scaled_dot_product_attention(q, k, v, dropout_p=(p or m.p) if m.training else 0.0)[0, 0]


def checks_values(m: Any, x: Tensor) -> Tensor:
    """Without an effect on the output."""
    return drops(m, x.nan_to_num() if m.training and not x.isfinite().all() else x)


def counts(m: Any, x: Tensor) -> Tensor:
    if m.training:
        m.calls += 1
    return drops(m, x)


def in_the_code(m: Any, x: Tensor) -> Tensor:
    """Twice at rates that are numbers in the code, as graph networks do."""
    return F.dropout(drops(m, x, 0.25), training=m.training)


def attending() -> nn.Module:
    return toy(attention, p=0.3, qkv=nn.Linear(8, 24))


def by_parent() -> nn.Module:
    """Passes its own flag to the block inside."""
    inner = toy(lambda m, x, training: F.dropout(x, m.p, training), p=0.3)
    return toy(lambda m, x: m.inner(x, m.training), inner=inner)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "modules": lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.BatchNorm1d(8), nn.AlphaDropout(0.1)),
    "in place": lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3, inplace=True)),
    "functional": lambda: nn.Sequential(Block(), Block()),
    "by arithmetic": lambda: nn.Sequential(toy_block(by_arithmetic)),
    "a configuration": lambda: toy_block(of_a_configuration, config=SimpleNamespace(dropout=0.3, layerdrop=0.4)),
    "attention": lambda: nn.Sequential(attending()),
    "a test of values": lambda: nn.Sequential(toy_block(checks_values)),
    "positions": lambda: nn.Sequential(
        toy_block(lambda m, x: m.norm(m.linear(x)) * F.dropout(torch.arange(8.0), m.p, m.training))
    ),
    "the model itself": Block,
    "rates in the code": lambda: nn.Sequential(toy_block(in_the_code), toy(lambda m, x: F.dropout(x, 0.2, m.training))),
    "fused attention with a rate in the code": lambda: nn.Sequential(
        toy(lambda m, x: attention(m, x, 0.3), qkv=nn.Linear(8, 24))
    ),
    "an LSTM": lambda: nn.LSTM(8, 8, 2, dropout=0.3),
    "multi-head attention": lambda: nn.TransformerEncoderLayer(8, 2, 8, dropout=0.3, batch_first=True),
}
TRAINING = "in training mode, it"
REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "a batch norm": (lambda m, x: drops(m, F.batch_norm(x, torch.zeros(8), torch.ones(8), training=m.training)), f"{TRAINING} calls batch_norm"),
    "another output": (lambda m, x: (drops(m, x), x.sum()) if m.training else drops(m, x), f"{TRAINING} calls sum"),
    "another container": (lambda m, x: [drops(m, x)] if m.training else drops(m, x), f"{TRAINING} returns something else"),
    "a counter": (counts, f"{TRAINING} calls add"),
    "noise": (lambda m, x: drops(m, x * torch.empty_like(x).uniform_(0.9, 1.1) if m.training else x), f"{TRAINING} calls mul"),
    "the flag of another module": (by_parent, "p drops only if other modules train"),
}  # fmt: skip


def evaluated(model: nn.Module, x: Any = X, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    with torch.no_grad():
        out = model(x)
    return out if isinstance(out, Tensor) else out[0]


def inputs(name: str) -> Tensor:
    return X[None] if "head" in name else X


def footprint(model: nn.Module) -> Any:
    modules = list(model.modules())
    tables = [list(getattr(m, name)) for m in modules for names in HOOK_TABLES for name in (names[0], *names[1])]
    numbers = [{k: v for k, v in vars(module).items() if isinstance(v, int | float)} for module in modules]
    return tables, numbers, {name: x.clone() for name, x in model.state_dict().items()}.keys(), fast_path()


def fast_path() -> bool:
    return bool(torch.backends.mha.get_fastpath_enabled())


@contextmanager
def training(*modules: nn.Module) -> Iterator[None]:
    """The loop by hand: the flags of exactly these modules."""
    for module in modules:
        module.training = True
    yield
    for module in modules:
        module.training = False


class TestSampling:
    @pytest.mark.parametrize("name", MODELS)
    def test_samples_differ_and_the_model_is_as_before(self, name: str) -> None:
        model, x = MODELS[name]().eval(), inputs(name)
        own = inject(model, set_dropout(), example_input=x)
        clean, before = evaluated(model, x), footprint(model)
        with own.sampling():
            samples = [evaluated(model, x, seed) for seed in range(4)]
            assert torch.equal(evaluated(model, x, 2), samples[2])
            assert not any(module.training for module in model.modules())
        assert not all(torch.equal(sample, samples[0]) for sample in samples)
        assert footprint(model) == before
        assert torch.equal(evaluated(model, x), clean)

    def test_rate_is_that_of_the_schedule_or_of_the_context(self) -> None:
        model = Block(p=0.4).eval()
        own = inject(model, set_dropout(), schedule=LinearSchedule(10), example_input=X)
        with pytest.raises(InjectionError, match="sampling at rate 0"), own.sampling():
            pass
        own.seek(5)
        for settings, p in (({}, 0.2), ({"p": 0.5}, 0.5)):
            with own.sampling(**settings):
                found = evaluated(model)
            model.p = p
            with training(model):
                assert torch.equal(evaluated(model), found)
            model.p = 0.2

    def test_only_this_injection_drops(self) -> None:
        """Of a subset of the rates, and beside hooks, on the same modules too."""
        model = nn.Sequential(Block(), nn.Dropout(0.5)).eval()
        own = inject(model, set_dropout(p={"0.p": 0.3}), example_input=X)
        inject(model, Dropout(0.5), layers=["0", "1"], name="hooks")
        with own.sampling():
            found = evaluated(model)
        find(model)["hooks"].remove()
        with training(model[0]):
            assert torch.equal(evaluated(model), found)

    @pytest.mark.filterwarnings("ignore:the rate of:hookdrop.HookdropWarning")
    def test_a_handle_on_hooks_and_own_dropout_samples_both(self) -> None:
        model = nn.Sequential(nn.Linear(8, 8), Block()).eval()
        inject(model, set_dropout(p=1.0), example_input=X)
        hooks = inject(model, Dropout(1.0), layers="0")
        with find(model).sampling():
            assert not evaluated(model).any()
        with hooks.sampling():
            assert torch.equal(evaluated(model), evaluated(model, seed=1))
        measured = find(model).probe(X)
        assert {name: site.dropped for name, site in measured.sites.items()} == {"0": 1.0, "1.p": 1.0}
        assert measured.eval_identical

    def test_eval_mode_set_inside_does_not_end_it(self) -> None:
        model = Block().eval()
        with inject(model, set_dropout(), example_input=X).sampling():
            model.eval()
            assert not torch.equal(evaluated(model), evaluated(model, seed=1))
            model.train()
        assert all(module.training for module in model.modules())

    @pytest.mark.filterwarnings("ignore:functional dropout was not looked for")
    def test_modules_need_no_example(self) -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).eval()
        with inject(model, set_dropout()).sampling():
            assert not torch.equal(evaluated(model), evaluated(model, seed=1))

    def test_padded_tokens_of_a_transformer_are_sampled_without_the_fast_path(self) -> None:
        layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.3, batch_first=True)
        model, x = nn.TransformerEncoder(layer, 2).eval(), {"src": torch.randn(2, 3, 8)}
        x["src_key_padding_mask"] = torch.tensor([[False] * 3, [False, False, True]])
        found = inject(model, set_dropout(), example_input=x).predict(x, samples=3)
        assert bool((found.variance[0] > 0).all())
        assert fast_path()


class TestContexts:
    @pytest.fixture
    def model(self) -> nn.Sequential:
        return nn.Sequential(Block(), nn.Dropout(0.2)).eval()

    @pytest.fixture
    def own(self, model: nn.Module) -> Injection:
        return inject(model, set_dropout(), example_input=X)

    def test_nested_and_overlapping_contexts_end_with_the_last(self, model: nn.Sequential, own: Injection) -> None:
        before, contexts = footprint(model), [own.sampling(), own.sampling(p=0.9), own.disabled()]
        for context in contexts:
            context.__enter__()
        assert torch.equal(evaluated(model), evaluated(model, seed=1))
        for index in (2, 0):
            contexts[index].__exit__(None, None, None)
            assert not torch.equal(evaluated(model), evaluated(model, seed=1))
        contexts[1].__exit__(None, None, None)
        assert footprint(model) == before
        assert torch.equal(evaluated(model), evaluated(model, seed=1))

    @pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
    def test_nothing_remains_after_an_exception(self, model: nn.Sequential, own: Injection, error: Any) -> None:
        before = footprint(model)

        def fail(*call: Any) -> None:
            raise error

        with pytest.raises(error), own.recording(), own.sampling(p=0.9):
            handle = model[0].norm.register_forward_hook(fail)
            try:
                model(X)
            finally:
                handle.remove()
        assert footprint(model) == before

    def test_copies_made_inside_are_not_sampled(self, model: nn.Sequential, own: Injection) -> None:
        with own.recording(), own.sampling():
            twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        for twin in twins:
            assert torch.equal(evaluated(twin), evaluated(model))
            assert type(twin[0].p) is float
            assert torch.equal(evaluated(twin), evaluated(twin, seed=1))

    def test_removal_and_without_hooks_inside_end_it(self, model: nn.Sequential, own: Injection) -> None:
        with own.recording(), own.sampling(p=0.9):
            with without_hooks(model):
                assert torch.equal(evaluated(model), evaluated(model, seed=1))
            assert not torch.equal(evaluated(model), evaluated(model, seed=1))
            own.remove()
            assert (model[0].p, model[1].p) == (0.3, 0.2)
            assert torch.equal(evaluated(model), evaluated(model, seed=1))
        assert (model[0].p, model[1].p) == (0.3, 0.2)

    def test_a_copied_handle_samples_modules_and_asks_for_an_example_otherwise(self) -> None:
        model = nn.Sequential(nn.Dropout(0.5)).eval()
        twin, own = copy.deepcopy((model, inject(model, set_dropout(), example_input=X)))
        with own.sampling():
            assert not torch.equal(evaluated(twin), evaluated(twin, seed=1))
            assert torch.equal(evaluated(model), evaluated(model, seed=1))
        _, own = copy.deepcopy((block := Block(0.5), inject(block, set_dropout(), example_input=X)))
        with pytest.raises(InjectionError, match="copied without the example input"), own.sampling():
            pass


class TestRefusals:
    @pytest.mark.filterwarnings("ignore:out of reach")
    @pytest.mark.parametrize("name", REFUSED)
    def test_module_that_uses_its_flag_for_more_is_named_with_what_it_does(self, name: str) -> None:
        kind, what = REFUSED[name]
        model = nn.Sequential(nn.Dropout(0.1), kind() if kind is by_parent else toy_block(kind)).eval()
        own, before = inject(model, set_dropout(), example_input=X), footprint(model)
        where = "1.inner" if kind is by_parent else "1"
        with pytest.raises(InjectionError, match=rf"\('{where}'\) cannot be sampled: {what}"), own.sampling():
            pass
        assert footprint(model) == before
        own.remove()
        with inject(model, set_dropout(), exclude=where, example_input=X).sampling():
            assert not torch.equal(evaluated(model), evaluated(model, seed=1))

    def test_step_of_eval_mode_that_training_mode_leaves_out_is_named(self) -> None:
        """As predictors of a length do."""
        rounds = toy_block(lambda m, x: drops(m, x) if m.training else drops(m, x).round())
        own = inject(_model := nn.Sequential(rounds, nn.Linear(8, 8)).eval(), set_dropout(), example_input=X)
        with pytest.raises(InjectionError, match="in eval mode only, it calls round"), own.sampling():
            pass


class TestRatesInTheCode:
    def network(self) -> nn.Sequential:
        return nn.Sequential(toy_block(in_the_code), Block(), nn.Dropout(0.1)).eval()

    def test_they_are_sampled_and_measured_as_by_hand(self) -> None:
        model = self.network()
        own = inject(model, set_dropout(), example_input=X)
        assert [site.name for site in own.sites] == ["1.p", "2", "0.dropout(0.25)", "0.dropout(0.5)"]
        with own.recording() as r, own.sampling():
            found = evaluated(model)
        with training(model[0], model[1], model[2]):
            assert torch.equal(evaluated(model), found)
        assert {name: len(r.calls(name)) for name in r} == dict.fromkeys([site.name for site in own.sites], 1)
        for site in own.probe(X, forwards=20).sites.values():
            assert site.dropped == pytest.approx(site.requested, abs=0.03)  # 5 standard errors

    def test_they_cannot_be_changed(self) -> None:
        model = self.network()
        with pytest.warns(
            match=r"rates that no attribute stores as a number \('0.dropout\(0.25\)', '0.dropout\(0.5\)'\)"
        ):
            own = inject(model, set_dropout(p=0.6), p_scale={"**": 0.5}, example_input=X)
        assert (own.p, own.target_p, [site.p for site in own.sites]) == (0.6, 0.6, [0.3, 0.3, 0.25, 0.5])
        with own.disabled(), own.sampling():
            assert not torch.equal(evaluated(model), evaluated(model, seed=1))
        own.load_state_dict(own.state_dict())
        own.remove()
        with inject(model, set_dropout({"2": 0.5}), example_input=X) as own:
            assert [site.name for site in own.sites] == ["2"]

    def test_a_model_that_has_no_others(self) -> None:
        model = nn.Sequential(toy_block(in_the_code)).eval()
        with pytest.raises(LayerError, match=r"found no rate that it can change(.|\n)*add dropout: "):
            inject(model, set_dropout(p=0.1), example_input=X)
        with pytest.raises(LayerError, match="stays as it is") as removing:
            inject(model, set_dropout(p=0.0), example_input=X)
        assert "add dropout" not in str(removing.value)
        with pytest.raises(InjectionError, match=r"no rate to drive: 0.25 in the code"):
            inject(model, set_dropout(), schedule=LinearSchedule(2), example_input=X)
        with inject(model, set_dropout(), example_input=X).sampling():
            assert not torch.equal(evaluated(model), evaluated(model, seed=1))

    def test_a_module_at_rate_0_needs_no_sampling(self) -> None:
        model = nn.Sequential(toy_block(counts), Block()).eval()
        with inject(model, set_dropout(), p_scale={"0": 0.0}, example_input=X).sampling():
            assert not torch.equal(evaluated(model), evaluated(model, seed=1))


class TestCheckpoints:
    @pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # in the survey
    @pytest.mark.parametrize("reentrant", [False, True])
    @pytest.mark.parametrize("samples", [False, True])
    @pytest.mark.parametrize("inside", [False, True], ids=["backward outside", "backward inside"])
    def test_a_recompute_inside_a_module_is_the_same(self, reentrant: bool, samples: bool, inside: bool) -> None:
        def dropped(m: Any, x: Tensor) -> Tensor:
            return F.dropout(m.linear(x), m.p, m.training).tanh()

        def checkpointed(m: Any, x: Tensor) -> Tensor:
            return checkpoint(partial(dropped, m), x, use_reentrant=reentrant)

        x, grads = X.clone().requires_grad_(), []
        weights = nn.Linear(8, 8)
        for forward in (dropped, checkpointed):
            model = nn.Sequential(toy(forward, p=0.3, linear=weights)).train(not samples)
            own = inject(model, set_dropout(), example_input=X)
            with own.sampling(p=0.6) if samples else nullcontext():
                loss = seeded(model, x).square().sum()
                grads += [gradients_of(model, lambda loss=loss: loss)] if inside else []
            grads += [] if inside else [gradients_of(model, lambda loss=loss: loss)]
            assert (model[0].training, model[0].p) == (not samples, 0.3)
        assert all_equal(*grads)

    def test_a_failed_backward_leaves_no_flag_behind(self) -> None:
        model = nn.Sequential(nn.Linear(8, 8), toy(lambda m, x: F.dropout(x, m.p, m.training), p=0.3)).eval()
        with inject(model, set_dropout(), example_input=X).sampling():
            hidden = model[0](X)
            hidden.register_hook(lambda grad: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model[1](hidden).sum().backward()
        assert not model[1].training


class TestMeasuring:
    @pytest.mark.parametrize("name", [name for name in MODELS if name != "by arithmetic"])
    def test_probe_shows_the_rates_and_changes_nothing(self, name: str) -> None:
        model, x = MODELS[name]().eval(), inputs(name)
        own = inject(model, set_dropout(), example_input=x)
        before, state = footprint(model), torch.get_rng_state()
        measured = own.probe(x, forwards=10)
        assert footprint(model) == before
        assert torch.equal(torch.get_rng_state(), state)
        assert measured.calls
        for site in (site for site in measured.sites.values() if site.droppable):
            # of 64 x 8 elements in about 6 forwards or more: 7 standard errors
            assert site.dropped == pytest.approx(site.requested, abs=0.06)

    def test_recording_keeps_inputs_masks_and_outputs_without_changing_them(self) -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5, inplace=True), Block(), attending()).eval()
        own = inject(model, set_dropout(), example_input=X)
        with own.sampling():
            wanted = evaluated(model)
            with own.recording(last=2) as r:
                assert torch.equal(evaluated(model), wanted)
        assert {name: len(r.calls(name)) for name in r} == {"1": 1, "2.p": 1, "3.p": 1}
        for name, p in (("1", 0.5), ("2.p", 0.3)):
            assert torch.allclose(r[name].after, r[name].before * r[name].mask / (1 - p))
            assert r[name].p == p
        assert torch.equal(r["3.p"].after[0, 0], wanted)  # of fused attention, with and without its dropout
        assert not r["3.p"].drops
        assert r.totals.dropped == pytest.approx((r["1"].dropped + r["2.p"].dropped) / 2)

    def test_eval_mode_and_rates_of_0_are_no_calls(self) -> None:
        model = nn.Sequential(Block(), nn.Dropout(0.0)).train()
        with inject(model, set_dropout(), example_input=X).recording() as r:
            model(X)
            evaluated(model.eval())
        assert {name: effect.calls for name, effect in r.totals.sites.items()} == {"0.p": 1, "1": 0}
        with pytest.raises(LayerError, match="nothing was recorded at '1': its rate is 0 at step 0"):
            r["1"]

    def test_steps_of_the_schedule_inside_are_recorded(self) -> None:
        model = Block(p=0.4).train()
        own = inject(model, set_dropout(), schedule=LinearSchedule(2), example_input=X)
        with own.recording(last=3) as r:
            for _ in range(3):
                model(X)
                own.step()
        assert [call.p for call in r.calls("p")] == [0.2, 0.4]
        assert type(model.p) is float
