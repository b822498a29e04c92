"""Datasets of a comparison: content, splits, and independence of the global generator."""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor
from torchvision import datasets

from comparison.data import catalog, synthetic
from comparison.data.catalog import check, load, loader
from comparison.data.sources import stored
from comparison.data.task import DataError, Task
from comparison.spec.run_spec import Data


def made(counts: list[int]) -> Task:
    """A task of 1x1 images whose value is their index; the first two of each class are for testing."""
    labels_N = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    order = torch.randperm(len(labels_N), generator=torch.Generator().manual_seed(0))
    labels_N = labels_N[order]
    first = torch.cat([(labels_N == c).nonzero()[:2, 0] for c in range(len(counts))]).sort().values
    every = torch.arange(len(labels_N))
    source = stored(every.float()[:, None, None, None], None, "none")
    return Task("made", len(counts), labels_N, every[~torch.isin(every, first)], first, source)


def per_class(task: Task, indices: Tensor) -> list[int]:
    return task.labels_N[indices].bincount(minlength=task.classes).tolist()


@pytest.fixture(autouse=True)
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Clear the dataset cache, and run in an empty folder."""
    with contextlib.chdir(tmp_path_factory.mktemp("here")):
        yield
    catalog._load.cache_clear()


def write_images(root: Path, counts: dict[str, int], size: tuple[int, int] = (40, 30)) -> None:
    """Write a different noise image to each file."""
    for folder, count in counts.items():
        (root / folder).mkdir(parents=True)
        for i in range(count):
            seed = int.from_bytes(hashlib.sha256(f"{folder}{i}".encode()).digest()[:4], "big")
            pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / folder / f"{i:03}.png")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_images(tmp_path / "pets", {"cat": 10, "dog": 10})
    return tmp_path / "pets"


def folder_task(path: Path, **fields: Any) -> Task:
    return load(Data(name=f"imagefolder:{path}", image_size=16, **fields))


@pytest.fixture
def write_cifar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Write CIFAR files in their original format with six images each, and disable downloads."""

    def write(name: str) -> Path:
        kind: Any = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[name]
        base = tmp_path / kind.base_folder
        base.mkdir()
        label = "labels" if name == "cifar10" else "fine_labels"
        for number, attribute in enumerate(("train_list", "test_list")):
            sums: list[tuple[str, str]] = []
            for file, _ in getattr(kind, attribute):
                draws = np.random.default_rng(len(sums) + 10 * number)
                pixels = draws.integers(0, 256, (6, 3072), dtype=np.uint8)
                content = pickle.dumps({"data": pixels, label: [0, 1, 2, 0, 1, 2]})
                (base / file).write_bytes(content)
                sums.append((file, hashlib.md5(content).hexdigest()))
            monkeypatch.setattr(kind, attribute, sums)
        key = "label_names" if name == "cifar10" else "fine_label_names"
        content = pickle.dumps({key: ["frog", "lorry", "ship"]})
        (base / kind.meta["filename"]).write_bytes(content)
        monkeypatch.setattr(kind, "meta", {**kind.meta, "md5": hashlib.md5(content).hexdigest()})
        return tmp_path

    def unreachable(*args: Any, **kwargs: Any) -> Any:
        raise URLError("no network")

    monkeypatch.setattr("urllib.request.urlopen", unreachable)
    return write


class TestNames:
    @pytest.mark.parametrize(
        ("name", "says"),
        [
            ("digit", "did you mean: digits"),
            ("cifar-10", "did you mean: cifar10, cifar100"),
            ("imagefolders:/tmp", "did you mean: imagefolder"),
            ("zzz", "available:    digits, synthetic-cue, cifar10, cifar100, emoji, imagefolder"),
            ("imagefolder:", "has no path.\n  use imagefolder:PATH"),
        ],
    )
    def test_an_unknown_name_suggests_the_nearest_and_lists_all(self, name: str, says: str) -> None:
        with pytest.raises(DataError, match=rf"{says}.*\nNothing was trained\.$"):
            load(Data(name=name))


class TestSplit:
    @given(st.lists(st.integers(5, 30), min_size=2, max_size=6), st.integers(0, 10**6), st.data())
    def test_splits_are_disjoint_balanced_and_have_the_requested_sizes(
        self, counts: list[int], seed: int, draw: st.DataObject
    ) -> None:
        task = made(counts)
        validation_size = draw.draw(st.integers(1, len(task.pool) - len(counts)))
        train_size = draw.draw(st.integers(len(counts), len(task.pool) - validation_size))
        split = task.split(train_size, validation_size, seed)
        assert [len(part) for part in split] == [train_size, validation_size, len(task.test)]
        assert len(set(torch.cat(split).tolist())) == sum(map(len, split))
        assert set(torch.cat(split[:2]).tolist()) <= set(task.pool.tolist())
        rest, of_class = (per_class(task, task.split(size, validation_size, seed).train) for size in (None, train_size))
        assert min(of_class) >= 1
        for have, taken in zip(rest, of_class, strict=True):
            assert taken == have or taken >= max(of_class) - 1

    def test_seeds_share_validation_and_test_sets_but_not_training_sets(self) -> None:
        task = made([60, 60])
        first, again, other = (task.split(20, 20, seed) for seed in (3, 3, 4))
        assert torch.equal(first.train, again.train)
        assert not torch.equal(first.train, other.train)
        assert torch.equal(first.validation, other.validation)
        assert torch.equal(first.test, other.test)

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


class TestSeeds:
    def test_more_seeds_than_training_sets_raise(self, folder: Path) -> None:
        data = Data(name=f"imagefolder:{folder}", image_size=16, train_size=12, validation_size=3)
        with pytest.raises(
            DataError, match="(?s)9 seeds need different training sets, but two of them draw the same 12"
        ):
            check(data, range(9))

    def test_training_on_all_images_is_noted(self) -> None:
        assert check(Data(name="digits"), range(3)) == [
            "digits: All seeds train on the same images; they differ only in weights, order and augmentation."
        ]
        assert check(Data(name="digits", train_size=100), range(3)) == []


class TestGlobalGenerator:
    @pytest.mark.parametrize(
        ("name", "augmentation"),
        [("digits", "none"), ("digits", "crop-flip"), ("synthetic-cue", "none"), ("folder", "crop-flip")],
    )
    def test_data_neither_uses_nor_depends_on_the_global_generator(
        self, name: str, augmentation: Any, folder: Path
    ) -> None:
        name = f"imagefolder:{folder}" if name == "folder" else name
        data = Data(name=name, augmentation=augmentation, image_size=16, train_size=10)

        def everything(workers: int) -> list[Tensor]:
            catalog._load.cache_clear()
            check(data, range(2))
            task = load(data)
            split = task.split(10, 3, 1)
            made = [task.source.images(split.validation), *split]
            return made + [part for batch in loader(task, split.train, 4, 1, 0, workers) for part in batch]

        outcomes = []
        for seed, workers in ((0, 0), (1, 0), (2, 2)):
            torch.manual_seed(seed)
            np.random.seed(seed)
            before, before_numpy = torch.get_rng_state(), str(np.random.get_state())
            outcomes.append(everything(workers))
            assert torch.equal(torch.get_rng_state(), before)
            assert str(np.random.get_state()) == before_numpy
        for other in outcomes[1:]:
            assert all(torch.equal(a, b) for a, b in zip(outcomes[0], other, strict=True))


class TestAugmentation:
    @pytest.mark.parametrize("name", ["digits", "folder"])
    def test_augmentation_depends_only_on_seed_epoch_and_index(self, name: str, folder: Path) -> None:
        name = f"imagefolder:{folder}" if name == "folder" else name
        task, indices = load(Data(name=name, image_size=16, augmentation="crop-flip")), torch.arange(8)
        batch = task.source.augmented(indices, 5, 2)
        assert torch.equal(task.source.augmented(indices.flip(0), 5, 2), batch.flip(0))
        for i in (0, 7):
            assert torch.equal(task.source.augmented(indices[i : i + 1], 5, 2)[0], batch[i])
        assert not torch.equal(task.source.augmented(indices, 6, 2), batch)
        assert not torch.equal(task.source.augmented(indices, 5, 3), batch)

    def test_crop_flip_moves_by_an_eighth_and_flips_half_of_the_images(self) -> None:
        x_NCHW = torch.zeros(400, 1, 32, 32)
        x_NCHW[:, 0, 16, 10:12] = torch.tensor([1.0, 2.0])
        cropped = stored(x_NCHW, None, "crop-flip").augmented(torch.arange(400), 0, 0)
        ones, twos = ((cropped[:, 0] == value).nonzero() for value in (1.0, 2.0))
        mirrored = ones[:, 2] > twos[:, 2]
        # A mean of 400 coins; 0.1 is 4 standard deviations.
        assert mirrored.float().mean().item() == pytest.approx(0.5, abs=0.1)
        assert set(ones[:, 1].tolist()) == set(range(12, 21))
        assert set(ones[~mirrored][:, 2].tolist()) == set(range(6, 15))


class TestBatches:
    def test_batches_contain_each_image_once_with_its_label(self) -> None:
        task = load(Data(name="digits", augmentation="crop-flip"))
        split = task.split(40, None, 0)
        batches = list(loader(task, split.train, 10, 0, 0))
        assert sorted(torch.cat([batch[0] for batch in batches]).tolist()) == split.train.tolist()
        for indices_B, x_BCHW, y_B in batches:
            assert torch.equal(x_BCHW, task.source.augmented(indices_B, 0, 0))
            assert torch.equal(y_B, task.labels_N[indices_B])

    @pytest.mark.parametrize(("images", "sizes"), [(40, [16, 16]), (32, [16, 16]), (10, [10])])
    def test_the_last_incomplete_batch_is_dropped_unless_it_is_the_only_one(
        self, images: int, sizes: list[int]
    ) -> None:
        task = load(Data(name="digits"))
        train = task.split(images, None, 0).train
        assert [len(y) for _, _, y in loader(task, train, 16, 0, 0)] == sizes


class TestDigits:
    def test_digits_are_enlarged_and_scaled(self) -> None:
        task = load(Data(name="digits"))
        x = task.source.images(task.test)
        assert x.shape == (797, 1, 32, 32)
        assert (x.min().item(), x.max().item()) == (-1, 1)
        # The center of each enlarged 4x4 block is close to the original pixel.
        original = torch.tensor(load_digits().images / 8 - 1)[task.test]
        assert torch.corrcoef(torch.stack([x[:, 0, 1::4, 1::4].flatten(), original.flatten().float()]))[0, 1] > 0.9
        assert load(Data(name="digits", image_size=8)).source.images(task.test)[:, 0].sub(original).abs().max() < 1e-6

    def test_test_images_of_digits_are_stratified(self) -> None:
        task = load(Data(name="digits"))
        assert len(task.pool) == 1000
        assert sorted([*task.pool.tolist(), *task.test.tolist()]) == list(range(1797))
        assert max(per_class(task, task.test)) - min(per_class(task, task.test)) <= 4


class TestSyntheticCue:
    POOL = synthetic.generate(1600, 32, "pool", without=False)
    TESTED = synthetic.generate(1024, 32, "test", without=True)

    def test_synthetic_images_are_deterministic(self) -> None:
        # Sine and cosine differ in the last bits between processors.
        task = load(Data(name="synthetic-cue"))
        assert (task.shape, len(task.pool), len(task.test), task.classes) == ((1, 32, 32), 4000, 1024, 8)
        assert per_class(task, task.pool) == [500] * 8
        numbers = task.source.images(torch.tensor([0, 4999]))[:, 0, 7, 7].tolist()
        assert numbers == pytest.approx([-3.0, -1.20812], abs=1e-4)

    def test_the_glyph_is_at_its_recorded_place(self) -> None:
        pool, tested = self.POOL, self.TESTED
        assert self.right_by_glyph(pool) == 1.0
        assert pool.has_glyph_N.all()
        assert self.right_by_glyph(tested, tested.has_glyph_N) == 1.0
        # 512 guesses of 8 classes; 0.07 is 5 standard deviations.
        assert self.right_by_glyph(tested, ~tested.has_glyph_N) == pytest.approx(1 / 8, abs=0.07)

    def right_by_glyph(self, cued: synthetic.CueImages, which: Tensor | None = None) -> float:
        """Accuracy of the best matching glyph at the glyph's place."""
        side = synthetic.SIDE
        patches = [
            x[0, r : r + side, c : c + side] for x, (r, c) in zip(cued.x_N1HW, cued.place_N2.tolist(), strict=True)
        ]
        distance = (torch.stack(patches)[:, None] - synthetic.glyphs()).square().sum((2, 3))
        right = distance.argmin(1) == cued.y_N
        return float(right[slice(None) if which is None else which].float().mean())

    def test_the_wave_predicts_the_class_from_any_half_of_the_image(self) -> None:
        """Apply a matched filter of unknown phase to images without a glyph: to the whole image and to each half."""
        tested = self.TESTED
        without = tested.x_N1HW[~tested.has_glyph_N], tested.y_N[~tested.has_glyph_N]
        assert self.right_by_wave(*without, slice(None)) > 0.9
        for half in (slice(0, 16), slice(16, 32)):
            assert 0.3 < self.right_by_wave(*without, half) < 0.99
        # In an area as small as the glyph, the wave is lost in noise.
        assert self.right_by_wave(*without, slice(14, 19), slice(14, 19)) < 0.3

    def right_by_wave(self, x_N1HW: Tensor, y_N: Tensor, rows: slice, columns: slice = slice(None)) -> float:
        every = torch.arange(synthetic.CLASSES)
        power = torch.zeros(len(x_N1HW), synthetic.CLASSES)
        for phase in (0.0, torch.pi / 2):
            waves = synthetic.gratings(32, torch.full((synthetic.CLASSES,), phase), every)[..., rows, columns]
            power += (x_N1HW[..., rows, columns].flatten(1) @ waves.flatten(1).T).square()
        return float((power.argmax(1) == y_N).float().mean())

    def test_crop_flip_is_rejected_because_it_changes_the_class(self) -> None:
        y_N = torch.arange(64) % 8
        waves = synthetic.gratings(32, torch.linspace(0, 6, 64), y_N)
        assert self.right_by_wave(waves, y_N, slice(None)) == 1.0
        assert self.right_by_wave(waves.flip(3), (8 - y_N) % 8, slice(None)) == 1.0
        with pytest.raises(DataError, match="changes the class of 'synthetic-cue' images"):
            load(Data(name="synthetic-cue", augmentation="crop-flip"))


class TestCifar:
    @pytest.mark.parametrize(("name", "pool"), [("cifar10", 30), ("cifar100", 6)])
    def test_cifar_is_read_from_its_files(self, write_cifar: Callable[[str], Path], name: str, pool: int) -> None:
        root = write_cifar(name)
        task = load(Data(name=name, root=str(root)))
        assert (len(task.pool), len(task.test), task.shape, task.classes) == (pool, 6, (3, 32, 32), 3)
        assert task.labels_N.tolist() == [0, 1, 2, 0, 1, 2] * (pool // 6 + 1)
        pixels = torch.tensor(np.random.default_rng(10).integers(0, 256, (6, 3072), dtype=np.uint8))
        mean, std = (0.4914, 0.2470) if name == "cifar10" else (0.5071, 0.2673)
        red = (pixels.view(6, 3, 32, 32)[:, 0] / 255 - mean) / std
        assert torch.allclose(task.source.images(task.test)[:, 0], red, atol=1e-6)

    def test_missing_files_without_a_network(self, write_cifar: Callable[[str], Path], tmp_path: Path) -> None:
        with pytest.raises(DataError) as error:
            check(Data(name="cifar100", root=str(tmp_path)), range(2))
        assert str(error.value) == (
            "cannot load or download 'cifar100': URLError: <urlopen error no network>\n"
            f"  put https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz into {tmp_path} (`root`)\n"
            "Nothing was trained."
        )


class TestImageFolder:
    def test_class_folders_have_a_fixed_test_split(self, folder: Path) -> None:
        task = folder_task(folder)
        assert (len(task.pool), task.shape) == (16, (3, 16, 16))
        assert per_class(task, task.test) == [2, 2]
        assert not set(task.pool.tolist()) & set(task.test.tolist())
        catalog._load.cache_clear()
        assert torch.equal(folder_task(folder).test, task.test)

    @pytest.mark.parametrize("held", ["val", "test"])
    def test_train_with_val_or_test(self, tmp_path: Path, held: str) -> None:
        write_images(tmp_path, {"train/a": 4, "train/b": 5, f"{held}/a": 2, f"{held}/b": 3})
        task = folder_task(tmp_path)
        assert (per_class(task, task.pool), per_class(task, task.test)) == ([4, 5], [2, 3])
        first = torch.from_numpy(np.asarray(Image.open(tmp_path / held / "a" / "000.png")).copy())
        middle = task.source.images(task.test[:1])[0]
        assert middle.mean().item() == pytest.approx((first.float().mean() / 255 - 0.449).item() / 0.226, abs=0.1)

    def test_val_joins_the_pool_if_there_is_a_test_folder(self, tmp_path: Path) -> None:
        write_images(
            tmp_path, {f"{part}/{name}": n for part, n in (("train", 4), ("val", 2), ("test", 3)) for name in "ab"}
        )
        task = folder_task(tmp_path)
        assert (per_class(task, task.pool), per_class(task, task.test)) == ([6, 6], [3, 3])

    def test_images_are_center_cropped_and_normalized(self, tmp_path: Path) -> None:
        write_images(tmp_path, {"a": 2, "b": 2}, size=(48, 32))
        for path in tmp_path.glob("*/*.png"):
            pixels = np.zeros((32, 48, 3), np.uint8)
            pixels[:, 8:40] = 255
            Image.fromarray(pixels).save(path)
        images = load(Data(name=f"imagefolder:{tmp_path}", image_size=32)).source.images(torch.arange(2))
        white = (1 - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor([0.229, 0.224, 0.225])
        assert torch.allclose(images, white[:, None, None].expand(2, 3, 32, 32), atol=1e-5)

    def test_unreadable_images_are_skipped_and_counted(self, folder: Path) -> None:
        Image.new("L", (20, 20), 100).save(folder / "cat" / "000.png")  # these two become RGB
        Image.new("RGBA", (20, 20), (1, 2, 3, 4)).save(folder / "cat" / "001.png")
        (folder / "cat" / "003.png").write_text("no image")
        short = folder / "dog" / "007.png"
        short.write_bytes(short.read_bytes()[:-400])
        (folder / "dog" / "009.png").unlink()
        (folder / "dog" / "009.png").symlink_to("missing")
        task = folder_task(folder)
        assert len(task.skipped) == 3
        assert per_class(task, torch.arange(17)) == [9, 8]
        assert task.source.images(torch.arange(17)).shape == (17, 3, 16, 16)
        (note,) = check(Data(name=f"imagefolder:{folder}", image_size=16, train_size=4), range(2))
        assert note == f"imagefolder:{folder}: skipped 3 unreadable images."

    def test_a_changed_file_is_checked_again(self, folder: Path) -> None:
        (folder / "cat" / "003.png").write_text("no image")
        assert len(folder_task(folder).skipped) == 1
        shutil.copy(folder / "cat" / "000.png", folder / "cat" / "003.png")
        catalog._load.cache_clear()
        assert folder_task(folder).skipped == ()

    @pytest.mark.parametrize(
        ("files", "said"),
        [
            ({}, "Couldn't find any class folder"),
            ({"a": 3}, "has only one class, 'a'"),
            ({"a": 3, "b": 0}, "Found no valid file for the classes b"),
            ({"a": 5, "b": 1}, "has only one image of 'b'"),
            ({"train/a": 2, "train/b": 2}, "has train/ but neither val/ nor test/"),
            ({"train/a": 2, "train/b": 2, "val/a": 2, "val/c": 2}, "different classes.\n  only in one of them: b, c"),
            ({"train/a": 3, "train/b": 3, "val/a": 2, "val/b": 0}, "Found no valid file for the classes b"),
        ],
    )
    def test_invalid_folders(self, tmp_path: Path, files: dict[str, int], said: str) -> None:
        write_images(tmp_path, files)
        with pytest.raises(DataError, match=rf"{re.escape(said)}(?s:.*)\nNothing was trained\.$"):
            folder_task(tmp_path)
