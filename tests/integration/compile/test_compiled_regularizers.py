"""Every regularizer in compiled code: no graph break, at most three graphs, the right rate."""

from __future__ import annotations

import copy
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from hookdrop import DropBlock, Dropout, HookdropWarning, LinearSchedule, MixStyle, inject, parse
from hookdrop.regularizers import REGULARIZERS, at_rate
from tests.support.compiling import Net, graphs
from tests.support.programs import ROOT
from tests.support.tensors import styled, zero_fraction

X = torch.ones(64, 64, 12, 12)


GRADIENT_EDITS = {name for name in REGULARIZERS if name.endswith("ActivationGrad")}
"""Tested in test_compiled_gradient_edits.py, because their output equals their input."""


SEPARATE = {"DSU", "LayerDrop", "Masksembles", "MixStyle", "ShakeDrop"}
"""Tested below and in other files, because the output for ones does not show their rate."""


TEXTS = {
    "DropBlock": "DropBlock(0.4, 3, normalize=None)",
    "Cutout": "Cutout(3, 0.4)",
    "HeadDropout": "HeadDropout(0.4, heads=64)",
}
TEXTS |= {name: f"{name}(0.4)" for name in REGULARIZERS if name not in {*TEXTS, *SEPARATE, *GRADIENT_EDITS}}


RANKS = {
    "Dropout1d": (64, 64, 144),
    "Dropout3d": (64, 64, 12, 3, 4),
    "DropPath": (4096, 9),
    "Cutout": (4096, 1, 6, 6),
    "TokenDropout": (64, 65, 9),
    "LockedDropout": (64, 9, 64),
    "HeadDropout": (64, 9, 64),
    "NEFTune": (64, 9, 64),
}


NOISE = ("GaussianDropout", "GaussianNoise", "NEFTune", "UniformNoise")


def input_of(text: str) -> Tensor:
    """A tensor of ones with a supported shape, large enough to measure the rate."""
    return torch.ones(RANKS.get(text.split("(")[0], tuple(X.shape)))


def measured_rate(text: str, y: Tensor) -> float:
    """The rate measured from the output for ones: the fraction below 1, or the variance of noise."""
    y = y.detach().double()
    if text.startswith("UniformNoise"):
        return y.std().item() * 3**0.5
    if text.startswith("NEFTune"):
        return y.std().item() * (3 * y[0].numel()) ** 0.5
    if text.startswith("Cutout"):
        y = y.amin((1, 2, 3))
    if text.startswith("TokenDropout"):
        y = y[:, 1:]
    if text.startswith("GaussianNoise"):
        return y.std().item()
    if text.startswith("GaussianDropout"):
        return (y.var() / (1 + y.var())).item()
    return (y < 0.999).double().mean().item()


def bound(text: str) -> float:
    """Four standard errors of `measured_rate` at 0.4, from the number of units that are dropped together."""
    units = {"Dropout": X.numel(), "AlphaDropout": X.numel(), "DropBlock": X.numel() / 9}
    name = text.split("(")[0]
    return 0.01 if name in NOISE else 4 * (0.4 * 0.6 / units.get(name, 64 * 64)) ** 0.5


@pytest.fixture(params=TEXTS.values())
def text(request: pytest.FixtureRequest) -> str:
    return request.param


MULTIPLYING = [text for text in TEXTS.values() if not text.startswith(("GaussianNoise", "NEFTune"))]
"""The regularizers whose gradient equals their multiplier."""


DROPPING = [text for text in MULTIPLYING if not text.startswith(NOISE)]


FEW = pytest.mark.parametrize(
    "text", ["Dropout(0.4)", TEXTS["DropBlock"], "DropPath(0.4)", "UniformNoise(0.4)"], indirect=True
)
"""One for each way to draw. `test_conformance.py` has the properties that all must have."""


def compiled(call: Callable[..., Tensor], **settings: object) -> Callable[..., Tensor]:
    return torch.compile(call, **{"backend": "aot_eager", "fullgraph": True, **settings})


def test_table_covers_every_regularizer() -> None:
    assert {*TEXTS, *SEPARATE, *GRADIENT_EDITS} == set(REGULARIZERS)


@FEW
def test_three_graphs_serve_a_thousand_steps_and_eval(text: str) -> None:
    """Training at rate 0, training above it, and eval. With fullgraph, a graph break would be an error."""
    model, x = Net(), input_of(text)[:2]
    drop = inject(model, text, layers="inner", schedule=LinearSchedule(1000))
    fast = compiled(model)
    for step in range(1001):
        drop.seek(step)
        fast(x).sum().backward()
    model.eval()
    assert torch.equal(fast(x), x)
    model.train()
    fast(x)
    assert graphs() == 3


RATES = """
import json, sys, torch
from torch import nn
sys.path.insert(0, sys.argv[1])
from tests.integration.compile.test_compiled_regularizers import NOISE, TEXTS, input_of, measured_rate
from hookdrop import LinearSchedule, inject, parse
from hookdrop.regularizers import at_rate

class All(nn.Module):
    def __init__(self):
        super().__init__()
        self.sites = nn.ModuleDict({name: nn.Identity() for name in TEXTS})
    def forward(self, inputs):
        return {name: site(inputs[name]) for name, site in self.sites.items()}

model, target = All(), float(sys.argv[2])
given = {f"sites.{name}": at_rate(parse(text), target) for name, text in TEXTS.items()}
drop = inject(model, given, schedule=LinearSchedule(4))
fast = torch.compile(model, fullgraph=True)
inputs = {name: input_of(text).requires_grad_() for name, text in TEXTS.items()}
torch.manual_seed(1)
for step in range(5):
    drop.seek(step)
    outputs = fast(inputs)
    drop.seek(4)  # between forward and backward
    grads = torch.autograd.grad(sum(y.sum() for y in outputs.values()), list(inputs.values()))
    same = {n: (n in NOISE or torch.equal(g == 0, y < .999)) for (n, y), g in zip(outputs.items(), grads)}
    print(json.dumps({n: [measured_rate(TEXTS[n], y), same[n]] for n, y in outputs.items()}))
"""


def test_rates_are_right_in_two_processes_that_share_an_inductor_cache(tmp_path: Path) -> None:
    """A rate compiled in as a constant would reappear from the cache. Backward uses the mask of forward."""
    settings = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_FX_GRAPH_CACHE": "1"}
    for target in (0.4, 0.2):
        run = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", RATES, str(ROOT), str(target)],
            env={**os.environ, **settings},
            check=True,
            capture_output=True,
            text=True,
        )
        for step, line in enumerate(run.stdout.splitlines()):
            for name, (rate, same_mask) in json.loads(line).items():
                assert rate == pytest.approx(target * step / 4, abs=bound(name)), (name, step)
                assert same_mask or step == 0, (name, step)
    assert any(tmp_path.iterdir())


@pytest.mark.parametrize("text", MULTIPLYING)
def test_the_rate_may_change_between_forward_and_backward(text: str) -> None:
    """The gradient is the multiplier of the forward, at the rate of the forward."""
    model = Net()
    drop = inject(model, text, layers="inner", schedule=LinearSchedule(10))
    fast = compiled(model)
    for step in range(1, 10, 2):
        drop.seek(step)
        x = input_of(text).requires_grad_()
        y = fast(x)
        drop.seek(10)
        (grad,) = torch.autograd.grad(y.sum(), x)
        if "Alpha" in text:
            assert len(grad.unique()) == 2
            assert torch.equal(grad == 0, y < 0.999)
        else:
            torch.testing.assert_close(grad, y)


@pytest.mark.parametrize("text", [text for text in DROPPING if not text.startswith("HeadDropout")])
@pytest.mark.parametrize("p", [1.0, 1e-4, 0.999])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_extreme_rates_and_low_precision(text: str, p: float, dtype: torch.dtype) -> None:
    regularizer = at_rate(parse(text), p)
    model, x = Net().to(dtype), input_of(text).to(dtype)
    inject(model, regularizer, layers="inner")
    y = compiled(model)(x)
    assert y.dtype == dtype
    assert torch.isfinite(y).all()
    one_in = 9 if text.startswith("DropBlock") else x.numel() // X[0].numel() if x.dim() < 4 else X[0, 0].numel()
    units = x.numel() / (1 if text.split("(")[0] in ("Dropout", "AlphaDropout") else one_in)
    assert measured_rate(text, y) == pytest.approx(
        p if p < 1 else 1.0, abs=5 * (p * (1 - p) / units) ** 0.5 + 1 / units
    )


@pytest.mark.parametrize("text", [text for text in TEXTS.values() if input_of(text).dim() == 4])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_memory_format_is_kept(text: str, memory_format: torch.memory_format) -> None:
    x = input_of(text).contiguous(memory_format=memory_format)
    assert compiled(parse(text))(x).is_contiguous(memory_format=memory_format)


def test_dynamic_shapes(text: str) -> None:
    """With `dynamic=True` and changing sizes, the rate stays right."""
    model, x = Net(), input_of(text)
    inject(model, text, layers="inner")
    fast = compiled(model, dynamic=True)
    for batch in (64, 48, 57):
        part = x[: x.shape[0] * batch // 64]
        assert measured_rate(text, fast(part)) == pytest.approx(0.4, abs=1.5 * bound(text))
    assert graphs() <= 2


class Blocks(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.inner = nn.Sequential(nn.Identity(), nn.Hardtanh(-9, 9))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


@FEW
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_replays_the_mask(text: str, use_reentrant: bool) -> None:
    """The gradient is the multiplier of the forward, although the block is recomputed."""
    model = Blocks(use_reentrant)
    drop = inject(model, text, layers="inner.0", schedule=LinearSchedule(4))
    fast = compiled(model, fullgraph=False)
    for step in (1, 3):
        drop.seek(step)
        x = input_of(text).requires_grad_()
        y = fast(x)
        y.sum().backward()
        assert x.grad is not None
        torch.testing.assert_close(x.grad == 0, y < 0.999) if "Alpha" in text else torch.testing.assert_close(x.grad, y)


SKIP = "skip_fwd_side_effects_in_bwd_under_checkpoint"


@pytest.mark.skipif(not hasattr(torch._dynamo.config, SKIP), reason=f"this PyTorch has no {SKIP}")
def test_checkpointing_inside_one_graph(text: str) -> None:
    """A hook records that it ran, a side effect that PyTorch must be allowed to skip in the recomputation."""
    with torch._dynamo.config.patch({SKIP: True}):
        model = Blocks(use_reentrant=False)
        inject(model, text, layers="inner.0")
        x = input_of(text).requires_grad_()
        y = compiled(model)(x)
        y.sum().backward()
        assert x.grad is not None
        if "Alpha" not in text and not text.startswith(("GaussianNoise", "NEFTune")):
            torch.testing.assert_close(x.grad, y)


class Ops:
    """A backend that counts the operations of each graph."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        self.counts.append(sum(node.op.startswith("call") for node in graph.graph.nodes))
        return graph.forward


@FEW
def test_eval_graph_equals_that_of_the_clean_model(text: str) -> None:
    clean = nn.Sequential(nn.Identity(), nn.ReLU(), nn.Identity()).eval()
    hooked = copy.deepcopy(clean)
    inject(hooked, text, layers="*")
    counts = []
    for model in (clean, hooked):
        torch.compiler.reset()
        ops = Ops()
        torch.compile(model, backend=ops, fullgraph=True)(input_of(text))
        counts.append(ops.counts)
    assert counts[0] == counts[1]
    assert len(counts[0]) == 1


FOREIGN = [
    (nn.Dropout2d(0.4), "use hookdrop.Dropout2d(p=0.4), which compiles without a graph break"),
    (nn.AlphaDropout(0.4), "use hookdrop.AlphaDropout(p=0.4), which compiles"),
    (nn.RReLU(), None),
]
try:
    import timm.layers
    import torchvision.ops
except ImportError:
    pass
else:
    FOREIGN += [
        (torchvision.ops.StochasticDepth(0.4, "row"), "use hookdrop.DropPath(p=0.4, mode='row'), which"),
        (torchvision.ops.DropBlock2d(0.4, 3), "use hookdrop.DropBlock(p=0.4, block_size=3), which"),
        (timm.layers.DropPath(0.4), "use hookdrop.DropPath(p=0.4), which"),
        (timm.layers.DropBlock2d(0.4, 3), "use hookdrop.DropBlock(p=0.4, block_size=3), which"),
    ]


@pytest.mark.parametrize(("theirs", "instead"), FOREIGN, ids=lambda value: type(value).__name__)
@pytest.mark.skipif(torch.__version__ < (2, 8), reason="this PyTorch does not report the reason")
def test_fullgraph_error_names_the_compilable_alternative(theirs: nn.Module, instead: str | None) -> None:
    model = Net()
    inject(model, theirs, layers="inner")
    if instead is None:  # without a rate, nothing could become a constant
        compiled(model)(X)
        return
    with pytest.raises(torch._dynamo.exc.Unsupported) as error:
        compiled(model)(X)
    assert instead in str(error.value)
    assert "as a Python float, which compiled code treats as a constant" in str(error.value)


def test_rates_of_foreign_modules_are_right_after_a_graph_break() -> None:
    """One graph break and no recompilation, because the rate is never compiled in."""
    model = Net()
    drop = inject(model, nn.Dropout(0.4), layers="inner", schedule=LinearSchedule(30))
    fast = compiled(model, fullgraph=False)
    for step in range(31):
        drop.seek(step)
        assert zero_fraction(fast(X)) == pytest.approx(0.4 * step / 30, abs=0.005)
    assert len(counters["graph_break"]) == 1


def test_standalone_layer_follows_its_rate(text: str) -> None:
    """It is recompiled for each rate, but always right."""
    layer, x = parse(text), input_of(text)
    fast = compiled(layer)
    for rate in (0.4, 0.2, 0.3):
        setattr(layer, type(layer).rate.attribute, rate)
        assert measured_rate(text, fast(x)) == pytest.approx(rate, abs=bound(text))


@pytest.mark.skipif(torch.__version__ < (2, 8), reason="this PyTorch does not report the reason")
def test_measuring_under_fullgraph_raises_with_a_hint() -> None:
    model = Net()
    drop = inject(model, Dropout(0.4), layers="inner")
    with drop.recording(last=0), pytest.raises(torch._dynamo.exc.Unsupported, match="record the uncompiled model"):
        compiled(model)(X)


@FEW
def test_measuring_causes_only_a_temporary_graph_break(text: str) -> None:
    model, x = Net(), input_of(text)
    drop = inject(model, text, layers="inner")
    fast = compiled(model, fullgraph=False)
    fast(x)
    with drop.recording(last=0) as m:
        fast(x)
    assert m.totals.asked == pytest.approx(
        0.0 if text.startswith("Cutout") else 0.4
    )  # its p is not a fraction of elements
    assert measured_rate(text, fast(x)) == pytest.approx(0.4, abs=bound(text))
    before = graphs()
    fast(x)
    assert graphs() == before


@pytest.mark.parametrize("regularizer", [DropBlock(0.4, 3), Dropout(0.4), nn.Dropout(0.4)], ids=repr)
@pytest.mark.parametrize("clean_first", [True, False])
def test_hooked_and_clean_models_of_one_class_do_not_share_code(regularizer: nn.Module, clean_first: bool) -> None:
    """A teacher and a student of one class: by default PyTorch ignores hooks when it looks up compiled code."""
    clean, hooked = Net(), Net()
    inject(hooked, regularizer, layers="inner")
    calls = [(torch.compile(model, backend="eager"), rate) for model, rate in ((clean, 0.0), (hooked, 0.4))]
    for call, rate in 3 * (calls if clean_first else calls[::-1]):
        assert zero_fraction(call(X)) == pytest.approx(rate, abs=0.03)


def test_a_container_that_never_runs_warns_without_a_graph_break() -> None:
    """As with timm's `set_grad_checkpointing`, which iterates over the blocks of a stage. It warns after ten steps."""

    class Iterated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stage = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.stage:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    model = Iterated()
    drop = inject(model, Dropout(0.4), layers="stage", schedule=LinearSchedule(100))
    fast = compiled(model)
    for _ in range(9):
        fast(torch.ones(2, 4)).sum().backward()
        drop.step()
    with pytest.warns(HookdropWarning, match="'stage' never ran"):
        drop.step()
    assert graphs() == 1


@pytest.mark.filterwarnings("ignore:Skipping serialization:UserWarning")  # raised by PyTorch 2.6 itself
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_mixstyle_follows_its_schedule(backend: str) -> None:
    """One graph above rate 0. The rate is right within 4 standard errors, and other batches are unchanged."""
    model = nn.Sequential(nn.Identity())
    drop = inject(model, MixStyle(1.0, alpha=5.0), layers="0", schedule=LinearSchedule(10))
    fast, x = torch.compile(model, backend=backend, fullgraph=True), styled()
    for step in (3, 7):
        drop.seek(step)
        mixed = sum(not torch.equal(fast(x), x) for _ in range(400))
        assert abs(mixed / 400 - step / 10) < 4 * math.sqrt(0.21 / 400)
    drop.seek(10)
    x.requires_grad_()
    y = fast(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert not torch.equal(y, x)
    assert len(grad.flatten(2).unique(dim=2).shape) == 3
    torch.testing.assert_close(grad, grad[:, :, :1, :1].expand_as(grad))  # one factor per channel
    assert graphs() <= 2
