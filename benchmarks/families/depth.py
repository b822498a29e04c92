"""Check the sites of `stochastic_depth`: each is the last layer before an addition, and no branch is missing.

With every site multiplied by 0, a layer has to return its input, or what depends on no weight matrix inside the layer:
norms and multiples of the input, or a projection on the skip. With one site multiplied by 0, 1 and 2, the next addition
has to change by a tensor and by twice that tensor, so no norm or activation follows the site. All vectors and all zero
weights are random, so that no branch is zero because of its initialization.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from families.inputs import BATCH
from families.layers import Run, float_tensors, is_layer, stacks, with_first

_PROJECTIONS = ("downsample", "shortcut", "nin_shortcut", "proj", "layernorm_before")
"""Children of a block on its skip, if the block changes the shape."""
_REPLACES_ITS_INPUT = re.compile("^Sam(HQ)?TwoWayAttentionBlock$")
"""Layers whose first branch has no skip (`skip_first_layer_pe`)."""

_ADD, _ADDITIONS = ("add", "iadd", "radd"), 16
"""The names of an addition, and the number of additions after a site to look at."""


@dataclass
class Call:
    """The floating-point tensors that a module receives and returns in its first call."""

    inputs: list[Tensor]
    outputs: list[Tensor] = field(default_factory=list)

    @property
    def returns_an_input(self) -> bool:
        """Whether the output has the bits of an input."""
        return bool(self.outputs) and any(torch.equal(x, self.outputs[0]) for x in self.inputs)


Calls = dict[str, Call]
Problems = dict[str, str]
"""By the name of the layer."""


def check_sites(
    model: nn.Module,
    runs: Sequence[Run],
    blocks: Mapping[str, Sequence[str]],
    rows: Collection[str],
    inner: Collection[str] = (),
) -> Problems:
    """Check the sites of a model with random vectors.

    Args:
        model: the model, in eval mode.
        runs: forwards that call all layers.
        blocks: the names of the hooked modules, the ends of branches, by the names of the layers around them.
        rows: the sites that draw a mask for each row of the first axis, which has to be the batch.
        inner: layers that do not reduce to their input.
    """
    known = {name: ends for name, ends in blocks.items() if [name] != ends}
    layers = [pair for _, found in stacks(model) for pair in found]
    sites = [end for ends in blocks.values() for end in ends]
    inside = [name for name, module in model.named_modules() if name in known or (name and is_layer(module))]
    problems: Problems = {}
    with randomized(model):
        with _scaled(model, dict.fromkeys(sites, 1.0)), torch.no_grad():
            plain = record(model, runs, [*inside, *sites])
        with _scaled(model, dict.fromkeys(sites, 0.0)):
            calls = record(model, runs, inside)
            zeroed = {name: _reduces(model.get_submodule(name), call) for name, call in calls.items()}
        for name, layer in layers:
            # The blocks of a container that is never called are checked below.
            container = name not in plain and any(block.startswith(f"{name}.") for block in known)
            if not container and not name.startswith(tuple(f"{site}." for site in sites)):  # a part of a branch
                _check_layer(name, layer, plain, zeroed, problems)
        for name in known.keys() & zeroed.keys():
            if zeroed[name]:
                problems.pop(name, None)
            elif name not in inner:
                _add_problem(problems, name, model.get_submodule(name))
            _check_rows(name, set(known[name]) & set(rows) & set(plain), plain, problems)
        # Blocks outside of the layers are those of a convolutional backbone, in which a ReLU follows the addition.
        prefixes = tuple(f"{name}." for name, _ in layers)
        tested = {name: ends for name, ends in known.items() if f"{name}.".startswith(prefixes) and name not in inner}
        return problems | _check_additions(model, runs, tested, sites, plain)


def _check_layer(name: str, layer: nn.Module, plain: Calls, zeroed: Mapping[str, bool], problems: Problems) -> None:
    """Check that a layer reduces to its skip, or that all layers inside it do."""
    inner = [pair for _, layers in stacks(layer, f"{name}.") for pair in layers]
    if isinstance(layer, nn.ModuleList):
        inner = [(f"{name}.{index}", child) for index, child in layer.named_children()]
    if zeroed.get(name) and not plain[name].returns_an_input:
        return
    for inner_name, child in inner:
        _check_layer(inner_name, child, plain, zeroed, problems)
    if not inner:
        _add_problem(problems, name, layer)


def _check_rows(name: str, ends: Collection[str], plain: Calls, problems: Problems) -> None:
    """Check that the first axis of the output of these sites is the batch."""
    for end in ends:
        shape = plain[end].outputs[0].shape
        if len(shape) < 3 or shape[0] % BATCH or shape[0] not in (BATCH, plain[name].inputs[0].shape[0]):
            problems[name] = f"the first axis of {end} {tuple(shape)} is not the batch"


def _add_problem(problems: Problems, name: str, layer: nn.Module) -> None:
    if not _REPLACES_ITS_INPUT.match(type(layer).__name__):
        problems[name] = f"{type(layer).__name__} does not reduce to its skip"


def _reduces(layer: nn.Module, call: Call) -> bool:
    """Whether the output of a layer without branches depends on its input, and on no matrix but a projection."""
    if call.returns_an_input:
        return True
    if not call.outputs or not call.inputs or (_varies(call.inputs[0]) and not _varies(call.outputs[0])):
        return False
    matrices = {key: p for key, p in layer.named_parameters() if p.requires_grad and p.dim() > 1}
    if not matrices or not call.outputs[0].requires_grad:
        return True
    loss = call.outputs[0].square().sum()
    gradients = torch.autograd.grad(loss, list(matrices.values()), retain_graph=True, allow_unused=True)
    used = [key for key, gradient in zip(matrices, gradients, strict=True) if gradient is not None and gradient.any()]
    return all(key.startswith(_PROJECTIONS) for key in used)


def _varies(x: Tensor) -> bool:
    rows = x.flatten(0, -2) if x.dim() > 1 else x
    return bool((rows != rows[:1]).any())


@torch.no_grad()
def _check_additions(
    model: nn.Module, runs: Sequence[Run], blocks: Mapping[str, Sequence[str]], sites: Sequence[str], called: Calls
) -> Problems:
    """Return the problems of sites that a norm or another nonlinear function follows, one of each kind."""
    pairs = [(name, end) for name, ends in blocks.items() for end in ends if {name, end} <= set(called)]
    kinds = {name: type(model.get_submodule(name)).__name__ for name, _ in pairs}
    problems: Problems = {}
    for name, end in {(kinds[name], end.removeprefix(name)): (name, end) for name, end in pairs}.values():
        terms = []
        for factor in (0.0, 1.0, 2.0):  # of the first call
            factors, found = {**dict.fromkeys(sites, 0.0), end: factor}, _Additions()
            with _scaled(model, factors, first=end), model.get_submodule(end).register_forward_hook(found.start), found:
                _run_all(runs)
            terms.append(found.terms)
        if not _is_linear(_first_difference(terms)):
            problems[name] = f"{end} is not the last layer before the addition in {kinds[name]}"
    return problems


def _run_all(runs: Sequence[Run]) -> None:
    torch.manual_seed(0)
    for run in runs:
        run()


class _Additions(TorchFunctionMode):
    """Records the terms of the first additions of two tensors, once it has started."""

    def __init__(self) -> None:
        super().__init__()
        self.started = False
        self.terms: list[list[Tensor]] = []

    def start(self, *_: Any) -> None:
        """Record from now on; this is a forward hook."""
        self.started = True

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.started and len(self.terms) < _ADDITIONS and getattr(function, "__name__", "").strip("_") in _ADD:
            terms = float_tensors((args, kwargs))
            self.terms += [[x.clone() for x in terms]] if len(terms) == 2 else []
        return function(*args, **(kwargs or {}))


def _first_difference(runs: Sequence[list[list[Tensor]]]) -> tuple[Tensor, ...]:
    """Return the first term that differs between runs in which the other term does not: that of the branch."""
    for addition in zip(*runs, strict=False):
        changed = [values for values in zip(*addition, strict=True) if not torch.equal(values[0], values[1])]
        if len(changed) == 1:
            return changed[0]
    return ()


def _is_linear(values: Sequence[Tensor]) -> bool:
    """Whether the third value is as far from the second as the second from the first."""
    if len({x.shape for x in values}) != 1:
        return False
    none, once, twice = (x.double() for x in values)
    change = once - none
    return torch.allclose(twice - none, 2 * change, rtol=1e-3, atol=1e-3 * float(change.std()))


def record(model: nn.Module, runs: Sequence[Run], names: Sequence[str]) -> Calls:
    """Record the first call of each of these modules."""
    calls: Calls = {}

    def recorded(name: str, forward: Any, *args: Any, **kwargs: Any) -> Any:
        if name in calls:
            return forward(*args, **kwargs)
        calls[name] = Call([x.detach().clone() for x in float_tensors((args, kwargs))])
        output = forward(*args, **kwargs)
        calls[name].outputs = [x.clone() for x in float_tensors(output)]
        return output

    with ExitStack() as stack:
        for name in dict.fromkeys(names):
            module = model.get_submodule(name)
            # Not hooks: SqueezeBERT calls the forward of its layers.
            stack.enter_context(patch.object(module, "forward", partial(recorded, name, module.forward)))
        _run_all(runs)
    return calls


@contextmanager
def _scaled(model: nn.Module, factors: Mapping[str, float], first: str = "") -> Iterator[None]:
    """Multiply the outputs of these modules by a factor each; those of all but the first call of `first` by 0."""
    called: set[str] = set()

    def scale(name: str, module: nn.Module, args: Any, output: Any) -> Any:
        factor = 0.0 if name == first and name in called else factors[name]
        called.add(name)
        return with_first(output, lambda x: x * factor)

    with ExitStack() as stack:
        for name in factors:
            stack.enter_context(model.get_submodule(name).register_forward_hook(partial(scale, name)))
        yield


@contextmanager
def randomized(model: nn.Module) -> Iterator[None]:
    """Add noise to all vectors, and to weights that are zero, so that no branch is zero; restore them at the end."""
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    generator = torch.Generator().manual_seed(1)
    try:
        with torch.no_grad():
            for p in model.parameters():
                if p.is_floating_point() and (p.numel() == max(p.shape, default=1) or not p.any()):
                    p.add_(torch.randn(p.shape, generator=generator).to(p) * 0.1)
        yield
    finally:
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(weights[name])
