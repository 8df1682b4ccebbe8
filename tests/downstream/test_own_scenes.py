"""Scenes that people bring: masks of their own classes as values or colours, Pascal VOC, COCO files of their own."""

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from refusals import refusal
from toy_scenes import export_of, workspace

from bench.about import about
from bench.commands.data import check_scenes
from bench.run.prepare import fits, named_urls, open_data
from bench.run.suites import catalogue
from downstream.data.listing import IGNORED
from downstream.data.scenes import decode_scenes, open_scenes, scene_mask, tiny_folder
from downstream.data.tiny_scenes import COUNTS
from downstream.layouts.masks import TINY_COLOURS, class_of_value, parse_class_list
from downstream.tasks.maskrcnn_coco import PROTOCOLS as MASKRCNN
from downstream.tasks.segmenter_cityscapes import PROTOCOLS as SEGMENTER
from downstream.tasks.upernet_ade20k import PROTOCOLS as UPERNET


@pytest.fixture
def own(tmp_path):
    """A set of the layout masks:, two classes in colours."""
    return tiny_folder("masks", tmp_path)


def classes(scenes, index: int) -> np.ndarray:
    """Classes (H, W) of a scene, read as training reads them."""
    from downstream.data.segmentation_data import ReadMask

    with Image.open(scenes.mask_path(index)) as mask:
        return ReadMask(scenes)({"sample_idx": index, "ori_shape": mask.size[::-1]})["gt_seg_map"]


@pytest.mark.parametrize(
    ("text", "names", "keys"),
    [
        ("road\n\nrail track\n", ("road", "rail track"), [(0,), (1,)]),
        ("7 road\n3 rail track", ("road", "rail track"), [(7,), (3,)]),
        ("0 0 0 road\n255 255 255 rail 2\n", ("road", "rail 2"), [(0, 0, 0), (255, 255, 255)]),
        ("0 background\n255 cell\n", ("background", "cell"), [(0,), (255,)]),
    ],
)
def test_lists_of_classes(text, names, keys):
    assert parse_class_list(text) == (names, keys)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "classes.txt names no class; write a line for each class, all as NAME, all as NUMBER NAME"),
        ("road\n7 rail", "classes.txt, line 2: '7 rail'; write a line"),
        ("1 2 road", "classes.txt, line 1: '1 2 road'; write"),
        ("7 road\n8", "classes.txt, line 2: '8'; write"),
        ("256 road", "classes.txt, line 1: 256; masks hold values"),
        ("7 road", "classes.txt lists 1; a score needs 2"),
        ("0 0 256 road", "classes.txt, line 1: 256; masks hold"),
        ("7 road\n7 rail", "two classes have one value"),
        ("road\nroad", "two classes have one name"),
    ],
)
def test_wrong_lists_of_classes(text, said):
    assert said in refusal(parse_class_list, text)


def test_numbers_of_no_class():
    table = class_of_value([7, 3, 0])
    assert (table[7], table[3], table[0], table[255]) == (0, 1, 2, IGNORED)
    assert {table[value] for value in range(256) if value not in (0, 3, 7, 255)} == {3}
    assert class_of_value([0, 255])[255] == 1


def binary(root: Path, mode: str, lines: str, scenes: int = 6) -> str:
    """A set of discs on noise whose masks are 0 and 255, and its URL."""
    generator = np.random.RandomState(0)
    rows, columns = np.mgrid[:32, :48]
    for split in COUNTS:
        for number in range(scenes):
            row, column = generator.randint(8, 24, 2)
            disc = (rows - row) ** 2 + (columns - column) ** 2 < 60
            pixels = np.repeat((generator.randint(0, 90, disc.shape) + 120 * disc)[..., None], 3, axis=2)
            for folder, image in (("images", Image.fromarray(pixels.astype(np.uint8))), ("masks", disc)):
                path = root / folder / split / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                if folder == "masks":
                    image = Image.fromarray((255 * disc).astype(np.uint8)).convert(mode)
                image.save(path)
    (root / "classes.txt").write_text(lines)
    return f"masks:{root}"


COLOURS = "0 0 0 background\n255 255 255 cell\n"


@pytest.mark.parametrize(
    ("mode", "lines"), [("L", "0 background\n255 cell\n"), ("L", COLOURS), ("1", COLOURS), ("RGB", COLOURS)]
)
def test_binary_masks_of_0_and_255_are_two_classes(mode, lines, tmp_path, capsys):
    url = binary(tmp_path / "cells", mode, lines)
    scenes = open_scenes(url, "val", tmp_path)
    first = classes(scenes, 0)
    assert {*np.unique(first)} == {0, 1} and np.array_equal(first, scene_mask(scenes, 0))
    assert not decode_scenes(scenes)[0] and scenes.pixels.warnings() == []
    task = replace(UPERNET["ade_linear@smoke"].task, steps=2, warmup=0, batch=2, crop=32, stride=32, scale=(48, 32))
    outcome = task.run(export_of(), workspace(tmp_path, url))
    share = np.mean([scene_mask(scenes, index) == 0 for index in range(6)])
    floor = outcome.facts["floor"]
    assert floor["prediction"] == "background everywhere"
    assert floor["metrics"] == pytest.approx({"mIoU": 50 * share, "aAcc": 100 * share, "mAcc": 50})
    assert "no class" not in capsys.readouterr().err


def test_masks_that_hold_one_class_are_said_and_not_scored(capsys, tmp_path):
    url = binary(tmp_path / "cells", "L", "background\ncell\n")
    code, out = check_scenes(url, read_all=True), capsys.readouterr().out
    assert code == 1 and out.count("1 of 2 classes, cell") == 2 and out.count("% of the pixels in the masks") == 2
    assert "FIX: " in out and "'255 cell' in classes.txt" in out
    with pytest.raises(ValueError, match="hold background alone"):
        UPERNET["ade_linear@smoke"].task.run(export_of(), workspace(tmp_path, url))


def test_a_changed_list_of_classes_is_another_set(tmp_path):
    """Or results and trainings on the old classes would be taken for those on the new ones."""
    url = binary(tmp_path / "cells", "L", "0 background\n255 cell\n")
    before = open_scenes(url, "val", tmp_path).fingerprint
    (tmp_path / "cells" / "classes.txt").write_text("255 cell\n0 background\n")
    assert open_scenes(url, "val", tmp_path).fingerprint != before


def test_absent_classes_and_ignored_pixels_are_said_by_run_and_result(own, tmp_path, capsys):
    as_values(own, (0, 1))
    (own / "classes.txt").write_text("ground\ndigit\nunicorn\n")
    outcome = replace(UPERNET["ade_linear@smoke"].task, steps=1, warmup=0).run(
        export_of(), workspace(tmp_path, f"masks:{own}", limit=None)
    )
    ignored, absent = outcome.facts["masks"]["val"]
    labelled = outcome.arrays["areas"][..., 2].sum() / (24 * 64 * 96)
    assert (
        f"{ignored}\n" in capsys.readouterr().err
        and ignored.startswith(f"{100 * (1 - labelled):.1f} %")
        and "1 of 3 classes, unicorn" in absent
    )


def as_values(own: Path, values: tuple[int, int], palette: bool = False) -> None:
    """Store the colours of a tiny set's masks as values, or as places in a palette."""
    for path in own.rglob("masks/**/*.png"):
        shown = np.asarray(Image.open(path))
        found = np.full(shown.shape[:2], 255, np.uint8)
        for colour, value in zip(TINY_COLOURS, values, strict=True):
            found[(shown == colour).all(2)] = value
        image = Image.fromarray(found, "P" if palette else "L")
        if palette:
            colours = [(0, 0, 0)] * 255 + [(255, 255, 255)]
            for colour, value in zip(TINY_COLOURS, values, strict=True):
                colours[value] = colour
            image.putpalette([channel for colour in colours for channel in colour])
        image.save(path)


def test_values_numbers_colours_and_palettes_are_the_same_scenes(own, tmp_path):
    scenes = open_scenes("tiny-masks:", "val", tmp_path)
    coloured = [classes(scenes, index) for index in range(4)]
    assert scenes.classes == ("ground", "digit") and not decode_scenes(scenes)[0]
    assert {int(value) for mask in coloured for value in np.unique(mask)} == {0, 1, IGNORED}
    as_values(own, (9, 4), palette=True)
    assert all(np.array_equal(classes(scenes, index), mask) for index, mask in enumerate(coloured))
    for text, before in (("9 ground\n4 digit\n", None), ("ground\ndigit\n", (0, 1))):
        if before:
            for path in own.rglob("masks/**/*.png"):
                values = np.asarray(Image.open(path))
                Image.fromarray(np.select([values == 9, values == 4], before, 255).astype(np.uint8)).save(path)
        (own / "classes.txt").write_text(text)
        again = open_scenes(f"masks:{own}", "val", tmp_path)
        assert not decode_scenes(again)[0]
        assert all(np.array_equal(classes(again, index), mask) for index, mask in enumerate(coloured)), text


def test_unknown_values_and_colours_are_one_line(own, tmp_path):
    path = next((own / "masks" / "val").iterdir())
    pixels = np.asarray(Image.open(path)).copy()
    pixels[5, 7] = (1, 2, 3)
    Image.fromarray(pixels).save(path)
    (line,) = decode_scenes(open_scenes(f"masks:{own}", "val", tmp_path))[0].values()
    assert line.startswith(f"{path}: the mask shows the colour 1 2 3 ") and "list of classes" in line
    as_values(own, (0, 1))
    (own / "classes.txt").write_text("ground\ndigit")
    values = np.asarray(Image.open(path)).copy()
    values[5, 7] = 77
    Image.fromarray(values).save(path)
    (line,) = decode_scenes(open_scenes(f"masks:{own}", "val", tmp_path))[0].values()
    assert f"{path}: the mask holds the value 77, allowed are 0 to 1, 255" in line


def test_masks_that_do_not_fit_are_one_line(own, tmp_path):
    refused = partial(refusal, open_scenes, f"masks:{own}", "val", tmp_path)
    picture = next((own / "images" / "val").iterdir())
    Image.open(picture).save(picture.with_suffix(".jpg"))
    assert f"two images of val have the mask masks/val/{picture.name}" in refused()
    picture.with_suffix(".jpg").unlink()
    (own / "masks" / "val" / picture.name).unlink()
    assert f"1 of 24 annotations of val are not there, such as masks/val/{picture.name}" in refused()
    (own / "classes.txt").unlink()
    assert "no file classes.txt there; put images into images/train" in refused()


def test_pascal_voc(tmp_path):
    for split, count in COUNTS.items():
        scenes = open_scenes("tiny-voc:", split, tmp_path)
        assert len(scenes) == count and len(scenes.classes) == 21 and not decode_scenes(scenes)[0]
    folder = tiny_folder("voc", tmp_path)
    outer = tmp_path / "VOCdevkit"
    outer.mkdir()
    folder.rename(outer / "VOC2012")
    assert open_scenes(f"voc:{tmp_path}", "val", tmp_path).fingerprint
    next((outer / "VOC2012" / "SegmentationClass").glob("val*")).unlink()
    with pytest.raises(ValueError, match=r"1 of 24 files of val are not there, such as SegmentationClass/val_\d+.png"):
        open_scenes(f"voc:{tmp_path}", "val", tmp_path)


@pytest.mark.parametrize("file", ["classes.txt", "labelmap.txt"])
def test_own_classes_in_the_layout_of_voc(file, tmp_path):
    """As a list of values, or of colours as CVAT writes it."""
    root = tiny_folder("voc", tmp_path)
    own, colours = [0, 1, 2, 3, 4], [(0, 0, 0), (255, 255, 255), (128, 0, 0), (0, 128, 0), (128, 128, 0)]
    before = open_scenes(f"voc:{root}", "val", tmp_path)
    found = [classes(before, index) for index in range(3)]
    assert f"{21 - len(own)} of 21 classes" in before.pixels.warnings()[-1]
    if file == "classes.txt":
        text = "\n".join(f"{value} thing {value}" for value in own)
    else:
        text = "# label:color_rgb:parts:actions\n" + "".join(
            f"thing {value}:{','.join(map(str, colour))}::\n" for value, colour in zip(own, colours, strict=True)
        )
        ignored = (1, 1, 1)
        for path in (root / "SegmentationClass").iterdir():
            values = np.asarray(Image.open(path))
            table = np.array([*colours, *[ignored] * 251], np.uint8)
            Image.fromarray(table[values]).save(path)
        text += "void:1,1,1::\n"
    (root / file).write_text(text)
    after = open_scenes(f"voc:{root}", "val", tmp_path)
    assert after.classes[:5] == tuple(f"thing {value}" for value in own)
    assert after.fingerprint != before.fingerprint and not decode_scenes(after)[0]
    void = IGNORED if file == "classes.txt" else 5
    for index, mask in enumerate(found):
        assert np.array_equal(classes(after, index), np.where(mask == IGNORED, void, mask))
    (root / file).write_text("wrong:1,2::\n" if file == "labelmap.txt" else "1 2 wrong\n")
    with pytest.raises(ValueError, match=f"{file}, line 1"):
        open_scenes(f"voc:{root}", "val", tmp_path)


def own_coco(tmp_path: Path, scale: float = 1.25) -> Path:
    """The tiny set of things as a user's own: three categories of other numbers, images of other sizes."""
    root = tmp_path / "own"
    (root / "annotations").mkdir(parents=True)
    tiny = tiny_folder("coco", tmp_path)
    for split in COUNTS:
        content = json.loads((tiny / "annotations" / f"instances_{split}2017.json").read_text())
        (root / split).mkdir()
        for entry in content["images"]:
            entry |= {"width": int(entry["width"] * scale), "height": int(entry["height"] * scale)}
            image = Image.open(tiny / f"{split}2017" / entry["file_name"])
            image.resize((entry["width"], entry["height"])).save(root / split / entry["file_name"])
        content["categories"] = [{"id": number, "name": f"thing {number}"} for number in (5, 17, 30)]
        kept = [each for each in content["annotations"] if each["category_id"] in (2, 3) and not each["iscrowd"]]
        for each in kept:
            each["category_id"] = {2: 5, 3: 17}[each["category_id"]]
            each["bbox"] = [scale * value for value in each["bbox"]]
            each["area"] *= scale**2
            each["segmentation"] = [[scale * value for value in outline] for outline in each["segmentation"]]
        content["annotations"] = kept
        (root / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))
    return root


def test_own_things(tmp_path):
    root = own_coco(tmp_path)
    scenes = open_scenes(f"coco:{root}", "val", tmp_path)
    assert not decode_scenes(scenes)[0] and dict(scenes.listing.categories) == {n: f"thing {n}" for n in (5, 17, 30)}
    assert "1 of 3 categories have no object in val, such as thing 30" in scenes.notes
    path = root / "annotations" / "instances_val.json"
    content = json.loads(path.read_text())
    for change, said in (
        ({"segmentation": []}, "has a box but no outline"),
        ({"category_id": 6}, "is of category 6, which is none of its 3 categories"),
    ):
        changed = [content["annotations"][0] | change, *content["annotations"][1:]]
        path.write_text(json.dumps(content | {"annotations": changed}))
        with pytest.raises(ValueError, match=re.escape(said)):
            open_scenes(f"coco:{root}", "val", tmp_path)


def test_segmentation_runs_on_own_masks_and_nothing_else_does(own, tmp_path):
    protocols = catalogue().protocols
    images = open_data("mine", f"masks:{own}", workspace(tmp_path, ""))
    keys = {chosen.key for chosen in protocols.values() if fits(chosen, images)}
    assert keys == {"upernet_ade20k", "segmenter_cityscapes", "segmentation_linear", "dense_knn"}
    assert "segmenter_cityscapes, upernet_ade20k" in "\n".join(about("masks"))
    assert "tiny-masks" not in named_urls((), "smoke") and "tiny-ade20k" in named_urls((), "smoke")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["upernet@smoke", pytest.param("segmenter_linear@smoke", marks=pytest.mark.exhaustive)]
)
def test_own_masks_are_learnt(name, own, tmp_path):
    """By the unchanged recipe, on images of another size than the tiny sets'."""
    for path in [*own.rglob("*.png")]:
        image = Image.open(path)
        image.resize((120, 80), Image.Resampling.NEAREST).save(path)
    task = (UPERNET | SEGMENTER)[name].task
    outcome = task.run(export_of(), workspace(tmp_path, f"masks:{own}", limit=None))
    assert next(iter(outcome.arrays.values())).shape == (24, 2, 3)
    assert outcome.numbers["mIoU"] > 55 > outcome.facts["floor"]["metrics"]["mIoU"] + 5
    (said,) = [line for line in outcome.facts["warnings"] if "were chosen for" in line]
    assert "crop=48" in said and said.endswith("this set has 64 and 2")


@pytest.mark.exhaustive
def test_own_things_are_learnt(tmp_path):
    task = MASKRCNN["maskrcnn@smoke"].task
    space = workspace(tmp_path, f"coco:{own_coco(tmp_path)}", limit=None)
    before = replace(task, lr=1e-12, epochs=1, milestones=()).run(export_of(), space)
    after = task.run(export_of(), space)
    assert after.numbers["box_AP50"] > 10 > 2 > before.numbers["box_AP50"]
    assert any("were chosen for COCO" in line for line in after.facts["warnings"])
