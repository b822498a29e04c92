"""The Triton kernels, on a GPU if there is one, else in Triton's interpreter (see tests/conftest.py)."""

import functools
import itertools
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hookdrop import HookdropWarning
from hookdrop.accel import triton_dropblock
from hookdrop.functional import drop_block
from hookdrop.kernels import custom_ops, drawing
from hookdrop.kernels.blocks import Blocks, gamma_for
from tests.support.tensors import Operations, accelerate, dilated
from tests.support.training import seeded

triton_language = pytest.importorskip("triton.language")
if not hasattr(triton_language, "gather"):
    pytest.skip("PyTorch 2.6 has an older Triton, which hookdrop does not use", allow_module_level=True)

KERNELS = triton_dropblock.ACCELERATOR
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
GEOMETRIES = {
    "7x7": Blocks(3, 5, (7, 7), (3, 3)),
    "odd": Blocks(2, 3, (13, 9), (4, 7)),
    "rows of 32": Blocks(1, 2, (8, 32), (3, 5)),
    "a block covers the map": Blocks(2, 9, (5, 6), (5, 6)),
    "blocks of 1": Blocks(2, 3, (6, 7), (1, 1)),
    "1x1": Blocks(4, 40, (1, 1), (1, 1)),
    "shared": Blocks(4, 1, (14, 14), (7, 7)),
    "1-D": Blocks(2, 3, (70,), (33,)),
    "3-D": Blocks(2, 3, (6, 5, 7), (2, 3, 4)),
    "several tiles": Blocks(1, 12, (28, 28), (7, 7)),
    "blocks larger than 32 words": Blocks(1, 12, (40, 41), (37, 21)),
    "blocks larger than 128 words": Blocks(1, 4, (110, 100), (101, 90)),
}


@pytest.fixture(autouse=True)
def use_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerate(monkeypatch, DEVICE.type, KERNELS)
    monkeypatch.setattr(drawing, "must_avoid_sync", lambda x: True)
    monkeypatch.setattr(triton_dropblock, "_supported", lambda index: True)
    monkeypatch.setattr(triton_dropblock, "_works", {DEVICE.index: True})


def drawn(blocks: Blocks, seed_rate: float, normalize: str | None = None) -> tuple[Tensor, Tensor]:
    """The mask of the kernel as a bool tensor (samples, channels, *sizes), and the dropped counts."""
    packed, counters = seeded(KERNELS.draw, blocks, seed_rate, normalize, DEVICE)
    bits = blocks.unpacked(packed)
    assert not bits[:, blocks.elements_per_sample :].any(), "the padding is 0"
    mask = bits[:, : blocks.elements_per_sample].view(blocks.samples, blocks.channels, *blocks.sizes).bool()
    return mask, counters[2:] >> 31


@pytest.mark.parametrize("blocks", GEOMETRIES.values(), ids=GEOMETRIES)
def test_masks_are_the_blocks_of_the_seeds(blocks: Blocks) -> None:
    """The random numbers depend on the position only: blocks of 1 show the same seeds, also where no block fits."""
    single = Blocks(blocks.samples, blocks.channels, blocks.sizes, tuple(1 for _ in blocks.sizes))
    rate = gamma_for(blocks.sizes, blocks.blocks, 0.4)
    seeds, _ = drawn(single, rate)
    mask, _ = drawn(blocks, rate)
    assert 0 < mask.sum() < mask.numel()
    corners = seeds[(slice(None), slice(None), *map(slice, blocks.valid))]
    assert torch.equal(mask.cpu(), dilated(corners.cpu(), blocks.blocks))


@pytest.mark.parametrize("name", ["7x7", "shared", "several tiles", "1-D"])
def test_counters_count_the_dropped_elements(name: str) -> None:
    for normalize, axis in (("batch", 0), ("sample", 1)):
        mask, count = drawn(GEOMETRIES[name], 0.02, normalize)
        assert count.tolist() == mask.flatten(axis).sum(-1).flatten().tolist()


@pytest.mark.parametrize("p", [1e-3, 0.1, 0.5, 0.999, 1.0])
def test_the_rate_is_exact(p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_dropblock, "_lanes", lambda words, halo: 16_384)  # fast in the interpreter
    mask, _ = drawn(Blocks(1, 1000, (17, 17), (1, 1)), p)
    assert abs(mask.double().mean() - p) <= 4.5 * math.sqrt(p * (1 - p) / mask.numel())


@pytest.mark.parametrize(("block", "p"), [(1, 0.3), (3, 0.3), (4, 0.6)])
def test_masks_have_the_distribution_of_those_of_the_cpu(block: int, p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The frequency at each position, of each pair of positions in a row, and the dropped elements of a map."""
    monkeypatch.setattr(triton_dropblock, "_lanes", lambda words, halo: 2048)  # fast in the interpreter
    ones = torch.ones(2, 1024, 8, 7, device=DEVICE)
    settings: dict[str, Any] = {"p": p, "block_size": block, "normalize": None}
    found = (drop_block(ones, **settings) == 0).flatten(0, 1).double().cpu()
    accelerate(monkeypatch, DEVICE.type)
    expected = (drop_block(ones.cpu(), **settings) == 0).flatten(0, 1).double()
    maps = len(found)
    for statistic in (
        lambda dropped: dropped.flatten(1),
        lambda dropped: (dropped[:, :, :1] * dropped[:, :, 1:]).flatten(1),
        lambda dropped: (dropped[:, :1] * dropped[:, 1:]).flatten(1),
        lambda dropped: torch.nn.functional.one_hot((dropped.mean((1, 2)) * 8).long(), 9).double(),
    ):
        mean, reference = statistic(found).mean(0), statistic(expected).mean(0)
        deviation = (2 * reference * (1 - reference) / maps).clamp(min=1 / maps**2).sqrt()
        assert ((mean - reference).abs() / deviation).max() < 4.5


INPUTS = (((7, 7), torch.float32), ((70,), torch.float16), ((4, 4, 6), torch.bfloat16))
SETTINGS = list(itertools.product((1, -1), ("batch", "sample", "expected", None), (True, False)))


@pytest.mark.parametrize("case", range(len(SETTINGS)), ids=[str(case) for case in SETTINGS])
def test_drop_block(case: int) -> None:
    """Values, gradients, dtypes and memory formats, also of gradients that are expanded or in another format."""
    (channel, normalize, per_channel), (sizes, dtype) = SETTINGS[case], INPUTS[case % len(INPUTS)]
    shape = (2, 5, *sizes) if channel == 1 else (2, *sizes, 5)
    x = torch.rand(shape, device=DEVICE, dtype=dtype).add_(0.5).requires_grad_()
    y = drop_block(x, 0.3, 3, normalize=normalize, per_channel=per_channel, channel_dim=channel)
    dropped = (y == 0).movedim(channel, 1)
    assert 0 < dropped.sum() < dropped.numel()
    assert per_channel or torch.equal(dropped.all(1), dropped.any(1))
    scale, rtol = torch.where(y == 0, 0, scale_of(y == 0, normalize, 0.3)), 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(y.detach(), (x.detach().float() * scale).to(dtype), rtol=rtol, atol=0)
    assert (y.dtype, y.stride()) == (dtype, x.stride())
    transposed = torch.rand_like(x.detach().movedim(1, -1)).movedim(-1, 1)
    for weight in (torch.ones((), device=DEVICE, dtype=dtype).expand(shape), transposed):
        (gradient,) = torch.autograd.grad(y, x, weight, retain_graph=True)
        torch.testing.assert_close(gradient, (weight.float() * scale).to(dtype), rtol=rtol, atol=0)


def scale_of(dropped: Tensor, normalize: str | None, p: float) -> Tensor | float:
    if normalize is None or normalize == "expected":
        return 1.0 if normalize is None else 1 / (1 - p)
    axes = tuple(range(1, dropped.dim())) if normalize == "sample" else tuple(range(dropped.dim()))
    return 1 / (~dropped).float().mean(axes, keepdim=True)


@pytest.mark.parametrize("per_channel", [True, False])
def test_memory_formats_have_the_same_masks(per_channel: bool) -> None:
    """channels_last is copied by one transposing load; other formats and float64 use PyTorch operations."""
    x, results = torch.rand(2, 16, 9, 10, device=DEVICE) + 0.5, []
    last, inside = x.contiguous(memory_format=torch.channels_last), x.movedim(2, 0).contiguous().movedim(0, 2)
    for other in (x, last, inside, torch.cat([x, x], 1)[:, :16], x.double()):
        y = seeded(drop_block, other, 0.2, 3, per_channel=per_channel)
        assert y.stride() == torch.empty_like(other).stride()
        results.append(y.float())
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-6, atol=0)


def test_higher_derivatives_and_transforms() -> None:
    x = torch.rand(2, 3, 7, 7, device=DEVICE) + 0.5
    drop, loss = lambda x: drop_block(x, 0.3, 3), lambda x: seeded(drop_block, x, 0.3, 3).pow(2).sum()
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
    (second,) = torch.autograd.grad(gradient.sum(), leaf)
    torch.testing.assert_close(gradient.detach(), second * x)
    y = drop_block(leaf, 0.3, 3)
    each = torch.eye(y.numel(), device=DEVICE).view(-1, *y.shape)
    (batched,) = torch.autograd.grad(y, leaf, each, is_grads_batched=True)
    torch.testing.assert_close(batched.sum(0), y.detach() / x)
    found = torch.func.grad(loss)(x)
    ratio = (found / x)[found != 0]
    torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio))
    for randomness, same in (("same", True), ("different", False)):
        pair = torch.vmap(drop, randomness=randomness)(torch.ones_like(x).expand(2, *x.shape))
        assert torch.equal(*pair) is same
    primal, tangent = torch.func.jvp(drop, (x,), (x,))
    torch.testing.assert_close(primal, tangent)


@pytest.mark.parametrize("normalize", ["batch", "sample", "expected", None])
def test_operators(normalize: str | None) -> None:
    """The operators of compiled code: the fake results have the format of the real ones, and gradients are right."""
    x = torch.rand(3, 5, 9, 7, device=DEVICE, requires_grad=True)
    arguments = [2, 3], 1, True, "exact", normalize
    p = torch.tensor(0.3, dtype=torch.float64)
    for real, fake in zip(custom_ops._draw(x, p, *arguments), custom_ops._draw_fake(x, p, *arguments), strict=True):
        assert (real.shape, real.dtype, real.device) == (fake.shape, fake.dtype, fake.device)
    y = custom_ops.drop_block(x, p, (2, 3), 1, True, "exact", normalize)
    torch.testing.assert_close(y, torch.where(y == 0, 0, x * scale_of(y == 0, normalize, 0.3)))
    (gradient,) = torch.autograd.grad((y * x.detach()).sum(), x)
    torch.testing.assert_close(gradient, y.detach())


def test_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `benchmarks/launches.py` assumes: a forward is `randint` and two kernels, and backward one kernel."""
    from hookdrop.accel import triton_kernels

    launched = []
    for name in ("draw_kernel", "mask_kernel"):
        kernel = getattr(triton_kernels, name)

        class Counting:
            def __getitem__(self, grid: object, kernel: Any = kernel, name: str = name) -> Callable[..., None]:
                launched.append(name)
                return lambda *args, **kwargs: None  # the interpreter itself uses operations

        monkeypatch.setattr(triton_kernels, name, Counting())
    monkeypatch.setattr(triton_dropblock, "has_plain_memory", lambda x: True)
    x, blocks = torch.ones(2, 3, 7, 7, device=DEVICE), Blocks(2, 3, (7, 7), (3, 3))
    with Operations() as operations:
        packed, counters = KERNELS.draw(blocks, 0.1, "batch", DEVICE)
        assert (operations.names, launched) == (["randint"], ["draw_kernel"])
        KERNELS.mask(x, packed, counters, blocks)
        assert (operations.names, launched) == (["randint"], ["draw_kernel", "mask_kernel"])


def test_unsupported_geometries_use_pytorch_operations() -> None:
    assert not KERNELS.can_draw(Blocks(1, 1, (600, 600), (500, 500)), DEVICE)
    y = drop_block(torch.ones(1, 1, 600, 600, device=DEVICE), 0.5, 500, normalize=None)
    assert 0 < (y == 0).sum() < y.numel()


class TestCheckBeforeTheFirstUse:
    """The kernels replace PyTorch's operations only on devices on which they pass."""

    @pytest.fixture(autouse=True)
    def unchecked(self, use_triton: None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(triton_dropblock, "_works", {})
        monkeypatch.setattr(triton_dropblock, "_fault", functools.cache(triton_dropblock._fault))

    def test_working_kernels_are_checked_once(self) -> None:
        torch.manual_seed(0)
        state = torch.get_rng_state()
        assert triton_dropblock.usable(DEVICE)
        assert triton_dropblock.usable(DEVICE)
        assert torch.equal(torch.get_rng_state(), state)
        assert triton_dropblock._fault.cache_info().misses == 1  # type: ignore[attr-defined]

    @pytest.mark.parametrize("mode", [torch.inference_mode, torch.device("meta"), Operations])
    def test_it_works_in_modes_and_transforms(self, mode: Any) -> None:
        with mode if isinstance(mode, torch.device) else mode():
            assert triton_dropblock.usable(DEVICE)
        with Operations() as operations:
            torch.ones(1).exp()
        assert operations.names[-1] == "exp"  # modes are as before
        triton_dropblock._works.clear()
        assert torch.vmap(lambda x: x * triton_dropblock.usable(DEVICE))(torch.ones(2)).all()

    @pytest.mark.parametrize(
        ("name", "change", "reason"),
        [
            ("_draw", lambda draw: lambda *args: draw(*args) ^ 4, "the masks differ"),
            ("_draw", lambda draw: lambda *args: (draw(*args), args[-1].add_(2**31))[0], "the counts"),
            ("_mask", lambda mask: lambda *args: mask(*args) * 1.01, "the results differ"),
            ("_mask", lambda mask: lambda *args: exec("raise RuntimeError('out of resources')"), "RuntimeError: out of resources"),
        ],
    )  # fmt: skip
    def test_a_broken_kernel_is_replaced(self, name: str, change: Any, reason: str, monkeypatch: Any) -> None:
        monkeypatch.setattr(triton_dropblock, name, change(getattr(triton_dropblock, name)))
        x = torch.ones(2, 8, 14, 14, device=DEVICE)
        with pytest.warns(HookdropWarning, match=f"the GPU kernels of DropBlock fail on {DEVICE}: {reason}"):
            dropped = (drop_block(x, 0.2, 3, normalize=None) == 0).float().mean()
        assert 0.1 < dropped < 0.3
        drop_block(x, 0.2, 3)  # no second warning
        assert not triton_dropblock.usable(DEVICE)

    def test_a_broken_compiler(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "hookdrop.accel.triton_kernels", None)
        with pytest.warns(HookdropWarning, match="fail on .*: ModuleNotFoundError: import of hookdrop.accel.triton"):
            assert not triton_dropblock.usable(DEVICE)
