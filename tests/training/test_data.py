"""Images: who sees which, when, and what is said of bad ones before the first step."""

import multiprocessing
import random

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import ToTensor

from mptify.config import DataConfig
from mptify.errors import BadConfig, BadData
from mptify.training.data import (
    as_images,
    as_pair,
    batches_of,
    evaluation_batches,
    training_batches,
)
from mptify.training.sources import load_data


def numbered(count=103, size=6, **changes):
    """Images that know their own number."""
    pixels = np.zeros((count, size, size, 1), np.uint8)
    pixels[:] = np.arange(count)[:, None, None, None]
    images = as_images((pixels, np.arange(count) % 7), "train")
    for name, value in changes.items():
        setattr(images, name, value)
    return images


def numbers(batch, images):
    pixels = batch[0][:, 0] * images.std[0] + images.mean[0]
    return (pixels.amax((1, 2)) * 255).round().int().tolist()


def epoch(images, seed=0, number=0, first=0, rank=0, world=1, batch=16):
    return list(
        training_batches(
            images, batch, seed, number, first=first, rank=rank, world=world, device="cpu"
        )
    )


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_image_is_seen_once_per_epoch(world):
    images = numbered()
    seen = [
        number
        for rank in range(world)
        for batch in epoch(images, rank=rank, world=world)
        for number in numbers(batch, images)
    ]
    assert sorted(seen) == list(range(103))


def test_batches_of_an_epoch_are_nearly_equal():
    images = numbered()
    sizes = [len(labels) for _, labels in epoch(images)]
    assert len(sizes) == batches_of(103, 16) == 7
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("settings", [{}, {"crop": 2}, {"flip": True}, {"crop": 1, "flip": True}])
def test_what_a_step_sees_does_not_depend_on_processes_or_interruptions(settings):
    images = numbered(**settings)
    whole = epoch(images, seed=3, number=2)
    late = epoch(images, seed=3, number=2, first=4)
    halves = [epoch(images, seed=3, number=2, rank=rank, world=2) for rank in range(2)]
    for step, (pixels, labels) in enumerate(whole):
        if step >= 4:
            assert torch.equal(late[step - 4][0], pixels)
        for rank in range(2):
            assert torch.equal(halves[rank][step][0], pixels[rank::2])
            assert torch.equal(halves[rank][step][1], labels[rank::2])


def test_epochs_and_seeds_differ():
    images = numbered()
    orders = [
        [n for batch in epoch(images, seed=seed, number=number) for n in numbers(batch, images)]
        for seed, number in ((0, 0), (0, 1), (1, 0))
    ]
    assert orders[0] != orders[1]
    assert orders[0] != orders[2]


def test_crops_and_flips_are_those_of_the_image():
    """Each crop is a part of its image, mirrored at the borders; each flip is the image or its mirror; both happen."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(1, 255, (40, 5, 5, 3), dtype=np.uint8)
    images = as_images((pixels, np.arange(40)), "train")
    images.mean, images.std, images.crop = (0.0,) * 3, (1.0,) * 3, 2
    places = set()
    for batch, labels in epoch(images):
        for image, label in zip((batch * 255).round().byte(), labels, strict=True):
            padded = np.pad(pixels[label], ((2, 2), (2, 2), (0, 0)), mode="reflect")
            matches = [
                (y, x)
                for y in range(5)
                for x in range(5)
                if np.array_equal(padded[y : y + 5, x : x + 5].transpose(2, 0, 1), image.numpy())
            ]
            assert matches
            places.add(matches[0])
    assert len(places) > 10
    images.crop, images.flip = 0, True
    mirrored = 0
    for batch, labels in epoch(images):
        for image, label in zip((batch * 255).round().byte(), labels, strict=True):
            original = torch.from_numpy(pixels[label].transpose(2, 0, 1))
            assert torch.equal(image, original) or torch.equal(image, original.flip(2))
            mirrored += not torch.equal(image, original)
    assert 5 < mirrored < 35


@pytest.mark.parametrize("world", [1, 2, 3])
def test_evaluation_counts_every_image_once(world):
    images = numbered()
    seen = [
        n
        for rank in range(world)
        for batch in evaluation_batches(images, 8, rank=rank, world=world, device="cpu")
        for n in numbers(batch, images)
    ]
    assert sorted(seen) == list(range(103))


# -- sources -----------------------------------------------------------------------------------------------------------------


def picture(path, shade, size=(40, 30)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (shade, 255 - shade, 128)).save(path)


@pytest.fixture
def folder(tmp_path):
    for part, count in (("train", 6), ("val", 3)):
        for label in ("cat", "dog"):
            for number in range(count):
                picture(tmp_path / "photos" / part / label / f"{number}.png", 20 * number)
    return tmp_path / "photos"


def config(**settings):
    return DataConfig(**settings)


def test_digits_are_there_without_a_network():
    train, val = load_data(config())
    assert (len(train), len(val), train.classes, train.shape()) == (1438, 359, 10, (1, 8, 8))


def test_arrays_come_from_a_file(tmp_path):
    rng = np.random.default_rng(0)
    path = tmp_path / "a.npz"
    x, y = rng.integers(0, 255, (50, 8, 8, 3), dtype=np.uint8), rng.integers(0, 4, 50)
    np.savez(path, x_train=x[:40], y_train=y[:40], x_test=x[40:], y_test=y[40:])
    train, val = load_data(config(source=f"arrays:{path}", train_images=30))
    assert (len(train), len(val), train.shape()) == (30, 10, (3, 8, 8))
    pixels = next(evaluation_batches(train, 30, rank=0, world=1, device="cpu"))[0]
    expected = (
        torch.from_numpy(x[:30]).permute(0, 3, 1, 2).float() / 255
        - torch.tensor(train.mean).view(1, 3, 1, 1)
    ) / torch.tensor(train.std).view(1, 3, 1, 1)
    assert torch.allclose(pixels, expected)


def test_of_a_part_of_a_folder_the_whole_is_named(folder):
    with pytest.raises(BadData, match=f"has no folder 'train'.* Did you mean {folder}\\?"):
        load_data(config(source=f"imagefolder:{folder}/train"))


@pytest.mark.parametrize("workers", [0, 2])
def test_folders_are_read_the_same_by_any_number_of_workers(folder, workers):
    train, val = load_data(config(source=f"imagefolder:{folder}", size=16, workers=workers))
    assert (len(train), len(val), train.classes, train.shape(), train.names) == (
        12,
        6,
        2,
        (3, 16, 16),
        ("cat", "dog"),
    )
    alone, _ = load_data(config(source=f"imagefolder:{folder}", size=16, workers=0))
    for (pixels, labels), (others, theirs) in zip(
        epoch(train, batch=4), epoch(alone, batch=4), strict=True
    ):
        assert torch.equal(pixels, others)
        assert torch.equal(labels, theirs)
    late = epoch(train, batch=4, first=2)
    assert torch.equal(late[0][0], epoch(train, batch=4)[2][0])


@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)  # timm leaves files open
def test_a_data_set_of_timm_is_found_by_name(folder):
    train, val = load_data(config(source=f"timm:folder:{folder}", size=16, workers=0))
    assert (len(train), len(val), train.classes) == (12, 6, 2)
    assert next(evaluation_batches(val, 6, rank=0, world=1, device="cpu"))[0].shape == (
        6,
        3,
        16,
        16,
    )


@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
def test_a_data_set_of_timm_numbers_its_classes_alike(folder):
    for path in (folder / "val/cat").iterdir():
        path.unlink()
    with pytest.raises(BadData, match="'cat' is in one of them only"):
        load_data(config(source=f"timm:folder:{folder}", size=16))


def test_some_images_of_a_folder_are_of_all_classes(folder):
    train, val = load_data(
        config(source=f"imagefolder:{folder}", size=16, train_images=6, val_images=3, workers=0)
    )
    assert (len(train), len(val)) == (6, 3)
    assert {int(label) for _, labels in epoch(train, batch=2) for label in labels} == {0, 1}


def test_images_held_out_are_the_last_ones_and_not_trained_on():
    whole, _ = load_data(config())
    train, val = load_data(config(holdout=300, train_images=1000, crop=1))
    assert (len(train), len(val)) == (1000, 300)
    assert torch.equal(train.pixels, whole.pixels[:1000])
    assert torch.equal(val.pixels, whole.pixels[-300:])
    assert torch.equal(val.labels, whole.labels[-300:])
    assert (train.crop, val.crop, train.mean, val.mean) == (1, 0, whole.mean, whole.mean)


@pytest.mark.parametrize("source", ["imagefolder", "timm:folder"])
@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)  # timm leaves files open
def test_files_held_out_are_looked_at_as_validation_images_are(folder, source):
    train, val = load_data(config(source=f"{source}:{folder}", size=16, holdout=4, workers=0))
    assert (len(train), len(val)) == (8, 4)
    assert not set(train.files.indices) & set(val.files.indices)
    assert torch.equal(val.files[0][0], val.files[0][0])
    assert train.files.dataset.transform is not val.files.dataset.transform


def test_all_images_can_not_be_held_out(folder):
    for source, count in (("digits", 1438), (f"imagefolder:{folder}", 12)):
        with pytest.raises(
            BadData, match=rf"data\.holdout={count}: there are only {count} training images\."
        ):
            load_data(config(source=source, holdout=count))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_image_that_breaks_later_is_named(folder, workers):
    train, _ = load_data(config(source=f"imagefolder:{folder}", size=16, workers=workers))
    cut_short(folder)
    (folder / "train/cat/short.jpg").replace(folder / "train/cat/3.png")
    with pytest.raises(BadData, match=r"3\.png: can't be read") as caught:
        epoch(train, batch=4)
    assert "\n" not in str(caught.value)
    assert multiprocessing.active_children() == []  # though the exception still holds the frames


def test_images_from_folders_are_normalized_as_they_say(folder):
    _, val = load_data(config(source=f"imagefolder:{folder}", size=16, workers=0))
    pixels = next(evaluation_batches(val, 2, rank=0, world=1, device="cpu"))[0]
    assert torch.allclose(
        pixels[1, :, 8, 8],
        (torch.tensor([20, 235, 128]) / 255 - torch.tensor(val.mean)) / torch.tensor(val.std),
    )
    val.mean, val.std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    plain = next(evaluation_batches(val, 2, rank=0, world=1, device="cpu"))[0]
    assert torch.allclose(plain[1, :, 8, 8] * 255, torch.tensor([20.0, 235, 128]))


def test_statistics_are_those_of_the_pixels():
    pixels = np.random.default_rng(0).integers(0, 256, (40, 6, 5, 3), dtype=np.uint8)
    pixels[..., 2] = 7
    images = as_images((pixels, np.arange(40) % 2), "train")
    values = pixels / 255
    assert np.allclose(images.mean, values.mean((0, 1, 2)))
    assert np.allclose(images.std[:2], values.std((0, 1, 2), ddof=1)[:2])
    assert images.std[2] == 1e-3


def broken(folder):
    (folder / "train/cat/bad.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"\0" * 50)


def cut_short(folder):
    Image.effect_noise((200, 200), 50).save(folder / "train/cat/short.jpg")
    path = folder / "train/cat/short.jpg"
    path.write_bytes(path.read_bytes()[:3000])


def emptied(folder):
    for path in (folder / "val/dog").iterdir():
        path.unlink()


def another_class(folder):
    picture(folder / "val/fish/0.png", 3)


def no_validation(folder):
    (folder / "val").rename(folder / "later")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (broken, "bad.png"),
        (cut_short, "short.jpg"),
        (emptied, "Found no valid file for the classes dog"),
        (another_class, "'fish' is in one of them only"),
        (no_validation, "has no folder 'val'"),
    ],
)
def test_a_bad_folder_is_told_before_the_first_step(folder, damage, words):
    damage(folder)
    with pytest.raises(BadData) as caught:
        load_data(config(source=f"imagefolder:{folder}"))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("mnist", "There is no data source 'mnist'; there are arrays, cifar10"),
        ("arrays:none.npz", "there is no file 'none.npz'"),
        ("imagefolder:nowhere", "there is no folder 'nowhere'"),
        ("imagefolder", "which folder? Write imagefolder:FOLDER"),
        (
            "cifar10:nowhere",
            "holds no cifar10; torchvision.datasets.CIFAR10('nowhere', download=True) fetches it",
        ),
        ("timm:folder:nowhere", "timm can't open it"),
    ],
)
def test_a_source_that_is_not_there_is_told_in_one_sentence(source, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((BadData, BadConfig)) as caught:
        load_data(config(source=source))
    assert words in str(caught.value)


def test_images_are_not_shifted_out_of_sight():
    load_data(config(source="digits", crop=7))
    with pytest.raises(BadData, match="images of 1×8×8 can be shifted by fewer pixels"):
        load_data(config(source="digits", crop=8))


def test_files_that_are_no_arrays_are_told_so(tmp_path):
    (tmp_path / "a.npz").write_bytes(b"PK nothing")
    with pytest.raises(BadData, match=r"this is not an \.npz file"):
        load_data(config(source=f"arrays:{tmp_path / 'a.npz'}"))
    np.save(tmp_path / "a.npy", np.zeros(3))
    np.savez(tmp_path / "b.npz", x_train=np.zeros(3))
    (tmp_path / "c.npz").write_bytes((tmp_path / "b.npz").read_bytes()[:60])
    for name in ("a.npy", "c.npz"):
        with pytest.raises(BadData, match=r"this is not an \.npz file"):
            load_data(config(source=f"arrays:{tmp_path / name}"))
    with pytest.raises(BadData, match="has no y_train"):
        load_data(config(source=f"arrays:{tmp_path / 'b.npz'}"))


@pytest.mark.parametrize(
    ("images", "labels", "words"),
    [
        (np.zeros((4, 8, 8, 3), np.float32), np.zeros(4, int), "uint8"),
        (np.zeros((4, 8), np.uint8), np.zeros(4, int), "4×8"),
        (np.zeros((4, 8, 8), np.uint8), np.zeros(3, int), "4 images and 3 labels"),
        (np.zeros((0, 8, 8), np.uint8), np.zeros(0, int), "no pixels in 0×8×8×1"),
        (np.zeros((2, 8, 8), np.uint8), np.array([0, -1]), "from 0"),
        (np.zeros((2, 8, 8), np.uint8), np.array([0.5, 1]), "whole numbers"),
    ],
)
def test_arrays_that_are_no_images_are_told_so(images, labels, words):
    with pytest.raises(BadData, match=words):
        as_images((images, labels), "train")


def test_a_loader_is_refused_and_a_data_set_taken():
    files = TensorDataset(torch.zeros(5, 3, 8, 8), torch.tensor([0, 1, 2, 1, 0]))
    with pytest.raises(BadData, match="not a DataLoader"):
        as_images(DataLoader(files), "train")
    assert as_images(files, "train").classes == 3
    with pytest.raises(BadData, match="not a int"):
        as_images(3, "train")


class Coins(torch.utils.data.Dataset):
    """Each item is drawn anew, from every generator that a transform may use."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.tensor([random.random(), np.random.rand(), float(torch.rand(()))]).view(
            3, 1, 1
        ), index % 3


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_set_draws_the_same_whoever_reads_it(workers):
    images = as_images(Coins(), "train", workers)
    assert images.classes == 3
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    first = torch.cat([pixels for pixels, _ in epoch(images, batch=4)])
    if not workers:  # workers have generators of their own, but starting them draws a seed
        assert (random.getstate(), np.random.get_state()[1].tolist()) == before[:2]
        torch.manual_seed(1), random.seed(1), np.random.seed(1)
    again = torch.cat([pixels for pixels, _ in epoch(as_images(Coins(), "train"), batch=4)])
    assert torch.equal(first, again)
    assert len(first.unique()) == 36


def test_classes_are_asked_for_and_not_counted(folder):
    class Unread(ImageFolder):
        def __getitem__(self, index):
            assert index == 0, "only the first is looked at"
            return super().__getitem__(index)

    whole = Unread(str(folder / "train"), ToTensor())
    assert as_images(torch.utils.data.Subset(whole, [0, 5]), "train").classes == 2


class Stream(torch.utils.data.IterableDataset):
    def __len__(self):
        return 3

    def __iter__(self):
        return iter(())


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (Stream(), "a data set with a length and numbers is needed, not a Stream"),
        ([1, 2, 3], "this is a int; a transform may be missing"),
    ],
)
def test_a_data_set_that_can_not_be_used_is_told(data, words):
    with pytest.raises(BadData, match=words):
        as_images(data, "train")


def test_a_data_set_without_a_transform_is_told(folder):
    with pytest.raises(
        BadData, match="this is a pair that begins with a Image; a transform may be missing"
    ):
        as_images(ImageFolder(str(folder / "train")), "train")


def test_broken_images_are_named_all_at_once(folder):
    for number in range(14):
        (folder / f"train/cat/b{number:02}.png").write_bytes(b"nothing")
    cut_short(folder)
    with pytest.raises(BadData) as caught:
        load_data(config(source=f"imagefolder:{folder}"))
    text = str(caught.value)
    assert text.startswith("15 of 33 images can't be read")
    assert all(f"b{number:02}.png" in text for number in range(10))
    assert text.endswith("and 5 more.")
    assert "\n" not in text


@pytest.mark.parametrize("source", ["imagefolder", "timm:folder"])
@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
def test_hidden_folders_are_no_classes(folder, source):
    for part in ("train", "val"):
        picture(folder / part / ".ipynb_checkpoints/0-checkpoint.png", 3)
        picture(folder / part / "cat/.thumbs/0.png", 3)
        (folder / part / ".git").mkdir()
        (folder / part / "dog/._0.png").write_bytes(b"what a Mac leaves")
    train, val = load_data(config(source=f"{source}:{folder}", size=16, workers=0))
    assert (train.names, len(train), len(val)) == (("cat", "dog"), 12, 6)


@pytest.mark.parametrize("source", ["imagefolder", "timm:folder", "arrays"])
@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
def test_one_class_is_nothing_to_search_for(folder, source, tmp_path):
    for part in ("train", "val"):
        for path in (folder / part / "dog").iterdir():
            path.unlink()
        (folder / part / "dog").rmdir()
    place = folder
    if source == "arrays":
        place = tmp_path / "a.npz"
        x, y = np.zeros((6, 8, 8), np.uint8), np.full(6, 2)
        np.savez(place, x_train=x, y_train=y, x_test=x, y_test=y)
    with pytest.raises(BadData, match=r"all images are of one class.*at least two") as caught:
        load_data(config(source=f"{source}:{place}", size=None if source == "arrays" else 16))
    assert "\n" not in str(caught.value)
    if source != "arrays":
        assert load_data(config(source=f"{source}:{place}", size=16), only_val=True)[1].names == (
            "cat",
        )  # to judge a ticket on


def test_one_class_is_refused_from_python_too():
    pixels = np.zeros((8, 6, 6), np.uint8)
    with pytest.raises(BadData, match="all images are of one class"):
        as_pair((pixels, np.ones(8, int)), (pixels, np.arange(8) % 2))


# -- labels and items of one's own -------------------------------------------------------------------------------------------

ONE_HOT = np.eye(3)[[0, 1, 2, 1]]


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (
            np.array([0.0, 1.5, 2, 1]),
            "labels are whole numbers from 0, and these are float64, such as 1.5",
        ),
        (
            np.array([0, 1, np.nan, 1]),
            "labels are whole numbers from 0, and these are float64, such as nan",
        ),
        (np.array([0, -1, 2, 1]), "labels are whole numbers from 0, and the second is -1"),
        (
            ONE_HOT,
            r"labels are one number per image, and these are 4×3; if they are one-hot, pass labels\.argmax\(1\)",
        ),
        (
            np.array(["cat", "dog", "cat", "dog"]),
            "labels are whole numbers from 0, and the first is 'cat'",
        ),
        (["cat", None, "cat", "dog"], "labels are whole numbers from 0, and the first is 'cat'"),
        (None, "labels are whole numbers from 0, one per image, and these are None"),
        (3, "4 images and 1 label"),
        ([[0, 1], [0]], "can't be converted to an array"),
    ],
)
def test_labels_that_are_none_are_told_in_one_sentence(labels, words):
    with pytest.raises(BadData, match=words) as caught:
        as_images((np.zeros((4, 8, 8), np.uint8), labels), "train")
    assert str(caught.value).startswith("train: ")
    assert str(caught.value).endswith(".")
    assert "\n" not in str(caught.value)


def test_labels_may_be_tensors_and_columns():
    pixels = np.zeros((4, 8, 8), np.uint8)
    for labels in (
        torch.tensor([0, 1, 2, 1]),
        np.array([[0], [1], [2], [1]]),
        [0, 1, 2, 1],
        np.array([0, 1, 2, 1], np.uint8),
    ):
        assert as_images((pixels, labels), "train").labels.tolist() == [0, 1, 2, 1]


class Items(torch.utils.data.Dataset):
    """Good items, but for the third."""

    classes = ("a", "b", "c")

    def __init__(self, third=None, label=0, shape=(3, 8, 8)):
        self.third, self.label, self.shape = third, label, shape

    def __len__(self):
        return 6

    def __getitem__(self, index):
        if index == 2:
            return self.third if self.third is not None else (torch.zeros(self.shape), self.label)
        return torch.zeros(3, 8, 8), index % 3


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("items", "words"),
    [
        (Items(label=0.5), r"image 2: its label is 0\.5; labels are whole numbers from 0 to 2\."),
        (Items(label=-1), r"image 2: its label is -1; labels are whole numbers from 0 to 2\."),
        (Items(label=3), r"image 2: its label is 3; labels are whole numbers from 0 to 2\."),
        (
            Items(label="cat"),
            r"image 2: its label is 'cat'; labels are whole numbers from 0 to 2\.",
        ),
        (
            Items(label=torch.eye(3)[1]),
            r"image 2: its label has 3 numbers; labels are whole numbers from 0 to 2, one per image\.",
        ),
        (
            Items(third=(torch.zeros(3, 8, 8), None)),
            r"image 2: its label is None; labels are whole numbers from 0 to 2\.",
        ),
        (
            Items(third=torch.zeros(3, 8, 8)),
            r"image 2: each item must be a pair \(tensor, label\), and this is a Tensor\.",
        ),
        (
            Items(third=(torch.zeros(3, 8, 8), 1, 2)),
            r"image 2: each item must be a pair \(tensor, label\), and this is a tuple of 3\.",
        ),
        (
            Items(shape=(3, 9, 8)),
            r"image 2: is 3×9×8, and image 0 is 3×8×8; all must have one size\.",
        ),
    ],
)
def test_an_item_that_can_not_be_used_is_named_where_it_is_read(items, words, workers):
    images = as_images(items, "train", workers)
    with pytest.raises(BadData, match=words) as caught:
        list(evaluation_batches(images, 6, rank=0, world=1, device="cpu"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("label", "words"),
    [
        ("cat", "its label is 'cat'"),
        (0.5, r"its label is 0\.5"),
        (None, "its label is None"),
        (torch.eye(3)[1], "its label has 3 numbers"),
    ],
)
def test_the_first_label_of_a_data_set_is_looked_at_before_anything_else(label, words):
    with pytest.raises(BadData, match=f"train: image 0: {words}"):
        as_images([(torch.zeros(3, 8, 8), label)] * 3, "train")


class Locked:
    def __len__(self):
        return 3

    def __getitem__(self, index):
        raise KeyError(index)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (Locked(), r"train: image 0 can't be read \(0\)"),
        ({"x": 1, "y": 2}, "train: image 0 can't be read"),
        ("photos", "not a str; `mptify search --data imagefolder:photos` reads a folder"),
        (None, "not a NoneType"),
        (torch.zeros(4, 3, 8, 8), "not a Tensor"),
        (np.zeros((4, 3, 8, 8), np.uint8), "not a ndarray"),
        ([], "the data set is empty"),
        ((np.zeros((4, 8, 8), np.uint8),), "each item must be a pair"),
        ((None, None), "images are uint8 of shape images × height × width × channels, not None"),
        (
            ("images.npy", "labels.npy"),
            "images are uint8 of shape images × height × width × channels, not 'images.npy'",
        ),
    ],
)
def test_what_is_no_data_set_is_told_in_one_sentence(data, words):
    with pytest.raises(BadData, match=words) as caught:
        as_images(data, "train")
    assert "\n" not in str(caught.value)
