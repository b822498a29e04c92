"""Plans: warnings and tables."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

from hookdrop import DropBlock, Dropout, LinearSchedule, ShapeError, inject, plan
from hookdrop.injection.verbs import place
from tests.support.models import Small, toy


class TestPlans:
    def test_dropout_before_batch_norm_warns(self, model: Small, images: torch.Tensor) -> None:
        """Variance shift, arXiv:1801.05134: the convolution's output is directly before the norm."""
        drafted = plan(model, Dropout(0.5), layers="**.conv1", example_input=images)
        assert "4 sites directly before a batch norm at p >= 0.3: 'layer1.0.conv1'" in drafted.warnings[-1]
        assert plan(model, Dropout(0.1), layers="**.conv1", example_input=images).warnings == []
        assert plan(model, Dropout(0.5), layers="**.bn1", example_input=images).warnings == []

    @pytest.mark.parametrize(
        ("make", "layers", "says"),
        [
            (lambda: nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), "linear2", "leaves its fused eval path"),
            (
                lambda: Small().requires_grad_(False),
                "layer1.0",
                "1 site on frozen layers, whose output is still regularized",
            ),
            (Small, "layer1.**", "8 of 10 sites are nested inside other sites(.|\n)*effective rate 0.19"),
        ],
        ids=["fused path", "frozen", "nested"],
    )
    def test_other_warnings(self, make: Callable[[], nn.Module], layers: str, says: str) -> None:
        example = torch.randn(2, 3, 16, 16) if isinstance(model := make(), Small) else None
        (warning,) = (drafted := plan(model, Dropout(0.1), layers=layers, example_input=example)).warnings
        assert re.search(says, warning)
        with pytest.warns(UserWarning, match=says):
            place(drafted)

    def test_reading_mentions_one_of_several_tensors(self) -> None:
        lstm = nn.LSTM(3, 4)
        drafted = plan(lstm, Dropout(0.1), layers=lstm, example_input=torch.ones(2, 1, 3))
        assert drafted.sites[0].reading == " (1 of 3 tensors)"

    def test_plan_table(self, model: Small, images: torch.Tensor) -> None:
        drafted = plan(
            model, DropBlock(0.2, 3), layers=["layer1.*"], schedule=LinearSchedule(9), p_scale="depth",
            example_input=images,
        )  # fmt: skip
        assert str(drafted).splitlines() == [
            "2 sites of Small, LinearSchedule(steps=9)",
            "site      type   shape      read as        calls    p  regularizer",
            "--------  -----  ---------  -------------  -----  ---  ------------------------------",
            "layer1.0  Block  4x8x16x16  C=8 H=16 W=16      1  0.1  DropBlock(p=0.2, block_size=3)",
            "layer1.1  Block  4x8x16x16  C=8 H=16 W=16      1  0.2  DropBlock(p=0.2, block_size=3)",
            "'layer1.*': 2 layers",
        ]
        assert "<table>" in drafted._repr_html_()

    def test_example_input_as_tensor_tuple_or_dict(self) -> None:
        model = toy(lambda m, a, b=None: m.fc(a if b is None else a + b[0]), fc=nn.Linear(3, 3))
        x = torch.ones(2, 3)
        for example in (x, (x,), (x, [x]), {"a": x}, {"a": x, "b": [x]}):
            assert plan(model, Dropout(0.1), layers="fc", example_input=example).sites[0].shape == (2, 3)


def test_plan_at_the_input_shows_input_shapes(model: Small, images: torch.Tensor) -> None:
    drafted = plan(model, Dropout(0.1), layers=["conv1", "fc"], at="input", example_input=images)
    assert [site.shape for site in drafted.sites] == [(4, 3, 16, 16), (4, 8)]
    assert "at the input" in str(drafted)
    with pytest.raises(ShapeError, match=r"DropBlock at 'fc' \(input\) got \(4, 8\)"):
        inject(model, DropBlock(0.1), layers="fc", at="input")
        model(images)


@pytest.mark.parametrize(
    ("code", "reading"),
    [("DropPath(p=0.1)", "N=4"), ("Dropout2d(p=0.1)", "C=8 H=16 W=16"), ("FeatureAlphaDropout(p=0.1)", "C=8"),
     ("DropBlock(p=0.1, block_size=3)", "C=8 H=16 W=16"), ("Dropout(p=0.1)", "")],
)  # fmt: skip
def test_plan_shows_how_axes_are_interpreted(model: Small, images: torch.Tensor, code: str, reading: str) -> None:
    assert {site.reading for site in plan(model, code, layers="layer1.*", example_input=images).sites} == {reading}
