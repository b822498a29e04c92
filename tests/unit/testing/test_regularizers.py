"""`hookdrop.testing`: right regularizers and recipes pass all checks, and wrong ones fail the check of what is wrong."""

import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookdrop import DropPath, HeadDropout, NEFTune, Rate, Regularizer, ScaleActivationGrad, TokenDropout
from hookdrop.core.recipe import Recipe, RecipeSite
from hookdrop.testing import check_recipe, check_regularizer, recipe_checks, regularizer_checks
from tests.support.models import Small
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


def broken(name: str, **changes: Any) -> type[Zeroing]:
    """A class like `Zeroing` with other methods; pickle finds it in this module."""
    cls = type(name, (Zeroing,), {"__module__": __name__, **changes})
    globals()[name] = cls
    return cls


def not_copyable(one: Any, p: float = 0.3) -> None:
    Zeroing.__init__(one, p)
    one.lock = threading.Lock()


def other_mask_in_recompute(one: Any, x: Tensor, rate: Any) -> Tensor:
    if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
        torch.rand(1)
    return Zeroing.kept(one, x, rate)


def other_dtype(one: Any, x: Tensor, rate: Any) -> Tensor:
    return x * zero(one, torch.ones_like(x, dtype=torch.promote_types(x.dtype, torch.float32)), rate)


def stores_its_rate(one: Any, x: Tensor, rate: Any) -> Tensor:
    one.now = rate
    return x * one.kept(x, rate).to(x.dtype) / (1.0 - one.now)


def not_its_text(one: Any, p: float = 0.3, temperature: float = 1.0) -> None:
    Zeroing.__init__(one, p)
    one.temperature = 2.0 * temperature


def own_random_numbers(one: Any, x: Tensor, rate: Any) -> Tensor:
    return torch.rand(x.shape, generator=torch.Generator().manual_seed(random.getrandbits(32))) >= rate


def wrong_gradient(one: Any, x: Tensor, rate: Any) -> Tensor:
    return zero(one, x, rate) + (x - x.detach()) * one.kept(x, 1.0 - rate)


def half_in_its_text(one: Any, p: float = 0.3) -> None:
    Zeroing.__init__(one, p / 2)


def writes_to_weights(one: Any, x: Tensor, rate: Any) -> Tensor:
    for node, _ in x.grad_fn.next_functions if x.grad_fn else ():
        if isinstance(weight := getattr(node, "variable", None), torch.nn.Parameter):
            weight.data.mul_(0.5)
    return zero(one, x, rate)


def detaches_the_gradient(one: Any, x: Tensor, rate: Any) -> Tensor:
    if (y := zero(one, x, rate)).requires_grad:
        y.register_hook(Tensor.detach)
    return y


zero, kept = Zeroing.regularize, Zeroing.kept
MeanNotKept = broken("MeanNotKept", regularize=lambda one, x, rate: x * one.kept(x, rate).to(x.dtype))
MixesSamples = broken(
    "MixesSamples",
    independent_samples=True,
    regularize=lambda one, x, rate: zero(one, x, rate) + rate * (x - x.mean(0)),
)
Both = broken("Both", regularize=MeanNotKept.regularize, kept=lambda one, x, rate: kept(one, x, rate / 2))
OneAxis = broken("OneAxis", axes="C")
TOKENS = torch.randn(4, 12, 8, generator=torch.Generator().manual_seed(0))
BROKEN: dict[type[Zeroing], str] = {
    broken("ActiveInEval", forward=lambda one, x: x if one.p == 0.0 else one.regularize(x, one.p)): "eval_is_the_identity",
    broken("HalfTheRate", regularize=lambda one, x, rate: zero(one, x, rate / 2)): "p_means_p",
    broken("CoupledSamples", kept=lambda one, x, rate: kept(one, x[:1], rate).expand_as(x)): "samples_are_drawn_independently",
    broken("OtherMaskInRecompute", kept=other_mask_in_recompute): "checkpoint_replays_the_mask",
    broken("OtherDtype", regularize=other_dtype): "dtype_and_shape_are_kept",
    MeanNotKept: "mean_is_kept",
    broken("StoresItsRate", regularize=stores_its_rate): "threads_do_not_interfere",
    broken("NotItsText", __init__=not_its_text): "has_a_text_form",
    broken("ActiveAtRate0", forward=lambda one, x: one.regularize(x, one.p) if one.training else x): "neutral_rate_is_the_identity",
    broken("LosesTheFormat", regularize=lambda one, x, rate: zero(one, x, rate).contiguous()): "memory_format_is_kept",
    MixesSamples: "samples_do_not_mix",
    broken("DrawsInPlace", kept=lambda one, x, rate: torch.empty_like(x, dtype=torch.float32).uniform_() >= rate): "vmap_respects_its_randomness",
}  # fmt: skip
"""A class that breaks one property, and its check."""
SEVERAL: dict[type[Zeroing], str] = {
    broken("InPlace", regularize=lambda one, x, rate: x.mul_(zero(one, torch.ones_like(x), rate))): "input_is_not_modified",
    broken("NotCopyable", __init__=not_copyable): "can_be_deep_copied",
    broken("Nothing", regularize=lambda one, x, rate: x * 1.0): "training_has_an_effect",
    broken("NeedsASample", regularize=lambda one, x, rate: zero(one, x, rate) + 0.0 * x[0]): "empty_batch_passes",
    broken("OwnRandomNumbers", kept=own_random_numbers): "seed_determines_the_result",
    broken("ReadsItsRate", regularize=lambda one, x, rate: zero(one, x, one.p)): "rate_is_an_argument",
    broken("WrongGradient", regularize=wrong_gradient): "gradient_is_the_derivative",
    broken("OtherRateInItsText", __init__=half_in_its_text): "has_a_spec",
    broken("WritesToWeights", regularize=writes_to_weights): "removal_is_bit_equal",
    broken("DetachesTheGradient", regularize=detaches_the_gradient): "gradient_has_a_derivative",
}  # fmt: skip
"""Those that break several properties at once."""
COMPILED = {"compiled_code_equals_eager_code": "in tests/integration/compile"}
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


@pytest.mark.parametrize("one", [Zeroing(), torch.tanh], ids=["regularizer", "function"])
def test_a_right_regularizer_or_function_passes(one: Any) -> None:
    check_regularizer(one, expected_failures=COMPILED)


@pytest.mark.parametrize("cls", BROKEN, ids=lambda cls: cls.__name__)
def test_a_broken_regularizer_fails_the_check_of_what_is_broken(cls: type[Zeroing]) -> None:
    failed = []
    for name, check in regularizer_checks(cls(), TOKENS, COMPILED):
        try:
            check()
        except AssertionError:
            failed.append(name)
    assert failed == [BROKEN[cls]]


@pytest.mark.parametrize(("name", "fix"), [("p_means_p", 'kind="factor"'), ("memory_format_is_kept", "y.contiguous")])
def test_the_error_says_how_to_fix_a_rate_of_another_meaning_and_a_lost_memory_format(name: str, fix: str) -> None:
    lacking = next(cls for cls, check in BROKEN.items() if check == name)
    with pytest.raises(AssertionError, match=fix):
        dict(regularizer_checks(lacking(), TOKENS, COMPILED))[name]()


@pytest.mark.parametrize("cls", SEVERAL, ids=lambda cls: cls.__name__)
def test_a_regularizer_that_breaks_several_properties_fails_the_check_of_each(cls: type[Zeroing]) -> None:
    with pytest.raises(AssertionError, match=SEVERAL[cls]):
        dict(regularizer_checks(cls(), TOKENS))[SEVERAL[cls]]()


def test_every_check_has_a_broken_regularizer() -> None:
    tested = {*BROKEN.values(), *SEVERAL.values(), *COMPILED, "can_be_pickled"}
    assert {name for name, _ in regularizer_checks(Zeroing())} == tested


def test_the_error_has_all_failures() -> None:
    with pytest.raises(AssertionError, match=r"2 of \d+ checks failed.(.|\n)*p_means_p(.|\n)*mean_is_kept: The mean"):
        check_regularizer(Both(), TOKENS, COMPILED)


def test_an_unknown_check_or_shape_raises() -> None:
    with pytest.raises(ValueError, match="no check 'p_mean_p'"):
        regularizer_checks(Zeroing(), expected_failures={"p_mean_p": ""})
    with pytest.raises(ValueError, match="example=x"):
        regularizer_checks(OneAxis())
    assert dict(regularizer_checks(OneAxis(), torch.randn(6)))["p_means_p"]() is None


def test_random_states_and_modes_are_restored() -> None:
    one, before = Zeroing().eval(), torch.get_rng_state()
    check_regularizer(one, TOKENS, COMPILED)
    assert torch.equal(torch.get_rng_state(), before)
    assert not one.training


# --- recipes; tests/integration/models/test_stochastic_depth.py checks hookdrop's

IMAGES = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class branches(Recipe):
    """A right one, which the others change in one place."""

    p: float = 0.5

    def regularizer(self) -> Regularizer:
        return DropPath(self.p)

    def sites(self, model: nn.Module, survey: Any) -> Sequence[RecipeSite]:
        return [RecipeSite(branch.end, self.regularizer(), group=branch.layer) for branch in survey.branches]


def broken_recipe(name: str, **changes: Any) -> type[branches]:
    """A recipe like `branches` with other methods; pickle finds it in this module."""
    decorated = dataclass(frozen=True, eq="__eq__" not in changes)
    cls = decorated(type(name, (branches,), {"__module__": __name__, **changes}))
    globals()[name] = cls
    return cls


CALLS: list[int] = []


def another_rate_each_time(one: Any) -> Regularizer:
    CALLS.append(1)
    return DropPath(one.p / len(CALLS))


def writes_to_a_bias(one: Any, model: Any, survey: Any) -> Sequence[RecipeSite]:
    model.fc.bias.data.add_(1.0)
    return sites(one, model, survey)


def changes_the_momentum(one: Any, model: Any, survey: Any) -> Sequence[RecipeSite]:
    model.layer1[0].bn1.momentum *= 0.5
    return sites(one, model, survey)


def group_inside_the_branch(one: Any, model: Any, survey: Any) -> Sequence[RecipeSite]:
    return [RecipeSite(branch.end, one.regularizer(), group=f"{branch.layer}.conv2") for branch in survey.branches]


def never_called(one: Any, model: Any, survey: Any) -> Sequence[RecipeSite]:
    return [*sites(one, model, survey), RecipeSite("unused", DropPath(one.p))]


sites = branches.sites
BROKEN_RECIPES: dict[type[branches], str] = {
    broken_recipe("never_equal", __eq__=lambda one, other: one is other, __hash__=object.__hash__): "has_a_text_form",
    broken_recipe("another_rate", regularizer=another_rate_each_time): "has_a_spec",
    broken_recipe("by_chance", sites=lambda *all: sites(*all)[int(torch.rand(()) < 0.5) :]): "planning_changes_nothing",
    broken_recipe("with_a_layer_that_is_never_called", sites=never_called): "sites_are_called",
    broken_recipe("writing_to_weights", sites=writes_to_a_bias): "eval_is_bit_equal",
    broken_recipe("active_at_rate_0", regularizer=lambda one: ScaleActivationGrad(0.5)): "rate_0_is_bit_equal",
    broken_recipe("changing_the_momentum", sites=changes_the_momentum): "removal_is_bit_equal",
    broken_recipe("no_effect", regularizer=lambda one: DropPath(0.0)): "training_has_an_effect",
    broken_recipe("mixing_samples", regularizer=lambda one: MixesSamples(one.p)): "samples_stay_apart",
    broken_recipe("group", sites=group_inside_the_branch): "skips_remain_if_all_branches_are_dropped",
}


def model() -> nn.Module:
    torch.manual_seed(0)
    small = Small()
    small.unused = nn.Linear(2, 2)
    return small


def test_a_right_recipe_passes() -> None:
    check_recipe(branches(), model(), IMAGES)


@pytest.mark.parametrize("cls", BROKEN_RECIPES, ids=lambda cls: cls.__name__)
def test_a_broken_recipe_fails_the_check_of_what_is_broken(cls: type[branches]) -> None:
    with pytest.raises(AssertionError, match=BROKEN_RECIPES[cls]):
        dict(recipe_checks(cls(), model(), IMAGES))[BROKEN_RECIPES[cls]]()


def test_every_check_has_a_broken_recipe() -> None:
    assert {name for name, _ in recipe_checks(branches(), model(), IMAGES)} == {*BROKEN_RECIPES.values()}
