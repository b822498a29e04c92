"""`benchmarks/launches.py`: launches, memory traffic and saved bytes on GPUs, on fake CUDA tensors."""

import itertools
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import launches
from hookdrop.accel import triton_dropblock
from hookdrop.functional import drop_block
from hookdrop.kernels import custom_ops
from tests.support.tensors import accelerate

pytestmark = pytest.mark.skipif(torch.__version__ < (2, 14), reason="PyTorch 2.13 needs CUDA for fake CUDA tensors")

MAX_FORWARD, MAX_BACKWARD, MAX_BYTES, MAX_SAVED = 3, 2, 9.0, 0.15
SHAPES = [(32, 256, 28, 28), (32, 2048, 7, 7), (16, 64, 112, 112), (64, 64, 100), (2, 8, 16, 24, 20)]


@pytest.fixture(autouse=True)
def with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_dropblock, "usable", lambda device: device.type == "cuda")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_drop_block(shape: tuple[int, ...]) -> None:
    formats = [torch.contiguous_format, *([torch.channels_last] if len(shape) == 4 else [])]
    elements = torch.Size(shape).numel()
    for normalize, per_channel, dtype, memory_format in itertools.product(
        ("batch", "sample", "expected", None), (True, False), (torch.float32, torch.bfloat16), formats
    ):
        function = partial(drop_block, p=0.1, normalize=normalize, per_channel=per_channel, channel_dim=1)
        forward = launches.forward(function, shape, dtype=dtype, memory_format=memory_format)
        assert 0 < forward.launches <= MAX_FORWARD
        if dtype == torch.float32:
            assert 8.0 <= forward.bytes / elements <= MAX_BYTES
        with FakeTensorMode():
            gradient = torch.empty(shape, dtype=dtype, device="cuda", memory_format=memory_format)
            kind = [7] * (len(shape) - 2), 1, per_channel
            saved = custom_ops._DRAW(gradient, torch.tensor(0.1), *kind, "exact", normalize)
            assert sum(tensor.nbytes for tensor in saved) / elements <= MAX_SAVED
            with launches.LaunchCounter() as backward:
                custom_ops._MASK(gradient, *saved, *kind)
        assert 0 < backward.launches <= MAX_BACKWARD


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_other_regularizers_launch_no_more_than_their_equivalents(dtype: torch.dtype) -> None:
    found = {name: launches.forward(function, dtype=dtype).launches for name, function in launches.FUNCTIONS.items()}
    assert 0 < found["hookdrop dropout"] <= found["F.dropout"]
    assert 0 < found["hookdrop dropout2d"] <= found["F.dropout2d"]
    assert 0 < found["hookdrop drop_path"] <= found["timm drop_path"]
    assert 0 < found["hookdrop GaussianNoise"] < found["x + p * torch.randn_like(x)"]
    assert 0 < found["hookdrop UniformNoise"] < found["x * (1 + p * (2 * torch.rand_like(x) - 1))"]


def test_the_counter_sees_every_operation_except_views_and_allocations() -> None:
    found = launches.forward(lambda x: torch.empty_like(x).fill_(2.0).view(-1).add(1.0))
    assert (found.launches, found.bytes / torch.Size(launches.SHAPE).numel()) == (2, 12.0)


def test_without_triton_drop_block_launches_many_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerate(monkeypatch, "cuda")
    assert launches.forward(launches.FUNCTIONS["hookdrop batch"]).launches > 20
