"""folder:PATH lists images as torchvision's ImageFolder does and refuses folders in another layout."""

import os
import shutil

import pytest
from refusals import set_refusal
from torchvision.datasets import ImageFolder

from imagesets.decoding import UnreadableImage
from imagesets.sets import open_set

NAMES = (
    "train/ant/b.JPEG",
    "train/ant/a.jpg",
    "train/ant/sub/z.png",
    "train/ant/sub more/y.jpeg",
    "train/ant/sub/deep/x.webp",
    "train/Bee/1.bmp",
    "train/Bee/10.tif",
    "train/Bee/2.TIFF",
    "train/Bee/3.ppm",
    "val/ant/c.jpg",
    "val/Bee/c.jpg",
)


@pytest.fixture
def pets(tree, tmp_path):
    root = tree(tmp_path / "pets", *NAMES)
    for name in ("train/ant/notes.txt", "train/ant/image.gif", "train/labels.csv"):
        (root / name).write_text("not an image")
    return root


def snapshot(root):
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(root.rglob("*"))}


@pytest.mark.parametrize("split", ["train", "val"])
def test_listing_equals_torchvisions(pets, split):
    ours, theirs = open_set(f"folder:{pets}", split), ImageFolder(pets / split)
    assert ours.classes == tuple(theirs.classes)
    assert [(ours.path(index), int(ours.labels[index])) for index in range(len(ours))] == theirs.samples
    assert list(ours.image(0).getdata()) == list(theirs[0][0].getdata())


def test_links_are_followed(pets, tree, tmp_path):
    elsewhere = tree(tmp_path / "elsewhere", "cat1.jpg", "cat2.jpg")
    for split in ("train", "val"):
        (pets / split / "cat").symlink_to(elsewhere)
    ours = open_set(f"folder:{pets}", "train")
    assert ours.classes == ("Bee", "ant", "cat") and (ours.labels == 2).sum() == 2


def test_a_broken_link_is_listed_and_unreadable(pets):
    (pets / "val/ant/gone.jpg").symlink_to(pets / "nowhere.jpg")
    ours = open_set(f"folder:{pets}", "val")
    index = [ours.path(index).endswith("gone.jpg") for index in range(len(ours))].index(True)
    with pytest.raises(UnreadableImage, match="No such file"):
        ours.image(index)


@pytest.mark.parametrize("name", ["train/gone", "val/gone", "train"])
def test_a_broken_link_to_a_folder_is_refused(name, pets):
    if (pets / name).exists():
        shutil.rmtree(pets / name)
    (pets / name).symlink_to("/nowhere")
    assert f"{pets / name} is a broken link" in folder_refusal(pets, name.partition("/")[0])


def test_a_test_folder_is_used_as_val_with_a_note(pets):
    (pets / "val").rename(pets / "test")
    ours = open_set(f"folder:{pets}", "val")
    assert len(ours) == 2 and any("test is used as val" in note for note in ours.notes)


@pytest.mark.parametrize(
    ("scheme", "folders"),
    [("masks", "images masks"), ("vocboxes", "JPEGImages Annotations"), ("yolo", "images labels")],
)
@pytest.mark.parametrize("options", ["", "?val=0.2"])
def test_folders_of_scenes_are_not_taken_for_classes(scheme, folders, options, tree, tmp_path):
    tree(tmp_path, *(f"{folder}/{number}.png" for folder in folders.split() for number in range(5)))
    for split in ("train", "val"):
        with pytest.raises(ValueError, match=f"write {scheme}:{tmp_path}"):
            open_set(f"folder:{tmp_path}{options}", split)


def test_val_is_preferred_to_test(pets, tree):
    tree(pets, "test/ant/c.jpg", "test/Bee/d.jpg", "test/Bee/e.jpg")
    assert len(open_set(f"folder:{pets}", "val")) == 2


def test_one_split_alone_opens_with_a_note(pets):
    os.rename(pets / "val", pets / "elsewhere")
    assert any("no val split" in note for note in open_set(f"folder:{pets}", "train").notes)


def test_opening_and_reading_writes_nothing(pets):
    before = snapshot(pets)
    for split in ("train", "val"):
        image_set = open_set(f"folder:{pets}", split)
        assert image_set.fingerprint and image_set.image(0)
    assert snapshot(pets) == before


def test_home_is_expanded(pets, monkeypatch):
    monkeypatch.setenv("HOME", str(pets.parent))
    assert open_set("folder:~/pets", "val").path(0).startswith(str(pets))


def folder_refusal(root, split="train") -> str:
    return set_refusal(f"folder:{root}", split)


# A change of the folder, the path below it that is opened, the split, and a part of the message.
REFUSED = {
    "a missing folder": (lambda pets, tree: None, "a/b", "train", "exists as far as {pets}:"),
    "a file": (lambda pets, tree: (pets / "set.zip").write_bytes(b"PK"), "set.zip", "train", "is a file"),
    "a missing split": (lambda pets, tree: os.rename(pets / "val", pets / "x"), "", "val", "no val or test folder"),
    "other splits": (lambda pets, tree: os.rename(pets / "val", pets / "other"), "", "val", "'other', 'train'"),
    "a split's folder": (lambda pets, tree: None, "train", "train", "give the folder above it, {pets}"),
    "no class folders": (lambda pets, tree: tree(pets / "x", "train/a.jpg", "val/b.jpg"), "x", "train", "per class"),
    "an empty class": (lambda pets, tree: (pets / "train/cow").mkdir(), "", "train", "'cow'"),
    "no image": (lambda pets, tree: (pets / "x/train/ant").mkdir(parents=True), "x", "train", "'ant'"),
    "many classes": (
        lambda pets, tree: tree(pets, *(f"train/x{number}/a.jpg" for number in range(9))),
        "",
        "train",
        "'x0', 'x1', 'x2' and 6 more only in train",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_path_without_class_folders_is_refused(pets, tree, case):
    change, below, split, message = REFUSED[case]
    change(pets, tree)
    assert message.format(pets=pets) in folder_refusal(pets / below, split)


@pytest.mark.parametrize("split", ["train", "val"])
def test_classes_of_one_split_alone_are_named(pets, tree, split):
    tree(pets, "train/cow/a.jpg", "val/dog/a.jpg")
    assert "'cow' only in train; 'dog' only in val" in folder_refusal(pets, split)


def test_a_folder_that_may_not_be_listed_is_named(pets, monkeypatch):
    system = os.open

    def guarded(path, *flags, **options):
        if str(path).endswith("train/Bee"):
            raise PermissionError(13, "Permission denied", str(path))
        return system(path, *flags, **options)

    monkeypatch.setattr(os, "open", guarded)  # the tests may run as root, whom permissions do not stop
    assert f"{pets}/train/Bee (Permission denied)" in folder_refusal(pets)


@pytest.mark.parametrize(
    ("names", "noted"),
    [
        ("art/cat/1 art/dog/1 photo/cat/1 photo/dog/1", True),
        ("train/art/cat/1 train/art/dog/1 train/photo/cat/1 train/photo/dog/1", True),
        ("art/cat/1 art/dog/1 photo/cat/1", False),  # classes that are divided further
        ("art/cat/1 art/dog/1 photo/cat/1 photo/dog/1 photo/2", False),
        ("art/images/1 photo/images/1", False),  # as in Tiny-ImageNet
        ("cat/1 dog/1", False),
    ],
)
def test_a_root_of_domains_is_noted(names, noted, tree, tmp_path):
    """PACS and similar sets: the domains would be read as classes."""
    tree(tmp_path / "set", *(f"{name}.jpg" for name in names.split()))
    notes = [note for note in open_set(f"folder:{tmp_path}/set", "train").notes if "give one domain" in note]
    assert len(notes) == noted and all("'art'" in note and "'cat', 'dog'" in note for note in notes)
    if noted:
        assert open_set(notes[0].rpartition(" ")[2], "train").classes == ("cat", "dog")
