"""The compiled loops give bitwise the same results as PyTorch operations, or are not used."""

import ctypes
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hookdrop import functional
from hookdrop.accel import native
from hookdrop.accel.native import has_plain_memory
from hookdrop.functional import drop_block, dropout
from hookdrop.kernels import drawing, masking
from hookdrop.kernels.accelerators import ACCELERATORS, Accelerator
from hookdrop.kernels.blocks import Blocks
from hookdrop.kernels.random_numbers import successes
from tests.support.tensors import Operations, accelerate
from tests.support.training import seeded

needs_kernel = pytest.mark.skipif(
    not native.available(), reason="the compiled loops are not built (no C compiler) or disabled (HOOKDROP_KERNEL=0)"
)
LIBRARY = Path(native.__file__).with_name("_blocks.native")
LOOPS = native.ACCELERATOR
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
FUSED = FLOATS[:2]
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@contextmanager
def pytorch_only() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        accelerate(patch, "cpu")
        assert not native.available()
        yield


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Bitwise equality, including NaN, the sign of zero and the memory format."""
    bits = BITS[a.element_size()]
    return a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a.view(bits), b.view(bits))


def some_seeds(blocks: Blocks, density: float, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(blocks.places, generator=generator) < density).nonzero().flatten().to(blocks.index_dtype)


def with_nan_and_inf(x: Tensor) -> Tensor:
    """Add NaN, infinities, signed zeros, and the smallest and largest number."""
    flat = x.view(-1)
    special = [math.nan, math.inf, -math.inf, 0.0, -0.0, torch.finfo(x.dtype).tiny, torch.finfo(x.dtype).max]
    flat[: len(special)] = torch.tensor(special[: len(flat)], dtype=x.dtype)
    return x.view(-1)[torch.randperm(x.numel(), generator=torch.Generator().manual_seed(0))].view(x.shape)


MEMORY = ["contiguous", "channels last", "nhwc", "samples inside", "inside of larger memory"]


@st.composite
def cases(draw: st.DrawFn, widest: int = 9) -> tuple[Tensor, Blocks, Tensor, Tensor]:
    """`(x, blocks, seeds, scale)` for any geometry, memory format and float dtype."""
    sizes = (*draw(st.lists(st.integers(1, 9), max_size=2)), draw(st.integers(1, widest)))
    edges = tuple(draw(st.integers(1, size)) for size in sizes)
    samples, channels, shared = draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(st.booleans())
    memory = draw(st.sampled_from(MEMORY))
    dtype = draw(st.sampled_from(FLOATS))
    x = with_nan_and_inf(torch.randn(samples, channels, *sizes, dtype=torch.float64).to(dtype))
    channel = 1
    if memory in ("channels last", "nhwc"):
        x = x.movedim(1, -1).contiguous()
        channel = x.dim() - 1
        if memory == "channels last":
            x, channel = x.movedim(-1, 1), 1
    elif memory == "samples inside":
        x = x.movedim(0, -1).contiguous().movedim(-1, 0)
    elif memory == "inside of larger memory":
        x = torch.cat([x, x, x])[samples : 2 * samples]
    blocks = Blocks(samples, 1 if shared else channels, sizes, edges, channel)
    seeds = some_seeds(blocks, draw(st.sampled_from([0.0, 0.02, 0.2, 1.0])), draw(st.integers(0, 9)))
    each = draw(st.booleans())
    scale = 1 + torch.rand((samples, *[1] * (x.dim() - 1)) if each else (), dtype=torch.float64)
    return x, blocks, seeds, scale


@needs_kernel
@given(case=cases(), count=st.sampled_from([1, 2, 8]))
def test_seed_masks_are_bitwise_equal(case: tuple[Tensor, Blocks, Tensor, Tensor], count: int) -> None:
    """With one thread, two, and more threads than maps. Dropped NaN and Inf become 0."""
    x, blocks, seeds, scale = case
    before = x.clone()
    with pytorch_only():
        expected = masking.apply_mask_no_grad(x, seeds, scale, blocks)
    with threads(count):
        assert same_bits(masking.apply_mask_no_grad(x, seeds, scale, blocks), expected)
    assert same_bits(x, before)


@needs_kernel
@given(case=cases(), count=st.sampled_from([1, 2, 8]), apart=st.booleans())
def test_bool_masks_are_bitwise_equal(case: tuple[Tensor, Blocks, Tensor, Tensor], count: int, apart: bool) -> None:
    """With a mask whose samples lie apart, and with one in the memory format of `x`."""
    x, blocks, seeds, scale = case
    dropped = blocks.mask(blocks.rows(seeds))
    if not apart:
        dropped = torch.empty_like(x, dtype=torch.bool).copy_(dropped)
    with pytorch_only():
        expected = masking.apply_mask_no_grad(x, dropped, scale)
    with threads(count):
        assert same_bits(masking.apply_mask_no_grad(x, dropped, scale), expected)


@needs_kernel
@given(case=cases(widest=200), count=st.sampled_from([1, 2, 8]))
def test_counts_are_equal(case: tuple[Tensor, Blocks, Tensor, Tensor], count: int) -> None:
    """Lines of up to 200 elements take four 64-bit words."""
    x, blocks, seeds, _ = case
    for normalize in ("batch", "sample"):
        with pytorch_only():
            expected = drawing._scale(seeds, blocks, 0.1, normalize, x.dim())
        with threads(count):
            for these in (seeds.int(), seeds.long()):
                found = LOOPS.scale_of_seeds(these, blocks, normalize)
                assert same_bits(found, expected)


@needs_kernel
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_supported_inputs_use_the_loops(dtype: torch.dtype, shared: bool, memory_format: torch.memory_format) -> None:
    """Otherwise the comparisons above would compare PyTorch with itself."""
    blocks = Blocks(2, 1 if shared else 4, (9, 9), (3, 3))
    seeds, one = some_seeds(blocks, 0.1), torch.tensor(1.0, dtype=torch.float64)
    x = torch.randn(2, 4, 9, 9).to(dtype).contiguous(memory_format=memory_format)
    expected = x.clone()
    expected[blocks.mask(blocks.rows(seeds)).expand_as(x)] = 0
    masked = LOOPS.mask(x, seeds, one, blocks)
    assert same_bits(masked, expected)
    masked = LOOPS.mask(x, torch.empty_like(x, dtype=torch.bool).copy_(expected == 0), one)
    assert (masked is not None) == (dtype in FUSED)
    assert masked is None or same_bits(masked, expected)


def same_with_and_without_loops(drop: Callable[[Tensor], Tensor], x: Tensor, above: Tensor, count: int) -> None:
    """Check that output and gradient are bitwise equal with `count` threads and without the loops."""
    results = []
    for context in (pytorch_only(), threads(count)):
        with context:
            y = seeded(drop, x)
            results.append((y.detach(), *torch.autograd.grad(y, x, above)))
    assert all(map(same_bits, *results))
    assert torch.equal(results[0][0] == 0, results[0][1] == 0)


@needs_kernel
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_dropout_is_bitwise_equal(memory_format: torch.memory_format, dtype: torch.dtype, count: int) -> None:
    """More elements than one batch of the loop, and a number that the threads do not divide evenly."""
    x = torch.randn(5, 7, 31, 37).to(dtype).contiguous(memory_format=memory_format).requires_grad_()
    same_with_and_without_loops(lambda x: functional.dropout(x, 0.3), x, torch.ones_like(x), count)


class TrivialSubclass(Tensor):
    """A subclass that adds nothing."""


COPIED = {
    "expanded": lambda: torch.randn(2, 4, 1, 9).expand(2, 4, 9, 9),
    "sliced": lambda: torch.randn(2, 4, 9, 18)[..., ::2],
    "cropped": lambda: torch.randn(2, 4, 11, 11)[..., 1:-1, 1:-1],
}
UNSUPPORTED = {
    "transposed": lambda: torch.randn(2, 4, 9, 9).transpose(2, 3),
    "samples inside": lambda: torch.randn(4, 2, 9, 9).transpose(0, 1),
    "a subclass": lambda: torch.randn(2, 4, 9, 9).as_subclass(TrivialSubclass),
}


@needs_kernel
@pytest.mark.parametrize("name", [*COPIED, *UNSUPPORTED])
def test_unsupported_layouts_are_copied_or_fall_back_to_pytorch(name: str) -> None:
    x, blocks = (COPIED | UNSUPPORTED)[name](), Blocks(2, 4, (9, 9), (3, 3))
    seeds, scale = some_seeds(blocks, 0.1), torch.tensor(1.5, dtype=torch.float64)
    assert (LOOPS.mask(x, seeds, scale, blocks) is None) == (name in UNSUPPORTED)
    dropped = blocks.mask(blocks.rows(seeds))
    expected = torch.where(dropped, 0, x * 1.5)
    assert torch.equal(masking.apply_mask_no_grad(x, seeds, scale, blocks), expected)
    assert torch.equal(masking.apply_mask_no_grad(x, dropped, scale), expected)


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_unsupported_dtypes_fall_back_to_pytorch(dtype: torch.dtype) -> None:
    x, blocks = torch.ones(2, 4, 9, 9).to(dtype), Blocks(2, 4, (9, 9), (3, 3))
    one, seeds = torch.tensor(1.0), some_seeds(blocks, 0.1)
    assert LOOPS.mask(x, seeds, one, blocks) is None
    assert LOOPS.mask(x, torch.ones(x.shape, dtype=torch.bool), one) is None


@needs_kernel
def test_masks_of_other_shapes_fall_back_to_pytorch() -> None:
    x, one = torch.randn(4, 3, 5, 5), torch.tensor(1.0)
    for shape in [(4, 3, 1, 1), (1, 3, 5, 5), (5, 5), (4, 3, 5, 1)]:
        dropped = torch.rand(shape) < 0.5
        assert LOOPS.mask(x, dropped, one) is None
        assert torch.equal(masking.apply_mask_no_grad(x, dropped, one), torch.where(dropped, 0, x))


@needs_kernel
def test_dispatch_modes_disable_the_compiled_loops() -> None:
    """Fake tensors have no memory, and a mode must see every operation."""
    blocks, one = Blocks(2, 4, (9, 9), (3, 3)), torch.tensor(1.0)
    seeds, x = some_seeds(blocks, 0.1), torch.randn(2, 4, 9, 9)
    assert has_plain_memory(x)
    with Operations():
        assert not has_plain_memory(x)
        assert LOOPS.mask(x, seeds, one, blocks) is None
        assert LOOPS.scale_of_seeds(seeds, blocks, "batch") is None
        y = drop_block(x, 0.3, 3)
    assert 0 < (y == 0).sum() < y.numel()
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
        assert not has_plain_memory(fake)
        assert drop_block(fake, 0.3, 3).shape == x.shape
        assert functional.dropout(mode.from_tensor(torch.ones(2**16)), 0.3).shape == (2**16,)
    assert not has_plain_memory(fake)
    assert has_plain_memory(x)


@pytest.mark.parametrize("content", [None, b"", b"not a library", b"\x7fELF" + bytes(200)], ids=str)
def test_a_missing_or_invalid_library_is_ignored(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "library").write_bytes(content)
    assert native._load(tmp_path / "library") is None


@needs_kernel
def test_library_is_loaded() -> None:
    assert isinstance(native._load(LIBRARY), ctypes.CDLL)


def test_environment_variable_disables_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOKDROP_KERNEL", "0")
    for device in ("cpu", "cuda"):
        assert type(type(ACCELERATORS)()[torch.device(device)]) is Accelerator


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("trials", "p"), [(1, 0.5), (10**3, 0.999), (10**5, 0.02), (2**31 - 1, 1e-7)])
def test_successes_are_those_of_the_pytorch_operations(trials: int, p: float, dtype: torch.dtype) -> None:
    """With the same seed, to the last bit, and the generator is left in the same state."""
    for seed in range(20):
        torch.manual_seed(seed)
        at, after = successes(trials, p, torch.device("cpu"), dtype), torch.rand(1)
        torch.manual_seed(seed)
        with pytorch_only():
            expected, state = successes(trials, p, torch.device("cpu"), dtype), torch.rand(1)
        assert at.dtype == expected.dtype == dtype
        assert torch.equal(at, expected)
        assert torch.equal(after, state)


@needs_kernel
def test_gaps_of_infinite_length_end_the_successes() -> None:
    logs = torch.tensor([-0.5, -math.inf, -0.1], dtype=torch.float64)
    assert LOOPS.successes(logs, -0.25, 10**9, torch.int64).tolist() == [1]
    assert LOOPS.successes(logs[:1], -0.25, 10**9, torch.int64) is None


def test_negated_views_and_zero_tensors() -> None:
    """A negated view has the opposite sign in memory; a zero tensor has no memory."""
    negated = torch.complex(torch.zeros(8, 8, 32, 32), -torch.ones(8, 8, 32, 32)).conj().imag
    assert negated.is_neg()
    for drop in (lambda x: drop_block(x, 0.2, 3, normalize=None), lambda x: drop_block(x, 0.95, 3, normalize=None)):
        assert drop(negated).unique().tolist() == [0.0, 1.0]
        assert not drop(torch._efficientzerotensor((8, 8, 32, 32))).any()
    assert dropout(negated, 0.2).unique().tolist() == [0.0, 1.25]
    assert not dropout(torch._efficientzerotensor((8, 8, 32, 32)), 0.2).any()
