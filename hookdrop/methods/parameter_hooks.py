"""The hook that regularizes parameters of a module, for the duration of one call.

`nn.Module` finds an attribute that is a parameter in its dict `_parameters`. For a call, that dict is a copy whose
lookups give the regularized values, while its items, and with it `state_dict`, `named_parameters()` and the optimizer,
never change. A hook at the end of the call, which also runs after an error, puts the dict back. In compiled code,
attributes of the instance hide the parameters instead.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from hookdrop.core.errors import InjectionError, LayerError
from hookdrop.core.regularizer import Regularizer
from hookdrop.core.tables import some
from hookdrop.core.tensor_tree import TensorKey, detached_copy, fits
from hookdrop.core.torch_internals import storage_of, version_of
from hookdrop.methods.around import Around
from hookdrop.methods.calls import has_ended
from hookdrop.training.checkpointing import running_checkpoint

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


def check_parameters(regularizer: Regularizer, module: nn.Module, tensor: TensorKey, name: str) -> str:
    """Return the parameters that `tensor` selects as text, or raise if the regularizer or the choice is wrong.

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
    chosen = {one: getattr(module, one) for one in select_parameters(module, tensor, name)}
    if tensor is None and len(chosen) > 1 and regularizer.only_at is None:
        raise LayerError(
            f"{name!r} ({type(module).__name__}) has {len(chosen)} parameters with two or more axes: "
            f"{named_shapes(chosen)}.\n  choose by name or pattern: tensor={list(chosen)[-1]!r}, tensor='*weight*'"
        )
    if START in regularizer.needs and any(x.is_meta or hasattr(x, "placements") for x in chosen.values()):
        raise InjectionError(
            f"inject: {regularizer.title} needs all values of a parameter, which {name!r} does not have (meta device, "
            "or sharded).\n  inject after the weights are loaded, and before fully_shard."
        )
    return named_shapes(chosen)


def tied_elsewhere(root: nn.Module, sites: Mapping[str, nn.Module], which: TensorKey) -> list[str]:
    """Return a warning if a regularized parameter is also one of a layer that is not a site."""
    chosen = {id(getattr(sites[s], name)) for s in sites for name in select_parameters(sites[s], which, s)}
    every = [name for name, one in root.named_parameters(remove_duplicate=False) if id(one) in chosen]
    others = [name for name in every if root.get_submodule(name.rpartition(".")[0]) not in sites.values()]
    return [f"{some(others)} shares a regularized weight, and stays as it is."] if others else []


class _Shown(dict[str, Any]):
    """The parameters of a module during a call in eager code. Its lookups give what the code of the module reads."""

    def __init__(self, parameters: dict[str, Any], values: dict[str, Any], hook: ParameterHook) -> None:
        super().__init__(parameters)
        self.read: dict[str, Any] = getattr(parameters, "read", {}) | values
        self.states = [(x, _state(x)) for x in values.values() if not x.is_inference()]
        self.hook, self.frame = hook, hook.calls.frames[-1]
        # Without gradients, nothing is recomputed; inside a reentrant checkpoint, its recompute gets here again.
        self.checkpoint = running_checkpoint() if torch.is_grad_enabled() else None

    def __contains__(self, name: object) -> bool:
        return name in self.read or super().__contains__(name)

    def __getitem__(self, name: str) -> Any:
        # After an interrupt, PyTorch calls no hook that would put the parameters back.
        if name not in self.read or (not is_compiling() and self.frame and has_ended(self.frame)):
            return super().__getitem__(name)
        if self.checkpoint is not None and not is_compiling() and self.checkpoint != running_checkpoint():
            raise InjectionError(
                f"{self.hook.where}: a checkpoint inside the layer, or another autograd function, reads {name!r}. The "
                "backward pass would read it again, without the regularizer.\n"
                "  checkpoint the whole layer, or read the parameter before: weight = self.weight"
            )
        return self.read[name]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self),)  # a copy that is made during a call has the parameters


class ParameterHook(Around):
    """A forward pre-hook that regularizes parameters of the module until the call ends."""

    nested = (
        "and the inner call would use weights that are regularized already.\n"
        '  hook a layer inside it, or its output: at="output"'
    )
    check_site = staticmethod(check_parameters)

    def place(self, module: nn.Module, **order: bool) -> None:
        self.names = select_parameters(module, self.tensor, self.site)
        start = self.names if START in self.regularizer.needs else ()
        self.start = {name: detached_copy(getattr(module, name)) for name in start}
        """Their values at the injection, if the regularizer needs them."""
        # Prepended, because the pre-hooks of pruning and weight norm compute weights from the parameters; but after the
        # pre-hook of FSDP2, which gathers them. The last hook that hides a parameter is the first that restores it.
        gathers = hasattr(module, "reshard")
        super().place(module, prepend=not gathers, ends_first=gathers)

    def begin(self, frame: FrameType | None, compiles: bool, module: nn.Module, *call: Any) -> Any:
        rate = self.train_rate if module.training else self.eval_rate
        # The compiler skips the files of `torch.nn`, so it never compiles a forward there on its own.
        if compiles and rate is not None and not type(module).forward.__module__.startswith("torch.nn."):
            raise InjectionError(
                f"{self.where}: the forward of {type(module).__name__} is compiled on its own, because the compiled "
                "model begins or breaks the graph there, and it would use the parameters as they are.\n"
                "  compile a function that calls the model: torch.compile(lambda *args: model(*args))   or leave this "
                "layer uncompiled: torch.compiler.disable"
            )
        return super().begin(frame, compiles, module, *call)

    def map(self, module: nn.Module, value: Any, fn: Callable[..., Tensor]) -> Any:
        changed: dict[str, Any] = {}
        for name in self.names:
            x = self._parameter(module, name)
            given = x if self.replays else x.clone()  # a function of others may work in place
            if self.start:
                self.start[name] = self.start[name].to(x.device)
                y = fn(given, start=self.start[name].to(x.dtype))
            else:
                y = fn(given)
            if y is not x:
                changed[name] = y
        if changed:
            self._hide(module, changed)

    def _parameter(self, module: nn.Module, name: str) -> Tensor:
        replica = getattr(module, "_is_replica", False)  # DataParallel's have attributes instead of parameters
        hooks = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, ParameterHook)]
        hidden = {key for hook in hooks for key in hook.calls.value or ()}  # by this thread
        shown = {"_parameters"} if isinstance(module._parameters, _Shown) else set()
        by_others = not hidden.issuperset(shown | {name} & vars(module).keys())
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

    def _hide(self, module: nn.Module, changed: dict[str, Any]) -> None:
        attributes, hiding = vars(module), changed
        if not is_compiling():
            hiding = {"_parameters": _Shown(attributes["_parameters"], changed, self)}
        if "_flat_weights" in attributes:  # nn.LSTM and nn.GRU pass this list to the kernel
            names: Any = module._flat_weights_names
            weights = [changed.get(name, getattr(module, name)) for name in names]
            hiding = hiding | {"_flat_weights": weights, "_flat_weight_refs": [weakref.ref(x) for x in weights]}
        before = {name: attributes.get(name) for name in changed | hiding}
        self.calls.replace(before | (self.calls.value or {}))  # the check of a first call may have hidden some
        for name in changed.keys() - hiding.keys():
            attributes.pop(name, None)
        attributes.update(hiding)

    @property
    def start_norm(self) -> float:
        """The norm of all values at the injection, by which a resumed run tells whether they are the same."""
        return math.hypot(*(float(torch.linalg.vector_norm(x, dtype=torch.float64)) for x in self.start.values()))

    def end(self, module: nn.Module, before: dict[str, Any], output: Any) -> None:
        """Show the parameters again. `before` has the attributes that the call replaced; None if there was none."""
        attributes = vars(module)
        shown = attributes["_parameters"] if "_parameters" in before else None
        if shown is not None:
            before["_parameters"].update(shown)  # what the forward has set
        for name, value in before.items():  # in place: compiled code guards on the order of attributes
            if value is None:
                attributes.pop(name, None)
            else:
                attributes[name] = value
        # Last, because a warning may be an error.
        if shown is not None and any(_state(x) != state for x, state in shown.states):
            self.state.warn_once(
                "changed parameter",
                f"{self.where}: the forward changed a regularized parameter in place (max_norm? clamp_? .data?), which "
                "the parameter itself does not see.\n  change it outside of the forward, or hook the output.",
            )


def _state(x: Tensor) -> tuple[int, int]:
    """Return what changes with a tensor: its version, and its memory."""
    return version_of(x), storage_of(x)
