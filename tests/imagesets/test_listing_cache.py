"""Kept listings: used again as long as the folders are what they were, noticed to be wrong when they are not."""

import os
import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from bench.run.prepare import open_data
from engine.tasks import Workspace
from imagesets import walk
from imagesets.check import check_image_set, render
from imagesets.sets import ImageSet, open_set, open_uncached
from probes.splits import open_splits

YEAR_2001 = 1_000_000_000  # seconds


@pytest.fixture
def pets(tree, tmp_path, monkeypatch):
    """A tree that last changed long ago, of a size of which listings are kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(walk, "MIN_CACHED_IMAGES", 6)
    monkeypatch.setattr(walk, "SETTLING_NS", -1e18)  # the kernel's own time of change cannot be set back
    names = [f"train/{animal}/{number}.jpg" for animal in ("Bee", "ant") for number in range(3)]
    return tree(tmp_path / "pets", *names, "train/ant/old/3.jpg", "val/Bee/4.jpg", "val/ant/5.jpg")


@pytest.fixture
def listings(monkeypatch):
    """Path -> how often a directory was listed."""
    counted, scandir = Counter(), os.scandir

    def noted(place):
        counted[os.readlink(f"/proc/self/fd/{place}") if isinstance(place, int) else str(place)] += 1
        return scandir(place)

    monkeypatch.setattr(os, "scandir", noted)
    return counted


def opened(root) -> ImageSet:
    return open_set(f"folder:{root}", "train")


def kept() -> list:
    return sorted(walk.listings_folder().glob("*"))


def test_a_set_is_listed_once(pets, listings):
    first = opened(pets)
    assert listings[f"{pets}/train/Bee"] == listings[f"{pets}/train/ant/old"] == 1
    again = opened(pets)
    assert listings[f"{pets}/train/Bee"] == listings[f"{pets}/train/ant/old"] == 1
    assert [again.path(index) for index in range(7)] == [first.path(index) for index in range(7)]
    assert (again.labels == first.labels).all() and again.fingerprint == first.fingerprint
    assert (again.classes, again.notes) == (first.classes, first.notes)


def test_a_run_and_another_process_list_it_once(pets, listings, tmp_path):
    for out in ("one", "other"):
        space = Workspace(cache=tmp_path / out, data=f"folder:{pets}", limit=4)
        open_data("pets", space.data, space)
        for _ in range(3):
            open_splits(space)
    assert listings[f"{pets}/train/Bee"] == listings[f"{pets}/train/ant/old"] == 1


def add(root) -> None:
    shutil.copy(root / "train/ant/0.jpg", root / "train/ant/9.jpg")


def add_deep(root) -> None:
    shutil.copy(root / "train/ant/0.jpg", root / "train/ant/old/9.jpg")


def remove(root) -> None:
    (root / "train/Bee/1.jpg").unlink()


def rename(root) -> None:
    (root / "train/Bee/1.jpg").rename(root / "train/Bee/8.jpg")


def replace_by_another(root) -> None:
    (root / "new").write_bytes((root / "train/Bee/1.jpg").read_bytes() + b"longer")
    os.replace(root / "new", root / "train/Bee/1.jpg")


def overwrite(root) -> None:
    with open(root / "train/Bee/1.jpg", "ab") as file:
        file.write(b"longer")


def add_a_folder(root) -> None:
    shutil.copytree(root / "train/ant/old", root / "train/ant/older")


def swap_two_folders(root) -> None:
    for source, target in (("Bee", "x"), ("ant", "Bee"), ("x", "ant")):
        (root / "train" / source).rename(root / "train" / target)


def change_behind_a_clock_set_back(root) -> None:
    before = os.stat(root / "train/Bee")
    remove(root)
    os.utime(root / "train/Bee", ns=(before.st_atime_ns, before.st_mtime_ns))


CHANGES = (add, add_deep, remove, rename, replace_by_another, overwrite, add_a_folder, swap_two_folders)


@pytest.mark.parametrize("change", (*CHANGES, change_behind_a_clock_set_back))
def test_changes_are_noticed(pets, change, monkeypatch):
    before = opened(pets).fingerprint
    change(pets)
    found = opened(pets)
    monkeypatch.setattr(walk, "MIN_CACHED_IMAGES", 1000)
    shutil.rmtree(walk.listings_folder())
    assert found.fingerprint == opened(pets).fingerprint != before


def test_a_class_more_is_noticed(pets):
    opened(pets)
    for split in ("train", "val"):
        shutil.copytree(pets / split / "ant", pets / split / "cow")
    assert opened(pets).classes == ("Bee", "ant", "cow")


def test_a_file_overwritten_in_place_is_noticed_when_it_is_read(pets, monkeypatch):
    monkeypatch.setattr(walk, "SAMPLED_FILES", 1)  # and the others are not asked for
    opened(pets)
    overwrite(pets)
    found = opened(pets)
    with pytest.raises(ValueError, match=r"Bee/1.jpg: .* \d+ bytes, then \d+.* run the same command again"):
        found.subset(np.array([1]), "one").image(0)
    anew = opened(pets)
    assert anew.image(1).size and anew.fingerprint != found.fingerprint


def test_a_check_of_all_images_lists_them_anew(pets, listings, monkeypatch):
    monkeypatch.setattr(walk, "SAMPLED_FILES", 1)
    opened(pets)
    overwrite(pets)
    url = f"folder:{pets}"
    assert check_image_set(url, "train", read_all=False).splits[0].image_set.fingerprint == opened(pets).fingerprint
    assert listings[f"{pets}/train/Bee"] == 1
    report = check_image_set(url, "train")
    assert report.ok and report.splits[0].image_set.fingerprint == opened(pets).fingerprint
    assert listings[f"{pets}/train/Bee"] == 2 and "no problems found" in render(report)
    assert listings[f"{pets}/train/Bee"] == 3  # once more to count the files that are no images


def damage(path) -> None:
    content = path.read_bytes()
    half = len(content) // 2
    path.write_bytes(content[:half] + bytes(200) + content[half + 200 :])  # longer than what no checksum covers


def cut(path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def put_pickle(path) -> None:
    with np.load(path) as arrays:
        names = arrays.files
    with open(path, "wb") as file:
        np.savez(file, **dict.fromkeys(names, np.array([Exploding()], object)))


def put_other_arrays(path) -> None:
    with np.load(path) as arrays:
        found = dict(arrays) | {"sizes": arrays["sizes"][:-1]}
    with open(path, "wb") as file:
        np.savez(file, **found)


class Exploding:
    def __reduce__(self):
        return os._exit, (1,)


@pytest.mark.parametrize("spoil", (damage, cut, put_pickle, put_other_arrays, lambda path: path.write_bytes(b"")))
def test_a_spoilt_file_is_made_again(pets, spoil, listings):
    first = opened(pets)
    (path,) = kept()
    sound = path.read_bytes()
    spoil(path)
    assert opened(pets).fingerprint == first.fingerprint
    assert kept() == [path] and len(path.read_bytes()) == len(sound)
    assert listings[f"{pets}/train/Bee"] == 2


def test_what_changed_just_now_is_not_kept(pets, monkeypatch):
    monkeypatch.setattr(walk, "SETTLING_NS", 1e18)
    assert len(opened(pets)) == 7 and not kept()


def test_a_small_set_is_not_kept(pets, monkeypatch):
    monkeypatch.setattr(walk, "MIN_CACHED_IMAGES", 8)
    assert len(opened(pets)) == 7 and not kept()


def test_a_cache_that_cannot_be_written_is_done_without(pets, tmp_path):
    (tmp_path / "home").write_text("a file, where a folder should be")
    assert len(opened(pets)) == len(opened(pets)) == 7


def test_the_newest_are_kept(pets, monkeypatch):
    monkeypatch.setattr(walk, "MAX_CACHE_FILES", 2)
    for name in ("one", "two", "three"):
        shutil.copytree(pets, pets.parent / name)
        opened(pets.parent / name)
        for path in kept():
            os.utime(path, (YEAR_2001, os.stat(path).st_mtime - 10))
    assert len(kept()) == 2
    before = kept()
    opened(pets.parent / "three"), opened(pets.parent / "two")
    assert kept() == before


def test_many_at_once_write_whole_files(pets):
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: opened(pets).fingerprint, range(32)))
    assert len(set(found)) == 1 and len(kept()) == 1
    assert opened(pets).fingerprint == found[0]


def test_odd_names_survive(pets, tree):
    (pets / "train/ant" / os.fsdecode(b"gr\xfc\xdfe.JPG")).write_bytes(b"x")
    (pets / "train/ant/broken.png").symlink_to("nowhere")
    first, again = opened(pets), opened(pets)
    assert [again.path(index) for index in range(len(again))] == [first.path(index) for index in range(len(first))]
    assert again.images.sizes.tolist() == first.images.sizes.tolist() and -1 in again.images.sizes
    assert again.fingerprint == first.fingerprint == replace(first, images=again.images).fingerprint


@pytest.mark.parametrize("scheme", ("images", "imagenet"))
def test_images_side_by_side_are_kept_too(scheme, pets, listings, tree):
    flat = pets / "val/flat" if scheme == "images" else pets / "other/val"
    tree(flat, *(f"ILSVRC2012_val_{number:08d}.JPEG" for number in range(1, 9)))
    rows = [f"ILSVRC2012_val_{number:08d},n0000000{number % 2} 1 2 3 4" for number in range(1, 9)]
    (flat.parent / "LOC_val_solution.csv").write_text("\n".join(["ImageId,PredictionString", *rows]))
    url, split = (f"images:{flat}", "train") if scheme == "images" else (f"imagenet:{flat.parent}", "val")
    first, again = open_set(url, split), open_set(url, split)
    assert (
        first.fingerprint == again.fingerprint
        and first.path(7) == again.path(7) == f"{flat}/ILSVRC2012_val_00000008.JPEG"
    )
    assert kept() and again.image(3).size


def other_pixels(path) -> None:
    """Other bytes of the same number, and a later time of modification."""
    data = path.read_bytes()
    with open(path, "r+b") as file:
        file.write(data[::-1])
    os.utime(path)


def test_a_file_overwritten_by_one_of_its_size_is_noticed(pets, monkeypatch):
    before = opened(pets)
    path = pets / "train/Bee/1.jpg"
    other_pixels(path)
    assert opened(pets).contents != before.contents and opened(pets).fingerprint == before.fingerprint
    monkeypatch.setattr(walk, "SAMPLED_FILES", 1)  # and it is not among them
    before = opened(pets)
    other_pixels(path)
    assert opened(pets).contents == before.contents
    with pytest.raises(ValueError, match=r"Bee/1.jpg: .* run the same command again"):
        opened(pets).image(1)
    other_pixels(path)
    opened(pets)
    other_pixels(path)
    assert open_uncached(f"folder:{pets}", "train").contents != before.contents
