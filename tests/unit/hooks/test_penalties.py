"""Loss terms: collected in training forwards, read once with `Injection.penalty`, and never kept for long."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from hookdrop import (
    ActivationPenalty,
    Dropout,
    HookdropWarning,
    Injection,
    InjectionError,
    find,
    inject,
    update_bn,
)
from hookdrop.hooks import penalties
from tests.support.tensors import all_equal

X = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())


def penalized(**settings: Any) -> tuple[nn.Sequential, Injection]:
    model = net()
    return model, inject(model, ActivationPenalty(), layers=["0", "2"], **settings)


def by_hand(model: nn.Sequential, x: Tensor = X) -> Tensor:
    """The penalty at the layers 0 and 2."""
    first = model[0].forward(x)
    second = model[2].forward(torch.tanh(first))
    return sum((2 * h.pow(2).mean() + (h[:, 1:] - h[:, :-1]).pow(2).mean() for h in (first, second)), torch.zeros(()))


def gradients(model: nn.Module, loss: Callable[[], Tensor]) -> list[Tensor]:
    model.zero_grad()
    loss().backward()
    return [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]


# --- the sum


def test_the_gradient_is_that_of_the_penalty_written_out() -> None:
    """The output is that of the layer itself."""
    model, drop = penalized()
    expected = gradients(model, lambda: model(X).square().mean() + by_hand(model))
    drop.penalty()
    torch.testing.assert_close(gradients(model, lambda: model(X).square().mean() + drop.penalty()), expected)
    assert torch.equal(model(X), net()(X))


def test_a_reading_sums_all_forwards_of_all_threads_and_clears_the_sum() -> None:
    model, drop = penalized()
    with drop.recording() as recorded:
        threads = [Thread(target=model, args=(x,)) for x in (X, 2 * X, X)]
        _ = [thread.start() for thread in threads], [thread.join() for thread in threads]
    assert recorded.totals.calls == 6
    found = drop.penalty()
    torch.testing.assert_close(found, 2 * by_hand(model) + by_hand(model, 2 * X))
    assert found.shape == ()
    assert drop.penalty() == 0
    assert not drop.penalty().requires_grad


def test_find_sums_over_names_and_skips_those_without_a_penalty() -> None:
    model, drop = penalized()
    other = inject(model, ActivationPenalty(l2=1.0, slowness=0.0), layers="1", name="other")
    inject(model, Dropout(p=0.5), layers="3")
    model(X)
    expected = by_hand(model) + torch.tanh(model[0].forward(X)).pow(2).mean()
    torch.testing.assert_close(find(model).penalty(), expected)
    assert drop.penalty() == other.penalty() == 0


def test_a_handle_without_a_penalty_raises() -> None:
    model = net()
    drop = inject(model, Dropout(p=0.5), layers="1")
    with pytest.raises(
        InjectionError, match=r"'dropout' adds no term to the loss.\n  inject\(model, ActivationPenalty"
    ):
        drop.penalty()
    drop.remove()
    for one, says in ((find(model), "this model adds no term"), (drop, r"penalty\(\): 'dropout' was removed")):
        with pytest.raises(InjectionError, match=says):
            one.penalty()


def test_the_sum_is_on_the_device_of_the_last_term() -> None:
    """Tensors on the meta device stand for those of another accelerator."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, device="meta"))
    drop = inject(model, ActivationPenalty(), layers=["0", "1"])
    assert drop.penalty().device.type == "meta"
    model[1](model[0](X).to("meta"))
    assert drop.penalty().device.type == "meta"
    with torch.no_grad():
        model[0](X)
    assert drop.penalty().device.type == "meta"


# --- where nothing is collected


def test_eval_mode_disabled_no_grad_probe_and_rate_0_collect_nothing() -> None:
    """Also in a trained model, where other regularizers warn that they drop without gradients."""
    model, drop = penalized()
    train(model, 3, drop.penalty)
    with drop.disabled():
        model(X)
    with torch.no_grad():
        model(X)
    update_bn([X], model)
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


def test_torch_func_differentiates_a_penalty_that_is_read_inside() -> None:
    model, drop = penalized()
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, weights, (x,)).square().mean() + drop.penalty()

    whole = torch.func.grad(loss)(weights, X)
    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, X.unsqueeze(1))
    for found, x in ((whole, X), ({name: grad[1] for name, grad in each.items()}, X[1:2])):
        expected = gradients(model, lambda x=x: model(x).square().mean() + drop.penalty())
        torch.testing.assert_close(list(found.values()), expected)


@pytest.mark.filterwarnings("ignore:predict")
def test_predict_refuses_a_penalty_alone() -> None:
    _, drop = penalized()
    with pytest.raises(InjectionError, match="leaves the forward unchanged, so all samples would be equal"):
        drop.predict(X)


# --- copies, threads and checkpoints


@pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_have_the_penalty_but_none_of_the_terms(twin_of: Callable[[nn.Module], nn.Module]) -> None:
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
def test_a_checkpoint_counts_once_with_the_right_gradient(part: slice, early_stop: bool) -> None:
    model, drop = penalized()
    expected = gradients(model, lambda: model(X).square().mean() + drop.penalty())

    def checkpointed() -> Tensor:
        with torch.utils.checkpoint.set_checkpoint_early_stop(early_stop):
            y = model[: part.start](X) if part.start else X
            y = checkpoint(model[part], y, use_reentrant=False)
            y = model[part.stop :](y) if part.stop < 4 else y
        return y.square().mean() + drop.penalty()

    assert all_equal(gradients(model, checkpointed), expected)
    assert drop.penalty() == 0


def test_a_reentrant_checkpoint_is_refused_because_its_term_would_have_no_gradient() -> None:
    model, drop = penalized()
    with pytest.raises(InjectionError, match=r"a reentrant checkpoint runs(.|\n)*use_reentrant=False"):
        checkpoint(model, X.clone().requires_grad_(), use_reentrant=True)
    with drop.disabled():
        checkpoint(model, X.clone().requires_grad_(), use_reentrant=True)


# --- unread terms


def train(model: nn.Module, steps: int, read: Callable[[], Tensor | float] = lambda: 0.0, **settings: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, **settings)
    for _ in range(steps):
        (model(X).square().mean() + read()).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("fused", [False, True])
def test_a_penalty_that_is_not_read_for_20_updates_warns_once(fused: bool) -> None:
    model, drop = penalized()
    train(model, 19, fused=fused)
    assert not drop.check()
    with pytest.warns(HookdropWarning, match=r"updated 20 times, and nothing read(.|\n)*drop.penalty\(\)") as caught:
        train(model, 30, fused=fused)
    assert len(caught) == 1
    assert "nothing read the loss terms" in "".join(drop.check())


def test_unread_terms_of_earlier_updates_are_forgotten_so_that_a_late_reading_works() -> None:
    """Their graphs are used up: a backward pass through them would fail."""
    model, drop = penalized()
    train(model, 5)
    found = gradients(model, lambda: model(X).square().mean() + drop.penalty())
    drop.remove()
    torch.testing.assert_close(found, gradients(model, lambda: model(X).square().mean() + by_hand(model)))


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
    assert len(nodes) == 10
    assert living(nodes) == 1
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
    torch.testing.assert_close(drop.penalty(), 5 * by_hand(model))
