"""Copy detection on a tiny image set in the layout of Copydays."""

import shutil

import numpy as np
import pytest
from numpy.random import RandomState
from PIL import Image
from refusals import refusal
from toy_exports import varied_export

from engine.tasks import Workspace
from imagesets.check import check_image_set
from imagesets.sets import open_set
from probes.tasks.copydays import Copydays

TASK = Copydays(size=32)


def make_picture(seed):
    blocks = Image.fromarray(RandomState(seed).randint(0, 255, (4, 6, 3)).astype(np.uint8))
    return blocks.resize((48, 32), Image.Resampling.NEAREST)


def save(image, path, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)


@pytest.fixture
def copydays(tmp_path):
    """Three originals, each with a cropped and a recompressed copy, two with a strong copy; 30 distractors."""
    root = tmp_path / "copydays"
    for number in range(3):
        image, name = make_picture(number), f"20{number}000.jpg"
        save(image, root / "original" / name, quality=95)
        save(image.crop((2, 2, 46, 30)), root / "crops/10" / name, quality=95)
        save(image, root / "jpegqual/20" / name, quality=20)
    save(make_picture(0).rotate(2), root / "strong/200001.jpg", quality=95)
    save(make_picture(99), root / "strong/201001.jpg", quality=95)  # unlike its original: like the distractors
    for number in range(30):
        noisy = np.clip(np.asarray(make_picture(99), int) + RandomState(number).randint(-9, 9, (32, 48, 3)), 0, 255)
        save(Image.fromarray(noisy.astype(np.uint8)), root / f"distractors/{number}.jpg", quality=95)
    return root


@pytest.mark.parametrize("whiten", [False, True])
def test_copies_are_ranked_among_their_twenty_nearest_images(copydays, tmp_path, whiten):
    for number in range(20 if whiten else 0):
        save(make_picture(50 + number), copydays / f"whitening/{number}.jpg", quality=95)
    outcome = TASK.run(varied_export(), Workspace(cache=tmp_path, data=f"copydays:{copydays}"))
    # The second strong copy is closer to 30 distractors than to its original, which so is not among its nearest 20.
    assert list(outcome.numbers.items()) == [
        ("map_strong", 50),
        ("map_crops_10", 100),
        ("map_jpegqual_20", 100),
        ("map_original", 100),
    ]
    assert outcome.metrics["map_strong"].per_image.shape == (11,) and outcome.facts["distractors"] == 30
    assert "warnings" not in outcome.facts
    assert outcome.facts["whitened by"] == 20 * whiten and outcome.cost["forwards"] == 33 + 11 + 20 * whiten


def test_missing_folders_are_named_in_a_warning(copydays, tmp_path):
    shutil.rmtree(copydays / "strong")
    outcome = TASK.run(varied_export(), Workspace(cache=tmp_path, data=f"copydays:{copydays}"))
    (warning,) = outcome.facts["warnings"]
    assert "strong" in warning and "crops" not in warning and "map_strong" not in outcome.numbers


@pytest.mark.parametrize("name", ["whitening", "Whitening", "distractors", "Distractors", "strong", "jpegqual"])
def test_folders_that_would_be_ignored_are_refused(copydays, tmp_path, name):
    shutil.rmtree(copydays / name, ignore_errors=True)
    if name[0].islower():
        (copydays / name).symlink_to(tmp_path / "nowhere")
    else:
        shutil.rmtree(copydays / name.lower(), ignore_errors=True)
        (copydays / name).mkdir()
    space = Workspace(cache=tmp_path / "cache", data=f"copydays:{copydays}")

    def use():
        for split in ("train", "val"):
            open_set(space.data, split)
        TASK.reads(space)

    assert f"{copydays}/{name}" in refusal(use)


@pytest.mark.parametrize("name", ["distractors", "strong", "crops/10"])
def test_folders_without_images_are_refused(copydays, name):
    shutil.rmtree(copydays / name)
    (copydays / name).mkdir()
    split = "train" if name == "distractors" else "val"
    assert repr(name) in refusal(open_set, f"copydays:{copydays}", split)


def test_the_check_of_the_set_allows_originals_in_both_splits(copydays):
    report = check_image_set(f"copydays:{copydays}")
    assert report.ok and not report.in_both_splits


def test_a_copy_without_original_and_other_image_sets_are_refused(copydays, tmp_path):
    save(make_picture(1), copydays / "strong/299900.jpg")
    assert "strong/299900.jpg" in refusal(open_set, f"copydays:{copydays}", "val")
    with pytest.raises(ValueError, match="copydays:FOLDER"):
        TASK.check_images(Workspace(cache=tmp_path, data="tiny:"))
    with pytest.raises(ValueError, match="no folder original"):
        open_set(f"copydays:{copydays / 'crops'}", "train")


@pytest.mark.parametrize("name", ["jpegqual/10", "crops"])
def test_copies_that_would_be_left_out_are_refused(name, copydays):
    path = copydays / name
    if path.exists():
        shutil.rmtree(path)
    if name == "crops":
        path.mkdir()
    else:
        path.parent.mkdir(exist_ok=True)
        path.symlink_to("/nowhere")
    assert name in refusal(open_set, f"copydays:{copydays}", "val")


def test_originals_that_names_do_not_tell_apart_are_refused(copydays):
    save(make_picture(7), copydays / "original/200099.jpg")
    assert "200000.jpg and original/200099.jpg" in refusal(open_set, f"copydays:{copydays}", "val")
