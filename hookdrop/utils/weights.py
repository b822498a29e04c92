"""Notice updates of a model's weights."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from hookdrop.utils.torch_internals import dispatch_modes, functorch_stack, is_tracing, parameters_of, version_of

_SAMPLED = 1024
"""The number of values of a weight that are compared."""


class WeightUpdates:
    """Counts the updates of a model by its first trainable weight. Holds the model weakly."""

    def __init__(self, model: nn.Module) -> None:
        self.model = weakref.ref(model)
        self.updates = 0
        self._version_changes = False
        """Whether updates increment the weight's version, as those of PyTorch's optimizers do."""
        self._values: Tensor | None = None
        self._owner: tuple[weakref.ref[nn.Module], str] | None = None
        """The module and name of the weight. A weak reference to the parameter itself would prevent swapping it."""
        weight = self.weight()
        self._first_version = self._version = None if weight is None else version_of(weight)

    def weight(self) -> nn.Parameter | None:
        """Return the first trainable parameter. It is cached, because a search at every step would be slow."""
        module = None if self._owner is None else self._owner[0]()
        weight = None if module is None or self._owner is None else parameters_of(module).get(self._owner[1])
        if weight is None or not weight.requires_grad:
            model = self.model()
            weight, self._owner = (None, None) if model is None else _first_weight(model)
        return weight

    def is_trained_by(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer updates the weight."""
        weight = self.weight()
        return any(weight is parameter for group in optimizer.param_groups for parameter in group["params"])

    @property
    def updates_so_far(self) -> int:
        """The number of updates, including those that were not noticed, if they increment the version."""
        weight = self.weight()
        moved = 0 if weight is None or self._first_version is None else version_of(weight) - self._first_version
        return max(self.updates, moved)

    def notice(self, *, by_value: bool = False) -> bool:
        """Return whether the weight changed since the last call, and count it."""
        weight = self.weight()
        before, self._version = self._version, None if weight is None else version_of(weight)
        changed = before != self._version
        self._version_changes = self._version_changes or changed
        if by_value and weight is not None and not self._version_changes:
            changed = self._values_changed(weight)
        self.updates += changed
        return changed

    def _values_changed(self, weight: nn.Parameter) -> bool:
        """Detect updates written to `parameter.data`, as by fastai's optimizers: these do not increment the version."""
        captured = weight.is_cuda and torch.cuda.is_current_stream_capturing()
        # The comparison must not be recorded in a trace or a CUDA graph.
        traced = is_tracing() or dispatch_modes() > 0 or functorch_stack() is not None or captured
        if traced or not weight.is_contiguous() or weight.is_meta:
            return False
        data = weight.detach()
        if type(data) is not Tensor or not data.numel():
            return False
        values = data.view(-1)[:: -(-data.numel() // _SAMPLED)].clone()
        before, self._values = self._values, values
        return before is not None and not (before.shape == values.shape and torch.equal(before, values))


def _first_weight(model: nn.Module) -> tuple[nn.Parameter | None, tuple[weakref.ref[nn.Module], str] | None]:
    """Find the first parameter that an optimizer may update, and its location."""
    for module in model.modules():
        for name, parameter in parameters_of(module).items():
            if parameter is None or isinstance(parameter, UninitializedParameter):
                continue
            if parameter.requires_grad and not parameter.is_inference():
                return parameter, (weakref.ref(module), name)
    return None, None
