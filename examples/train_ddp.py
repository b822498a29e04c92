r"""Train a timm model on many GPUs, or many processes of a CPU, with a regularizer on layers that you name.

    torchrun --nproc-per-node=2 examples/train_ddp.py --regularizer "DropBlock(p=0.1, block_size=3)" --layers "layer3.*"
    torchrun --nproc-per-node=8 examples/train_ddp.py --model resnet50 --data FOLDER --batch-size 256 --bf16 \
        --regularizer "DropBlock(p=0.1, block_size=7)" --layers "layer3.*.bn[12]" "layer4.*.bn[12]" --out runs/resnet50
    python examples/train_ddp.py                                                              # one process

Each rank has all of the weights (DDP), or with `--fsdp` a part of them (FSDP2). FOLDER has `train/CLASS/*` and
`val/CLASS/*`. After an interruption: the same line with `--resume`, with or without `--fsdp`, on any number of ranks
that divides --batch-size. Steps and rates go on where they were, for that is the batch of all ranks together.
It has been run on CPUs only.
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

from hookdrop import Injection, LinearSchedule, plan, seed_per_rank

SETTINGS = ("model", "data", "image_size", "regularizer", "layers", "epochs", "batch_size", "lr", "seed")


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="test_resnet", help="a name from timm.list_models()")
    add("--data", default="digits", help="digits, or a folder with train/ and val/")
    add("--image-size", type=int, help="pixels; if not given 64 for digits, else what the model was made for")
    add("--regularizer", metavar="TEXT", help='such as "DropBlock(p=0.1, block_size=7)"')
    add("--layers", nargs="+", help="where; the rate rises linearly from 0 over all of the training")
    add("--epochs", type=int, default=10)
    add("--batch-size", type=int, default=32, help="of all ranks together")
    add("--lr", type=float, default=1e-3)
    add("--fsdp", action="store_true", help="shard the weights instead of having all on each rank")
    add("--bf16", action="store_true", help="compute in bfloat16")
    add("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    add("--workers", type=int, default=0, help="processes that load images, for each rank")
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=Path("runs/ddp"), help="for checkpoints and the final weights")
    add("--resume", action="store_true", help="go on from the last checkpoint in --out, if there is one")
    add("--stop-after-epoch", type=int, metavar="N", help="stop early, to go on with --resume")
    args = parser.parse_args(argv)
    if (args.regularizer is None) != (args.layers is None):
        parser.error("--regularizer and --layers go together")
    return args


def start(args: argparse.Namespace) -> torch.device:
    """Meet the other ranks. Without torchrun there are none, and all else is the same."""
    device = torch.device("cpu")
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo", **alone)
    return device


def say(text: object) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


class Digits(Dataset):
    """scikit-learn's 1797 handwritten digits, 500 of them for validation; they come with it."""

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


class Share(Dataset):
    """A rank's part of the validation images: as many on each, so that none waits for another in vain."""

    def __init__(self, images: Any) -> None:
        self.images, self.first, self.step = images, dist.get_rank(), dist.get_world_size()

    def __len__(self) -> int:
        return -(-len(self.images) // self.step)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        index = self.first + index * self.step
        image, label = self.images[index % len(self.images)]
        return image, label if index < len(self.images) else -1  # here a second time: it does not count


def datasets(args: argparse.Namespace) -> tuple[Any, Any]:
    if args.data == "digits":
        args.image_size = args.image_size or 64
        return Digits(True, args.image_size), Digits(False, args.image_size)
    made_for = timm.get_pretrained_cfg(args.model)
    config = resolve_data_config({"img_size": args.image_size}, made_for.to_dict() if made_for else {})
    args.image_size = config["input_size"][-1]
    train = ImageFolder(f"{args.data}/train", create_transform(**config, is_training=True))
    val = ImageFolder(f"{args.data}/val", create_transform(**config))
    if train.classes != val.classes:
        sys.exit(f"train/ and val/ differ in their classes: {train.classes} and {val.classes}")
    return train, val


def regularize(args: argparse.Namespace, model: nn.Module, device: torch.device, steps: int) -> Injection | None:
    """Show what will be dropped where, then place the hooks. A wrong name or shape raises here, before training."""
    if args.regularizer is None:
        return None
    example = torch.zeros(2, 3, args.image_size, args.image_size, device=device)
    schedule = LinearSchedule(steps=steps)
    planned = plan(model, args.regularizer, layers=args.layers, schedule=schedule, example_input=example)
    say(planned)
    return planned.apply()


def wrap(args: argparse.Namespace, model: nn.Module, device: torch.device) -> nn.Module:
    if not args.fsdp:
        return DistributedDataParallel(model, [device] if device.type == "cuda" else None)
    for part in model.children():
        if next(part.parameters(), None) is not None and not isinstance(part, nn.ModuleList | nn.ModuleDict):
            fully_shard(part)
    return fully_shard(model)


@dataclass
class Training:
    """All that is trained, and how far it is: a `Stateful`, as an injection is, so that DCP saves and loads it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    settings: dict[str, Any]  # what a resumed run must have in common with this one
    epoch: int = 0  # finished epochs

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = states.get_state_dict(self.model, self.optimizer)
        # A copy of the settings: DCP loads into what it is given.
        return {"model": model, "optimizer": optimizer, "epoch": self.epoch, "settings": dict(self.settings)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["settings"] != self.settings:
            sys.exit(f"the checkpoint is of another run: {state['settings']}\nand this is: {self.settings}")
        parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        states.set_state_dict(self.model, self.optimizer, **parts)
        self.epoch = state["epoch"]


def train_epoch(args: argparse.Namespace, training: Training, loader: DataLoader, device: torch.device) -> float:
    """The mean loss on all ranks."""
    loader.sampler.set_epoch(training.epoch)
    # Other masks on each rank, and in each epoch the same whether or not it was resumed in between.
    seed = seed_per_rank(1_000_000 * args.seed + training.epoch)
    random.seed(seed)  # hookdrop draws from PyTorch alone, but transforms of images may draw from these
    np.random.seed(seed % 2**32)
    total = torch.zeros((), device=device)
    training.model.train()
    for images, labels in loader:
        with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
            loss = cross_entropy(training.model(images.to(device)), labels.to(device))
        loss.backward()
        training.optimizer.step()  # the injection follows it
        training.optimizer.zero_grad()
        total += loss.detach()
    dist.all_reduce(total)
    return total.item() / len(loader) / dist.get_world_size()


@torch.no_grad()
def accuracy(args: argparse.Namespace, model: nn.Module, loader: DataLoader, device: torch.device) -> float:
    """On the validation images of all ranks."""
    distribute_bn(model, dist.get_world_size(), reduce=True)  # batch norm has seen other images on each rank
    model.eval()
    counts = torch.zeros(2, device=device)
    for images, labels in loader:
        with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
            right = model(images.to(device)).argmax(dim=1) == labels.to(device)
        counts += torch.stack([right.sum(), (labels >= 0).sum().to(device)])
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def last_checkpoint(args: argparse.Namespace) -> Path | None:
    """An interrupted one has no `.metadata`, which is written last."""
    return max((path.parent for path in args.out.glob("epoch-*/.metadata")), default=None)


def run(args: argparse.Namespace, device: torch.device) -> None:
    ranks, there = dist.get_world_size(), last_checkpoint(args)
    if there and not args.resume:
        sys.exit(f"{there} is there already: go on with --resume, or choose another --out")
    if args.batch_size % ranks:
        sys.exit(f"--batch-size {args.batch_size} can't be divided among {ranks} ranks")
    torch.manual_seed(args.seed)  # the same weights on all ranks; seed_per_rank comes after that
    train_set, val_set = datasets(args)
    common = {"batch_size": args.batch_size // ranks, "num_workers": args.workers, "pin_memory": args.device == "cuda"}
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    train_loader = DataLoader(train_set, sampler=sampler, drop_last=True, **common)
    if not len(train_loader):
        sys.exit(f"{len(train_set)} training images do not make one batch of {args.batch_size}")
    val_loader = DataLoader(Share(val_set), **common)
    model = timm.create_model(args.model, num_classes=len(train_set.classes)).to(device)
    if hasattr(model, "set_input_size"):  # transformers have a size of their own
        model.set_input_size(img_size=args.image_size)
    drop = regularize(args, model, device, len(train_loader) * args.epochs)
    model = wrap(args, model, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)
    training = Training(model, optimizer, {name: getattr(args, name) for name in SETTINGS})
    parts: dict[str, Any] = {"training": training}
    if drop is not None:
        parts["drop"] = drop.follow(optimizer)
    if there:
        dcp.load(parts, checkpoint_id=there)
        say(f"{there}: {training.epoch} of {args.epochs} epochs are done")
    while training.epoch < min(args.epochs, args.stop_after_epoch or args.epochs):
        loss = train_epoch(args, training, train_loader, device)
        training.epoch += 1
        correct = accuracy(args, model, val_loader, device)
        say(f"epoch {training.epoch}: loss {loss:.4f}, accuracy {correct:.2%}{f', {drop}' if drop else ''}")
        before = last_checkpoint(args)
        dcp.save(parts, checkpoint_id=args.out / f"epoch-{training.epoch:04d}")
        if before is not None and dist.get_rank() == 0:
            shutil.rmtree(before)
    if training.epoch == args.epochs:
        finish(args, model, drop, next(iter(train_loader))[0].to(device))


def finish(args: argparse.Namespace, model: nn.Module, drop: Injection | None, images: Tensor) -> None:
    """Say what was really dropped, and write the weights: a plain timm model loads them, where there is no hookdrop."""
    if drop is not None:
        measured = drop.probe(images)  # on every rank, as the ranks of FSDP compute together
        say(f"dropped on rank 0 at the last step's rate:\n{measured}")
    whole = states.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = states.get_model_state_dict(model, options=whole)
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
