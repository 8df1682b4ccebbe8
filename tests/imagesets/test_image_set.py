"""ImageSet and the two embedded sets: order, labels, fingerprints, limits and refusals of wrong URLs."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
from refusals import refusal

from imagesets.names import PackedNames
from imagesets.sets import open_set
from imagesets.subsets import class_counts

NAMES = ("train/ant/a.jpg", "train/ant/b.jpg", "train/bee/a.jpg", "val/ant/c.jpg", "val/bee/c.jpg")


@pytest.mark.parametrize("url", ["tiny:", "digits:"])
@pytest.mark.parametrize("split", ["train", "val"])
def test_embedded_sets_are_the_same_each_time(url, split):
    first, second = open_set(url, split), open_set(url, split)
    assert first.fingerprint == second.fingerprint
    assert np.array_equal(first.labels, second.labels)
    assert first.image(3).mode == "RGB" and first.encoded(3) is None
    assert first.path(3) == f"{url}{split}/3"
    assert set(first.labels) == set(range(len(first.classes)))
    assert np.ptp(class_counts(first)) <= 9


def test_digits_are_those_of_scikit_learn_in_two_disjoint_splits():
    from sklearn.datasets import load_digits

    train, val = open_set("digits:", "train"), open_set("digits:", "val")
    assert (len(train), len(val)) == (1297, 500)
    assert (class_counts(val) == 50).all()
    ours = np.concatenate([train.images.pixels, val.images.pixels])[..., 0]
    theirs = np.rint(load_digits().images * 255 / 16).astype(np.uint8)
    assert sorted(image.tobytes() for image in ours) == sorted(image.tobytes() for image in theirs)
    assert ours.min() == 0 and ours.max() == 255


def test_tiny_is_solved_by_its_mean_colour():
    train, val = open_set("tiny:", "train"), open_set("tiny:", "val")
    means = [np.array([image_set.images.pixels.mean((1, 2))])[0] for image_set in (train, val)]
    nearest = ((means[1][:, None] - means[0][None]) ** 2).sum(-1).argmin(1)
    assert (train.labels[nearest] == val.labels).mean() > 0.9


def test_a_pickled_set_has_the_same_images(tree, tmp_path):
    image_set = open_set(f"folder:{tree(tmp_path, *NAMES)}", "train")
    copy = pickle.loads(pickle.dumps(image_set))
    assert copy.fingerprint == image_set.fingerprint and copy.path(2) == image_set.path(2)


def test_packed_names_keep_every_name():
    names = ["", "a/b.jpg", "\u00e9t\u00e9.png", "not-utf8-\udcff.jpg", "a b.jpg"]
    packed = PackedNames.pack(names)
    assert list(packed) == names and len(packed) == 5
    assert list(packed.take(np.array([3, 0, 3]))) == [names[3], "", names[3]]


def fingerprint(root):
    return open_set(f"folder:{root}", "train").fingerprint


def test_fingerprint_ignores_the_location_and_times_of_files(tree, tmp_path):
    assert fingerprint(tree(tmp_path / "here", *NAMES)) == fingerprint(tree(tmp_path / "there", *NAMES))


def test_fingerprint_depends_on_names_sizes_labels_and_classes(tree, tmp_path):
    root = tree(tmp_path, *NAMES)
    fingerprints = [fingerprint(root)]
    with open(root / "train/ant/a.jpg", "ab") as file:
        file.write(b"x")
    fingerprints.append(fingerprint(root))
    (root / "train/ant/a.jpg").rename(root / "train/ant/aa.jpg")
    fingerprints.append(fingerprint(root))
    (root / "train/ant/b.jpg").rename(root / "train/bee/b.jpg")
    fingerprints.append(fingerprint(root))
    for split in ("train", "val"):
        (root / split / "bee").rename(root / split / "cow")
    fingerprints.append(fingerprint(root))
    relabelled = open_set(f"folder:{root}", "train")
    fingerprints.append(replace(relabelled, labels=1 - relabelled.labels).fingerprint)
    assert len(set(fingerprints)) == len(fingerprints)


def test_fingerprint_depends_on_every_pixel_in_memory():
    image_set = open_set("tiny:", "val")
    pixels = image_set.images.pixels.copy()
    pixels[7, 3, 4, 1] ^= 1
    assert replace(image_set, images=replace(image_set.images, pixels=pixels)).fingerprint != image_set.fingerprint


def test_subset_keeps_order_classes_and_names(tree, tmp_path):
    image_set = open_set(f"folder:{tree(tmp_path, *NAMES)}", "train")
    chosen = image_set.subset(np.array([2, 0]), "swap")
    assert [chosen.path(0), chosen.path(1)] == [image_set.path(2), image_set.path(0)]
    assert chosen.labels.tolist() == [1, 0] and chosen.classes == image_set.classes
    assert chosen.encoded(0) == image_set.encoded(2)
    assert chosen.url.endswith("#swap") and chosen.fingerprint != image_set.fingerprint


@pytest.mark.parametrize("count", [1, 3, 10, 15, 101, 1296])
def test_limited_is_balanced_and_repeatable(count):
    image_set = open_set("digits:", "train")
    limited = image_set.limited(count)
    assert len(limited) == count and np.ptp(class_counts(limited)) <= 10
    if count < 1000:
        assert np.ptp(class_counts(limited)) <= 1
    assert limited.fingerprint == image_set.limited(count).fingerprint
    assert len({limited.path(index) for index in range(count)}) == count


def test_limited_beyond_the_set_is_the_set_and_zero_is_an_error():
    image_set = open_set("tiny:", "val")
    assert image_set.limited(32) is image_set
    with pytest.raises(ValueError, match="give 1 or more"):
        image_set.limited(0)


def test_a_wrong_url_is_refused_with_advice():
    for url, advice in [
        ("/data/pets", "write folder:/data/pets"),
        ("data/pets:2", "write folder:data/pets:2"),
        ("pets", "write folder:pets"),
        ("fodler:/data", "did you mean 'folder:/data'? there are: cifar10:PATH"),
        ("ImageNet:/data", "did you mean 'imagenet:/data'?"),
        ("zzz:/data", "; there are: cifar10:PATH, copydays:FOLDER, digits:, folder:PATH"),
        ("digits", "write digits:"),
        ("cifar10", "write cifar10:PATH"),
        ("folder:", "no path after the colon"),
        ("digits:/data", "write digits:"),
        ("tiny:x", "write tiny:"),
    ]:
        assert advice in refusal(open_set, url, "train")


def test_an_unknown_split_is_an_error():
    with pytest.raises(ValueError, match="there are: train, val"):
        open_set("tiny:", "test")
