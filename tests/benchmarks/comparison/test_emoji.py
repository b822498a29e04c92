"""The dataset `emoji`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from comparison.data import catalog
from comparison.data.catalog import check, load
from comparison.data.task import DataError, Task
from comparison.spec.run_spec import Data
from tests.support.emoji_packages import CATEGORIES, png, write


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return load(Data(name="emoji", root=str(write(tmp_path))))


def color(task: Task, index: int) -> list[int]:
    """The color of the square."""
    return ((task.source.images(torch.tensor([index]))[0, :, 32, 32] + 1) * 127.5).round().int().tolist()


class TestEmoji:
    def test_categories_are_classes_skin_tones_are_left_out_and_transparent_pixels_are_white(self, task: Task) -> None:
        assert task.labels_N.bincount().tolist() == [2 * count for count in CATEGORIES.values()]
        assert task.source.images(torch.tensor([0]))[0, :, 0, 0].tolist() == [1.0, 1.0, 1.0]

    def test_no_emoji_is_in_both_training_and_test_images(self, task: Task) -> None:
        count = sum(CATEGORIES.values())
        emoji_of = {index: color(task, index)[1] for index in range(2 * count)}
        tested = {emoji_of[int(index)] for index in task.test}
        assert tested.isdisjoint({emoji_of[int(index)] for index in task.pool})

    def test_training_and_validation_use_the_first_vendor_only(self, task: Task) -> None:
        split = task.split(12, None, 0)
        assert {color(task, int(index))[0] for part in split[:2] for index in part} == {0}

    def test_the_two_test_sets_show_the_same_emoji(self, task: Task) -> None:
        same, other = (task.test[chosen].tolist() for chosen in task.test_sets.values())
        assert list(task.test_sets) == ["google, the training vendor", "twitter, the other vendor"]
        assert [color(task, index) for index in same] == [[0, *color(task, index)[1:]] for index in other]
        assert {color(task, index)[0] for index in other} == {40}

    def test_the_hash_covers_every_image(self, task: Task, tmp_path: Path) -> None:
        catalog._load.cache_clear()
        path = tmp_path / "node_modules/emoji-datasource-twitter/img/twitter/64/fl3.png"
        path.write_bytes(png("twitter", 80))
        assert load(Data(name="emoji", root=str(tmp_path))).sha256 != task.sha256


class TestErrors:
    def error(self, root: Path) -> str:
        with pytest.raises(DataError, match=r"Nothing was trained\.$") as caught:
            check(Data(name="emoji", root=str(root)), range(2))
        return str(caught.value)

    def test_a_missing_package_names_the_command_that_downloads_it(self, tmp_path: Path) -> None:
        said = self.error(tmp_path)
        assert "'emoji-datasource-google' is not in" in said
        assert said.endswith(f"emoji-datasource-twitter@16.0.0 --prefix {tmp_path}\nNothing was trained.")

    def test_another_version_is_refused(self, tmp_path: Path) -> None:
        assert "version 15.0.0, but these results need 16.0.0" in self.error(write(tmp_path, "15.0.0"))

    @pytest.mark.parametrize("content", [None, b"not a PNG"])
    def test_a_missing_or_damaged_image_is_named(self, tmp_path: Path, content: bytes | None) -> None:
        path = write(tmp_path) / "node_modules/emoji-datasource-google/img/google/64/fo5.png"
        path.unlink() if content is None else path.write_bytes(content)
        assert "fo5.png" in self.error(tmp_path)
