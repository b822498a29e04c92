"""The handle of one injection."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from torch.optim import Optimizer

from hookdrop.diagnostics.checks import discarded_text, find_problems
from hookdrop.diagnostics.measurement import Measurement, measured_into
from hookdrop.diagnostics.probe import empty_measurement, probe
from hookdrop.diagnostics.recording import Recording, recorded
from hookdrop.errors import InjectionError
from hookdrop.hooks import compiling
from hookdrop.hooks.hook import SiteHook
from hookdrop.hooks.optimizer import Follower, innermost
from hookdrop.hooks.state import Override
from hookdrop.injection import config, state_dict
from hookdrop.injection.controller import Controller, largest_target
from hookdrop.schedules import Schedule
from hookdrop.utils.context import requires_with
from hookdrop.utils.tables import counted, html_table, text_table
from hookdrop.utils.tensor_copies import CopyDevice
from hookdrop.utils.validation import count, number


@dataclass(frozen=True)
class Site:
    """One hooked layer, as seen now."""

    name: str
    """Fully qualified name of the layer."""
    p: float | None
    """The rate in force, `p_scale` included; None for a regularizer without a rate."""
    p_scale: float
    fired: bool
    """Whether the layer was ever called."""
    regularizer: str
    """The regularizer with its target rate."""


class Injection(Controller):
    """A handle on the hooks that one `inject` placed.

    It holds the model weakly, and the hooks hold neither: all handles on the same hooks are interchangeable.
    """

    # --- what and where

    @property
    def name(self) -> str:
        """The injection's name, unique on its model."""
        return self._state.name

    @property
    def sites(self) -> tuple[Site, ...]:
        """The hooked layers in `named_modules()` order."""
        return tuple(Site(hook.site, hook.p, hook.p_scale, hook.called, hook.describe()) for hook in self._hooks)

    @property
    def schedule(self) -> Schedule:
        """How the rate moves; `ConstantSchedule()` if none was given."""
        return self._state.schedule

    @property
    def step_count(self) -> int:
        """Optimizer steps taken."""
        return self._state.step_count

    # --- the rate

    @property
    def p(self) -> float | None:
        """The rate in force before `p_scale`: the largest, where sites differ.

        While disabled it is the one that does nothing: 0, of a factor 1. None where there is no rate, or where the
        sites' rates are of different units (a probability and a standard deviation): then see `sites[i].p`.
        """
        units = list(self._units.values())
        return self._rate_of(units[0]) if len(units) == 1 else None

    @p.setter
    def p(self, value: float) -> None:
        self._must_share_a_unit("p = ...")
        raise AttributeError(f"p follows the schedule; set its target: drop.target_p = {value}")

    @property
    def keep_prob(self) -> float | None:
        """1 - p; None where p is not what is dropped (noise, `Cutout`), and where `p` is None."""
        return 1.0 - self.p if self.p is not None and "p" in self._units else None

    @keep_prob.setter
    def keep_prob(self, value: float) -> None:
        self._must_share_a_unit("keep_prob = ...")
        raise AttributeError(f"keep_prob follows the schedule; set its target: drop.target_p = 1 - {value}")

    @property
    def target_p(self) -> float | None:
        """The rate that the schedule multiplies: the largest, where sites differ. None where `p` is None.

        May be set at any time; where sites differ they keep their proportions.
        """
        return self._target

    @target_p.setter
    def target_p(self, value: float) -> None:
        self._must_be_there("target_p = ...")
        largest = self._must_share_a_unit("target_p = ...")
        value = number(value, "target_p", self.name)
        hooks = next(iter(self._units.values()))
        base = [hook.initial_target if largest == 0 else hook.target for hook in hooks]
        most = max((target for target in base if target is not None), key=abs)
        with self._changing():
            for hook, target in zip(hooks, base, strict=True):
                assert target is not None
                hook.target = hook.regularizer.valid_rate(value * (target / most) if most else value)

    def _rate_of(self, hooks: list[SiteHook]) -> float:
        """The largest rate in force of hooks of one unit, before `p_scale`."""
        state = self._state
        if not state.on:
            neutral = {hook.regularizer.neutral for hook in hooks}
            return neutral.pop() if len(neutral) == 1 else 0.0
        if state.override is not None and state.override.p is not None:
            return state.override.p
        return largest_target(hooks) * state.multiplier

    def step(self, n: int = 1) -> None:
        """Count `n` optimizer steps. Call it after each `optimizer.step()`, unless `follow` does.

        Raises:
            InjectionError: an optimizer is followed, so that every step would be counted twice.
        """
        self._must_not_follow()
        self._advance(count(n, "n", "step"))

    def _must_not_follow(self) -> None:
        if self._follower is not None:
            raise InjectionError(
                f"{self.name!r} follows an optimizer, which counts the steps: this call would count them twice.\n"
                f"  leave out drop.step(), or stop following with drop.follow(None). Still at step {self.step_count}."
            )

    def seek(self, step: int) -> None:
        """Go to a step: optimizer steps taken so far. Idempotent: what a trainer or a resume needs."""
        self._must_be_there("seek()")
        step = count(step, "step", "seek", 0)
        self._seek(step)

    def follow(self, optimizer: Optimizer | None) -> Injection:
        """Count the steps of `optimizer` that are not skipped; None stops that.

        Args:
            optimizer: any torch optimizer, inside of Accelerate's, Lightning's, Lookahead's or fastai's wrappers too.
                Following the same one again does nothing.

        Returns:
            The handle itself.

        Raises:
            InjectionError: another optimizer is followed.
        """
        self._must_be_there("follow()")
        current = self._follower
        if optimizer is None:
            if current is not None:
                current.detach()
            self._state.live.follower, self._state.live.was_stepped = None, False
            return self
        inner = innermost(optimizer)
        if current is not None and current.follows(inner):
            return self
        if current is not None:
            raise InjectionError(
                f"{self.name!r} follows another {current.title} already; it still does.\n  first: drop.follow(None)"
            )
        self._warn_about_other_model(inner)
        self._state.live.follower = Follower(inner, self._advance, self._warn_about_restart)
        return self

    # --- on and off

    def disable(self) -> None:
        """Drop nothing until `enable`; the schedule goes on."""
        self._set(False)

    def enable(self) -> None:
        """Drop again."""
        self._set(True)

    def _set(self, enabled: bool) -> None:
        self._must_be_there("enable()" if enabled else "disable()")
        with self._changing():
            self._state.set_enabled(enabled)

    @contextmanager
    def disabled(self) -> Iterator[Injection]:
        """Off inside; after it everything is as it was before, nested too."""
        with self._overriding(Override(sampling=False)):
            yield self

    @contextmanager
    def sampling(self, p: float | None = None) -> Iterator[Injection]:
        """On inside, in eval mode too (Monte-Carlo dropout); batch norm is not touched.

        Args:
            p: the rate inside, before `p_scale`; None is the rate in force.

        Raises:
            InjectionError: the rate in force does nothing, so that all samples would be equal.
        """
        self._must_be_there("sampling()")
        if p is not None:
            self._must_share_a_unit(f"sampling(p={p})")
            p = next(iter(self._units.values()))[0].regularizer.valid_rate(p)
        multiplier = self._state.multiplier
        rated = [hook for hooks in self._units.values() for hook in hooks]
        rates = {hook.target * multiplier if p is None else p for hook in rated if hook.target is not None}
        neutral = {hook.regularizer.neutral for hook in rated}
        if rated and len(rates | neutral) == 1:
            raise InjectionError(
                f"sampling at rate {rates.pop():g} gives the same output each time: {self.name!r} is at step "
                f"{self.step_count} of {self.schedule}.\n  give the rate: sampling(p={self.target_p or 0.1:g})   or "
                "seek the step of the training (a copy, such as an EMA, has a count of its own)."
            )
        with self._overriding(Override(sampling=True, p=p)):
            yield self

    # --- seeing

    def probe(self, x: Any, forwards: int = 3, step: int | None = None) -> Measurement:
        """Run the model on `x` in training mode and measure; batch norm, modes and the random state are put back.

        Args:
            x: an input, a tuple of inputs, or a mapping of keyword inputs.
            forwards: how many forwards to measure.
            step: measure at this step of the schedule instead of the current one.

        Returns:
            By site and over all: rate asked for, fraction dropped, mean |output| / mean |input|, calls; and
            whether eval output is bit-identical with and without hooks. `print` it.
        """
        self._must_be_there("probe()")
        at_step = Override(step=None if step is None else count(step, "step", "probe", 0))
        with self._overriding(at_step):
            return probe(self._alive(), self._state, self._hooks, x, forwards)

    @contextmanager
    def measuring(self) -> Iterator[Measurement]:
        """Measure the real forwards inside. Each regularizer runs twice; masks and results do not change."""
        self._must_be_there("measuring()")
        with measured_into(self._state, empty_measurement(self._hooks)) as measurement:
            yield measurement

    @requires_with("with drop.recording() as r: model(x)   then r[site], r.plot_features()")
    def recording(self, last: int = 1, to: CopyDevice = None) -> Iterator[Recording]:
        """Keep what the real forwards inside do: `r["layer4.0"].before`, `.mask`, `.after`, and pictures of them.

        Each regularizer runs twice; masks and results do not change. Compiled code leaves its graph for it, which under
        `fullgraph=True` is PyTorch's error: record the model uncompiled there.

        Args:
            last: how many calls of each site to keep; `r.calls("layer4.0")` lists them.
            to: the device of what is kept, such as `"cpu"`; None is where the tensors are.

        Example:
            >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
            >>> drop = inject(model, DropBlock(p=0.2, block_size=3), layers="1")
            >>> with drop.recording() as r:
            ...     _ = model(torch.randn(2, 3, 16, 16))
            >>> r["1"].before.shape, r["1"].mask.dtype, bool((r["1"].after[~r["1"].mask] == 0).all())
            (torch.Size([2, 8, 14, 14]), torch.bool, True)
        """
        self._must_be_there("recording()")
        with recorded(self._state, self._hooks, last, to) as recording:
            yield recording

    def check(self) -> list[str]:
        """Problems now: lost sites, layers that never ran or only in eval mode, a schedule that is not advancing."""
        model, state = self._model(), self._state
        if model is None:
            return [discarded_text(state.name) if not state.live.trained else str(self._gone())]
        return list(find_problems(model, state, self._hooks, requested=True).values())

    def metrics(self) -> dict[str, float]:
        """Flat numbers for any logger: rate and step under `hookdrop/<name>/`."""
        self._must_be_there("metrics()")
        numbers = self._rates_by_name()
        if self.keep_prob is not None:
            numbers["keep_prob"] = self.keep_prob
        numbers |= {"step": float(self.step_count), "enabled": float(self._state.on)}
        return {f"hookdrop/{self.name}/{key}": value for key, value in numbers.items()}

    def summary(self) -> str:
        """A table of the sites with the rates in force."""
        self._warn_about_problems()
        return f"{self!r}\n{text_table(_HEADER, self._rows())}"

    def __repr__(self) -> str:
        if self._state.removed:
            return f"<Injection {self.name!r}, removed>"
        if self._model() is None:
            return f"<Injection {self.name!r}, whose model is gone>"
        targets = {name: largest_target(hooks) for name, hooks in self._units_by_name().items()}
        p = "".join(f" {name}={rate:.4g} of {targets[name]:.4g}," for name, rate in self._rates_by_name().items())
        off = "" if self._state.on else " disabled,"
        sites = counted(len(self._hooks), "site")
        return f"<Injection {self.name!r}: {sites},{p}{off} step {self.step_count} of {self.schedule}>"

    def _repr_html_(self) -> str:
        return html_table(_HEADER, self._rows(), repr(self))

    # --- saving

    def state_dict(self) -> dict[str, Any]:
        """Step count, target rates, on or off: what `load_state_dict` needs to go on from here."""
        self._must_be_there("state_dict()")
        return state_dict.save(self._state, self._hooks)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Go on from a saved state; the schedule is the code's.

        Raises:
            StateError: other sites (with `strict`) or no state at all; nothing was loaded.
        """
        self._must_be_there("load_state_dict()")
        state_dict.load(self._state, self._hooks, state, strict, self._changing)

    @property
    def config(self) -> dict[str, Any]:
        """JSON-able settings with resolved site names, for `from_config`.

        Raises:
            StateError: something in it is not JSON, such as a function.
        """
        self._must_be_there("config")
        return config.to_config(self._state, self._hooks)

    # --- the end

    def remove(self) -> None:
        """Remove the hooks: the model is what it was before. A second time does nothing."""
        if self._state.removed:
            return
        compiling.raise_if_tracing("remove()")
        try:
            self._warn_about_problems()
        finally:
            self._detach()

    def __enter__(self) -> Injection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.remove()
        else:  # The error is what matters, and not further warnings.
            self._detach()

    def _units_by_name(self) -> dict[str, list[SiteHook]]:
        """The hooks by the name of their rate: `p` for a probability, `std` for noise; longer where two share one."""
        units = self._units
        names = {unit: "p" if unit == "p" else str(hooks[0].regularizer.rate_name) for unit, hooks in units.items()}
        shared = {name for name in names.values() if list(names.values()).count(name) > 1}
        return {unit if names[unit] in shared else names[unit]: hooks for unit, hooks in units.items()}

    def _rates_by_name(self) -> dict[str, float]:
        return {name: self._rate_of(hooks) for name, hooks in self._units_by_name().items()}

    def _rows(self) -> list[tuple[str, float | None, float, str, str]]:
        return [(s.name, s.p, s.p_scale, "yes" if s.fired else "no", s.regularizer) for s in self.sites]


_HEADER = ("site", "p", "p_scale", "called", "regularizer")
