"""Cached listings of folders are used again until the folders change."""

import os
import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from imagesets import walk
from imagesets.check import check_image_set, render
from imagesets.sets import ImageSet, open_set, open_uncached


@pytest.fixture
def pets(tree, tmp_path, monkeypatch):
    """Class folders that last changed long ago, large enough for their listing to be cached."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(walk, "MIN_CACHED_IMAGES", 6)
    monkeypatch.setattr(walk, "SETTLING_NS", -1e18)  # the kernel's own time of change cannot be set back
    names = [f"train/{animal}/{number}.jpg" for animal in ("Bee", "ant") for number in range(3)]
    return tree(tmp_path / "pets", *names, "train/ant/old/3.jpg", "val/Bee/4.jpg", "val/ant/5.jpg")


@pytest.fixture
def listings(monkeypatch):
    """Path -> number of times that the directory was listed."""
    counts, scandir = Counter(), os.scandir

    def counting_scandir(place):
        counts[os.readlink(f"/proc/self/fd/{place}") if isinstance(place, int) else str(place)] += 1
        return scandir(place)

    monkeypatch.setattr(os, "scandir", counting_scandir)
    return counts


def open_train(root) -> ImageSet:
    return open_set(f"folder:{root}", "train")


def cached_files() -> list:
    return sorted(walk.listings_folder().glob("*"))


def test_a_set_is_listed_once(pets, listings):
    first = open_train(pets)
    assert listings[f"{pets}/train/Bee"] == listings[f"{pets}/train/ant/old"] == 1
    again = open_train(pets)
    assert listings[f"{pets}/train/Bee"] == listings[f"{pets}/train/ant/old"] == 1
    assert [again.path(index) for index in range(7)] == [first.path(index) for index in range(7)]
    assert (again.labels == first.labels).all() and again.fingerprint == first.fingerprint
    assert (again.classes, again.notes) == (first.classes, first.notes)


def add_file(root) -> None:
    shutil.copy(root / "train/ant/0.jpg", root / "train/ant/9.jpg")


def add_file_in_subfolder(root) -> None:
    shutil.copy(root / "train/ant/0.jpg", root / "train/ant/old/9.jpg")


def remove_file(root) -> None:
    (root / "train/Bee/1.jpg").unlink()


def rename_file(root) -> None:
    (root / "train/Bee/1.jpg").rename(root / "train/Bee/8.jpg")


def replace_file(root) -> None:
    (root / "new").write_bytes((root / "train/Bee/1.jpg").read_bytes() + b"longer")
    os.replace(root / "new", root / "train/Bee/1.jpg")


def append_to_file(root) -> None:
    with open(root / "train/Bee/1.jpg", "ab") as file:
        file.write(b"longer")


def add_folder(root) -> None:
    shutil.copytree(root / "train/ant/old", root / "train/ant/older")


def swap_class_folders(root) -> None:
    for source, target in (("Bee", "x"), ("ant", "Bee"), ("x", "ant")):
        (root / "train" / source).rename(root / "train" / target)


def remove_file_and_restore_folder_time(root) -> None:
    before = os.stat(root / "train/Bee")
    remove_file(root)
    os.utime(root / "train/Bee", ns=(before.st_atime_ns, before.st_mtime_ns))


CHANGES = (
    add_file,
    add_file_in_subfolder,
    remove_file,
    rename_file,
    replace_file,
    append_to_file,
    add_folder,
    swap_class_folders,
    remove_file_and_restore_folder_time,
)


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_noticed(pets, change, monkeypatch):
    before = open_train(pets).fingerprint
    change(pets)
    changed = open_train(pets)
    monkeypatch.setattr(walk, "MIN_CACHED_IMAGES", 1000)
    shutil.rmtree(walk.listings_folder())
    assert changed.fingerprint == open_train(pets).fingerprint != before


def test_a_file_overwritten_in_place_is_noticed_when_it_is_read(pets, monkeypatch):
    monkeypatch.setattr(walk, "SAMPLED_FILES", 1)  # of which Bee/1.jpg is not one
    open_train(pets)
    append_to_file(pets)
    stale = open_train(pets)
    with pytest.raises(ValueError, match=r"Bee/1.jpg: .* \d+ bytes, then \d+.* run the same command again"):
        stale.subset(np.array([1]), "one").image(0)
    anew = open_train(pets)
    assert anew.image(1).size and anew.fingerprint != stale.fingerprint


def test_a_check_of_all_images_lists_them_anew(pets, listings, monkeypatch):
    monkeypatch.setattr(walk, "SAMPLED_FILES", 1)
    open_train(pets)
    append_to_file(pets)
    url = f"folder:{pets}"
    assert check_image_set(url, "train", read_all=False).splits[0].image_set.fingerprint == open_train(pets).fingerprint
    assert listings[f"{pets}/train/Bee"] == 1
    report = check_image_set(url, "train")
    assert report.ok and report.splits[0].image_set.fingerprint == open_train(pets).fingerprint
    assert listings[f"{pets}/train/Bee"] == 2 and "no problems found" in render(report)
    assert listings[f"{pets}/train/Bee"] == 3  # once more to count the files that are no images


def overwrite_middle(path) -> None:
    content = path.read_bytes()
    half = len(content) // 2
    path.write_bytes(content[:half] + bytes(200) + content[half + 200 :])  # more than the bytes that no checksum covers


def truncate(path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def write_pickled_arrays(path) -> None:
    with np.load(path) as arrays:
        names = arrays.files
    with open(path, "wb") as file:
        np.savez(file, **dict.fromkeys(names, np.array([Exploding()], object)))


def write_arrays_of_unequal_length(path) -> None:
    with np.load(path) as arrays:
        spoilt = dict(arrays) | {"sizes": arrays["sizes"][:-1]}
    with open(path, "wb") as file:
        np.savez(file, **spoilt)


class Exploding:
    def __reduce__(self):
        return os._exit, (1,)


@pytest.mark.parametrize(
    "damage",
    (
        overwrite_middle,
        truncate,
        write_pickled_arrays,
        write_arrays_of_unequal_length,
        lambda path: path.write_bytes(b""),
    ),
)
def test_a_damaged_listing_is_replaced(pets, damage, listings):
    first = open_train(pets)
    (path,) = cached_files()
    content = path.read_bytes()
    damage(path)
    assert open_train(pets).fingerprint == first.fingerprint
    assert cached_files() == [path] and len(path.read_bytes()) == len(content)
    assert listings[f"{pets}/train/Bee"] == 2


def test_the_listing_of_folders_that_just_changed_is_not_cached(pets, monkeypatch):
    monkeypatch.setattr(walk, "SETTLING_NS", 1e18)
    assert len(open_train(pets)) == 7 and not cached_files()


def test_sets_open_without_a_writable_cache(pets, tmp_path):
    (tmp_path / "home").write_text("a file, where a folder should be")
    assert len(open_train(pets)) == len(open_train(pets)) == 7


def test_concurrent_writers_leave_one_complete_listing(pets):
    with ThreadPoolExecutor(8) as pool:
        fingerprints = list(pool.map(lambda _: open_train(pets).fingerprint, range(32)))
    assert len(set(fingerprints)) == 1 and len(cached_files()) == 1
    assert open_train(pets).fingerprint == fingerprints[0]


@pytest.mark.parametrize("scheme", ("images", "imagenet"))
def test_flat_folders_are_cached_too(scheme, pets, listings, tree):
    flat = pets / "val/flat" if scheme == "images" else pets / "other/val"
    tree(flat, *(f"ILSVRC2012_val_{number:08d}.JPEG" for number in range(1, 9)))
    rows = [f"ILSVRC2012_val_{number:08d},n0000000{number % 2} 1 2 3 4" for number in range(1, 9)]
    (flat.parent / "LOC_val_solution.csv").write_text("\n".join(["ImageId,PredictionString", *rows]))
    url, split = (f"images:{flat}", "train") if scheme == "images" else (f"imagenet:{flat.parent}", "val")
    first, again = open_set(url, split), open_set(url, split)
    assert first.fingerprint == again.fingerprint
    assert first.path(7) == again.path(7) == f"{flat}/ILSVRC2012_val_00000008.JPEG"
    assert cached_files() and again.image(3).size


def reverse_content(path) -> None:
    """Write other bytes of the same number, at a later time of modification."""
    data = path.read_bytes()
    with open(path, "r+b") as file:
        file.write(data[::-1])
    os.utime(path)


def test_a_file_overwritten_by_one_of_its_size_is_noticed(pets, monkeypatch):
    before = open_train(pets)
    path = pets / "train/Bee/1.jpg"
    reverse_content(path)
    assert open_train(pets).contents != before.contents and open_train(pets).fingerprint == before.fingerprint
    monkeypatch.setattr(walk, "SAMPLED_FILES", 1)  # of which Bee/1.jpg is not one
    before = open_train(pets)
    reverse_content(path)
    assert open_train(pets).contents == before.contents
    with pytest.raises(ValueError, match=r"Bee/1.jpg: .* run the same command again"):
        open_train(pets).image(1)
    reverse_content(path)
    open_train(pets)
    reverse_content(path)
    assert open_uncached(f"folder:{pets}", "train").contents != before.contents
