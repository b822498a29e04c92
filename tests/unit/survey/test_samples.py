"""Which axis, and which rows of it, belong to which sample."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hookdrop.survey.facts import survey
from hookdrop.survey.samples import Samples
from tests.support.models import toy


def around(before: Callable[[Tensor], Tensor]) -> nn.Module:
    """A linear layer on a rearranged tensor (8, 6) per sample, with a tensor of another batch before it."""
    return toy(lambda m, x: m.layer(before(x)).sum(), layer=nn.Linear(6, 6))


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        (lambda x: x, Samples()),
        (lambda x: x.transpose(0, 1), Samples(axis=1)),
        (lambda x: x.flatten(0, 1), Samples(per_sample=8, module="")),
        (lambda x: x.unflatten(1, (2, 4)).flatten(0, 1), Samples(per_sample=2, module="")),
        (lambda x: x.transpose(0, 1).flatten(0, 1), Samples(per_sample=8, interleaved=True, module="")),
        (lambda x: x.reshape(1, -1, 6), Samples(axis=1, per_sample=8, module="")),
    ],
    ids=["plain", "sequence first", "tokens", "windows", "time first", "packed"],
)
@pytest.mark.parametrize("at", ["input", "output"])
@pytest.mark.parametrize("batch", [1, 2])
def test_rows_of_samples(before: Callable[[Tensor], Tensor], expected: Samples, at: str, batch: int) -> None:
    model = around(before)
    facts = survey(model, torch.zeros(batch, 8, 6))
    assert facts.samples("layer", at) == expected
    assert facts.forwards == (0 if expected.per_sample == 1 else 2)


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        (lambda x: x.mean(0), "not one axis grows with the batch"),
        (lambda x: torch.cat([x, x[:1]]), "does not grow in proportion"),
        (lambda x: x.flatten(0, 1)[x.sum((1, 2)).argsort().repeat(8)], "depend on several samples"),
    ],
    ids=["mean", "one more", "sorted"],
)
def test_rows_of_unknown_samples(before: Callable[[Tensor], Tensor], reason: str) -> None:
    model = around(before)
    facts = survey(model, torch.zeros(2, 8, 6))
    assert reason in str(facts.samples("layer"))


def test_a_layer_that_does_not_run_has_no_samples() -> None:
    model = around(lambda x: x)
    model.other = nn.Linear(6, 6)
    assert survey(model, torch.zeros(2, 8, 6)).samples("other") == "it is never called with the example"


def test_the_module_with_the_batch_is_the_innermost() -> None:
    model = nn.Sequential(nn.Identity(), nn.Sequential(around(lambda x: x.flatten(0, 1))))
    found = survey(model, torch.zeros(2, 8, 6)).samples("1.0.layer")
    assert isinstance(found, Samples)
    assert found.argument == ("1.0", 0, False)
