"""`hookdrop.testing`: right regularizers pass all checks, and wrong ones fail the check of what is wrong."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from hookdrop import DropPath, HeadDropout, NEFTune, Rate, Regularizer, TokenDropout
from hookdrop.testing import check_regularizer, regularizer_checks
from tests.support.regularizers import EVERY, LACKS, Case


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


class StoresItsRate(Zeroing):
    def regularize(self, x: Tensor, rate: Any) -> Tensor:
        self.now = rate
        return x * self.kept(x, rate).to(x.dtype) / (1.0 - self.now)


class NotItsText(Zeroing):
    def __init__(self, p: float = 0.3, temperature: float = 1.0) -> None:
        super().__init__(p)
        self.temperature = 2.0 * temperature


class Nothing(Zeroing):
    def regularize(self, x: Tensor, rate: Any) -> Tensor:
        return x * 1.0


class ActiveAtRate0(Zeroing):
    def forward(self, x: Tensor) -> Tensor:
        return self.regularize(x, self.p) if self.training else x


class LosesTheFormat(Zeroing):
    def regularize(self, x: Tensor, rate: Any) -> Tensor:
        return super().regularize(x, rate).contiguous()


class NeedsASample(Zeroing):
    def regularize(self, x: Tensor, rate: Any) -> Tensor:
        return super().regularize(x, rate) + 0.0 * x[0]


class OwnRandomNumbers(Zeroing):
    def kept(self, x: Tensor, rate: Any) -> Tensor:
        generator = torch.Generator().manual_seed(random.getrandbits(32))
        return torch.rand(x.shape, generator=generator) >= rate


class ReadsItsRate(Zeroing):
    def regularize(self, x: Tensor, rate: Any) -> Tensor:
        return super().regularize(x, self.p)


class MixesSamples(Zeroing):
    independent_samples = True

    def regularize(self, x: Tensor, rate: Any) -> Tensor:
        return super().regularize(x, rate) + rate * (x - x.mean(0))


class DrawsInPlace(Zeroing):
    def kept(self, x: Tensor, rate: Any) -> Tensor:
        return torch.empty_like(x, dtype=torch.float32).uniform_() >= rate


class WrongGradient(Zeroing):
    def regularize(self, x: Tensor, rate: Any) -> Tensor:
        return super().regularize(x, rate) + (x - x.detach()) * self.kept(x, 1.0 - rate)


class OtherRateInItsText(Zeroing):
    def __init__(self, p: float = 0.3) -> None:
        super().__init__(p / 2)


class WritesToWeights(Zeroing):
    def regularize(self, x: Tensor, rate: Any) -> Tensor:
        for node, _ in x.grad_fn.next_functions if x.grad_fn else ():
            if isinstance(weight := getattr(node, "variable", None), torch.nn.Parameter):
                weight.data.mul_(0.5)
        return super().regularize(x, rate)


class DetachesTheGradient(Zeroing):
    def regularize(self, x: Tensor, rate: Any) -> Tensor:
        y = super().regularize(x, rate)
        if y.requires_grad:
            y.register_hook(Tensor.detach)
        return y


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
    StoresItsRate: "threads_do_not_interfere",
    NotItsText: "has_a_text_form",
    Nothing: "training_has_an_effect",
    ActiveAtRate0: "neutral_rate_is_the_identity",
    LosesTheFormat: "memory_format_is_kept",
    NeedsASample: "empty_batch_passes",
    OwnRandomNumbers: "seed_determines_the_result",
    ReadsItsRate: "rate_is_an_argument",
    MixesSamples: "samples_do_not_mix",
    DrawsInPlace: "vmap_respects_its_randomness",
    WrongGradient: "gradient_is_the_derivative",
    OtherRateInItsText: "has_a_spec",
    WritesToWeights: "removal_is_bit_equal",
    DetachesTheGradient: "gradient_has_a_derivative",
}
SEVERAL = (InPlace, NotCopyable, Nothing, NeedsASample, OwnRandomNumbers, ReadsItsRate, WrongGradient)
SEVERAL += (OtherRateInItsText, WritesToWeights, DetachesTheGradient)
"""Those that break several properties at once."""
COMPILED = {"compiled_code_equals_eager_code": "in tests/integration/compile"}


def failing(regularizer: Regularizer) -> list[str]:
    failed = []
    for name, check in regularizer_checks(regularizer, TOKENS, COMPILED):
        try:
            check()
        except AssertionError:
            failed.append(name)
    return failed


MORE = {
    "DropPath (subset)": Case(DropPath(0.5, "subset"), (4, 12, 8)),
    "HeadDropout (interleaved)": Case(HeadDropout(0.3, heads=4, interleaved=True), (4, 12, 8)),
    "NEFTune (attention mask)": Case(NEFTune(3.0, attention_mask=True), (4, 12, 8)),
    "TokenDropout (remove)": Case(TokenDropout(0.3, remove=True), (4, 12, 8)),
    "torch.nn.functional.dropout": Case(torch.nn.functional.dropout, (4, 12, 8)),
}


@pytest.mark.parametrize("name", [*EVERY, *MORE])
def test_hookdrops_regularizers_pass(name: str) -> None:
    case = {**EVERY, **MORE}[name]
    check_regularizer(case.regularizer, case.example, {**LACKS.get(name, {}), **COMPILED})


def test_a_right_regularizer_passes() -> None:
    check_regularizer(Zeroing(), expected_failures=COMPILED)


@pytest.mark.parametrize("cls", BROKEN, ids=lambda cls: cls.__name__)
def test_a_broken_regularizer_fails_the_check_of_what_is_broken(cls: type[Regularizer]) -> None:
    failed = failing(cls())
    assert BROKEN[cls] in failed
    assert len(failed) == 1 or cls in SEVERAL, failed


def test_every_check_has_a_broken_regularizer() -> None:
    assert {name for name, _ in regularizer_checks(Zeroing())} - {*BROKEN.values()} == set(COMPILED) | {
        "can_be_pickled"
    }


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
