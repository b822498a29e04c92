"""The dropout that models come with: found, changed, given back; and residual dropout for those that have none."""

from __future__ import annotations

import copy
import linecache
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import dropout as forget

import hookdrop
from hookdrop import HookdropWarning, LayerError
from hookdrop.recipes import report_dropout, set_dropout
from tests.support.dropout_models import (
    TOKENS,
    AnyName,
    Base,
    Heir,
    Inherited,
    NotSelf,
    OfAModule,
    TwoRates,
    bert,
    gpt2,
    llama,
    torchvision,
    transformers,
)

timm = pytest.importorskip("timm")


class Functional(nn.Module):
    """Dropout in every way but as a module."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.dropout_rate = 0.2
        self.dropped_so_far = 0.5  # a number with "drop" in its name that no forward reads

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.linear(x), self.dropout_rate, self.training)
        return self.head(F.dropout(x, 0.25, training=self.training))

    def head(self, x: Tensor) -> Tensor:
        return F.dropout(x, p=self.dropout_rate if self.training else 0.0)


RATE = 0.4


class InheritedTwice(Inherited):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)

    def head(self, x: Tensor) -> Tensor:
        return Inherited.forward(self, x)


class TwoDropouts(TwoRates):
    """By its name it is dropout."""


def bart() -> nn.Module:
    size = {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "encoder_layers": 1, "decoder_layers": 1}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    return transformers.BartModel(transformers.BartConfig(**size, **heads, vocab_size=50, activation_dropout=0.1))


def resnet(**rates: float) -> nn.Module:
    return timm.create_model("resnet18", zero_init_last=False, num_classes=5, **rates)


def vit() -> nn.Module:
    rates = {"proj_drop_rate": 0.1, "attn_drop_rate": 0.1, "drop_path_rate": 0.2, "drop_rate": 0.1}
    return timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=5, **rates)


IMAGE = (torch.randn(2, 3, 32, 32),)


ROWS = (torch.randn(8, 16),)


MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "a Dropout whose forward is its parent's": (lambda: nn.Sequential(Inherited(0.3)), ROWS),
    "a Dropout two classes away": (lambda: InheritedTwice(0.3), ROWS),
    "a method of a parent": (Heir, ROWS),
    "rates of any name": (AnyName, ROWS),
    "the rate of a submodule": (OfAModule, (torch.randn(2, 4, 16),)),
    "a forward without self": (NotSelf, ROWS),
    "two rates in one dropout": (TwoDropouts, ROWS),
    "a stack of LSTMs": (lambda: nn.LSTM(16, 16, 2, dropout=0.3), (torch.randn(4, 2, 16),)),
    "a transformer layer": (lambda: nn.TransformerEncoderLayer(16, 2, 16, 0.2), (torch.randn(2, 4, 16),)),
    "attention": (lambda: nn.MultiheadAttention(16, 2, dropout=0.3), (torch.randn(4, 2, 16),) * 3),
    "timm's ViT": (vit, IMAGE),
    "timm's ResNet": (
        lambda: resnet(drop_rate=0.2, drop_path_rate=0.2, drop_block_rate=0.1),
        (torch.randn(2, 3, 96, 96),),
    ),
    "torchvision's ConvNeXt": (lambda: torchvision.models.convnext_tiny(stochastic_depth_prob=0.3), IMAGE),
    "torchvision's ViT": (
        lambda: torchvision.models.VisionTransformer(32, 8, 2, 2, 16, 32, 0.1, 0.1).encoder,
        (torch.randn(2, 17, 16),),
    ),
    "BERT": (bert, TOKENS),
    "GPT-2": (gpt2, TOKENS),
    "BART": (bart, TOKENS),
    "LLaMA": (lambda: llama(attention_dropout=0.3), TOKENS),
}


def outputs(model: nn.Module, given: Any, seed: int) -> list[Tensor]:
    """What a forward in training mode puts out, batch norms as in eval mode."""
    model.train()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        out = model(**given) if isinstance(given, dict) else model(*given)
    return hookdrop.utils.tensor_tree.tensors(out) if not isinstance(out, Tensor) else [out]


def alike(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


@pytest.mark.parametrize("name", MODELS)
class TestEveryModel:
    @pytest.fixture
    def model(self, name: str) -> nn.Module:
        torch.manual_seed(0)
        return MODELS[name][0]()

    @pytest.fixture
    def given(self, name: str) -> Any:
        return MODELS[name][1]

    def test_all_of_it_is_found(self, model: nn.Module, given: Any) -> None:
        """With every rate that is reported at 0, nothing random is left."""
        assert not alike(outputs(model, given, 0), outputs(model, given, 1))
        with set_dropout(model, 0.0):
            assert alike(outputs(model, given, 0), outputs(model, given, 1))

    def test_each_rate_is_read_by_the_forward(self, model: nn.Module, given: Any) -> None:
        """With all others at 0, each one alone makes the outputs random."""
        for rate in report_dropout(model).rates:
            if "layerdrop" in rate.name:
                continue  # whole layers, of which there is one
            with (
                set_dropout(model, 0.0),
                set_dropout(model, lambda name, p, rate=rate: 0.6 if name == rate.name else p),
            ):
                assert any(not alike(outputs(model, given, 0), outputs(model, given, seed)) for seed in (1, 2, 3)), rate

    def test_is_given_back(self, model: nn.Module, given: Any) -> None:
        before = outputs(model, given, 0)
        rates = [rate.value for rate in report_dropout(model).rates]
        change = set_dropout(model, 0.9)
        assert not alike(outputs(model, given, 0), before)
        change.remove()
        assert [rate.value for rate in report_dropout(model).rates] == rates
        assert alike(outputs(model, given, 0), before)


class TestTheReport:
    def test_names_modules_and_attributes_with_their_rates(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.LSTM(4, 4, 2, dropout=0.2), nn.AlphaDropout(0.3))
        assert [(rate.name, rate.value) for rate in report_dropout(model).rates] == [
            ("1", 0.1),
            ("2.dropout", 0.2),
            ("3", 0.3),
        ]

    def test_finds_functional_dropout_whose_rate_is_an_attribute(self) -> None:
        assert [rate.name for rate in report_dropout(Functional()).rates] == ["dropout_rate"]

    def test_says_which_functional_dropout_is_out_of_reach(self) -> None:
        report = report_dropout(nn.Sequential(Functional(), Functional()))
        assert report.out_of_reach == {
            "Functional.forward calls F.dropout(x, 0.25, training=self.training)": ["0", "1"]
        }
        assert "out of reach: Functional.forward calls F.dropout" in str(report)

    def test_finds_hookdrops_own_regularizers_as_layers(self) -> None:
        model = nn.Sequential(nn.Conv2d(3, 3, 3), hookdrop.DropBlock(0.2, 3), hookdrop.GaussianNoise(0.1))
        assert [(rate.name, rate.value) for rate in report_dropout(model).rates] == [("1", 0.2)]
        with set_dropout(model, 0.5):
            assert model[1].p == 0.5
        assert model[1].p == 0.2

    def test_of_a_model_without_any_says_so(self) -> None:
        report = report_dropout(nn.Linear(2, 2))
        assert (list(report.rates), report.out_of_reach) == ([], {})
        assert str(report).startswith("0 dropout rates in Linear")

    def test_lists_a_shared_module_once(self) -> None:
        shared = nn.Dropout(0.1)
        assert [rate.name for rate in report_dropout(nn.Sequential(shared, nn.ReLU(), shared)).rates] == ["0"]

    def test_looks_through_wrappers(self) -> None:
        model = nn.DataParallel(nn.Sequential(nn.Dropout(0.1)))
        assert [rate.name for rate in report_dropout(model).rates] == ["0"]

    def test_is_a_table_in_a_notebook(self) -> None:
        assert "<td>0.1</td>" in report_dropout(nn.Sequential(nn.Dropout(0.1)))._repr_html_()


def undecorated(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator without functools.wraps."""

    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


class Holder(nn.Module):
    """What the models below read their rates from."""

    rates: Any

    def __init__(self, **kept: Any) -> None:
        super().__init__()
        for name, value in kept.items():
            setattr(self, name, value)


class OfSettings(Holder):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.cfg.dropout, self.training)


class OfSettingsByALocalName(Holder):
    def forward(self, x: Tensor) -> Tensor:
        args = self.args
        return F.dropout(x, args.p if self.training else 0.0)


class OfADictionary(Holder):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.rates["first"], self.training)


class OfAModuleThatDoesNotDrop(Holder):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.place.p, self.training)


class OfAConstant(Holder):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, RATE, self.training)


class OfAClosure(Holder):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, OfAClosure.RATE, self.training)

    RATE = 0.3


class OfArithmetic(Holder):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 1 - self.keep, self.training)


class OfADefault(Holder):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)

    def head(self, x: Tensor, p: float = 0.3) -> Tensor:
        return F.dropout(x, p, self.training)


class OfALoop(Holder):
    def forward(self, x: Tensor) -> Tensor:
        for p in self.rates:
            x = F.dropout(x, p, self.training)
        return x


class MadeInForward(Holder):
    def forward(self, x: Tensor) -> Tensor:
        return nn.Dropout(0.3)(x)


class InAClassMethod(Holder):
    @classmethod
    def head(cls, x: Tensor) -> Tensor:
        return F.dropout(x, 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


class InAProperty(Holder):
    @property
    def weight(self) -> Tensor:
        return F.dropout(self.kept, 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class GivenByAnother(Holder):
    def forward(self, x: Tensor) -> Tensor:
        return partial(self.head, p=0.3)(x)

    def head(self, x: Tensor, p: float) -> Tensor:
        return F.dropout(x, p)


class InAFunctionInside(Holder):
    def forward(self, x: Tensor) -> Tensor:
        def head(x: Tensor, p: float) -> Tensor:
            return F.dropout(x, p)

        return head(x, 0.3)


class ByAnotherName(Holder):
    def forward(self, x: Tensor) -> Tensor:
        return forget(x, 0.3)


UNREACHED: dict[str, tuple[nn.Module, str]] = {
    "an object of settings": (
        OfSettings(cfg=SimpleNamespace(dropout=0.3)),
        "OfSettings.forward calls F.dropout(x, self.cfg.dropout, self.training)",
    ),
    "an object of settings by a local name": (
        OfSettingsByALocalName(args=SimpleNamespace(p=0.3)),
        "OfSettingsByALocalName.forward calls F.dropout(x, args.p if self.training else 0.0)",
    ),
    "a dictionary": (
        OfADictionary(rates={"first": 0.3}),
        "OfADictionary.forward calls F.dropout(x, self.rates['first'], self.training)",
    ),
    "a module that does not read it": (
        OfAModuleThatDoesNotDrop(place=Holder(p=0.3)),
        "OfAModuleThatDoesNotDrop.forward calls F.dropout(x, self.place.p, self.training)",
    ),
    "a constant": (OfAConstant(), "OfAConstant.forward calls F.dropout(x, RATE, self.training)"),
    "a constant of a class": (OfAClosure(), "OfAClosure.forward calls F.dropout(x, OfAClosure.RATE, self.training)"),
    "arithmetic": (OfArithmetic(keep=0.9), "OfArithmetic.forward calls F.dropout(x, 1 - self.keep, self.training)"),
    "a default": (OfADefault(), "OfADefault.forward calls F.dropout(x, p, self.training)"),
    "a loop": (OfALoop(rates=[0.3]), "OfALoop.forward calls F.dropout(x, p, self.training)"),
    "a module made at each call": (MadeInForward(), "MadeInForward.forward calls nn.Dropout(0.3)"),
    "a class method": (InAClassMethod(), "InAClassMethod.forward calls F.dropout(x, 0.3)"),
    "a property": (InAProperty(), "InAProperty.forward calls F.dropout(self.kept, 0.3)"),
    "an argument that another gives": (GivenByAnother(), "GivenByAnother.forward calls F.dropout(x, p)"),
    "a function inside": (InAFunctionInside(), "InAFunctionInside.forward calls F.dropout(x, p)"),
    "dropout by another name": (ByAnotherName(), "ByAnotherName.forward calls forget(x, 0.3)"),
    "a tensor": (Base(), "Base.forward reads rate, a Tensor"),
}
UNREACHED["a tensor"][0].rate = torch.tensor(0.3)


class Flags(Holder):
    """Numbers that are no rates, though "drop" is in their names."""

    def forward(self, x: Tensor) -> Tensor:
        return x if self.drop_first + self.num_dropped + self.drop_count + self.drop_rate_id else x * self.training


class Kept(Holder):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.bernoulli(torch.full_like(x, self.drop_keep_prob))


class Fixed(nn.Module):
    """A rate that can be read, not set."""

    @property
    def drop_rate(self) -> float:
        return 0.3

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.drop_rate, self.training)


class Refusing(Fixed):
    @property
    def drop_rate(self) -> float:
        return 0.3

    @drop_rate.setter
    def drop_rate(self, value: float) -> None:
        raise KeyError("read-only")


class ManyDropouts(nn.Module):
    """Multi-sample dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.dropouts = nn.ModuleList([nn.Dropout(0.1), nn.Dropout(0.2)])

    def forward(self, x: Tensor) -> Tensor:
        return sum(dropout(x) for dropout in self.dropouts)


LAZY: Any = None


class LazyAttributes:
    """A module that is imported when an attribute is read, and can't be."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"failed to import {name}")


class LazyEverything(LazyAttributes):
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(f"failed to import {name}")


class OfALazyImport(Holder):
    def forward(self, x: Tensor) -> Tensor:
        return LAZY.attend(x) + LAZY.nn.dropped(x)


class OfALazyRate(Holder):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, LAZY.rate, self.training)


class TestWhatIsRead:
    @pytest.mark.parametrize("name", UNREACHED)
    def test_a_rate_that_is_kept_elsewhere_is_out_of_reach(self, name: str) -> None:
        model, line = UNREACHED[name]
        report = report_dropout(nn.Sequential(model))
        assert report.out_of_reach == {line: ["0"]}
        assert [rate.name for rate in report.rates] == []

    def test_the_rate_of_a_submodule_is_the_submodules(self) -> None:
        assert [rate.name for rate in report_dropout(OfAModule()).rates] == ["attn_drop"]

    def test_a_forward_under_a_decorator_that_hides_it_can_not_be_read(self) -> None:
        class Net(nn.Module):
            @undecorated
            def forward(self, x: Tensor) -> Tensor:
                return F.dropout(self.head(x), 0.3)

        assert report_dropout(Net()).out_of_reach == {"the source of Net.forward is not available": [""]}

    def test_nor_can_a_method_under_one(self) -> None:
        class Net(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return self.head(x)

            @undecorated
            def head(self, x: Tensor) -> Tensor:
                return F.dropout(x, 0.3)

        assert report_dropout(Net()).out_of_reach == {"the source of Net.head is not available": [""]}

    def test_a_forward_that_one_module_alone_has_is_told(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[1].forward = lambda x: F.dropout(x, 0.3)
        assert report_dropout(model).out_of_reach == {"this Linear instance overrides forward": ["1"]}

    def test_flags_and_counts_are_no_rates(self) -> None:
        report = report_dropout(Flags(drop_first=1, num_dropped=0, drop_count=0, drop_rate_id=3))
        assert (list(report.rates), report.out_of_reach) == ([], {})

    def test_a_keep_probability_is_no_rate_but_told(self) -> None:
        report = report_dropout(Kept(drop_keep_prob=0.9))
        assert list(report.rates) == []
        assert report.out_of_reach == {"Kept.forward reads drop_keep_prob, which may be a drop rate": [""]}

    @pytest.mark.parametrize(
        "name",
        [
            "dropout",
            "attention_dropout",
            "hidden_dropout_prob",
            "attn_pdrop",
            "layerdrop",
            "drop_path_prob",
            "patch_drop_rate",
            "dropout_prob",
            "dropout_p",
            "dropout1",
            "drop_connect_rate",
            "_drop_prob",
        ],
    )
    def test_the_names_of_rates_are_known(self, name: str) -> None:
        scope: dict[str, Any] = {"Holder": Holder}
        source = f"class Net(Holder):\n    def forward(self, x):\n        return draw(x, self.{name})\n"
        linecache.cache["<net>"] = (len(source), None, source.splitlines(True), "<net>")
        exec(compile(source, "<net>", "exec"), scope)
        scope["Net"].__module__ = __name__
        assert [rate.name for rate in report_dropout(scope["Net"](**{name: 0.1})).rates] == [name]

    def test_one_recurrent_layer_has_no_dropout(self) -> None:
        with pytest.warns(UserWarning, match="num_layers greater than 1"):
            model = nn.Sequential(nn.LSTM(4, 4, 1, dropout=0.2), nn.GRU(4, 4, 2, dropout=0.2))
        report = report_dropout(model)
        assert ([rate.name for rate in report.rates], report.out_of_reach) == (["1.dropout"], {})

    def test_two_rates_of_one_dropout_have_two_names(self) -> None:
        model = nn.Sequential(TwoDropouts())
        assert [rate.name for rate in report_dropout(model).rates] == ["0", "0.rate2"]
        set_dropout(model, {"0.rate2": 0.9})
        assert (model[0].rate, model[0].rate2) == (0.3, 0.9)

    def test_a_property_without_a_setter_is_out_of_reach(self) -> None:
        model = nn.Sequential(nn.Dropout(0.3), Fixed())
        report = report_dropout(model)
        assert [rate.name for rate in report.rates] == ["0"]
        assert report.out_of_reach == {"Fixed.forward reads drop_rate, a property without a setter": ["1"]}

    def test_dropout_modules_in_a_loop_are_in_reach(self) -> None:
        report = report_dropout(ManyDropouts())
        assert [rate.name for rate in report.rates] == ["dropouts.0", "dropouts.1"]
        assert report.out_of_reach == {}

    @pytest.mark.parametrize("lazy", [LazyAttributes, LazyEverything])
    def test_a_lazy_import_that_fails_is_not_raised(self, lazy: type, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(globals(), "LAZY", lazy())
        report = report_dropout(nn.Sequential(nn.Dropout(0.1), OfALazyImport(), OfALazyRate()))
        assert [rate.name for rate in report.rates] == ["0"]
        assert report.out_of_reach == {"OfALazyRate.forward calls F.dropout(x, LAZY.rate, self.training)": ["2"]}


class TestSetting:
    @pytest.fixture
    def model(self) -> Any:
        return nn.Sequential(nn.Dropout(0.1), nn.LSTM(4, 4, 2, dropout=0.2), nn.Sequential(nn.Dropout(0.3)))

    @staticmethod
    def rates(model: nn.Module) -> list[float]:
        return [rate.value for rate in report_dropout(model).rates]

    def test_one_rate_is_for_all(self, model: Any) -> None:
        set_dropout(model, 0.5)
        assert self.rates(model) == [0.5, 0.5, 0.5]

    def test_a_function_gives_each_its_own(self, model: Any) -> None:
        set_dropout(model, lambda name, rate: rate / 2)
        assert self.rates(model) == pytest.approx([0.05, 0.1, 0.15])

    def test_an_exact_name_wins_over_a_glob(self) -> None:
        model = nn.ModuleDict({"a[1]": nn.Dropout(0.1), "a1": nn.Dropout(0.1)})
        set_dropout(model, {"a[1]": 0.5})
        assert self.rates(model) == [0.5, 0.1]

    def test_a_pattern_that_matches_nothing_says_what_is_there(self, model: Any) -> None:
        with pytest.raises(LayerError, match=r"'1.dropot' matches none of the 3 dropout rates") as told:
            set_dropout(model, {"0": 0.5, "1.dropot": 0.5})
        assert "did you mean: '1.dropout'" in str(told.value)
        assert self.rates(model) == [0.1, 0.2, 0.3]

    def test_two_patterns_for_one_rate_are_an_error(self, model: Any) -> None:
        with pytest.raises(LayerError, match=r"two patterns match '0'"):
            set_dropout(model, {"0": 0.5, "**": 0.4})

    @pytest.mark.parametrize("p", [1.5, -0.1, float("nan")])
    def test_a_rate_out_of_range_changes_nothing(self, model: Any, p: float) -> None:
        with pytest.raises(ValueError, match="set_dropout, '2.0': p must"):
            set_dropout(model, {"0": 0.5, "2.0": p})
        assert self.rates(model) == [0.1, 0.2, 0.3]

    @pytest.mark.parametrize("p", ["0.1", None, True, [0.1]])
    def test_what_is_no_rate_is_an_error(self, model: Any, p: Any) -> None:
        with pytest.raises(TypeError, match="must be a number"):
            set_dropout(model, p)

    def test_a_model_without_dropout_is_an_error(self) -> None:
        with pytest.raises(LayerError, match="found no rate that it can change in Linear"):
            set_dropout(nn.Linear(2, 2), 0.1)

    def test_a_rate_that_can_not_be_set_changes_nothing(self) -> None:
        model = nn.Sequential(nn.Dropout(0.3), Refusing(), nn.Dropout(0.3))
        with pytest.raises(
            LayerError, match=r"cannot set '1.drop_rate' to 0.5: Refusing raised KeyError: 'read-only'"
        ):
            set_dropout(model, 0.5)
        assert [rate.value for rate in report_dropout(model).rates] == [0.3, 0.3, 0.3]

    def test_what_has_no_setter_is_left_out(self) -> None:
        model = nn.Sequential(nn.Dropout(0.3), Fixed())
        with set_dropout(model, 0.5):
            assert model[0].p == 0.5
        assert model[0].p == 0.3

    def test_an_empty_mapping_is_an_error(self, model: Any) -> None:
        with pytest.raises(LayerError, match="the mapping is empty") as told:
            set_dropout(model, {})
        assert "'1.dropout'" in str(told.value)

    def test_comes_undone_after_an_exception(self, model: Any) -> None:
        with pytest.raises(KeyError), set_dropout(model, 0.5):
            raise KeyError
        assert self.rates(model) == [0.1, 0.2, 0.3]

    def test_nested_changes_come_undone_one_by_one(self, model: Any) -> None:
        with set_dropout(model, 0.5):
            with set_dropout(model, {"0": 0.6}):
                assert self.rates(model) == [0.6, 0.5, 0.5]
            assert self.rates(model) == [0.5, 0.5, 0.5]
        assert self.rates(model) == [0.1, 0.2, 0.3]

    def test_what_somebody_else_changed_since_is_left_and_told(self, model: Any) -> None:
        change = set_dropout(model, 0.5)
        model[0].p = 0.7
        with pytest.warns(HookdropWarning, match=r"did not restore 1 rate that changed again since: '0'"):
            change.remove()
        assert self.rates(model) == [0.7, 0.2, 0.3]
        change.remove()

    def test_the_handle_shows_before_and_after(self, model: Any) -> None:
        change = set_dropout(model, {"0": 0.5})
        assert repr(change) == "<1 rate changed: '0' 0.1 -> 0.5>"
        assert change.rates == {"0": (0.1, 0.5)}

    def test_copies_keep_the_changed_rates(self, model: Any) -> None:
        with set_dropout(model, 0.5):
            twin = copy.deepcopy(model)
        assert self.rates(twin) == [0.5, 0.5, 0.5]
