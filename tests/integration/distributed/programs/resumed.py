"""Run by test_distributed.py on three ranks: resumes from the checkpoint of two_ranks.py."""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from nets import output, run, sharded, train, training_state
from torch.distributed.checkpoint.state_dict import set_state_dict

from hookdrop import seed_per_rank


def resumed() -> dict[str, Any]:
    net, optimizer, drop = sharded()
    state = training_state(net, optimizer, drop)
    dcp.load(state, checkpoint_id=f"{sys.argv[2]}/saved")
    set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    facts = {
        "ranks": dist.get_world_size(),
        "output": output(net),
        "loaded": (drop.step_count, drop.p, drop.target_p),
        "nested": state["nested"]["a"][0],
        "own": drop.state_dict(),
    }
    seed_per_rank(1)
    train(net, optimizer, 2)
    return facts | {"trained": (drop.step_count, drop.p), "check": drop.check()}


if __name__ == "__main__":
    run({"resumed": resumed})
