"""A survey is kept while model, settings and example stay the same; a trace records every value; neither leaves anything."""

import functools
import gc
import weakref
from collections import OrderedDict, defaultdict
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils import weight_norm

from hookdrop import DropPath, HeadDropout, InjectionError, find, inject, plan
from hookdrop.recipes import head_dropout, residual_dropout, set_dropout, stochastic_depth
from hookdrop.survey.facts import survey
from hookdrop.survey.record import record
from tests.support.models import KEPT, kept_ones, toy

X = torch.randn(2, 8)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.relu(self.a(self.norm(x))))


class Routed(nn.Module):
    """Runs `late` only with `both`, an argument and a setting; defined before `early`."""

    def __init__(self) -> None:
        super().__init__()
        self.late, self.early, self.both = Block(), Block(), False

    def forward(self, x: Tensor, both: bool = False) -> Tensor:
        x = self.early(x)
        return self.late(x) if both or self.both else x


def ends(model: nn.Module, example: Any) -> list[str]:
    return [branch.end for branch in survey(model, example).branches]


def test_surveys_again_with_other_arguments_or_settings() -> None:
    model = Routed()
    assert survey(model, X) is survey(model, X + 1)
    assert ends(model, X) == ends(model, (X, False)) == ["early.b"]
    assert ends(model, (X, True)) == ends(model, {"x": X, "both": True}) == ["early.b", "late.b"]
    model.both = True
    assert ends(model, X) == ["early.b", "late.b"]
    model.forward = lambda x: model.late(x)  # type: ignore[method-assign, assignment, misc]
    assert ends(model, X) == ["late.b"]


@pytest.mark.parametrize(("recipe", "name"), [(stochastic_depth(p=0.5), "0.b"), (set_dropout(p=0.0), "1")])
def test_compiled_blocks_have_names_without_wrappers(recipe: Any, name: str) -> None:
    model = nn.Sequential(*[torch.compile(nn.Sequential(Block(), nn.Dropout(0.1)), backend="eager") for _ in range(2)])
    assert [site.name for site in plan(model, recipe, example_input=X).sites] == [f"0.{name}", f"1.{name}"]


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_hooks_of_other_code_get_values_or_are_not_called() -> None:
    kept: list[Any] = []
    model = nn.Sequential(weight_norm(nn.Linear(8, 8)), nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)))
    assert survey(model, X).is_fake, "the hooks of PyTorch compute weights, and need no values"
    keep = lambda module, args, output: kept.append(output)
    partial = functools.partial(lambda *call: kept.append(float(call[-1].mean())))
    own = [one.register_forward_hook(hook) for one, hook in zip(model, (keep, partial), strict=True)]
    for handle in [*own, nn.modules.module.register_module_forward_hook(keep)]:
        with handle:
            assert not survey(model, X).is_fake
        assert kept.pop() is not None
    assert {type(one) for one in kept} <= {Tensor, float}
    assert survey(model, X).is_fake


@pytest.mark.parametrize("rest", [(), (torch.randn(3, 8),)])
def test_an_example_may_begin_with_one_integer_for_each_sample(rest: Any) -> None:
    model = toy(lambda m, t, x=0.0: (h := m.embed(t) + x) + m.part(h), embed=nn.Embedding(9, 8), part=nn.Linear(8, 8))
    found = plan(model, DropPath(0.1), layers="part", example_input=(torch.tensor([1, 2, 3]), *rest))
    assert found.sites[0].reading == "N=3"


def test_heads_are_those_of_the_current_settings() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        q, k, v = m.qkv(x).unflatten(-1, (3, m.heads, -1)).permute(2, 0, 3, 1, 4)
        return m.proj(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))

    model, tokens = toy(forward, heads=4, qkv=nn.Linear(8, 24), proj=nn.Linear(8, 8)), torch.randn(2, 5, 8)
    plan(model, head_dropout(p=0.5), example_input=tokens)
    model.heads = 2
    [site] = plan(model, head_dropout(p=0.5), example_input=tokens).sites
    assert isinstance(site.regularizer, HeadDropout)
    assert site.regularizer.heads == 2


def test_nothing_that_a_forward_creates_stays() -> None:
    class Creates(Block):
        def __init__(self) -> None:
            super().__init__()
            self.cache: Any = OrderedDict()
            self.counts: Any = defaultdict(list)

        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "head"):
                self.head, self.gain = nn.Linear(8, 3), nn.Parameter(torch.ones(3))
            if "one" not in self.cache:
                self.cache["one"] = torch.ones(8)
            self.counts["x"].append(x)
            return self.head(super().forward(x) + self.cache["one"]) * self.gain

    model = Creates()
    before = list(model.state_dict())
    inject(nn.Sequential(nn.Linear(8, 8), model), stochastic_depth(p=0.5), p_scale="equal", example_input=X)
    assert list(model.state_dict()) == before
    assert (model.cache, model.counts) == ({}, {})
    assert not isinstance(model(X), FakeTensor)


@pytest.mark.parametrize("recipe", [stochastic_depth(p=0.5), residual_dropout(p=0.5)])
def test_blocks_that_share_the_end_of_their_branch_raise(recipe: Any) -> None:
    model = nn.Sequential(Block(), Block(), Block())
    model[1].b = model[0].b
    with pytest.raises(InjectionError, match="share '0.b'"):
        plan(model, recipe, p_scale="equal", example_input=torch.randn(2, 3, 8))


def test_spec_of_all_injections_places_a_recipe_again() -> None:
    """`find` has the order of the definition, and a recipe that of the execution."""
    example = (X, True)
    inject(model := Routed(), stochastic_depth(p=0.3), example_input=example).target_p = 0.6
    drop = inject(Routed(), find(model).spec, example_input=example)
    assert drop.target_p == 0.6
    assert sorted(site.name for site in drop.sites) == ["early.b", "late.b"]


class Cache:
    """A plain object, as a model may share with its layers."""

    def __init__(self) -> None:
        self.mask: Any = None
        self.by_size: dict[int, Any] = {}
        self.inner: Any = None


MASKS: dict[int, Tensor] = {}
MEMO: dict[int, tuple[int, Tensor]] = {}
SHARED, OUTSIDE = Cache(), nn.Module()


class Caching(Block):
    """Keeps masks in nested objects, in a class attribute, and in globals, also in a tuple, in another module and in a file."""

    of_class: ClassVar[dict[int, Tensor]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.cache = SimpleNamespace(nested=Cache())

    def forward(self, x: Tensor) -> Tensor:
        for cache in (self.cache.nested, SHARED):
            if cache.mask is None:
                cache.mask, cache.inner = torch.ones(8), Cache()
                cache.inner.mask = cache.by_size[8] = cache.mask * 2
        for table in (self.of_class, MASKS):
            x = x * table.setdefault(8, torch.ones(8))
        if 8 not in MEMO:
            MEMO[8], OUTSIDE.mask = (8, torch.ones(8)), torch.ones(8)
        x = x * MEMO[8][1] * OUTSIDE.mask * kept_ones(8)
        return super().forward(x) * self.cache.nested.by_size[8] * SHARED.inner.mask


def test_no_fake_tensor_stays_in_objects_and_globals() -> None:
    model = Caching()
    inject(nn.Sequential(nn.Linear(8, 8), model), stochastic_depth(p=0.5), p_scale="equal", example_input=X).remove()
    assert type(model(X)) is Tensor
    tables = (SHARED.by_size, MASKS, KEPT, Caching.of_class)
    kept = [MEMO[8][1], OUTSIDE.mask, SHARED.mask, SHARED.inner.mask, *(table[8] for table in tables)]
    assert {type(mask) for mask in kept} == {Tensor}
    survey(model, torch.randn(3, 8)).branches  # noqa: B018
    assert SHARED.mask is kept[2], "what holds no fake tensors stays"


class Caches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.cache: dict[str, Tensor] = {}
        self.seen: Tensor | None = None

    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        y = self.linear(x)
        self.cache["y"], self.seen = y, y
        y += x
        F.relu(y, inplace=True)
        return {"sum": y * scale, "mask": y > 0}


class TestTrace:
    def test_in_place_operations_give_a_tensor_a_new_node_and_leaves_say_what_they_are(self) -> None:
        trace = record(Caches(), torch.randn(2, 4))
        assert [op.name for op in trace.ops] == ["linear", "add", "relu", "mul", "gt"]
        linear, add, relu, mul, gt = trace.ops
        (x,) = trace.calls[0].inputs
        assert add.inputs == (linear.outputs[0], x)
        assert relu.inputs == tuple(add.outputs)
        assert mul.inputs == gt.inputs == tuple(relu.outputs)
        assert trace.users[x] == [linear, add]
        assert [node.leaf for node in linear.inputs] == ["input", "weight", "weight"]
        assert linear.outputs[0].is_data
        assert linear.outputs[0].has_weights

    def test_changes_through_a_view_are_seen(self) -> None:
        trace = record(toy(lambda m, x: ((y := x * 2).view(-1).add_(1), y.T)[1]), torch.randn(2, 4))
        assert [op.name for op in trace.ops] == ["mul", "view", "add", "alias", "T"]
        assert trace.ops[2].outputs[0] in trace.ops[3].inputs

    def test_calls_have_arguments_outputs_and_a_stack(self) -> None:
        model = nn.Sequential(Caches())
        model.forward = lambda x: model[0](scale=2.0, x=x)  # type: ignore[method-assign]
        trace = record(model, torch.randn(2, 4))
        outer, block, linear = trace.calls
        assert [call.name for call in linear.around()] == ["0.linear", "0", ""]
        assert block.arguments == {"x": outer.inputs[0], "scale": 2.0}
        assert list(block.output) == ["sum", "mask"]
        assert block.outputs == outer.outputs
        assert outer.start < block.start < linear.start < trace.ops[0].index < linear.end < block.end < outer.end

    def test_the_model_is_restored_and_not_kept_alive(self) -> None:
        model = Caches().train()
        trace = record(model, torch.randn(2, 4))
        assert model.training
        assert model.cache == {}
        assert model.seen is None
        assert not model._forward_hooks
        assert not model.linear._forward_pre_hooks
        alive = weakref.ref(model)
        del model
        gc.collect()
        assert alive() is None
        assert trace.ops

    def test_values_and_shapes_alone_give_the_same_trace(self) -> None:
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        fake, real = (record(layer, torch.randn(2, 5, 8), fake=fake) for fake in (True, False))
        assert [op.name for op in fake.ops] == [op.name for op in real.ops]
        assert {"add", "layer_norm"} <= {op.name for op in fake.ops}

    def test_a_cache_of_a_function_keeps_no_fake_tensor(self) -> None:
        positions, kept = functools.lru_cache(torch.arange), functools.lru_cache(object)
        model, one = toy(lambda m, x: x + positions(x.shape[1]) if kept else x), kept()
        record(model, torch.zeros(2, 3))
        assert model(torch.zeros(2, 3)).tolist() == [[0, 1, 2], [0, 1, 2]]
        assert kept() is one, "it was not called"
