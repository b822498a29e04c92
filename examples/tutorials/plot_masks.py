"""
What each regularizer does to a feature map
===========================================

A regularizer changes the output of a layer in training. This tutorial draws the change for every regularizer of
hookdrop that acts in the forward pass: the feature map before, the mask, and the feature map after. It ends with the
fraction of the map that DropBlock drops, in hookdrop, in torchvision and in timm.
"""

# sphinx_gallery_thumbnail_number = 2
import matplotlib.pyplot as plt
import timm.layers
import torch
from sklearn.datasets import load_sample_images
from torch import nn
from torchvision.ops import drop_block2d
from torchvision.utils import make_grid

from hookdrop import (
    AlphaDropout,
    Cutout,
    DropBlock,
    Dropout,
    Dropout2d,
    DropPath,
    FeatureAlphaDropout,
    GaussianDropout,
    GaussianNoise,
    LockedDropout,
    MixStyle,
    TokenDropout,
    UniformNoise,
    inject,
)

torch.manual_seed(0)

# %%
# A feature map
# -------------
#
# The input is a batch of two photographs from scikit-learn. The layer is a 1 x 1 convolution with four output channels:
# its output is a map of shape (N, C, H, W) = (2, 4, 64, 64). Its weights are positive, so that the map looks like the
# photographs and 0 is black.

photos = torch.stack(
    [
        torch.tensor(photo).permute(2, 0, 1) / 255
        for photo in load_sample_images().images
    ]
)
photos = nn.functional.interpolate(photos[:, :, 40:424, 120:504], 64, mode="area")
model = nn.Sequential(nn.Conv2d(3, 4, kernel_size=1, bias=False))
nn.init.uniform_(model[0].weight, 0.2, 1.0)


def sheet(x):
    """Tile a map (N, C, H, W): a row for each sample, a column for each channel."""
    tiles = make_grid(
        x.flatten(0, 1)[:, None].float(),
        nrow=x.shape[1],
        padding=2,
        pad_value=float("nan"),
    )
    return tiles[0].numpy()


figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
figure.suptitle(
    "The feature map: one row for each photograph, one column for each channel",
    fontsize=11,
)
with torch.no_grad():
    axes.imshow(sheet(model(photos)), cmap="gray", vmin=0)
axes.set(
    xticks=[33 + 66 * i for i in range(4)],
    xticklabels=[f"channel {i}" for i in range(4)],
)
axes.set(yticks=[33, 99], yticklabels=["sample 0", "sample 1"])
plt.show()

# %%
# Regularizers that drop elements
# -------------------------------
#
# ``inject`` hooks the layer, and ``drop.recording()`` keeps what the hook does: the tensor before, the mask and the
# tensor after. At the end of the ``with`` block, the hook is removed.


def draw(regularizers, title):
    figure, rows = plt.subplots(
        len(regularizers),
        3,
        figsize=(8, 1.55 * len(regularizers)),
        layout="constrained",
    )
    figure.suptitle(title, fontsize=11)
    for row, regularizer in zip(rows, regularizers, strict=True):
        torch.manual_seed(
            4
        )  # a seed with which each regularizer changes this small batch
        with (
            inject(model, regularizer, layers="0") as drop,
            drop.recording() as recorded,
            torch.no_grad(),
        ):
            model(photos)
        record = recorded["0"]
        scale = {"cmap": "gray", "vmin": 0, "vmax": 1.25 * record.before.max().item()}
        row[0].imshow(sheet(record.before), **scale)
        if record.drops:
            row[1].imshow(sheet(record.mask), cmap="gray", vmin=0, vmax=1)
            row[1].set_title(
                f"mask, {record.dropped:.0%} dropped", fontsize=9, loc="right"
            )
        else:
            row[1].imshow(
                sheet(record.after - record.before), cmap="RdBu_r", vmin=-1, vmax=1
            )
            row[1].set_title("change (red: more, blue: less)", fontsize=9, loc="right")
        row[2].imshow(sheet(record.after), **scale)
        row[0].set_title(str(regularizer), fontsize=9, loc="left")
        row[2].set_title("after", fontsize=9, loc="right")
    for axes in rows.flat:
        axes.set_axis_off()
    plt.show()


draw(
    [
        Dropout(p=0.2),
        Dropout2d(p=0.2),
        DropBlock(p=0.2, block_size=9),
        DropBlock(p=0.2, block_size=9, per_channel=False),
        Cutout(size=24),
        DropPath(p=0.5),
    ],
    "Before, mask (black: dropped) and after",
)

# %%
# * ``Dropout`` drops single elements. The neighbors of a dropped element carry almost the same information.
# * ``Dropout2d`` drops whole channels of a sample.
# * ``DropBlock`` drops squares, in each channel separately or, with ``per_channel=False``, in all channels of a sample.
# * ``Cutout`` drops one square of each sample, in all channels.
# * ``DropPath`` drops whole samples. Place it at the end of a residual branch, so that the skip connection remains.
#
# All of these except ``Cutout`` scale what they keep, so that the mean of the map stays the same on average. The kept
# elements are brighter for this reason.
#
# The fraction above each mask is that of one call. It varies most for the regularizers that draw few numbers:
# ``DropPath`` draws one for each sample and ``Dropout2d`` one for each channel of a sample.
#
# Regularizers that use other values than zero
# --------------------------------------------
#
# ``AlphaDropout`` and ``FeatureAlphaDropout`` set elements or channels to the negative saturation of SELU, then restore
# mean and variance. They are made for networks with SELU.

draw(
    [AlphaDropout(p=0.2), FeatureAlphaDropout(p=0.2)],
    "Before, mask (black: dropped) and after, with AlphaDropout",
)

# %%
# Regularizers that drop nothing
# ------------------------------
#
# These change values instead. The picture in the middle is the difference between after and before.

draw(
    [
        GaussianNoise(std=0.3),
        GaussianDropout(p=0.2),
        UniformNoise(beta=0.5),
        MixStyle(p=1.0),
    ],
    "Before, change and after",
)

# %%
# * ``GaussianNoise`` adds noise.
# * ``GaussianDropout`` and ``UniformNoise`` multiply by a random factor with mean 1, so zeros stay zero.
# * ``MixStyle`` mixes the mean and the standard deviation of each channel with those of another sample.
#
# Tokens and sequences
# --------------------
#
# In a transformer, the tensor has the shape (N, L, C): samples, tokens, features. The patch embedding of a vision
# transformer cuts the photographs into 64 patches and computes 24 features of each. ``plot_features`` draws one sample
# of such a tensor as one image.

embed = timm.layers.PatchEmbed(img_size=64, patch_size=8, embed_dim=24)
for regularizer in (TokenDropout(p=0.2, prefix=1), LockedDropout(p=0.2, time_dim=1)):
    with (
        inject(embed, regularizer, layers="norm") as drop,
        drop.recording() as recorded,
        torch.no_grad(),
    ):
        embed(photos)
    figure = plt.figure(figsize=(8, 3), layout="constrained")
    recorded.plot_features(figure=figure)
    figure.suptitle(f"{regularizer} on tokens x features", fontsize=11)
    plt.show()

# %%
# ``TokenDropout`` drops whole tokens, except the first ``prefix`` ones, such as a class token. ``LockedDropout`` drops
# a feature at all positions of the sequence, which is the usual choice in recurrent networks.
#
# How much does DropBlock drop?
# -----------------------------
#
# ``p`` is the fraction of the map that hookdrop drops, for every size of map and block. In other implementations it is
# an approximation. We measure 10 % in blocks of 7 on maps of ones.

sizes = [7, 10, 14, 20, 28, 40, 56]
libraries = {
    "hookdrop": lambda x: DropBlock(p=0.1, block_size=7)(x),
    "torchvision": lambda x: drop_block2d(x, p=0.1, block_size=7),
    "timm": lambda x: timm.layers.drop_block_2d(x, drop_prob=0.1, block_size=7),
}
measured = {library: [] for library in libraries}
for size in sizes:
    maps = torch.ones(150_000 // size, 1, size, size)
    for library, drop_block in libraries.items():
        measured[library].append((drop_block(maps) == 0).float().mean().item())

print("map        ", *(f"{size}x{size}" for size in sizes), sep="  ")
for library, fractions in measured.items():
    print(f"{library:11}", *(f"{fraction:5.3f}" for fraction in fractions), sep="  ")

# %%
figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
figure.suptitle("Fraction that DropBlock drops, by the size of the map", fontsize=11)
for (library, fractions), style in zip(
    measured.items(), ("o-", "s--", "^:"), strict=True
):
    axes.plot(sizes, fractions, style, label=library)
axes.axhline(0.1, color="gray", linewidth=1)
axes.set(
    xlabel="height and width of the map",
    ylabel="dropped fraction",
    yscale="log",
    xticks=sizes,
)
ticks = [0.08, 0.1, 0.15, 0.2, 0.5, 1.0]
axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
axes.minorticks_off()
axes.legend(title="requested: 0.1, blocks of 7")
plt.show()

# %%
# All three draw the positions of blocks at random, at a rate gamma for each position. They differ in gamma:
#
# * torchvision computes gamma by the formula of the DropBlock paper, which ignores that blocks overlap. It drops less
#   than requested, except where one block covers the map.
# * timm uses the same formula, which counts only the positions where a whole block fits into the map, but draws at all
#   positions of the map. It drops more than requested, and nearly everything where one block covers the map.
# * hookdrop solves for the gamma at which the expected fraction is ``p``. With ``gamma="paper"``, it uses the paper's
#   formula.
#
# A comparison of two implementations at the same ``p`` can therefore be a comparison of two rates.
#
# See also
# --------
#
# * :doc:`/methods/index` has one page for each regularizer, with its paper.
# * The regularizers of gradients leave the feature map unchanged; the same pages show them.
