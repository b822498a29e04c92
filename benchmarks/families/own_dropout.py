"""Check `set_dropout` by its meaning: sampling turns on the dropout that the model has, and nothing else.

In eval mode inside `own.sampling()`, samples differ, and with all rates at 0 the output is that of eval mode, up to the
rounding of attention, which has another kernel with dropout. Afterwards the flags, hooks and attributes are those from
before. In training mode at rates of 0, passes are equal or the plan names what draws. Each number of the config whose
name has "drop" is the rate of a site, or has no effect.
"""

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

import hookdrop
from families.layers import Run, float_tensors
from hookdrop import InjectionError, LayerError
from hookdrop.recipes import set_dropout
from models.check import NotRunnable, first_line, require, require_equal
from models.footprint import bit_equal, fingerprint, footprint

Record = dict[str, Any]
RATE = 0.3
SAMPLES = 4
ALMOST_0 = 1e-12
"""A rate that drops nothing: `sampling` refuses 0."""


def check_own_dropout(model: nn.Module, runs: Sequence[Run]) -> Record:
    """Return the record of a model: the status, and the kinds of sites.

    Raises:
        CheckFailed: something else than the dropout changes, or it does not drop.
        NotRunnable: the output is random in eval mode, or not finite.
    """
    model.eval()
    with torch.no_grad():
        for weight in model.parameters():  # many start so small that their branch has no effect
            if weight.dim() > 1 and weight.is_floating_point() and weight.numel():
                weight.normal_(std=(weight.numel() / len(weight)) ** -0.5)
    found, refused, without = Counter[str](), list[str](), 0
    needs = _why_no_training(runs)
    if not needs:
        _check_config(model, runs)
        for run in runs:
            _check_training(run)
    for run in runs:
        try:
            found += _check_run(model, run)
        except LayerError:
            without += 1
        except InjectionError as error:
            refused.append(" ".join(str(error).split())[:250])
    record: Record = {"sites": found.total(), **{kind: found[kind] for kind in sorted(found)}}
    record |= {"not trained": needs} if needs else {}
    if without == len(runs):
        return {"status": "no layers"}
    if refused:
        return {"status": "partial" if found else "refused", **(record if found else {}), "error": refused[0]}
    return {"status": "passed", **record}


def _check_run(model: nn.Module, run: Run) -> Counter[str]:
    base = _outputs(run, 0)
    if not all(x.isfinite().all() for x in base) or not bit_equal(base, _outputs(run, 1)):
        raise NotRunnable("without hookdrop: the output is random in eval mode, or not finite")
    before, weights = footprint(model), fingerprint(model)
    own = hookdrop.inject(run.module, set_dropout(p=RATE), example_input=run.inputs)
    injected = footprint(model)  # some modules show their rate
    rates = [(site.name, site.p) for site in own.sites]
    try:
        require(bit_equal(_outputs(run, 0), base), "the output differs in eval mode")
        with own.sampling():
            samples = _samples(run)
        with own.sampling(p=ALMOST_0):
            at_zero = _outputs(run, 0)
        require_equal(injected, model, "sampling")
        pairs = [(x, y) for x, y in zip(at_zero, base, strict=True) if x.numel()]
        close = all(float((x - y).abs().amax()) <= 1e-4 * float(y.abs().amax()) for x, y in pairs)
        require(close, "with all rates at 0, a sample differs from eval mode")
        require(bit_equal(_outputs(run, 0), base), "after sampling, the output differs in eval mode")
        with own.recording(last=0) as record, own.sampling():
            again = _outputs(run, 1)
        require(bit_equal(again, samples[1]), "recording changed a sample")
        if not record.totals.calls:
            raise LayerError("no drop runs with these inputs")
        if all(bit_equal(one, samples[0]) for one in samples[1:]):  # a quantizer rounds them
            require(record.totals.mean_ratio != 1.0, "sampling dropped nothing")
            raise NotRunnable("the output does not depend on what was dropped")
        require([(site.name, site.p) for site in own.sites] == rates, "sampling changed a rate")
    finally:
        own.remove()
    require_equal(before, model, "remove")
    require(fingerprint(model) == weights, "sampling changed a parameter or buffer")
    # Modules of dropout have neither modules nor parameters inside.
    bare = {name for name, one in run.module.named_modules() if not [*one.children(), *one.parameters()]}
    return Counter("modules" if name in bare else "functional" for name, _ in rates)


def _check_training(run: Run) -> None:
    """In training mode at rates of 0, passes are equal, or the plan names what draws."""
    twin = Run(run.name, copy.deepcopy(run.module), run.inputs)
    try:
        hookdrop.inject(twin.module, set_dropout(p=0.0), example_input=run.inputs)
    except LayerError:
        return
    passes = [_trained(twin, seed) for seed in range(SAMPLES)]
    if not all(bit_equal(one, passes[0]) for one in passes[1:]):
        plan = hookdrop.plan(run.module, set_dropout(p=0.0), example_input=run.inputs)
        require(bool(plan.warnings), "at rates of 0, training passes differ, and no warning says why")


def _check_config(model: nn.Module, runs: Sequence[Run]) -> None:
    """Each number of the config whose name has "drop" is the rate of a site, or has no effect on a training pass."""
    config = copy.deepcopy(model.config)
    rates = {0.2 + index / 1000: place for index, place in enumerate(_rates(config))}
    for rate, (owner, name) in rates.items():
        setattr(owner, name, rate)
    try:
        twin = _like(model, config, runs)
    except ValueError:  # DiffLLaMA has no dropout
        return
    found, warnings = set[float](), ""
    for run in twin:
        with suppress(LayerError):  # a part without dropout
            plan = hookdrop.plan(run.module, set_dropout(), example_input=run.inputs)
            found |= {round(site.p, 4) for site in plan.sites}
            warnings += "".join(plan.warnings)
    for rate, (owner, name) in rates.items():
        if round(rate, 4) not in found and "random numbers of Python" not in warnings:  # as those of VITS
            before = [_trained(run, 0) for run in twin]
            setattr(owner, name, 0.9)
            after = [_trained(run, 0) for run in _like(model, config, runs)]
            setattr(owner, name, rate)
            require(all(map(bit_equal, before, after)), f"config.{name} has an effect, and is no rate of a site")


def _like(model: nn.Module, config: PreTrainedConfig, runs: Sequence[Run]) -> list[Run]:
    """Return the runs of a model with another config and the same weights."""
    twin = type(model)(copy.deepcopy(config))
    twin.load_state_dict(model.state_dict())
    return [Run(run.name, twin.get_submodule(run.name), run.inputs) for run in runs]


def _rates(config: PreTrainedConfig) -> Iterator[tuple[PreTrainedConfig, str]]:
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            yield from _rates(value)
        elif isinstance(value, float) and "drop" in name and 0.0 <= value < 1.0:
            yield config, name


def _samples(run: Run) -> list[list[Tensor]]:
    try:
        return [_outputs(run, seed) for seed in range(SAMPLES)]
    except Exception as error:
        run.module.train()
        try:
            [_outputs(run, seed) for seed in range(SAMPLES)]
        except type(error):
            raise NotRunnable(f"it fails in training mode: {first_line(error)}") from error
        raise


def _why_no_training(runs: Sequence[Run]) -> str:
    """Return why the model does not run in training mode on these inputs: FastSpeech 2 needs labels there."""
    try:
        for run in runs:
            _trained(run, 0)
    except ValueError as error:
        return first_line(error)
    finally:
        for run in runs:
            run.module.eval()
    return ""


def _trained(run: Run, seed: int) -> list[Tensor]:
    run.module.train()
    for module in run.module.modules():
        module.training &= not isinstance(module, nn.modules.batchnorm._BatchNorm)
    np.random.seed(seed)
    return _outputs(run, seed)


@torch.no_grad()
def _outputs(run: Run, seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    return float_tensors(run())
