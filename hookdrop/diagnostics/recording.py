"""What a regularizer did to real tensors: what came in, what was kept, what went on."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hookdrop.diagnostics.figures import Rows, blocks_figure, pixels, spread
from hookdrop.diagnostics.measurement import measured_into
from hookdrop.errors import did_you_mean
from hookdrop.hooks.hook import SiteHook
from hookdrop.hooks.state import InjectionState
from hookdrop.utils.globs import glob_expression
from hookdrop.utils.tables import html_table, shape_text, some, text_table
from hookdrop.utils.tensor_copies import NotKept, Place, copied, place
from hookdrop.utils.torch_internals import graph_task
from hookdrop.utils.validation import count

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEADER = ("site", "calls", "shape", "p", "dropped")


@dataclass(frozen=True, eq=False)
class Record:
    """One call of one site: copies without a graph, all of one shape."""

    before: Tensor
    """What came in."""
    mask: Tensor
    """bool: True where the output depends on the input. All True for what drops nothing, such as noise."""
    after: Tensor
    """What went on."""
    p: float | None
    """The rate in force; None for a regularizer without a rate."""
    regularizer: str
    drops: bool = True
    """Whether dropping is what the regularizer does."""

    @property
    def dropped(self) -> float:
        """The fraction that was dropped; 0 of what drops nothing."""
        mask = self.mask.full_tensor() if hasattr(self.mask, "full_tensor") else self.mask
        return 1.0 - float(mask.float().mean()) if mask.numel() else 0.0

    def __repr__(self) -> str:
        dropped = f", dropped {self.dropped:.3f}" if self.drops else ""
        return f"<Record of {self.regularizer} on {shape_text(self.before.shape)}{dropped}>"


class Recording(Mapping[str, Record]):
    """The last call of each site by the site's name; `calls(name)` has all that were kept."""

    def __init__(self, name: str, sites: Sequence[str], last: int = 1, to: Place = None) -> None:
        self.name = name
        self.reasons: dict[str, str] = {}
        """Why nothing was recorded, by site; known when the recording is over."""
        self._last, self._to = count(last, "last", "recording"), place(to, "recording")
        self._records: dict[str, deque[Record]] = {site: deque(maxlen=self._last) for site in sites}
        self._counts = dict.fromkeys(sites, 0)

    def record(self, hook: SiteHook, rate: float | None, x: Tensor, y: Tensor, dropped: Tensor) -> None:
        """Add one call; what an activation checkpoint recomputes is no other call."""
        if graph_task() != -1:
            return
        regularizer = hook.regularizer
        mask = ~copied(dropped, self._to) if regularizer.drops else torch.ones_like(copied(dropped, self._to))
        record = Record(copied(x, self._to), mask, copied(y, self._to), rate, hook.describe(rate), regularizer.drops)
        self._records[hook.site].append(record)
        self._counts[hook.site] += 1

    def __getitem__(self, name: str) -> Record:
        """The last call of a site; `LayerError` if there is none."""
        return self.calls(name)[-1]

    def calls(self, name: str) -> list[Record]:
        """Every call that was kept, in order."""
        if not self._records.get(name):
            raise NotKept(self._missing(name))
        return list(self._records[name])

    def __iter__(self) -> Iterator[str]:
        return (name for name, records in self._records.items() if records)

    def __len__(self) -> int:
        return sum(map(bool, self._records.values()))

    def _missing(self, name: str) -> str:
        recorded = f"\n  recorded: {some(list(self)) or 'nothing'}"
        if name in self._records:
            why = self.reasons.get(name, "so far it was not called in training mode at a rate above 0")
            return f"nothing was recorded at {name!r}: {why}.{recorded}"
        return f"{self.name!r} has no site {name!r}.{did_you_mean(name, self._records)}{recorded}"

    # --- pictures

    def plot_features(
        self, layers: str | Sequence[str] | None = None, sample: int = 0, channels: int = 8, figure: Any = None
    ) -> Figure:
        """Before, mask and after of the last call of each site, one colour scale a site.

        Of what drops nothing, such as noise, the change is shown instead of a mask.

        Args:
            layers: which sites, by name or glob; None is all that were recorded, or 6 of them from first to last.
            sample: which of the batch.
            channels: how many channels of a map at most. Tokens are one image (tokens x channels), features another
                (samples x units).
            figure: a matplotlib `Figure` or `SubFigure` to draw in, instead of a new one.

        Returns:
            The figure; `figure.savefig("seen.png")` writes it, and a notebook shows it.

        Raises:
            HookdropError: matplotlib is not installed.
            LayerError: a site that was not recorded, or nothing was.
        """
        blocks: dict[str, Rows] = {}
        for name, r in self._chosen(layers).items():
            mask = {"mask": r.mask} if r.drops else {}
            blocks[self._title(name)] = {"before": r.before, **mask, "after": r.after}
            if not r.drops:
                blocks[f"{name or 'the model'}: what was added"] = {"after - before": r.after - r.before}
        return self._drawn(blocks, layers, sample, channels, figure)

    def plot_masks(
        self, layers: str | Sequence[str] | None = None, sample: int = 0, channels: int = 8, figure: Any = None
    ) -> Figure:
        """The mask of the last call of each site; the arguments are those of `plot_features`."""
        blocks = {self._title(name): {"mask": r.mask} for name, r in self._chosen(layers).items()}
        return self._drawn(blocks, layers, sample, channels, figure)

    def log_tensorboard(self, writer: Any, step: int, sample: int = 0, channels: int = 8) -> None:
        """Write the picture of every site, and the fraction that was dropped there.

        Args:
            writer: a `torch.utils.tensorboard.SummaryWriter`, or what has its `add_image` and `add_scalar`.
            step: the step to write them at.
            sample, channels: as in `plot_features`.
        """
        for name, record in self.items():
            tag = f"hookdrop/{self.name}/{name or 'model'}"
            image = pixels(self.plot_features(name, sample, channels))
            writer.add_image(f"{tag}/features", image, step, dataformats="HWC")
            writer.add_scalar(f"{tag}/dropped", record.dropped, step)

    def _drawn(self, blocks: Mapping[str, Rows], layers: Any, sample: int, channels: int, figure: Any) -> Figure:
        there_are = len(self) if layers is None else 0
        return blocks_figure(blocks, sample=sample, channels=channels, figure=figure, there_are=there_are)

    def _chosen(self, layers: str | Sequence[str] | None) -> dict[str, Record]:
        if layers is None and not len(self):
            raise NotKept(self._missing(next(iter(self._records), "")))
        names: list[str] = spread(list(self)) if layers is None else []
        for entry in [layers] if isinstance(layers, str) else layers or ():
            matching = [] if entry in self._records else list(filter(glob_expression(entry).fullmatch, self))
            names += matching or [entry]
        return {name: self[name] for name in names}

    def _title(self, name: str) -> str:
        r = self[name]
        rate = "" if r.p is None else f" at {r.p:.3g}"
        dropped = f", dropped {r.dropped:.3f}" if r.drops else ""
        return f"{name or 'the model'}: {r.regularizer.partition('(')[0]}{rate}{dropped}"

    # --- text

    def _rows(self) -> list[tuple[object, ...]]:
        return [
            (name, self._counts[name], shape_text(r.before.shape), r.p, f"{r.dropped:.3f}" if r.drops else "-")
            for name, r in self.items()
        ]

    def __repr__(self) -> str:
        return text_table(HEADER, self._rows()) if len(self) else f"<nothing recorded of {self.name!r}>"

    def _repr_html_(self) -> str:
        return html_table(HEADER, self._rows(), f"recorded of {self.name}: the last call of each site")


@contextmanager
def recorded(state: InjectionState, hooks: Sequence[SiteHook], last: int, to: Place) -> Iterator[Recording]:
    """Record the forwards inside, and find out what was not recorded, and why."""
    recording = Recording(state.name, [hook.site for hook in hooks], last, to)
    try:
        with measured_into(state, recording):
            yield recording
    finally:
        recording.reasons = {hook.site: _why_not(hook) for hook in hooks if hook.site not in recording}


def _why_not(hook: SiteHook) -> str:
    state = hook.state
    if not state.on:
        return f"{state.name!r} is disabled or removed"
    if hook.train_rate is None or hook.train_rate.neutral:
        return f"its rate is 0 at step {state.step_count} of {state.schedule}"
    if not hook.called:
        return "the layer was never called"
    return "it was not called in training mode while recording"
