"""New processes: what the package imports there, a new regularizer, saved models, native loops and Triton kernels."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hookdrop
from hookdrop import DropBlock, Dropout, LinearSchedule, Masksembles, find, inject
from hookdrop.accel import native
from tests.support.models import Small
from tests.support.programs import ROOT, run_code
from tests.support.training import half_ramped, seeded

FRESH = """
import warnings
import torch
from hookdrop import Masksembles, find, inject

warnings.simplefilter("error", UserWarning)
model = torch.load({path!r}, weights_only=False)
(drop,) = find(model)
assert [round(site.p, 12) for site in drop.sites] == [0.1, 0.2], drop.sites
hooked = [(module, *module._forward_hooks) for module in (model.layer1[0], model.layer1[1])]
for module, key in hooked:
    hook = module._forward_hooks[key]
    # Enough to reuse every handle id that was used before.
    for _ in range(key + 2):
        module.register_forward_hook(lambda *args: None)
    assert module._forward_hooks[key] is hook, "a later hook overwrote a loaded one"
images = torch.load({images!r})
torch.manual_seed(3)
torch.save(model(images), {out!r})
drop.remove()
assert [len(module._forward_hooks) for module, key in hooked] == [key + 2 for module, key in hooked]
layers = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Identity())
inject(layers, Masksembles(n=4), layers="*")
torch.save(layers(torch.ones(8, 40)), {masks!r})
"""


def test_torch_save_and_load_in_a_fresh_process(model: Small, images: torch.Tensor, tmp_path: Path) -> None:
    """Handle ids restart in a new process; later hooks must not overwrite the loaded ones.

    Masksembles has the same masks there, so the ranks of a job and a resumed run have them, too.
    """
    half_ramped(model)
    paths = {name: str(tmp_path / name) for name in ("path", "images", "out", "masks")}
    torch.save(model, paths["path"])
    torch.save(images, paths["images"])
    run_code(FRESH.format(**paths))
    assert torch.equal(torch.load(paths["out"]), seeded(model, images))
    layers = nn.Sequential(nn.Identity(), nn.Identity())
    inject(layers, Masksembles(n=4), layers="*")
    assert torch.equal(torch.load(paths["masks"]), layers(torch.ones(8, 40)))


WITHOUT_HOOKDROP = """
import copy, io, sys
import torch

sys.modules["hookdrop"] = None  # an import raises ModuleNotFoundError
try:
    torch.load({hooked!r}, weights_only=False)
except ModuleNotFoundError:
    pass
else:
    raise AssertionError("this file loads without hookdrop")
model = torch.load({portable!r}, weights_only=False)
x = torch.ones(64, 4)
torch.save((model(x), copy.deepcopy(model).eval()(x)), {out!r})
torch.save(model, io.BytesIO())
(key,) = model[2]._forward_pre_hooks
# Enough to reuse every handle id that was used before.
for _ in range(key + 2):
    model[2].register_forward_pre_hook(lambda module, args: None)
model(x)
"""


def test_a_portable_model_loads_without_hookdrop(tmp_path: Path) -> None:
    """Entries that do nothing replace the hooks, and reserve their ids: a later hook has another signature."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    clean = model(torch.ones(64, 4))
    paths = {name: str(tmp_path / name) for name in ("hooked", "portable", "out")}
    with inject(model, Dropout(0.5), layers="0"):
        torch.save(model, paths["hooked"])
    inject(model, Dropout(0.5), layers="0", portable=True)
    inject(model, Dropout(0.5), layers="2", at="input", portable=True, name="input")
    torch.save(model, paths["portable"])
    run_code(WITHOUT_HOOKDROP.format(**paths), "-W", "error::UserWarning")
    assert all(torch.equal(output, clean) for output in torch.load(paths["out"]))
    assert len(find(model)) == 2


def train_in_a_process(model: nn.Module, results: Any) -> None:
    """Seek, update the shared weights, and return what was observed."""
    (drop,) = find(model)
    before = drop.step_count, drop.p
    drop.seek(10)
    model(torch.ones(4, 3, 8, 8)).sum().backward()
    with torch.no_grad():
        model[0].weight.add_(1.0)
    with drop.recording(last=0) as m:
        model(torch.ones(64, 3, 8, 8))
    ((key, hook),) = model[1]._forward_hooks.items()
    for _ in range(key + 2):
        model[1].register_forward_hook(lambda *_: None)
    kept = model[1]._forward_hooks[key] is hook
    drop.remove()
    results.put((before, drop.step_count, m.totals.dropped, kept, (not find(model))))


def test_a_spawned_process_trains_on_shared_weights() -> None:
    """As in the example of torch.multiprocessing."""
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Hardtanh(1.0, 2.0))
    drop = inject(model, DropBlock(0.4, 3, normalize=None), layers="1", schedule=LinearSchedule(10))
    drop.seek(5)
    model.share_memory()
    weight = model[0].weight.detach().clone()
    context = torch.multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=train_in_a_process, args=(model, results))
    process.start()
    before, after, measured, kept, removed = results.get(timeout=120)
    process.join()
    assert (before, after, kept, removed) == ((5, 0.2), 10, True, True)
    assert measured == pytest.approx(0.4, abs=0.05)
    assert torch.equal(model[0].weight, weight + 1.0)
    assert (drop.step_count, drop.p) == (5, 0.2)
    assert find(model) == drop


def test_the_compiler_and_pyplot_are_imported_only_when_needed(tmp_path: Path) -> None:
    """The compiler takes about as long as PyTorch. (PyTorch's optimizers and fake tensors import it too.)

    Libraries of models are not needed. Importing pyplot would keep figures open and display them twice in notebooks.
    """
    pytest.importorskip("matplotlib")
    run_code(f"""
import sys, torch
from torch import nn
sys.modules.update(timm=None, torchvision=None, transformers=None)
from hookdrop import DropBlock, Dropout, LinearSchedule, find, inject, observe, recipes
model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1))
drop = inject(model, DropBlock(0.1, 3), layers="0", schedule=LinearSchedule(4))
inject(model, nn.Dropout(0.5), layers="1")
model(torch.ones(1, 3, 8, 8)).sum().backward()
drop.step()
drop.probe(torch.ones(1, 3, 8, 8))
torch.save(model, {str(tmp_path / "model.pt")!r})
find(torch.load({str(tmp_path / "model.pt")!r}, weights_only=False)).step()
with drop.recording() as recorded:
    model(torch.ones(1, 3, 8, 8))
assert recipes.stochastic_depth
assert "torch._dynamo" not in sys.modules and "matplotlib" not in sys.modules

from matplotlib.backends.backend_agg import FigureCanvasAgg
for figure in (recorded.plot_features(), recorded.plot_masks(), observe.plot_schedule(drop, 5)):
    FigureCanvasAgg(figure).draw()
assert "matplotlib.pyplot" not in sys.modules
""")


NEW = """
from torch import Tensor

from hookdrop.core.regularizer import Rate, Regularizer

AMOUNT = Rate("amount", kind="factor")


def shrink(x: Tensor, amount: float, training: bool = True) -> Tensor:
    return x * (1.0 - AMOUNT.argument(amount, x, "shrink")) if training else x


class Shrink(Regularizer):
    rate = AMOUNT

    def __init__(self, amount: float = 0.1) -> None:
        super().__init__()
        self.amount = amount

    def regularize(self, x, rate):
        return x * (1.0 - rate)
"""

USED = """
import torch, hookdrop
from tests.support.regularizers import EVERY
from hookdrop import *
from hookdrop import functional

assert "Shrink" in hookdrop.__all__ and "shrink" in functional.__all__
assert repr(hookdrop.parse("Shrink(amount=0.25)")) == "Shrink(amount=0.25)"
assert functional.shrink(torch.ones(1), 0.25).item() == 0.75
assert isinstance(EVERY["Shrink"].regularizer, Shrink)
model = torch.nn.Sequential(torch.nn.Identity())
with hookdrop.inject(model, "Shrink(amount=0.5)", layers="0", schedule=LinearSchedule(2)) as drop:
    drop.step()
    assert model(torch.ones(1)).item() == 0.75
    spec = hookdrop.InjectionSpec.from_dict(drop.spec.to_dict())
hookdrop.inject(model, spec)
assert model(torch.ones(1)).item() == 1.0
assert torch.compile(Shrink(0.5), backend="eager", fullgraph=True)(torch.ones(1)).item() == 0.5
"""


def test_adding_a_regularizer_takes_one_module_and_two_registrations(tmp_path: Path) -> None:
    """`hookdrop.__all__`, `parse`, specs and the tables of these tests need no changes."""
    package = Path(shutil.copytree(Path(hookdrop.__file__).parent, tmp_path / "hookdrop"))
    (package / "regularizers" / "shrink.py").write_text(NEW)
    lists = {"__all__ = [": '__all__ = [\n    "Shrink",', "_FILES = {": '_FILES = {\n    "shrink": "Shrink",'}
    exports = {"__all__ = [": 'from hookdrop.regularizers.shrink import shrink\n__all__ = [\n    "shrink",'}
    for file, changes in (("regularizers/__init__.py", lists), ("functional.py", exports)):
        text = (package / file).read_text()
        for old, new in changes.items():
            text = text.replace(old, new, 1)
        (package / file).write_text(text)
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    flags = ("-W", "error", "-W", "ignore::DeprecationWarning")
    run_code(USED, *flags, env={**os.environ, "PYTHONPATH": paths}, cwd=tmp_path)


SOURCE = Path(native.__file__).with_name("_blocks.c")
COMPILER = shutil.which("gcc") or shutil.which("clang")

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="neither gcc nor clang")


def compiled(source: Path, library: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    assert COMPILER is not None
    return subprocess.run([COMPILER, *flags, str(source), "-o", str(library)], capture_output=True, text=True)


@needs_compiler
def test_library_of_another_version_is_ignored(tmp_path: Path) -> None:
    """Its functions take other arguments."""
    source = f"#include <stdint.h>\nint64_t hookdrop_interface(void) {{ return {native._INTERFACE + 1}; }}"
    (tmp_path / "other.c").write_text(source)
    built = compiled(tmp_path / "other.c", tmp_path / "library", "-shared", "-fPIC")
    assert built.returncode == 0, built.stderr
    assert native._load(tmp_path / "library") is None


@needs_compiler
@pytest.mark.parametrize("openmp", [["-fopenmp"], ["-Wno-unknown-pragmas"]])
def test_source_compiles_without_warnings(tmp_path: Path, openmp: list[str]) -> None:
    flags = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O2", "-fPIC", "-shared"]
    built = compiled(SOURCE, tmp_path / "library", *flags, *openmp)
    if built.returncode and "omp" in built.stderr and "-fopenmp" in openmp:
        pytest.skip("no OpenMP")
    assert built.returncode == 0, built.stderr


@needs_compiler
def test_native_code_does_not_access_memory_out_of_bounds(tmp_path: Path) -> None:
    """3,000 geometries under the address and undefined-behavior sanitizers."""
    flags = ["-std=gnu11", "-g", "-O1", "-fno-strict-aliasing", "-Wno-unknown-pragmas"]
    sanitized = [*flags, "-fsanitize=address,undefined"]
    (tmp_path / "nothing.c").write_text("int main(void) { return 0; }")
    if compiled(tmp_path / "nothing.c", tmp_path / "nothing", *sanitized).returncode:
        pytest.skip("the compiler has no sanitizers")
    sanitized += ["-fno-sanitize-recover=all", f'-DSOURCE="{SOURCE}"']
    built = compiled(Path(__file__).with_name("programs") / "harness.c", tmp_path / "harness", *sanitized)
    assert built.returncode == 0, built.stderr
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    run = subprocess.run([str(tmp_path / "harness")], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stdout + run.stderr


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from hookdrop.accel.triton_kernels import draw_kernel, mask_kernel

def compile(kernel, types, **constants):
    types = {"bits": "*i32", "state": "*i64", "rate": "i64", "scale": "fp32", "count": "i64"} | types
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    source = ASTSource(kernel, signature, constexprs=constants)
    options = {"num_warps": 4, "enable_fp_fusion": False}
    for target, binary in TARGETS:
        assert len(triton.compile(source, target=GPUTarget(*target), options=options).asm[binary]) > 1000

compile(draw_kernel, {}, COUNT=True, LANES=128)
flags = {"COUNTED": True, "ALIGNED": True, "GROUPS_FASTEST": False, "ROWS": 64}
compile(mask_kernel, {"y": "*fp32", "x": "*fp32"}, **flags, stride=1)
flags |= {"ALIGNED": False, "GROUPS_FASTEST": True}
compile(mask_kernel, {"y": "*bf16", "x": "*bf16"}, **flags, group_stride=1)
"""
TARGETS = {
    "nvidia": [(("cuda", 80, 32), "cubin"), (("cuda", 90, 32), "cubin")], "amd": [(("hip", "gfx942", 64), "hsaco")]
}  # fmt: skip


def test_kernels_compile() -> None:
    language, backends = pytest.importorskip("triton.language"), pytest.importorskip("triton.backends").backends
    targets = [target for backend in TARGETS if backend in backends for target in TARGETS[backend]]
    if not hasattr(language, "gather") or not targets:
        pytest.skip("this Triton has no gather (PyTorch 2.6), or cannot compile for these GPUs")
    # The interpreter replaces the compiler when Triton is imported.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run_code(f"TARGETS = {targets}\n{COMPILE}", env=environment)
