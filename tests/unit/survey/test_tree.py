"""The tree of layers: its patterns select what its rows stand for, and what fits agrees with the recipes."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

from hookdrop import Dropout, InjectionError, LayerError, inject, layers, plan, recipes
from hookdrop.core.recipe import Recipe
from hookdrop.core.selection import select
from hookdrop.survey.tree import Layers
from tests.support.models import Small, toy
from tests.support.transformers_models import llama

timm = pytest.importorskip("timm")
torchvision = pytest.importorskip("torchvision")

MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet": lambda: timm.create_model("resnet18"),
    "vit": lambda: timm.create_model("test_vit"),
    "swin": lambda: timm.create_model(
        "swin_tiny_patch4_window7_224", drop_path_rate=0.0, img_size=56, depths=(2, 1), num_heads=(1, 2), embed_dim=8
    ),
    "mobilenet": lambda: torchvision.models.mobilenet_v2(width_mult=0.1, dropout=0.0),
    "llama": lambda: llama(num_hidden_layers=4),
    "Sequential": lambda: nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1)) for _ in range(23)]),
}
EXAMPLES = {"Sequential": torch.ones(2, 4)}


@pytest.fixture(scope="module", params=list(MODELS))
def found(request: pytest.FixtureRequest) -> tuple[nn.Module, Layers]:
    model = MODELS[request.param]()
    return model, layers(model, EXAMPLES.get(request.param))


def rows(found: Layers) -> list[tuple[str, str]]:
    """The pattern of each row with the rest of it."""
    lines = str(found).splitlines()[3 : -1 if "recipes to try" in str(found) else None]
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in lines]


def test_patterns_of_the_rows_select_each_layer_once(found: tuple[nn.Module, Layers]) -> None:
    model, listed = found
    selected = []
    for pattern, rest in rows(listed):
        names = [layer.name for layer in select(model, pattern).layers]
        assert len(names) == (int(rest.partition("(x ")[2].partition(")")[0]) if "(x " in rest else 1)
        assert {one.type for one in listed if one.name in names} == {rest.split()[0]}
        selected += names
    assert sorted(selected) == sorted(name for name, _ in model.named_modules() if name)


def test_stages_have_rows_and_the_insides_of_their_blocks_are_shown_once() -> None:
    with torch.device("meta"):
        model = timm.create_model("resnet50")
    found = layers(model)
    assert len(str(found).splitlines()) < 40
    shown = dict(rows(found))
    assert shown["layer3.*"].startswith("Bottleneck (x 6) ")
    assert shown["layer3.*"].endswith("block with 1024 maps of 14x14")
    assert "64 to 512 maps of 7x7 to 56x56" in shown["layer[1-4].*.bn2"]
    assert "layer[1-4].0.downsample.0" in shown
    part = dict(rows(layers(model, only=["layer2.*", "layer2.[12].bn2", "fc"])))
    assert list(part) == ["layer2.*", "layer2.[1-2].bn2", "fc"]
    assert "x128x28x28  " in part["layer2.[1-2].bn2"]


@pytest.mark.parametrize(
    ("what", "recipe"),
    [
        ("DropPath, ", recipes.stochastic_depth(p=0.1)),
        ("LayerDrop: ", recipes.layer_drop(p=0.1)),
        ("HeadDropout: ", recipes.head_dropout(p=0.1)),
        ("DropKey: ", recipes.drop_key(p=0.1)),
        ("NEFTune: ", recipes.neftune(alpha=5)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Recipe) else "",
)
def test_what_fits_agrees_with_the_recipe(found: tuple[nn.Module, Layers], what: str, recipe: Recipe) -> None:
    model, listed = found
    fitting = [one.name for one in listed if any(fit.startswith(what) for fit in one.fits)]
    assert (f" {type(recipe).__name__}(" in str(listed)) == bool(fitting)
    if fitting:
        assert sorted(fitting) == sorted(site.name for site in plan(model, recipe).sites)
    else:
        with pytest.raises(LayerError):
            plan(model, recipe, example_input=EXAMPLES.get(type(model).__name__))


def up_and_down(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    small = m.down(y := m.first(x))
    return m.last(m.join(torch.cat([nn.functional.interpolate(small, scale_factor=2), y], 1)))


def unet() -> nn.Module:
    def block(before: int, stride: int = 1) -> nn.Module:
        return nn.Sequential(nn.Conv2d(before, 8, 3, stride, 1), nn.BatchNorm2d(8), nn.ReLU())

    return toy(up_and_down, first=block(3), down=block(8, 2), join=block(16), last=nn.Conv2d(8, 2, 1))


def pyramid() -> nn.Module:
    return torchvision.models.detection.backbone_utils.resnet_fpn_backbone(backbone_name="resnet18", weights=None)


@pytest.mark.parametrize(
    ("make", "kind"), [(unet, "unet"), (pyramid, "detector"), (torchvision.models.resnet18, "resnet")]
)
def test_the_first_recipe_to_try_is_for_the_kind_of_network(make: Callable[[], nn.Module], kind: str) -> None:
    model, images = make(), torch.zeros(2, 3, 64, 64)
    recipes_to_try = str(layers(model, images)).rpartition("recipes to try with plan: ")[2]
    assert recipes_to_try.startswith(f"dropblock_{kind}(")
    assert recipes_to_try.count("dropblock_") == 1
    for text in re.findall(r"\w+\(.*?\)", recipes_to_try):
        assert plan(model, text, example_input=images).sites


class NoHooks(nn.Module):
    """Calls its forward itself, as the modules of gpytorch do."""

    def __init__(self, *inside: nn.Module) -> None:
        super().__init__()
        self.inside, self.weight = nn.ModuleList(inside), nn.Parameter(torch.ones(4))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.inside:
            x = layer(x)
        return x * self.weight


def test_a_model_that_is_one_layer_has_a_row() -> None:
    assert rows(layers(nn.Linear(4, 3), torch.ones(2, 4)))[0][1].split()[-2:] == ["4", "features"]
    attention = layers(nn.MultiheadAttention(4, 2), torch.ones(3, 5, 2, 4).unbind())
    assert [(one.name, one.fits) for one in attention] == [("", ("DropKey: attention",)), ("out_proj", ())]


def test_modules_that_run_no_hooks_say_so_and_layers_inside_them_work() -> None:
    x = torch.ones(2, 4)
    assert layers(NoHooks(NoHooks()), x)[0].fits == ("overrides __call__, so hooks never run",)
    for regularizer, where in (("stochastic_depth()", None), ("drop_key()", None), ("Dropout(p=0.5)", "inside.0")):
        with pytest.raises(LayerError, match="NoHooks overrides __call__ .* no hook"):
            plan(NoHooks(NoHooks()), regularizer, layers=where, example_input=x)
    model = NoHooks(nn.Linear(4, 4), nn.Dropout(0.1))
    assert [one.calls for one in layers(model, x)] == [0, None, 1, 1]
    assert [site.name for site in plan(model, recipes.set_dropout(), example_input=x).sites] == ["inside.1"]
    blocks = nn.Sequential(*(toy(lambda m, x: x + m.fc(x), fc=nn.Linear(4, 4)) for _ in range(3)))
    blocks[1] = torch.jit.trace(blocks[1], x)
    assert layers(blocks, x)[2].fits == ("compiled by torch.jit, so hooks never run",)
    found = plan(blocks, "layer_drop()", example_input=x)
    assert any("'1': torch.jit compiled them" in text for text in found.warnings)
    for excluded, says in (("*", "'*.**' would exclude what is inside"), ("1", "these are '0.fc', '2.fc'")):
        found = plan(blocks, "Dropout(p=0.5)", layers=["0.fc", "2.fc"], exclude=excluded, example_input=x)
        assert any(says in text for text in found.warnings)


def test_rates_are_those_of_the_dropout_that_set_dropout_finds(found: tuple[nn.Module, Layers]) -> None:
    model, listed = found
    rates = {one.name: list(one.rates) for one in listed if one.rates}
    assert rates == ({f"{i}.1": [0.1] for i in range(23)} if isinstance(model, nn.Sequential) else {})
    assert ("set_dropout" in str(listed)) == bool(rates)


def test_rates_of_equal_blocks_are_a_range() -> None:
    model = timm.create_model("test_vit", drop_path_rate=0.1)
    assert "already drops 0.02 to 0.1;" in str(layers(model, only="blocks.*.drop_path1"))
    assert "stochastic_depth" not in str(layers(model))


def test_layers_changes_nothing_and_ignores_hooks(model: Small, images: torch.Tensor) -> None:
    before = str(layers(model, images))
    drop = inject(model, Dropout(0.5), layers="layer1.*")
    rng = torch.get_rng_state()
    assert str(found := layers(model, images)) == before
    assert found._repr_html_().count("<tr>") == len(rows(found)) + 1
    assert torch.equal(torch.get_rng_state(), rng)
    drop.remove()


def test_without_an_example_only_names_and_types_are_shown() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    found = layers(model)
    assert [(one.name, one.type) for one in found] == [("0", "Linear"), ("1", "ReLU")]
    assert {(one.shape, one.calls, one.fits) for one in found} == {(None, None, ())}
    assert "pass example_input=x" in str(found)
    with pytest.raises(InjectionError):
        layers(model, torch.ones(2, 5))
    with pytest.raises(LayerError):
        layers(model, only="2")


def test_layers_that_are_never_called_and_recurrent_layers() -> None:
    model = toy(lambda m, x: m.rnn(x)[0], rnn=nn.LSTM(4, 4, 2, dropout=0.2), unused=nn.Linear(4, 4))
    rnn, unused = layers(model, torch.ones(3, 2, 4))
    assert (rnn.shape, rnn.rates) == ((3, 2, 4), (0.2,))
    assert [fit.partition(":")[0] for fit in rnn.fits] == ["LockedDropout", 'Dropout, at="parameters"']
    assert unused.fits == ("never called",)


def test_blocks_are_not_offered_for_small_maps() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 1), nn.ReLU())
    large, *_, small, _ = layers(model, torch.ones(2, 3, 6, 6))
    assert (large.fits, small.fits) == (("DropBlock, Dropout2d: 4 maps of 6x6",), ("Dropout2d: 4 maps of 3x3",))
