"""Images in memory: accepted forms, fingerprints and refusals."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import refusal
from torch.utils.data import Subset

from imagesets.schemes.memory import Arrays, hold
from imagesets.sets import open_set

GREY = np.arange(10 * 4 * 5, dtype=np.uint8).reshape(10, 4, 5)
LABELS = np.arange(10) % 2
COLOURS = np.stack([GREY, 255 - GREY, GREY // 2], axis=-1)  # (10, 4, 5, 3)


@pytest.mark.parametrize(
    "images",
    [
        COLOURS,
        list(map(Image.fromarray, COLOURS)),
        torch.from_numpy(COLOURS).permute(0, 3, 1, 2),
        torch.from_numpy(COLOURS).permute(0, 3, 1, 2).float() / 255,
        COLOURS.astype(np.float64) / 255,
        COLOURS.astype(np.int64),
    ],
    ids=["uint8", "PIL", "channels first", "as ToTensor gives them", "float64", "int64"],
)
def test_all_accepted_forms_give_the_same_images(images):
    held, plain = hold("given", (images, LABELS)), hold("plain", (COLOURS, LABELS))
    for split in ("train", "val"):
        held_set, plain_set = open_set(held.url, split), open_set(plain.url, split)
        assert held_set.fingerprint == plain_set.fingerprint and held_set.labels.tolist() == plain_set.labels.tolist()
        assert all(
            held_set.image(index).tobytes() == plain_set.image(index).tobytes() for index in range(len(held_set))
        )


def test_a_fifth_of_each_class_is_held_out():
    held = hold("images", (COLOURS, LABELS))
    train, val = open_set(held.url, "train"), open_set(held.url, "val")
    assert np.bincount(train.labels).tolist() == [4, 4] and np.bincount(val.labels).tolist() == [1, 1]
    assert {*train.images.item_indices, *val.images.item_indices} == set(
        range(10)
    ) and "20% of each class" in val.notes[0]


class DictDataset:
    """Items as datasets of Hugging Face give them."""

    classes = ("cat", "dog", "owl")

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict:
        return {"image": Image.fromarray(COLOURS[index]), "label": int(LABELS[index])}


def test_datasets_name_their_classes():
    held = hold("pets", DictDataset(6), DictDataset(4))
    train, val = open_set(held.url, "train"), open_set(held.url, "val")
    assert train.classes == val.classes == ("cat", "dog", "owl") and (len(train), len(val)) == (6, 4)
    assert train.image(3).getpixel((1, 2)) == tuple(COLOURS[3, 2, 1])
    assert train.limited(2).images.path(1) == "memory:pets/train/3"


class Named(Arrays):
    """A dataset like ImageFolder: numbers for labels, and a list of their names."""

    def __init__(self, classes, labels):
        super().__init__(COLOURS, labels)
        self.classes = classes


def test_labels_that_mean_other_classes_in_val_are_refused():
    """An ImageFolder of val that lacks the class `cat` numbers its classes from `dog` on."""
    names = ["cat", "dog", "owl"]
    train = Named(names, np.arange(10) % 3)
    of_hugging_face = Arrays(COLOURS, LABELS)
    of_hugging_face.features = {"label": SimpleNamespace(names=names[1:])}
    for val in (Named(names[1:], LABELS), Subset(Named(names[1:], LABELS), range(10)), of_hugging_face):
        assert "class 0 is 'cat' in train and 'dog' in val" in refusal(hold, "x", train, val)
    for val in (Named(names[:2], LABELS), Named(names[1:], ["owl"] * 10), Arrays(COLOURS, LABELS)):
        labels = ["cat", "owl"] * 5 if val.labels[0] == "owl" else np.arange(10) % 3
        assert hold("x", Named(names, labels), val).splits["val"].classes[0] == "cat"


def test_labels_may_be_names_numbers_or_several_per_image():
    named = hold("named", (GREY, ["a", "c"] * 5), (GREY[:2], ["b", "a"]))
    val = open_set(named.url, "val")
    assert val.classes == ("a", "b", "c") and val.labels.tolist() == [1, 0]
    apart = hold("apart", (GREY, LABELS * 7 + 3))
    assert open_set(apart.url, "train").classes == ("3", "10")
    several = np.eye(3, dtype=int)[np.arange(10) % 3]
    both = hold("several", (GREY, several), (GREY, several))
    assert open_set(both.url, "train").has_several_labels and len(open_set(both.url, "train").classes) == 3
    alone = hold("alone", (GREY, several))
    train, val = open_set(alone.url, "train"), open_set(alone.url, "val")
    assert (len(train), len(val)) == (7, 3) and all(part.labels.any(axis=0).all() for part in (train, val))


def test_fingerprints_depend_on_pixels_and_not_on_names():
    held = hold("a", (COLOURS, LABELS), (COLOURS, LABELS))
    first = open_set(held.url, "train").fingerprint
    other = COLOURS.copy()
    other[3, 0, 0, 0] += 1
    changed = hold("b", (other, LABELS), (COLOURS, LABELS))
    assert open_set(changed.url, "train").fingerprint != first
    assert open_set(changed.url, "val").fingerprint == first and held.url == "memory:a"


class RandomDataset(DictDataset):
    def __getitem__(self, index: int) -> tuple:
        return np.random.randint(0, 255, (4, 4, 3), np.uint8), 0


def test_wrong_images_and_labels_are_refused():
    for train, message in [
        ((COLOURS, LABELS[:9]), "10 images and 9 labels"),
        ((COLOURS, LABELS + 0.9), r"labels such as .*0\.9.*float64"),
        ((COLOURS, np.arange(10) % 3 - 1), "labels of -1 beside 0 usually mean none"),
        ((COLOURS / 1.0, LABELS), "memory:x/train/0: an image of float64 has values from 0 to 255; .*normalisation"),
        ((COLOURS[:, :, :, :2], LABELS), r"an image is a ndarray \(4, 5, 2\) of uint8; give PIL images"),
        ((COLOURS, np.full((10, 2), 3)), "several labels an image are 0, 1 or -1"),
        ((COLOURS[:0], LABELS[:0]), "no images"),
        (iter(()), "train is a tuple_iterator; give a dataset with a length"),
        (RandomDataset(5), "memory:x/train/0 is another image when read again: leave random augmentation out"),
        ([1, 2], "memory:x/train/0: TypeError"),
    ]:
        assert re.search(message, refusal(hold, "x", train))


def test_images_that_are_nearly_black_are_noted(capsys):
    """Whole numbers from 0 to 1 or 16 are read as grey levels of 255."""
    for white, is_noted in ((1, True), (16, True), (17, False)):
        hold("x", (np.minimum(GREY, white), LABELS))
        assert ("scale them to 0..255" in capsys.readouterr().err) == is_noted, white


class SeldomAugmented(DictDataset):
    """Changes an image with a probability so small that the first reading of a few images does not show it."""

    is_training = False

    def __getitem__(self, index: int) -> tuple:
        return COLOURS[index] // (2 if index == 5 and self.is_training else 1), int(LABELS[index])


def test_an_image_that_changes_later_is_refused():
    dataset = SeldomAugmented(10)
    images = hold("x", dataset, dataset).splits["train"]
    assert images.image(5).tobytes() == COLOURS[5].tobytes()
    dataset.is_training = True
    assert images.image(4) and "memory:x/train/5 is another image" in refusal(images.image, 5)


def test_images_are_released_with_the_object_that_holds_them():
    held = hold("gone", Arrays(COLOURS, LABELS))
    assert len(open_set(held.url, "val")) == 2
    del held
    with pytest.raises(ValueError, match="memory:gone: its images were given by a Python program"):
        open_set("memory:gone", "val")
