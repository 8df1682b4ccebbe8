"""`check` counts images, finds every damaged file, and reports what to fix."""

import shutil

import pytest
from PIL import ExifTags, Image
from refusals import set_refusal

from imagesets import check
from imagesets.check import check_image_set, render
from imagesets.sets import open_set

NAMES = (*(f"train/ant/{number}.jpg" for number in range(7)), *(f"train/bee/{number}.jpg" for number in range(300)))
VAL = ("val/ant/v.jpg", "val/bee/vv.jpg")


@pytest.fixture
def pets(tree, tmp_path):
    return tree(tmp_path / "pets", *NAMES, *VAL)


def test_images_and_sizes_of_a_sound_set_are_counted(pets, encode):
    (pets / "val/ant/v.jpg").write_bytes(encode(width=70, height=90))
    totals, steps = [], []
    report = check_image_set(f"folder:{pets}", workers=2, start=totals.append, advance=steps.append)
    assert report.ok and report.in_both_splits == ()
    assert totals == [309] and sum(steps) == 309 and len(steps) > 2
    train, val = report.splits
    assert [split.image_set.split for split in report.splits] == ["train", "val"]
    assert len(train.sizes) == 307 and val.sizes.max(axis=0).tolist() == [70, 90]
    text, size = render(report), sum(path.stat().st_size for path in (pets / "train").rglob("*.jpg"))
    assert f"train: 307 images, 2 classes, {size / 1e6:.1f} MB\n" in text
    assert "smallest class ant: 7; largest class bee: 300\n" in text
    assert "width 40 to 70 px, height 30 to 90 px\n" in text and "no problems found" in text and "FIX" not in text


def test_every_unreadable_file_is_listed(pets):
    (pets / "train/ant/3.jpg").write_bytes(b"")
    (pets / "train/bee/7.jpg").write_bytes((pets / "train/bee/7.jpg").read_bytes()[:-20])
    (pets / "val/bee/vv.jpg").write_text("<html>")
    report = check_image_set(f"folder:{pets}")
    unreadable = [path for split in report.splits for path, _ in split.unreadable]
    assert unreadable == [str(pets / name) for name in ("train/ant/3.jpg", "train/bee/7.jpg", "val/bee/vv.jpg")]
    text = render(report)
    assert not report.ok and all(path in text for path in unreadable)
    assert "FIX: 3 unreadable images" in text and "empty file" in text and "truncated" in text


def test_files_that_no_run_reads_are_counted(pets):
    """GIF or HEIC files beside JPEG would otherwise be left out silently."""
    assert "not read" not in render(check_image_set(f"folder:{pets}"))
    for name in ("ant/a.GIF", "ant/b.gif", "bee/README", "bee/.DS_Store"):
        (pets / "train" / name).write_bytes(b"GIF89a")
    report = check_image_set(f"folder:{pets}")
    (note,) = [note for note in report.splits[0].notes if "not read" in note]
    assert report.ok and note.startswith("3 files are not read: their names do not end in .jpg, ")
    assert note.endswith(": 2 .gif, 1 no ending") and not any("not read" in note for note in report.splits[1].notes)


@pytest.mark.parametrize("name", [".ipynb_checkpoints/a.jpg", "@eaDir/a.jpg/a.jpg", "__MACOSX/a.jpg", "._a.jpg"])
def test_hidden_files_are_left_out_and_counted(pets, tree, name):
    before = open_set(f"folder:{pets}", "train")
    tree(pets, f"train/{name}", f"val/ant/{name}")
    report = check_image_set(f"folder:{pets}")
    train = report.splits[0].image_set
    assert report.ok and train.classes == ("ant", "bee") and train.fingerprint == before.fingerprint
    for split in report.splits:
        (note,) = (note for note in split.notes if " left out" in note)
        assert "1 hidden" in note and name.split("/")[0] in note


def test_images_that_viewers_turn_are_counted_and_not_turned(pets, encode):
    exif = Image.Exif()
    for number, orientation in enumerate((0, 1, 3, 6, 9)):
        exif[ExifTags.Base.Orientation] = orientation
        (pets / f"train/ant/{number}.jpg").write_bytes(encode(seed=number, width=50, exif=exif))
    train, val = check_image_set(f"folder:{pets}").splits
    assert any(note.startswith("2 images have an EXIF orientation") for note in train.notes)
    assert not any("EXIF" in note for note in val.notes)
    assert train.sizes[:5].tolist() == [[50, 30]] * 5


def test_a_val_image_that_is_also_in_train_is_named(pets):
    shutil.copy(pets / "train/bee/5.jpg", pets / "val/bee/copy.jpg")
    report = check_image_set(f"folder:{pets}")
    assert report.in_both_splits == ((str(pets / "train/bee/5.jpg"), str(pets / "val/bee/copy.jpg")),)
    assert "FIX: 1 image of val also in train" in render(report)


def test_one_split_is_checked_without_decoding(pets):
    (pets / "val/ant/v.jpg").write_bytes(b"")
    report = check_image_set(f"folder:{pets}", "val", read_all=False)
    assert report.ok and [split.image_set.split for split in report.splits] == ["val"]
    assert not len(report.splits[0].sizes) and " px" not in render(report) and "listed, not decoded" in render(report)


@pytest.mark.parametrize("url", ["digits:", "tiny:"])
def test_embedded_sets_are_sound(url):
    report = check_image_set(url)
    assert report.ok and "in memory" in render(report)


def test_one_class_is_too_few_to_evaluate_on(tree, tmp_path):
    root = tree(tmp_path, "train/ant/1.jpg", "val/ant/2.jpg")
    for report in (check_image_set(f"folder:{root}"), check_image_set(f"folder:{root}", read_all=False)):
        assert len(report.problems) == 1 and report.problems[0].startswith(
            "only one class, 'ant', where accuracy needs"
        )
    assert check_image_set(f"images:{root}").ok


def test_a_split_or_set_that_cannot_be_opened_is_one_problem(pets, tree, tmp_path):
    shutil.rmtree(pets / "val")
    report = check_image_set(f"folder:{pets}")
    assert len(report.splits) == 1 and len(report.problems) == 1 and "no val or test folder" in report.problems[0]
    assert len(check_image_set(f"folder:{tmp_path}/gone").problems) == 1
    text = render(check_image_set("fodler:x"))
    assert "did you mean 'folder:x'?" in text and "decoded" not in text
    root = tree(tmp_path / "other", "train/a/1.jpg", "val/b/1.jpg")
    assert check_image_set(f"folder:{root}").problems[0].endswith("make them the same")


def test_a_set_without_training_images_is_noted(pets):
    shutil.rmtree(pets / "train")
    report = check_image_set(f"folder:{pets}")
    assert report.ok and [len(split.image_set) for split in report.splits] == [len(list((pets / "val").rglob("*.*")))]
    (note,) = report.notes
    assert "no train folder" in note
    shutil.rmtree(pets / "val")
    assert not check_image_set(f"folder:{pets}").ok


def test_images_with_several_pages_are_counted(pets, photo):
    pages = [photo(seed=number) for number in range(3)]
    stack = pets / "train/ant/stack.tif"
    pages[0].save(stack, save_all=True, append_images=pages[1:])
    photo().save(pets / "train/ant/single.tif")
    report = check_image_set(f"folder:{pets}")
    (pages_problem,) = (problem for problem in report.problems if "pages" in problem)
    assert "in train: 1, with 3 pages in all" in pages_problem
    train = open_set(f"folder:{pets}", "train")
    stack_index = [train.path(index) for index in range(len(train))].index(str(stack))
    (warning,) = train.subset([stack_index], "stack").warnings
    assert "1 images of train: 1, with 3 pages in all" in warning
    assert open_set(f"folder:{pets}", "val").warnings == ()
    assert train.image(stack_index).tobytes() == pages[0].tobytes()


@pytest.mark.parametrize("counts", [(2, 307, 3, 1), (2, 307, 3, 2), (2, 306, 3, 1)])
def test_duplicates_of_a_published_set_are_a_note(pets, monkeypatch, counts):
    """Removing CIFAR-100's own ten would make numbers incomparable; others are to be removed."""
    shutil.copy(pets / "train/bee/5.jpg", pets / "val/bee/copy.jpg")
    monkeypatch.setattr(check, "PUBLISHED", {counts: "Pets"})
    report = check_image_set(f"folder:{pets}")
    is_published = counts == (2, 307, 3, 1)
    assert report.ok == is_published and len(report.in_both_splits) == 1
    assert ("note: 1 image of val also in train" in render(report)) == is_published == ("FIX" not in render(report))


@pytest.fixture
def few(tree, tmp_path):
    return tree(tmp_path / "few", "train/ant/0.jpg", "train/ant/1.jpg", "train/bee/2.jpg", *VAL)


def notes_on_train(folder) -> str:
    return "\n".join(check_image_set(f"folder:{folder}").splits[0].notes)


def test_images_and_folders_that_are_in_no_class_of_their_own_are_named(few, tree):
    assert "beside" not in notes_on_train(few) and "in a class folder" not in notes_on_train(few)
    tree(few, "train/loose.jpg", "train/ant/black/a.jpg", "train/ant/red/a.jpg", "test/ant/t.jpg")
    notes = notes_on_train(few)
    assert f"not read: 1 image beside the class folders, such as {few}/train/loose.jpg" in notes
    assert "count as one class, such as 'black', 'red' in ant" in notes
    assert "folder test is not read" in check_image_set(f"folder:{few}").splits[1].notes


def test_copies_within_a_split_are_counted_and_other_labels_named(few, encode):
    assert "of other images" not in notes_on_train(few)
    for name in ("ant/copy.jpg", "bee/first.jpg"):
        (few / "train" / name).write_bytes((few / "train/ant/0.jpg").read_bytes())
    notes = notes_on_train(few)
    assert "2 duplicates of other images, 1 with another label" in notes
    assert f"such as {few}/train/bee/first.jpg of {few}/train/ant/0.jpg" in notes
    (few / "train/bee/first.jpg").write_bytes(encode(seed=99))
    assert f"1 duplicate of other images, such as {few}/train/ant/copy.jpg" in notes_on_train(few)


def test_two_spellings_of_a_split_are_refused(few, tree):
    tree(few, "Train/ant/a.jpg")
    assert f"{few} holds both Train and train; rename or remove one" in set_refusal(f"folder:{few}", "train")


@pytest.mark.parametrize(
    ("names", "words"), [(("Bee",), "'Bee', 'bee'"), (("07", "7"), "'07', '7'"), (("nan",), "nan")]
)
def test_classes_that_seem_to_be_one_or_none_are_named(few, tree, names, words):
    tree(few, *(f"{split}/{name}/{split}.jpg" for split in ("train", "val") for name in names))
    assert words in notes_on_train(few)
