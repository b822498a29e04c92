"""`follow` with optimizers of other libraries."""

from __future__ import annotations

from tests.support.followed import backward, setup


def test_follow_through_timm_lookahead() -> None:
    from timm.optim import Lookahead

    model, drop, optimizer = setup()
    lookahead = Lookahead(optimizer)
    drop.follow(lookahead)
    drop.follow(optimizer)
    for _ in range(3):
        backward(model)
        lookahead.step()
    assert drop.step_count == 3
