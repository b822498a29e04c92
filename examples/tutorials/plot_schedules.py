"""
Schedules, and the rate that a training loop applies
====================================================

A schedule changes the rate of a regularizer during training. This tutorial draws the schedules, runs a training loop
with one of them, and compares the rate that the schedule asks for with the rate that the loop applies.
"""

# sphinx_gallery_thumbnail_number = 3
import warnings
from collections import OrderedDict

import matplotlib.pyplot as plt
import timm
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torchvision.ops import Conv2dNormActivation

from hookdrop import (
    ChainedSchedule,
    CosineSchedule,
    DropBlock,
    DropPath,
    EarlySchedule,
    ExponentialSchedule,
    LateSchedule,
    LinearSchedule,
    inject,
)
from hookdrop.observe import plot_schedule

torch.manual_seed(0)

# %%
# A schedule is a function of the step
# ------------------------------------
#
# A schedule maps the number of optimizer steps to a multiplier. The rate of a layer is
# ``p * p_scale * schedule(step)``.

ramp = LinearSchedule(steps=100)
print([ramp(step) for step in (0, 50, 100, 1000)])

# %%
# ``plot_schedule`` draws a schedule.

figure = plt.figure(figsize=(8, 8), layout="constrained")
figure.suptitle("Multiplier of the rate, by optimizer step", fontsize=11)
schedules = [
    LinearSchedule(steps=100),
    LinearSchedule(steps=60, delay=40),
    CosineSchedule(steps=100),
    ExponentialSchedule(steps=100),
    EarlySchedule(cutoff=50),
    LateSchedule(cutoff=50),
]
for part, schedule in zip(figure.subfigures(3, 2).flat, schedules, strict=True):
    plot_schedule(schedule, 120, figure=part)
plt.show()

# %%
# The linear one is the schedule of the DropBlock paper. The exponential one is that of curriculum dropout. Early and
# late dropout switch the rate off or on at a step.
#
# ``ChainedSchedule`` runs schedules one after another, here a ramp up and a ramp down:

up_and_down = ChainedSchedule(
    [LinearSchedule(steps=50), LinearSchedule(steps=50, start=1.0, end=0.2)],
    milestones=[50],
)
figure = plt.figure(figsize=(8, 3), layout="constrained")
figure.suptitle("A chained schedule: up, then down to 20 %", fontsize=11)
plot_schedule(up_and_down, 120, figure=figure).axes[0].set_title("")
plt.show()

# %%
# In a training loop
# ------------------
#
# The model is a small convolutional network for the digits of scikit-learn. DropBlock acts on its last map.

digits = load_digits()
images, labels = (
    torch.tensor(digits.images / 16, dtype=torch.float32)[:, None],
    torch.tensor(digits.target),
)
layers = {
    "stem": Conv2dNormActivation(1, 16),
    "body": Conv2dNormActivation(16, 32),
    "pool": nn.AdaptiveAvgPool2d(1),
    "flatten": nn.Flatten(),
    "head": nn.Linear(32, 10),
}
model = nn.Sequential(OrderedDict(layers))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
drop = inject(
    model,
    DropBlock(p=0.2, block_size=3),
    layers="body",
    schedule=LinearSchedule(steps=60),
)
print(drop)

# %%
# The rate is 0 until something counts the steps. ``follow`` counts the steps of the optimizer, also with gradient
# accumulation, which this loop uses: two batches make one step. (Without ``follow``, call ``drop.step()`` after each
# ``optimizer.step()``, or ``drop.seek(global_step)``.)
#
# ``drop.metrics()`` returns the rate and the step as a flat dict for loggers. ``drop.recording(last=0)`` counts what is
# really dropped in the forward passes inside the ``with`` block.

drop.follow(optimizer)


def train(batches):
    """Train the model; return the metrics and the dropped fraction of each batch."""
    log = []
    for batch in range(1, batches + 1):
        chosen = torch.randint(len(images), (32,))
        with drop.recording(last=0) as measured:
            loss = cross_entropy(model(images[chosen]), labels[chosen])
        log.append({**drop.metrics(), "dropped": measured.totals.dropped})
        (loss / 2).backward()
        if batch % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    return log


log = train(160)
print(log[-1])
print(drop)

# %%
# Planned and applied
# -------------------
#
# ``plot_schedule`` also draws an injection: its rate by step, keep_prob on the right, and the current step. The dots
# are the fractions that the loop dropped.

figure = plt.figure(figsize=(8, 4), layout="constrained")
figure.suptitle(
    "The planned rate (line), and what each batch dropped (dots)", fontsize=11
)
plot_schedule(drop, 100, figure=figure)
steps = [row["hookdrop/dropblock/step"] for row in log]
figure.axes[0].scatter(steps, [row["dropped"] for row in log], s=10, color="tab:orange")
figure.axes[0].set_ylim(0, 0.24)
plt.show()

after_ramp = log[120:]
requested = sum(row["hookdrop/dropblock/p"] for row in after_ramp) / len(after_ramp)
dropped = sum(row["dropped"] for row in after_ramp) / len(after_ramp)
print(f"after the ramp: requested {requested:.3f}, dropped {dropped:.3f}")

# %%
# The dots scatter, because each batch draws new masks; their mean follows the line. 160 batches are 80 steps here. A
# schedule with ``steps=160`` would have reached only half of its target:

print(LinearSchedule(steps=160)(80))

# %%
# Change the rate in the middle of training
# -----------------------------------------
#
# ``drop.target_p`` sets a new target. ``drop.disabled()`` switches the regularizer off inside a ``with`` block, and its
# step count continues.

log += train(40)
drop.target_p = 0.1
log += train(40)
with drop.disabled():
    log += train(40)
log += train(40)

figure, axes = plt.subplots(figsize=(8, 3), layout="constrained")
figure.suptitle("The rate of each step, from drop.metrics()", fontsize=11)
steps, rates = (
    [row[f"hookdrop/dropblock/{key}"] for row in log] for key in ("step", "p")
)
axes.step(steps, rates, where="post")
axes.text(100, 0.105, "target_p = 0.1")
axes.text(121, 0.005, "disabled")
axes.set(xlabel="optimizer steps", ylabel="p")
plt.show()

# %%
# One rate for each layer
# -----------------------
#
# ``p_scale`` multiplies the rate of each layer. With ``"depth"``, it rises linearly with the depth of the layer, as in
# stochastic depth. The schedule multiplies all of them.

vit = timm.create_model("test_vit", num_classes=10)
paths = inject(
    vit,
    DropPath(p=0.3),
    layers="blocks.*.mlp",
    p_scale="depth",
    schedule=CosineSchedule(steps=100),
)
figure = plt.figure(figsize=(8, 4), layout="constrained")
figure.suptitle(
    "Rates of DropPath in a vision transformer, with p_scale='depth'", fontsize=11
)
plot_schedule(paths, 150, figure=figure)
plt.show()
paths.remove()

# %%
# If nothing counts the steps
# ---------------------------
#
# Without ``follow``, ``step`` or ``seek``, the rate of this schedule stays 0 and the model trains without a
# regularizer. hookdrop notices that weights change while the schedule stands still, and warns:

drop.remove()
drop = inject(
    model,
    DropBlock(p=0.2, block_size=3),
    layers="body",
    schedule=LinearSchedule(steps=60),
)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    train(60)
print(caught[0].message)

# %%
# Resume
# ------
#
# The checkpoint of the model contains nothing of hookdrop. Save the state of the injection next to it, and load it
# after the same ``inject`` call.

drop.seek(30)
state = drop.state_dict()
drop.remove()
drop = inject(
    model,
    DropBlock(p=0.2, block_size=3),
    layers="body",
    schedule=LinearSchedule(steps=60),
)
drop.load_state_dict(state)
print(drop)
drop.remove()

# %%
# See also
# --------
#
# * :doc:`/guides/schedules` lists all schedules with their arguments.
# * :doc:`/guides/resuming` has complete programs.
# * :doc:`/trainers/index` shows where to count steps in Lightning, transformers and other trainers.
