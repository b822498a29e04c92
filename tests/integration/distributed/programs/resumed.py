"""Run by test_distributed.py on three ranks: resumes from the checkpoint of two_ranks.py."""

import sys

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import set_state_dict

from hookdrop import seed_per_rank
from tests.integration.distributed.programs.nets import output, run, sharded, train, training_state


def resumed() -> list[float]:
    net, optimizer, drop = sharded()
    state = training_state(net, optimizer, drop)
    dcp.load(state, checkpoint_id=f"{sys.argv[2]}/saved")
    set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert dist.get_world_size() == 3
    assert (drop.step_count, drop.p, drop.target_p) == (5, pytest.approx(0.1), 0.2)
    assert state["nested"]["a"][0] == drop.state_dict()
    found = output(net)
    seed_per_rank(1)
    train(net, optimizer, 2)
    assert (drop.step_count, drop.p) == (7, pytest.approx(0.14))
    assert drop.check() == []
    return found


if __name__ == "__main__":
    run({"resumed": resumed})
