"""Datasets of a comparison: content, splits, and independence of the global generator."""

import contextlib
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from comparison.data import catalog, synthetic
from comparison.data.catalog import batches, check, load
from comparison.data.task import DataError, Task, stored
from comparison.spec.run_spec import Data
from tests.support.emoji_packages import CATEGORIES, write


def made(counts: list[int]) -> Task:
    """A task of 1x1 images whose value is their index; the first two of each class are for testing."""
    labels_N = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    order = torch.randperm(len(labels_N), generator=torch.Generator().manual_seed(0))
    labels_N = labels_N[order]
    first = torch.cat([(labels_N == c).nonzero()[:2, 0] for c in range(len(counts))]).sort().values
    every = torch.arange(len(labels_N))
    source = stored(every.float()[:, None, None, None], 1, "none")
    return Task("made", len(counts), labels_N, every[~torch.isin(every, first)], first, source)


def per_class(task: Task, indices: Tensor) -> list[int]:
    return task.labels_N[indices].bincount(minlength=task.classes).tolist()


@pytest.fixture(autouse=True)
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Clear the dataset cache, and run in an empty folder."""
    with contextlib.chdir(tmp_path_factory.mktemp("here")):
        yield
    catalog._load.cache_clear()


def write_images(root: Path, counts: dict[str, int]) -> None:
    """Write a different noise image to each file."""
    for folder, count in counts.items():
        (root / folder).mkdir(parents=True)
        for i in range(count):
            seed = int.from_bytes(hashlib.sha256(f"{folder}{i}".encode()).digest()[:4], "big")
            pixels = np.random.default_rng(seed).integers(0, 256, (30, 40, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / folder / f"{i:03}.png")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_images(tmp_path / "pets", {"cat": 10, "dog": 10})
    return tmp_path / "pets"


def folder_task(path: Path, **fields: Any) -> Task:
    return load(Data(name=f"imagefolder:{path}", image_size=16, **fields))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("digit", "did you mean: digits"),
        ("imagefolders:/tmp", "did you mean: imagefolder"),
        ("zzz", "available:    digits, synthetic-cue, emoji, imagefolder"),
        ("imagefolder:", "has no path.\n  use imagefolder:PATH"),
    ],
)
def test_an_unknown_name_suggests_the_nearest_and_lists_all(name: str, says: str) -> None:
    with pytest.raises(DataError, match=rf"{says}.*\nNothing was trained\.$"):
        load(Data(name=name))


class TestSplit:
    @given(st.lists(st.integers(5, 30), min_size=2, max_size=6), st.integers(0, 10**6), st.data())
    def test_splits_are_disjoint_balanced_and_share_the_validation_images(
        self, counts: list[int], seed: int, draw: st.DataObject
    ) -> None:
        task = made(counts)
        validation_size = draw.draw(st.integers(1, len(task.pool) - len(counts)))
        train_size = draw.draw(st.integers(len(counts), len(task.pool) - validation_size))
        split, other = (task.split(train_size, validation_size, one) for one in (seed, seed + 1))
        assert torch.equal(split.validation, other.validation)
        assert [len(part) for part in split] == [train_size, validation_size, len(task.test)]
        assert len(set(torch.cat(split).tolist())) == sum(map(len, split))
        assert set(torch.cat(split[:2]).tolist()) <= set(task.pool.tolist())
        rest, of_class = (per_class(task, task.split(size, validation_size, seed).train) for size in (None, train_size))
        assert min(of_class) >= 1
        for have, taken in zip(rest, of_class, strict=True):
            assert taken == have or taken >= max(of_class) - 1

    @pytest.mark.parametrize(
        ("train", "validation", "says"),
        [
            (2, 10, "allowed: 3 (one per class) to 80, or none for all"),
            (81, 10, "allowed: 3 (one per class) to 80, or none for all\n  or reduce validation_size"),
            (None, 88, "allowed: 1 to 87, which leaves one training image of each class"),
        ],
    )
    def test_sizes_out_of_range(self, train: int | None, validation: int, says: str) -> None:
        with pytest.raises(DataError, match=re.escape(f"{says}\nNothing was trained.")):
            made([32, 32, 32]).split(train, validation, 0)


def test_more_seeds_than_training_sets_raise_and_training_on_all_images_is_noted(folder: Path) -> None:
    data = Data(name=f"imagefolder:{folder}", image_size=16, train_size=12, validation_size=3)
    with pytest.raises(DataError, match="(?s)9 seeds need different training sets, but two of them draw the same 12"):
        check(data, range(9))
    (note,) = check(Data(name="digits"), range(3))
    assert note.startswith("digits: All seeds train on the same images")
    assert check(Data(name="digits", train_size=100), range(3)) == []


@pytest.mark.parametrize(
    ("name", "augmentation"),
    [("digits", "none"), ("digits", "crop-flip"), ("synthetic-cue", "none"), ("folder", "crop-flip")],
)
def test_data_neither_uses_nor_needs_the_global_generator(name: str, augmentation: Any, folder: Path) -> None:
    name = f"imagefolder:{folder}" if name == "folder" else name
    data = Data(name=name, augmentation=augmentation, image_size=16, train_size=10)

    def everything() -> list[Tensor]:
        catalog._load.cache_clear()
        check(data, range(2))
        task = load(data)
        split = task.split(10, 3, 1)
        made = [task.source.images(split.validation), *split]
        return made + [part for batch in batches(task, split.train, 4, 1, 0) for part in batch]

    outcomes = []
    for seed in range(2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        outcomes.append(everything())
        assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))


def test_augmentation_depends_only_on_seed_epoch_and_index(folder: Path) -> None:
    task, indices = folder_task(folder, augmentation="crop-flip"), torch.arange(8)
    batch = task.source.augmented(indices, 5, 2)
    assert torch.equal(task.source.augmented(indices.flip(0), 5, 2), batch.flip(0))
    for i in (0, 7):
        assert torch.equal(task.source.augmented(indices[i : i + 1], 5, 2)[0], batch[i])
    assert not torch.equal(task.source.augmented(indices, 6, 2), batch)
    assert not torch.equal(task.source.augmented(indices, 5, 3), batch)


@pytest.mark.parametrize(("images", "sizes"), [(40, [16, 16]), (32, [16, 16]), (10, [10])])
def test_batches_have_different_images_and_only_a_last_incomplete_one_is_dropped(images: int, sizes: list[int]) -> None:
    task = load(Data(name="digits", augmentation="crop-flip"))
    train = task.split(images, None, 0).train
    found = list(batches(task, train, 16, 0, 0))
    assert [len(y) for _, _, y in found] == sizes
    assert len({*torch.cat([batch[0] for batch in found]).tolist()} & {*train.tolist()}) == sum(sizes)
    for indices_B, x_BCHW, y_B in found:
        assert torch.equal(x_BCHW, task.source.augmented(indices_B, 0, 0))
        assert torch.equal(y_B, task.labels_N[indices_B])


class TestSyntheticCue:
    TESTED = synthetic.generate(1024, 32, "test", without=True)

    def test_half_of_the_test_images_have_the_glyph_at_its_recorded_place(self) -> None:
        """The best matching glyph is that of the class; without one, 0.07 is 5 standard deviations of 512 guesses."""
        side, tested = synthetic.SIDE, self.TESTED
        places = zip(tested.x_N1HW, tested.place_N2.tolist(), strict=True)
        patches = torch.stack([x[0, r : r + side, c : c + side] for x, (r, c) in places])
        right_N = (patches[:, None] - synthetic.glyphs()).square().sum((2, 3)).argmin(1) == tested.y_N
        assert right_N[tested.has_glyph_N].all()
        assert right_N[~tested.has_glyph_N].float().mean().item() == pytest.approx(1 / 8, abs=0.07)

    def test_crop_flip_is_rejected_because_it_changes_the_class(self) -> None:
        y_N = torch.arange(64) % 8
        waves = synthetic.gratings(32, torch.linspace(0, 6, 64), y_N)
        without = ~self.TESTED.has_glyph_N
        assert right_by_wave(self.TESTED.x_N1HW[without], self.TESTED.y_N[without]) > 0.9
        assert right_by_wave(waves, y_N) == right_by_wave(waves.flip(3), (8 - y_N) % 8) == 1.0
        with pytest.raises(DataError, match="changes the class of 'synthetic-cue' images"):
            load(Data(name="synthetic-cue", augmentation="crop-flip"))


def right_by_wave(x_N1HW: Tensor, y_N: Tensor) -> float:
    """The accuracy of a matched filter of unknown phase."""
    every = torch.arange(synthetic.CLASSES)
    power = torch.zeros(len(x_N1HW), synthetic.CLASSES)
    for phase in (0.0, torch.pi / 2):
        waves = synthetic.gratings(32, torch.full((synthetic.CLASSES,), phase), every)
        power += (x_N1HW.flatten(1) @ waves.flatten(1).T).square()
    return float((power.argmax(1) == y_N).float().mean())


class TestImageFolder:
    def test_class_folders_have_a_fixed_test_split(self, folder: Path) -> None:
        task = folder_task(folder)
        assert (len(task.pool), task.source.shape) == (16, (3, 16, 16))
        assert per_class(task, task.test) == [2, 2]
        assert not set(task.pool.tolist()) & set(task.test.tolist())
        catalog._load.cache_clear()
        assert torch.equal(folder_task(folder).test, task.test)

    @pytest.mark.parametrize(
        ("files", "said"),
        [
            ({}, "Couldn't find any class folder"),
            ({"a": 3}, "has only one class, 'a'"),
            ({"a": 3, "b": 0}, "Found no valid file for the classes b"),
            ({"a": 5, "b": 1}, "has only one image of 'b'"),
        ],
    )
    def test_invalid_folders(self, tmp_path: Path, files: dict[str, int], said: str) -> None:
        write_images(tmp_path, files)
        with pytest.raises(DataError, match=rf"{re.escape(said)}(?s:.*)\nNothing was trained\.$"):
            folder_task(tmp_path)


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


class TestErrors:
    def error(self, root: Path) -> str:
        with pytest.raises(DataError, match=r"Nothing was trained\.$") as caught:
            check(Data(name="emoji", root=str(root)), range(2))
        return str(caught.value)

    def test_a_missing_or_other_package_names_the_command_that_downloads_it(self, tmp_path: Path) -> None:
        said = self.error(tmp_path)
        assert "'emoji-datasource-google' is not in" in said
        assert said.endswith(f"emoji-datasource-twitter@16.0.0 --prefix {tmp_path}\nNothing was trained.")
        assert "version 15.0.0, but these results need 16.0.0" in self.error(write(tmp_path, "15.0.0"))

    @pytest.mark.parametrize("content", [None, b"not a PNG"])
    def test_a_missing_or_damaged_image_is_named(self, tmp_path: Path, content: bytes | None) -> None:
        path = write(tmp_path) / "node_modules/emoji-datasource-google/img/google/64/fo5.png"
        path.unlink() if content is None else path.write_bytes(content)
        assert "fo5.png" in self.error(tmp_path)
