"""Traces, exports and scripts of hooked models. Nothing becomes a constant without an error or a warning."""

import copy
import io
import pickle
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import hookdrop
from hookdrop import DropBlock, Dropout, HookdropWarning, InjectionError, LinearSchedule, find, inject, without_hooks
from tests.support.models import Small, toy
from tests.support.tensors import zero_fraction

CANNOT_DISTINGUISH = "this PyTorch cannot distinguish exports from compiled code"
needs_is_exporting = pytest.mark.skipif(not hasattr(torch.compiler, "is_exporting"), reason=CANNOT_DISTINGUISH)


def everywhere(model: Small) -> Small:
    """Place all kinds of hooks: on containers, layers, inputs and the model itself; also foreign modules."""
    inject(model, DropBlock(0.4, 3), layers="layer1.*", schedule=LinearSchedule(4)).seek(2)
    inject(model, Dropout(0.4), layers="layer2.*.bn1")
    inject(model, hookdrop.DropPath(0.4), layers="fc", at="input")
    inject(model, nn.Dropout2d(0.4), layers="layer2.*.conv1", name="theirs")
    inject(model, hookdrop.GaussianNoise(0.4), layers=model)
    return model


def traced_nodes(traced: Any) -> list[str]:
    """The lines of the graph, without the numbers that distinguish classes of the same name."""
    return re.sub(r"___torch_mangle_\d+\.", "", str(traced.inlined_graph)).splitlines()


def onnx(model: nn.Module, x: torch.Tensor, dynamo: bool) -> bytes:
    pytest.importorskip("onnx")
    if dynamo:
        pytest.importorskip("onnxscript")
        return torch.onnx.export(model, (x,), dynamo=True, verbose=False).model_proto.SerializeToString()
    torch.onnx.export(model, (x,), file := io.BytesIO(), dynamo=False)
    return file.getvalue()


def exported(model: nn.Module, x: torch.Tensor, strict: bool) -> Any:
    program = torch.export.export(model, (x,), strict=strict)
    assert not any(site.called for drop in find(model) for site in drop.sites)
    assert torch.equal(program.module()(x), model(x))
    nodes = [(node.op, str(node.target), str(node.args), str(node.kwargs)) for node in program.graph.nodes]
    return nodes, program.graph_signature


EXPORTS: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "torch.export, strict": partial(exported, strict=True),
    "torch.export": partial(exported, strict=False),
    "torch.jit.trace": lambda model, x: traced_nodes(torch.jit.trace(model, x)),
    "torch.onnx": partial(onnx, dynamo=True),
    "torch.onnx of a trace": partial(onnx, dynamo=False),
    "make_fx": lambda model, x: make_fx(model)(x).code,
}


class TestEval:
    @pytest.mark.filterwarnings("ignore:.*legacy:DeprecationWarning", "ignore:The feature will:DeprecationWarning")
    @pytest.mark.parametrize("how", EXPORTS)
    def test_export_equals_that_of_the_clean_model(self, model: Small, images: torch.Tensor, how: str) -> None:
        """Node by node, and without a warning."""
        if "torch.export" in how and not hasattr(torch.compiler, "is_exporting"):
            pytest.skip(CANNOT_DISTINGUISH)
        unhooked = copy.deepcopy(model).eval()
        everywhere(model).eval()
        assert EXPORTS[how](model, images) == EXPORTS[how](unhooked, images)
        assert len(find(model)) == 5


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # raised by batch norms
class TestTraceInTrainMode:
    """`torch.jit.trace` in train mode would record the hooks at a constant rate, also for eval mode."""

    @pytest.mark.parametrize(
        ("regularizer", "when"),
        [
            (DropBlock(0.4, 3), "in training"),
            (DropBlock(0.4, 3), "while sampling in eval mode"),
            (nn.Dropout2d(0.4), "at the start of a ramp"),
            (nn.functional.dropout, "in training"),
        ],
    )
    def test_active_hooks_raise(self, model: Small, images: torch.Tensor, regularizer: Any, when: str) -> None:
        """The model trains on after the error."""
        schedule = LinearSchedule(4) if "ramp" in when else None
        drop = inject(model, regularizer, layers="layer1.*.bn1", schedule=schedule)
        with drop.sampling() if "sampling" in when else nullcontext():
            model.train("sampling" not in when)
            with pytest.raises(InjectionError):
                torch.jit.trace(model, images)
        if schedule:
            drop.step(4)
        assert not torch.equal(model.train()(images), model(images))

    @pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
    def test_other_traces_and_a_hook_on_the_model_raise(self, model: Small, images: torch.Tensor) -> None:
        class Features(Small):
            def features(self, x: torch.Tensor) -> torch.Tensor:
                return self.layer1(self.conv1(x))

        inject(part := Features(), Dropout(0.4), layers="layer1.*")
        with pytest.raises(InjectionError):
            torch.jit.trace_module(part, {"features": images})
        inject(model, Dropout(0.4), layers=model)
        with pytest.raises(InjectionError):
            torch.jit.trace(model, images)
        pytest.importorskip("onnx")
        with pytest.raises(InjectionError):
            torch.onnx.export(model, (images,), io.BytesIO(), dynamo=False, training=torch.onnx.TrainingMode.TRAINING)

    @pytest.mark.parametrize("off", [without_hooks, lambda model: find(model).disabled()], ids=["without_hooks", "off"])
    def test_trace_without_hooks_equals_that_of_the_clean_model(
        self, model: Small, images: torch.Tensor, off: Callable[[nn.Module], AbstractContextManager[Any]]
    ) -> None:
        clean = torch.jit.trace(copy.deepcopy(model), images, check_trace=False)
        everywhere(model)
        with off(model):
            hooked = torch.jit.trace(model, images, check_trace=False)
        assert traced_nodes(hooked) == traced_nodes(clean)
        assert len(find(model)) == 5
        assert not torch.equal(model(images), model(images))


def one_site(regularizer: nn.Module | str) -> tuple[nn.Module, hookdrop.Injection]:
    """A model whose output contains no zeros without dropout, after one of two steps of a schedule."""
    model = nn.Sequential(nn.Hardtanh(1.0, 2.0))
    drop = inject(model, regularizer, layers="0", schedule=LinearSchedule(2))
    drop.step()
    return model, drop


X = torch.ones(64, 16, 12, 12)


class TestExportInTrainMode:
    """`torch.export` in train mode may be intended. The program draws new masks at the rate of the export."""

    @needs_is_exporting
    @pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects")
    @pytest.mark.parametrize("strict", [True, False])
    @pytest.mark.parametrize("regularizer", [DropBlock(0.4, 3, normalize=None), Dropout(0.4)], ids=str)
    def test_export_keeps_the_current_rate_and_warns(self, regularizer: Any, strict: bool) -> None:
        model, drop = one_site(regularizer)
        with pytest.warns(HookdropWarning) as caught:
            program = torch.export.export(model, (X,), strict=strict).module()
        ours = [warning for warning in caught if warning.category is HookdropWarning]
        assert len(ours) == 1
        drop.step()
        assert zero_fraction(program(X)) == pytest.approx(0.2, abs=0.03)
        assert not torch.equal(program(X), program(X))
        assert zero_fraction(model(X)) == pytest.approx(0.4, abs=0.03)

    @pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
    @pytest.mark.parametrize(
        "regularizer", ["Dropout2d(0.4)", "DropBlock(0.4, 3)", "DropBlock(0.4, 3, normalize=None)"]
    )
    def test_make_fx_keeps_the_current_rate(self, regularizer: str, mode: str) -> None:
        """No warning is raised, because the compiler uses it too, and hooks keep no symbolic values."""
        model, drop = one_site(regularizer)
        graph = make_fx(model, tracing_mode=mode)(X)
        drop.step()
        assert zero_fraction(graph(X)) == pytest.approx(0.2, abs=0.05)
        assert not torch.equal(graph(X), graph(X))
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert next(iter(find(twin))).p == 0.4


class TestScripts:
    @pytest.mark.parametrize("at", ["output", "input"])
    def test_without_hooks_allows_scripting(self, model: Small, images: torch.Tensor, at: str) -> None:
        clean = torch.jit.script(copy.deepcopy(model))
        drop = inject(model, Dropout(0.4), layers=["fc", "layer1.*"], at=at)
        places = [dict(getattr(m, f"_forward_{'pre_' if at == 'input' else ''}hooks")) for m in model.modules()]
        with pytest.raises(AttributeError, match=r"torch.jit.script does not support(.|\n)*without_hooks\(model\)"):
            torch.jit.script(model)
        with without_hooks(model):
            scripted = torch.jit.script(model)
        assert scripted.code == clean.code
        assert torch.equal(scripted.eval()(images), model.eval()(images))
        assert [dict(getattr(m, f"_forward_{'pre_' if at == 'input' else ''}hooks")) for m in model.modules()] == places
        assert find(model) == drop
        model.train()
        with drop.recording(last=0) as m:
            model(images)
        assert m.totals.calls == 3


class TestSymbolicTrace:
    """A `GraphModule` keeps the model's layers with their hooks, but loses containers with their hooks."""

    def test_layers_keep_their_hooks(self, model: Small, images: torch.Tensor) -> None:
        drop = inject(model, Dropout(0.4), layers=["**.bn1", "fc"], schedule=LinearSchedule(2))
        graph = torch.fx.symbolic_trace(model)
        assert find(graph) == drop
        find(graph).step(2)
        assert drop.p == 0.4
        assert not torch.equal(graph(images), graph(images))
        drop.remove()
        assert not find(graph)

    @pytest.mark.parametrize(("at", "training"), [("output", True), ("input", False)])
    def test_containers_lose_their_hooks_with_a_warning(self, model: Small, at: str, training: bool) -> None:
        clean = torch.fx.symbolic_trace(copy.deepcopy(model))
        drop = inject(model, Dropout(0.4), layers=["layer1.*", "fc"], at=at)
        model.train(training)
        with pytest.warns(HookdropWarning, match=r"Dropout at 'layer1.0'.* is not part of the graph") as caught:
            graph = torch.fx.symbolic_trace(model)
        assert len(caught) == 1
        assert graph.code == clean.code
        assert [site.name for site in next(iter(find(graph))).sites] == ["fc"]
        assert len(drop.sites) == 3

    @pytest.mark.parametrize("at", ["output", "input"])
    def test_containers_with_dict_inputs_or_outputs_lose_their_hooks(self, at: str) -> None:
        returns = toy(lambda self, x: {"features": [self.layer(x)]}, layer=nn.Linear(4, 4))
        takes = toy(lambda self, names: self.layer(names["features"][0]), layer=nn.Linear(4, 4))
        model = nn.Sequential(returns, takes)
        inject(model, Dropout(0.4), layers="0" if at == "output" else "1", at=at)
        with pytest.warns(HookdropWarning, match="is not part of the graph"):
            graph = torch.fx.symbolic_trace(model)
        x = torch.ones(3, 4)
        with torch.no_grad():
            assert torch.equal(graph(x), model.eval()(x))
