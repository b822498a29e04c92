"""The handle of one injection."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from hookdrop.diagnostics.measurement import Measurement, measured_into
from hookdrop.diagnostics.probe import empty_measurement, probe
from hookdrop.diagnostics.recording import Recording, recorded
from hookdrop.diagnostics.uncertainty import Prediction
from hookdrop.errors import InjectionError
from hookdrop.guards.messages import message
from hookdrop.guards.problems import find_problems
from hookdrop.hooks import compiling
from hookdrop.hooks.hook import SiteHook
from hookdrop.hooks.state import Override
from hookdrop.injection import config, state_dict
from hookdrop.injection.controller import Controller, largest_target
from hookdrop.injection.prediction import Settings, predict
from hookdrop.utils.captures import CopyDevice, requires_with
from hookdrop.utils.tables import counted, html_table, text_table
from hookdrop.utils.validation import count, number


@dataclass(frozen=True)
class Site:
    """The current state of one hooked layer."""

    name: str
    """Fully qualified name of the layer."""
    p: float | None
    """The current rate, including `p_scale`; None for a regularizer without a rate."""
    p_scale: float
    fired: bool
    """Whether the layer has been called."""
    regularizer: str
    """The regularizer with its target rate."""


class Injection(Controller):
    """A handle for the hooks that one `inject` call placed.

    It does not keep the model alive, and all handles for the same hooks are interchangeable.
    """

    # --- name and sites

    @property
    def name(self) -> str:
        """The injection's name, unique on its model."""
        return self._state.name

    @property
    def sites(self) -> tuple[Site, ...]:
        """The hooked layers in `named_modules()` order."""
        return tuple(Site(hook.site, hook.p, hook.p_scale, hook.called, hook.describe()) for hook in self._hooks)

    # --- the rate

    @property
    def p(self) -> float | None:
        """The current rate before `p_scale`; the largest if sites differ.

        While disabled, it is the rate without effect: 0, or 1 for a factor. None if there is no rate, or if the sites'
        rates have different units (a probability and a standard deviation); see `sites[i].p` then.
        """
        units = list(self._units.values())
        return self._rate_of(units[0]) if len(units) == 1 else None

    @p.setter
    def p(self, value: float) -> None:
        self._require_common_unit("p = ...")
        raise AttributeError(
            f"p is read-only, because the schedule sets it.\n  set the target: drop.target_p = {value}"
        )

    @property
    def keep_prob(self) -> float | None:
        """1 - p; None if p is not a drop probability (noise, `Cutout`) or is None."""
        return 1.0 - self.p if self.p is not None and "p" in self._units else None

    @keep_prob.setter
    def keep_prob(self, value: float) -> None:
        self._require_common_unit("keep_prob = ...")
        raise AttributeError(
            f"keep_prob is read-only, because the schedule sets it.\n  set the target: drop.target_p = 1 - {value}"
        )

    @property
    def target_p(self) -> float | None:
        """The rate that the schedule multiplies; the largest if sites differ, and None if `p` is None.

        It can be set at any time; sites with different rates keep their proportions.
        """
        return self._target

    @target_p.setter
    def target_p(self, value: float) -> None:
        self._check_not_removed("target_p = ...")
        largest = self._require_common_unit("target_p = ...")
        value = number(value, "target_p", self.name)
        hooks = next(iter(self._units.values()))
        base = [hook.initial_target if largest == 0 else hook.target for hook in hooks]
        reference = max((target for target in base if target is not None), key=abs)
        with self._changing():
            for hook, target in zip(hooks, base, strict=True):
                assert target is not None
                hook.target = hook.valid_target(value * (target / reference) if reference else value)

    def _rate_of(self, hooks: list[SiteHook]) -> float:
        """Return the largest current rate among hooks of one unit, before `p_scale`."""
        state = self._state
        if not state.on:
            neutral = {hook.rate.neutral for hook in hooks}
            return neutral.pop() if len(neutral) == 1 else 0.0
        if state.override is not None and state.override.p is not None:
            return state.override.p
        return largest_target(hooks) * state.multiplier

    # --- disabling and sampling

    @contextmanager
    def disabled(self) -> Iterator[Injection]:
        """Disable inside the `with` block, and restore the previous state on exit. Contexts can be nested."""
        with self._overriding(Override(sampling=False)):
            yield self

    @contextmanager
    def sampling(self, p: float | None = None) -> Iterator[Injection]:
        """Drop inside the `with` block, in eval mode too (Monte Carlo dropout). Batch norm is not affected.

        Args:
            p: the rate inside, before `p_scale`; None uses the current rate.

        Raises:
            InjectionError: the rate has no effect, so all samples would be equal.
        """
        self._check_not_removed("sampling()")
        if p is not None:
            self._require_common_unit(f"sampling(p={p})")
            p = next(iter(self._units.values()))[0].valid_target(p)
        multiplier = self._state.multiplier
        rated = [hook for hooks in self._units.values() for hook in hooks]
        rates = {hook.target * multiplier if p is None else p for hook in rated if hook.target is not None}
        neutral = {hook.rate.neutral for hook in rated}
        if rated and len(rates | neutral) == 1:
            raise InjectionError(
                f"sampling at rate {rates.pop():g} gives the same output each time: {self.name!r} is at step "
                f"{self.step_count} of {self.schedule}.\n  pass a rate: sampling(p={self.target_p or 0.1:g})   or "
                "seek() to the training step (a copy, such as an EMA, has its own step count)."
            )
        with self._overriding(Override(sampling=True, p=p)):
            yield self

    def predict(
        self,
        data: Any,
        samples: int = 30,
        *,
        p: float | None = None,
        activation: str | None = "softmax",
        output: Callable[[Any], Tensor] | None = None,
        rows: int | None = None,
        device: int | str | torch.device | None = None,
        progress: bool | None = None,
    ) -> Prediction:
        """Sample predictions inside `sampling()`, and return their mean, variance, entropy and mutual information.

        The model runs in eval mode, without gradients, and its modes are restored, also after an error. Batch norm uses
        its running statistics and does not update them. Of all hooks and dropout layers, only this injection drops. The
        random numbers come from PyTorch's global RNG, as in the training.

        To save time, the batch is repeated along axis 0, so that one forward draws several samples, if that does not
        change their distribution. Each sample has its own forward if

        * a regularizer draws once for the whole batch: `DropPath(mode="batch")`, `MixStyle`, `DropBlock` with its
          default `normalize="batch"`, modules of other libraries, and classes that do not define
          `independent_samples = True`;
        * the output of a row depends on the others, which one comparison without dropout on a single row finds: a
          recurrent network without `batch_first`, or a batch norm without running statistics;
        * the arguments are not all tensors with the same number of rows (and plain numbers, strings or None).

        Args:
            data: a batch or a loader. A batch is a tensor, a tuple of arguments, or a mapping of keyword arguments. Any
                other iterable is a loader of batches; of lists and tuples, the first element is the input, and may be a
                mapping. The keys `labels` and `label` are only passed to a model whose forward has such an argument.
            samples: number of samples, at least 2.
            p: the rate, before `p_scale`; None uses the current rate.
            activation: `"softmax"` over the class axis (axis 1 of a 4-D or 5-D output, otherwise the last),
                `"sigmoid"` for binary and multi-label logits, None for regression.
            output: picks the tensor from what the model returns; None takes a tensor, or the `logits` of transformers'
                outputs. It can also move the class axis.
            rows: the largest number of rows of a forward that draws several samples; None is 256, and on a CPU at most
                262,144 input values, because larger batches are not faster there. 1 never repeats a batch.
            device: where to move the batches; None is the device of the model's parameters.
            progress: whether to show a progress bar, which needs tqdm (`pip install 'hookdrop[progress]'`); None shows
                it for loaders, in terminals and notebooks, if tqdm is installed.

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
            >>> found.mean.shape, found.entropy.shape, bool((found.mutual_information <= found.entropy).all())
            (torch.Size([4, 3]), torch.Size([4]), True)

        Reference: Gal & Ghahramani 2016, "Dropout as a Bayesian approximation", arXiv:1506.02142; Houlsby et al. 2011,
        "Bayesian active learning for classification and preference learning", arXiv:1112.5745 (mutual information).
        """
        self._check_not_removed("predict()")
        settings = Settings(samples, activation, output, rows, device, progress)
        return predict(self._require_model(), self._hooks, lambda: self.sampling(p), data, settings)

    # --- inspecting

    def probe(self, x: Any, forwards: int = 3, step: int | None = None) -> Measurement:
        """Run the model on `x` in training mode and measure what it drops.

        The state of batch norm, the modes, and the RNG state are restored.

        Args:
            x: an input, a tuple of inputs, or a mapping of keyword inputs.
            forwards: number of forwards to measure.
            step: step of the schedule to measure at; None is the current step.

        Returns:
            Per site and in total: the requested rate, the fraction dropped, the ratio of the mean magnitudes of output
            and input, and the calls; and whether eval output is bit-identical with and without hooks. `print` shows a
            table.
        """
        self._check_not_removed("probe()")
        at_step = Override(step=None if step is None else count(step, "step", "probe", 0))
        with self._overriding(at_step):
            return probe(self._require_model(), self._state, self._hooks, x, forwards)

    @contextmanager
    def measuring(self) -> Iterator[Measurement]:
        """Measure the forwards inside the `with` block. Regularizers run twice; masks and results do not change."""
        self._check_not_removed("measuring()")
        with measured_into(self._state, empty_measurement(self._hooks)) as measurement:
            yield measurement

    @requires_with("with drop.recording() as r: model(x)   then r[site], r.plot_features()")
    def recording(self, last: int = 1, to: CopyDevice = None) -> Iterator[Recording]:
        """Record the forwards inside the `with` block: `r["layer4.0"].before`, `.mask`, `.after`, and their plots.

        Regularizers run twice; masks and results do not change. Recording causes graph breaks in compiled code, which
        are an error with `fullgraph=True`: record the uncompiled model instead.

        Args:
            last: number of calls to keep per site; `r.calls("layer4.0")` lists them.
            to: device of the recorded tensors, such as `"cpu"`; None keeps the original device.

        Example:
            >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
            >>> drop = inject(model, DropBlock(p=0.2, block_size=3), layers="1")
            >>> with drop.recording() as r:
            ...     _ = model(torch.randn(2, 3, 16, 16))
            >>> r["1"].before.shape, r["1"].mask.dtype, bool((r["1"].after[~r["1"].mask] == 0).all())
            (torch.Size([2, 8, 14, 14]), torch.bool, True)
        """
        self._check_not_removed("recording()")
        with recorded(self._state, self._hooks, last, to) as recording:
            yield recording

    def check(self) -> list[str]:
        """List current problems: lost sites, layers that never ran or ran only in eval mode, a stalled schedule."""
        model, state = self._model(), self._state
        if model is None:
            return [str(self._model_gone_error()) if state.live.trained else message("discarded", state)]
        return list(find_problems(model, state, self._hooks, requested=True).values())

    def metrics(self) -> dict[str, float]:
        """Return rate and step as a flat dict for any logger, with keys under `hookdrop/<name>/`."""
        self._check_not_removed("metrics()")
        numbers = self._rates_by_name()
        if self.keep_prob is not None:
            numbers["keep_prob"] = self.keep_prob
        numbers |= {"step": float(self.step_count), "enabled": float(self._state.on)}
        return {f"hookdrop/{self.name}/{key}": value for key, value in numbers.items()}

    def summary(self) -> str:
        """Return a table of the sites with their current rates."""
        self._warn_about_problems()
        return f"{self!r}\n{text_table(_HEADER, self._rows())}"

    def __repr__(self) -> str:
        if self._state.removed:
            return f"<Injection {self.name!r}, removed>"
        if self._model() is None:
            return f"<Injection {self.name!r}, whose model was deleted>"
        targets = {name: largest_target(hooks) for name, hooks in self._units_by_name().items()}
        p = "".join(f" {name}={rate:.4g} of {targets[name]:.4g}," for name, rate in self._rates_by_name().items())
        off = "" if self._state.on else " disabled,"
        sites = counted(len(self._hooks), "site")
        return f"<Injection {self.name!r}: {sites},{p}{off} step {self.step_count} of {self.schedule}>"

    def _repr_html_(self) -> str:
        return html_table(_HEADER, self._rows(), repr(self))

    # --- saving

    def state_dict(self) -> dict[str, Any]:
        """Return the step count, target rates, and whether it is enabled, for `load_state_dict`."""
        self._check_not_removed("state_dict()")
        return state_dict.save(self._state, self._hooks)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Resume from a saved state, with the schedule that the code sets.

        Raises:
            StateError: the sites differ (with `strict`), or `state` is invalid. Nothing was loaded.
        """
        self._check_not_removed("load_state_dict()")
        state_dict.load(self._state, self._hooks, state, strict, self._changing)

    @property
    def config(self) -> dict[str, Any]:
        """JSON-serializable settings with resolved site names, for `from_config`.

        Raises:
            StateError: a setting is not JSON-serializable, such as a function.
        """
        self._check_not_removed("config")
        return config.to_config(self._state, self._hooks)

    # --- removing

    def remove(self) -> None:
        """Remove the hooks and restore the model. Calling it again has no effect."""
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
        else:  # do not distract from the error with warnings
            self._detach()

    def _units_by_name(self) -> dict[str, list[SiteHook]]:
        """Group the hooks by the name of their rate, such as `p` or `std`, or by unit if two units share a name."""
        units = self._units
        names = {unit: "p" if unit == "p" else hooks[0].rate.attribute for unit, hooks in units.items()}
        shared = {name for name in names.values() if list(names.values()).count(name) > 1}
        return {unit if names[unit] in shared else names[unit]: hooks for unit, hooks in units.items()}

    def _rates_by_name(self) -> dict[str, float]:
        return {name: self._rate_of(hooks) for name, hooks in self._units_by_name().items()}

    def _rows(self) -> list[tuple[str, float | None, float, str, str]]:
        return [(s.name, s.p, s.p_scale, "yes" if s.fired else "no", s.regularizer) for s in self.sites]


_HEADER = ("site", "p", "p_scale", "called", "regularizer")
