"""Edit parameter gradients, by parameter name.

For the gradient of a layer's output, use `inject` with `ClipActivationGrad` or a similar regularizer. To clip all
gradients together, use torch.nn.utils.clip_grad_norm_.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from hookdrop.errors import InjectionError, LayerError, ShapeError, nearest, warn
from hookdrop.hooks import compiling
from hookdrop.utils.globs import glob_expression
from hookdrop.utils.select import named_layers
from hookdrop.utils.tables import counted, some
from hookdrop.utils.validation import number
from hookdrop.utils.wrappers import unwrapped

Edit = Callable[[Tensor], Tensor]
Pattern = str | re.Pattern[str]


def zero(gradient: Tensor) -> Tensor:
    """Replace the gradient with zeros, NaN included. Momentum and weight decay still change the weights."""
    return torch.zeros_like(gradient)


def clamp(min: float, max: float) -> Edit:
    """Return a function that clamps each element to [min, max].

    Example:
        >>> clamp(-1, 1)(torch.tensor([-3.0, 0.5]))
        tensor([-1.0000,  0.5000])
    """
    low, high = number(min, "min", "clamp"), number(max, "max", "clamp")
    if low > high:
        raise ValueError(f"clamp: min must not be above max, got {low:g} and {high:g}.")
    return lambda gradient: gradient.clamp(low, high)


def scale(factor: float) -> Edit:
    """Return a function that multiplies by a factor. Under SGD this scales the learning rate; Adam cancels it."""
    by = number(factor, "factor", "scale")
    return lambda gradient: gradient * by


def edit_parameter_gradients(model: nn.Module, params: Pattern | Iterable[Pattern], fn: Edit) -> GradientEdit:
    """Apply `fn` to the gradients of parameters in every backward pass, until `remove`.

    `fn` receives what a backward pass adds to `.grad`: each part of accumulated gradients, the scaled gradient under a
    GradScaler, and a rank's gradient before DistributedDataParallel averages the ranks. `zero` and `scale` commute with
    these sums; `clamp` does not. A parameter that is used twice is edited once, except under reentrant checkpoints
    (`use_reentrant=True`), each of which runs a separate backward pass.

    Copies of the model (`copy.deepcopy`, pickle) lose the parameter hooks, with a warning. Call this function on the
    copy.

    Args:
        model: any module, wrapped or not, but not by FSDP.
        params: parameter names, globs over them (`"fc*.bias"`, `"**.bias"`) or compiled regular expressions. A pattern
            that also matches frozen parameters skips them with a warning.
        fn: a function from a gradient to a gradient of the same shape: `zero`, `clamp(min, max)`, `scale(factor)`, or
            your own.

    Returns:
        A handle with `remove()`, which is also a context manager.

    Raises:
        LayerError: a pattern matches no parameter, or only frozen parameters.
        InjectionError: FSDP manages the parameters; their gradients bypass hooks.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        >>> with edit_parameter_gradients(model, "*.bias", zero):
        ...     model(torch.ones(2, 3)).sum().backward()
        >>> model[1].bias.grad
        tensor([0., 0.])
    """
    compiling.raise_if_tracing("edit_parameter_gradients()")
    factory: Any = fn
    if not callable(fn) or factory in (clamp, scale):
        got, hint = f", got {fn!r}", "for example observe.zero, observe.clamp(-1, 1) or observe.scale(0.1)"
        if callable(fn):
            got, hint = "", f"call it: {'clamp(min, max)' if factory is clamp else 'scale(factor)'}"
        raise TypeError(f"fn must be a function from a gradient to a gradient{got}.\n  {hint}")
    given: Any = params
    several = isinstance(given, Iterable) and not isinstance(given, str | Tensor | nn.Module | type)
    chosen = _select_parameters(model, list(given) if several else [given])
    _check_not_fsdp(model)
    return GradientEdit(unwrapped(model), chosen, fn)


class GradientEdit:
    """The handle of `edit_parameter_gradients`. It is also an attribute of the model, which copies of it lose."""

    def __init__(self, model: nn.Module, chosen: dict[str, Parameter], fn: Edit) -> None:
        self.names = tuple(chosen)
        """The first name of each parameter."""
        self._fn = fn
        hooks: Any = {name: p.register_hook for name, p in chosen.items()}
        self._handles = [register(partial(_edit, name, fn)) for name, register in hooks.items()]
        self._model, self._mark = weakref.ref(model), f"_hookdrop_gradient_edit_{id(self)}"
        vars(model)[self._mark] = self

    def remove(self) -> None:
        """Stop editing gradients. A second call does nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if (model := self._model()) is not None:
            vars(model).pop(self._mark, None)

    def __enter__(self) -> GradientEdit:
        return self

    def __exit__(self, *_: Any) -> None:
        self.remove()

    def __reduce__(self) -> Any:
        warn(
            f"the copy does not edit the gradients of {some(self.names)}: neither deepcopy nor pickle copies parameter "
            "hooks.\n  call edit_parameter_gradients(...) on the copy."
        )
        return type(None), ()

    def __repr__(self) -> str:
        fn = getattr(self._fn, "__qualname__", repr(self._fn)).partition(".")[0]
        state = f"of {counted(len(self.names), 'parameter')}: {some(self.names)}" if self._handles else "removed"
        return f"<GradientEdit {fn} {state}>"


def _edit(name: str, fn: Edit, gradient: Tensor) -> Tensor:
    edited: Any = fn(gradient)
    if not isinstance(edited, Tensor) or edited.shape != gradient.shape:
        got = tuple(edited.shape) if isinstance(edited, Tensor) else edited
        raise ShapeError(f"fn must return a gradient of shape {tuple(gradient.shape)} for {name!r}, got {got}.")
    return edited


def _select_parameters(model: nn.Module, patterns: list[Any]) -> dict[str, Parameter]:
    known = _parameters(model)
    every = [name for names, _ in known for name in names]
    chosen: dict[int, tuple[str, Parameter]] = {}
    for pattern in patterns:
        found = [(names[0], p) for names, p in known if any(map(_compile_pattern(pattern).fullmatch, names))]
        trained = [(name, p) for name, p in found if p.requires_grad]
        if not trained:
            raise LayerError(_no_match_message(model, pattern, [name for name, _ in found], every))
        if frozen := [name for name, p in found if not p.requires_grad]:
            warn(f"{pattern!r} also matches frozen parameters, which have no gradient to edit: {some(frozen)}.")
        chosen |= {id(p): (name, p) for name, p in trained}
    if not chosen:
        raise LayerError("`params` is empty: no gradient would be edited.")
    return dict(chosen.values())


def _compile_pattern(pattern: Any) -> re.Pattern[str]:
    if isinstance(pattern, str | re.Pattern):
        return glob_expression(pattern) if isinstance(pattern, str) else pattern
    kind = type(pattern).__name__
    got = f"a {kind}" if isinstance(pattern, nn.Module | Tensor) else f"{pattern!r} ({kind})"
    if isinstance(pattern, type):
        got = f"the class {pattern.__name__}"
    raise TypeError(
        f"`params` must be names, globs or compiled regular expressions, got {got}.\n"
        "  for example 'fc.weight', all of a module 'fc.**', all biases '**.bias'"
    )


def _parameters(model: nn.Module) -> list[tuple[list[str], Parameter]]:
    """Return each parameter once, with all its names; the first name has no wrapper segments."""
    found: dict[int, tuple[list[str], Parameter]] = {}
    for layer in named_layers(model):
        prefixes = [layer.name, *sorted((layer.aliases | layer.wrapped_names) - {layer.name})]
        for own, parameter in layer.module.named_parameters(recurse=False, remove_duplicate=False):
            names = [f"{prefix}.{own}" if prefix else own for prefix in prefixes]
            found.setdefault(id(parameter), ([], parameter))[0].extend(names)
    return list(found.values())


def _no_match_message(model: nn.Module, pattern: Any, frozen: list[str], names: list[str]) -> str:
    text = pattern if isinstance(pattern, str) else pattern.pattern
    requested = repr(text) if isinstance(pattern, str) else f"re.compile({text!r})"
    if frozen:
        return (
            f"{requested} matches only frozen parameters, which have no gradient to edit: "
            f"{some(frozen)}.\n  unfreeze them: parameter.requires_grad_(True)\nNo hook was placed."
        )
    globs = (f"{text}.*", f"{text}.**", f"**.{text}", f"**.{text}.*") if isinstance(pattern, str) else ()
    near = [glob for glob in globs if any(map(glob_expression(glob).fullmatch, names))][:1]
    hint = ", ".join(map(repr, near or nearest(text, names)))
    return (
        f"`params` names a parameter that {type(unwrapped(model)).__name__} does not have.\n"
        f"  asked for:    {requested}\n{f'  did you mean: {hint}{chr(10)}' if hint else ''}"
        "  see all:      [name for name, _ in model.named_parameters()]\nNo hook was placed."
    )


def _check_not_fsdp(model: nn.Module) -> None:
    """Raise for FSDP, which trains shards of the parameters and writes their gradients without calling hooks."""
    names = {cls.__name__ for module in model.modules() for cls in type(module).__mro__}
    if names & {"FSDPModule", "FullyShardedDataParallel"}:
        raise InjectionError(
            "FSDP bypasses parameter hooks, so `fn` would never run.\n"
            "  edit parameter.grad between backward() and optimizer.step().\nNo hook was placed."
        )
