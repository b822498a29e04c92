"""Find the random numbers that a forward depends on: change those of one line of code, and compare the outputs."""

from __future__ import annotations

import random
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hookdrop.core.tensor_tree import map_leaves, tensors
from hookdrop.survey.experiment import experiment
from hookdrop.survey.isolation import Training, forked_rng, rng_states
from hookdrop.survey.record import modules_of


class Line(NamedTuple):
    """A line of code that calls a function of PyTorch, outside of it if there is one."""

    function: str
    file: str
    number: int

    def __str__(self) -> str:
        return f"{self.function} in {Path(self.file).name}, line {self.number}"


TRIES = 32
"""From how many seeds the random numbers of a line are drawn, to take those with the smallest and the largest sum.

So a comparison with a random number has both outcomes, unless one is very rare.
"""

_CHOICES: list[Callable[..., int]] = [min, max, *(lambda seeds, key, n=n: seeds[n] for n in range(6))]
"""Six of the seeds themselves, too: a choice among several, such as that of an expert, may have other outcomes."""


def find_draws(
    model: nn.Module, example: Any, training: Training, known: Collection[tuple[str, str]] = ()
) -> Mapping[Line, list[str]]:
    """Return the lines that draw random numbers on which the output depends, with the modules that run them.

    The first line that shows random numbers of Python or NumPy, or of code that calls no function of PyTorch, has no
    modules. `known` are names of modules with functions whose draws are left out; the rest is as for `experiment`.
    """
    modules = {module: name for name, module in modules_of(model).items()}
    found, run = dict[Line, list[str]](), partial(_Run, model, example, training)
    with forked_rng(model, *tensors(example)):
        # Random numbers in place of weights that are 0 show more, but may hide a choice between nearly equal numbers.
        unchanged = cache(lambda random_weights: run(random_weights=random_weights))
        base = unchanged(True)
        for line, ran in base.drawn.items():
            names = [modules[one] for one in ran if one in modules]
            if names and {(name, line.function) for name in names} <= {*known}:
                continue
            tries = ((random_weights, choose) for random_weights in (True, False) for choose in _CHOICES)
            if any(run(line, choose, random_weights=one).differs(unchanged(one)) for one, choose in tries):
                found[line] = names
        if base.draws_elsewhere:
            others = (run(None, min, seed) for seed in range(1, 5))
            if (other := next((one for one in others if one.differs(base)), None)) is not None:
                found.setdefault(run(None, min, 0).parting(other), [])
    return found


class _Run(TorchFunctionMode):
    """One forward, in which each line of code has its own seed at each of its calls.

    Of the results of the line `changed` from several seeds, it chooses the one with the smallest or the largest sum.
    """

    def __init__(
        self,
        model: nn.Module,
        example: Any,
        training: Training,
        changed: Line | None = None,
        choose: Callable[..., int] = min,
        seed: int | None = None,
        *,
        random_weights: bool = True,
    ) -> None:
        super().__init__()
        self.drawn: dict[Line, dict[nn.Module, None]] = {}
        """The lines that drew, with the modules that ran them."""
        self.draws_elsewhere = False
        """Whether Python's or NumPy's generator was used, or PyTorch's between the calls of its functions."""
        self.outputs: list[Tensor] = []
        self.steps: list[tuple[Line, float]] = []
        """With a `seed` for these draws: the lines in the order of execution, with a sum of what they computed."""
        self._changed, self._choose, self._calls, self._seed_of_others = changed, choose, Counter[Line](), seed
        given = (*model.parameters(), *model.buffers(), *tensors(example))
        self._devices = {x.device.type for x in given} - {"cpu", "meta"}
        self._modules: list[Any] = [*map(torch.get_device_module, self._devices)]
        before: list[str] = []
        self._left: list[Tensor] = []
        """The states of PyTorch's generators after the last call."""

        def watch(name: str, at: str, value: Any) -> None:
            if name == "" and at == "input":
                random.seed(seed or 0)
                if "numpy" in sys.modules:
                    sys.modules["numpy"].random.seed(seed or 0)
                before.append(_others())
                self._leave()
            elif name == "":
                self._arrive()
                self.draws_elsewhere |= _others() != before.pop()
                self.outputs += [x.detach().clone() for x in tensors(value)]

        with self:
            experiment(model, example, watch, {}, training, weights=None if random_weights else {})

    def differs(self, other: _Run) -> bool:
        pairs = zip(self.outputs, other.outputs, strict=False)
        return not all(x.shape == y.shape and torch.allclose(x, y, 0, 0, equal_nan=True) for x, y in pairs)

    def parting(self, other: _Run) -> Line:
        """The first line that computes something else than in another forward."""
        both = zip(self.steps, other.steps, strict=False)
        return next((one[0] for one, two in both if one != two), self.steps[-1][0])

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frames = list(_frames(sys._getframe(1)))
        self._arrive()
        outside = (one for one in frames if not str(one.f_globals.get("__name__")).startswith("torch."))
        own = next(outside)
        if str(own.f_globals.get("__name__")).startswith("hookdrop."):  # all of the model is PyTorch's
            own = next((one for one in frames if one.f_code.co_name == "forward"), own)
        line = Line(getattr(function, "__name__", "?").strip("_"), own.f_code.co_filename, own.f_lineno)
        self._calls[line] += 1
        seed = zlib.crc32(repr((line, self._calls[line])).encode())
        if line == self._changed:
            seed = self._choose(range(seed + 1, seed + TRIES), key=lambda one: self._total(one, function, args, kwargs))
        self._seed(seed)
        before = rng_states(self._devices)
        output = function(*args, **kwargs or {})
        if not all(map(torch.equal, before, rng_states(self._devices))):
            running = [one.f_locals["self"] for one in frames if one.f_code is nn.Module._call_impl.__code__]
            self.drawn.setdefault(line, {}).update(dict.fromkeys(running[:1]))  # the innermost module
        if self._seed_of_others is not None:
            self.steps.append((line, _total(output)))
        self._leave()
        return output

    def _arrive(self) -> None:
        self.draws_elsewhere |= not all(map(torch.equal, self._left, rng_states(self._devices)))

    def _leave(self) -> None:
        if self._seed_of_others is not None:
            self._seed(self._seed_of_others + sum(self._calls.values()))
        self._left = rng_states(self._devices)

    def _seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        for module in self._modules:
            module.manual_seed_all(seed)

    def _total(self, seed: int, function: Any, args: Any, kwargs: Any) -> float:
        """Return the sum of what a function computes from a seed."""
        args, kwargs = map_leaves((args, kwargs or {}), lambda x: x.clone() if isinstance(x, Tensor) else x)
        self._seed(seed)
        return _total(function(*args, **kwargs))


def _total(value: Any) -> float:
    """Return a weighted sum of all numbers. The weights differ, so that masks with different places differ too."""
    dense = (x.detach() for x in tensors(value) if x.layout == torch.strided and not x.is_complex())
    flat = (x.double().nan_to_num().flatten() for x in dense)
    return sum(float(x @ torch.linspace(1, 2, len(x), dtype=x.dtype, device=x.device)) for x in flat)


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _others() -> str:
    """Return the states of the generators of Python and NumPy."""
    return f"{random.getstate()} {sys.modules['numpy'].random.get_state() if 'numpy' in sys.modules else ''}"
