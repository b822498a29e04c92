"""`hookdrop.testing`: right regularizers pass all checks, and wrong ones fail the check of what is wrong."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from hookdrop import Rate, Regularizer
from hookdrop.testing import check_regularizer, regularizer_checks
from tests.support.regularizers import EVERY, LACKS


class Zeroing(Regularizer):
    """A right one, which the others change in one place."""

    rate = Rate("p", open_end=True)
    independent_samples = True

    def __init__(self, p: float = 0.3) -> None:
        super().__init__()
        self.p = p

    def kept(self, x: Tensor, rate: Any) -> Tensor:
        return torch.rand_like(x, dtype=torch.float32) >= rate

    def regularize(self, x: Tensor, rate: Any) -> Tensor:
        return x * self.kept(x, rate).to(x.dtype) / (1.0 - rate)


class ActiveInEval(Zeroing):
    def forward(self, x: Tensor) -> Tensor:
        return x if self.p == 0.0 else self.regularize(x, self.p)


class HalfTheRate(Zeroing):
    def regularize(self, x: Tensor, rate: Any) -> Tensor:
        return super().regularize(x, rate / 2)


class InPlace(Zeroing):
    def regularize(self, x: Tensor, rate: Any) -> Tensor:
        return x.mul_(super().regularize(torch.ones_like(x), rate))


class NotCopyable(Zeroing):
    def __init__(self, p: float = 0.3) -> None:
        super().__init__(p)
        self.lock = threading.Lock()


class CoupledSamples(Zeroing):
    independent_samples = True

    def kept(self, x: Tensor, rate: Any) -> Tensor:
        return super().kept(x[:1], rate).expand_as(x)


class OtherMaskInRecompute(Zeroing):
    def kept(self, x: Tensor, rate: Any) -> Tensor:
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
            torch.rand(1)
        return super().kept(x, rate)


class OtherDtype(Zeroing):
    def regularize(self, x: Tensor, rate: Any) -> Tensor:
        return x * super().regularize(torch.ones_like(x, dtype=torch.promote_types(x.dtype, torch.float32)), rate)


class MeanNotKept(Zeroing):
    def regularize(self, x: Tensor, rate: Any) -> Tensor:
        return x * self.kept(x, rate).to(x.dtype)


class NotItsText(Zeroing):
    def __init__(self, p: float = 0.3, temperature: float = 1.0) -> None:
        super().__init__(p)
        self.temperature = 2.0 * temperature


class Both(MeanNotKept):
    def kept(self, x: Tensor, rate: Any) -> Tensor:
        return super().kept(x, rate / 2)


class OneAxis(Zeroing):
    axes = "C"


TOKENS = torch.randn(4, 12, 8, generator=torch.Generator().manual_seed(0))
BROKEN: dict[type[Regularizer], str] = {
    ActiveInEval: "eval_is_the_identity",
    HalfTheRate: "p_means_p",
    InPlace: "input_is_not_modified",
    NotCopyable: "can_be_deep_copied",
    CoupledSamples: "samples_are_drawn_independently",
    OtherMaskInRecompute: "checkpoint_replays_the_mask",
    OtherDtype: "dtype_and_shape_are_kept",
    MeanNotKept: "mean_is_kept",
    NotItsText: "has_a_text_form",
}


COMPILED = {"compiled_code_equals_eager_code": "in tests/integration/compile"}


def failing(regularizer: Regularizer) -> list[str]:
    failed = []
    for name, check in regularizer_checks(regularizer, TOKENS, COMPILED):
        try:
            check()
        except AssertionError:
            failed.append(name)
    return failed


@pytest.mark.parametrize("name", EVERY)
def test_hookdrops_regularizers_pass(name: str) -> None:
    case = EVERY[name]
    check_regularizer(case.regularizer, case.example, {**LACKS.get(name, {}), **COMPILED})


def test_a_right_regularizer_passes() -> None:
    check_regularizer(Zeroing(), expected_failures=COMPILED)


@pytest.mark.parametrize("cls", BROKEN, ids=lambda cls: cls.__name__)
def test_a_broken_regularizer_fails_the_check_of_what_is_broken(cls: type[Regularizer]) -> None:
    failed = failing(cls())
    assert BROKEN[cls] in failed
    # The others cannot run without copies, or with an input that requires a gradient.
    assert cls in (InPlace, NotCopyable) or len(failed) == 1


def test_the_error_has_all_failures() -> None:
    with pytest.raises(AssertionError, match=r"2 of \d+ checks failed.(.|\n)*p_means_p(.|\n)*mean_is_kept: The mean"):
        check_regularizer(Both(), TOKENS, COMPILED)


def test_functions_and_modules_can_be_checked() -> None:
    check_regularizer(torch.tanh, expected_failures=COMPILED)


def test_an_unknown_check_or_shape_raises() -> None:
    with pytest.raises(ValueError, match="no check 'p_mean_p'"):
        regularizer_checks(Zeroing(), expected_failures={"p_mean_p": ""})
    with pytest.raises(ValueError, match="example=x"):
        regularizer_checks(OneAxis())
    checks = regularizer_checks(OneAxis(), torch.randn(6))
    assert dict(checks)["p_means_p"]() is None


def test_random_states_and_modes_are_restored() -> None:
    one, before = Zeroing().eval(), torch.get_rng_state()
    check_regularizer(one, TOKENS, COMPILED)
    assert torch.equal(torch.get_rng_state(), before)
    assert not one.training
