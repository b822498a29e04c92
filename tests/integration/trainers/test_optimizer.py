"""`follow` counts optimizer steps through the optimizer wrappers of trainers."""

from __future__ import annotations

import torch

from tests.support.followed import setup


def test_follow_through_the_accelerate_wrapper() -> None:
    from accelerate import Accelerator

    model, drop, optimizer = setup()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    prepared, wrapped = accelerator.prepare(model, optimizer)
    drop.follow(wrapped)
    drop.follow(wrapped)
    for _ in range(6):
        with accelerator.accumulate(prepared):
            accelerator.backward(prepared(torch.ones(2, 4)).sum())
            wrapped.step()
            wrapped.zero_grad()
    assert drop.step_count == 3
