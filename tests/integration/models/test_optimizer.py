"""`follow` counts the optimizer steps that were taken, each once, and no others."""

from __future__ import annotations

from tests.support.followed import backward, setup


def test_through_timms_lookahead() -> None:
    from timm.optim import Lookahead

    model, drop, optimizer = setup()
    lookahead = Lookahead(optimizer)
    drop.follow(lookahead)
    drop.follow(optimizer)
    for _ in range(3):
        backward(model)
        lookahead.step()
    assert drop.step_count == 3
