"""What a regularizer needs besides its tensor comes from the call in progress, and ends with it."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hookdrop import NEFTune, Regularizer, ShapeError, inject
from hookdrop.regularizers.samples import SampleRows
from tests.support.leaks import entries

IDS = torch.arange(12).view(2, 6)
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 0]])
ALL = torch.ones(2, 6, dtype=torch.bool)


class TokenModel(nn.Module):
    """An embedding in a model that takes an attention mask, and may checkpoint the embedding."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.embed, self.how = nn.Embedding(50, 16), how

    def forward(self, ids: Tensor, attention_mask: Any = None, fail: bool = False) -> Tensor:
        if fail:
            raise RuntimeError
        if not self.how:
            return self.embed(ids)
        scale = torch.ones((), requires_grad=True)  # a reentrant checkpoint needs an argument with a gradient
        part = lambda ids, scale: (self.embed(ids) * scale).sin()  # noqa: E731
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

    def test_an_error_leaves_nothing_behind(self) -> None:
        model = masked()
        with pytest.raises(RuntimeError):
            model(IDS, MASK, fail=True)
        with pytest.raises(ShapeError):
            model(IDS, MASK[:, :3])
        assert torch.equal(noisy(model.embed, IDS), ALL)
        (hook,) = model.embed._forward_hooks.values()
        assert hook.collected["attention_mask"].stack == []

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
            assert torch.equal(noisy(model.embed, IDS), ALL)
        finally:
            finish.set()
            thread.join()

    def test_copies_collect_their_own(self) -> None:
        model = masked()
        twin = copy.deepcopy(model)
        model.embed._forward_hooks.clear()
        assert torch.equal(noisy(twin, IDS, MASK), MASK == 1)


class Sees(Regularizer):
    """Records what it receives."""

    needs = ("samples",)
    seen: list[Any] = []

    def __init__(self, p: float = 0.5, *, samples: Any = None) -> None:
        super().__init__()
        self.p, self.samples = p, samples

    def regularize(self, x: Tensor, rate: Any, samples: Any = None) -> Tensor:
        self.seen.append(samples)
        return x


class Windowed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.view(-1, 4))


def test_the_number_of_samples_is_that_of_the_module_around() -> None:
    model = Windowed()
    inject(model, Sees(samples=("", 0, False)), layers="inner")
    Sees.seen.clear()
    model(torch.zeros(3, 8))
    model(torch.zeros(5, 8))
    model.inner(torch.zeros(3, 4))
    assert Sees.seen == [SampleRows(0, False, 3), SampleRows(0, False, 5), SampleRows()]
    with inject(model, Sees(), layers="inner", on_existing="replace"):  # without a fact, each row is a sample
        model(torch.zeros(3, 8))
    assert Sees.seen[-1] is None
    inject(model, Sees(samples=("", 0, False)), layers="inner").remove()
    assert entries(model) == 0
