"""The hook of a regularizer that needs the input of its layer, such as LayerDrop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.compiler import is_compiling

from hookdrop.hooks.call_context import CallValue, refuse_cache
from hookdrop.hooks.hook import SiteHook
from hookdrop.utils.errors import InjectionError
from hookdrop.utils.tables import some
from hookdrop.utils.tensor_tree import bind_arguments, first_tensor, fits, tensors
from hookdrop.utils.torch_internals import graph_task, version_of


class _Argument(NamedTuple):
    """A tensor in an argument of a call that has begun."""

    name: str
    x: Tensor
    version: int
    copy: Tensor | None

    @property
    def is_changed(self) -> bool:
        """Whether the layer has written to the tensor."""
        return not self.x.is_inference() and version_of(self.x) != self.version


class LayerHook(SiteHook):
    """A forward hook that also gets the input of the layer, which a pre-hook keeps.

    A layer may write to its input in place, so the first call keeps copies. Later calls do if an earlier one wrote. In
    a compiled graph a copy costs nothing: the compiler removes it where nothing is written.
    """

    own = (*SiteHook.own, "argument", "kept", "writes")

    def _start(self) -> None:
        self.kept = CallValue()  # the arguments of the calls in progress
        self.argument: str | None = getattr(self.regularizer, "argument", None)
        self.writes: bool | None = None
        """Whether the layer has written to its arguments; None before its first call."""
        super()._start()

    def place(self, module: nn.Module) -> None:
        self.accompany(module.register_forward_pre_hook, LayerHook.keep, with_kwargs=True)
        super().place(module)
        self.accompany(module.register_forward_hook, LayerHook.end_call, always_call=True)

    def keep(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        rate = self.train_rate if module.training else self.eval_rate
        kept: list[_Argument] = []  # `list[_Argument]()` breaks a compiled graph
        is_recomputed = not is_compiling() and graph_task() != -1  # at the rate of the forward
        if rate is not None or module.training or is_recomputed:
            bound = bind_arguments(module, args, kwargs or {})
            if rate is not None and not rate.neutral:
                refuse_cache(bound, self)
            for name in bound if self.argument is None else [self.argument]:
                for x in tensors(bound.get(name)):
                    if fits(x) and not any(x is one.x for one in kept):
                        kept.append(self._kept(name, x))
        self.kept.start(kept)

    def _kept(self, name: str, x: Tensor) -> _Argument:
        is_blind = is_compiling() or x.is_inference()  # where tensors have no version
        copies = is_blind or self.writes is not False
        return _Argument(name, x, 0 if is_blind else version_of(x), x.clone() if copies else None)

    def map(self, module: nn.Module, value: Any, fn: Callable[..., Tensor]) -> Any:
        output = value[2] if self.at == "output" else ()
        return super().map(module, value, lambda y, **context: fn(y, layer_input=self._input(y, output), **context))

    def _input(self, y: Tensor, output: Any) -> Tensor:
        """Return the argument that stands for an output `y`: the only one with its shape, or else the first."""
        kept = self.kept.value or []
        # A second output of the layer, unlike an argument that it returns, may be a second residual stream.
        others = [z for z in tensors(output) if fits(z) and not any(z is one.x for one in kept)]
        found = [one for one in kept if any(one.x.shape == z.shape for z in (y, *others))]
        if len(found) > 1:
            names = some(list(dict.fromkeys([one.name for one in found])))
            raise InjectionError(
                f"{self.where}: it is unknown which argument a skipped layer returns: {names} have the shape of an "
                "output.\n"
                "  find it by running the model: inject(..., example_input=x)\n"
                f"  or name it: {self.regularizer.title}(..., argument={found[-1].name!r})"
            )
        if not kept and self.argument is not None:
            raise InjectionError(f"{self.where}: the layer was called without a tensor {self.argument!r}.")
        chosen = next(iter(found or kept), None)
        if chosen is None:
            return first_tensor(())
        if chosen.copy is None and chosen.is_changed:
            self.writes = True
            raise InjectionError(
                f"{self.where}: this call wrote to {chosen.name!r} in place, unlike the calls before it, so a skipped "
                "layer cannot return it.\n  run the step again: from now on, the hook copies the argument first"
            )
        kept_input: Tensor = chosen.x if chosen.copy is None else chosen.copy
        return kept_input

    def end_call(self, *_: Any) -> None:
        kept = self.kept.end()
        if kept and not is_compiling():
            self.writes = bool(self.writes) or any(one.is_changed for one in kept)
