"""Editing the gradients of parameters, by name.

For the gradient of a layer's output there are regularizers (`ClipActivationGrad` and the like), for `inject`; for all
gradients at once, torch.nn.utils.clip_grad_norm_.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from hookdrop.errors import InjectionError, LayerError, ShapeError, nearest, warn
from hookdrop.hooks import compiling
from hookdrop.injection.select import walk
from hookdrop.utils.globs import glob_expression
from hookdrop.utils.tables import counted, some
from hookdrop.utils.validation import number
from hookdrop.utils.wrappers import unwrapped

Edit = Callable[[Tensor], Tensor]
Pattern = str | re.Pattern[str]

_MARK = "_hookdrop_gradient_edits"


def zero(gradient: Tensor) -> Tensor:
    """0 everywhere, also where it is not a number; momentum and weight decay still move the weights."""
    return torch.zeros_like(gradient)


def clamp(min: float, max: float) -> Edit:
    """Each element into [min, max].

    Example:
        >>> clamp(-1, 1)(torch.tensor([-3.0, 0.5]))
        tensor([-1.0000,  0.5000])
    """
    low, high = number(min, "min", "clamp"), number(max, "max", "clamp")
    if low > high:
        raise ValueError(f"clamp: min must not be above max, got {low:g} and {high:g}.")
    return lambda gradient: gradient.clamp(low, high)


def scale(factor: float) -> Edit:
    """Each element times a factor: a learning rate of its own under SGD, though not under Adam."""
    by = number(factor, "factor", "scale")
    return lambda gradient: gradient * by


_MAKERS: tuple[tuple[Any, str], ...] = ((clamp, "clamp(min, max)"), (scale, "scale(factor)"))


def edit_parameter_gradients(model: nn.Module, params: Pattern | Iterable[Pattern], fn: Edit) -> GradientEdit:
    """Have `fn` applied to the gradients of these parameters in every backward pass, until `remove`.

    What is edited is what a backward pass adds to `.grad`: with accumulated gradients each part, under a GradScaler the
    scaled gradient, under DistributedDataParallel that of the rank before the ranks are averaged (0 and factors come to
    the same; clamped parts do not). A parameter that is used twice is edited once; but under reentrant checkpoints
    (`use_reentrant=True`) each is a backward pass of its own, and what comes of it is edited as a part: 0 and factors
    come to the same, clamped parts do not.

    Parameter hooks follow no copy: neither `copy.deepcopy(model)` nor a pickle has them, and a warning says so when
    one is made. Edit the copy's gradients by another call.

    Args:
        model: any module, wrapped or not, but for FSDP.
        params: names of parameters, globs over them (`"fc*.bias"`, `"**.bias"`) or compiled expressions. Frozen ones
            among several are left out, with a warning.
        fn: from a gradient to one of the same shape: `zero`, `clamp(min, max)`, `scale(factor)`, or your own.

    Returns:
        A handle with `remove()`, which is a context manager too.

    Raises:
        LayerError: a pattern matches no parameter, or frozen ones alone.
        InjectionError: the parameters are FSDP's, whose gradients pass no hook of theirs.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        >>> with edit_parameter_gradients(model, "*.bias", zero):
        ...     model(torch.ones(2, 3)).sum().backward()
        >>> model[1].bias.grad
        tensor([0., 0.])
    """
    compiling.not_while_tracing("edit_parameter_gradients()")
    if not callable(fn):
        raise TypeError(
            f"fn must be a function from a gradient to a gradient, got {fn!r}.\n  observe.zero, clamp, scale"
        )
    for maker, call in _MAKERS:
        if fn is maker:
            raise TypeError(f"fn must be a function from a gradient to a gradient.\n  call it: {call}")
    given: Any = params
    several = isinstance(given, Iterable) and not isinstance(given, str | Tensor | nn.Module | type)
    chosen = _chosen(model, list(given) if several else [given])
    _must_pass_hooks(model)
    return GradientEdit(unwrapped(model), chosen, fn)


class GradientEdit:
    """The handle of one `edit_parameter_gradients`."""

    def __init__(self, model: nn.Module, chosen: dict[str, Parameter], fn: Edit) -> None:
        self.names = tuple(chosen)
        """The parameters, by their first names."""
        self._fn = fn
        hooks = [p.register_hook(_Edited(name, fn)) for name, p in chosen.items()]  # type: ignore[no-untyped-call]
        self._handles = hooks
        self._marked, self._notice = model, _Notice(self.names)
        vars(model).setdefault(_MARK, []).append(self._notice)

    def remove(self) -> None:
        """Leave the gradients alone from here on. Again does nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        left = [one for one in vars(self._marked).pop(_MARK, ()) if one not in (None, self._notice)]
        if left:
            vars(self._marked)[_MARK] = left

    def __enter__(self) -> GradientEdit:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def __repr__(self) -> str:
        fn = getattr(self._fn, "__qualname__", repr(self._fn)).partition(".")[0]
        state = f"of {counted(len(self.names), 'parameter')}: {some(self.names)}" if self._handles else "removed"
        return f"<GradientEdit {fn} {state}>"


class _Edited:
    """The hook of one parameter."""

    def __init__(self, name: str, fn: Edit) -> None:
        self.name, self.fn = name, fn

    def __call__(self, gradient: Tensor) -> Tensor:
        edited: Any = self.fn(gradient)
        if not isinstance(edited, Tensor) or edited.shape != gradient.shape:
            got = tuple(edited.shape) if isinstance(edited, Tensor) else edited
            raise ShapeError(
                f"fn must return a gradient of the shape {tuple(gradient.shape)} of {self.name!r}, got {got}."
            )
        return edited


class _Notice:
    """Says, when the model that it is on is copied or pickled, what the copy lacks; the copy has nothing of it."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def __reduce__(self) -> Any:
        warn(
            f"the copy does not edit the gradients of {some(self.names)}: hooks on parameters follow neither deepcopy "
            "nor pickle.\n  call edit_parameter_gradients(...) on it."
        )
        return type(None), ()


def _chosen(model: nn.Module, patterns: list[Any]) -> dict[str, Parameter]:
    known = _parameters(model)
    chosen: dict[int, tuple[str, Parameter]] = {}
    for pattern in patterns:
        found = [(names[0], p) for names, p in known if any(map(_expression(pattern).fullmatch, names))]
        trained = [(name, p) for name, p in found if p.requires_grad]
        if not trained:
            raise LayerError(_nothing_found(model, pattern, found, known))
        if len(trained) < len(found):
            frozen = [name for name, p in found if not p.requires_grad]
            warn(f"{pattern!r} matches frozen parameters too, which have no gradient to edit: {some(frozen)}.")
        chosen |= {id(p): (name, p) for name, p in trained}
    if not chosen:
        raise LayerError("`params` is empty: no gradient would be edited.")
    return dict(chosen.values())


def _expression(pattern: Any) -> re.Pattern[str]:
    if not isinstance(pattern, str | re.Pattern):
        raise TypeError(
            f"`params` are names, globs or compiled expressions, got {_brief(pattern)}.\n"
            "  write their names: 'fc.weight', all of a module 'fc.**', all biases '**.bias'"
        )
    return glob_expression(pattern) if isinstance(pattern, str) else pattern


def _brief(pattern: Any) -> str:
    if isinstance(pattern, type):
        return f"the class {pattern.__name__}"
    kind = type(pattern).__name__
    if isinstance(pattern, nn.Module | Tensor):
        return f"{kind} itself"
    return f"{pattern!r} ({kind})"


def _parameters(model: nn.Module) -> list[tuple[list[str], Parameter]]:
    """Each parameter once, with all its names, that without wrappers first."""
    found: dict[int, tuple[list[str], Parameter]] = {}
    for layer in walk(model):
        prefixes = [layer.name, *sorted((layer.aliases | layer.spellings) - {layer.name})]
        for own, parameter in layer.module._parameters.items():
            if parameter is not None:
                names = [f"{prefix}.{own}" if prefix else own for prefix in prefixes]
                found.setdefault(id(parameter), ([], parameter))[0].extend(names)
    return list(found.values())


def _nothing_found(
    model: nn.Module, pattern: Any, frozen: list[tuple[str, Parameter]], known: list[tuple[list[str], Parameter]]
) -> str:
    text = pattern if isinstance(pattern, str) else pattern.pattern
    asked = repr(text) if isinstance(pattern, str) else f"re.compile({text!r})"
    if frozen:
        there = some([name for name, _ in frozen])
        return (
            f"{asked} matches frozen parameters alone, which have no gradient to edit: {there}.\n"
            "  parameter.requires_grad_(True) first. Nothing was placed."
        )
    names = [name for every, _ in known for name in every]
    globs = (f"{text}.*", f"{text}.**", f"**.{text}", f"**.{text}.*") if isinstance(pattern, str) else ()
    near = [glob for glob in globs if any(map(glob_expression(glob).fullmatch, names))][:1]
    hint = ", ".join(map(repr, near or nearest(text, names)))
    return (
        f"`params` names a parameter that {type(unwrapped(model)).__name__} does not have.\n"
        f"  asked for:    {asked}\n{f'  did you mean: {hint}{chr(10)}' if hint else ''}"
        "  see all:      [name for name, _ in model.named_parameters()]\nNothing was placed."
    )


def _must_pass_hooks(model: nn.Module) -> None:
    """FSDP trains pieces of the parameters, and writes their gradients past every hook."""
    for module in model.modules():
        for cls in type(module).__mro__:
            if cls.__name__ in ("FSDPModule", "FullyShardedDataParallel"):
                raise InjectionError(
                    "FSDP writes gradients past the hooks of parameters: `fn` would never be called.\n"
                    "  edit parameter.grad between backward() and optimizer.step(). Nothing was placed."
                )
