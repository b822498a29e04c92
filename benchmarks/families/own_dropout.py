"""Check `set_dropout` by its meaning: sampling turns on the dropout that the model has, and nothing else.

In eval mode inside `own.sampling()`, samples differ, and with all rates at 0 the output is that of eval mode, bit for
bit. Afterwards the flags, hooks and attributes are those from before.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

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
    for run in runs:
        try:
            found += _check_run(model, run)
        except LayerError:
            without += 1
        except InjectionError as error:
            refused.append(" ".join(str(error).split())[:250])
    record: Record = {"sites": found.total(), **{kind: found[kind] for kind in sorted(found)}}
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
        require(bit_equal(at_zero, base), "with all rates at 0, a sample differs from eval mode")
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
    return Counter("modules" if name in _drop_modules(run.module) else "functional" for name, _ in rates)


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


def _drop_modules(model: nn.Module) -> set[str]:
    """Return the names of the modules without modules or parameters inside."""
    return {name for name, one in model.named_modules() if not [*one.children(), *one.parameters()]}


@torch.no_grad()
def _outputs(run: Run, seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    return float_tensors(run())
