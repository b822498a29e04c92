"""Train one run and score it: its record is a plain dict that JSON can hold."""

import hashlib
import json
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.utils.flop_counter import FlopCounterMode

import hookdrop
from comparison.run.record import environment
from comparison.spec.run_spec import generator, seed_of
from language.arms import ARMS, MODELS, Arm, build
from language.corpus import Corpus
from models.footprint import digest
from timing import Quartiles, measure, ratios

BATCH, LENGTH = 20, 35
EVERY = 2  # epochs between two measurements of the validation loss
CLIP = 0.5


@dataclass(frozen=True)
class Run:
    """The settings of a run; its key is the name of its file."""

    arm: str
    model: str
    value: float  # which multiplies the rates of the arm
    weight_decay: float
    seed: int  # of the weights, the order of the paragraphs and the masks, in separate streams
    corpus: str = ""  # SHA-256

    @property
    def key(self) -> str:
        """The first 32 hexadecimal digits of the SHA-256 of the settings."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:32]


Windows = Sequence[tuple[Tensor, Tensor]]


class Training(NamedTuple):
    """A run before its first step."""

    model: nn.Module
    windows: Windows  # of one epoch
    steps: int
    sites: list[str]
    train: Callable[[Windows], float]  # one step on each window; returns the mean loss


def prepare(run: Run, text: Corpus, steps: int | None = None) -> Training:
    """Build the model, place the arm's injections and create the optimizer."""
    arm = next(arm for arm in ARMS if (arm.name, arm.model) == (run.arm, run.model))
    order = torch.randperm(len(text.tokens["train"]), generator=generator(run.seed, "order")).tolist()
    windows = _windows(torch.cat([text.tokens["train"][i] for i in order]))
    rate = MODELS[arm.family]["lr"]
    torch.manual_seed(seed_of(run.seed, "weights"))
    model = build(run.model, run.value)
    steps = steps or round(MODELS[arm.family]["epochs"] * len(windows) * arm.steps)
    drop = inject(arm, run.value, model, steps)
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=run.weight_decay)
    decay = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    if arm.ramp:
        drop.follow(optimizer)
    sites = [f"{site.name}: {site.regularizer}" for site in drop.sites]
    train = partial(_train, model, optimizer, decay, drop if arm.penalizes else None)
    return Training(model, windows, steps, sites, train)


def execute(run: Run, text: Corpus) -> dict[str, Any]:
    """Train for all epochs, and score the weights of the epoch with the lowest validation loss, as for every arm."""
    clock = time.perf_counter()
    model, windows, steps, sites, train = prepare(run, text)
    weights = digest(model.state_dict().values())
    torch.manual_seed(seed_of(run.seed, "masks"))
    losses: list[float] = []
    validation: dict[int, float] = {}
    best: dict[str, Tensor] = {}
    for start in range(0, steps, len(windows)):
        losses.append(train(windows[: steps - start]))
        if len(losses) % EVERY == 0 or start + len(windows) >= steps:
            sums_P2 = score(model, text.tokens["validation"])
            loss = float(sums_P2[:, 0].sum() / sums_P2[:, 1].sum())
            validation[len(losses)] = loss
            if loss == min(validation.values()):
                best = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(best)
    scored = {name: score(model, parts) for name, parts in text.tokens.items() if name not in ("train", "validation")}
    return {
        "run": asdict(run),
        "sites": sites,
        "steps": steps,
        "weights_before": weights,
        "weights_after": digest(best.values()),
        "train_loss": losses,
        "validation_loss": validation,
        "best_epoch": min(validation, key=lambda epoch: validation[epoch]),
        "paragraphs": {name: sums.tolist() for name, sums in scored.items()},
        "words": text.words,
        "removed": text.removed,
        "environment": environment(),
        "seconds": time.perf_counter() - clock,
    }


def costs(runs: Sequence[Run], text: Corpus, rounds: int) -> dict[str, dict[str, float]]:
    """The time of a training step, in turn, and its floating-point operations, divided by those of the first run."""
    made = {run.arm: prepare(run, text, steps=10_000) for run in runs}
    jobs = {name: partial(one.train, one.windows[:5]) for name, one in made.items()}
    samples, (first, *_) = measure(jobs, rounds), made
    operations = {}
    for name, one in made.items():
        with FlopCounterMode(display=False) as counter:
            one.train(one.windows)
        operations[name] = counter.get_total_flops()
    return {
        name: {**Quartiles.of(ratios(samples, name, first))._asdict(), "flops": operations[name] / operations[first]}
        for name in made
    }


def score(model: nn.Module, paragraphs: list[Tensor]) -> Tensor:
    """The summed negative log-likelihood in nats of each paragraph and its number of tokens: (P, 2)."""
    stream = torch.cat(paragraphs)
    paragraph_N = torch.arange(len(paragraphs)).repeat_interleave(torch.tensor([len(one) for one in paragraphs]))
    sums_P2 = torch.zeros(len(paragraphs), 2, dtype=torch.float64)
    state = None
    model.eval()
    with torch.no_grad():
        for (x_BT, y_BT), (_, at_BT) in zip(_windows(stream), _windows(paragraph_N), strict=True):
            logits_BTV, state = model(x_BT, state)
            nll_N = cross_entropy(logits_BTV.flatten(0, 1), y_BT.flatten(), reduction="none").double()
            sums_P2.index_add_(0, at_BT.flatten(), torch.stack([nll_N, torch.ones_like(nll_N)], 1))
    return sums_P2


def _windows(stream_N: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The stream in `BATCH` rows, cut into windows, each with the next tokens as its targets."""
    rows_BN = stream_N[: len(stream_N) // BATCH * BATCH].view(BATCH, -1)
    ends = [*range(0, rows_BN.shape[1] - 1, LENGTH), rows_BN.shape[1] - 1]
    return [(rows_BN[:, a:b], rows_BN[:, a + 1 : b + 1]) for a, b in pairwise(ends)]


def inject(arm: Arm, value: float, model: nn.Module, steps: int) -> hookdrop.Injection:
    """Place the injections of an arm, and return a handle on all."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "'head.weight' shares a regularized weight", hookdrop.HookdropWarning)
        for spec in arm.specs(value):
            example = torch.zeros(2, LENGTH, dtype=torch.long)
            hookdrop.inject(model, spec, total_steps=steps, example_input=example)
    return hookdrop.find(model)


def _train(model: nn.Module, optimizer: Any, decay: Any, penalized: Any, windows: Windows) -> float:
    model.train()
    state, losses = None, []
    for x_BT, y_BT in windows:
        logits_BTV, state = model(x_BT, state)
        if state is not None:
            state = [tuple(part.detach() for part in layer) for layer in state]
        loss = cross_entropy(logits_BTV.flatten(0, 1), y_BT.flatten())
        (loss + penalized.penalty() if penalized else loss).backward()
        clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        decay.step()
        losses.append(float(loss.detach()))
    return sum(losses) / len(losses)
