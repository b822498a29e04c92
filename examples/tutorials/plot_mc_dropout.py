"""
Uncertainty with Monte Carlo dropout
====================================

Monte Carlo dropout (Gal & Ghahramani 2016, arXiv:1506.02142) keeps dropout active at prediction time. The model then
predicts each image many times, each time with other masks, and the spread of the predictions measures its uncertainty.
This tutorial trains a small network of timm on a few digits, samples its predictions with ``drop.sampling()``, and
checks whether uncertain predictions are wrong more often.
"""

import copy

import matplotlib.pyplot as plt
import timm
import torch
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from torch.nn.functional import cross_entropy, interpolate

from hookdrop import Dropout2d, inject

torch.manual_seed(0)

# %%
# A network with dropout
# ----------------------
#
# The network has no dropout; ``inject`` adds it. 150 training images are few, so that the network makes errors.

digits = load_digits()
images = torch.tensor(digits.images / 16 - 0.5, dtype=torch.float32)[:, None]
x, y = interpolate(images, 32, mode="bilinear"), torch.tensor(digits.target)
train_x, train_y, test_x, test_y = x[:150], y[:150], x[-500:], y[-500:]

model = timm.create_model("test_resnet", in_chans=1, num_classes=10)
drop = inject(model, Dropout2d(p=0.2), layers="layer[234].*", example_input=train_x[:2])
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model.train()
for _ in range(100):
    chosen = torch.randint(len(train_x), (16,))
    cross_entropy(model(train_x[chosen]), train_y[chosen]).backward()
    optimizer.step()
    optimizer.zero_grad()

# %%
# Predict once, and sample
# ------------------------
#
# In eval mode the hooks do nothing. Inside ``drop.sampling()`` they are active in eval mode too.


@torch.no_grad()
def predict(model, x):
    return model(x).softmax(dim=1)


model.eval()
once = predict(model, test_x)
with drop.sampling():
    samples = torch.stack([predict(model, test_x) for _ in range(20)])

right = once.argmax(dim=1) == test_y
print(f"samples x images x classes: {tuple(samples.shape)}")
wrong = int((~right).sum())
print(f"accuracy: {right.float().mean():.1%}, {wrong} of {len(test_y)} are wrong")
of_mean = (samples.mean(dim=0).argmax(dim=1) == test_y).float().mean()
print(f"accuracy of the mean of the samples: {of_mean:.1%}")

# %%
# Entropy
# -------
#
# The entropy of the mean prediction is 0 if all samples are certain of the same class, and log(10) = 2.3 nats if all
# classes are equally probable.


def entropy(probabilities):
    return torch.special.entr(probabilities).sum(dim=-1)


uncertainty = entropy(samples.mean(dim=0))

figure, axes = plt.subplots(figsize=(8, 3.5), layout="constrained")
figure.suptitle(
    "Entropy of the mean prediction, for right and wrong predictions", fontsize=11
)
for name, group, color in (
    ("right", uncertainty[right], "tab:blue"),
    ("wrong", uncertainty[~right], "tab:red"),
):
    weights = torch.full_like(
        group, 1 / len(group)
    )  # fractions, because there are many more right predictions
    axes.hist(
        group.numpy(),
        bins=20,
        range=(0, 2.3),
        weights=weights.numpy(),
        alpha=0.6,
        color=color,
        label=name,
    )
axes.set(xlabel="entropy in nats", ylabel="fraction of the group")
axes.legend(title="prediction")
plt.show()

print(f"mean entropy of right predictions: {uncertainty[right].mean():.2f} nats")
print(f"mean entropy of wrong predictions: {uncertainty[~right].mean():.2f} nats")

# %%
# Wrong predictions have more entropy on average. The groups overlap, so no threshold separates them.
#
# The samples of one image
# ------------------------
#
# The least and the most certain images, with the probabilities of all samples. A dot is one sample.

order = uncertainty.argsort(descending=True)
figure, rows = plt.subplots(
    2, 4, figsize=(8, 4), layout="constrained", height_ratios=(1, 1.4)
)
figure.suptitle(
    "Two uncertain images (left) and two certain ones (right): "
    "pixels and sampled probabilities",
    fontsize=11,
)
for (picture, dots), image in zip(rows.T, [*order[:2], *order[-2:]], strict=True):
    picture.imshow(test_x[image, 0].numpy(), cmap="gray")
    picture.set_title(
        f"a {test_y[image]}, predicted {once[image].argmax()}", fontsize=9
    )
    picture.set_axis_off()
    classes = torch.arange(10).expand(len(samples), 10)
    dots.scatter(classes.numpy(), samples[:, image].numpy(), s=8, alpha=0.5)
    dots.set(xlabel="class", xticks=range(10), ylim=(-0.05, 1.05))
rows[1, 0].set_ylabel("probability")
plt.show()

# %%
# Does sampling pay?
# ------------------
#
# A single prediction has an entropy too, at a twentieth of the cost. Both rank the images. To compare the rankings,
# keep only the most certain images and plot the accuracy among them. The area under the ROC curve (AUROC) is the
# probability that a wrong prediction ranks above a right one.

figure, axes = plt.subplots(figsize=(8, 3.5), layout="constrained")
figure.suptitle("Accuracy among the most certain images", fontsize=11)
kept = torch.arange(50, 501)
for name, values, style in (
    ("20 samples", uncertainty, "-"),
    ("one prediction", entropy(once), "--"),
):
    accuracies = right[values.argsort()].cumsum(0)[kept - 1] / kept
    axes.plot((kept / 5).numpy(), accuracies.numpy(), style, label=name)
    auroc = roc_auc_score((~right).numpy(), values.numpy())
    print(f"AUROC for errors, {name}: {auroc:.3f}")
axes.set(xlabel="images kept, in percent", ylabel="accuracy")
axes.legend(title="entropy of")
plt.show()

# %%
# Here the two rankings are about equally good, so the samples do not pay. This is one small network with one seed:
# ``examples/mc_dropout.py`` in the repository adds mutual information, images from outside the training distribution,
# and a confidence interval for the difference between the two rankings.
#
# Batch norm is unchanged
# -----------------------
#
# A common way to sample is ``model.train()``. It also switches batch norm to the statistics of the batch, so that the
# prediction of an image depends on the other images, and each forward changes the running statistics. ``sampling``
# does neither: it only activates the hooks of this injection.

before = copy.deepcopy(model.state_dict())
with drop.sampling():
    predict(model, test_x)
unchanged = all(
    torch.equal(value, before[name]) for name, value in model.state_dict().items()
)
print(f"state_dict unchanged after sampling: {unchanged}")
print(
    f"prediction unchanged after sampling: {torch.equal(predict(model, test_x), once)}"
)

in_train_mode = copy.deepcopy(model).train()
predict(in_train_mode, test_x)
unchanged = all(
    torch.equal(value, before[name])
    for name, value in in_train_mode.state_dict().items()
)
print(f"state_dict unchanged after a forward in train mode: {unchanged}")

drop.remove()

# %%
# See also
# --------
#
# * :doc:`/guides/mc_dropout` has rates for sampling, EMA models, and models that bring their own dropout.
