"""Check an installed hookdrop with only PyTorch. Run `python .ci/smoke.py --compiled yes` (or no) elsewhere."""

from __future__ import annotations

import argparse
from importlib.metadata import version

import torch
from torch import nn

import hookdrop
from hookdrop import DropBlock, Dropout, LinearSchedule, find, inject, plan
from hookdrop.accel import native

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--compiled", choices=["yes", "no"], required=True)
compiled = parser.parse_args().compiled == "yes"

print(f"hookdrop {version('hookdrop')} in {hookdrop.__path__[0]}, PyTorch {torch.__version__}")
assert version("hookdrop") == hookdrop.__version__
assert native.available() == compiled, f"compiled loops: {native.available()}"

torch.manual_seed(0)
blocks = [nn.Sequential(nn.LazyConv2d(16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(3)]
model = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
model(torch.zeros(1, 3, 32, 32))
before = {name: value.clone() for name, value in model.state_dict().items()}
images = torch.randn(16, 3, 32, 32)
settings = {"layers": "[12].1", "schedule": LinearSchedule(steps=100), "example_input": images}

print(plan(model, DropBlock(p=0.1, block_size=7), **settings))
drop = inject(model, DropBlock(p=0.1, block_size=7), **settings)
print(drop.probe(images, step=100))
assert model.state_dict().keys() == before.keys()
assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
drop.follow(optimizer)
for _ in range(3):
    nn.functional.cross_entropy(model(images), torch.randint(10, (16,))).backward()
    optimizer.step()
    optimizer.zero_grad()
print(drop)
assert drop.sites[0].p > 0
drop.remove()
assert not find(model)

for regularizer in (DropBlock(p=0.1, block_size=7), Dropout(p=0.1)):
    x = torch.ones(64, 64, 28, 28, requires_grad=True)
    y = regularizer(x)
    y.sum().backward()
    dropped = (y == 0).float().mean().item()
    print(f"{regularizer}: dropped {dropped:.3f}, mean {y.mean().item():.3f}")
    assert abs(dropped - 0.1) < 0.01
    assert torch.equal(x.grad == 0, y == 0)
