"""Inject, train, evaluate and remove on real models: everything is bit-equal to before."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hookdrop import (
    DropBlock,
    Dropout,
    Dropout1d,
    Dropout2d,
    DropPath,
    GaussianDropout,
    HookdropWarning,
    Injection,
    find,
    inject,
    plan,
    without_hooks,
)
from hookdrop.utils.tensor_tree import tensors
from tests.support.tensors import all_equal

HOOK_DICTS = [name for name in vars(nn.Module()) if "hooks" in name]


def footprint(model: nn.Module) -> dict[str, Any]:
    """Everything that users can see of a model."""
    return {
        "class": type(model),
        "repr": repr(model),
        "modules": [(name, id(module)) for name, module in model.named_modules()],
        "parameters": [(name, id(parameter)) for name, parameter in model.named_parameters()],
        "buffers": [(name, id(buffer)) for name, buffer in model.named_buffers()],
        "keys": list(model.state_dict()),
        "flags": [module.training for module in model.modules()],
    }


def hook_dicts(model: nn.Module) -> list[dict[int, Any]]:
    return [dict(getattr(module, name)) for module in model.modules() for name in HOOK_DICTS]


def forward(model: nn.Module, x: Any) -> list[torch.Tensor]:
    """Return the tensors of an eval forward."""
    model.eval()
    torch.manual_seed(3)
    with torch.no_grad():
        out = model(**x) if isinstance(x, dict) else model(*x) if isinstance(x, tuple) else model(x)
    return [t.clone() for t in tensors(out)]


def train_step(model: nn.Module, x: Any) -> float:
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    torch.manual_seed(4)
    out = model(**x) if isinstance(x, dict) else model(*x) if isinstance(x, tuple) else model(x)
    loss = sum(t.float().pow(2).mean() for t in tensors(out) if t.is_floating_point() and t.requires_grad)
    loss.backward()
    optimizer.step()
    return loss.item()


def images(size: int = 64) -> torch.Tensor:
    return torch.randn(2, 3, size, size)


def detection_input() -> tuple[Any, Any]:
    boxes = torch.tensor([[4.0, 4.0, 40.0, 40.0]])
    target = {"boxes": boxes, "labels": torch.tensor([1])}
    return [torch.rand(3, 64, 64)] * 2, [dict(target), dict(target)]


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    return BertModel(
        BertConfig(
            vocab_size=99, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=99, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
            intermediate_size=32,
        )
    )  # fmt: skip


def ids() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(99, (2, 12))}


def large_images() -> torch.Tensor:
    return images(128)


def timm_model(name: str, **kwargs: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import timm

        return timm.create_model(name, num_classes=10, **kwargs)

    return make


def tv_model(name: str, **kwargs: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import torchvision

        return torchvision.models.get_model(name, weights=None, **kwargs)

    return make


CASES = {
    "timm resnet50": (timm_model("resnet50", zero_init_last=False), images, DropBlock(0.3, 3), "layer3.*.bn[12]"),
    "timm convnext_atto": (timm_model("convnext_atto"), large_images, DropBlock(0.3, 3), "stages.*.blocks.*.conv_dw"),
    "timm vit_tiny": (
        timm_model("vit_tiny_patch16_224", img_size=64), images, DropPath(0.3), ["blocks.*.attn", "blocks.*.mlp"],
    ),
    "timm swin_tiny": (
        timm_model("swin_tiny_patch4_window7_224", img_size=64, window_size=2, drop_path_rate=0.0),
        images, DropBlock(0.3, 3, channel_dim=-1), "layers.*.blocks.*.attn",
    ),
    "timm efficientnet_b0": (timm_model("efficientnet_b0"), images, Dropout2d(0.3), "blocks.*.*.bn3"),
    "timm mobilenetv3_small": (timm_model("mobilenetv3_small_100"), images, GaussianDropout(0.3), "blocks.*.*"),
    "torchvision resnet50": (tv_model("resnet50"), images, DropBlock(0.3, 3), ["layer3.*.bn?", "layer3.0.downsample"]),
    "torchvision mobilenet_v3_small": (tv_model("mobilenet_v3_small"), images, Dropout2d(0.3), "features.*"),
    "torchvision swin_t": (
        tv_model("swin_t"), images, DropPath(0.3), "features.*.*.attn",
    ),
    "segmentation": (
        tv_model("lraspp_mobilenet_v3_large", weights_backbone=None), images, DropBlock(0.3, 3), "backbone.*",
    ),
    "detection": (
        tv_model("fasterrcnn_mobilenet_v3_large_320_fpn", weights_backbone=None), detection_input,
        DropBlock(0.3, 3), "backbone.fpn.layer_blocks.*",
    ),
    "LSTM": (lambda: nn.LSTM(6, 8, 2), lambda: torch.randn(5, 3, 6), Dropout1d(0.3), nn.LSTM),
    "TransformerEncoder": (encoder, lambda: torch.randn(3, 7, 16), Dropout(0.3), "layers.*.linear2"),
    "transformers encoder": (bert, ids, Dropout(0.3), "encoder.layer.*.attention"),
    "transformers decoder": (llama, ids, Dropout(0.3), ["**.self_attn", "**.mlp"]),
}  # fmt: skip


# With hooks, these leave PyTorch's fused eval path.
FUSED = {"TransformerEncoder"}


@pytest.mark.parametrize("case", CASES)
def test_round_trip(case: str) -> None:
    make, make_input, regularizer, layers = CASES[case]
    torch.manual_seed(0)
    model, x = make(), make_input()
    clean = copy.deepcopy(model)
    before, dicts_before, out_before = footprint(model), hook_dicts(model), forward(model, x)
    model.train()
    assert footprint(model) == before

    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if case in FUSED else "error", HookdropWarning)
        drop = inject(model, regularizer, layers=layers)
    assert footprint(model) == before
    hooked = forward(model, x)
    if case in FUSED:
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(hooked, out_before, strict=True))
    else:
        assert all_equal(hooked, out_before)

    regularized, plain = train_step(model, x), train_step(clean, x)
    assert regularized != plain, "nothing was dropped"
    assert all(site.fired for site in drop.sites)
    clean.load_state_dict(model.state_dict())

    trained = forward(clean, x)
    hooked = forward(model, x)
    if case not in FUSED:
        assert all_equal(hooked, trained)
    with without_hooks(model):
        assert all_equal(forward(model, x), trained)

    model.train()
    drop.remove()
    assert footprint(model) == before
    assert hook_dicts(model) == dicts_before
    assert all_equal(forward(model, x), trained)


def test_training_after_removal_matches_a_clean_model(model: nn.Module, images: torch.Tensor) -> None:
    clean = copy.deepcopy(model)
    inject(model, DropBlock(0.3, 3), layers="layer1.*").remove()
    assert train_step(model, images) == train_step(clean, images)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), clean.parameters(), strict=True))


def test_eval_returns_the_layers_own_output_object() -> None:
    class Keeps(nn.Identity):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.out = x * 2
            return self.out

    model = nn.Sequential(Keeps())
    inject(model, Dropout(0.5), layers="0")
    model.eval()
    assert model(torch.ones(3)) is model[0].out
    model.train()
    assert model(torch.ones(3)) is not model[0].out


def test_the_mode_of_the_hooked_layer_applies(model: nn.Module, images: torch.Tensor) -> None:
    """A submodule that its owner keeps in eval mode (frozen batch norm) is not regularized."""
    drop = inject(model, DropBlock(0.5, 3), layers="layer1.*.bn1")
    model.train()
    model.layer1[0].eval()
    with drop.measuring() as m:
        model(images)
    assert m.sites["layer1.0.bn1"].calls == 0
    assert m.sites["layer1.1.bn1"].calls == 1


def test_inject_does_not_change_the_random_state(model: nn.Module, images: torch.Tensor) -> None:
    state = torch.get_rng_state()
    drop = inject(model, DropBlock(0.5, 3), layers="layer1.*", example_input=images)
    drop.probe(images)
    print(plan(model, Dropout(0.1), layers="**", example_input=images, on_existing="stack"))
    drop.remove()
    assert torch.equal(torch.get_rng_state(), state)


def test_masks_come_from_the_global_generator(model: nn.Module, images: torch.Tensor) -> None:
    inject(model, DropBlock(0.5, 3), layers="layer1.*")
    torch.manual_seed(7)
    first = model(images)
    torch.manual_seed(7)
    assert torch.equal(model(images), first)
    assert not torch.equal(model(images), first)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_replays_the_mask(model: nn.Module, images: torch.Tensor, reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    inject(model, DropBlock(0.5, 3), layers="layer1.*.bn1")
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.0
    images.requires_grad_()

    def gradients(run: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model.zero_grad()
        run(model.conv1(images)).sum().backward()
        return [p.grad.clone() for p in model.layer1.parameters()]

    plain = gradients(model.layer1)
    again = gradients(lambda x: checkpoint(model.layer1, x, use_reentrant=reentrant))
    assert all_equal(plain, again)


def test_modules_called_several_times_draw_a_mask_each_time() -> None:
    relu = nn.ReLU()
    model = nn.Sequential(relu, nn.Identity(), relu)
    drop = inject(model, Dropout(0.5), layers="0")
    with drop.measuring() as m:
        out = model(torch.ones(10_000))
    assert m.sites["0"].calls == 2
    assert (out == 0).float().mean() == pytest.approx(0.75, abs=0.03)


def test_order_of_user_hooks_is_kept(model: nn.Module, images: torch.Tensor) -> None:
    order: list[str] = []
    model.fc.register_forward_hook(lambda *_: order.append("first"))
    drop = inject(model, Dropout(0.5), layers="fc")
    model.fc.register_forward_hook(lambda *_: order.append("second"))
    before = [type(hook).__name__ for hook in model.fc._forward_hooks.values()]
    with without_hooks(model):
        assert len(model.fc._forward_hooks) == 2
        model.fc.register_forward_hook(lambda *_: order.append("inside"))
    assert [type(hook).__name__ for hook in model.fc._forward_hooks.values()][:3] == before
    model(images)
    assert order == ["first", "second", "inside"]
    drop.remove()
    assert len(model.fc._forward_hooks) == 3


def test_without_hooks_keeps_ids_and_respects_removal_inside(model: nn.Module) -> None:
    first = inject(model, Dropout(0.5), layers="fc")
    second = inject(model, GaussianDropout(0.5), layers="fc", on_existing="stack", at="input")
    ids = list(model.fc._forward_hooks), list(model.fc._forward_pre_hooks)
    with without_hooks(model):
        assert not model.fc._forward_hooks
        assert not model.fc._forward_pre_hooks_with_kwargs
        assert find(model) == ()
        first.remove()
    assert not model.fc._forward_hooks
    assert list(model.fc._forward_pre_hooks) == ids[1]
    assert find(model) == (second,)


def test_jit_script_works_without_hooks(model: nn.Module, images: torch.Tensor) -> None:
    inject(model, Dropout(0.5), layers="fc")
    with without_hooks(model), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(model.eval())
    assert torch.allclose(scripted(images), model(images))


def test_with_block_removes_hooks_after_an_error(model: nn.Module) -> None:
    before = hook_dicts(model)
    with pytest.raises(ZeroDivisionError), inject(model, Dropout(0.5), layers="fc") as drop:
        assert isinstance(drop, Injection)
        raise ZeroDivisionError
    assert hook_dicts(model) == before


def test_hooks_and_handles_do_not_keep_the_model_alive(images: torch.Tensor) -> None:
    import gc
    import weakref

    model = nn.Sequential(nn.Linear(3, 3))
    drop = inject(model, Dropout(0.5), layers="0")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True), *model.parameters()], 0.1)
    drop.follow(optimizer)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert "whose model was deleted" in repr(drop)
    with pytest.warns(HookdropWarning, match="was deleted before it ran in training mode"):
        optimizer.step()
    drop.remove()


def test_distributed_data_parallel_injected_before_and_after_wrapping(
    model: nn.Module, images: torch.Tensor, tmp_path: Path
) -> None:
    """One gloo process: names resolve through the wrapper, hooks fire once, gradients flow."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        before = inject(model, DropBlock(0.3, 3), layers="layer1.*")
        wrapped = nn.parallel.DistributedDataParallel(model)
        after = inject(wrapped, Dropout(0.3), layers=["layer2.*", "module.fc"])
        assert [site.name for site in after.sites] == ["layer2.0", "layer2.1", "fc"]
        with before.measuring() as m, after.measuring() as n:
            wrapped(images).sum().backward()
        assert (m.calls, n.calls) == (2, 3)
        assert all(p.grad is not None for p in model.parameters())
        assert find(wrapped) == (before, after)
    finally:
        torch.distributed.destroy_process_group()


def test_data_parallel_and_compiled_models_resolve_through_the_wrapper(model: nn.Module) -> None:
    for wrapped in (nn.DataParallel(model), torch.compile(model, backend="eager")):
        with inject(wrapped, Dropout(0.3), layers="layer1.*") as drop:
            assert [site.name for site in drop.sites] == ["layer1.0", "layer1.1"]
            assert find(model) == find(wrapped) == (drop,)
