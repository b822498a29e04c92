"""The hook that regularizes parameters of a module, for the duration of one call.

An attribute of the instance hides the parameter of the same name from the module's `forward`. So `_parameters`, and
with it `state_dict`, `named_parameters()` and the optimizer, never change. A hook at the end of the call, which also
runs after an error, removes the attribute.
"""

from __future__ import annotations

import inspect
import math
import sys
import weakref
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from hookdrop.hooks.call_context import CallValue, has_ended
from hookdrop.hooks.compiling import GraphBreak
from hookdrop.hooks.hook import SiteHook
from hookdrop.hooks.registry import CompanionHook
from hookdrop.hooks.state import InjectionState
from hookdrop.regularizers.base import Regularizer
from hookdrop.utils.errors import InjectionError, LayerError
from hookdrop.utils.tables import some
from hookdrop.utils.tensor_tree import TensorKey, detached_copy, fits
from hookdrop.utils.torch_internals import (
    runs_compiled_code,
    skip_frames_of,
    version_of,
    when_compiler_is_imported,
)

START = "start"


def select_parameters(module: nn.Module, which: TensorKey, layer: str) -> list[str]:
    """Return the names of the parameters that `which` selects: a glob; None for those with at least two axes.

    Raises:
        LayerError: there is none, or it cannot be replaced during a call.
    """
    own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    matrices = (name for name, x in own.items() if is_lazy(x) or x.dim() > 1)
    chosen = list(matrices) if which is None else [name for name in own if fnmatchcase(name, str(which))]
    where = f"{layer!r} ({type(module).__name__})"
    if not chosen and is_parametrized(module):
        parametrized: Any = module.parametrizations
        raise LayerError(
            f"{where} computes {some(list(parametrized))} from other parameters (a parametrization).\n"
            f'  hook the result: layers="{layer}.parametrizations.*", at="output"'
        )
    if not chosen:
        wanted = "with two or more axes" if which is None else f"named {which!r}"
        owners = dict.fromkeys(name.rpartition(".")[0] for name, _ in module.named_parameters() if "." in name)
        inside = f"name its layers: {some([f'{layer}.{name}' for name in owners])}" if owners else "choose other layers"
        raise LayerError(
            f"{where} has no parameter {wanted}; its own are: {named_shapes(own) or 'none'}.\n"
            f'  {inside}, or choose by name: tensor="weight*"'
        )
    for name in chosen:
        if is_lazy(own[name]) or not fits(own[name]):
            raise LayerError(
                f"{where}: {name!r} is not a floating-point tensor with a shape ({own[name].dtype}; quantized? lazy?)\n"
                f"  exclude {layer!r}, or inject before it is quantized and after the first forward of a lazy module."
            )
        if inspect.isdatadescriptor(getattr(type(module), name, None)):
            raise LayerError(f"{where}: {name!r} is a property of its class: exclude {layer!r}.")
    return chosen


def named_shapes(parameters: Mapping[str, Tensor]) -> str:
    """Return the names with the shapes."""
    return some([name if is_lazy(x) else f"{name} {tuple(x.shape)}" for name, x in parameters.items()]).replace("'", "")


def check_parameters(regularizer: Regularizer, module: nn.Module, which: TensorKey, layer: str) -> str:
    """Return the parameters that `which` selects as text, or raise if the regularizer or the choice is wrong.

    A regularizer of activations is wrong, because these have samples, channels or positions.
    """
    if (
        regularizer.axes.startswith("N")
        or set(regularizer.needs) - {START}
        or regularizer.only_at not in (None, "parameters")
    ):
        raise InjectionError(
            f"inject: {regularizer.title} acts on activations, got at='parameters'.\n"
            "  for parameters: Dropout(p=0.5), GaussianNoise(std=0.01) or Mixout(p=0.5)"
        )
    chosen = {name: getattr(module, name) for name in select_parameters(module, which, layer)}
    if which is None and len(chosen) > 1 and regularizer.only_at is None:
        raise LayerError(
            f"{layer!r} ({type(module).__name__}) has {len(chosen)} parameters with two or more axes: "
            f"{named_shapes(chosen)}.\n  choose by name or pattern: tensor={list(chosen)[-1]!r}, tensor='*weight*'"
        )
    if START in regularizer.needs and any(x.is_meta or hasattr(x, "placements") for x in chosen.values()):
        raise InjectionError(
            f"inject: {regularizer.title} needs all values of a parameter, which {layer!r} does not have (meta device, "
            "or sharded).\n  inject after the weights are loaded, and before fully_shard."
        )
    return named_shapes(chosen)


def tied_elsewhere(root: nn.Module, sites: Mapping[str, nn.Module], which: TensorKey) -> list[str]:
    """Return a warning if a regularized parameter is also one of a layer that is not a site."""
    chosen = {id(getattr(sites[s], name)) for s in sites for name in select_parameters(sites[s], which, s)}
    every = root.named_parameters(remove_duplicate=False)
    others = [name for name, one in every if id(one) in chosen and name.rpartition(".")[0] not in sites]
    return [f"{some(others)} shares a regularized weight, and stays as it is."] if others else []


class _Hidden(NamedTuple):
    """The attributes that a call has replaced."""

    before: dict[str, Any]
    """Their values before; None if the module had none."""
    versions: dict[str, int]
    """Those of the regularized parameters, in eager code and outside of inference mode."""
    frame: FrameType | None
    """What runs the module, in eager code."""


class ParameterHook(SiteHook):
    """A forward pre-hook that regularizes parameters of the module until the call ends."""

    own = (*SiteHook.own, "hidden", "is_copy")

    def __init__(
        self, site: str, regularizer: Regularizer, p_scale: float, tensor: TensorKey, state: InjectionState
    ) -> None:
        self.names: list[str] = []
        """The parameters, from `place` on."""
        self.start: dict[str, Tensor] = {}
        """Their values at the injection, if the regularizer needs them."""
        super().__init__(site, regularizer, p_scale, tensor, state, "parameters")

    def _start(self) -> None:
        self.hidden = CallValue()  # what the call in progress has replaced
        self.is_copy = False
        super()._start()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.is_copy = True  # maybe of a module during a call, whose attributes still hide its parameters

    def place(self, module: nn.Module) -> None:
        self.names = select_parameters(module, self.tensor, self.site)
        if START in self.regularizer.needs:
            self.start = {name: detached_copy(getattr(module, name)) for name in self.names}
        # Prepended, because the pre-hooks of pruning and weight norm compute weights from the parameters; but after the
        # pre-hook of FSDP2, which gathers them. The last hook that hides a parameter is the first that restores it.
        gathers = hasattr(module, "reshard")
        self.handle = module.register_forward_pre_hook(self, with_kwargs=True, prepend=not gathers)
        self.accompany(module.register_forward_hook, ParameterHook.restore, always_call=True, prepend=gathers)

    def __call__(self, module: nn.Module, args: Any, *rest: Any) -> None:
        if is_compiling():
            super().__call__(module, args, *rest)
        else:
            _BEGIN.call(self, sys._getframe(1), runs_compiled_code(), module, args, *rest)

    def _begin(self, frame: FrameType, is_compiled: bool, module: nn.Module, args: Any, *rest: Any) -> None:
        rate = self.train_rate if module.training else self.eval_rate
        # The compiler skips the files of `torch.nn`, so it never compiles a forward there on its own.
        if is_compiled and rate is not None and not type(module).forward.__module__.startswith("torch.nn."):
            raise InjectionError(
                f"{self.where}: the forward of {type(module).__name__} is compiled on its own, because the compiled "
                "model begins or breaks the graph there, and it would use the parameters as they are.\n"
                "  compile a function that calls the model: torch.compile(lambda *args: model(*args))   or leave this "
                "layer uncompiled: torch.compiler.disable"
            )
        if self.hidden.stack and not has_ended(self.hidden.value.frame):
            raise InjectionError(
                f"{self.where}: the layer calls itself, and the inner call would use weights that are regularized "
                'already.\n  hook a layer inside it, or its output: at="output"'
            )
        if self.hidden.stack or self.is_copy:
            self.settle(module)
        super().__call__(module, args, *rest)
        if self.hidden.stack:
            self.hidden.replace(self.hidden.value._replace(frame=frame))

    def map(self, module: nn.Module, value: Any, fn: Callable[..., Tensor]) -> Any:
        changed: dict[str, Any] = {}
        for name in self.names:
            x = self._parameter(module, name)
            given = x if self.replays else x.clone()  # a function of others may work in place
            y = fn(given, start=self._start_of(name, x)) if self.start else fn(given)
            if y is not x:
                changed[name] = y
        if changed:
            self._hide(module, changed)

    def _parameter(self, module: nn.Module, name: str) -> Tensor:
        replica = getattr(module, "_is_replica", False)  # DataParallel's have attributes instead of parameters
        by_others = name in vars(module) and not any(
            name in hook.hidden.value.before for hook in _hooks_on(module) if hook.hidden.stack
        )
        if not replica and (by_others or name not in module._parameters):
            raise InjectionError(
                f"{self.where}: {name!r} is no longer a parameter (pruned, parametrized or in FSDP after inject?), or "
                'two threads call the layer at once.\n  inject again with on_existing="replace"; '
                "shard with fully_shard, which keeps parameters; give each thread a copy of the model."
            )
        x: Tensor = getattr(module, name)
        if hasattr(x, "placements") or not fits(x):
            raise InjectionError(
                f"{self.where}: {name!r} is a {type(x).__name__} ({x.dtype}): each rank would drop other elements of "
                'its part.\n  at="output" works with sharded and quantized weights.'
            )
        return x

    def _start_of(self, name: str, x: Tensor) -> Tensor:
        if self.start[name].device != x.device:
            self.start[name] = self.start[name].to(x.device)
        return self.start[name].to(x.dtype)

    def _hide(self, module: nn.Module, changed: dict[str, Any]) -> None:
        attributes = vars(module)
        if "_flat_weights" in attributes:  # nn.LSTM and nn.GRU pass this list to the kernel
            names: Any = module._flat_weights_names
            weights = [changed.get(name, getattr(module, name)) for name in names]
            changed |= {"_flat_weights": weights, "_flat_weight_refs": [weakref.ref(weight) for weight in weights]}
        seen = [name for name in self.names if name in changed and not is_compiling()]
        versions = {name: version_of(changed[name]) for name in seen if not changed[name].is_inference()}
        self.hidden.start(_Hidden({name: attributes.get(name) for name in changed}, versions, None))
        attributes.update(changed)

    @property
    def start_norm(self) -> float:
        """The norm of all values at the injection, by which a resumed run tells whether they are the same."""
        return math.hypot(*(float(torch.linalg.vector_norm(x, dtype=torch.float64)) for x in self.start.values()))

    def restore(self, module: nn.Module, *_: Any) -> None:
        """Show the parameters again."""
        hidden, attributes = self.hidden.end(), vars(module)
        if hidden is None:
            return
        if any(version_of(attributes[name]) != version for name, version in hidden.versions.items()):
            self.state.warn_once(
                "changed parameter",
                f"{self.where}: the forward changed a regularized parameter in place (max_norm? clamp_?), which the "
                "parameter itself does not see.\n  change it outside of the forward, or hook the output.",
            )
        for name, value in hidden.before.items():
            if value is None:
                attributes.pop(name, None)
            else:
                attributes[name] = value

    def settle(self, module: nn.Module) -> None:
        for hook in reversed(_hooks_on(module)):
            while hook.hidden.stack:
                hook.restore(module)
        if self.is_copy:
            self.is_copy = False
            copied = [name for name in self.names if name in vars(module) and name in module._parameters]
            for name in copied:
                del vars(module)[name]
            if copied and isinstance(module, nn.RNNBase):
                module._init_flat_weights()


def _hooks_on(module: nn.Module) -> list[ParameterHook]:
    return [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, ParameterHook)]


_BEGIN = GraphBreak(ParameterHook._begin, "hookdrop regularizes parameters of a layer that runs uncompiled.")
# Inside a graph, these are part of it. Outside, compiling them alone would hide that the forward is compiled alone.
when_compiler_is_imported(
    lambda: skip_frames_of(
        ParameterHook.__call__, ParameterHook.restore, CompanionHook.__call__, runs_compiled_code, CallValue.end
    )
)
