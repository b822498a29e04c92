"""The properties of a regularizer: the name and the docstring of each check say what must hold."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from hookdrop.core.errors import ShapeError, did_you_mean
from hookdrop.core.handle import Injection, find
from hookdrop.core.inject import inject
from hookdrop.core.regularizer import Rate, Regularizer, at_rate, rate_of, rows_alone
from hookdrop.core.spec import InjectionSpec, as_regularizer
from hookdrop.core.text import read, text_of
from hookdrop.regularizers import Penalty
from hookdrop.regularizers.samples import SampleRows

Checks: TypeAlias = list[tuple[str, Callable[[], None]]]
Failures: TypeAlias = Mapping[str, str]
NONE: Failures = {}
SHAPES = ((4, 12, 8, 8), (4, 12, 8), (4, 12, 6, 6, 6), (8, 12))  # of examples, in the order in which they are tried
CALLS = 400  # of a statistical check, which allows 6 standard errors


def check_regularizer(regularizer: Any, example: Tensor | None = None, expected_failures: Failures = NONE) -> None:
    """Check the properties that hookdrop's own regularizers have. This takes some seconds, and resets the compiler.

    Args:
        regularizer: what `inject` takes: an instance of a `Regularizer`, another module, or a function.
        example: a float32 input of several samples; None tries a map, tokens, a volume and features.
        expected_failures: names of checks to leave out, each with the reason.

    Raises:
        AssertionError: it lacks properties; the message has all of them.
        ValueError: a name in `expected_failures` is unknown, or an example is needed.
    """
    run_all(regularizer_checks(regularizer, example, expected_failures))


def regularizer_checks(regularizer: Any, example: Tensor | None = None, expected_failures: Failures = NONE) -> Checks:
    """Return the checks of `check_regularizer` as (name, function), for `pytest.mark.parametrize`.

    Example:
        >>> dict(regularizer_checks(Dropout(p=0.3)))["p_means_p"]()
    """
    one = regularizer if isinstance(regularizer, Regularizer) else as_regularizer(regularizer)
    return bound(RegularizerChecks(one, _example(one) if example is None else example), expected_failures)


def _example(regularizer: Regularizer) -> Tensor:
    for shape in SHAPES:
        with suppress(ShapeError):
            regularizer.check(shape)
            numbers = torch.randn(shape, generator=torch.Generator().manual_seed(0), device="cpu")
            return numbers.to(torch.get_default_device())
    raise ValueError(f"check_regularizer: {regularizer!r} accepts none of the shapes {SHAPES}.\n  pass example=x")


def only_if(applies: Callable[[Any], object]) -> Callable[[Any], Any]:
    """Mark a check that does not apply to every subject."""

    def mark(check: Any) -> Any:
        check.applies = applies
        return check

    return mark


def bound(subject: Any, expected_failures: Failures) -> Checks:
    """Return the checks of a subject that apply, in the order of its class."""
    every = {name: check for name, check in vars(type(subject)).items() if not name.startswith("_")}
    if unknown := [name for name in expected_failures if name not in every]:
        raise ValueError(f"there is no check {unknown[0]!r}.{did_you_mean(unknown[0], every)}")
    applies = {name: getattr(check, "applies", lambda subject: True)(subject) for name, check in every.items()}
    chosen = [name for name in every if applies[name] and name not in expected_failures]
    return [(name, partial(_run, every[name], subject)) for name in chosen]


def _run(check: Callable[[Any], None], subject: Any) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            check(subject)
        except Exception as error:
            text = f"{subject._title} fails {check.__name__}: {check.__doc__}\n  {type(error).__name__}: {error}"
            raise AssertionError(text) from error


def run_all(checks: Checks) -> None:
    failures: list[str] = []
    for _, check in checks:
        try:
            check()
        except AssertionError as error:
            failures.append(f"\n{error}")
    assert not failures, f"{len(failures)} of {len(checks)} checks failed.{''.join(failures)}"


exactly = partial(torch.testing.assert_close, rtol=0.0, atol=0.0)  # of tensors, and lists and dicts of tensors


def _near(found: Tensor, expected: Tensor | float) -> bool:
    """Whether the means over calls are within 6 standard errors of a number, or of those of other calls."""
    other = expected if isinstance(expected, Tensor) else torch.full_like(found, expected)
    error = ((found.var(0) + other.var(0)) / len(found)).sqrt()
    return bool(((found.mean(0) - other.mean(0)).abs() <= 6.0 * error + 1e-6).all())


def _penalized(y: Tensor, term: Tensor) -> Tensor:
    """Return `y` with the gradient of a loss term besides its own."""
    return y + (term - term.detach())


class _Interrupted(TorchFunctionMode):
    """Before each operation, another thread calls a function, which has no effect on the random numbers."""

    def __init__(self, function: Callable[[], object]) -> None:
        super().__init__()
        self.function = function

    def __torch_function__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        state = torch.get_rng_state()
        with ThreadPoolExecutor(1) as other:
            other.submit(self.function).result()
        torch.set_rng_state(state)
        return operation(*args, **(kwargs or {}))


class _Attention(nn.LayerNorm):
    """Takes its result for scores of attention."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).softmax(-1)


class _Model(nn.Module):
    """A model with one layer to hook."""

    def __init__(self, x: Tensor, at: str | None = None) -> None:
        super().__init__()
        shape = x.shape if at == "parameters" else x.shape[1:]
        self.layer = (_Attention if at == "scores" else nn.LayerNorm)(shape, device=x.device)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return torch.tanh(self.layer(x))

    @torch.no_grad()
    def move(self) -> Self:
        """Change the weights, as training does: a parameter that is where it started hides what Mixout does."""
        self.layer.weight.mul_(2.0)
        return self


class RegularizerChecks:
    """The checks of one regularizer."""

    def __init__(self, regularizer: Regularizer, x: Tensor) -> None:
        self._one, self._x, self._title = regularizer, x.detach(), regularizer.title
        self._declared, self._rate = type(regularizer).rate or Rate("", kind="factor"), rate_of(regularizer)
        self._kind = "" if self._rate is None else self._declared.kind
        self._rates = [] if self._rate is None else [self._rate, (self._rate + self._declared.neutral) / 2]
        self._allow = [type(getattr(regularizer, "module", regularizer)), getattr(regularizer, "function", str)]
        self._forward, self._keeps_shape = not regularizer.in_backward, regularizer.keeps_shape
        self._drops_or_adds = self._kind in ("drop", "noise") and self._forward and self._keeps_shape
        self._alone, self._compiles = rows_alone(regularizer) == 1, not regularizer.graph_break

    def __call__(self, x: Tensor, rate: float | None = None, one: Regularizer | None = None) -> Tensor:
        """Regularize as a hook does, by default at the rate that the regularizer was given with.

        Scores of -inf, which have no difference and no mean, count as 0: after the softmax, they are.
        """
        one, rate, context = one or self._one, self._rate if rate is None else rate, self._context(x)
        y: Tensor = one.regularize(x, rate, **context)
        if isinstance(one, Penalty):
            return _penalized(y, one.penalize(x, rate, **context))
        return torch.where(y.isneginf(), 0.0, y) if one.only_at == "scores" else y

    def _context(self, x: Tensor) -> dict[str, Any]:
        """What the regularizer needs besides its tensor."""
        needs, place = self._one.needs, self._one.samples
        found: dict[str, Any] = {need: torch.zeros_like(x) for need in ("layer_input", "start") if need in needs}
        return found | ({"samples": SampleRows(*place[1:], x.shape[place[1]])} if "samples" in needs and place else {})

    def _seeded(self, x: Tensor, *settings: Any) -> Tensor:
        torch.manual_seed(5)
        return self(x, *settings)

    def _run(self, **settings: Any) -> list[Tensor]:
        """Return the output and the gradient from a fixed seed."""
        return self._step(nn.Identity(), partial(self, **settings))

    def _draws(self) -> bool:
        """Whether a forward draws random numbers."""
        before = torch.get_rng_state()
        self(self._x)
        return not torch.equal(before, torch.get_rng_state())

    def _effects(self, function: Callable[[Tensor], Tensor], x: Tensor, calls: int = CALLS) -> Tensor:
        """Return for each call the mean change, its mean size, the fraction of zero gradients, and their mean."""
        x, rows = x.clone().requires_grad_(), []
        for _ in range(calls):
            y = function(x)
            (gradient,) = torch.autograd.grad(y.sum(), x)
            change = (y - x).detach().double()
            rows.append([change.mean(), change.abs().mean(), (gradient == 0).double().mean(), gradient.double().mean()])
        return torch.tensor(rows, dtype=torch.float64)

    def _hooked(self, given: Any = None) -> tuple[_Model, Injection]:
        model = _Model(self._x, self._one.only_at)
        drop = inject(model, given or InjectionSpec(self._one, layers="layer"))
        return model.move(), drop

    def _step(self, model: nn.Module, forward: Callable[[Tensor], Tensor] | None = None) -> list[Tensor]:
        """Return the output and all gradients of a training step from a fixed seed."""
        torch.manual_seed(5)
        model.zero_grad()
        y = (forward or model)(x := self._x.clone().requires_grad_())
        if isinstance(self._one, Penalty) and (drop := find(model)):
            y = _penalized(y, drop.penalty())
        torch.autograd.backward(y.square().sum())
        return [y.detach(), *(one.grad for one in (x, *model.parameters()) if one.grad is not None)]

    def _require_same(self, twin: Regularizer) -> None:
        assert twin is not self._one, "it is the same object"
        assert repr(twin) == repr(self._one), f"it is {twin!r}, not {self._one!r}"
        exactly(self._run(one=twin), self._run())

    def can_be_deep_copied(self) -> None:
        """`copy.deepcopy` must return another regularizer that draws the same numbers."""
        self._require_same(copy.deepcopy(self._one))

    def can_be_pickled(self) -> None:
        """`pickle` must return a regularizer that draws the same numbers."""
        self._require_same(pickle.loads(pickle.dumps(self._one)))

    def has_a_text_form(self) -> None:
        """Its text must recreate it: `__init__` stores each argument, unchanged, in an attribute of that name."""
        text = text_of(self._one)
        again = as_regularizer(read(text, self._allow))
        assert text_of(again) == text, f"{text} was read as {text_of(again)}"
        self._require_same(again)

    def has_a_spec(self) -> None:
        """A spec of it must go through JSON, and place the same regularizer."""
        settings = json.loads(json.dumps(InjectionSpec(self._one, layers="layer").to_dict()))
        twin, _ = self._hooked(InjectionSpec.from_dict(settings, allow=self._allow))
        exactly(self._step(twin), self._step(self._hooked()[0]))

    def eval_is_the_identity(self) -> None:
        """In eval mode it must return its input itself, and draw nothing."""
        before, training = torch.get_rng_state(), self._one.training
        y = self._one.eval()(self._x, **self._context(self._x))
        self._one.train(training)
        assert y is self._x, "it returned another tensor"
        exactly(torch.get_rng_state(), before)

    @only_if(lambda self: self._kind)
    def neutral_rate_is_the_identity(self) -> None:
        """At the neutral rate it must return its input itself as a layer, and equal numbers from `regularize`."""
        neutral = at_rate(self._one, self._declared.neutral).train()
        assert neutral(self._x, **self._context(self._x)) is self._x, "it returned another tensor"
        exactly(self(self._x, self._declared.neutral), self._x)

    def training_has_an_effect(self) -> None:
        """In training mode it must change the output or, with `in_backward`, the gradient alone."""
        calls = [(self(x := self._x.clone().requires_grad_()), x) for _ in range(20)]
        changed = [not torch.equal(y, x) for y, x in calls]
        if not self._forward:
            assert not any(changed), "the output differs from the input"
            changed = [not torch.equal(torch.autograd.grad(y.square().sum(), x)[0], 2.0 * x) for y, x in calls]
        assert any(changed), "20 calls changed nothing"

    def input_is_not_modified(self) -> None:
        """It must not write to its input, which others read and autograd may have saved."""
        self(x := self._x.clone())
        exactly(x, self._x)
        assert not x._version, "it was written to"

    def removal_is_bit_equal(self) -> None:
        """After `remove()`, a model must train as one that was never hooked, and have no hooks."""
        model, drop = self._hooked()
        self._step(model)
        drop.remove()
        exactly(self._step(model), self._step(_Model(self._x, self._one.only_at).move()))
        tables = [table for part in model.modules() for name, table in vars(part).items() if "hooks" in name]
        assert not any(tables), "hooks are left"

    def dtype_and_shape_are_kept(self) -> None:
        """The output must have the dtype of the input, also under autocast, and, if `keeps_shape`, its shape."""
        every = [(dtype, False) for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)]
        for dtype, autocast in [*every, (torch.float32, True), (torch.bfloat16, True)]:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                y = self(x := self._x.to(dtype))
            assert y.dtype == dtype, f"{dtype} became {y.dtype}{', under autocast' * autocast}"
            assert y.shape == x.shape or not self._keeps_shape, f"{tuple(x.shape)} became {tuple(y.shape)}"
            assert y.isfinite().all(), f"in {dtype}, the output is infinite or NaN"

    @only_if(lambda self: self._keeps_shape)
    def memory_format_is_kept(self) -> None:
        """Strides of a dense input must stay: use `torch.empty_like(x)`, or `y.contiguous(memory_format=...)`."""
        order = [1, 0, *range(2, self._x.dim())]
        views = [self._x.permute(order).contiguous().permute(order)]
        if self._x.dim() == 4:
            views.append(self._x.contiguous(memory_format=torch.channels_last))
        for x in views:
            y = self(x.requires_grad_())
            for found in (y, *torch.autograd.grad(y, x, torch.ones_like(y))):
                assert found.stride() == x.stride(), f"the strides {x.stride()} became {found.stride()}"

    def empty_batch_passes(self) -> None:
        """A batch without samples must pass, forward and backward."""
        y = self(self._x[:0].clone().requires_grad_())
        assert len(y) == 0, f"the output is {tuple(y.shape)}"
        torch.autograd.backward(y.sum())

    def seed_determines_the_result(self) -> None:
        """`torch.manual_seed` must determine output and gradient: random numbers come from PyTorch's generators."""
        exactly(self._run(), self._run())

    @only_if(lambda self: self._kind)
    def rate_is_an_argument(self) -> None:
        """`regularize(x, rate)` must act at `rate`, whatever the attribute is: schedules change the argument alone."""
        rate = self._rates[1]
        exactly(self._run(rate=rate), self._run(rate=rate, one=at_rate(self._one, rate)))

    @only_if(lambda self: self._drops_or_adds)
    def p_means_p(self) -> None:
        """The expected fraction of zero gradients must be the rate (`kind="noise"`: 0; `kind="factor"`: any)."""
        drops = self._kind == "drop"
        rates = self._rates + [1.0] * (drops and not self._declared.open_end)
        low_precision = [(rates[0], torch.bfloat16)] * drops  # noise rounds to 0 there
        for rate, dtype in [*((rate, torch.float32) for rate in rates), *low_precision]:
            found = self._effects(partial(self, rate=rate), self._x.to(dtype))[:, 2]
            assert _near(found, rate * drops), f"{found.mean():.4g} were dropped at {rate:g} in {dtype}"

    @only_if(lambda self: self._drops_or_adds)
    def mean_is_kept(self) -> None:
        """The mean must be kept: what stays is scaled by 1 / (1 - p), and noise has mean 0."""
        inputs = (torch.rand_like(self._x) + 1.0 for _ in range(CALLS))
        ratio = torch.stack([self(x).mean() / x.mean() for x in inputs]).double()
        assert _near(ratio, 1.0), f"it changed by {ratio.mean() - 1.0:+.1%}"

    @only_if(lambda self: self._kind)
    def threads_do_not_interfere(self) -> None:
        """A call at another rate in another thread must not change the result of a call: none may store its rate."""
        expected = self._run()
        with _Interrupted(partial(self, self._x, self._rates[1])):
            found = self._run()
        exactly(found, expected)

    @only_if(lambda self: self._alone)
    def samples_do_not_mix(self) -> None:
        """With `independent_samples`, the output of a sample must not depend on other samples."""
        other = torch.cat([self._x[:1] * 3.0 + 1.0, self._x[1:]])
        exactly(self._seeded(other)[1:], self._seeded(self._x)[1:])

    @only_if(lambda self: self._alone)
    def samples_are_drawn_independently(self) -> None:
        """With `independent_samples`, each sample must have its own random numbers, also if all are equal."""
        rows = self._x[:1].expand(8, *self._x.shape[1:]).contiguous()
        weights = torch.randn_like(self(rows)[0])
        values = torch.stack([(self(rows) * weights).flatten(1).sum(1) for _ in range(CALLS)]).double()
        shared = (8.0 * values.mean(1).var() / values.var()).item()  # 1 if the rows are independent, 8 if equal
        assert not self._draws() or abs(shared - 1.0) < 6.0 * (2.0 / CALLS) ** 0.5, f"they vary together ({shared:.2g})"

    @only_if(lambda self: self._forward)
    def vmap_respects_its_randomness(self) -> None:
        """In `vmap`, members must have their own random numbers if "different", and the same ones if "same"."""

        def member(factor: Tensor) -> Tensor:
            return factor * self(self._x)

        def members(randomness: str) -> list[Tensor]:
            return list(torch.func.vmap(member, randomness=randomness)(torch.ones(6, device=self._x.device)))

        same = members("same")
        exactly(same, [same[0]] * 6)
        drawn = [members("different") for _ in range(10 * self._draws())]
        assert not drawn or any(not torch.equal(y[0], one) for y in drawn for one in y), "members are equal"

    @only_if(lambda self: self._forward)
    def gradient_is_the_derivative(self) -> None:
        """For fixed random numbers, backward and forward mode must agree with finite differences."""
        gradcheck(self._seeded, self._x[:2].double().requires_grad_(), fast_mode=True, check_forward_ad=True)

    @only_if(lambda self: self._forward)
    def gradient_has_a_derivative(self) -> None:
        """A gradient penalty needs the derivative of the gradient, which must agree with finite differences."""
        x = self._x[:2].double().requires_grad_()
        gradgradcheck(lambda x: self._seeded(x).square(), x, fast_mode=True)

    def checkpoint_replays_the_mask(self) -> None:
        """If a checkpoint recomputes the forward, it must draw the same random numbers, for the same gradients."""
        model, _ = self._hooked()
        for reentrant in (False, True)[: 1 if isinstance(self._one, Penalty) else 2]:  # which refuses a reentrant one
            found = self._step(model, partial(checkpoint, model, use_reentrant=reentrant))
            exactly(found, self._step(model))

    @only_if(lambda self: self._compiles and self._keeps_shape)
    def compiled_code_equals_eager_code(self) -> None:
        """One graph must serve all rates, with the effects of eager code: the rate is a tensor there."""
        (model, drop), graphs = self._hooked(), []

        def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., Any]:
            graphs.append(graph)
            return graph.forward

        torch.compiler.reset()
        fast = torch.compile(model, backend=backend, fullgraph=True)

        def penalized(one: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
            return (lambda x: _penalized(one(x), drop.penalty())) if isinstance(self._one, Penalty) else one

        rates: list[float | None] = [*self._rates]
        for rate in rates or [None]:
            if rate is not None:
                drop.target_p = rate
            found, expected = (self._effects(penalized(one), self._x, CALLS // 3) for one in (fast, model))
            assert _near(found, expected), f"at rate {rate} the effect is {found.mean(0)}, not {expected.mean(0)}"
        torch.compiler.reset()
        assert len(graphs) == 1, f"{len(self._rates)} rates needed {len(graphs)} graphs"
