"""Check the sites of a recipe by their meaning, with values instead of a survey.

* A head: with the head zeroed in the product of attention, the input of the projection is the same as with the features
  zeroed that HeadDropout assigns to the head.
* A sample: rows that change with one sample of the batch have one draw.
* A layer: dropped, it returns its input.
* Patches: with half of them, in any order, the model computes the same.
* Tokens: equal tokens have equal embeddings, wherever they are.
* Keys: each softmax inside attention drops the requested rate of its keys, and no other softmax drops anything.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import hookdrop
from families.depth import randomized
from families.inputs import BATCH
from families.layers import MIXERS, Run, float_tensors, with_first
from hookdrop import HeadDropout, NEFTune, TokenDropout, recipes
from models import equal
from models.check import require
from models.footprint import tensors

ALMOST_0, KEYS = 1e-12, 0.3
ATTENTION = re.compile(f"{MIXERS.pattern}|a3module", re.IGNORECASE)
"""Rates of keys; `sampling` refuses 0."""
ALMOST_1 = 1 - 1e-9
"""LayerDrop has to keep a layer sometimes."""
_PRODUCTS = ("matmul", "__matmul__", "bmm", "baddbmm", "einsum")


def check_heads(run: Run, plan: hookdrop.Plan) -> None:
    """Check that the features of a head are those that are 0 without it, and that each sample has one draw."""
    base, cores = _inputs_of(run, [site.name for site in plan.sites])
    for site in plan.sites:
        drop = site.regularizer
        if site.name not in base:
            continue
        assert isinstance(drop, HeadDropout)
        assert drop.heads is not None
        width = base[site.name].shape[-1]
        owner = torch.arange(width) % drop.heads if drop.interleaved else torch.arange(width) // (width // drop.heads)
        mine = _around(site.name, cores)
        require(bool(mine), f"no attention runs around {site.name}")
        for head in {0, drop.heads - 1}:
            wanted = base[site.name] * (owner != head)
            zeroed = (_inputs_of(run, [site.name], mine, head, drop.heads, axis)[0][site.name] for axis in range(4))
            atol = 1e-5 * float(wanted.abs().max())
            require(
                any(torch.allclose(x, wanted, rtol=1e-4, atol=atol) for x in zeroed),
                f"head {head} of {site.name} is not what HeadDropout drops",
            )
        _check_samples(run, site.name, drop)


def _check_samples(run: Run, name: str, drop: HeadDropout) -> None:
    """Check that rows that change with one sample have the same draw, and that samples differ."""
    base = _inputs_of(run, [name])[0][name]
    axis = drop.samples[1] if drop.samples else 0
    injection = hookdrop.inject(run.module, drop, layers=name, name="one site")
    with injection, injection.sampling(), injection.recording(last=1) as record, torch.no_grad():
        run()
    call = record.calls(name)[0]
    kept = ((call.after != 0) | (call.before == 0)).movedim(axis, 0)
    kept = kept.reshape(len(kept), -1, kept.shape[-1]).all(1)
    by_head = kept.unflatten(-1, (-1, drop.heads)).mT if drop.interleaved else kept.unflatten(-1, (drop.heads, -1))
    pattern = by_head.all(-1)  # (rows, heads)
    for sample in range(BATCH):
        other = Run(run.name, run.module, {key: _replaced(key, value, sample) for key, value in run.inputs.items()})
        change = (_inputs_of(other, [name])[0][name] - base).abs().movedim(axis, 0).flatten(1).amax(1)
        rows = change > 1e-3 * base.abs().max()  # mixtures of experts round in another order
        require(len({tuple(row) for row in pattern[rows].tolist()}) <= 1, f"{name}: a sample has several draws")


def _replaced(key: str, value: Any, sample: int) -> Any:
    if not isinstance(value, Tensor) or value.dim() == 0 or len(value) != BATCH:
        return value
    if not value.is_floating_point() and not key.endswith("input_ids"):  # such as indices of images
        return value
    value = value.clone()
    value[sample] = value[sample] + 1.0 if value.is_floating_point() else value[sample].roll(1, 0)
    return value


class _Cores(TorchFunctionMode):
    """Numbers the products of attention, and zeroes a head in some."""

    def __init__(self, running: list[str], chosen: list[int], head: int, heads: int, axis: int) -> None:
        super().__init__()
        self.axis = axis
        self.running, self.chosen, self.head, self.heads = running, chosen, head, heads
        self.weights: list[Tensor] = []
        self.found: list[tuple[str, ...]] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        result = function(*args, **(kwargs or {}))
        given = tensors((args, kwargs))
        from_softmax = any(x is weight for x in given for weight in self.weights)
        if name == "scaled_dot_product_attention" or (from_softmax and name in _PRODUCTS):
            self.found.append(tuple(self.running))
            return self._without_head(result) if len(self.found) - 1 in self.chosen else result
        if isinstance(result, Tensor) and (name == "softmax" or (from_softmax and result.is_floating_point())):
            self.weights.append(result)
        return result

    def _without_head(self, x: Tensor) -> Tensor:
        x = x.clone()
        folded = len(x) % BATCH == 0 and (self.axis == 0 or x.dim() <= self.axis + 1)
        by_head = x.unflatten(0, (BATCH, -1)).movedim(1, 0) if folded else x.movedim(self.axis or 1, 0)
        by_head[torch.arange(len(by_head)) % self.heads == self.head] = 0.0
        return x


@torch.no_grad()
def _inputs_of(
    run: Run, names: list[str], chosen: list[int] | None = None, head: int = 0, heads: int = 1, axis: int = 1
) -> tuple[dict[str, Tensor], list[tuple[str, ...]]]:
    """Return the first input of each layer, and the modules that run around each product of attention."""
    found: dict[str, Tensor] = {}

    def enter(name: str, *given: Any) -> None:
        if name in names:
            found.setdefault(name, float_tensors(given)[0].clone())

    with _running(run.module, enter) as running, _Cores(running, chosen or [], head, heads, axis) as cores:
        torch.manual_seed(0)
        run()
    return found, cores.found


def _around(name: str, cores: list[tuple[str, ...]]) -> list[int]:
    """Return the products that run in the innermost module around a layer in which one runs."""
    while name:
        name = name.rpartition(".")[0]
        found = [index for index, running in enumerate(cores) if name in running]
        if found:
            return found
    return []


@torch.no_grad()
def check_keys(run: Run, plan: hookdrop.Plan) -> None:
    """Check that each softmax inside attention drops its keys once, unless a warning names it, and no other softmax."""
    warned = equal.named(plan.warnings)
    kinds = {name: type(module).__name__ for name, module in run.module.named_modules()}
    with hookdrop.inject(run.module, recipes.drop_key(p=KEYS), p_scale="equal", example_input=run.inputs) as drop:
        plain, dropped = _scores(run, drop, ALMOST_0), _scores(run, drop, KEYS)
    require(len(plain) == len(dropped), "with dropped keys, another number of softmaxes runs")
    for (running, before), (_, after) in zip(plain, dropped, strict=True):
        many = before & (before.sum(-1, keepdim=True) > 7)  # a query keeps its last key
        rate, elements = float((many & ~after).sum() / max(int(many.sum()), 1)), max(int(many.sum()), 1)
        if not any(ATTENTION.search(kinds[name]) for name in running):
            # Dropped keys before a router may change which experts it masks, but not how many.
            more = int(before.sum() - after.sum()) / max(int(before.sum()), 1)
            require(more < KEYS / 10, f"{running[-1]}, which is no attention, drops {more:.3f} of its scores")
        elif many.any() and (rate or not any(equal.is_named(name, running[-1:]) for name in warned)):
            near = abs(rate - KEYS) < 5 * (KEYS / elements) ** 0.5
            require(near, f"{running[-1]} drops {rate:.3f} of its keys, {KEYS} is requested")


def _scores(run: Run, drop: hookdrop.Injection, p: float) -> list[tuple[list[str], Tensor]]:
    found: list[tuple[list[str], Tensor]] = []

    class Scores(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name, given = getattr(function, "__name__", ""), kwargs or {}
            if name == "scaled_dot_product_attention":
                mask = args[3] if len(args) > 3 else given.get("attn_mask")
                shape = (*args[0].shape[:-1], args[1].shape[-2])
                found.append(([*running], _influence(torch.zeros(1) if mask is None else mask).expand(shape)))
            elif (
                name == "softmax"
                and args[0].dim() > 1
                and (given["dim"] if "dim" in given else args[1]) in (-1, args[0].dim() - 1)
            ):
                found.append(([*running], _influence(args[0])))
            return function(*args, **given)

    torch.manual_seed(0)
    with _running(run.module) as running, drop.sampling(p=p), Scores():
        run()
    return found


def _influence(scores: Tensor) -> Tensor:
    if scores.dtype == torch.bool:
        return scores
    # cpmant's random weights give scores from -300 to 300. Masks of -100 (Swin) count as influence in both runs.
    return scores > (scores.amax(-1, keepdim=True) - 1000).clamp(min=-5000)


@contextmanager
def _running(model: nn.Module, enter: Callable[..., None] = lambda *_: None) -> Iterator[list[str]]:
    """Give the names of the modules that run, and call `enter` with the name and the arguments of each."""
    running: list[str] = []

    def start(name: str, module: nn.Module, *given: Any) -> None:
        running.append(name)
        enter(name, *given)

    def end(*_: Any) -> None:
        running.pop()

    with ExitStack() as stack:
        for name, module in model.eval().named_modules():
            stack.enter_context(module.register_forward_pre_hook(partial(start, name), with_kwargs=True))
            stack.enter_context(module.register_forward_hook(end))
        yield running


def check_layers(run: Run, plan: hookdrop.Plan) -> None:
    """Check that each layer returns its input if it is dropped."""
    drop = hookdrop.inject(run.module, recipes.layer_drop(p=0.5), p_scale="equal", example_input=run.inputs)
    inputs: dict[str, Tensor] = {}

    def enter(name: str, module: nn.Module, *given: Any) -> None:
        inputs.setdefault(name, float_tensors(given)[0].clone())

    with (
        randomized(run.module),
        drop,
        drop.sampling(p=ALMOST_1),
        drop.recording(last=99) as record,
        ExitStack() as stack,
    ):
        for site in plan.sites:  # a hook inside would make it run on all samples
            before = site.module.register_forward_pre_hook(partial(enter, site.name), prepend=True, with_kwargs=True)
            stack.enter_context(before)
        run.module.eval()
        run()
    for name, given in inputs.items():
        call = record.calls(name)[0]
        require(not torch.equal(call.after, call.before), f"{name} is never dropped")
        require(torch.equal(call.after, given), f"without {name}, its input does not come out")


@torch.no_grad()
def check_patches(run: Run, plan: hookdrop.Plan) -> None:
    """Check that the model computes the same from half of the patches in another order."""
    site = plan.sites[0]
    drop = site.regularizer
    assert isinstance(drop, TokenDropout)
    tokens: list[int] = []

    def with_patches(order: Callable[[int], Tensor]) -> list[Tensor]:
        def keep(x: Tensor) -> Tensor:
            tokens.append(x.shape[1])
            return torch.cat([x[:, : drop.prefix], x[:, drop.prefix + order(x.shape[1] - drop.prefix)]], 1)

        torch.manual_seed(0)
        with site.module.register_forward_hook(lambda module, args, output: with_first(output, keep)):
            return float_tensors(run())

    plain = with_patches(lambda count: torch.arange(0, count, 2))
    turned = with_patches(lambda count: torch.arange(0, count, 2).flip(0))
    kept = drop.prefix + (tokens[0] - drop.prefix + 1) // 2
    order = torch.cat([torch.arange(drop.prefix), torch.arange(drop.prefix, kept).flip(0)])
    for before, after in zip(plain, turned, strict=True):
        if before.dim() > 1 and before.shape[1] == kept:
            before = before[:, order]
        require(torch.allclose(before, after, rtol=1e-3, atol=1e-4), f"the order of the patches at {site.name} matters")


@torch.no_grad()
def check_tokens(run: Run, plan: hookdrop.Plan) -> None:
    """Check that the site returns one vector for each token id, whatever its position."""
    require(len(plan.sites) == 1, "more than one embedding")
    site = plan.sites[0]
    assert isinstance(site.regularizer, NEFTune)
    seen: list[tuple[Tensor, Tensor]] = []

    def save(module: nn.Module, args: Any, output: Any) -> None:
        seen.append((tensors(args)[0], tensors(output)[0].clone()))  # BLIP adds positions in place

    with site.module.register_forward_hook(save):
        run()
    require(bool(seen), f"{site.name} does not run")
    ids, vectors = seen[0][0], seen[0][1].flatten(0, -2)
    require(not ids.is_floating_point() and ids.numel() % len(vectors) == 0, f"{site.name} does not look up tokens")
    rows = ids.reshape(len(vectors), -1)  # several for each token in audio models
    for row in rows.unique(dim=0):
        mine = vectors[(rows == row).all(1)]
        require(torch.equal(mine, mine[:1].expand_as(mine)), f"{site.name} depends on more than the token")
    given = [x for x in run.inputs.values() if isinstance(x, Tensor) and not x.is_floating_point()]
    tokens = {*ids.flatten().tolist()}
    # Offsets or a prompt may have been added to them.
    fits = [x.numel() == ids.numel() or {*x.flatten().tolist()} <= tokens for x in given]
    require(any(fits), f"{site.name} does not get the tokens")
