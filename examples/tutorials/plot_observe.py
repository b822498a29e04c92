"""
Look inside: activations, masks and Grad-CAM
============================================

This tutorial trains two copies of a small network, one of them with DropBlock. It looks at the layers of one, records
the masks of training steps, and compares the class activation maps of the two copies.

The figures need ``pip install 'hookdrop[observe]'``.
"""

# sphinx_gallery_thumbnail_number = 4
import copy
from collections import OrderedDict

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy, interpolate
from torchvision.ops import Conv2dNormActivation

from hookdrop import DropBlock, LinearSchedule, inject, observe

torch.manual_seed(0)

# %%
# Two copies of a network
# -----------------------
#
# The network ends in 8 x 8 maps, global average pooling and one linear layer. Both copies start from the same weights
# and see the same batches of digits.

digits = load_digits()
images = torch.tensor(digits.images / 16, dtype=torch.float32)[:, None]
x, y = interpolate(images, 16, mode="bilinear"), torch.tensor(digits.target)
train_x, train_y, test_x, test_y = x[:1000], y[:1000], x[1000:1200], y[1000:1200]

layers = {
    "block1": Conv2dNormActivation(1, 16),
    "block2": Conv2dNormActivation(16, 32, stride=2),
    "block3": Conv2dNormActivation(32, 32),
    "pool": nn.AdaptiveAvgPool2d(1),
    "flatten": nn.Flatten(),
    "head": nn.Linear(32, 10),
}
without = nn.Sequential(OrderedDict(layers))
regularized = copy.deepcopy(without)


def train(model, steps, follow=lambda optimizer: None):
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    follow(optimizer)
    order = torch.Generator().manual_seed(0)
    model.train()
    for _ in range(steps):
        chosen = torch.randint(len(train_x), (64,), generator=order)
        cross_entropy(model(train_x[chosen]), train_y[chosen]).backward()
        optimizer.step()
        optimizer.zero_grad()


drop = inject(
    regularized,
    DropBlock(p=0.3, block_size=3),
    layers="block3",
    schedule=LinearSchedule(steps=200),
)
with observe.statistics(without, "block*.*") as health:
    train(without, 200)
train(regularized, 200, drop.follow)
drop.follow(None)
print(drop)

# %%
# Look at the layers
# ------------------
#
# ``observe.statistics`` has measured every tenth of these steps: a table of the layers, the worst first, and bars in
# the order of the calls. ``observe.capture`` keeps what passes through a layer.

print(health)
print(health.doubts() or "no doubts")

figure = plt.figure(figsize=(8, 3), layout="constrained")
health.plot(figure=figure)
figure.suptitle(
    "Dead units, spread and gradients of the layers of a training", fontsize=11
)
plt.show()

with observe.capture(without, "block2", what=("output", "gradient")) as seen:
    cross_entropy(without(test_x), test_y).backward()
figure = plt.figure(figsize=(8, 3.5), layout="constrained")
seen.plot("block2", channels=6, figure=figure)
figure.suptitle("Output and gradient of six channels of block2", fontsize=11)
plt.show()

# %%
# Record what the regularizer does
# --------------------------------
#
# ``drop.recording()`` keeps the input, the mask and the output of the last call of each layer, from real training
# steps.

with drop.recording() as recorded:
    train(regularized, 3)
print(recorded)

# %%
# ``observe.compare`` runs one batch with and without the regularizer: which layers feel it, and how much.

print(observe.compare(regularized, test_x, drop, "block*"))

# %%
# Before, mask and after of one layer:

figure = plt.figure(figsize=(8, 4), layout="constrained")
recorded.plot_features(sample=1, channels=6, figure=figure)
figure.suptitle(
    "DropBlock in a training step: before, mask and after of six channels", fontsize=11
)
plt.show()

# %%
# Compare class activation maps
# -----------------------------
#
# Grad-CAM shows which regions of an image are evidence for its class. The DropBlock paper (arXiv:1810.12890) uses such
# maps to show that a network trained with DropBlock uses several regions of an image. ``compare_cam`` computes them for
# two models and the same images: ``before`` is the network trained without DropBlock, ``after`` the one with it.

maps = observe.compare_cam(without, regularized, test_x, "block3", target=test_y)
figure = plt.figure(figsize=(8, 4.5), layout="constrained")
maps.plot(6, figure=figure)
figure.suptitle(
    "Grad-CAM of six digits: trained without (before) and with DropBlock (after)",
    fontsize=11,
)
plt.show()

wide = [float(fractions.mean()) for fractions in (maps.wide_before, maps.wide_after)]
print("mean image area with Grad-CAM above half of its maximum:", end=" ")
print(f"{wide[0]:.1%} without, {wide[1]:.1%} with DropBlock")

# %%
# Two small networks neither confirm nor refute the observation of the paper: the area also changes with the seed and
# the layer.
#
# All hooks of this module are removed when their ``with`` block ends. The regularizer stays until ``remove``:

drop.remove()

# %%
# See also
# --------
#
# * :doc:`/guides/look_inside` lists all functions, and how to log the figures to TensorBoard.
# * :doc:`/reference/index` has the arguments of ``hookdrop.observe``.
