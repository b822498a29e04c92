"""On a GPU: every regularizer, no waiting for the device, mixed precision, CUDA graphs and compiled code."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hookdrop import DropBlock, Dropout, LinearSchedule, Penalty, inject
from tests.support.models import Small
from tests.support.regularizers import EVERY, SITES, Case
from tests.support.tensors import all_equal
from tests.support.training import train_step

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.mark.parametrize("case", EVERY.values(), ids=EVERY)
def test_masks_repeat_also_in_a_recompute_and_removal_leaves_the_model_as_it_was(case: Case) -> None:
    model, x = case.model().cuda(), case.example.cuda()
    clean = copy.deepcopy(model)
    drop = inject(model, case.regularizer, layers=SITES)
    first = train_step(model, x)
    assert all_equal(first, train_step(model, x))
    assert all_equal(first, train_step(model, x, lambda x: checkpoint(model, x, use_reentrant=False)))
    assert torch.equal(model.eval()(x), clean.eval()(x))
    drop.remove()
    assert all_equal(train_step(model, x), train_step(clean, x))


@pytest.mark.parametrize("case", EVERY.values(), ids=EVERY)
def test_no_step_waits_for_the_gpu(case: Case, request: pytest.FixtureRequest) -> None:
    request.addfinalizer(lambda: torch.cuda.set_sync_debug_mode("default"))
    model, x = case.model().cuda(), case.example.cuda()
    drop = inject(model, case.regularizer, layers=SITES)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(4):
        if step == 2:  # the first call compiles the kernels and tests them
            torch.cuda.set_sync_debug_mode("error")
        loss = model(x).square().sum() + (drop.penalty() if isinstance(case.regularizer, Penalty) else 0)
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_with_a_scaler_counts_each_update_and_no_skipped_step(dtype: torch.dtype) -> None:
    model = Small().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    drop = inject(model, DropBlock(0.4, 3), layers="layer1.*", schedule=LinearSchedule(40)).follow(optimizer)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**24)  # the first gradients overflow in float16
    updates = 0
    for _ in range(30):
        with torch.autocast("cuda", dtype):
            loss = model(torch.randn(4, 3, 16, 16, device="cuda")).float().square().mean()
        scaler.scale(loss).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        updates += scaler.get_scale() >= before
        assert drop.step_count == updates
    assert updates > 5


def test_each_replay_of_a_cuda_graph_draws_new_masks() -> None:
    model = nn.Sequential(nn.Identity(), nn.Identity())
    for name, regularizer in zip("01", (DropBlock(0.4, 3), Dropout(0.4)), strict=True):
        inject(model, regularizer, layers=name)
    x, graph, masks = torch.ones(8, 16, 14, 14, device="cuda"), torch.cuda.CUDAGraph(), []
    model(x)  # compiles the kernels
    with torch.cuda.graph(graph):
        y = model(x)
    for _ in range(20):
        graph.replay()
        masks.append(y == 0)
    assert not torch.equal(masks[0], masks[1])
    assert abs(torch.stack(masks).double().mean().item() - (1 - 0.6 * 0.6)) < 0.03


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_code_follows_the_rate(mode: str) -> None:
    model = nn.Sequential(nn.Identity(), nn.Identity())
    drop = inject(model, Dropout(0.8), layers=["0", "1"], schedule=LinearSchedule(2))
    compiled = torch.compile(model, mode=mode, fullgraph=True)
    x = torch.ones(1000, 1000, device="cuda", requires_grad=True)
    for rate in (0.0, 0.4, 0.8):
        masks = []
        for _ in range(4):
            y = compiled(x)
            y.sum().backward()
            masks.append(y == 0)
            assert abs(masks[-1].double().mean().item() - (1 - (1 - rate) ** 2)) < 0.005
        assert rate == 0 or not torch.equal(masks[-1], masks[-2])
        drop.step()
