"""The hook that regularizes parameters of a module, for the duration of one call.

An attribute of the instance hides the parameter of the same name from the module's `forward`. So `_parameters`, and
with it `state_dict`, `named_parameters()` and the optimizer, never change. A hook at the end of the call, which also
runs after an error, removes the attribute.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from hookdrop.hooks.call_context import CallValue
from hookdrop.hooks.hook import SiteHook
from hookdrop.hooks.state import InjectionState
from hookdrop.regularizers.base import Regularizer
from hookdrop.utils.errors import InjectionError, LayerError
from hookdrop.utils.tables import some
from hookdrop.utils.tensor_tree import TensorKey, detached_copy, fits

START = "start"


def select_parameters(module: nn.Module, which: TensorKey, layer: str) -> list[str]:
    """Return the names of the parameters that `which` selects: a glob; None for those with at least two axes.

    Raises:
        LayerError: there is none, or it cannot be replaced during a call.
    """
    own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    chosen = [name for name in own if (own[name].dim() > 1 if which is None else fnmatchcase(name, str(which)))]
    where = f"{layer!r} ({type(module).__name__})"
    if not chosen and is_parametrized(module):
        parametrized: Any = module.parametrizations
        raise LayerError(
            f"{where} computes {some(list(parametrized))} from other parameters (a parametrization).\n"
            f'  hook the result: layers="{layer}.parametrizations.*", at="output"'
        )
    if not chosen:
        wanted = "with two or more axes" if which is None else f"named {which!r}"
        raise LayerError(
            f"{where} has no parameter {wanted}; its own are: {some(list(own)) if own else 'none'}.\n"
            '  choose other layers, or parameters by name: tensor="weight*"'
        )
    for name in chosen:
        if not fits(own[name]):
            raise LayerError(
                f"{where}: {name!r} is not a floating-point tensor with a shape ({own[name].dtype}; quantized? lazy?)\n"
                f"  exclude {layer!r}, or inject before it is quantized and after the first forward of a lazy module."
            )
        if inspect.isdatadescriptor(getattr(type(module), name, None)):
            raise LayerError(f"{where}: {name!r} is a property of its class: exclude {layer!r}.")
    return chosen


def check_suited(regularizer: Regularizer) -> None:
    """Raise `InjectionError` for a regularizer of activations, which have samples, channels or positions."""
    if (
        regularizer.axes.startswith("N")
        or set(regularizer.needs) - {START}
        or regularizer.only_at not in (None, "parameters")
    ):
        raise InjectionError(
            f"inject: {regularizer.title} acts on activations, got at='parameters'.\n"
            "  for parameters: Dropout(p=0.5), GaussianNoise(std=0.01) or Mixout(p=0.5)"
        )


def tied_elsewhere(root: nn.Module, sites: Mapping[str, nn.Module], which: TensorKey) -> list[str]:
    """Return a warning if a regularized parameter is also one of a layer that is not a site."""
    chosen = {id(getattr(sites[s], name)) for s in sites for name in select_parameters(sites[s], which, s)}
    every = root.named_parameters(remove_duplicate=False)
    others = [name for name, one in every if id(one) in chosen and name.rpartition(".")[0] not in sites]
    return [f"{some(others)} shares a regularized weight, and stays as it is."] if others else []


class ParameterHook(SiteHook):
    """A forward pre-hook that regularizes parameters of the module until the call ends."""

    own = (*SiteHook.own, "hidden")

    def __init__(
        self, site: str, regularizer: Regularizer, p_scale: float, tensor: TensorKey, state: InjectionState
    ) -> None:
        self.names: list[str] = []
        """The parameters, from `place` on."""
        self.start: dict[str, Tensor] = {}
        """Their values at the injection, if the regularizer needs them."""
        super().__init__(site, regularizer, p_scale, tensor, state, "parameters")

    def _start(self) -> None:
        self.hidden = CallValue()  # the attributes that the call in progress has replaced
        super()._start()

    def place(self, module: nn.Module) -> None:
        self.names = select_parameters(module, self.tensor, self.site)
        if START in self.regularizer.needs:
            self.start = {name: detached_copy(getattr(module, name)) for name in self.names}
        # Prepended, because the pre-hooks of pruning and weight norm compute weights from the parameters.
        self.handle = module.register_forward_pre_hook(self, with_kwargs=True, prepend=True)
        self.accompany(module.register_forward_hook, ParameterHook.restore, always_call=True)

    def __call__(self, module: nn.Module, args: Any, *rest: Any) -> Any:
        if self.hidden.stack:  # left by an interrupted call
            self.restore(module)
        return super().__call__(module, args, *rest)

    def map(self, module: nn.Module, value: Any, fn: Callable[..., Tensor]) -> Any:
        changed: dict[str, Any] = {}
        for name in self.names:
            x = self._parameter(module, name)
            y = fn(x, start=self._start_of(name, x)) if self.start else fn(x)
            if y is not x:
                changed[name] = y
        if changed:
            self._hide(module, changed)

    def _parameter(self, module: nn.Module, name: str) -> Tensor:
        replica = getattr(module, "_is_replica", False)  # DataParallel's have attributes instead of parameters
        if not replica and (name not in module._parameters or name in vars(module)):
            raise InjectionError(
                f"{self.where}: {name!r} is no longer a parameter (pruned, parametrized or sharded after inject?), or "
                'two threads call the layer at once.\n  inject again with on_existing="replace", or give each thread '
                "a copy of the model."
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
        self.hidden.start({name: attributes.get(name) for name in changed})
        attributes.update(changed)

    @property
    def start_norm(self) -> float:
        """The norm of all values at the injection, by which a resumed run tells whether they are the same."""
        return math.sqrt(sum(float(x.double().square().sum()) for x in self.start.values()))

    def restore(self, module: nn.Module, *_: Any) -> None:
        """Show the parameters again; a value of None stands for an attribute that the module did not have."""
        for name, value in (self.hidden.end() or {}).items():
            if value is None:
                vars(module).pop(name, None)
            else:
                vars(module)[name] = value
