"""`find_drop_rates` finds the attributes that random drops read their rates from, by running the model."""

import random
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hookdrop
from hookdrop import InjectionError
from hookdrop.survey.drop_rates import find_drop_rates, known_drop_rates
from tests.support.models import toy

X = torch.randn(4, 3, 8)


def drop_path(x: Tensor, p: float, training: bool) -> Tensor:
    """As in transformers."""
    if p == 0.0 or not training:
        return x
    keep_prob = 1 - p
    random_tensor = keep_prob + torch.rand((len(x), 1, 1), dtype=x.dtype, device=x.device)
    return x.div(keep_prob) * random_tensor.floor_()


def row_mask(x: Tensor, p: float) -> Tensor:
    """As in timm and torchvision."""
    return x * x.new_empty(len(x), 1, 1).bernoulli_(1.0 - p).div_(1.0 - p) if p > 0 else x


def attention(x: Tensor, p: float) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, dropout_p=p)


def helper(net: Any, x: Tensor, q: float = 0.9) -> Tensor:
    return F.dropout(x, q, net.training)


SCRIPTED: Any = torch.jit.script(drop_path)
TRACED: Any = torch.jit.trace(lambda x: F.dropout(x, 0.3), X, check_trace=False)
FUSED: Any = torch.jit.trace(lambda x: torch.native_dropout(x, 0.3, True)[0], X, check_trace=False)

FOUND: dict[str, nn.Module] = {
    "positional": toy(lambda net, x: F.dropout(x, net.rate, net.training), rate=0.2),
    "a rate of 0": toy(lambda net, x: F.dropout(x, net.rate, net.training), rate=0.0),
    "an integer 0": toy(lambda net, x: attention(x, net.rate), rate=0),
    "converted and conditional": toy(lambda m, x: F.dropout1d(x, p=float(m.rate) if m.training else 0.0), rate=0.3),
    "skipped at 0": toy(lambda net, x: F.dropout(x, net.rate) if net.rate > 0 else x, rate=0.0),
    "alpha dropout": toy(lambda net, x: F.alpha_dropout(x, net.rate, net.training), rate=0.2),
    "attention": toy(lambda net, x: attention(x, net.rate if net.training else 0.0), rate=0.2),
    "an argument with a default": toy(lambda net, x: helper(net, x, net.rate), rate=0.2),
    "transformers' drop path": toy(lambda net, x: drop_path(x, net.rate, net.training), rate=0.2),
    "hidden code": toy(lambda net, x: SCRIPTED(x, net.rate, net.training), rate=0.2),
    "timm's drop path": toy(lambda net, x: row_mask(x, net.rate), rate=0.0),
    "a random mask": toy(lambda net, x: x * (torch.rand_like(x) > net.rate), rate=0.1),
    "an in-place comparison": toy(lambda net, x: x * torch.rand(4, 1, 1).ge_(net.rate).div(1 - net.rate), rate=0.1),
    "a skipped layer": toy(lambda net, x: x if torch.rand([]) < net.rate else x + 1, rate=0.0),
    "a random number": toy(lambda net, x: x if torch.rand(1).lt(net.rate).item() else x + 1, rate=0.05),
    "a masked tensor": toy(lambda net, x: x.masked_fill(torch.rand_like(x) < net.rate, 0.0), rate=0.7),
    "a selection": toy(lambda net, x: torch.where(torch.rand_like(x) < net.rate, 0.0, x), rate=0.7),
    "a negated mask": toy(lambda net, x: x * ~(torch.rand_like(x) < net.rate), rate=0.7),
    "a filled tensor": toy(lambda net, x: x * torch.bernoulli(torch.full_like(x, 1 - net.rate)), rate=0.05),
    "filled by keywords": toy(lambda net, x: x * torch.full(size=(8,), fill_value=1 - net.rate).bernoulli(), rate=0.05),
}
CONSTANTS: dict[str, tuple[nn.Module, float]] = {
    "a literal": (toy(lambda net, x: F.dropout(x, 0.3, net.training)), 0.3),
    "the default": (toy(lambda net, x: F.dropout(x, training=net.training)), 0.5),
    "arithmetic": (toy(lambda net, x: F.dropout(x, 1 - net.keep, net.training), keep=0.75), 0.25),
    "a module created in each call": (toy(lambda net, x: nn.Dropout(0.3)(x)), 0.3),
    "fused attention": (toy(lambda net, x: attention(x, 0.3 if net.training else 0.0)), 0.3),
}
NEITHER: dict[str, nn.Module] = {
    "a literal mask": toy(lambda net, x: x * torch.empty(4, 1, 1).bernoulli_(0.7)),
    "a probability to keep": toy(lambda net, x: x * torch.empty_like(x).bernoulli_(net.keep), keep=0.9),
    "a small probability to keep": toy(lambda net, x: x * (torch.rand_like(x) < net.keep), keep=0.3),
    "a small probability to select": toy(lambda net, x: torch.where(torch.rand_like(x) < net.keep, x, 0.0), keep=0.3),
    "a large probability to go on": toy(lambda net, x: x * 2 if torch.rand(()) < net.keep else x, keep=0.9),
    "a mask of what is not kept": toy(lambda net, x: x.masked_fill(torch.rand_like(x) > net.keep, 0.0), keep=0.3),
    "scheduled sampling": toy(lambda net, x: [x := x[:1] if torch.rand(1) < net.ratio else x * 2 for _ in x][-1], ratio=0.3),
    "an image that is turned": toy(lambda net, x: (x.flip(-1) if torch.rand(()) < net.rate else x) * 2, rate=0.3),
    "tokens to predict": toy(lambda net, x: x * x.long().masked_fill(torch.rand(x.shape) < net.rate, 0), rate=0.15),
    "eval mode": toy(lambda net, x: F.dropout(x, 0.3, training=False)),
    "a constant rate of 0": toy(lambda net, x: F.dropout(x, 0.0)),
    "a random number below 1": toy(lambda net, x: x * (torch.rand_like(x) < 1.0)),
    "other numbers": toy(lambda net, x: F.layer_norm(x, (8,), eps=net.eps) * net.gain + (x > net.limit), eps=1e-5, gain=0.5, limit=0.1),
}  # fmt: skip


class Masked(nn.Module):
    """Has a part only where a number is not 0, as the mask embedding of Wav2Vec2."""

    def __init__(self, mask_prob: float = 0.0) -> None:
        super().__init__()
        self.rate, self.mask_prob = 0.1, mask_prob
        if mask_prob > 0:
            self.embedding = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        if self.mask_prob > 0:
            x = torch.where(torch.rand(x.shape[:-1])[..., None] < self.mask_prob, self.embedding, x)
        return F.dropout(x, self.rate, self.training)


def rates(model: nn.Module, example: Any = X, **settings: Any) -> list[tuple[str, str]]:
    return [(rate.layer, rate.attribute) for rate in find_drop_rates(model, example, **settings).rates]


@pytest.mark.parametrize("fake", [True, False], ids=["fake", "values"])
class TestForwards:
    @pytest.mark.parametrize("name", FOUND)
    def test_attribute_that_a_drop_reads_is_found(self, name: str, fake: bool) -> None:
        found = find_drop_rates(nn.Sequential(nn.Identity(), FOUND[name]), X, fake=fake, skipped=True)
        assert [(rate.layer, rate.attribute) for rate in found.rates] == [("1", "rate")]
        assert found.out_of_reach == {}

    @pytest.mark.parametrize("name", CONSTANTS)
    def test_drop_with_a_rate_in_the_code_is_named_with_it(self, name: str, fake: bool) -> None:
        model, rate = CONSTANTS[name]
        found = find_drop_rates(nn.Sequential(model), X, fake=fake)
        assert [(one.layer, one.constant) for one in found.constants] == [("0", rate)]
        assert found.rates == ()

    @pytest.mark.parametrize("name", NEITHER)
    def test_other_numbers_are_no_rates(self, name: str, fake: bool) -> None:
        found = find_drop_rates(NEITHER[name], X, fake=fake)
        assert (found.rates, found.out_of_reach, found.constants) == ((), {}, [])

    @pytest.mark.parametrize("skipped", [False, True])
    def test_number_that_must_keep_its_value_hides_no_rate(self, skipped: bool, fake: bool) -> None:
        def exact(net: Any, x: Tensor) -> Tensor:
            return F.dropout(x, net.rate, net.training) * {0.25: 1.0}[net.scale]

        nets = [Masked(), *(toy(exact, rate=0.1 * i, scale=0.25) for i in range(3)), Masked(0.5)]
        found = find_drop_rates(nn.Sequential(*nets), X, fake=fake, skipped=skipped)
        wanted = [(str(i), "rate") for i in range(5)]
        assert [(one.layer, one.attribute) for one in found.rates if one.attribute == "rate"] == wanted


class TestKinds:
    def test_drops_of_samples(self) -> None:
        nets = [FOUND[key] for key in ("positional", "timm's drop path", "transformers' drop path", "a skipped layer")]
        found = find_drop_rates(nn.Sequential(*nets), X, skipped=True)
        assert sorted(rate.layer for rate in found.per_sample) == ["1", "2"]

    def test_drops_beside_the_hidden_states(self) -> None:
        functions = [
            lambda m, x: F.dropout((x @ x.mT).softmax(-1), m.rate, m.training) @ x,
            lambda m, x: attention(x, m.rate),
            lambda m, x: m.base(x) + 2 * m.up(m.down(F.dropout(x, m.rate, m.training))),  # an adapter
            lambda m, x: x + m.up(m.down(F.dropout(x, m.rate, m.training))),
            lambda m, x: F.dropout(x, m.rate, m.training),
        ]
        layers = {"base": nn.Linear(8, 8), "down": nn.Linear(8, 2), "up": nn.Linear(2, 8)}
        model = nn.Sequential(*(toy(function, rate=0.1, **layers) for function in functions))
        found = find_drop_rates(model, X)
        assert sorted(rate.layer for rate in found.aside) == ["0", "1", "2"]
        assert len(found.rates) == 5


class TestPlaces:
    def test_rate_in_a_config_object_is_found_once(self) -> None:
        config = SimpleNamespace(dropout=0.3, other=0.5)
        nets = [toy(lambda net, x: F.dropout(x, net.cfg.dropout, net.training), cfg=config) for _ in range(2)]
        assert rates(nn.Sequential(*nets)) == [("0", "cfg.dropout")]

    def test_rate_of_another_module_is_listed_under_that_module(self) -> None:
        model = toy(lambda net, x: F.dropout(x, net.place.chance), place=toy(lambda net, x: x, chance=0.3))
        assert rates(model) == [("place", "chance")]

    def test_part_that_the_example_does_not_run_and_hidden_code_that_drops_are_reported(self) -> None:
        scripted = torch.jit.script(nn.Sequential(nn.BatchNorm1d(3), nn.ReLU()))
        parts = {"used": nn.Dropout(0.1), "tower": nn.Sequential(nn.Linear(8, 8)), "hidden": scripted}
        model = toy(lambda m, x: m.fused(TRACED(m.hidden(m.used(x)))), fused=toy(lambda _, x: FUSED(x)), **parts)
        before = [x.clone() for x in scripted.buffers()]
        found = find_drop_rates(model, X)
        assert [rate.layer for rate in found.rates] == ["used"]
        assert [*found.out_of_reach.values()] == [("tower",), ("", "fused")]
        assert all(map(torch.equal, before, scripted.buffers()))

    def test_objects_that_raise_are_passed_over(self) -> None:
        class Lazy:
            def __getattribute__(self, name: str) -> Any:
                raise RuntimeError(name)

        model = toy(lambda net, x: F.dropout(x, net.rate), rate=0.1)
        vars(model).update(lazy=Lazy(), gone=weakref.proxy(nn.ReLU()))
        assert rates(model) == [("", "rate")]


def test_no_forward_is_needed() -> None:
    with pytest.warns(UserWarning, match="num_layers greater than 1"):
        single = nn.LSTM(4, 4, 1, dropout=0.2)
    parts = [nn.Dropout(0.1), single, nn.GRU(4, 4, 2, dropout=0.2), nn.TransformerEncoderLayer(4, 2)]
    parts += [nn.AlphaDropout(), parts[0]]  # the last one is listed once
    found = known_drop_rates(nn.Sequential(*parts, hookdrop.DropBlock(0.2, 3), hookdrop.GaussianNoise(0.1)))
    assert [(rate.layer, rate.attribute) for rate in found] == [
        ("0", "p"),
        ("2", "dropout"),
        ("3.self_attn", "dropout"),
        *((f"3.{name}", "p") for name in ("dropout", "dropout1", "dropout2")),
        ("4", "p"),
        ("6", "p"),
    ]


@pytest.mark.parametrize("fake", [True, False], ids=["fake", "values"])
@pytest.mark.parametrize("fails", [False, True], ids=["success", "error"])
def test_attributes_buffers_modes_and_random_states_are_restored(fake: bool, fails: bool) -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        net.calls = [x]
        if fails:
            raise ValueError
        return F.dropout(net.norm(x), net.rate) * random.random() * torch.rand(())

    config = SimpleNamespace(rate=0.0)
    model = toy(forward, rate=0.0, gain=0.5, index=0, cfg=config, norm=nn.BatchNorm1d(3)).eval()
    before = {name: (value, type(value)) for name, value in vars(model).items()}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random_states = torch.get_rng_state(), random.getstate()
    if fails:
        with pytest.raises(InjectionError):
            find_drop_rates(model, X, fake=fake)
    else:
        assert rates(model, fake=fake) == [("", "rate")]
    assert {name: (value, type(value)) for name, value in vars(model).items()} == before
    assert (type(config.rate), config.rate) == (float, 0.0)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_states[0])
    assert random.getstate() == random_states[1]
    assert not model.training


def test_an_equal_number_with_another_meaning_is_no_rate() -> None:
    """The slope of an activation, stored first, with the value of a rate that the code has as a constant."""
    net = toy(lambda m, x: F.dropout(F.leaky_relu(x, m.slope), 0.1, m.training), slope=0.1)
    assert not find_drop_rates(net, X).rates
    assert net.slope == 0.1
