"""The check of compiled code of `hookdrop.testing`, for every regularizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hookdrop.testing import regularizer_checks
from tests.support.regularizers import EVERY
from tests.unit.testing.test_regularizers import TOKENS, Zeroing

CHECK = "compiled_code_equals_eager_code"


@pytest.mark.parametrize("name", EVERY)
def test_compiled_code_equals_eager_code(name: str) -> None:
    checks = dict(regularizer_checks(EVERY[name].regularizer, EVERY[name].example))
    if name == "torch.nn.Dropout2d":  # breaks the graph
        assert CHECK not in checks
    else:
        checks[CHECK]()


class ReadsItsRateInTheGraph(Zeroing):
    def regularize(self, x: Tensor, rate: Any) -> Tensor:
        return super().regularize(x, self.p if torch.compiler.is_compiling() else rate)


def test_a_broken_regularizer_fails() -> None:
    dict(regularizer_checks(Zeroing(), TOKENS))[CHECK]()
    with pytest.raises(AssertionError, match=CHECK):
        dict(regularizer_checks(ReadsItsRateInTheGraph(), TOKENS))[CHECK]()
