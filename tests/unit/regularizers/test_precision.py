"""Low precision, autocast and default dtypes, unusual tensors and in-place operations, and layers that return several tensors."""

import copy
import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import hookdrop
from hookdrop import DropBlock, Dropout, Dropout2d, Dropout3d, DropPath, GaussianNoise, Penalty, ShapeError, inject
from tests.support.models import toy
from tests.support.regularizers import ACTIVATIONS, DERIVING, EVERY, Case
from tests.support.tensors import HALF
from tests.support.training import seeded


def test_a_regularizer_that_changes_the_dtype_raises() -> None:
    """For example a user's function that multiplies matrices under autocast."""
    model = nn.Sequential(nn.Identity())
    inject(model, matmul_with_itself, layers="0")
    model(x := torch.randn(4, 4))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ShapeError):
        model(x)


def matmul_with_itself(x: torch.Tensor) -> torch.Tensor:
    return x @ x


UNITS: dict[Callable[[float], hookdrop.Regularizer], tuple[tuple[int, ...], tuple[int, ...]]] = {
    Dropout: ((100, 10_000), ()),
    hookdrop.Dropout1d: ((1000, 1000, 2), (2,)),
    Dropout2d: ((1000, 1000, 1, 2), (2, 3)),
    Dropout3d: ((1000, 1000, 1, 1, 2), (2, 3, 4)),
    DropPath: ((1_000_000, 2), (1,)),
    partial(DropBlock, block_size=1, normalize="expected"): ((100, 50, 14, 14), ()),
}


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("p", [0.001, 0.003])
@pytest.mark.parametrize("cls", UNITS, ids=lambda cls: getattr(cls, "__name__", "DropBlock"))
def test_zeroed_fraction_is_p_and_the_mean_is_kept(cls: Callable[..., nn.Module], p: float, dtype: torch.dtype) -> None:
    """Within 4 standard errors of whole units. In bfloat16, `rand < .999` would drop nothing, and .997 rounds to 1."""
    shape, inside = UNITS[cls]
    x = (1 + torch.rand(shape)).to(dtype)
    zero = (y := cls(p)(x)) == 0
    units = zero.all(inside) if inside else zero
    assert abs(units.double().mean() - p) < 4 * math.sqrt(p * (1 - p) / units.numel())
    assert torch.equal(zero.any(inside) if inside else zero, units)
    assert p == 0.001 or y.double().mean() / x.double().mean() == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_noise_has_the_requested_std(dtype: torch.dtype) -> None:
    assert GaussianNoise(0.1)(torch.zeros(1000, 1000, dtype=dtype)).double().std() == pytest.approx(0.1, rel=0.01)
    for p in (0.01, 0.2):  # the variance of dropout
        y = hookdrop.GaussianDropout(p)(torch.ones(1000, 1000, dtype=dtype)).double()
        assert y.std() == pytest.approx(math.sqrt(p / (1 - p)), rel=0.01)
        assert y.mean() == pytest.approx(1, abs=2e-3)


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("case", EVERY.values(), ids=EVERY)
def test_default_dtype_has_no_effect(case: Case, default: torch.dtype) -> None:
    """With another default dtype at injection and in training, the masks equal those of float32."""
    results = []
    for dtype in (torch.float32, default):
        torch.manual_seed(0)
        model, x = case.model(), case.input()
        torch.set_default_dtype(dtype)
        try:
            drop = inject(model, case.regularizer, layers=["0", "2"])
            y = model(x)
            y.sum().backward()
        finally:
            torch.set_default_dtype(torch.float32)
        results.append([y.detach(), *[p.grad for p in model.parameters()]])
        assert y.dtype == torch.float32
        drop.remove()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("normalize", ["batch", "sample", "expected"])
def test_more_elements_than_float16_can_count(dtype: torch.dtype, normalize: str) -> None:
    """For samples with more than 65,504 elements, torchvision's DropBlock returns zeros."""
    x = torch.ones(2, 32, 56, 56, dtype=dtype).requires_grad_()
    with torch.autocast("cpu", dtype):
        y = DropBlock(0.1, 7, normalize=normalize)(x)
    (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
    y = y.detach().double()
    assert torch.equal(grad.double(), y)
    assert (y == 0).double().mean() == pytest.approx(0.1, abs=0.02)
    # Ones times one scale: bfloat16 rounds the product by up to 2**-8.
    assert y.mean() == pytest.approx(1, abs=0.02 if normalize == "expected" else 2**-8)


ALL = pytest.mark.parametrize("case", ACTIVATIONS.values(), ids=ACTIVATIONS)


def at_each_place(some: dict[str, Case]) -> pytest.MarkDecorator:
    outside = {name: case for name, case in some.items() if not case.acts_on_scores}
    pairs = {f"{name}-{at}": (case, at) for name, case in outside.items() for at in case.places}
    return pytest.mark.parametrize(("case", "at"), pairs.values(), ids=pairs)


def hooked(regularizer: nn.Module) -> nn.Sequential:
    model = nn.Sequential(Case(regularizer).layer)
    inject(model, regularizer, layers="0")
    return model


ACTIVATIONS = [nn.ReLU(inplace=True), nn.Sigmoid(), nn.Softmax(1)]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda module: type(module).__name__)
@at_each_place(DERIVING)
def test_activations_that_work_in_place_or_save_their_output(case: Case, at: str, activation: nn.Module) -> None:
    """`mul_` breaks the backward of layers that save their output; backward hooks break before in-place layers."""
    case = Case(case.regularizer, (2, *case.shape[1:]))
    model = nn.Sequential(nn.Softplus(), copy.deepcopy(activation), nn.Identity(), copy.deepcopy(activation))
    drop, run = inject(model, case.regularizer, layers="*", at=at), partial(seeded, model)
    x = case.input(torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(run, x, fast_mode=True)
    with drop.recording(last=0):
        run(x).sum().backward()


@ALL
@pytest.mark.parametrize("empty", [1, -1])
def test_empty_tensors_stay_empty(case: Case, empty: int) -> None:
    """No channels, no width; `hookdrop.testing` checks batches without samples."""
    shape = list(case.shape)
    shape[empty] = 0
    x = torch.ones(shape, requires_grad=True)
    y = hooked(case.regularizer)(x)
    y.sum().backward()
    assert y.shape == x.grad.shape == x.shape


def overlapping(x: torch.Tensor) -> torch.Tensor:
    return torch.randn(x.numel()).as_strided(x.shape, [2**axis for axis in range(x.dim())][::-1])


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "expanded": lambda x: x[:1].expand_as(x),
    "every second": lambda x: torch.stack([x, x], -1)[..., 0],
    "overlapping": overlapping,
    "one number": lambda x: torch.ones(()).expand_as(x),
}


@ALL
@pytest.mark.parametrize("layout", LAYOUTS)
def test_unusual_memory_layouts_match_their_contiguous_copy(case: Case, layout: str) -> None:
    model, x = hooked(case.regularizer), LAYOUTS[layout](case.input())
    results = []
    for t in (x.clone(memory_format=torch.contiguous_format), x):
        t = t.detach().requires_grad_()
        y = seeded(model, t)
        results.append((y, torch.autograd.grad(y, t, torch.ones(x.shape))[0]))
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


@ALL
def test_wrapper_tensor_subclasses(case: Case) -> None:
    """Like quantized or distributed tensors, which have no memory of their own."""
    y = hooked(case.regularizer)(TwoTensor(case.input(), case.input()))
    assert type(y) is TwoTensor
    assert y.shape == case.shape


@ALL
def test_parameter_as_output(case: Case) -> None:
    """As in a position embedding: the result is not a parameter, and the parameter receives its gradient."""
    if case.skips_layers or "output" not in case.places:
        return  # these need an input

    embedding = toy(lambda m: m.weight, weight=nn.Parameter(case.input()))
    model = nn.ModuleDict({"embedding": embedding})
    inject(model, case.regularizer, layers="embedding")
    y = model["embedding"]()
    assert type(y) is torch.Tensor or isinstance(case.regularizer, Penalty)  # which returns its tensor itself
    y.sum().backward()
    assert embedding.weight.grad is not None


@pytest.mark.parametrize(
    "value",
    [torch.ones(2, 3, dtype=torch.complex64), torch.ones(2, 3, dtype=torch.bool), torch.tensor(1.0),
     torch.ones(2, 3).to_sparse(), torch.ones(2, 3).to(torch.float8_e5m2)],
)  # fmt: skip
def test_outputs_that_cannot_be_regularized_are_errors(value: torch.Tensor) -> None:
    with pytest.raises((ShapeError, TypeError)) as error:
        hooked(Dropout(0.3))(value)
    assert "'0'" in str(error.value) + "".join(getattr(error.value, "__notes__", []))


@pytest.mark.filterwarnings("ignore:the rate of:hookdrop.HookdropWarning")
@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU])
def test_hidden_states_of_recurrent_networks_are_unchanged(cell: type[nn.RNNBase]) -> None:
    model = cell(4, 8, batch_first=True)
    inject(model, Dropout(1.0), layers=model)
    out, state = model(torch.randn(2, 5, 4))
    assert not out.any()
    assert all(part.any() for part in (state if cell is nn.LSTM else [state]))


def test_stacked_hooks_run_in_the_order_of_injection() -> None:
    """Noise that is injected first does not fill the mask that is injected second."""
    model = nn.Sequential(nn.Identity())
    inject(model, GaussianNoise(0.1), layers="0")
    inject(model, DropBlock(0.5, 3), layers="0", on_existing="stack")
    assert (model(torch.ones(4, 8, 12, 12)) == 0).float().mean() == pytest.approx(0.5, abs=0.1)
