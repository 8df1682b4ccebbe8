"""Digits on noisy backgrounds: fixed pixels, each digit in its split, and raw pixels that do not classify well."""

import numpy as np
import pytest

from imagesets.schemes.noisydigits import (
    DIGIT_SIDE,
    MAX_BACKGROUND,
    MAX_NOISE,
    MIN_INK,
    POSITION_STEP,
    SIDE,
    draw_scenes,
)
from imagesets.sets import SPLITS, open_set


@pytest.fixture(scope="module")
def splits():
    return {split: open_set("noisydigits:", split) for split in SPLITS}


def test_pixels_are_the_same_on_every_machine(splits):
    assert {split: images.fingerprint[:16] for split, images in splits.items()} == {
        "train": "fd522886abd303a1",
        "val": "26a4cc6dbd9c06e7",
    }
    assert open_set("noisydigits:", "val").fingerprint == splits["val"].fingerprint


def test_digits_stay_in_their_split_under_their_label(splits):
    for split, images in splits.items():
        source = open_set("digits:", split)
        assert np.array_equal(images.labels, source.labels) and images.classes == source.classes
        assert images.image(0).size == (SIDE, SIDE) and images.path(1) == f"noisydigits:{split}/1"


def test_a_digit_is_drawn_completely_at_every_position():
    squares = np.full((400, DIGIT_SIDE, DIGIT_SIDE), 255, np.uint8)
    images = draw_scenes(squares, np.random.RandomState(0)).astype(int)
    light = images.mean(-1) > (MAX_BACKGROUND + MIN_INK) / 2
    rows, columns = (light.mean(axis) > 0.2 for axis in (2, 1))
    assert (light.sum((1, 2)) == DIGIT_SIDE**2).mean() > 0.9
    for lines in (rows, columns):
        assert (lines.sum(1) == DIGIT_SIDE).all()
        assert set(lines.argmax(1)) == set(range(0, SIDE - DIGIT_SIDE + 1, POSITION_STEP))
    assert images[~light].mean() == pytest.approx(MAX_BACKGROUND / 2 + MAX_NOISE / 4, abs=6)


def test_neighbours_by_raw_pixels_are_mostly_wrong(splits):
    """Ten neighbours classify 98 % of the plain digits."""
    rows = {split: images.images.pixels.reshape(len(images), -1) / 255.0 - 0.45 for split, images in splits.items()}
    gallery = rows["train"] / np.linalg.norm(rows["train"], axis=1, keepdims=True)
    nearest = np.argsort(-rows["val"] @ gallery.T, axis=1)[:, :10]
    votes = np.array([np.bincount(labels, minlength=10) for labels in splits["train"].labels[nearest]])
    assert (votes.argmax(1) == splits["val"].labels).mean() < 0.35


def test_a_path_is_refused():
    with pytest.raises(ValueError, match="write noisydigits:"):
        open_set("noisydigits:/data", "train")
