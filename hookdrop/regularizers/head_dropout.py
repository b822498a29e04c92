"""HeadDropout: dropping whole attention heads."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hookdrop.core.arguments import count, one_of
from hookdrop.core.errors import LayerError, ShapeError
from hookdrop.core.regularizer import BELOW_1, DropRegularizer, Rate, SamplePlace
from hookdrop.kernels.random_numbers import rand
from hookdrop.regularizers.samples import CHOOSE_PLACE, EACH_ROW, SampleRows, place_text, rows_in_call, sample_place


def head_dropout(
    x: Tensor,
    p: float | Tensor,
    heads: int,
    training: bool = True,
    *,
    interleaved: bool = False,
    rows: SampleRows = EACH_ROW,
) -> Tensor:
    """Zero whole heads of (N, L, H d) with probability `p`, in [0, 1), and scale the rest: see `HeadDropout`.

    `rows` says which rows belong to which sample, if not each row of axis 0 is one.
    """
    heads = count(heads, "heads", "head_dropout", 2)
    one_of(interleaved, "interleaved", "head_dropout", (True, False))
    p = BELOW_1.argument(p, x, "head_dropout", HeadDropout.axes)
    _check_heads(x.shape[-1], heads, f"got {tuple(x.shape)}")
    if not training or x.numel() == 0 or (not isinstance(p, Tensor) and p == 0.0):
        return x
    # At least one head is kept: the first has a geometric distribution, truncated at `heads`, and those after it are
    # independent. This is the distribution of repeated draws, without repeating any.
    log_p = p.log() if isinstance(p, Tensor) else math.log(p)
    uniform = rand((rows.samples(x), heads + 1), torch.float32, x.device)
    first = (torch.log1p(-uniform[:, :1] * (1.0 - p**heads)) / log_p).floor().clamp(max=heads - 1)
    index = torch.arange(heads, device=x.device)
    kept_NH = (index == first) | ((index > first) & (uniform[:, 1:] >= p))
    wide = torch.promote_types(x.dtype, torch.float32)
    factor_NH = kept_NH.to(wide) * (heads / kept_NH.sum(1, keepdim=True, dtype=wide))
    factor = rows.repeat(factor_NH, x).unsqueeze(-2 if interleaved else -1)
    by_head = x.reshape(*x.shape[:-1], *((-1, heads) if interleaved else (heads, -1)))
    return (by_head * factor).flatten(-2).to(x.dtype)


def _check_heads(width: int, heads: int, where: str) -> None:
    if width % heads:
        near = [n for n in range(2, min(width, 4 * heads) + 1) if width % n == 0]
        nearest = sorted(sorted(near, key=lambda n: abs(n - heads))[:3])
        raise ShapeError(
            f"{where}: {width} features do not divide into {heads} heads.\n"
            f"  nearest numbers of heads that do: {', '.join(map(str, nearest)) or 'none'}"
        )


def _stored_heads(model: nn.Module, name: str) -> Any:
    """Return the number of heads that the module around a layer, or the config of the model, stores; "H" if neither."""
    stored = vars(model.get_submodule(name.rpartition(".")[0])) | getattr(
        getattr(model, "config", None), "__dict__", {}
    )
    return next(
        (n for key, n in stored.items() if re.search("(?<!kv_)(?<!value_)heads?$", key) and n in range(2, 999)), "H"
    )


class HeadDropout(DropRegularizer):
    """Zero whole attention heads with probability `p`, drawn for each sample, and scale the rest by H / kept: DropHead.

    Hook the output projection of attention (`o_proj`, `attn.proj`, ...): it acts on the input of that layer, where the
    heads are still side by side, also without `at="input"`. This works with fused attention. If a draw would drop all
    heads of a sample, it is drawn again, so the expected fraction of dropped heads is (p - p^H) / (1 - p^H).

    Args:
        p: probability of dropping a head, in [0, 1).
        heads: number of query heads H, at least 2. With `example_input`, `inject` finds it, and which features belong
            to which head, by running the model; a number is then compared with that. Without, only the width of a
            linear layer is checked: it must be a multiple of H.
        interleaved: whether feature f belongs to head f % H, as in (d H), and not to head f // d, as in (H d).
        samples: `(module, axis, interleaved)`, where the samples are in windows or time steps. `inject` finds this with
            `example_input=`; None: each row of axis 0 is a sample.
        keep_prob: 1 - p, instead of `p`.

    Shape: (N, L, H d), or (N, ..., H d), or any other if `samples` says where the samples are.

    Raises:
        LayerError: in `inject`, if `heads` is None and there is no example; with an example, if the input of the layer
            has no heads, or others than given.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> HeadDropout(p=0.5, heads=4)(torch.ones(2, 1, 8))
        tensor([[[4., 4., 0., 0., 0., 0., 0., 0.]],
        <BLANKLINE>
                [[0., 0., 2., 2., 0., 0., 2., 2.]]])

    Reference: Zhou et al. 2020, "Scheduled DropHead: A regularization method for transformer models",
    arXiv:2004.13342, section 3.1.
    """

    rate: ClassVar[Rate] = BELOW_1
    axes = "N ... Hd"
    only_at = "input"

    def __init__(
        self,
        p: float | None = None,
        heads: int | None = None,
        *,
        interleaved: bool = False,
        samples: SamplePlace | None = None,
        keep_prob: float | None = None,
    ) -> None:
        super().__init__(p, keep_prob=keep_prob)
        self.heads = None if heads is None else count(heads, "heads", self.title, 2)
        self.interleaved: bool = one_of(interleaved, "interleaved", self.title, (True, False))
        self.samples = sample_place(samples, self.title)
        if self.samples is not None and self.samples[0] is not None:
            self.needs = ("samples",)

    @property
    def independent_samples(self) -> bool:
        return self.samples is None

    def for_layer(self, model: nn.Module, name: str, at: str = "input", survey: Any = None) -> HeadDropout:
        where, write = f"HeadDropout at {name!r}", f"HeadDropout(p=..., heads={_stored_heads(model, name)})"
        if survey is None:
            if self.heads is None:
                raise LayerError(
                    f"{where}: the number of heads is missing.\n"
                    f"  pass it: {write}   or let inject find it: example_input=x"
                )
            _check_heads(getattr(model.get_submodule(name), "in_features", self.heads), self.heads, where)
            return self
        found = survey.heads.get(name, "it is not an output projection of attention")
        if isinstance(found, str):
            raise LayerError(
                f"{where}: its input has no heads: {found}.\n"
                "  find the projections: hookdrop.plan(model, recipes.head_dropout(p=...), example_input=x)\n"
                f"  if its input is (N, L, H d) all the same: {write}, without example_input"
            )
        if self.heads is not None and (self.heads, self.interleaved) != (found.count, found.interleaved):
            order = ", interleaved=True" if found.interleaved else ""
            raise LayerError(
                f"{where}: got heads={self.heads}, interleaved={self.interleaved}, but its input has {found.count} "
                f"heads, {'interleaved as (d H)' if order else 'side by side as (H d)'}.\n"
                f"  use HeadDropout(p=..., heads={found.count}{order}), or leave out heads"
            )
        samples = self.samples
        if samples is None:
            place = survey.samples(name, "input")
            if isinstance(place, str):
                raise LayerError(
                    f"{where} draws for each sample, but the samples are unknown: {place}.\n  {CHOOSE_PLACE}"
                )
            samples = place.argument
        return HeadDropout(self.p, found.count, interleaved=found.interleaved, samples=samples)

    def check(self, shape: Sequence[int]) -> None:
        super().check(shape)
        _check_heads(shape[-1], self.heads or 1, f"got {tuple(shape)}")

    def reading(self, shape: Sequence[int]) -> str:
        assert self.heads is not None
        order = " (d H)" if self.interleaved else ""
        place = f", {place_text(self.samples, shape)}" if self.samples else ""
        return f"H={self.heads} d={shape[-1] // self.heads}{order}{place}"

    def regularize(self, x: Tensor, rate: Any, samples: SampleRows | None = None) -> Tensor:
        if self.heads is None:
            raise ShapeError("HeadDropout: heads is missing, and there is no model to read it from: pass heads=...")
        rows = rows_in_call(self.samples, samples)
        return head_dropout(x, rate, self.heads, interleaved=self.interleaved, rows=rows)
