r"""Train a timm model on several GPUs or CPU processes, with a regularizer on chosen layers.

    torchrun --nproc-per-node=2 examples/train_ddp.py --regularizer "DropBlock(p=0.1, block_size=3)" --layers "layer3.*"
    torchrun --nproc-per-node=8 examples/train_ddp.py --model resnet50 --data FOLDER --batch-size 256 --bf16 \
        --regularizer "DropBlock(p=0.1, block_size=7)" --layers "layer3.*.bn[12]" "layer4.*.bn[12]" --out runs/resnet50
    python examples/train_ddp.py                                                              # one process

Each rank holds all weights (DDP) or, with `--fsdp`, a shard of them (FSDP2). FOLDER contains `train/CLASS/*` and
`val/CLASS/*`. To resume after an interruption, add `--resume` to the same command, with or without `--fsdp`, on any
number of ranks that divides --batch-size. Steps and rates continue where they stopped, since --batch-size is the global
batch size. This example has only been tested on CPUs.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from timm.data import create_transform, resolve_data_config
from timm.utils import distribute_bn
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, interpolate
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchvision.datasets import ImageFolder

from hookdrop import Injection, LinearSchedule, inject, plan, seed_per_rank

SETTINGS = ("model", "data", "image_size", "regularizer", "layers", "epochs", "batch_size", "lr", "seed")


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="test_resnet", help="model name from timm.list_models()")
    add("--data", default="digits", help="digits, or a folder with train/ and val/ (default: digits)")
    add("--image-size", type=int, help="pixels (default: 64 for digits, else the model's native size)")
    add("--regularizer", metavar="TEXT", help='for example "DropBlock(p=0.1, block_size=7)"')
    add("--layers", nargs="+", help="layer patterns; the rate rises linearly from 0 over the whole training")
    add("--epochs", type=int, default=10)
    add("--batch-size", type=int, default=32, help="global batch size of all ranks")
    add("--lr", type=float, default=1e-3)
    add("--fsdp", action="store_true", help="shard the weights over the ranks (FSDP2)")
    add("--bf16", action="store_true", help="compute in bfloat16")
    add("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    add("--workers", type=int, default=0, help="data loading processes per rank")
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=Path("runs/ddp"), help="folder for checkpoints and final weights")
    add("--resume", action="store_true", help="resume from the last checkpoint in --out, if any")
    add("--stop-after-epoch", type=int, metavar="N", help="stop after epoch N; continue with --resume")
    args = parser.parse_args(argv)
    if (args.regularizer is None) != (args.layers is None):
        parser.error("--regularizer and --layers must be used together")
    return args


def start(args: argparse.Namespace) -> torch.device:
    """Initialize the process group; without torchrun it has one rank."""
    device = torch.device("cpu")
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    single = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo", **single)
    return device


def print_once(text: object) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


class Digits(Dataset):
    """The 1797 handwritten digits of scikit-learn, 500 of them for validation."""

    classes = tuple("0123456789")

    def __init__(self, train: bool, size: int) -> None:
        images, labels = load_digits(return_X_y=True)
        images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
        parts = train_test_split(images, labels, test_size=500, stratify=labels, random_state=0)
        self.images, self.labels = parts[0::2] if train else parts[1::2]
        self.size = size

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = interpolate(self.images[index][None], size=self.size, mode="bilinear")[0]
        return image.expand(3, -1, -1), int(self.labels[index])


class Shard(Dataset):
    """The validation images of one rank; all ranks have equally many, so that collective operations match."""

    def __init__(self, images: Any) -> None:
        self.images, self.first, self.step = images, dist.get_rank(), dist.get_world_size()

    def __len__(self) -> int:
        return -(-len(self.images) // self.step)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        index = self.first + index * self.step
        image, label = self.images[index % len(self.images)]
        return image, label if index < len(self.images) else -1  # padding: a repeated image, not counted


def datasets(args: argparse.Namespace) -> tuple[Any, Any]:
    if args.data == "digits":
        args.image_size = args.image_size or 64
        return Digits(True, args.image_size), Digits(False, args.image_size)
    pretrained = timm.get_pretrained_cfg(args.model)
    config = resolve_data_config({"img_size": args.image_size}, pretrained.to_dict() if pretrained else {})
    args.image_size = config["input_size"][-1]
    train = ImageFolder(f"{args.data}/train", create_transform(**config, is_training=True))
    val = ImageFolder(f"{args.data}/val", create_transform(**config))
    if train.classes != val.classes:
        sys.exit(f"train/ and val/ have different classes: {train.classes} and {val.classes}")
    return train, val


def regularize(args: argparse.Namespace, model: nn.Module, device: torch.device, steps: int) -> Injection | None:
    """Print the plan, then place the hooks. Wrong names and shapes raise here, before training."""
    if args.regularizer is None:
        return None
    example = torch.zeros(2, 3, args.image_size, args.image_size, device=device)
    settings = {"layers": args.layers, "schedule": LinearSchedule(steps=steps), "example_input": example}
    print_once(plan(model, args.regularizer, **settings))
    return inject(model, args.regularizer, **settings)


def wrap(args: argparse.Namespace, model: nn.Module, device: torch.device) -> nn.Module:
    if not args.fsdp:
        return DistributedDataParallel(model, [device] if device.type == "cuda" else None)
    for part in model.children():
        if next(part.parameters(), None) is not None and not isinstance(part, nn.ModuleList | nn.ModuleDict):
            fully_shard(part)
    return fully_shard(model)


@dataclass
class Training:
    """The model, the optimizer and the progress. Like an injection it is `Stateful`, so DCP saves and loads it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    settings: dict[str, Any]  # must be equal in a resumed run
    epoch: int = 0  # completed epochs

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = states.get_state_dict(self.model, self.optimizer)
        # Copy the settings, since DCP loads in place.
        return {"model": model, "optimizer": optimizer, "epoch": self.epoch, "settings": dict(self.settings)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["settings"] != self.settings:
            sys.exit(f"the checkpoint has different settings: {state['settings']}\nthis run has: {self.settings}")
        parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        states.set_state_dict(self.model, self.optimizer, **parts)
        self.epoch = state["epoch"]


def train_epoch(args: argparse.Namespace, training: Training, loader: DataLoader, device: torch.device) -> float:
    """Train for one epoch and return the mean loss of all ranks."""
    loader.sampler.set_epoch(training.epoch)
    # Each rank draws different masks. Seeding per epoch makes them independent of interruptions.
    seed = seed_per_rank(1_000_000 * args.seed + training.epoch)
    random.seed(seed)  # hookdrop only uses PyTorch's RNG, but image transforms may use these
    np.random.seed(seed % 2**32)
    total = torch.zeros((), device=device)
    training.model.train()
    for images, labels in loader:
        with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
            loss = cross_entropy(training.model(images.to(device)), labels.to(device))
        loss.backward()
        training.optimizer.step()  # the injection follows the optimizer
        training.optimizer.zero_grad()
        total += loss.detach()
    dist.all_reduce(total)
    return total.item() / len(loader) / dist.get_world_size()


@torch.no_grad()
def accuracy(args: argparse.Namespace, model: nn.Module, loader: DataLoader, device: torch.device) -> float:
    """Return the accuracy on the validation images of all ranks."""
    distribute_bn(model, dist.get_world_size(), reduce=True)  # batch norm statistics differ between ranks
    model.eval()
    counts = torch.zeros(2, device=device)
    for images, labels in loader:
        with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
            right = model(images.to(device)).argmax(dim=1) == labels.to(device)
        counts += torch.stack([right.sum(), (labels >= 0).sum().to(device)])
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def last_checkpoint(args: argparse.Namespace) -> Path | None:
    """Return the last complete checkpoint; `.metadata` is written last."""
    return max((path.parent for path in args.out.glob("epoch-*/.metadata")), default=None)


def run(args: argparse.Namespace, device: torch.device) -> None:
    ranks, last = dist.get_world_size(), last_checkpoint(args)
    if last and not args.resume:
        sys.exit(f"{last} already exists: continue it with --resume, or choose another --out")
    if args.batch_size % ranks:
        sys.exit(f"--batch-size {args.batch_size} is not divisible by {ranks} ranks")
    torch.manual_seed(args.seed)  # equal weights on all ranks; call seed_per_rank only later
    train_set, val_set = datasets(args)
    common = {"batch_size": args.batch_size // ranks, "num_workers": args.workers, "pin_memory": args.device == "cuda"}
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    train_loader = DataLoader(train_set, sampler=sampler, drop_last=True, **common)
    if not len(train_loader):
        sys.exit(f"{len(train_set)} training images are fewer than one batch of {args.batch_size}")
    val_loader = DataLoader(Shard(val_set), **common)
    model = timm.create_model(args.model, num_classes=len(train_set.classes)).to(device)
    if hasattr(model, "set_input_size"):  # transformers are built for one size
        model.set_input_size(img_size=args.image_size)
    drop = regularize(args, model, device, len(train_loader) * args.epochs)
    model = wrap(args, model, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)
    training = Training(model, optimizer, {name: getattr(args, name) for name in SETTINGS})
    parts: dict[str, Any] = {"training": training}
    if drop is not None:
        parts["drop"] = drop.follow(optimizer)
    if last:
        dcp.load(parts, checkpoint_id=last)
        print_once(f"{last}: {training.epoch} of {args.epochs} epochs completed")
    while training.epoch < min(args.epochs, args.stop_after_epoch or args.epochs):
        loss = train_epoch(args, training, train_loader, device)
        training.epoch += 1
        correct = accuracy(args, model, val_loader, device)
        injection = f", {drop}" if drop else ""
        print_once(f"epoch {training.epoch}: loss {loss:.4f}, accuracy {correct:.2%}{injection}")
        previous = last_checkpoint(args)
        dcp.save(parts, checkpoint_id=args.out / f"epoch-{training.epoch:04d}")
        if previous is not None and dist.get_rank() == 0:
            shutil.rmtree(previous)
    if training.epoch == args.epochs:
        finish(args, model, drop, next(iter(train_loader))[0].to(device))


def finish(args: argparse.Namespace, model: nn.Module, drop: Injection | None, images: Tensor) -> None:
    """Print the measured drop rates, and save weights that load into a plain timm model without hookdrop."""
    if drop is not None:
        measured = drop.probe(images)  # on every rank, since a forward under FSDP is collective
        print_once(f"measured on rank 0 at the rate of the last step:\n{measured}")
    full = states.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = states.get_model_state_dict(model, options=full)
    if dist.get_rank() == 0:
        torch.save(weights, args.out / "model.pt")


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    device = start(args)
    try:
        run(args, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
