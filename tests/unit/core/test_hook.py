"""A hooked layer: its output, errors, and what comes from the call in progress. Hooks are found, removed and hidden."""

import copy
import gc
import threading
from contextlib import nullcontext
from functools import partial, reduce
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookdrop
from hookdrop import (
    Dropout,
    DropPath,
    HookdropWarning,
    LayerDrop,
    NEFTune,
    Regularizer,
    ShapeError,
    find,
    inject,
    without_hooks,
)
from hookdrop.core.recipe import Recipe, RecipeSite
from hookdrop.methods.skip_hook import SkipHook
from hookdrop.regularizers.samples import SampleRows
from hookdrop.training import checkpointing
from tests.support.leaks import entries
from tests.support.models import ROWS, Small, pair, toy


def test_eval_returns_the_layers_own_output_object() -> None:
    keeps = toy(lambda m, x: setattr(m, "out", x * 2) or m.out)
    inject(model := nn.Sequential(keeps), Dropout(0.5), layers="0")
    assert model.eval()(torch.ones(3)) is keeps.out
    assert model.train()(torch.ones(3)) is not keeps.out


def returns_none(x: torch.Tensor) -> None:
    """A function whose `return` is missing."""


def test_functions_that_do_not_return_a_tensor_of_the_shape_are_errors(model: Small, images: torch.Tensor) -> None:
    for wrong in (returns_none, torch.Tensor.sum):
        with inject(model, wrong, layers="fc"), pytest.raises(ShapeError, match="at 'fc' got .* and returned"):
            model(images)


def test_error_inside_a_regularizer_names_the_site(model: Small, images: torch.Tensor) -> None:
    inject(model, torch.linalg.inv, layers="fc")
    with pytest.raises(RuntimeError) as error:
        model(images)
    assert error.value.__notes__ == ["in hookdrop's linalg_inv at 'fc'"]


SIZE = 1009  # no other tensor has this size


def failing(m: Any, x: Tensor) -> Tensor:
    x = m.fc(x)
    if m.fails:
        raise FloatingPointError
    return x


def net() -> Any:
    branch = toy(failing, fc=nn.Linear(8, 8), fails=False)
    block = toy(lambda m, x, attention_mask=None: x + m.branch(x), branch=branch)
    return toy(lambda m, x, attention_mask=None: m.block(x, attention_mask=attention_mask), block=block)


class Skip(Recipe):
    def sites(self, model: nn.Module, survey: Any) -> list[RecipeSite]:
        return [RecipeSite("block", Dropout(0.5), at="skip", branch="branch")]


PLACED = {
    "identity skip": (Skip(), {}),
    "subset": (DropPath(0.5, mode="subset"), {"layers": "block.branch"}),
    "samples": (DropPath(0.5, samples=("", 0, False)), {"layers": "block.branch.fc"}),
    "layer input": (LayerDrop(0.5), {"layers": "block"}),
    "attention mask": (NEFTune(5.0, attention_mask=True), {"layers": "block.branch.fc"}),
}


@pytest.mark.parametrize("kind", PLACED)
def test_nothing_holds_activations(kind: str) -> None:
    regularizer, settings = PLACED[kind]
    model = net()
    drop = inject(model, regularizer, **settings)
    assert kind != "identity skip" or isinstance(drop._sinks[0], SkipHook)
    model.block.branch.fails = True
    gc.collect()
    for _ in range(2):
        with pytest.raises(FloatingPointError):
            model(torch.ones(4, SIZE, 8), attention_mask=torch.ones(4, SIZE))
    gc.collect()
    alive = [one for one in gc.get_objects() if issubclass(type(one), Tensor)]
    assert not [one.shape for one in alive if SIZE in one.shape]


def test_injections_with_equal_names_on_submodules_are_distinguished() -> None:
    model = pair()
    inject(model[0], Dropout(0.5), layers="0")
    inject(model[1], Dropout(0.2), layers="0")
    with pytest.raises(hookdrop.InjectionError):
        find(model).state_dict()
    assert (len(find(model)), find(model).p, find(model[1]).p) == (1, 0.5, 0.2)
    find(model).remove()


@pytest.mark.parametrize("at", ["output", "input"])
def test_reregistered_hooks_can_be_removed(at: str) -> None:
    model = pair().eval()
    drop = inject(model, Dropout(0.5), layers="*.0", at=at)
    replacement = nn.Linear(8, 8).eval()
    for hook in model[0][0]._forward_hooks.values():
        replacement.register_forward_hook(hook)
    for hook in model[0][0]._forward_pre_hooks.values():
        replacement.register_forward_pre_hook(hook)
    model[0][0] = replacement
    clean = replacement(ROWS)
    with without_hooks(model):
        assert not replacement._forward_hooks
        assert not replacement._forward_pre_hooks
    replacement.train()
    model[1].train()(model[0](ROWS))
    assert not torch.equal(replacement(ROWS), clean)
    drop.remove()
    assert torch.equal(replacement(ROWS), clean)
    assert not replacement._forward_hooks
    assert not replacement._forward_pre_hooks


def test_order_of_user_hooks_is_kept(model: nn.Module, images: torch.Tensor) -> None:
    order: list[str] = []
    model.fc.register_forward_hook(lambda *_: order.append("first"))
    drop = inject(model, Dropout(0.5), layers="fc")
    model.fc.register_forward_hook(lambda *_: order.append("second"))
    before = [type(hook).__name__ for hook in model.fc._forward_hooks.values()]
    with without_hooks(model):
        assert len(model.fc._forward_hooks) == 2
        model.fc.register_forward_hook(lambda *_: order.append("inside"))
    assert [type(hook).__name__ for hook in model.fc._forward_hooks.values()][:3] == before
    model(images)
    assert order == ["first", "second", "inside"]
    drop.remove()
    assert len(model.fc._forward_hooks) == 3


def test_without_hooks_keeps_ids_and_respects_removal_inside(model: nn.Module) -> None:
    first = inject(model, Dropout(0.5), layers="fc")
    second = inject(model, hookdrop.GaussianDropout(0.5), layers="fc", on_existing="stack", at="input")
    ids = list(model.fc._forward_hooks), list(model.fc._forward_pre_hooks)
    with without_hooks(model):
        assert not model.fc._forward_hooks
        assert not model.fc._forward_pre_hooks_with_kwargs
        assert not find(model)
        first.remove()
    assert not model.fc._forward_hooks
    assert list(model.fc._forward_pre_hooks) == ids[1]
    assert find(model) == second


IDS = torch.arange(12).view(2, 6)
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 0]])
ALL = torch.ones(2, 6, dtype=torch.bool)


class TokenModel(nn.Module):
    """An embedding in a model that takes an attention mask, and may checkpoint the embedding."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.embed, self.how = nn.Embedding(50, 16), how

    def forward(self, ids: Tensor, attention_mask: Any = None, fail: Any = None) -> Tensor:
        if fail:
            raise fail
        if not self.how:
            return self.embed(ids)
        scale = torch.ones((), requires_grad=True)  # a reentrant checkpoint needs an argument with a gradient
        part = lambda ids, scale: (self.embed(ids) * scale).sin()
        return checkpoint(part, ids, scale, use_reentrant=self.how == "reentrant")


def masked(how: str = "") -> TokenModel:
    model = TokenModel(how)
    inject(model, NEFTune(5, attention_mask=True), layers="embed")
    return model


def noisy(model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    """Which tokens get noise."""
    clean = model.get_submodule("embed").weight[IDS] if hasattr(model, "embed") else model.weight[IDS]
    return (model(*args, **kwargs) != clean).any(-1)


class TestAttentionMask:
    def test_it_is_that_of_the_call(self) -> None:
        model = masked()
        assert torch.equal(noisy(model, IDS, MASK), MASK == 1)
        assert torch.equal(noisy(model, IDS), ALL)

    @pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
    def test_an_error_or_an_interrupt_leaves_nothing_behind(self, error: type[BaseException]) -> None:
        model = masked()
        with pytest.raises(ShapeError):
            model(IDS, MASK[:, :3])
        with pytest.raises(error):
            model(IDS, MASK, fail=error)
        with pytest.warns(HookdropWarning, match="is not running, so padding is regularized too"):
            assert torch.equal(noisy(model.embed, IDS), ALL)
        (hook,) = model.embed._forward_hooks.values()
        assert hook.collected.calls["attention_mask"].stack == []

    @pytest.mark.parametrize("how", ["reentrant", "not reentrant"])
    @pytest.mark.parametrize("in_thread", [False, True])
    def test_a_recomputed_embedding_uses_the_mask_of_its_forward(self, how: str, in_thread: bool) -> None:
        """Two forwards with other masks before one backward; autograd may run in another thread."""
        gradients = []
        for way in ("", how):
            torch.manual_seed(0)
            model = masked(way)
            outputs = [model(IDS, mask) if way else model(IDS, mask).sin() for mask in (MASK, 1 - MASK)]
            loss = sum(y.square().sum() for y in outputs)
            run = threading.Thread(target=loss.backward) if in_thread else None
            loss.backward() if run is None else (run.start(), run.join())
            gradients.append(model.embed.weight.grad)
        assert torch.equal(*gradients)

    @pytest.mark.parametrize("compiled", [False, True])
    def test_a_direct_call_during_a_call_in_another_thread_has_none(self, compiled: bool) -> None:
        model = masked()
        if compiled:
            model.embed.compile(backend="eager")
            model(IDS, MASK)
        started, finish = threading.Event(), threading.Event()
        model.register_forward_pre_hook(lambda *_: started.set() or (finish.wait(60) and None))
        thread = threading.Thread(target=model, args=(IDS, MASK))
        thread.start()
        started.wait(60)
        try:
            with nullcontext() if compiled else pytest.warns(HookdropWarning):
                assert torch.equal(noisy(model.embed, IDS), ALL)
        finally:
            finish.set()
            thread.join()

    def test_copies_collect_their_own(self) -> None:
        model = masked()
        twin = copy.deepcopy(model)
        model.embed._forward_hooks.clear()
        assert torch.equal(noisy(twin, IDS, MASK), MASK == 1)

    def test_all_layers_of_a_deep_model_recompute_with_theirs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def gradient(call: Any) -> Any:
            torch.manual_seed(0)
            parts = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(70))
            model = toy(
                lambda m, x, attention_mask: reduce(lambda y, part: call(part, y), m.parts, x).sum(), parts=parts
            )
            inject(model, NEFTune(5, attention_mask=True), layers="parts.*.0")
            (model(torch.ones(2, 3, 4), torch.eye(2, 3)) + model(torch.ones(2, 3, 4), torch.ones(2, 3))).backward()
            return parts[0][0].weight.grad

        again = partial(checkpoint, use_reentrant=False)
        assert torch.equal(gradient(again), gradient(lambda part, x: part(x)))
        monkeypatch.setattr(checkpointing, "CAPACITY_WITH_TENSORS", 1)
        with pytest.warns(HookdropWarning, match="is forgotten after 1 forwards"):
            gradient(again)


class Sees(Regularizer):
    needs = ("samples",)
    seen: list[Any] = []

    def __init__(self, p: float = 0.5, *, samples: Any = None) -> None:
        super().__init__()
        self.p, self.samples = p, samples

    def regularize(self, x: Tensor, rate: Any, samples: Any = None) -> Tensor:
        self.seen.append(samples)
        return x


def windowed() -> Any:
    return toy(lambda m, x, n=None: m.inner(x.view(-1, 4)), inner=nn.Linear(4, 4))


def test_the_number_of_samples_is_that_of_the_module_around() -> None:
    model = windowed()
    inject(model, Sees(samples=("", 0, False)), layers="inner")
    Sees.seen.clear()
    model(torch.zeros(3, 8))
    model(torch.zeros(5, 8))
    model.inner(torch.zeros(3, 4))
    model(n=torch.zeros(7, dtype=torch.long), x=torch.zeros(3, 8))  # integers may be lengths
    assert Sees.seen == [SampleRows(0, False, 3), SampleRows(0, False, 5), SampleRows(), SampleRows(0, False, 3)]
    with inject(model, Sees(), layers="inner", on_existing="replace"):  # without a fact, each row is a sample
        model(torch.zeros(3, 8))
    assert Sees.seen[-1] is None
    inject(model, Sees(samples=("", 0, False)), layers="inner").remove()
    assert entries(model) == 0
