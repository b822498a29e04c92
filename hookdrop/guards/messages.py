"""The messages of the guards by kind, and how a kind is looked up.

A kind names what detects its situation: a property of `Planned`, `Comparison` or `Progress`, or a function. The table
in `docs/project/guards.md` has a row for each. In a message, `it` is what was looked at (mostly an injection).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hookdrop.core.state import InjectionState
from hookdrop.core.tables import counted, some


def find(kinds: Iterable[str], it: object) -> dict[str, str]:
    """Return the message of each situation that `it` is in, by kind."""
    found = {kind: getattr(it, kind) for kind in kinds}
    return {kind: message(kind, it, value) for kind, value in found.items() if value}


def warn_each(state: InjectionState, found: dict[str, str]) -> None:
    """Warn about each problem that was not reported yet."""
    for kind, text in found.items():
        state.warn_once(kind, text)


def message(kind: str, it: object, found: Any = ()) -> str:
    """Return the message about the sites (a list) or the values (a dict) that were found."""
    if isinstance(found, list):
        found = {"sites": some(found), "n": len(found), "counted": counted(len(found), "site")}
    return MESSAGES[kind].format(it=it, **(found if isinstance(found, dict) else {}))


MESSAGES = {
    # --- in a plan; those of `guards.plan.WITHOUT_FORWARD` need no forward
    "erased": (
        "the rate of {counted} reaches 1, which drops everything there: {sites}.\n"
        "  p is a fraction: 1 percent is p=0.01, and keep_prob=1.0 drops nothing."
    ),
    "on_output": (
        "{title} at {site!r} drops what the model returns, the predictions of {layer!r}{more}.\n"
        '  to drop the features that they are computed from: layers={layer!r}, at="input"'
    ),
    "high_rate": ("{title} at {site!r} drops {p:.0%}: did you mean keep_prob={p:g}?"),
    "nested": (
        "{n} of {of} sites are nested inside other sites: activations are regularized up to {levels} times{rate}, at "
        "{path}.\n  for one level only, end the pattern in '.*', not '.**'."
    ),
    "fused_encoder": (
        "TransformerEncoderLayer leaves its fused eval path while a module inside it is hooked: eval output matches "
        "that of the unhooked model up to rounding, not bit for bit."
    ),
    "whole_block": (
        "{title} at {site!r}: the output includes the input (a whole residual block?), so {title} also {does} the "
        "skip connection: hook the last layer of the branch, such as attn, mlp or bn3.{more}"
    ),
    "never_called": (
        "{counted} never called in an eval forward, so the hooks there do not fire: {sites}.\n"
        "  their parents iterate over them, use their weights directly, or call them only in training."
    ),
    "frozen": "{counted} on frozen layers, whose output is still regularized: {sites}.",
    "before_batch_norm": (
        "{counted} directly before a batch norm at p >= 0.3: {sites}.\n"
        "  its running statistics would be those of dropped activations, which eval does not have (arXiv:1801.05134): "
        "attach it to the batch norm instead."
    ),
    "already_drops": (
        "{title} at {site!r}: {other!r} already drops there ({key}={rate:g}){more}.\n"
        "  change its rate: inject(model, set_dropout(p=...)), or hook another layer, or set it to 0."
    ),
    # --- changes of the model
    "lost": (
        "{it.name!r}: {n} of {it.known} sites lost their hook or rate: {sites}.\n"
        "  something replaced these modules after inject (reset_classifier, convert_sync_batchnorm, ...): "
        'inject again with on_existing="replace"{it.and_resume}.'
    ),
    "copied": (
        "{it.name!r}: this model also has copies of the hooks of {sites}.\n"
        "  fuse_modules, PEFT's modules_to_save or a copied layer created them. This handle neither steps nor removes "
        'them: use find(model) for all hooks, or inject again with on_existing="replace"{it.and_resume}.'
    ),
    "moved": (
        "{it.name!r}: {sites} moved to {now} after inject, with the hooks. An adapter refills what is dropped inside.\n"
        '  inject again with on_existing="replace", by the old name for the outer layer, by the new one for the inner'
        "{it.and_resume}."
    ),
    "full_backward_hook": (
        "{it.name!r}: full backward hooks on {sites} get gradients without the mask.\n"
        "  per-sample gradients computed there (Opacus) are wrong; .grad is right. Hook a layer without weights or, "
        'with at="input", the next layer.'
    ),
    # --- use of the model
    "untrained": (
        "{it.name!r}: no site ran, and the {steps} steps of optimizers since inject trained other models.\n"
        "  if your trainer builds a new model (ultralytics, FX quantization), inject into it in a callback."
    ),
    "silent": (
        "{it.name!r}: {sites} never ran, so nothing is dropped there.\n"
        "  PyTorch calls neither a ModuleList that is only iterated over nor a module whose weights are used directly, "
        "and inputs_embeds bypass the embedding: hook the layers inside or after it."
    ),
    "always_in_eval": (
        "{it.name!r}: {sites} only ran in eval mode, where nothing is dropped.\n"
        "  call model.train() before training. If the model keeps a layer in eval mode (frozen batch norm), hook "
        "another one, such as the preceding convolution."
    ),
    "equal_masks": (
        "{it.name!r}: ranks {first} and {second} draw identical masks, because both are seeded with {seed}.\n"
        "  on every rank, after building the model: hookdrop.seed_per_rank()\n"
        "  if they process the same samples (tensor parallelism), identical masks are correct: "
        "then call seed_per_rank(group=data_parallel_group)."
    ),
    "rows": (
        "{it.name!r} draws once for each row of axis 0, of which {many!r} has {most} and {few!r} {least}: not all rows "
        "are samples.\n"
        '  to draw once for each sample: inject(..., example_input=x)   once for the batch: DropPath(mode="batch")'
    ),
    # --- progress of the schedule
    "optimizer_gone": (
        "{it.name!r}: the optimizer that it followed no longer exists (rebuilt or copied?), so its schedule is not "
        "advancing.\n  follow the new one: drop.follow(optimizer)"
    ),
    "not_advancing": (
        "{it.name!r} is still at step {it.state.step_count} of {it.state.schedule}: its schedule is not advancing, "
        "because {it.why}.\n  {it.advice}"
    ),
    "too_fast": (
        "{it.name!r}: its schedule advanced {it.state.live.moves} times during {it.updates} updates of the weights, so "
        "it ends early.\n"
        "  count optimizer steps, not batches: drop.follow(optimizer), or drop.step() after each optimizer.step()"
    ),
    "too_slow": (
        "{it.name!r}: its schedule advanced {it.state.live.moves} times during {it.updates} updates of the weights: a "
        "schedule counts optimizer steps, not epochs.\n"
        "  drop.follow(optimizer), or drop.step() after each optimizer.step()"
    ),
    "other_optimizer": (
        "{it.name!r}: the optimizer that it follows has no parameter of the model, and took {it.state.live.moves} "
        "steps during {it.updates} updates of the weights.\n"
        "  follow the one that trains the model: drop.follow(None).follow(optimizer)"
    ),
    "ended_early": (
        "{it.name!r}: {it.state.schedule} ended long ago: the training is at step {it.state.step_count}. A schedule "
        "counts optimizer steps, not epochs.\n"
        "  inject(..., schedule=LinearSchedule(steps=1.0), total_steps=epochs * len(loader))"
    ),
    "unread_penalty": (
        "{it.name!r}: the weights were updated {unread} times, and nothing read the loss terms of the forward passes "
        "before, so the penalty has no effect.\n"
        "  for each loss: loss = criterion(...) + drop.penalty()   in a trainer: see its page in the docs"
    ),
    "restarted": (
        "{it.name!r} is at step {it.state.step_count} of {it.state.schedule}, but the optimizer that it follows has "
        "already taken {taken} (resumed training?): the schedule is starting over.\n"
        "  to resume: drop.seek({to}) or drop.load_state_dict(...) before training; to restart on purpose: "
        "drop.seek({it.state.step_count})"
    ),
}
