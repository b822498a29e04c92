"""Copies of what passes through layers."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hookdrop.core.arguments import CopyDevice, count, one_of
from hookdrop.core.errors import NotRecordedError, ShapeError, warn
from hookdrop.core.selection import Entries
from hookdrop.core.tables import shape_text, text_table
from hookdrop.core.tensor_tree import TensorKey, detached_copy
from hookdrop.measure.figures import blocks_figure
from hookdrop.measure.recording import Recording
from hookdrop.observe.watch import Receiver, Tensors, Watch

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = ("input", "output", "gradient")


class Seen:
    """What was kept of one call of a layer: `input`, `output` and `gradient`, as far as they were requested.

    With `tensor="all"`, each is a tuple of tensors, and None where a tensor has no gradient.
    """

    def __init__(self, kinds: Sequence[str]) -> None:
        self.tensors: dict[str, dict[int, Tensor]] = {kind: {} for kind in kinds}
        self.count = 0  # of the tensors, with `tensor="all"`; 0 otherwise

    def __getattr__(self, kind: str) -> Any:
        if kind not in KINDS:
            raise AttributeError(f"{type(self).__name__!r} has no attribute {kind!r}; it has {', '.join(KINDS)}.")
        if found := self.tensors.get(kind):
            return tuple([found.get(index) for index in range(self.count)]) if self.count else found[0]
        if kind in self.tensors:
            why = {"gradient": "run backward() inside the block, and checkpoints with use_reentrant=False"}
            raise NotRecordedError(f"there was no {kind}.\n  {why.get(kind, 'it was no dense floating-point tensor')}")
        raise NotRecordedError(f"the {kind} was not kept.\n  write capture(..., what={(*self.tensors, kind)})")

    def shapes(self) -> list[str]:
        """Return the shapes of what was kept, as text."""
        return [", ".join(shape_text(x.shape) for x in found.values()) or "-" for found in self.tensors.values()]

    def __repr__(self) -> str:
        shapes = [f"{kind} {shape}" for kind, shape in zip(self.tensors, self.shapes(), strict=True)]
        return f"<Seen: {', '.join(shapes)}>"


class capture(Watch[Seen]):
    """Keep copies of what passes through layers inside a `with` block.

    It maps the names of layers to what was kept of their last call. `print` it for a table. The copies are safe from
    in-place edits. On exit, also after an error, all hooks are gone. What an activation checkpoint recomputes is kept
    once. Compiled code runs uncompiled inside.

    Args:
        model: any `nn.Module`, wrapped (DDP, torch.compile, ...) or not.
        layers, exclude: which layers, as in `inject`.
        what: of `"input"`, `"output"` and `"gradient"` (of the output). A gradient arrives with the first backward pass
            inside the block. A reentrant checkpoint hides it.
        last: how many calls of each layer are kept, at least 1.
        tensor: which tensor of a tuple, list, dict or dataclass, as in `inject`: of the output, or of the input if only
            that is kept.
        to: the device of the copies; None keeps them on that of the tensor.
        detach: False keeps copies of inputs and outputs in the graph, for a loss that is computed from them.

    Raises:
        LayerError: an entry matches nothing, or nothing was kept of a layer.
        ShapeError: a layer has no such `tensor`.
        ValueError, TypeError: an argument is invalid.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> with capture(model, "*", what=("output", "gradient")) as seen:
        ...     model(torch.randn(3, 4)).sum().backward()
        >>> seen["0"].gradient.shape
        torch.Size([3, 8])
        >>> seen
        layer  calls  output  gradient
        -----  -----  ------  --------
        0          1  3x8     3x8
        1          1  3x8     3x8
        2          1  3x2     3x2
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Entries,
        *,
        exclude: Entries | None = (),
        what: str | Sequence[str] = ("output",),
        last: int = 1,
        tensor: TensorKey = None,
        to: CopyDevice = None,
        detach: bool = True,
    ) -> None:
        kinds = (what,) if isinstance(what, str) else tuple(what or ())
        self._kinds = [one_of(kind, "what", "capture", KINDS) for kind in dict.fromkeys(kinds)]
        if not kinds:
            raise ValueError(f"capture: what must name at least one of {', '.join(map(repr, KINDS))}, got {what!r}.")
        self._last, self._to, self._detach = count(last, "last", "capture"), to, detach
        torch.empty(0, device=to)  # an unknown device raises here
        super().__init__(model, layers, exclude, tensor)
        self.selects_input = self._kinds == ["input"]
        self._counts = dict.fromkeys(self.layers, 0)
        self._inputs: dict[str, list[dict[int, Tensor]]] = {name: [] for name in self.layers}  # of calls in progress

    def before(self, name: str, found: Tensors) -> None:
        if "input" in self._kinds:
            self._inputs[name].append(self._copies(found))

    def after(self, name: str, found: Tensors) -> Receiver | None:
        seen = Seen(self._kinds)
        if "input" in self._kinds and self._inputs[name]:
            seen.tensors["input"] = self._inputs[name].pop()
        if "output" in self._kinds:
            seen.tensors["output"] = self._copies(found)
        if self.tensor == "all":
            seen.count = max(len(found), *map(len, seen.tensors.values()))
        self.seen.setdefault(name, deque(maxlen=self._last)).append(seen)
        self._counts[name] += 1
        gradients = seen.tensors.get("gradient")
        if gradients is None:
            return None
        return lambda index, gradient: gradients.update({index: detached_copy(gradient, self._to)})

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._inputs = {name: [] for name in self.layers}  # those of calls that failed

    def _copies(self, found: Tensors) -> dict[int, Tensor]:
        if self._detach:
            return {i: detached_copy(x, self._to) for i, x in enumerate(found)}
        return {i: x.to(device=self._to or x.device, copy=True) for i, x in enumerate(found)}

    def value(self, name: str) -> Seen:
        return self.calls(name)[-1]

    def calls(self, name: str) -> list[Seen]:
        """Return the kept calls of a layer, in order."""
        return list(self.seen[name]) if name in self.seen else [self[name]]

    def __repr__(self) -> str:
        rows = [(name, self._counts[name], *seen.shapes()) for name, seen in self.items()]
        return "\n".join([text_table(("layer", "calls", *self._kinds), rows), self.never()]).rstrip()

    def plot(
        self, layer: str, image: int = 0, channels: int = 16, *, recorded: Recording | None = None, figure: Any = None
    ) -> Figure:
        """Draw what was kept of the last call of a layer: a row of maps or tokens for each kind.

        Args:
            layer: its name.
            image: the index in the batch.
            channels: the maximum number of channels of a map. Tokens are one image (tokens x channels), and so are
                features (samples x units).
            recorded: of `drop.recording()` around the same forward: at a hooked layer, the figure then also shows the
                tensor before the regularizer, and the mask.
            figure: a matplotlib `Figure` or `SubFigure` to draw into, instead of a new one.
        """
        title, rows = layer or "the model", {kind: found[0] for kind, found in self[layer].tensors.items() if found}
        gradient = {kind: rows.pop(kind) for kind in ("gradient",) if kind in rows}  # with another color scale
        if recorded is not None and layer in recorded:
            rows = {"before": recorded[layer].before, "mask": recorded[layer].mask, **rows}
        blocks = {title: rows, f"{title}: gradient": gradient}
        if not (shown := {name: block for name, block in blocks.items() if block}):
            raise NotRecordedError(f"nothing was kept of the last call of {layer!r}: {self[layer]}.")
        return blocks_figure(shown, image, count(channels, "channels", "plot"), figure)

    def add_to(self, writer: Any, step: int, *, recorded: Recording | None = None) -> None:
        """Write the figure of each layer to a TensorBoard `SummaryWriter`, as `observe/<layer>`."""
        for name in self:
            try:
                figure = self.plot(name, recorded=recorded)
            except (ShapeError, NotRecordedError) as error:
                warn(f"{name!r} is not written: {error}")
            else:
                writer.add_figure(f"observe/{name or 'model'}", figure, step)
