"""Record the inputs, masks and outputs of regularizers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hookdrop.core.arguments import CopyDevice, count
from hookdrop.core.errors import NotRecordedError, did_you_mean
from hookdrop.core.selection import glob_expression
from hookdrop.core.sink import RateSink
from hookdrop.core.tables import shape_text, some, text_table
from hookdrop.core.tensor_tree import detached_copy
from hookdrop.core.torch_internals import graph_task
from hookdrop.measure.figures import Rows, blocks_figure
from hookdrop.measure.measurement import Measurement, measured_into, why_idle
from hookdrop.measure.observing import total

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class Record:
    """One call of one site: detached copies, all of the same shape."""

    before: Tensor  #: The input.
    mask: Tensor
    """bool; True where the output depends on the input. All True for regularizers that drop nothing, such as noise."""
    after: Tensor  #: The output.
    p: float | None  #: The rate of the call; None if the regularizer has none.
    regularizer: str
    drops: bool = True  #: Whether the regularizer drops elements.

    @property
    def dropped(self) -> float:
        """The fraction of dropped elements; 0 for regularizers that drop nothing."""
        return 1.0 - total(self.mask.float().mean()) if self.mask.numel() else 0.0

    def __repr__(self) -> str:
        dropped = f", dropped {self.dropped:.3f}" if self.drops else ""
        return f"<Record of {self.regularizer} on {shape_text(self.before.shape)}{dropped}>"


class Recording(Mapping[str, Record]):
    """Maps site names to the last recorded call; `calls(name)` returns all recorded calls."""

    def __init__(self, hooks: Sequence[RateSink], last: int = 1, to: CopyDevice = None) -> None:
        self.name = ", ".join(dict.fromkeys(hook.state.name for hook in hooks))
        self.totals = Measurement(hooks)  #: What was measured in all calls: rates, dropped fractions, mean ratios.
        torch.empty(0, device=to)  # an unknown device raises before the first forward
        self._last, self._to = count(last, "last", "recording", 0), to
        self._records: dict[str, deque[Record]] = {site: deque(maxlen=self._last) for site in self.totals.sites}

    def record(self, hook: RateSink, rate: float | None, x: Tensor, y: Tensor, dropped: Tensor | None) -> None:
        """Add one call. Only the totals include those that an activation checkpoint recomputes."""
        self.totals.record(hook, rate, x, y, dropped)
        if hook not in self.totals.labels or not self._last or graph_task() != -1:
            return
        kept = torch.ones_like(x, dtype=torch.bool) if dropped is None else ~dropped
        before, mask, after = (detached_copy(tensor, self._to) for tensor in (x, kept, y))
        record = Record(before, mask, after, rate, hook.describe(rate), dropped is not None)
        self._records[self.totals.labels[hook]].append(record)

    def __getitem__(self, name: str) -> Record:
        """Return the last call of a site. Raises `LayerError` if there is none."""
        return self.calls(name)[-1]

    def calls(self, name: str) -> list[Record]:
        """Return all recorded calls of a site, in order."""
        if not self._records.get(name):
            raise NotRecordedError(self._missing(name))
        return list(self._records[name])

    def __iter__(self) -> Iterator[str]:
        return (name for name, records in self._records.items() if records)

    def __len__(self) -> int:
        return sum(map(bool, self._records.values()))

    def _missing(self, name: str) -> str:
        recorded = f"\n  recorded: {some(list(self)) or 'nothing'}"
        for hook, label in self.totals.labels.items():
            if label == name:
                return f"nothing was recorded at {name!r}: {why_idle(hook) if self._last else 'last=0'}.{recorded}"
        return f"{self.name!r} has no site {name!r}.{did_you_mean(name, self._records)}{recorded}"

    # --- plots

    def plot_features(
        self, layers: str | Sequence[str] | None = None, sample: int = 0, channels: int = 8, figure: Any = None
    ) -> Figure:
        """Plot input, mask (or change, of noise) and output of the last call of each site; returns the figure.

        Args:
            layers: the sites, by name or glob; None plots all, or of more than 6 every second, third, ...
            sample: the index in the batch.
            channels: the maximum number of channels of a map. Tokens are one image (tokens x channels), and so are
                features (samples x units).
            figure: a matplotlib `Figure` or `SubFigure` to draw into, instead of a new one.

        Raises:
            HookdropError: matplotlib is not installed.
            LayerError: a site was not recorded, or nothing was recorded.
        """
        blocks: dict[str, Rows] = {}
        for name, r in self._select(layers).items():
            blocks[self._title(name)] = {"before": r.before, **({"mask": r.mask} if r.drops else {}), "after": r.after}
            if not r.drops:
                blocks[f"{name or 'the model'}: change"] = {"after - before": r.after - r.before}
        return blocks_figure(blocks, sample, channels, figure)

    def plot_masks(
        self, layers: str | Sequence[str] | None = None, sample: int = 0, channels: int = 8, figure: Any = None
    ) -> Figure:
        """Plot the mask of the last call of each site. See `plot_features` for the arguments."""
        blocks = {self._title(name): {"mask": r.mask} for name, r in self._select(layers).items()}
        return blocks_figure(blocks, sample, channels, figure)

    def _select(self, layers: str | Sequence[str] | None) -> dict[str, Record]:
        if layers is None and not len(self):
            raise NotRecordedError(self._missing(next(iter(self._records), "")))
        names = list(self)[:: -(-len(self) // 6)] if layers is None else []
        for entry in [layers] if isinstance(layers, str) else layers or ():
            matching = [] if entry in self._records else list(filter(glob_expression(entry).fullmatch, self))
            names += matching or [entry]
        return {name: self[name] for name in names}

    def _title(self, name: str) -> str:
        r = self[name]
        rate = "" if r.p is None else f" at {r.p:.3g}"
        dropped = f", dropped {r.dropped:.3f}" if r.drops else ""
        return f"{name or 'the model'}: {r.regularizer.partition('(')[0]}{rate}{dropped}"

    def __repr__(self) -> str:
        if not len(self):
            return str(self.totals) if self.totals.calls else f"<Recording of {self.name!r}: empty>"
        calls = {name: effect.calls for name, effect in self.totals.sites.items()}
        rows = [
            (name, calls[name], shape_text(r.before.shape), r.p, f"{r.dropped:.3f}" if r.drops else "-")
            for name, r in self.items()
        ]
        return text_table(("site", "calls", "shape", "p", "dropped"), rows)


@contextmanager
def recording(sinks: Sequence[RateSink], last: int, to: CopyDevice) -> Iterator[Recording]:
    """Record the calls inside the `with` block; see `Injection.recording`."""
    found = Recording(sinks, last, to)
    with measured_into(list(found.totals.labels), found.record):
        yield found
