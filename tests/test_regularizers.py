"""The regularizers as layers: what they drop, what they keep, what they refuse."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

import hookdrop
from hookdrop import (
    AlphaDropout,
    ClampActivationGrad,
    ClipActivationGrad,
    Cutout,
    DropBlock,
    Dropout,
    Dropout1d,
    Dropout2d,
    Dropout3d,
    DropPath,
    FeatureAlphaDropout,
    GaussianDropout,
    GaussianNoise,
    LockedDropout,
    MixStyle,
    NoiseActivationGrad,
    Regularizer,
    ScaleActivationGrad,
    ShapeError,
    TokenDropout,
    functional,
    parse,
)
from hookdrop.regularizers import REGULARIZERS, as_regularizer

TOKENS = (8, 6, 5)
SHAPES = {Dropout1d: TOKENS, Dropout3d: (8, 6, 3, 4, 5), TokenDropout: TOKENS, LockedDropout: TOKENS}
IN_BACKWARD = [
    ClipActivationGrad(max_norm=0.5),
    ClipActivationGrad(max_value=0.5, per_sample=False),
    ClipActivationGrad(0.5, per_sample=True),
    ClampActivationGrad(-0.5, 0.25),
    ClampActivationGrad(max=0.25),
    ScaleActivationGrad(-1),
    ScaleActivationGrad(0),
    NoiseActivationGrad(0.3),
]
WITH_SETTINGS = [DropBlock(0.3, 3), DropPath(0.3, "batch"), Cutout(2), MixStyle(0.5)]
OTHERS = [cls for cls in REGULARIZERS.values() if cls not in (DropBlock, Cutout, MixStyle, *map(type, IN_BACKWARD))]
ALL = [*(cls(0.3) for cls in OTHERS), *WITH_SETTINGS]


def example(regularizer: Regularizer, **kwargs: object) -> torch.Tensor:
    return torch.randn(SHAPES.get(type(regularizer), (8, 6, 5, 5)), **kwargs)


@pytest.mark.parametrize("regularizer", [*ALL, *IN_BACKWARD], ids=repr)
class TestEvery:
    def test_works_in_training_mode_only(self, regularizer: Regularizer) -> None:
        x = example(regularizer).requires_grad_()
        assert not any(regularizer(x) is x for _ in range(20))
        assert regularizer.eval()(x) is x
        regularizer.train()

    def test_the_neutral_rate_returns_the_input_itself(self, regularizer: Regularizer) -> None:
        x, before = example(regularizer).requires_grad_(), regularizer.rate
        if before is None:
            return
        regularizer.set_rate(regularizer.neutral)
        assert regularizer(x) is x
        assert regularizer.regularize(x) is x
        regularizer.set_rate(before)

    def test_writes_nothing_in_place(self, regularizer: Regularizer) -> None:
        x = example(regularizer)
        before = x.clone()
        regularizer(x)
        assert torch.equal(x, before)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
    def test_keeps_dtype_and_shape(self, regularizer: Regularizer, dtype: torch.dtype) -> None:
        x = example(regularizer, dtype=dtype)
        assert regularizer(x).dtype == dtype
        assert regularizer(x).shape == x.shape

    def test_keeps_channels_last(self, regularizer: Regularizer) -> None:
        x = example(regularizer)
        if x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
            assert regularizer(x).is_contiguous(memory_format=torch.channels_last)

    def test_gradient_reaches_the_input(self, regularizer: Regularizer) -> None:
        x = example(regularizer).requires_grad_()
        regularizer(x).sum().backward()
        assert x.grad is not None

    def test_global_seed_fixes_what_is_drawn(self, regularizer: Regularizer) -> None:
        x = example(regularizer).requires_grad_()

        def drawn() -> list[torch.Tensor]:
            torch.manual_seed(5)
            y = regularizer(x)
            return [y, torch.autograd.grad(y.square().sum(), x)[0]]

        assert all(map(torch.equal, drawn(), drawn()))

    def test_parse_reads_its_repr(self, regularizer: Regularizer) -> None:
        assert repr(parse(repr(regularizer))) == repr(regularizer)
        assert parse(repr(regularizer)).settings() == regularizer.settings()

    def test_does_not_refuse_a_missing_setting(self, regularizer: Regularizer) -> None:
        assert type(regularizer)(**regularizer.settings()).settings() == regularizer.settings()


@pytest.mark.parametrize("regularizer", ALL, ids=repr)
class TestThoseThatDraw:
    def test_changes_something(self, regularizer: Regularizer) -> None:
        x = example(regularizer)
        assert not all(torch.equal(regularizer(x), x) for _ in range(20))

    def test_a_fully_dropped_graph_stays_connected(self, regularizer: Regularizer) -> None:
        if not regularizer.drops or isinstance(regularizer, Cutout | TokenDropout):
            return  # something is always left
        before = regularizer.rate
        regularizer.set_rate(1.0)
        x = example(regularizer).requires_grad_()
        y = regularizer(x)
        y.sum().backward()
        regularizer.set_rate(before)
        assert torch.equal(x.grad, torch.zeros_like(x))
        assert y.isfinite().all()

    def test_the_mean_is_kept(self, regularizer: Regularizer) -> None:
        """Over 2,000 draws, within 5 standard errors of the mean of |x| + 1."""
        if isinstance(regularizer, AlphaDropout | FeatureAlphaDropout | Cutout):
            return  # the first keep mean 0 and variance 1, tested below; Cutout's paper does not scale
        x = example(regularizer).abs() + 1
        ratios = torch.stack([regularizer(x).mean() / x.mean() for _ in range(2000)])
        assert abs(ratios.mean() - 1) < 5 * ratios.std() / math.sqrt(2000) + 1e-6


UNITS = {
    Dropout: ((100, 10_000), None),
    Dropout1d: ((1000, 1000, 2), (2,)),
    Dropout2d: ((1000, 1000, 1, 2), (2, 3)),
    Dropout3d: ((1000, 1000, 1, 1, 2), (2, 3, 4)),
    DropPath: ((1_000_000, 2), (1,)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("p", [0.003, 0.1, 0.5])
@pytest.mark.parametrize("cls", UNITS, ids=lambda cls: cls.__name__)
def test_realised_fraction_is_p(cls: type[Regularizer], p: float, dtype: torch.dtype) -> None:
    """Within 4 standard errors over a million independent draws; whole units are dropped."""
    shape, inside = UNITS[cls]
    zero = cls(p)(torch.ones(shape, dtype=dtype)) == 0
    units = zero if inside is None else zero.all(inside)
    assert abs(units.double().mean() - p) < 4 * math.sqrt(p * (1 - p) / 1e6)
    assert inside is None or torch.equal(zero.any(inside), units)


def test_bfloat16_keeps_the_mean_where_torchs_scale_is_rounded() -> None:
    """1 / (1 - .003) rounds to 1 in bfloat16: torch loses .3 % of the mean there, we the rounding of the results."""
    x = (1 + torch.rand(1_000_000)).bfloat16()
    ours, theirs = (y.double().mean() / x.double().mean() for y in (Dropout(0.003)(x), nn.functional.dropout(x, 0.003)))
    assert theirs == pytest.approx(0.997, abs=5e-4)
    assert ours == pytest.approx(1, abs=1e-3)


def test_drop_path_by_batch_drops_all_or_nothing() -> None:
    drops = [(DropPath(0.5, mode="batch")(torch.ones(8, 3)) == 0).float().mean().item() for _ in range(200)]
    assert set(drops) == {0.0, 1.0}
    assert 60 < sum(drops) < 140


def test_drop_path_agrees_with_timms_under_one_seed() -> None:
    from timm.layers import DropPath as Timm

    x = torch.randn(64, 3, 4)
    torch.manual_seed(1)
    theirs = Timm(0.3)(x)
    torch.manual_seed(1)
    torch.testing.assert_close(DropPath(0.3)(x), theirs)


@pytest.mark.parametrize(
    ("ours", "theirs", "shape"),
    [
        (Dropout(0.3), nn.Dropout(0.3), (64, 5)),
        (Dropout1d(0.3), nn.Dropout1d(0.3), (64, 5, 6)),
        (Dropout2d(0.3), nn.Dropout2d(0.3), (64, 5, 6, 6)),
        (Dropout3d(0.3), nn.Dropout3d(0.3), (64, 5, 2, 3, 3)),
        (AlphaDropout(0.3), nn.AlphaDropout(0.3), (64, 5)),
        (FeatureAlphaDropout(0.3), nn.FeatureAlphaDropout(0.3), (64, 5, 6)),
    ],
    ids=lambda value: repr(value),
)
def test_agrees_with_torchs_own_under_one_seed(ours: Regularizer, theirs: nn.Module, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    torch.manual_seed(1)
    expected = theirs(x)
    torch.manual_seed(1)
    torch.testing.assert_close(ours(x), expected)


def test_alpha_dropout_keeps_mean_and_variance() -> None:
    x = torch.randn(1_000_000)
    y = AlphaDropout(0.2)(x)
    assert y.mean().abs() < 0.01
    assert y.var() == pytest.approx(1, abs=0.01)


def test_gaussian_dropout_has_dropouts_variance() -> None:
    y = GaussianDropout(0.2)(torch.ones(1_000_000))
    assert y.var() == pytest.approx(0.2 / 0.8, rel=0.01)


def test_gaussian_noise_has_its_std() -> None:
    y = GaussianNoise(0.7)(torch.full((1_000_000,), 3.0))
    assert y.std() == pytest.approx(0.7, rel=0.01)


@pytest.mark.parametrize(
    ("regularizer", "shape", "instead"),
    [
        (Dropout2d(0.1), (8, 197, 384), "Dropout1d"),
        (Dropout1d(0.1), (8, 6, 5, 5), "Dropout2d"),
        (Dropout3d(0.1), (8, 6, 5, 5), "Dropout2d"),
        (FeatureAlphaDropout(0.1), (8,), "Dropout"),
    ],
    ids=lambda value: repr(value),
)
def test_channels_where_there_are_none_are_refused(
    regularizer: Regularizer, shape: tuple[int, ...], instead: str
) -> None:
    with pytest.raises(ShapeError, match=rf"{instead}\(p=...\) there"):
        regularizer(torch.ones(shape))


def test_drop_path_of_a_0d_tensor_is_refused() -> None:
    with pytest.raises(ShapeError, match="0-d"):
        DropPath(0.1)(torch.tensor(1.0))


ZEROING = [cls for cls in REGULARIZERS.values() if "keep_prob" in inspect.signature(cls).parameters]


@pytest.mark.parametrize("cls", ZEROING, ids=lambda cls: cls.__name__)
class TestBadRates:
    @pytest.mark.parametrize("p", [-0.1, 1.5, float("nan"), float("inf")])
    def test_out_of_range(self, cls: type[Regularizer], p: float) -> None:
        with pytest.raises(ValueError, match=rf"{cls.__name__}: p must"):
            cls(p)

    @pytest.mark.parametrize("p", ["0.1", True, [0.1], None.__class__])
    def test_not_a_number(self, cls: type[Regularizer], p: object) -> None:
        with pytest.raises(TypeError, match=rf"{cls.__name__}: p must be"):
            cls(p)

    def test_a_percentage_is_recognised(self, cls: type[Regularizer]) -> None:
        with pytest.raises(ValueError, match=r"a percentage\? write p=0.1"):
            cls(10)

    def test_p_and_keep_prob_together(self, cls: type[Regularizer]) -> None:
        with pytest.raises(ValueError, match="give p or keep_prob, not both"):
            cls(p=0.1, keep_prob=0.9)

    def test_keep_prob_instead(self, cls: type[Regularizer]) -> None:
        assert cls(keep_prob=0.9).p == 0.1


@pytest.mark.parametrize("cls", [Dropout, Dropout2d, DropPath, GaussianDropout], ids=lambda cls: cls.__name__)
def test_a_missing_rate_says_what_to_write(cls: type[Regularizer]) -> None:
    with pytest.raises(TypeError, match=rf"as in {cls.__name__}\(p=0.1\)"):
        cls()


def test_gaussian_dropout_excludes_1() -> None:
    with pytest.raises(ValueError, match=r"must lie in \[0, 1\), got 1"):
        GaussianDropout(1.0)


def test_noise_may_be_large_and_not_negative() -> None:
    assert GaussianNoise(12.5).std == 12.5
    with pytest.raises(ValueError, match=r"std must lie in \[0, inf\)"):
        GaussianNoise(-1)


@pytest.mark.parametrize("number", [torch.tensor(0.25), torch.tensor([0.25]), 1 / 4, __import__("numpy").float32(0.25)])
def test_scalars_of_all_kinds_are_rates(number: object) -> None:
    assert Dropout(number).p == 0.25


def test_a_tensor_of_two_is_no_rate() -> None:
    with pytest.raises(TypeError, match="must be"):
        Dropout(torch.tensor([0.1, 0.2]))


@pytest.mark.parametrize(
    ("block", "error"),
    [(0, ValueError), (-3, ValueError), ("7", TypeError), (7.0, TypeError), (True, TypeError), ((), ValueError),
     ((3, 0), ValueError), (None, TypeError)],
)  # fmt: skip
def test_bad_block_sizes(block: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="DropBlock: block_size must"):
        DropBlock(0.1, block)


@pytest.mark.parametrize(
    "settings", [{"normalize": "mean"}, {"gamma": "approx"}, {"per_channel": "yes"}, {"normalize": True}]
)
def test_bad_choices_list_the_good_ones(settings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"must be one of"):
        DropBlock(0.1, 7, **settings)


def test_drop_path_modes() -> None:
    with pytest.raises(ValueError, match="'row', 'batch', got 'col'"):
        DropPath(0.1, "col")


SHAPE_OF = {
    "dropout1d": (2, 3, 4),
    "dropout3d": (2, 3, 4, 4, 4),
    "token_dropout": (2, 3, 4),
    "locked_dropout": (2, 3, 4),
}
ONES = {name: torch.ones(SHAPE_OF.get(name, (2, 3, 4, 4)), requires_grad=True) for name in functional.__all__}
BAD = {
    "cutout": ((3, -0.5), "p must lie in"),
    "clip_activation_grad": ((-0.5,), "max_norm must be above 0, got -0.5"),
    "clamp_activation_grad": ((0.5, -0.5), "min must not be above max, got min=0.5 and max=-0.5"),
    "scale_activation_grad": ((math.inf,), "factor must be finite"),
}


@pytest.mark.parametrize("name", functional.__all__)
def test_functions_check_their_rate_too(name: str) -> None:
    args, says = BAD.get(name, ((-0.5,), f"{name}: .* must lie in"))
    with pytest.raises(ValueError, match=says):
        getattr(functional, name)(ONES[name], *args)


@pytest.mark.parametrize("name", functional.__all__)
def test_functions_return_the_input_when_not_training(name: str) -> None:
    args = (3, 0.5) if name == "cutout" else (0.5,)
    assert getattr(functional, name)(ONES[name], *args, training=False) is ONES[name]
    assert getattr(functional, name)(ONES[name], *args) is not ONES[name]


def test_tokens_given_to_dropout2d_are_told_apart_from_sequences() -> None:
    with pytest.raises(
        ShapeError, match=r"for tokens \(N, L, C\) use TokenDropout\(p=...\), for a sequence \(N, C, L\)"
    ):
        Dropout2d(0.1)(torch.ones(8, 197, 384))


class TestParse:
    def test_reads_literal_settings(self) -> None:
        made = parse(" DropBlock(0.2, block_size=(3, 5), per_channel=False, normalize=None) ")
        assert made.settings() == {
            "p": 0.2, "block_size": (3, 5), "per_channel": False, "gamma": "exact", "normalize": None,
            "channel_dim": None,
        }  # fmt: skip

    @pytest.mark.parametrize(
        "text",
        [
            "__import__('os').system('true')",
            "DropBlock(p=__import__('os').getpid())",
            "DropBlock(p=1-0.9 if True else 0)",
            "DropBlock(**{'p': 0.1})",
            "DropBlock(p=0.1); print(1)",
            "(lambda: DropBlock(0.1))()",
            "hookdrop.DropBlock(p=0.1)",
            "DropBlock(p=[x for x in (1,)])",
            "DropBlock(p=0.1",
            "",
            "0.1",
            "\x00",
            "Dropout(p=" + "-" * 5000 + "1)",
        ],
    )
    def test_runs_no_code(self, text: str) -> None:
        with pytest.raises(ValueError, match="parse: "):
            parse(text)

    def test_an_unknown_name_gets_near_ones(self) -> None:
        with pytest.raises(ValueError, match=r"'Dropblok' is not a regularizer(.|\n)*did you mean: DropBlock"):
            parse("Dropblok(p=0.1)")

    def test_a_bare_name_is_told_its_settings(self) -> None:
        with pytest.raises(
            ValueError,
            match=r"has no settings: write 'DropPath\(...\)'.\n  it takes: DropPath\(p=None, mode='row', \*, keep_prob=None\)$",
        ):
            parse("DropPath")

    def test_an_unknown_setting_is_told_the_known_ones(self) -> None:
        with pytest.raises(TypeError, match=r"blocksize(.|\n)*it takes: DropBlock\(p"):
            parse("DropBlock(p=0.1, blocksize=7)")

    def test_a_bad_rate_is_told_as_by_the_class(self) -> None:
        with pytest.raises(ValueError, match="p must lie in"):
            parse("DropBlock(p=7)")

    def test_not_a_text(self) -> None:
        with pytest.raises(TypeError, match="must be a str"):
            parse(Dropout(0.1))


def test_every_regularizer_has_its_paper_in_its_docstring() -> None:
    for name, cls in REGULARIZERS.items():
        text = "".join(base.__doc__ or "" for base in cls.__mro__ if base.__module__.startswith("hookdrop.regul"))
        assert "arXiv" in text or "Srivastava" in text or "Bishop" in text, name


def test_all_names_are_there() -> None:
    assert all(hasattr(hookdrop, name) for name in hookdrop.__all__)
    assert sorted(hookdrop.__all__) == hookdrop.__all__
    assert set(REGULARIZERS) <= set(hookdrop.__all__)


# --- the rate as an argument


class OnlyRegularize(Regularizer):
    """Reads its rate from its attribute, and counts its calls."""

    rate_name = "amount"

    def __init__(self, amount: float = 0.1) -> None:
        super().__init__()
        self.amount = self.valid_rate(amount)
        self.calls = 0

    def regularize(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * (1 - self.amount)


class Counting(nn.Module):
    """Another library's module that has state of its own."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p, self.calls = p, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * (1 - self.p)


def halved(x: torch.Tensor) -> torch.Tensor:
    return x / 2


class TestTheRateIsAnArgument:
    @pytest.mark.parametrize("regularizer", [*ALL, *IN_BACKWARD], ids=repr)
    def test_it_draws_as_a_regularizer_that_was_set_to_it(self, regularizer: Regularizer) -> None:
        x = example(regularizer).requires_grad_()
        before = regularizer.rate
        other = None if before is None else before / 2

        def results(call: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
            torch.manual_seed(6)
            y = call(x)
            return [y, torch.autograd.grad(y.square().sum(), x)[0]]

        found = results(lambda x: regularizer.regularize_at(x, other))
        assert regularizer.rate == before
        twin = copy.deepcopy(regularizer)
        if other is not None:
            twin.set_rate(other)
        assert all(map(torch.equal, found, results(twin.regularize)))

    def test_a_class_with_regularize_alone_runs_itself_at_its_own_rate(self) -> None:
        layer, x = OnlyRegularize(0.5), torch.ones(2)
        assert layer.regularize_at(x, 0.5).tolist() == [0.5, 0.5]
        assert layer.calls == 1

    def test_at_another_rate_a_copy_runs_and_nothing_shared_is_written(self) -> None:
        layer, x = OnlyRegularize(0.5), torch.ones(2)
        for rate in (0.25, torch.tensor(0.25, dtype=torch.float64)):
            assert layer.regularize_at(x, rate).tolist() == [0.75, 0.75]
        assert (layer.amount, layer.calls) == (0.5, 0)

    def test_another_librarys_module_and_a_function(self) -> None:
        foreign, x = as_regularizer(Counting(0.5)), torch.ones(2)
        assert foreign.regularize_at(x, 0.5).tolist() == [0.5, 0.5]
        assert foreign.module.calls == 1
        assert foreign.regularize_at(x, 0.25).tolist() == [0.75, 0.75]
        assert (foreign.rate, foreign.module.calls) == (0.5, 1)
        assert as_regularizer(halved).regularize_at(x, None).tolist() == [0.5, 0.5]

    def test_a_class_that_changes_regularize_alone_means_that(self) -> None:
        """It inherits a `regularize_at` that does something else, which `super().regularize` still reaches."""

        class Negated(Dropout):
            def regularize(self, x: torch.Tensor) -> torch.Tensor:
                return -super().regularize(x)

        class Again(Negated):
            pass

        for cls in (Negated, Again):
            assert set(cls(0.5).regularize_at(torch.ones(100), 0.5).tolist()) == {0.0, -2.0}
            assert set(cls(0.5).regularize_at(torch.ones(100), 0.75).tolist()) == {0.0, -4.0}
            assert "as a Python float" in cls(0.5).graph_break

    def test_a_class_with_neither_is_told(self) -> None:
        class Nothing(Regularizer):
            rate_name = None

        with pytest.raises(
            NotImplementedError, match=r"Nothing must define regularize_at\(self, x, rate\) or regularize"
        ):
            Nothing()(torch.ones(2))


# --- classes of a user's own


@pytest.mark.parametrize("name", ["rate", "settings", "title", "drops", "check", "graph_break", "max_rate", "forward"])
def test_a_rate_name_that_every_regularizer_has_is_refused_where_the_class_is_defined(name: str) -> None:
    with pytest.raises(TypeError, match=f"Own: rate_name is '{name}', which means something else(.|\n)*choose another"):
        type("Own", (Regularizer,), {"rate_name": name})


@pytest.mark.parametrize("name", ["settings", "title", "drops", "check", "rate_name"])
def test_so_is_a_setting(name: str) -> None:
    scope: dict[str, type] = {}
    with pytest.raises(TypeError, match=f"Own: an argument of __init__ is '{name}', which means something else"):
        exec(f"class Own(Base):\n  def __init__(self, p, {name}=1): pass", {"Base": Regularizer}, scope)


def test_a_rate_with_a_property_of_the_class_is_not() -> None:
    class Own(Regularizer):
        rate_name = "rate"

        def __init__(self, rate: float = 0.5) -> None:
            super().__init__()
            self.rate = rate

        rate = property(lambda self: self.kept, lambda self, value: setattr(self, "kept", value))

        def regularize(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.rate

    layer = Own(0.25)
    layer.set_rate(0.5)
    assert layer(torch.ones(1)).item() == 0.5


class Forgetful(Regularizer):
    """Does not keep its second setting."""

    def __init__(self, p: float = 0.1, scale: float = 2.0) -> None:
        super().__init__()
        self.p = self.valid_rate(p)

    def regularize(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1.0


def test_what_is_kept_is_printed_and_the_rest_is_not() -> None:
    assert repr(Forgetful(0.2)) == "Forgetful(p=0.2)"
    model = nn.Sequential(nn.Identity())
    assert "Forgetful(p=0.2)" in str(hookdrop.plan(model, Forgetful(0.2), layers="0"))
    with pytest.raises(
        hookdrop.StateError, match="does not keep its settings: 'Forgetful' object has no attribute 'scale'"
    ):
        _ = hookdrop.inject(model, Forgetful(0.2), layers="0").config


@pytest.mark.parametrize(("sizes", "same"), [((7,), "Dropout1d"), ((7, 7), "Dropout2d"), ((3, 7, 7), "Dropout3d")])
def test_a_block_over_the_whole_map_is_dropout_of_its_rank(sizes: tuple[int, ...], same: str) -> None:
    (doubt,) = DropBlock(0.1, 7, channel_dim=1).doubts((2, 4, *sizes))
    assert f"blocks of {'x'.join(map(str, sizes))} there, which is {same}." in doubt
    (doubt,) = DropBlock(0.1, 7, channel_dim=1, per_channel=False).doubts((2, 4, *sizes))
    assert "which is DropPath." in doubt
