"""Few-shot, fraction and list-file subsets: balance, nesting, repeatability and the sizes of SimCLR's lists."""

import numpy as np
import pytest

from imagesets.selection import quotas
from imagesets.sets import open_set
from imagesets.subsets import class_counts, few_shot, fraction, from_list

WNIDS = ("n01440764", "n01443537")
TRAIN = tuple(f"train/{wnid}/{wnid}_{number}.JPEG" for wnid in WNIDS for number in (1, 2, 10))
VAL = tuple(f"val/{wnid}/v.JPEG" for wnid in WNIDS)


@pytest.fixture(scope="module")
def digits():
    return open_set("digits:", "train")


@pytest.fixture
def photos(tree, tmp_path):
    return open_set(f"imagenet:{tree(tmp_path / 'imagenet', *TRAIN, *VAL)}", "train")


def members(image_set) -> set[str]:
    return {image_set.path(index) for index in range(len(image_set))}


@pytest.mark.parametrize("per_class", [1, 2, 5, 120])
def test_few_shot_is_balanced_nested_and_seeded(digits, per_class):
    chosen = few_shot(digits, per_class, seed=3)
    assert (class_counts(chosen) == per_class).all() and len(members(chosen)) == 10 * per_class
    assert chosen.fingerprint == few_shot(digits, per_class, seed=3).fingerprint
    assert chosen.fingerprint != few_shot(digits, per_class, seed=4).fingerprint
    assert members(chosen) < members(few_shot(digits, per_class + 1, seed=3))


def test_more_shots_than_a_class_has_images_are_refused(digits):
    with pytest.raises(ValueError, match=r"class '8' has 124; ask for 124 or fewer"):
        few_shot(digits, 125, seed=0)
    with pytest.raises(ValueError, match="give 1 or more"):
        few_shot(digits, 0, seed=0)


@pytest.mark.parametrize(("share", "size"), [(0.01, 12), (0.1, 129), (0.5, 648), (1.0, 1297), (0.0001, 10)])
def test_fraction_is_balanced_with_at_least_one_image_per_class(digits, share, size):
    chosen = fraction(digits, share, seed=0)
    assert len(chosen) == size
    assert class_counts(chosen).min() >= 1 and (share == 1 or np.ptp(class_counts(chosen)) <= 1)
    assert chosen.fingerprint == fraction(digits, share, seed=0).fingerprint


@pytest.mark.parametrize("share", [0, -0.1, 1.5, 10])
def test_a_share_out_of_range_is_refused(digits, share):
    with pytest.raises(ValueError, match="up to 1"):
        fraction(digits, share, seed=0)


@pytest.mark.parametrize(("total", "thirteens"), [(12811, 811), (128116, None)])
def test_quotas_equal_the_sizes_of_simclrs_lists(total, thirteens):
    """1percent.txt: 811 classes of 13 and 189 of 12 images; ImageNet-1k's classes have 732 to 1300 images."""
    shares = quotas(np.full(1000, 1281), total)
    assert shares.sum() == total and np.ptp(shares) == 1
    assert thirteens is None or (shares == 13).sum() == thirteens


def write(path, *lines):
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_a_list_gives_its_images_in_its_order(photos, tmp_path):
    lines = ["n01443537_10.JPEG", "n01440764_2.JPEG", "n01440764_10.JPEG"]
    chosen = from_list(photos, write(tmp_path / "1percent.txt", *lines, ""))
    assert [chosen.path(index).split("/")[-1] for index in range(3)] == lines
    assert chosen.labels.tolist() == [1, 0, 0] and chosen.url.endswith("#list-1percent.txt")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["n01440764_1.JPEG", "n01440764_7.JPEG", "x.JPEG"], "2 of 3 lines name no image .* 'n01440764_7.JPEG' first"),
        (["n01440764_1.JPEG", "n01440764_1.JPEG"], "listed more than once"),
        (["", " "], "lists no image"),
    ],
)
def test_a_list_that_does_not_fit_is_refused(photos, tmp_path, lines, message):
    with pytest.raises(ValueError, match=message) as error:
        from_list(photos, write(tmp_path / "list.txt", *lines))
    assert "\n" not in str(error.value)


def test_a_list_that_cannot_be_read_is_refused(photos, tmp_path):
    with pytest.raises(ValueError, match="No such file"):
        from_list(photos, tmp_path / "gone.txt")
    (tmp_path / "photo.jpg").write_bytes(b"\xff\xd8\xff\xe0")
    with pytest.raises(ValueError, match="UTF-8"):
        from_list(photos, tmp_path / "photo.jpg")


def test_a_name_of_two_images_is_refused(tree, tmp_path):
    root = tree(tmp_path / "pets", "train/a/1.jpg", "train/b/1.jpg")
    with pytest.raises(ValueError, match=r"more than one image called '1\.jpg'"):
        from_list(open_set(f"folder:{root}", "train"), write(tmp_path / "list.txt", "1.jpg"))
