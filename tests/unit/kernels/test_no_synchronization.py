"""Nothing synchronizes on a CUDA device. Fake CUDA tensors, which have no values, raise at a synchronization."""

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from hookdrop.functional import drop_block
from hookdrop.kernels import random_numbers
from tests.support.regularizers import EVERY, Case
from tests.support.tensors import accelerate

pytestmark = pytest.mark.skipif(torch.__version__ < (2, 14), reason="PyTorch 2.13 needs a CUDA device for fake tensors")


@pytest.fixture(autouse=True)
def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test PyTorch's operations. tests/benchmarks/test_launches.py runs the operators of the kernels on fake tensors."""
    accelerate(monkeypatch, "cuda")


SYNC_ERRORS = (DataDependentOutputException, DynamicOutputShapeException)
SHAPES = [((8, 64, 28, 28), None), ((2, 4, 6, 5, 7), None), ((16, 32, 70), -1), ((8, 28, 28, 64), -1)]


def test_a_synchronization_is_detected() -> None:
    """The dynamic draw of the CPU reads the number of seeds, which raises for a fake CUDA tensor."""
    with FakeTensorMode(), pytest.raises(SYNC_ERRORS):
        random_numbers.successes(10_000, 0.01, torch.device("cuda"))
    with FakeTensorMode(), pytest.raises(SYNC_ERRORS):
        random_numbers.trials(10_000, 0.01, torch.device("cuda"), static=False)


@pytest.mark.parametrize(("shape", "channel_dim"), SHAPES, ids=str)
@pytest.mark.parametrize("normalize", ["batch", "sample", "expected", None])
@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("p", [1e-6, 0.1, 0.95, 1.0])
def test_drop_block_forward_does_not_synchronize(
    shape: tuple[int, ...], channel_dim: int | None, normalize: str | None, per_channel: bool, p: float
) -> None:
    for dtype, device in itertools.product((torch.float32, torch.bfloat16), ("cuda", "cpu")):
        with FakeTensorMode(allow_non_fake_inputs=False):
            x = torch.empty(shape, dtype=dtype, device=device)
            y = drop_block(x, p, 3, normalize=normalize, per_channel=per_channel, channel_dim=channel_dim)
            assert (y.shape, y.dtype, y.device.type, y.stride()) == (x.shape, dtype, device, x.stride())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", EVERY.values(), ids=EVERY)
def test_no_regularizer_synchronizes(case: Case, dtype: torch.dtype) -> None:
    for device in ("cuda", "cpu"):
        with FakeTensorMode(allow_non_fake_inputs=False):
            x = torch.empty(case.shape, dtype=dtype, device=device)
            y = case(x)
            assert (y.shape, y.dtype, y.device.type) == (x.shape, dtype, device)
