"""Regularizers, models and wrappers of other libraries: references, layers that never run, names of layers, optimizers."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from hookdrop import Dropout, DropPath, HookdropWarning, LayerError, LinearSchedule, TokenDropout, find, inject
from hookdrop.functional import drop_block
from tests.support.models import Small, from_timm, names, toy
from tests.support.training import optimize, scheduled, seeded


@pytest.mark.parametrize("scale", [True, False])
def test_drop_path_matches_timm_under_the_same_seed(scale: bool) -> None:
    from timm.layers import DropPath as Timm

    x = torch.randn(64, 3, 4)
    torch.testing.assert_close(seeded(DropPath(0.3, scale=scale), x), seeded(Timm(0.3, scale_by_keep=scale), x))


@pytest.mark.parametrize(("p", "mode"), [(0.1, "row"), (0.25, "row"), (0.9, "row"), (0.5, "batch")])
def test_drop_path_matches_torchvision_under_the_same_seed(p: float, mode: str) -> None:
    stochastic_depth = pytest.importorskip("torchvision").ops.stochastic_depth
    x = torch.randn(256, 3, 4, 4) + 4.0
    expected, out = seeded(stochastic_depth, x, p, mode), seeded(DropPath(p, mode).train(), x)
    assert torch.equal(out == 0, expected == 0)
    torch.testing.assert_close(out, expected, rtol=2.0**-22, atol=0.0)


def test_paper_gamma_matches_the_distribution_of_torchvision() -> None:
    """The drop rates by position agree where torchvision supports the setting: odd block sizes, per channel."""
    import torchvision

    x = torch.ones(100, 100, 9, 9)
    ours = (drop_block(x, 0.3, 3, gamma="paper", normalize=None) == 0).double().mean((0, 1))
    theirs = (torchvision.ops.drop_block2d(x, 0.3, 3) == 0).double().mean((0, 1))
    error = math.sqrt(2 * 0.25 / 10_000)
    assert (ours - theirs).abs().max() < 5 * error


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Dropout(0.4, inplace=True),
        lambda: __import__("torchvision").ops.StochasticDepth(0.4, "row"),
        lambda: __import__("torchvision").ops.DropBlock2d(0.4, 3),
        lambda: __import__("timm").layers.DropPath(0.4),
    ],
)
def test_schedule_controls_the_rate_of_foreign_modules(make: object, model: Small, images: torch.Tensor) -> None:
    theirs = make()
    drop = inject(model, theirs, layers="layer1.*.bn1", schedule=LinearSchedule(4))
    assert drop.sites[0].p == 0
    drop.step(4)
    with drop.recording(last=0) as m:
        for _ in range(40):
            model(images)
    assert drop.p == 0.4
    assert m.totals.dropped == pytest.approx(0.4, abs=0.08)
    assert "0.4" in repr(theirs), "the module that was passed in was changed"


@pytest.mark.parametrize(("p", "prefix"), [(0.5, 1), (0.3, 0), (0.75, 4), (0.999, 1)])
def test_removed_tokens_are_those_of_timm_patch_dropout(p: float, prefix: int) -> None:
    """Bit for bit with the same seed, and with the same gradients."""
    from timm.layers import PatchDropout

    x = torch.randn(6, 30 + prefix, 8, requires_grad=True)
    results = []
    for drop in (TokenDropout(p, prefix, remove=True), PatchDropout(p, num_prefix_tokens=prefix)):
        y = seeded(drop.train(), x)
        results.append((y, torch.autograd.grad(y.square().sum(), x)[0]))
    assert all(map(torch.equal, *results))


def square(size: int) -> torch.Tensor:
    return torch.randn(1, 3, size, size)


NARROW = {"img_size": 32, "depth": 1, "embed_dim": 32, "num_heads": 2}


NEVER = {
    "called by .forward()": (lambda: toy(lambda m, x: m.fc.forward(x), fc=nn.Linear(8, 8)), torch.ones(2, 8), "fc", "f?"),
    "torchvision swin attn.qkv": (
        lambda: pytest.importorskip("torchvision").models.SwinTransformer([4, 4], 12, [1, 1], [2, 2], [4, 4]), square(32),
        "features.1.0.attn.qkv", "**.attn.qkv",
    ),
    "timm attn_drop under fused attention": (
        from_timm("vit_tiny_patch16_224", **NARROW), square(32), "blocks.0.attn.attn_drop", "**.attn_drop",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", NEVER.values(), ids=NEVER)
def test_never_called(case: tuple[Callable[[], nn.Module], torch.Tensor, str, str]) -> None:
    """Weights used directly or branches not taken: named sites raise, matched sites warn, without an example later."""
    make, x, name, pattern = case
    model = make()
    with pytest.raises(LayerError, match="is not called in the forward pass: a hook on it never fires"):
        inject(model, Dropout(0.3), layers=name, example_input=x)
    with pytest.warns(HookdropWarning, match=r"sites? never called in an eval forward, so the hooks there do not fire"):
        inject(model, Dropout(0.3), layers=pattern, example_input=x).remove()
    drop = inject(model, Dropout(0.3), layers=name)
    model(torch.cat([x, x]))
    drop.seek(1)
    first_lines = [text.partition("\n")[0] for text in drop.check()]
    assert first_lines == [f"'dropout': {name!r} never ran, so nothing is dropped there."]


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DataParallel": nn.DataParallel,
    "torch.compile": torch.compile,
    "AveragedModel": AveragedModel,
    "timm's EMA": lambda model: pytest.importorskip("timm").utils.ModelEmaV3(model),
    "PEFT": lambda m: (peft := pytest.importorskip("peft")).get_peft_model(m, peft.LoraConfig(target_modules=["fc"])),
    "Fabric": lambda model: pytest.importorskip("lightning").Fabric(accelerator="cpu").setup_module(model),
    "timm's TrainingTask": lambda m: pytest.importorskip("timm.task").ClassificationTask(m, nn.CrossEntropyLoss()),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*LeafSpec")
@pytest.mark.parametrize("name", WRAPPERS)
def test_layers_keep_their_names(name: str, model: Small) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model.layer1[0] = checkpoint_wrapper(model.layer1[0])
    wrapped = WRAPPERS[name](model)
    assert names(wrapped, "layer1.*") == ["layer1.0", "layer1.1"]
    assert names(wrapped, "layer1.0.bn1") == ["layer1.0.bn1"]
    assert names(wrapped, "layer1.0._checkpoint_wrapped_module.bn1") == ["layer1.0.bn1"]
    with inject(wrapped, Dropout(0.3), layers="layer1.*") as drop:
        assert [site.name for site in drop.sites] == ["layer1.0", "layer1.1"]
        assert [site.name for site in find(wrapped).sites] == ["layer1.0", "layer1.1"]
    if prefix := {"DataParallel": "module", "torch.compile": "_orig_mod", "PEFT": "base_model.model"}.get(name):
        assert names(wrapped, f"{prefix}.layer1.*.bn1") == ["layer1.0.bn1", "layer1.1.bn1"]
        with inject(wrapped, Dropout(0.3), layers=f"{prefix}.layer1.*") as drop:
            assert find(model) == find(wrapped) == drop


def test_follow_through_timm_lookahead() -> None:
    from timm.optim import Lookahead

    model, drop, optimizer = scheduled()
    lookahead = Lookahead(optimizer)
    drop.follow(lookahead)
    drop.follow(optimizer)
    optimize(model, 3, lookahead, torch.ones(2, 4))
    assert drop.step_count == 3
