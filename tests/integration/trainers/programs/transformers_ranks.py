"""Run by test_transformers.py on two ranks: each rank writes its rates and a mask to a file."""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[4]))

import torch

from hookdrop import find
from hookdrop.integrations.transformers import InjectionCallback
from tests.integration.trainers.test_transformers import BRANCHES, Rates, SeedSteps, trainer


def main(folder: Path, rank: str) -> None:
    rates = Rates()
    made = trainer(folder, InjectionCallback(BRANCHES), rates)
    made.remove_callback(SeedSteps)
    made.train()
    dropped = (made.model.model.layers[0].mlp.train()(torch.ones(4, 8, 32)) == 0).flatten().tolist()
    facts = {"rates": rates.rates, "step": next(iter(find(made.model))).step_count, "dropped": dropped}
    (folder / f"rank{rank}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), os.environ["RANK"])
