"""The handle of injections."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from hookdrop.core import compiling, events, state_dict
from hookdrop.core.arguments import CopyDevice, count, named_arguments, number
from hookdrop.core.errors import InjectionError
from hookdrop.core.follow import Follower, innermost
from hookdrop.core.parts import PARTS
from hookdrop.core.registry import remove_sinks, sinks_of
from hookdrop.core.schedules import Schedule
from hookdrop.core.sink import RateSink
from hookdrop.core.spec import InjectionSpec, spec_of
from hookdrop.core.state import (
    InjectionState,
    changing,
    current_rate,
    largest_target,
    overriding,
    rates_by_unit,
    set_steps,
    set_targets,
)
from hookdrop.core.tables import counted, html_table, text_table

# Imported on first use, because most trainings neither measure nor predict.
if TYPE_CHECKING:
    from hookdrop.measure.measurement import Measurement
    from hookdrop.measure.prediction import Prediction
    from hookdrop.measure.recording import Recording


class Site(NamedTuple):
    """The current state of one site."""

    name: str
    """Full name of the layer; for a dropout that the model already has, that of its rate."""
    p: float | None
    """The current rate, including `p_scale`; None for a regularizer without a rate."""
    p_scale: float
    called: bool | None
    """Whether the layer has been called; None if that is not known, for a dropout that the model already has."""
    regularizer: str
    """The regularizer with its target rate."""


class Sites(tuple[Site, ...]):
    """The sites of an injection; `print` shows a table."""

    __slots__ = ()

    def __repr__(self) -> str:
        return text_table(Site._fields, self)


@named_arguments
class Injection:
    """A handle on one or several injections of a model, by name.

    `inject` returns a handle on one, `find(model)` on all. `find(model)["dropblock"]` is one of these; iterating yields
    one handle per name; the length is the number of names, and a handle is false if there is none. What changes the
    rates changes all of them, or none after an error.

    A handle does not keep its model alive, and all handles on the same injections are interchangeable.
    """

    _model: weakref.ref[nn.Module]
    _placed: tuple[RateSink, ...]

    def __init__(self, model: nn.Module, sinks: Iterable[RateSink]) -> None:
        vars(self).update(_model=weakref.ref(model), _placed=tuple(sinks))

    # --- the set: copying or pickling a handle includes its model

    def __setattr__(self, name: str, value: object) -> None:
        if not name.startswith("_") and name not in ("target_p", "enabled"):
            raise AttributeError(f"{name} cannot be set.\n  what can be: drop.target_p = 0.1, drop.enabled = False")
        object.__setattr__(self, name, value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Injection) and other._states == self._states

    def __hash__(self) -> int:
        return hash(self._states)

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self._require_model(), "sinks": self._sinks}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A pickle of a portable injection has other entries in place of its hooks.
        Injection.__init__(self, state["model"], [sink for sink in state["sinks"] if isinstance(sink, RateSink)])

    def __getitem__(self, name: str) -> Injection:
        found = [state for state in self._present if state.name == name]
        if not found:
            names = ", ".join(dict.fromkeys(repr(state.name) for state in self._present))
            raise InjectionError(f"there is no injection named {name!r} here; available: {names or 'none'}.")
        return self._only(found)

    def __contains__(self, name: object) -> bool:
        return any(state.name == name for state in self._present)

    def __iter__(self) -> Iterator[Injection]:
        return iter([self[name] for name in dict.fromkeys(state.name for state in self._present)])

    def __len__(self) -> int:
        return len({state.name for state in self._present})

    def _only(self, states: Sequence[InjectionState]) -> Injection:
        narrowed = object.__new__(Injection)  # the model may be gone
        vars(narrowed).update(_model=self._model, _placed=tuple([s for s in self._placed if s.state in states]))
        return narrowed

    @cached_property
    def _states(self) -> tuple[InjectionState, ...]:
        return tuple(dict.fromkeys([sink.state for sink in self._placed]))

    @property
    def _present(self) -> list[InjectionState]:
        return [state for state in self._states if not state.removed]

    @property
    def _sinks(self) -> list[RateSink]:
        """What the handle drives in its model, or in its part of a model."""
        return [sink for sink in self._placed if sink.placed or sink.state.removed]

    @property
    def _units(self) -> dict[str, list[RateSink]]:
        """All that has a rate by its unit, including sinks outside the handle's part of the model."""
        return rates_by_unit([sink for state in self._states for sink in state.live.members])

    def _require_any(self, what: str) -> None:
        self._check_not_removed(what)
        if not self._states:
            raise InjectionError(f"{what}: there is no injection here.")

    def _require_sinks(self, what: str) -> list[RateSink]:
        self._require_any(what)
        return self._sinks

    def _require_model(self) -> nn.Module:
        model = self._model()
        if model is None:
            raise InjectionError(
                f"the model that {self.name!r} was injected into was deleted.\n"
                "  a handle does not keep its model alive: keep a reference to it. For a copied model: find(copy).\n"
                "  if your trainer built a new model (ultralytics, FX quantization), inject into it in a callback."
            )
        return model

    def _common(self, what: str) -> Any:
        """Return the value of an attribute that all states share."""
        values = [(state.name, getattr(state, what)) for state in self._states]
        if not values:
            raise InjectionError(f"{what}: there is no injection here.")
        if any(value != values[0][1] for _, value in values):
            each = ", ".join(f"{name!r} {value}" for name, value in values)
            raise InjectionError(f"{what} differs: {each}.\n  for one of them: find(model)[name].{what}")
        return values[0][1]

    # --- what and where

    @property
    def name(self) -> str:
        """The injection's name, unique on its model; several names are joined by commas."""
        return ", ".join(dict.fromkeys(state.name for state in self._states))

    @property
    def sites(self) -> Sites:
        """The sites in `named_modules()` order; `print(drop.sites)` shows a table with the current rates."""
        return Sites(Site(sink.site, sink.p, sink.p_scale, sink.called, sink.describe()) for sink in self._sinks)

    @property
    def schedule(self) -> Schedule:
        """The schedule of the rate; `ConstantSchedule()` if none was given. An `InjectionError` if it differs."""
        return self._common("schedule")

    @property
    def step_count(self) -> int:
        """Number of optimizer steps taken. An `InjectionError` if the injections are at different steps."""
        return self._common("step_count")

    @property
    def spec(self) -> InjectionSpec:
        """What was injected, with the resolved sites: `inject(model, spec)` places it again.

        `spec.to_dict()` is ready for JSON and YAML. An `InjectionError` if there are several injections.
        """
        self._check_not_removed("spec")
        if len(self._states) != 1:
            raise InjectionError(f"spec: there are {len(self._states)} injections.\n  write: [d.spec for d in drop]")
        return spec_of(self._states[0], self._sinks)

    # --- the rate

    @property
    def p(self) -> float | None:
        """The current rate before `p_scale`; the largest if sites differ. To change it, set `target_p`.

        While disabled, it is the rate without effect: 0, or 1 for a factor. None if there is no rate, or if the sites'
        rates have different units (a probability and a standard deviation); see `sites[i].p` then.
        """
        units = list(self._units.values())
        return current_rate(units[0]) if len(units) == 1 else None

    @property
    def keep_prob(self) -> float | None:
        """1 - p; None if p is not a drop probability (noise, `Cutout`) or is None."""
        p, drops = self.p, all(sink.rate.kind == "drop" for sinks in self._units.values() for sink in sinks)
        return 1.0 - p if p is not None and drops else None

    @property
    def target_p(self) -> float | None:
        """The rate that the schedule multiplies; the largest if sites differ, and None if `p` is None.

        It can be set at any time; the sites of an injection with different rates keep their proportions.
        """
        units = list(self._units.values())
        return largest_target(units[0]) if len(units) == 1 else None

    @target_p.setter
    def target_p(self, value: float) -> None:
        self._check_not_removed("target_p = ...")
        sinks = self._require_common_unit("target_p = ...")
        value = number(value, "target_p", self.name)
        with changing(self._states):
            for state in self._states:
                set_targets([sink for sink in sinks if sink.state is state], value)

    def _require_common_unit(self, what: str) -> list[RateSink]:
        """Return the sinks with a rate, or raise if there is none or the units differ."""
        units = self._units
        if not units:
            because = "".join(f": {sink.describe()} has none of p, drop_prob, drop_rate" for sink in self._sinks[:1])
            raise InjectionError(f"{what}: {self.name!r} has no rate to set{because}.")
        if len(units) > 1:
            names = {unit: ", ".join(sorted(repr(sink.site) for sink in sinks)) for unit, sinks in units.items()}
            sites = "\n".join(f"  {unit}: {text}" for unit, text in names.items())
            raise InjectionError(
                f"{what}: the sites of {self.name!r} have rates with different units.\n{sites}\n"
                "  use separate injections, each with its own target. No rate was changed."
            )
        return next(iter(units.values()))

    # --- steps

    def step(self, n: int = 1) -> None:
        """Count `n` optimizer steps, after each `optimizer.step()`. An `InjectionError` if an optimizer is followed."""
        for state in self._states:
            if state.followed:
                raise InjectionError(
                    f"{state.name!r} follows an optimizer, which counts the steps: this call would count them twice.\n"
                    f"  remove drop.step(), or stop following with drop.follow(None). Still at step {state.step_count}."
                )
        self._advance(count(n, "n", "step"))

    def seek(self, step: int) -> None:
        """Set the number of optimizer steps taken. Idempotent, for trainers and for resuming."""
        self._require_any("seek()")
        step = count(step, "step", "seek", 0)
        self._move(lambda state: step)
        for state in self._states:
            state.live.steps_ahead = None

    def follow(self, optimizer: Optimizer | None) -> Injection:
        """Count the steps that `optimizer` takes; skipped steps do not count.

        Args:
            optimizer: any torch optimizer, also inside a wrapper of Accelerate, Lightning, Lookahead, or fastai.
                Following the same optimizer again has no effect; None stops following. Following another one is an
                `InjectionError`.

        Returns:
            This handle.
        """
        self._require_any("follow()")
        if optimizer is None:
            for state in self._states:
                state.unfollow()
                state.live.was_stepped = False
            return self
        inner = innermost(optimizer)
        for state in self._states:
            current = state.live.follower
            if state.followed and current is not None and current.optimizer is not inner:
                raise InjectionError(
                    f"{state.name!r} already follows an optimizer ({type(current.optimizer).__name__}); nothing "
                    "changed.\n  to switch: drop.follow(None), then drop.follow(optimizer)"
                )
        for state in [state for state in self._states if not state.followed]:
            state.live.follower = Follower(inner, self._only([state])._advance)
        return self

    def _advance(self, n: int = 1) -> None:
        self._require_any("step()")
        self._move(lambda state: state.step_count + n)

    def _move(self, step_of: Callable[[InjectionState], int]) -> None:
        for state in set_steps(self._states, step_of):
            if state.live.moves % events.MOVES == 0:
                own = self._only([state])
                events.announce(events.moved, self._model(), own._states, own._sinks)

    # --- disabling and sampling

    @property
    def enabled(self) -> bool:
        """Whether anything drops in training mode. It can be set; while False, nothing drops, and schedules continue.

        Inside a context, a change lasts until the context exits.
        """
        return any(state.on for state in self._states)

    @enabled.setter
    def enabled(self, value: bool) -> None:
        self._check_not_removed("enabled = ...")
        if not isinstance(value, bool):
            raise TypeError(f"enabled must be True or False, got {value!r}.")
        with changing(self._states):
            for state in self._states:
                state.enabled = value  # inside a context, until it exits
                state.live.overrides = [one for one in state.live.overrides if one.sampling is None]

    @contextmanager
    def disabled(self) -> Iterator[Injection]:
        """Disable inside the `with` block, and restore the previous state on exit. Contexts can be nested."""
        self._check_not_removed("contexts")
        with overriding(self._states, sampling=False):
            yield self

    @contextmanager
    def sampling(self, p: float | None = None) -> Iterator[Injection]:
        """Drop inside the `with` block, in eval mode too (Monte Carlo dropout). Batch norm is not affected.

        Args:
            p: the rate inside, before `p_scale`; None uses the current rate.

        Raises:
            InjectionError: the rate has no effect, so all samples would be equal.
        """
        self._require_sinks("sampling()")
        if p is not None:
            p = self._require_common_unit(f"sampling(p={p})")[0].valid_target(p)
        for state in self._states:
            multiplier, rated = state.multiplier, [sink for sink in state.live.members if sink.target is not None]
            at = {sink.target * multiplier if p is None else p for sink in rated}
            if len(at) == 1 and at == {sink.rate.neutral for sink in rated}:
                raise InjectionError(
                    f"sampling at rate {at.pop():g} gives the same output each time: {state.name!r} is at step "
                    f"{state.step_count} of {state.schedule}.\n"
                    f"  pass a rate: sampling(p={largest_target(rated) or 0.1:g})   or seek() to the training "
                    "step (a copy, such as an EMA, has its own step count)."
                )
        for state in self._states:
            for sink in list(state.live.members):
                sink.before_sampling(self._require_model)
        with overriding(self._states, sampling=True, p=p):
            yield self

    def predict(
        self,
        data: Any,
        samples: int = 30,
        *,
        p: float | None = None,
        activation: str | None = "softmax",
        output: Callable[[Any], Tensor] | None = None,
        call: Callable[..., Any] | None = None,
    ) -> Prediction:
        """Sample predictions inside `sampling()`, and return their mean, variance, entropy and mutual information.

        Each sample is a forward pass in eval mode, without gradients, and the modes are restored. Batch norm uses its
        running statistics. Only this injection is active; all other dropout stays off. The random numbers come from
        PyTorch's global RNG. For fixed masks (`Masksembles`), the batch is repeated along axis 0, once for each mask.

        Args:
            data: a batch or a loader. A batch is a tensor, a tuple of arguments, or a mapping of keyword arguments. Any
                other iterable is a loader of batches; of lists and tuples, the first element is the input. Another
                sequence or mapping there is one argument or several, whichever the model's forward takes. The keys
                `labels` and `label` are only passed to a model whose forward has such an argument. Batches are moved to
                the device of the model.
            samples: number of samples, at least 2.
            p: the rate, before `p_scale`; None uses the current rate.
            activation: `"softmax"` over the class axis (axis 1 of a 4-D or 5-D output, otherwise the last),
                `"sigmoid"` for binary and multi-label logits, None for regression.
            output: picks the tensor from what the model returns; None takes a tensor, or the `logits` of transformers'
                outputs. It can also move the class axis.
            call: what to call in place of the model, such as `lambda pair: model(*pair)`.

        Returns:
            A `Prediction`, whose tensors are concatenated over the batches, on the CPU.

        Raises:
            InjectionError: the rate has no effect, or the injection edits only gradients.
            ValueError, TypeError, ShapeError: an argument, the input or the output is invalid, or the loader is empty.

        Example:
            >>> _ = torch.manual_seed(0)
            >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
            >>> drop = inject(model, Dropout(p=0.2), layers="1")
            >>> found = drop.predict(torch.randn(4, 8), samples=50)
            >>> found.mean.shape, found.entropy.shape
            (torch.Size([4, 3]), torch.Size([4]))

        Reference: Gal & Ghahramani 2016, "Dropout as a Bayesian approximation", arXiv:1506.02142; Houlsby et al. 2011,
        "Bayesian active learning for classification and preference learning", arXiv:1112.5745 (mutual information).
        """
        sinks, predict = self._require_sinks("predict()"), PARTS["predict"]
        return predict(self._require_model(), sinks, self.sampling(p), data, samples, activation, output, call)

    def samples(self, batch: Any, n: int = 30, *, p: float | None = None, call: Any = None) -> Iterator[Any]:
        """Sample as `predict` does, and yield what the model returns: detections, tokens, dicts.

        Each forward runs when the loop asks for it. Between them, modes and hooks are as before.

        Args:
            batch: as for `predict`, or another single argument, such as a detector's list of images; no loader.
            n: number of samples.
            p: as for `predict`.
            call: what to call in place of the model, such as `model.generate`.
        """
        self._require_sinks("samples()")
        return PARTS["samples"](self._require_model(), partial(self.sampling, p), batch, n, call)

    # --- the loss

    @property
    def _penalizes(self) -> bool:
        return any(state.live.loss_terms is not None for state in self._states)

    def penalty(self) -> Tensor:
        """Return the sum of the loss terms of all calls since the last reading, and clear it.

        Read it once for each loss: `loss = criterion(model(x), y) + drop.penalty()`. Terms come from forward passes in
        training mode with gradients. In eval mode, while disabled, and at rate 0 there are none, so the sum is 0.

        Returns:
            A 0-d tensor on the device of the last call.

        Raises:
            InjectionError: no regularizer here adds a term, or the call is inside a compiled function.
        """
        compiling.raise_if_tracing("penalty()")  # first, because the compiler cannot trace the properties below
        self._check_not_removed("penalty()")
        return PARTS["penalty"](self._states, self.name, self._require_model)

    # --- inspecting

    def probe(self, x: Any, forwards: int = 3, step: int | None = None) -> Measurement:
        """Run the model on `x` in training mode and measure what it drops. Buffers, modes and RNG are restored.

        Args:
            x: an input, a tuple of inputs, or a mapping of keyword inputs.
            forwards: number of forward passes to measure.
            step: step of the schedule to measure at; None is the current step.

        Returns:
            Per site and in total: the requested rate, the fraction dropped, the ratio of the mean magnitudes of output
            and input, and the calls; and whether eval output is bit-identical with and without hooks. `print` shows a
            table.
        """
        sinks, probe = self._require_sinks("probe()"), PARTS["probe"]
        with overriding(self._states, step=None if step is None else count(step, "step", "probe", 0)):
            return probe(self._require_model(), sinks, x, forwards)

    @contextmanager
    def recording(self, last: int = 1, to: CopyDevice = None) -> Iterator[Recording]:
        """Record the calls inside the `with` block: `r["layer4.0"].before`, `.mask`, `.after`, and their plots.

        `r.totals` measures all calls, as `probe` does. Regularizers run twice; masks and results do not change.
        A compiled model runs uncompiled inside.

        Args:
            last: number of calls to keep per site; `r.calls("layer4.0")` lists them. 0 keeps no tensors, for `r.totals`
                over a whole training.
            to: device of the recorded tensors, such as `"cpu"`; None keeps the original device.

        Example:
            >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
            >>> drop = inject(model, DropBlock(p=0.2, block_size=3), layers="1")
            >>> with drop.recording() as r:
            ...     _ = model(torch.randn(2, 3, 16, 16))
            >>> before, mask, after = r["1"].before, r["1"].mask, r["1"].after
            >>> before.shape, mask.dtype, bool((after[~mask] == 0).all())
            (torch.Size([2, 8, 14, 14]), torch.bool, True)
            >>> r.totals.calls
            1
        """
        with PARTS["recording"](self._require_sinks("recording()"), last, to) as found:
            yield found

    def check(self) -> list[str]:
        """List current problems: lost sites, layers that never ran or ran only in eval mode, a stalled schedule."""
        try:
            model = self._require_model()
        except InjectionError as gone:
            return [str(gone)]
        each = [(state, self._only([state])._sinks) for state in self._states]
        return [text for state, own in each for check in events.checks for text in check(model, state, own).values()]

    def metrics(self) -> dict[str, float]:
        """Return rates and steps as a flat dict for any logger, with keys under `hookdrop/<name>/`."""
        self._check_not_removed("metrics()")
        found: dict[str, float] = {}
        for index, state in enumerate(self._present):
            one, earlier = self._only([state]), [other.name for other in self._present[:index]]
            numbers = {unit: current_rate(sinks) for unit, sinks in one._units.items()}
            if one.keep_prob is not None:
                numbers["keep_prob"] = one.keep_prob
            numbers |= {"step": float(one.step_count), "enabled": float(one.enabled)}
            name = f"{state.name}{earlier.count(state.name) + 1}" if state.name in earlier else state.name
            found |= {f"hookdrop/{name}/{key}": value for key, value in numbers.items()}
        return found

    def __repr__(self) -> str:
        return "\n".join(self._only([state])._text() for state in self._states) or "<no injections>"

    def _text(self) -> str:
        (state,) = self._states
        if state.removed:
            return f"<Injection {state.name!r}, removed>"
        if self._model() is None:
            return f"<Injection {state.name!r}, whose model was deleted>"
        p = "".join(
            f" {unit}={current_rate(sinks):.4g} of {largest_target(sinks):.4g}," for unit, sinks in self._units.items()
        )
        off = "" if state.on else " disabled,"
        sites = counted(len(self._sinks), "site")
        return f"<Injection {state.name!r}: {sites},{p}{off} step {state.step_count} of {state.schedule}>"

    def _repr_html_(self) -> str:
        return html_table(Site._fields, () if self._model() is None else self.sites, repr(self))

    # --- saving

    def state_dict(self) -> dict[str, Any]:
        """Return step counts, target rates, switches and specs by name, for `load_state_dict`, as plain values."""
        self._check_not_removed("state_dict()")
        return state_dict.save([(one, self._only([one])._sinks) for one in self._states])

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Resume from a saved state, with the settings that the code has; a warning lists settings that differ.

        Args:
            state: what `state_dict` returned.
            strict: whether all names and sites must agree; otherwise those that agree are loaded.

        Raises:
            StateError: the names or the sites differ (with `strict`), or `state` is invalid. Nothing was loaded.
        """
        self._check_not_removed("load_state_dict()")
        state_dict.load([(one, self._only([one])._sinks) for one in self._states], state, strict)

    # --- removing

    def remove(self) -> None:
        """Remove the hooks and restore the model. Calling it again has no effect."""
        if not self._present:
            return
        compiling.raise_if_tracing("remove()")
        live = self._only(self._present)
        try:
            events.announce(events.removing, self._model(), live._states, live._sinks)
        finally:
            self._detach()

    def _detach(self) -> None:
        """Remove the hooks without emitting warnings; a handle on part of a model removes only that part's."""
        model, sinks = self._model(), self._sinks
        gone = {id(sink) for sink in sinks}
        # First the states, so that another thread that compares the model with them does not miss the hooks.
        for state in self._present:
            remaining = [sink for sink in state.live.members if sink.placed and id(sink) not in gone]
            sites = {sink.site for sink in remaining}
            state.sites = tuple(site for site in state.sites if site in sites)
            if remaining:  # the removed targets no longer count
                state.live.members = weakref.WeakSet(remaining)
            else:
                state.unfollow()
                state.removed, state.live.loss_terms = True, None
                events.announce(events.removed, state)
        remove_sinks(model, sinks)

    def _check_not_removed(self, what: str) -> None:
        for state in self._states:
            if state.removed:
                raise InjectionError(f"{what}: {state.name!r} was removed from its model.\n  call inject() again.")
        compiling.raise_if_tracing(what)

    def __enter__(self) -> Injection:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            self.remove()
        else:  # do not distract from the error with warnings
            self._detach()


def find(model: nn.Module) -> Injection:
    """Return a handle on all injections of `model`, which may be copied, wrapped, or unpickled.

    `find(model)["dropblock"]` is one of them; see `Injection`.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        >>> _ = inject(model, Dropout(p=0.5), layers="1")
        >>> twin = copy.deepcopy(model)
        >>> find(twin)
        <Injection 'dropout': 1 site, p=0.5 of 0.5, step 0 of ConstantSchedule()>
        >>> find(twin).remove()
        >>> bool(find(twin))
        False
    """
    return Injection(model, [sink for _, sink in sinks_of(model)])
