"""Monte Carlo dropout: sample a trained model many times with dropout active, and evaluate its uncertainty.

    python examples/mc_dropout.py                      # trains a small model on a few digits first (half a minute)
    python examples/mc_dropout.py --out runs/mc        # also writes report.json and the least certain images
    python examples/mc_dropout.py --checkpoint runs/digits/model.pt --image-size 64 --layers "layer[23].*"
                                                       # uses weights saved by finetune_timm.py

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
from torch.utils.data import DataLoader

from hookdrop import Injection, Prediction, inject

SOFTMAX, ENTROPY, INFORMATION = "softmax entropy", "MC entropy", "MC mutual information"


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="test_resnet", help="convolutional model from timm.list_models()")
    add("--regularizer", default="Dropout2d(p=0.2)", metavar="TEXT")
    add("--layers", nargs="+", default=["layer[234].*"])
    add("--checkpoint", metavar="FILE", help="load a state_dict with a ten-class head instead of training")
    add("--train-images", type=int, default=200, help="few by default, so that the model makes errors")
    add("--steps", type=int, default=300)
    add("--samples", type=int, default=20)
    add("--image-size", type=int, default=32)
    add("--seed", type=int, default=0)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--out", metavar="FOLDER", help="write report.json and images.png there")
    return parser.parse_args(argv)


# --- data


def digits() -> list[np.ndarray]:
    """Return training images, test images, training labels and test labels, split as in finetune_timm.py."""
    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8) * 255 / 16).astype(np.uint8)
    return train_test_split(images, labels, test_size=500, stratify=labels, random_state=0)


def out_of_distribution(images: np.ndarray) -> dict[str, np.ndarray]:
    """Corrupt the images in ways that the model was not trained on."""
    rng = np.random.default_rng(0)
    return {
        "rotated by 90 degrees": np.rot90(images, axes=(1, 2)),
        "inverted": 255 - images,
        "shuffled pixels": rng.permuted(images.reshape(-1, 64), axis=1).reshape(images.shape),
    }


def batch(images: np.ndarray, model: nn.Module, args: argparse.Namespace) -> Tensor:
    """Apply timm's evaluation transforms for this model: (images, 3, H, W)."""
    config = resolve_data_config({"img_size": args.image_size, "crop_pct": 1.0}, model=model)
    transform = create_transform(**config)
    return torch.stack([transform(Image.fromarray(image).convert("RGB")) for image in images]).to(args.device)


# --- training and sampling


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
def predict(model: nn.Module, x: Tensor) -> Tensor:
    """Return the class probabilities (images, classes) without dropout."""
    return torch.cat([model(part).softmax(dim=1) for part in x.split(256)])


def sample(drop: Injection, x: Tensor, samples: int) -> Prediction:
    """Sample predictions with dropout; batch norm stays in eval mode."""
    return drop.predict(DataLoader(x, batch_size=256), samples)


def uncertainty(probabilities: Tensor, sampled: Prediction) -> dict[str, np.ndarray]:
    """Return three measures per image, in nats. Mutual information is between the prediction and the mask."""
    once = torch.special.entr(probabilities).sum(dim=-1)
    found = {SOFTMAX: once, ENTROPY: sampled.entropy, INFORMATION: sampled.mutual_information}
    return {name: values.cpu().numpy() for name, values in found.items()}


# --- evaluation


def auroc(positive: np.ndarray, score: np.ndarray) -> float:
    """Return the area under the ROC curve, or nan if all labels are equal."""
    return float(roc_auc_score(positive, score)) if 0 < positive.sum() < len(positive) else float("nan")


def error_ranking(measures: dict[str, np.ndarray], wrong: np.ndarray) -> dict[str, dict[str, float]]:
    """Evaluate how well each measure ranks the errors of the deterministic prediction first."""
    table = {}
    for name, values in measures.items():
        right = ~wrong[np.argsort(values)]
        table[name] = {
            "AUROC for errors": auroc(wrong, values),
            "accuracy in the most certain half": float(right[: len(right) // 2].mean()),
            "in the least certain tenth": float(right[-(len(right) // 10) :].mean()),
        }
    return table


def gain(measures: dict[str, np.ndarray], wrong: np.ndarray) -> list[float]:
    """Compute a 95% bootstrap interval of the AUROC of MC entropy minus that of softmax entropy."""
    rng = np.random.default_rng(0)
    draws = [rng.integers(len(wrong), size=len(wrong)) for _ in range(200)]
    draws = [i for i in draws if wrong[i].any()]
    gains = [auroc(wrong[i], measures[ENTROPY][i]) - auroc(wrong[i], measures[SOFTMAX][i]) for i in draws]
    return [float(np.quantile(gains, q)) for q in (0.025, 0.975)] if gains else []


def distribution_shift(
    measures: dict[str, np.ndarray], shifted: dict[str, dict[str, np.ndarray]]
) -> dict[str, dict[str, float]]:
    """Compare the mean uncertainty of test images and corrupted images, with the AUROC of telling them apart."""
    table = {"test images": {name: float(values.mean()) for name, values in measures.items()}}
    for kind, others in shifted.items():
        both = np.concatenate([measures[ENTROPY], others[ENTROPY]])
        separation = {"AUROC of MC entropy": auroc(np.arange(len(both)) >= len(measures[ENTROPY]), both)}
        table[kind] = {name: float(values.mean()) for name, values in others.items()} | separation
    return table


def verdict(errors: int, interval: list[float]) -> str:
    if not interval:
        return "there are no errors to rank: try fewer --train-images or --steps"
    low, high = interval
    result = "better than" if low > 0 else "worse than" if high < 0 else "not clearly different from"
    return (
        f"MC entropy ranks these {errors} errors {result} softmax entropy "
        f"(difference in AUROC, 95% interval: {low:+.3f} to {high:+.3f})"
    )


def print_table(title: str, table: dict[str, dict[str, float]]) -> None:
    columns = list(dict.fromkeys(key for row in table.values() for key in row))
    print(f"\n{title:25}" + "  ".join(columns))
    for name, row in table.items():
        cells = [f"{row[key]:{len(key)}.3f}" if key in row else "" for key in columns]
        print(f"{name:25}" + "  ".join(cells))


def draw(images: np.ndarray, labels: np.ndarray, predictions: np.ndarray, values: np.ndarray, path: Path) -> None:
    """Draw the most certain images in the first row and the least certain ones in the second."""
    order = np.argsort(values)
    figure = Figure(figsize=(12, 4), layout="constrained")
    for axes, i in zip(figure.subplots(2, 8).flat, [*order[:8], *order[:-9:-1]], strict=True):
        axes.imshow(images[i], cmap="gray")
        axes.set_title(f"{labels[i]}, predicted {predictions[i]}\n{values[i]:.2f} nats", fontsize=9)
        axes.axis("off")
    figure.savefig(path)


# --- program


def prepare(args: argparse.Namespace, images: np.ndarray, labels: np.ndarray) -> tuple[nn.Module, Injection]:
    """Create the model with hooks, and train it or load its weights."""
    model = timm.create_model(args.model, num_classes=10).to(args.device)
    x = batch(images[: args.train_images], model, args)
    drop = inject(model, args.regularizer, layers=args.layers, example_input=x[:2])
    if args.checkpoint:
        model.load_state_dict(torch.load(args.checkpoint, map_location=args.device, weights_only=True))
    else:
        train(model, x, torch.tensor(labels[: args.train_images], device=args.device), args.steps)
    return model.eval(), drop


def report(result: dict[str, Any], samples: int) -> None:
    print(
        f"{result['errors']} errors in 500 test images: accuracy {result['accuracy']:.1%}, "
        f"with the mean of {samples} samples {result['MC accuracy']:.1%}"
    )
    print_table("uncertainty", result["by measure"])
    print(verdict(result["errors"], result["gain"]))
    print_table("mean uncertainty (nats)", result["by kind"])
    print(f"\nsampling left parameters and batch norm statistics unchanged: {result['state untouched']}")
    print(f"eval output is bit-identical before and after sampling: {result['eval identical']}")


def main(argv: list[str] | None = None) -> dict[Any, Any]:
    args = parse_args(argv)
    random_seed(args.seed)
    train_images, images, train_labels, labels = digits()
    model, drop = prepare(args, train_images, train_labels)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    x = batch(images, model, args)
    probabilities, sampled = predict(model, x), sample(drop, x, args.samples)
    measures = uncertainty(probabilities, sampled)
    shifted = {}
    for kind, corrupted in out_of_distribution(images).items():
        y = batch(corrupted, model, args)
        shifted[kind] = uncertainty(predict(model, y), sample(drop, y, args.samples))

    predictions, mc_predictions = (p.argmax(dim=1).cpu().numpy() for p in (probabilities, sampled.mean))
    wrong = predictions != labels
    result = {
        "errors": int(wrong.sum()),
        "accuracy": float((~wrong).mean()),
        "MC accuracy": float((mc_predictions == labels).mean()),
        "by measure": error_ranking(measures, wrong),
        "gain": gain(measures, wrong),
        "by kind": distribution_shift(measures, shifted),
        "state untouched": all(torch.equal(value, before[name]) for name, value in model.state_dict().items()),
        "eval identical": torch.equal(predict(model, x), probabilities),
    }
    report(result, args.samples)
    if args.out:
        Path(args.out).mkdir(parents=True, exist_ok=True)
        Path(args.out, "report.json").write_text(json.dumps(result, indent=2))
        draw(images, labels, predictions, measures[ENTROPY], Path(args.out, "images.png"))
    return result


if __name__ == "__main__":
    main()
