"""A hook whose regularizer compares the output of a layer with its input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.compiler import is_compiling

from hookdrop.hooks import compiling
from hookdrop.hooks.call_arguments import hidden_states, refuse_cache
from hookdrop.hooks.hook import SiteHook
from hookdrop.utils.tensor_tree import map_tensor


class LayerHook(SiteHook):
    """A forward hook that regularizes one tensor of a layer's output, given the layer's input."""

    def __call__(self, module: nn.Module, args: Any, *rest: Any) -> Any:
        # If another library re-registered the hook, it may be called without the keyword arguments.
        *kwargs, output = rest
        if compiling.is_symbolic(output):
            return self.state.warn_once("symbolic", compiling.fx_trace_text(self.where))
        value = args, kwargs[0] if kwargs else {}, output
        return self._call_in_graph(module, value) if is_compiling() else self._call(module, value)

    def map(self, module: nn.Module, value: Any, fn: Callable[..., Tensor]) -> Any:
        args, kwargs, output = value
        refuse_cache(module, args, kwargs, self.where)
        x = hidden_states(module, args, kwargs)
        return map_tensor(output, self.tensor, lambda y: fn(y, layer_input=x))

    def place(self, module: nn.Module) -> None:
        self.handle = module.register_forward_hook(self, with_kwargs=True)
