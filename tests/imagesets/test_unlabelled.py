"""images:PATH: every image below a folder, in a fixed order, for pretraining alone."""

import os

import pytest
from refusals import set_refusal

from imagesets.check import check_image_set, render
from imagesets.sets import open_set

NAMES = ("b.jpg", "a.PNG", "deep/er/z.webp", "deep/y.jpeg", "other one/x.bmp")


@pytest.fixture
def pile(tree, tmp_path):
    root = tree(tmp_path / "pile", *NAMES)
    (root / "deep/notes.txt").write_text("not an image")
    return root


def test_every_image_below_is_found_in_a_fixed_order(pile):
    image_set = open_set(f"images:{pile}", "train")
    names = [os.path.relpath(image_set.path(index), pile) for index in range(len(image_set))]
    assert names == ["a.PNG", "b.jpg", "deep/y.jpeg", "deep/er/z.webp", "other one/x.bmp"]
    assert image_set.classes == () and (image_set.labels == -1).all()
    assert image_set.image(3).mode == "RGB" and image_set.url == f"images:{pile}"
    assert image_set.notes == ("no labels: for pretraining alone; images in 4 folders",)


def test_the_fingerprint_depends_on_images_and_not_on_the_location(pile, tmp_path, encode):
    before = open_set(f"images:{pile}", "train").fingerprint
    moved = pile.rename(tmp_path / "elsewhere")
    assert open_set(f"images:{moved}", "train").fingerprint == before
    (moved / "c.jpg").write_bytes(encode())
    assert open_set(f"images:{moved}", "train").fingerprint != before


def test_a_folder_of_train_and_val_is_noted(tree, tmp_path):
    root = tree(tmp_path / "pets", "train/ant/1.jpg", "val/ant/2.jpg")
    assert f"write images:{root}/train" in open_set(f"images:{root}", "train").notes[1]


def test_val_and_folders_without_images_are_refused(pile, tmp_path):
    assert "have no labels" in set_refusal(f"images:{pile}", "val")
    (tmp_path / "empty/in").mkdir(parents=True)
    assert f".webp) in {tmp_path / 'empty'}" in set_refusal(f"images:{tmp_path / 'empty'}")
    assert "is a file" in set_refusal(f"images:{pile / 'b.jpg'}")
    assert "exists as far as" in set_refusal(f"images:{pile / 'nowhere'}")


def test_a_check_reads_the_images_and_needs_no_labels(pile):
    report = check_image_set(f"images:{pile}")
    assert report.ok and [split.image_set.split for split in report.splits] == ["train"]
    assert "train: 5 images, no labels, " in render(report)
    (pile / "deep/y.jpeg").write_bytes(b"")
    report = check_image_set(f"images:{pile}")
    assert [path for path, _ in report.splits[0].unreadable] == [str(pile / "deep/y.jpeg")]
    assert "FIX: 1 unreadable image" in render(report)
