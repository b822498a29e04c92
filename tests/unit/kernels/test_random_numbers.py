"""Random numbers in eager code, and the operator that compiled code calls.

tests/integration/compile/test_recompute.py tests when compiled code calls it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from hookdrop.kernels import random_numbers
from hookdrop.kernels.random_numbers import rand, rand_like, randint, randn_like, replayed

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
X = torch.zeros(2, 3, 4, 5, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)


def drawn(draw: Callable[[], Tensor]) -> Tensor:
    torch.manual_seed(3)
    return draw()


def check_equal(ours: Callable[[], Tensor], theirs: Callable[[], Tensor]) -> None:
    """The same numbers, dtype, device and strides."""
    torch.testing.assert_close(drawn(ours), drawn(theirs), rtol=0, atol=0, check_stride=True)


@pytest.mark.parametrize("shape", [(), (4,), (0, 2), [2, 3], torch.Size([5, 1, 2])], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_equal_those_of_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check_equal(lambda: rand(shape, dtype, CPU), lambda: torch.rand(tuple(shape), dtype=dtype))
    check_equal(lambda: randint(9, tuple(shape), CPU), lambda: torch.randint(9, tuple(shape)))
    check_equal(lambda: rand_like(X, dtype), lambda: torch.rand_like(X, dtype=dtype))
    check_equal(lambda: randn_like(X, dtype), lambda: torch.randn_like(X, dtype=dtype))
    check_equal(lambda: randn_like(X), lambda: torch.randn_like(X))
    check_equal(lambda: replayed(torch.rand, 2, 3, dtype=dtype), lambda: torch.rand(2, 3, dtype=dtype))


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_each_slice_of_a_vmap_draws_as_in_torch(randomness: str) -> None:
    x = torch.zeros(3, 8)
    check_equal(
        lambda: vmap(lambda x: x + rand((8,), x.dtype, CPU), randomness=randomness)(x),
        lambda: vmap(lambda x: x + torch.rand(8), randomness=randomness)(x),
    )


@pytest.mark.parametrize(
    ("kind", "high", "dtype", "theirs"),
    [
        ("rand", 0, torch.float64, lambda: torch.rand(2, 3, dtype=torch.float64)),
        ("randn", 0, torch.bfloat16, lambda: torch.randn(2, 3, dtype=torch.bfloat16)),
        ("randint", 9, torch.int64, lambda: torch.randint(9, (2, 3))),
    ],
)
def test_operator(kind: str, high: int, dtype: torch.dtype, theirs: Callable[[], Tensor]) -> None:
    """It equals PyTorch's function, its fake implementation has the same metadata, and it is marked as random."""
    settings = {"dtype": dtype, "device": CPU}
    check_equal(lambda: random_numbers._NUMBERS(kind, high, [2, 3], **settings), theirs)
    torch.library.opcheck(random_numbers._NUMBERS, (kind, high, [2, 3]), settings, test_utils=("test_faketensor",))
    assert torch.Tag.nondeterministic_seeded in random_numbers._NUMBERS.tags
