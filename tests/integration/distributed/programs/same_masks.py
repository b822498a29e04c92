"""Run by test_distributed.py on two ranks: whole branches are skipped on all ranks together."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from nets import Net, X
from torch.utils.checkpoint import checkpoint

from hookdrop import DropPath, inject, seed_per_rank


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    alone, _ = dist.new_subgroups(group_size=1)
    torch.manual_seed(0)
    net, skipped = Net(), []
    drop = inject(net, DropPath(p=0.5, mode="batch"), layers="blocks.*.norm")
    for block in net.blocks:
        block.norm.register_forward_hook(lambda module, args, y: skipped.append(not y.any().item()))
    found = {}
    for how in ("own", "same"):
        seed_per_rank(0)
        skipped.clear()
        for step in range(8):
            torch.rand(rank)  # ranks draw different numbers between the steps
            if how == "same":
                seed_per_rank(step, group=alone)
            images = X[: 2 + rank].requires_grad_()
            checkpoint(net, images, use_reentrant=False).sum().backward()
        found[how] = skipped[:]
    (folder / f"rank{rank}.json").write_text(json.dumps(found | {"problems": drop.check()}))
    dist.destroy_process_group()


main(Path(sys.argv[1]))
