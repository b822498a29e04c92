"""Monte-Carlo dropout: ask a trained model many times with hookdrop on, and see where the answers differ.

    python examples/mc_dropout.py                      # trains a small model on a few digits first (half a minute)
    python examples/mc_dropout.py --out runs/mc        # writes report.json and the least certain images too
    python examples/mc_dropout.py --checkpoint runs/digits/model.pt --image-size 64 --layers "layer[23].*"
                                                       # the weights that finetune_timm.py wrote

Gal & Ghahramani 2016, "Dropout as a Bayesian approximation", arXiv:1506.02142. Mutual information as in Houlsby et
al. 2011, arXiv:1112.5745 (BALD).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from matplotlib.figure import Figure
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import train_test_split
from timm.data import create_transform, resolve_data_config
from timm.utils import random_seed
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hookdrop import Injection, inject

SOFTMAX, ENTROPY, INFORMATION = "softmax entropy", "MC entropy", "MC mutual information"


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="test_resnet", help="a convolutional one of timm.list_models()")
    add("--regularizer", default="Dropout2d(p=0.2)", metavar="TEXT")
    add("--layers", nargs="+", default=["layer[234].*"])
    add("--checkpoint", metavar="FILE", help="a state_dict with a head for ten digits, instead of training")
    add("--train-images", type=int, default=200, help="few, so that there are errors to find")
    add("--steps", type=int, default=300)
    add("--samples", type=int, default=20)
    add("--image-size", type=int, default=32)
    add("--seed", type=int, default=0)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--out", metavar="FOLDER", help="write report.json and images.png there")
    return parser.parse_args(argv)


# --- the images


def digits() -> list[np.ndarray]:
    """Training images, test images, training labels, test labels; split as in finetune_timm.py."""
    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8) * 255 / 16).astype(np.uint8)
    return train_test_split(images, labels, test_size=500, stratify=labels, random_state=0)


def strange(images: np.ndarray) -> dict[str, np.ndarray]:
    """What the model was never trained on."""
    rng = np.random.default_rng(0)
    return {
        "quarter turn": np.rot90(images, axes=(1, 2)),
        "negative": 255 - images,
        "shuffled pixels": rng.permuted(images.reshape(-1, 64), axis=1).reshape(images.shape),
    }


def batch(images: np.ndarray, model: nn.Module, args: argparse.Namespace) -> Tensor:
    """Enlarged and normalized as timm does it for this model."""
    config = resolve_data_config({"img_size": args.image_size, "crop_pct": 1.0}, model=model)
    transform = create_transform(**config)
    return torch.stack([transform(Image.fromarray(image).convert("RGB")) for image in images]).to(args.device)


# --- training and asking


def train(model: nn.Module, x: Tensor, labels: Tensor, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model.train()
    for _ in range(steps):
        chosen = torch.randint(len(x), (32,), device=x.device)
        optimizer.zero_grad()
        cross_entropy(model(x[chosen]), labels[chosen]).backward()
        optimizer.step()
        schedule.step()


@torch.no_grad()
def ask(model: nn.Module, x: Tensor) -> Tensor:
    """(images, classes): the probabilities in eval mode."""
    return torch.cat([model(part).softmax(dim=1) for part in x.split(256)])


def ask_often(model: nn.Module, drop: Injection, x: Tensor, samples: int) -> Tensor:
    """(samples, images, classes): the model stays in eval mode, so batch norm does too."""
    with drop.sampling():
        return torch.stack([ask(model, x) for _ in range(samples)])


def uncertainty(once: Tensor, often: Tensor) -> dict[str, np.ndarray]:
    """In nats, for each image. Mutual information is that between the answer and the mask."""
    whole = entropy(often.mean(dim=0))
    each = entropy(often).mean(dim=0)
    found = {SOFTMAX: entropy(once), ENTROPY: whole, INFORMATION: whole - each}
    return {name: values.cpu().numpy() for name, values in found.items()}


def entropy(probabilities: Tensor) -> Tensor:
    return torch.special.entr(probabilities.double()).sum(dim=-1)


# --- what the numbers say


def auroc(positive: np.ndarray, score: np.ndarray) -> float:
    """How often a positive scores above a negative; nan where there are only positives or only negatives."""
    return float(roc_auc_score(positive, score)) if 0 < positive.sum() < len(positive) else float("nan")


def of_errors(doubt: dict[str, np.ndarray], wrong: np.ndarray) -> dict[str, dict[str, float]]:
    """Does each measure rank the errors first? `wrong` is of the deterministic prediction for all of them."""
    table = {}
    for name, values in doubt.items():
        right = ~wrong[np.argsort(values)]
        table[name] = {
            "AUROC for errors": auroc(wrong, values),
            "accuracy in the most certain half": float(right[: len(right) // 2].mean()),
            "in the least certain tenth": float(right[-(len(right) // 10) :].mean()),
        }
    return table


def gain(doubt: dict[str, np.ndarray], wrong: np.ndarray) -> list[float]:
    """95% bootstrap interval of what MC entropy adds to the AUROC of softmax entropy."""
    rng = np.random.default_rng(0)
    draws = [rng.integers(len(wrong), size=len(wrong)) for _ in range(200)]
    gains = [auroc(wrong[i], doubt[ENTROPY][i]) - auroc(wrong[i], doubt[SOFTMAX][i]) for i in draws if wrong[i].any()]
    return [float(np.quantile(gains, q)) for q in (0.025, 0.975)] if gains else []


def of_kinds(doubt: dict[str, np.ndarray], strangers: dict[str, dict[str, np.ndarray]]) -> dict[str, dict[str, float]]:
    """Mean uncertainty of test images and of strange ones, and whether it tells them apart."""
    table = {"test images": {name: float(values.mean()) for name, values in doubt.items()}}
    for kind, theirs in strangers.items():
        both = np.concatenate([doubt[ENTROPY], theirs[ENTROPY]])
        apart = {"AUROC of MC entropy": auroc(np.arange(len(both)) >= len(doubt[ENTROPY]), both)}
        table[kind] = {name: float(values.mean()) for name, values in theirs.items()} | apart
    return table


def verdict(errors: int, interval: list[float]) -> str:
    if not interval:
        return "without errors nothing can be said of how they rank: try fewer --train-images or --steps"
    low, high = interval
    words = "better than" if low > 0 else "worse than" if high < 0 else "not distinguishable from"
    return (
        f"MC entropy ranks these {errors} errors {words} softmax entropy "
        f"(difference in AUROC, 95% interval: {low:+.3f} to {high:+.3f})"
    )


def print_table(title: str, table: dict[str, dict[str, float]]) -> None:
    columns = list(dict.fromkeys(key for row in table.values() for key in row))
    print(f"\n{title:25}" + "  ".join(columns))
    for name, row in table.items():
        cells = [f"{row[key]:{len(key)}.3f}" if key in row else "" for key in columns]
        print(f"{name:25}" + "  ".join(cells))


def picture(images: np.ndarray, labels: np.ndarray, answers: np.ndarray, values: np.ndarray, path: Path) -> None:
    """The most certain images above, the least certain ones below."""
    order = np.argsort(values)
    figure = Figure(figsize=(12, 4), layout="constrained")
    for axes, i in zip(figure.subplots(2, 8).flat, [*order[:8], *order[:-9:-1]], strict=True):
        axes.imshow(images[i], cmap="gray")
        axes.set_title(f"{labels[i]}, said {answers[i]}\n{values[i]:.2f} nats", fontsize=9)
        axes.axis("off")
    figure.savefig(path)


# --- the program


def prepare(args: argparse.Namespace, images: np.ndarray, labels: np.ndarray) -> tuple[nn.Module, Injection]:
    """The model with its hooks, trained here or elsewhere."""
    model = timm.create_model(args.model, num_classes=10).to(args.device)
    x = batch(images[: args.train_images], model, args)
    drop = inject(model, args.regularizer, layers=args.layers, example_input=x[:2])
    if args.checkpoint:
        model.load_state_dict(torch.load(args.checkpoint, map_location=args.device, weights_only=True))
    else:
        train(model, x, torch.tensor(labels[: args.train_images], device=args.device), args.steps)
    return model.eval(), drop


def report(result: dict[str, Any], samples: int) -> None:
    print(f"{result['errors']} errors in 500 test images: accuracy {result['accuracy']:.1%}", end="")
    print(f", of the mean of {samples} samples {result['MC accuracy']:.1%}")
    print_table("uncertainty", result["by measure"])
    print(verdict(result["errors"], result["gain"]))
    print_table("mean uncertainty (nats)", result["by kind"])
    print(f"\nparameters and batch norm statistics are what they were before sampling: {result['state untouched']}")
    print(f"eval output is bit-identical to that before sampling: {result['eval identical']}")


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse_args(argv)
    random_seed(args.seed)
    train_images, images, train_labels, labels = digits()
    model, drop = prepare(args, train_images, train_labels)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    x = batch(images, model, args)
    once, often = ask(model, x), ask_often(model, drop, x, args.samples)
    doubt = uncertainty(once, often)
    strangers = {}
    for kind, theirs in strange(images).items():
        y = batch(theirs, model, args)
        strangers[kind] = uncertainty(ask(model, y), ask_often(model, drop, y, args.samples))

    answers, often_answers = (p.argmax(dim=1).cpu().numpy() for p in (once, often.mean(dim=0)))
    result = {
        "errors": int((answers != labels).sum()),
        "accuracy": float((answers == labels).mean()),
        "MC accuracy": float((often_answers == labels).mean()),
        "by measure": of_errors(doubt, answers != labels),
        "gain": gain(doubt, answers != labels),
        "by kind": of_kinds(doubt, strangers),
        "state untouched": all(torch.equal(value, before[name]) for name, value in model.state_dict().items()),
        "eval identical": torch.equal(ask(model, x), once),
    }
    report(result, args.samples)
    if args.out:
        Path(args.out).mkdir(parents=True, exist_ok=True)
        Path(args.out, "report.json").write_text(json.dumps(result, indent=2))
        picture(images, labels, answers, doubt[ENTROPY], Path(args.out, "images.png"))
    return result


if __name__ == "__main__":
    main()
