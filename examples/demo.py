"""What hookdrop does, in two minutes on two cores: `make demo`.

It shows a plan, a ramp and a removal on a real model of timm. Then it trains a small language model that overfits, with
and without hooks, in six pairs that share their weights and the order of their text.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import random
import re
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import timm
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hookdrop import (
    ActivationPenalty,
    DropBlock,
    Dropout,
    HookdropWarning,
    Injection,
    LinearSchedule,
    LockedDropout,
    find,
    inject,
    plan,
)

# --- one: a model of timm


def on_timm() -> dict[str, str]:
    """Plan, ramp and remove DropBlock on timm's ResNet-50; return what each step printed."""
    torch.manual_seed(0)
    model = timm.create_model("resnet50")  # add pretrained=True for its weights
    images = torch.randn(2, 3, 224, 224)
    before, output = fingerprint(model), model.eval()(images)

    settings: dict[str, Any] = {"layers": "layer3.*.bn2", "schedule": LinearSchedule(steps=10_000)}
    dropblock = DropBlock(p=0.1, block_size=7)
    planned = str(plan(model, dropblock, **settings, example_input=images))

    drop = inject(model, dropblock, **settings)
    ramp = []
    for step in (0, 5_000, 10_000):
        drop.seek(step)  # in a training: drop.follow(optimizer), once
        ramp.append(f"step {step:6,}: p = {drop.p:.2f}, measured {drop.probe(images).dropped:.3f}")

    drop.remove()
    same = torch.equal(model(images), output) and fingerprint(model) == before
    count = sum(tensor.numel() for tensor in model.state_dict().values())
    removed = f"{count:,} parameters and buffers, all module names and the output are {'' if same else 'NOT '}bit-equal"
    return {"plan": planned, "ramp": "\n".join(ramp), "removed": removed}


def fingerprint(model: nn.Module) -> list[Any]:
    """All that a user may know a model by: names, values, hooks and text."""
    values = [(name, value.numpy().tobytes()) for name, value in model.state_dict().items()]
    hooks = [(name, [*module._forward_hooks]) for name, module in model.named_modules()]
    return [values, hooks, repr(model), type(model)]


# --- two: a language model that overfits

SEEDS, EPOCHS, EVERY = 6, 26, 2  # validated every second epoch
BATCH, LENGTH, WIDTH, LR = 10, 20, 96, 0.03
WORDS = {"test": 10_000, "validation": 5_000, "training": 8_000}
WITHOUT, WITH = "without hooks", "with hooks"
# The lowest validation perplexity of six trainings with seed 100 for each side: learning rates from 0.012 to 0.03,
# weight decays from 0.6 to 2.0 without and from 0.15 to 0.5 with hooks, and from 0.5 to 1.0 of the paper's rates.
WEIGHT_DECAY = {WITHOUT: 1.0, WITH: 0.3}
RATES = 0.7


class Lstm(nn.Module):
    """A language model without dropout, as a user may have it: two layers with tied weights."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.lstm1 = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.lstm2 = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, vocabulary)
        self.head.weight = self.embed.weight
        nn.init.uniform_(self.embed.weight, -0.1, 0.1)

    def forward(self, x_BT: Tensor, state: Any = (None, None)) -> tuple[Tensor, Any]:
        h_BTC, first = self.lstm1(self.embed(x_BT), state[0])
        h_BTC, second = self.lstm2(h_BTC, state[1])
        return self.head(h_BTC), (first, second)


def awd_lstm(model: nn.Module, scale: float = RATES) -> Injection:
    """Add the regularizers of AWD-LSTM (Merity et al. 2017, arXiv:1708.02182) at a multiple of the paper's rates."""
    parts: list[tuple[Any, dict[str, Any]]] = [
        (ActivationPenalty(l2=0.0, slowness=scale), {"layers": "lstm2"}),
        (LockedDropout(p=0.4 * scale), {"layers": ["embed", "lstm2"]}),
        (LockedDropout(p=0.25 * scale), {"layers": "lstm1"}),
        (Dropout(p=0.1 * scale, shared=(1,)), {"layers": "embed", "at": "parameters"}),
        (Dropout(p=0.5 * scale), {"layers": "lstm?", "at": "parameters", "tensor": "weight_hh_*"}),
        (ActivationPenalty(l2=2.0 * scale, slowness=0.0), {"layers": "lstm2"}),
    ]
    with warnings.catch_warnings():
        # The head shares the embedding's weights and keeps them whole, as in the paper.
        warnings.filterwarnings("ignore", "'head.weight' shares a regularized weight", HookdropWarning)
        for number, (regularizer, where) in enumerate(parts):
            inject(model, regularizer, name=f"part {number}", on_existing="stack", **where)
    return find(model)


class Run(NamedTuple):
    """The perplexities of one training."""

    training: list[float]
    validation: list[float]  # of the same epochs
    test: float  # with the weights of the best epoch on the validation text
    restored: bool  # whether removing the hooks changed no bit of the model and its output


def train(job: tuple[str, int, int]) -> Run:
    """Train on one side of a pair."""
    side, seed, epochs = job
    torch.set_num_threads(1)
    texts, vocabulary = read()
    torch.manual_seed(seed)
    model = Lstm(vocabulary)
    drop = awd_lstm(model) if side == WITH else None
    windows = cut(texts["training"])
    optimizer = torch.optim.AdamW(model.parameters(), LR, weight_decay=WEIGHT_DECAY[side])
    decay = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=epochs * len(windows))
    training, validation, best = [], [], {}
    for epoch in range(1, epochs + 1):
        model.train()
        state, losses = (None, None), []
        for x_BT, y_BT in windows:
            logits_BTV, state = model(x_BT, state)
            state = tuple(tuple(part.detach() for part in layer) for layer in state)
            loss = cross_entropy(logits_BTV.flatten(0, 1), y_BT.flatten())
            (loss + drop.penalty() if drop else loss).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            decay.step()
            losses.append(float(loss.detach()))
        if epoch % EVERY == 0 or epoch == epochs:
            training.append(math.exp(statistics.fmean(losses)))
            validation.append(perplexity(model, texts["validation"]))
            if validation[-1] == min(validation):
                best = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(best)
    return Run(
        training, validation, perplexity(model, texts["test"]), gives_back(model, drop, texts["test"][None, :99])
    )


def gives_back(model: nn.Module, drop: Injection | None, x_BT: Tensor) -> bool:
    """Remove the hooks, and return whether weights and output are those with hooks, in eval mode, bit for bit."""
    values, (output, _) = [tensor.clone() for tensor in model.state_dict().values()], model.eval()(x_BT)
    if drop:
        drop.remove()
    return all(map(torch.equal, [*values, output], [*model.state_dict().values(), model(x_BT)[0]]))


@torch.no_grad()
def perplexity(model: nn.Module, text_N: Tensor) -> float:
    """The exponential of the mean loss of a word, in eval mode: the lower, the better the text is predicted."""
    model.eval()
    state, total, count = (None, None), 0.0, 0
    for x_BT, y_BT in cut(text_N):
        logits_BTV, state = model(x_BT, state)
        total += float(cross_entropy(logits_BTV.flatten(0, 1), y_BT.flatten(), reduction="sum"))
        count += y_BT.numel()
    return math.exp(total / count)


def cut(text_N: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The text in `BATCH` rows, cut into windows, each with the next words as its targets."""
    rows_BN = text_N[: len(text_N) // BATCH * BATCH].view(BATCH, -1)
    ends = [*range(0, rows_BN.shape[1] - 1, LENGTH), rows_BN.shape[1] - 1]
    return [(rows_BN[:, a:b], rows_BN[:, a + 1 : b + 1]) for a, b in itertools.pairwise(ends)]


def read() -> tuple[dict[str, Tensor], int]:
    """Python's language reference, which every Python contains, as numbers of words; words seen once are word 0."""
    paragraphs = [*dict.fromkeys(paragraphs_of_reference())]
    random.Random(0).shuffle(paragraphs)
    texts, left = {}, iter(paragraphs)
    for part, size in WORDS.items():
        texts[part] = list[str]()
        while len(texts[part]) < size:
            texts[part] += [*next(left), "<end>"]
    counts = Counter(texts["training"])
    numbers = {word: i for i, word in enumerate([word for word in counts if counts[word] > 1], 1)}
    tensors = {part: torch.tensor([numbers.get(word, 0) for word in text]) for part, text in texts.items()}
    return tensors, len(numbers) + 1


def paragraphs_of_reference() -> Iterator[tuple[str, ...]]:
    for topic in sorted(topics):
        for paragraph in re.split(r"\n\s*\n", topics[topic]):
            words = tuple(re.findall(r"[a-z]+|[^\sa-z]", paragraph.lower()))
            if len(words) >= 8:
                yield words


# --- three: what the pairs say


class Verdict(NamedTuple):
    sentence: str
    limits: str


def verdict(without: list[float], with_hooks: list[float]) -> Verdict:
    """Compare the test perplexities of the pairs by an exact permutation test of their logarithms."""
    logs = [math.log(b / a) for a, b in zip(without, with_hooks, strict=True)]
    pairs, change = len(logs), math.exp(statistics.fmean(logs)) - 1
    # Without an effect, each difference is as likely with the opposite sign.
    sums = [
        abs(sum(map(math.prod, zip(signs, logs, strict=True)))) for signs in itertools.product((1, -1), repeat=pairs)
    ]
    p = sum(one >= abs(sum(logs)) * (1 - 1e-9) for one in sums) / len(sums)
    a, b = statistics.geometric_mean(without), statistics.geometric_mean(with_hooks)
    lower = sum(one < 0 for one in logs)
    numbers = f"perplexity {a:.1f} without hooks, {b:.1f} with them ({change:+.0%}), lower in {lower} of {pairs} pairs"
    if p > 0.05:
        return Verdict(
            f"No clear difference on unseen text: {numbers}.",
            f"p = {p:.2g}; with fewer than 6 pairs, no difference can be clear.",
        )
    better = "better" if change < 0 else "worse"
    limits = f"If hooks changed nothing, a difference this clear would appear in {p:.0%} of such comparisons."
    return Verdict(f"With hooks, the model predicts unseen text {better}: {numbers}.", limits)


def main(argv: list[str] | None = None) -> Path:
    """Run the demo; return the path of its page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder of the page (default: runs/demo)")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"pairs of trainings (default: {SEEDS})")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help=f"of each training (default: {EPOCHS})")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: one per core)")
    args = parser.parse_args(argv)
    started = time.perf_counter()

    shown = on_timm()
    print(f"1. Which layers of timm's ResNet-50? (hookdrop.plan)\n\n{shown['plan']}\n")
    print(f"2. The rate rises with the steps of the optimizer, and p means p.\n\n{shown['ramp']}\n")
    print(f"3. drop.remove() gives the model back: {shown['removed']}.\n")
    print(
        f"4. Does it help? {2 * args.seeds} trainings of an LSTM that overfits {WORDS['training']:,} words, in pairs:\n"
    )
    runs = train_all(args.seeds, args.epochs, args.workers)
    found = verdict(*([run.test for run in runs[side]] for side in (WITHOUT, WITH)))
    kept = sum(run.restored for run in runs[WITH])
    shown["trained"] = (
        f"After remove(), {kept} of {args.seeds} trained models have the weights and outputs that they had."
    )
    print(f"\n{shown['trained']}\n\n{found.sentence}\n{found.limits}")

    from demo_page import write  # matplotlib takes a second

    page = write(args.out, shown, runs, found, EVERY)
    print(f"The picture and all of the above: {page.resolve()}   ({time.perf_counter() - started:.0f} s)")
    return page


def train_all(seeds: int, epochs: int, workers: int) -> dict[str, list[Run]]:
    """Train all pairs in processes of one thread each, and print each pair when it is finished."""
    jobs = [(side, seed, epochs) for seed in range(seeds) for side in (WITHOUT, WITH)]
    runs: dict[str, list[Run]] = {WITHOUT: [], WITH: []}
    with ProcessPoolExecutor(min(workers, len(jobs)), get_context("spawn")) as pool:
        for (side, seed, _), run in zip(jobs, pool.map(train, jobs), strict=True):
            runs[side].append(run)
            if side == WITH:
                tests = " -> ".join(f"{runs[one][seed].test:.1f}" for one in (WITHOUT, WITH))
                print(f"pair {seed + 1} of {seeds}: perplexity on unseen text {tests}", flush=True)
    return runs


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("\nInterrupted. Nothing was written; the same command starts again.") from None
