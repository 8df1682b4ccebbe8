"""Users' own scenes: masks with their own classes as values or colours, Pascal VOC, COCO files."""

import json
import re
import struct
import zlib
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from deep_images import DEEP_COLOUR
from PIL import Image
from refusals import refusal
from toy_scenes import export_of, workspace

from bench.commands.data import check_scenes
from bench.commands.list import about
from bench.run.prepare import fits, named_urls, open_data
from bench.run.suites import catalogue
from downstream.data.listing import IGNORED, Listing
from downstream.data.scenes import check_palettes, decode_scenes, open_scenes, scene_depth, scene_mask, tiny_folder
from downstream.data.tiny_scenes import COUNTS
from downstream.layouts.masks import TINY_COLOURS, parse_class_list, read_classes
from downstream.tasks.dense_knn import PROTOCOLS as DENSE_KNN
from downstream.tasks.maskrcnn_coco import PROTOCOLS as MASKRCNN
from downstream.tasks.segmentation_linear import PROTOCOLS as SEGMENTATION_LINEAR
from downstream.tasks.segmenter_cityscapes import PROTOCOLS as SEGMENTER
from downstream.tasks.upernet_ade20k import PROTOCOLS as UPERNET
from downstream.tasks.video_propagation import read_truth


@pytest.fixture
def masks_set(tmp_path):
    """A folder in the layout masks:, with two classes in colours."""
    return tiny_folder("masks", tmp_path)


def mask_classes(scenes, index: int) -> np.ndarray:
    """Classes (H, W) of a scene, as training reads them."""
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
def test_class_lists_are_parsed(text, names, keys):
    assert parse_class_list(text) == (names, keys)


def test_wrong_class_lists_are_refused():
    for text, message in [
        ("", "classes.txt names no class"),
        ("road\n7 rail", "classes.txt, line 2: '7 rail'"),
        ("1 2 road", "classes.txt, line 1: '1 2 road'"),
        ("7 road\n8", "classes.txt, line 2: '8'"),
        ("256 road", "classes.txt, line 1: 256"),
        ("7 road", "classes.txt lists 1"),
        ("0 0 256 road", "classes.txt, line 1: 256"),
        ("7 road\n7 rail", "two classes have one value"),
        ("road\nroad", "two classes have one name"),
    ]:
        assert message in refusal(parse_class_list, text)


def write_binary_set(root: Path, mode: str, lines: str, scenes: int = 6) -> str:
    """Write a set of discs on noise with masks of 0 and 255, and return its URL."""
    generator = np.random.RandomState(0)
    rows, columns = np.mgrid[:32, :48]
    for split in COUNTS:
        for number in range(scenes):
            row, column = generator.randint(8, 24, 2)
            disc = (rows - row) ** 2 + (columns - column) ** 2 < 60
            pixels = np.repeat((generator.randint(0, 90, disc.shape) + 120 * disc)[..., None], 3, axis=2)
            mask = Image.fromarray((255 * disc).astype(np.uint8)).convert(mode)
            for folder, image in (("images", Image.fromarray(pixels.astype(np.uint8))), ("masks", mask)):
                path = root / folder / split / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                image.save(path)
    (root / "classes.txt").write_text(lines)
    return f"masks:{root}"


COLOURS = "0 0 0 background\n255 255 255 cell\n"


def test_binary_masks_of_0_and_255_are_two_classes(tmp_path, capsys, on_terminal):
    for mode, lines in (("L", "0 background\n255 cell\n"), ("1", COLOURS), ("RGB", COLOURS), ("L", COLOURS)):
        url = write_binary_set(tmp_path / "cells", mode, lines)
        scenes = open_scenes(url, "val", tmp_path)
        first_mask = mask_classes(scenes, 0)
        assert {*np.unique(first_mask)} == {0, 1} and np.array_equal(first_mask, scene_mask(scenes, 0)), (mode, lines)
        assert not decode_scenes(scenes)[0] and scenes.pixels.warnings() == [], (mode, lines)
    task = replace(UPERNET["ade_linear@smoke"].task, steps=2, warmup=0, batch=2, crop=32, stride=32, scale=(48, 32))
    outcome = task.run(export_of(), workspace(tmp_path, url))
    background_share = np.mean([scene_mask(scenes, index) == 0 for index in range(6)])
    floor = outcome.facts["floor"]
    assert floor["prediction"] == "background everywhere"
    metrics = {"mIoU": 50 * background_share, "aAcc": 100 * background_share, "mAcc": 50}
    assert floor["metrics"] == pytest.approx(metrics)
    assert "no class" not in capsys.readouterr().err


def test_masks_of_a_single_class_are_reported_and_not_scored(capsys, on_terminal, tmp_path):
    url = write_binary_set(tmp_path / "cells", "L", "background\ncell\n")
    code, out = check_scenes(url, read_all=True), capsys.readouterr().out
    assert code == 1 and out.count("1 of 2 classes, cell") == 2 and out.count("% of the pixels in the masks") == 2
    assert "FIX: " in out and "'255 cell' in classes.txt" in out
    with pytest.raises(ValueError, match="hold background alone"):
        UPERNET["ade_linear@smoke"].task.run(export_of(), workspace(tmp_path, url))


def test_another_class_list_gives_another_fingerprint(tmp_path):
    """Otherwise results of the old classes would be reused for the new ones."""
    url = write_binary_set(tmp_path / "cells", "L", "0 background\n255 cell\n")
    before = open_scenes(url, "val", tmp_path).fingerprint
    (tmp_path / "cells" / "classes.txt").write_text("255 cell\n0 background\n")
    assert open_scenes(url, "val", tmp_path).fingerprint != before


@pytest.mark.parametrize(
    "task",
    [
        replace(UPERNET["ade_linear@smoke"].task, steps=1, warmup=0),
        replace(SEGMENTATION_LINEAR["segmentation_linear@smoke"].task, lr=(1e-2,), kept=1, steps=1, warmup=0),
        DENSE_KNN["dense_knn@smoke"].task,
    ],
    ids=lambda task: task.KEY,
)
def test_absent_classes_and_ignored_pixels_are_reported(task, masks_set, tmp_path, capsys, on_terminal):
    store_as_values(masks_set, (0, 1))
    (masks_set / "classes.txt").write_text("ground\ndigit\nunicorn\n")
    outcome = task.run(export_of(), workspace(tmp_path, f"masks:{masks_set}", limit=None))
    ignored, absent = outcome.facts["masks"]["val"]
    masks = [np.asarray(Image.open(path)) for path in masks_set.glob("masks/val/*.png")]
    share = 100 * np.mean([(mask == 255).mean() for mask in masks])
    assert ignored.startswith(f"{share:.1f} %") and "1 of 3 classes, unicorn" in absent
    assert f"{ignored}\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    "task",
    [
        replace(SEGMENTATION_LINEAR["segmentation_linear@smoke"].task, lr=(1e-2, 1e-3), kept=1, steps=1, warmup=0),
        DENSE_KNN["dense_knn@capi_smoke"].task,
    ],
    ids=lambda task: task.KEY,
)
def test_held_out_images_without_labels_choose_nothing(task, masks_set, tmp_path):
    for path in sorted(masks_set.glob("masks/train/*.png"))[1:]:
        Image.new("RGB", Image.open(path).size, (255, 255, 255)).save(path)
    message = refusal(task.run, export_of(), workspace(tmp_path, f"masks:{masks_set}", limit=None))
    assert "held-out training images" in message and "holdout" in message


def store_as_values(masks_set: Path, values: tuple[int, int], palette: bool = False) -> None:
    """Store the colours of a tiny set's masks as values, or as palette indices."""
    for path in masks_set.rglob("masks/**/*.png"):
        pixels = np.asarray(Image.open(path))
        values_of_pixels = np.full(pixels.shape[:2], 255, np.uint8)
        for colour, value in zip(TINY_COLOURS, values, strict=True):
            values_of_pixels[(pixels == colour).all(2)] = value
        image = Image.fromarray(values_of_pixels, "P" if palette else "L")
        if palette:
            colours = [(0, 0, 0)] * 255 + [(255, 255, 255)]
            for colour, value in zip(TINY_COLOURS, values, strict=True):
                colours[value] = colour
            image.putpalette([channel for colour in colours for channel in colour])
        image.save(path)


def test_values_colours_and_palettes_give_the_same_masks(masks_set, tmp_path):
    scenes = open_scenes("tiny-masks:", "val", tmp_path)
    coloured = [mask_classes(scenes, index) for index in range(4)]
    assert scenes.classes == ("ground", "digit") and not decode_scenes(scenes)[0]
    assert {int(value) for mask in coloured for value in np.unique(mask)} == {0, 1, IGNORED}
    store_as_values(masks_set, (9, 4), palette=True)
    assert all(np.array_equal(mask_classes(scenes, index), mask) for index, mask in enumerate(coloured))
    for text, new_values in (("9 ground\n4 digit\n", None), ("ground\ndigit\n", (0, 1))):
        if new_values:
            for path in masks_set.rglob("masks/**/*.png"):
                values = np.asarray(Image.open(path))
                Image.fromarray(np.select([values == 9, values == 4], new_values, 255).astype(np.uint8)).save(path)
        (masks_set / "classes.txt").write_text(text)
        reopened = open_scenes(f"masks:{masks_set}", "val", tmp_path)
        assert not decode_scenes(reopened)[0]
        assert all(np.array_equal(mask_classes(reopened, index), mask) for index, mask in enumerate(coloured)), text


def write_palettes(root: Path, palettes: dict[str, list[int]]) -> str:
    """A set with masks of 0 and 1. palettes: SPLIT/NAME of an image -> red, green and blue of 0, of 1, ..."""
    names = {f"images/{name}": f"masks/{name}" for name in palettes}
    url = write_masks(root, names)
    for name, palette in palettes.items():
        mask = Image.fromarray(np.asarray(Image.open(root / "masks" / name)), "P")
        mask.putpalette(palette)
        mask.save(root / "masks" / name)
    return url


@pytest.mark.parametrize("changed", ["train/b.png", "val/c.png"])
@pytest.mark.parametrize("name", ["segmentation_linear@smoke", "ade_linear@smoke"])
def test_palettes_that_differ_by_file_are_refused(name, changed, tmp_path, capsys, on_terminal):
    first, second = [0, 0, 0, 220, 20, 60], [0, 0, 0, 0, 128, 0]
    names = ("train/a.png", "train/b.png", "val/c.png")
    url = write_palettes(tmp_path, {name: first for name in names} | {changed: second})
    task = (UPERNET | SEGMENTATION_LINEAR)[name].task
    message = refusal(task.run, export_of(), workspace(tmp_path, url, limit=None))
    assert check_scenes(url, read_all=True) == 1
    for text in (message, capsys.readouterr().out):
        parts = ("masks/train/a.png", f"masks/{changed}", "number 1", "220 20 60", "0 128 0", "classes.txt")
        assert all(part in text for part in parts), text
    (tmp_path / "classes.txt").write_text("0 0 0 ground\n220 20 60 thing\n0 128 0 other\n")
    assert check_scenes(url, read_all=True) == 0


@pytest.mark.parametrize(
    ("palette", "classes", "refused"),
    [
        ([0, 0, 0, 7, 7, 7], 8, True),
        ([0, 0, 0, 7, 7, 7], 2, False),  # 7 is no class, so the greys are for people
        ([255, 255, 255, 0, 0, 0], 2, True),
        ([0, 0, 0, 255, 255, 255], 2, False),
        ([0, 0, 0, 128, 128, 128, 255, 255, 255], 3, False),
        ([0, 0, 0, 1, 1, 1], 2, False),
        ([0, 0, 0, 128, 128, 128, 64, 0, 0], 200, False),  # like Pascal VOC's, where 7 is grey 128
    ],
)
def test_grey_palettes_whose_greys_are_other_classes_are_refused(palette, classes, refused, tmp_path):
    url = write_palettes(tmp_path, {"train/a.png": palette, "val/b.png": palette})
    (tmp_path / "classes.txt").write_text("".join(f"{number} class {number}\n" for number in range(classes)))
    problems = decode_scenes(open_scenes(url, "val", tmp_path)).problems
    assert len(problems) == refused
    if refused:
        assert f"{tmp_path}/masks/val/b.png: its palette shows the number" in problems[0]
        assert f"as grey {palette[3] or 255}" in problems[0]


@pytest.mark.parametrize(
    ("classes", "refused"),
    [
        ("\n".join(f"class {number}" for number in range(18)), True),
        ("0 ground\n17 thing\n255 other", False),  # as tools save these greys in fewer bits
        ("0 0 0 ground\n17 17 17 thing\n255 255 255 other", False),
    ],
)
def test_grey_masks_of_four_bits_whose_numbers_are_classes_are_refused(classes, refused, tmp_path):
    url = write_masks(tmp_path, pairs("a.png", split="train") | pairs("b.png"))
    (tmp_path / "classes.txt").write_text(classes)
    rows = b"".join(b"\x00" + bytes([0x01, 0xF0]) * 12 for _ in range(32))  # 0 1 15 0 ...
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", 48, 32, 4, 0, 0, 0, 0)), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    content = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    (tmp_path / "masks/val/b.png").write_bytes(b"\x89PNG\r\n\x1a\n" + content)
    scenes = open_scenes(url, "val", tmp_path)
    if refused:
        assert "number 15 is read as grey 255" in refusal(scene_mask, scenes, 0)
    else:
        assert scene_mask(scenes, 0)[0, :4].tolist() == [0, 1, 2, 0]


@pytest.mark.parametrize("layout", ["masks", "ade20k", "davis", "nyu"])
def test_masks_and_depths_in_jpeg_are_refused(layout, tmp_path):
    root = tiny_folder(layout, tmp_path)
    scenes = open_scenes(f"{layout}:{root}", "val", tmp_path)
    path = root / (scenes.depth_maps.depths if layout == "nyu" else scenes.mask_listing.masks)[1]
    with Image.open(path) as image:
        image.convert("RGB" if layout == "masks" else "L").save(path, "JPEG", quality=100)
    (problem,) = decode_scenes(scenes).problems.values()
    assert problem.startswith(f"{path}: cannot be read (a JPEG") and "save it as PNG" in problem
    with pytest.raises(ValueError, match="a JPEG"):
        scene_depth(scenes, 1, (60, 80)) if layout == "nyu" else scene_mask(scenes, 1)


def test_palettes_may_differ_between_videos_but_not_in_one(tmp_path):
    root = tiny_folder("davis", tmp_path)
    masks = sorted(root.glob("Annotations/480p/*/*.png"))
    for path in masks:
        values = np.asarray(Image.open(path))
        mask = Image.fromarray(values, "P")
        mask.putpalette([0, 0, 0, *(list(path.parent.name.encode()[-3:]) * 30)])
        mask.save(path)
    url = f"davis:{root}"
    scenes = open_scenes(url, "val", tmp_path)
    assert len(scenes.videos) > 1 and not decode_scenes(scenes).problems and not check_palettes(scenes)
    frames = list(scenes.videos.values())
    read_truth(scenes, frames[-1])
    mask.putpalette([0, 0, 0, *range(90)])
    mask.save(masks[-1])
    scenes = open_scenes(url, "val", tmp_path)
    assert not decode_scenes(scenes).problems, "a fault of the video, of which --skip-bad may not choose frames"
    read_truth(scenes, frames[0])
    for check in (partial(check_palettes, scenes), partial(read_truth, scenes, frames[-1])):
        message = refusal(check)
        assert message.startswith(f"{masks[-1]}: its palette") and "objects" in message and "classes" not in message


def test_unknown_values_and_colours_are_named(masks_set, tmp_path):
    path = next((masks_set / "masks" / "val").iterdir())
    pixels = np.asarray(Image.open(path)).copy()
    pixels[5, 7] = (1, 2, 3)
    Image.fromarray(pixels).save(path)
    (line,) = decode_scenes(open_scenes(f"masks:{masks_set}", "val", tmp_path))[0].values()
    assert line.startswith(f"{path}: ") and "colour 1 2 3 " in line
    store_as_values(masks_set, (0, 1))
    (masks_set / "classes.txt").write_text("ground\ndigit")
    values = np.asarray(Image.open(path)).copy()
    values[5, 7] = 77
    Image.fromarray(values).save(path)
    (line,) = decode_scenes(open_scenes(f"masks:{masks_set}", "val", tmp_path))[0].values()
    assert line.startswith(f"{path}: ") and "value 77, allowed are 0 to 1, 255" in line


def test_ambiguous_and_missing_files_are_named(masks_set, tmp_path):
    refuse = partial(refusal, open_scenes, f"masks:{masks_set}", "val", tmp_path)
    picture = next((masks_set / "images" / "val").iterdir())
    Image.open(picture).save(picture.with_suffix(".jpg"))
    assert f"two images of val have the mask masks/val/{picture.name}" in refuse()
    picture.with_suffix(".jpg").unlink()
    (masks_set / "masks" / "val" / picture.name).unlink()
    assert re.search(f"1 of 24 annotations of val .*masks/val/{picture.name}", refuse())
    (masks_set / "classes.txt").unlink()
    assert "no file classes.txt" in refuse()


def test_two_masks_of_an_image_are_refused(masks_set, tmp_path):
    mask = next((masks_set / "masks" / "val").iterdir())
    Image.open(mask).save(mask.with_suffix(".PNG"))
    message = refusal(open_scenes, f"masks:{masks_set}", "val", tmp_path)
    assert mask.name in message and mask.with_suffix(".PNG").name in message


def test_folders_of_pascal_voc(tmp_path):
    for split, count in COUNTS.items():
        scenes = open_scenes("tiny-voc:", split, tmp_path)
        assert len(scenes) == count and len(scenes.classes) == 21 and not decode_scenes(scenes)[0]
    folder = tiny_folder("voc", tmp_path)
    outer = tmp_path / "VOCdevkit"
    outer.mkdir()
    folder.rename(outer / "VOC2012")
    assert open_scenes(f"voc:{tmp_path}", "val", tmp_path).fingerprint
    next((outer / "VOC2012" / "SegmentationClass").glob("val*")).unlink()
    with pytest.raises(ValueError, match=r"1 of 24 masks of val .*SegmentationClass/val_\d+"):
        open_scenes(f"voc:{tmp_path}", "val", tmp_path)


@pytest.mark.parametrize("file", ["classes.txt", "labelmap.txt"])
def test_voc_folders_may_list_other_classes(file, tmp_path):
    """classes.txt lists values; labelmap.txt, which CVAT writes, lists colours."""
    root = tiny_folder("voc", tmp_path)
    values, colours = [0, 1, 2, 3, 4], [(0, 0, 0), (255, 255, 255), (128, 0, 0), (0, 128, 0), (128, 128, 0)]
    before = open_scenes(f"voc:{root}", "val", tmp_path)
    masks_before = [mask_classes(before, index) for index in range(3)]
    assert f"{21 - len(values)} of 21 classes" in before.pixels.warnings()[-1]
    if file == "classes.txt":
        text = "\n".join(f"{value} thing {value}" for value in values)
    else:
        text = "# label:color_rgb:parts:actions\n" + "".join(
            f"thing {value}:{','.join(map(str, colour))}::\n" for value, colour in zip(values, colours, strict=True)
        )
        ignored = (1, 1, 1)
        for path in (root / "SegmentationClass").iterdir():
            table = np.array([*colours, *[ignored] * 251], np.uint8)
            Image.fromarray(table[np.asarray(Image.open(path))]).save(path)
        text += "void:1,1,1::\n"
    (root / file).write_text(text)
    after = open_scenes(f"voc:{root}", "val", tmp_path)
    assert after.classes[:5] == tuple(f"thing {value}" for value in values)
    assert after.fingerprint != before.fingerprint and not decode_scenes(after)[0]
    void = IGNORED if file == "classes.txt" else 5
    for index, mask in enumerate(masks_before):
        assert np.array_equal(mask_classes(after, index), np.where(mask == IGNORED, void, mask))
    (root / file).write_text("wrong:1,2::\n" if file == "labelmap.txt" else "1 2 wrong\n")
    with pytest.raises(ValueError, match=f"{file}, line 1"):
        open_scenes(f"voc:{root}", "val", tmp_path)


def write_coco(tmp_path: Path, scale: float = 1.25) -> Path:
    """Write the tiny COCO set with three categories, other category numbers and larger images."""
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
        kept = [entry for entry in content["annotations"] if entry["category_id"] in (2, 3) and not entry["iscrowd"]]
        for entry in kept:
            entry["category_id"] = {2: 5, 3: 17}[entry["category_id"]]
            entry["bbox"] = [scale * value for value in entry["bbox"]]
            entry["area"] *= scale**2
            entry["segmentation"] = [[scale * value for value in outline] for outline in entry["segmentation"]]
        content["annotations"] = kept
        (root / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))
    return root


def test_coco_files_with_other_categories(tmp_path):
    root = write_coco(tmp_path)
    scenes = open_scenes(f"coco:{root}", "val", tmp_path)
    assert not decode_scenes(scenes)[0] and dict(scenes.listing.categories) == {n: f"thing {n}" for n in (5, 17, 30)}
    assert "1 of 3 categories have no object in val, such as thing 30" in scenes.notes
    path = root / "annotations" / "instances_val.json"
    content = json.loads(path.read_text())
    for change, message in (
        ({"segmentation": []}, "has a box but no outline"),
        ({"category_id": 6}, "is of category 6"),
    ):
        annotations = [content["annotations"][0] | change, *content["annotations"][1:]]
        path.write_text(json.dumps(content | {"annotations": annotations}))
        with pytest.raises(ValueError, match=re.escape(message)):
            open_scenes(f"coco:{root}", "val", tmp_path)


def test_only_segmentation_tasks_fit_masks(masks_set, tmp_path):
    protocols = catalogue().protocols
    images = open_data("mine", f"masks:{masks_set}", workspace(tmp_path, ""))
    keys = {chosen.key for chosen in protocols.values() if fits(chosen, images)}
    assert keys == {"upernet_ade20k", "segmenter_cityscapes", "segmentation_linear", "dense_knn"}
    assert "segmenter_cityscapes, upernet_ade20k" in "\n".join(about("masks"))
    assert "tiny-masks" not in named_urls((), "smoke") and "tiny-ade20k" in named_urls((), "smoke")


@pytest.mark.exhaustive  # test_segmentation_tasks.py tests by default that a head learns, and here masks are read
@pytest.mark.parametrize("name", ["upernet@smoke", "segmenter_linear@smoke"])
def test_segmentation_learns_own_masks(name, masks_set, tmp_path):
    """With the unchanged recipe, on images of another size than in the tiny sets."""
    for path in masks_set.rglob("*.png"):
        image = Image.open(path)
        image.resize((120, 80), Image.Resampling.NEAREST).save(path)
    task = (UPERNET | SEGMENTER)[name].task
    outcome = task.run(export_of(), workspace(tmp_path, f"masks:{masks_set}", limit=None))
    assert next(iter(outcome.arrays.values())).shape == (24, 2, 3)
    assert outcome.numbers["mIoU"] > 55 > outcome.facts["floor"]["metrics"]["mIoU"] + 5
    (message,) = [line for line in outcome.facts["warnings"] if "were chosen for" in line]
    assert "crop=48" in message and message.endswith("this set has 64 and 2")


@pytest.mark.exhaustive
def test_detection_learns_own_objects(tmp_path):
    task = MASKRCNN["maskrcnn@smoke"].task
    space = workspace(tmp_path, f"coco:{write_coco(tmp_path)}", limit=None)
    before = replace(task, lr=1e-12, epochs=1, milestones=()).run(export_of(), space)
    after = task.run(export_of(), space)
    assert after.numbers["box_AP50"] > 10 > 2 > before.numbers["box_AP50"]
    assert any("were chosen for COCO" in line for line in after.facts["warnings"])


def write_masks(root: Path, images: dict[str, str], lines: str = "0 ground\n1 thing") -> str:
    """A set whose image files have masks: path of an image -> path of its mask, both below the root."""
    for number, (image, mask) in enumerate(images.items()):
        for path in (root / image, root / mask):
            path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (32, 48, 3), np.uint8)
        Image.fromarray(pixels).save(root / image)
        Image.fromarray((pixels[..., 0] > 127).astype(np.uint8)).save(root / mask, "PNG")
    (root / "classes.txt").write_text(lines)
    return f"masks:{root}"


def pairs(*names: str, split: str = "val") -> dict[str, str]:
    return {f"images/{split}/{name}": f"masks/{split}/{name.rpartition('.')[0]}.png" for name in names}


def test_endings_in_any_case_and_linked_folders_are_read(tmp_path):
    root = tmp_path / "set"
    url = write_masks(root, pairs("a.JPG", "b.Png", "c.TIFF", "d.webp"))
    (root / "masks/val/b.png").rename(root / "masks/val/b.PNG")
    write_masks(tmp_path / "elsewhere", {"images/e.jpg": "masks/e.png"})
    for kind in ("images", "masks"):
        (root / kind / "val" / "more").symlink_to(tmp_path / "elsewhere" / kind)
        (root / kind / "val" / "again").symlink_to(root / kind)  # a link to a folder above
    scenes = open_scenes(url, "val", tmp_path)
    assert [Path(name).name for name in scenes.listing.images] == ["a.JPG", "b.Png", "c.TIFF", "d.webp", "e.jpg"]
    assert not decode_scenes(scenes).problems


def test_what_a_layout_does_not_read_is_counted(capsys, on_terminal, tmp_path):
    url = write_masks(tmp_path, pairs("a.jpg", split="train") | pairs("b.jpg") | pairs("c.png", split="extra"))
    Image.new("L", (8, 8)).save(tmp_path / "masks/val/lonely.png")
    hidden = tmp_path / "images/val/.ipynb_checkpoints"
    hidden.mkdir()
    Image.new("RGB", (8, 8)).save(hidden / "b-checkpoint.jpg")
    code, out = check_scenes(url, read_all=True), capsys.readouterr().out
    assert code == 0
    assert all(count in out for count in ("1 .png in images/extra", "1 .png in masks/extra", "1 .png in masks/val"))
    assert "1 hidden file or folder is left out, such as images/val/.ipynb_checkpoints" in out


def test_scenes_in_both_splits_and_orientations_are_reported(capsys, on_terminal, tmp_path):
    url = write_masks(tmp_path, pairs("a.jpg", "b.jpg", split="train") | pairs("c.jpg"))
    (tmp_path / "images/val/c.jpg").write_bytes((tmp_path / "images/train/b.jpg").read_bytes())
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.open(tmp_path / "images/train/a.jpg").save(tmp_path / "images/train/a.jpg", exif=exif)
    code, out = check_scenes(url, read_all=True), capsys.readouterr().out
    assert code == 1 and "1 image has an EXIF orientation" in out
    assert "FIX: 1 image of val also in train, such as " in out and "val/c.jpg and " in out


@pytest.mark.parametrize("name", DEEP_COLOUR)
def test_dark_images_of_16_bits_are_reported(name, capsys, on_terminal, tmp_path):
    url = write_masks(tmp_path, pairs("a.png", split="train") | pairs("b.png"))
    for path in tmp_path.glob("masks/*/*.png"):
        Image.fromarray(np.eye(12, 16, dtype=np.uint8)).save(path)
    for path in tmp_path.glob("images/*/*.png"):
        path.write_bytes(DEEP_COLOUR[name](12))
    code, out = check_scenes(url, read_all=True), capsys.readouterr().out
    assert code == 1 and out.count("1 16-bit image, of which the upper 8 bits are read") == 2
    assert "none of the 1 16-bit images in train reaches a quarter" in out and "scale them up to 16" in out


def test_images_of_several_pages_are_reported_and_warned_of(capsys, on_terminal, tmp_path):
    url = write_masks(tmp_path, pairs("a.tif", "b.png", split="train") | pairs("c.png"))
    pages = [Image.new("RGB", (48, 32), (number, 0, 0)) for number in range(3)]
    pages[0].save(tmp_path / "images/train/a.tif", save_all=True, append_images=pages[1:])
    (warning,) = open_data("scenes", url, workspace(tmp_path, url)).warnings
    assert "2 images of train: 1, with 3 pages in all" in warning
    assert check_scenes(url, read_all=True) == 1
    assert "FIX: TIFF files of several pages in train: 1, with 3 pages in all" in capsys.readouterr().out


@pytest.mark.parametrize("other", [False, True])
def test_copies_within_a_split_of_scenes_are_counted(other, capsys, on_terminal, tmp_path):
    url = write_masks(tmp_path, pairs("a.png", "b.png", split="train") | pairs("c.png"))
    for folder in ("images", "masks"):
        path = tmp_path / folder / "train"
        (path / "b.png").write_bytes((path / "a.png").read_bytes())
    if other:
        Image.fromarray(np.eye(32, 48, dtype=np.uint8)).save(tmp_path / "masks/train/b.png")
    check_scenes(url, read_all=True)
    note = "1 duplicate of other images" + ", 1 with another annotation" * other
    assert f"{note}, such as {tmp_path}/images/train/b.png of {tmp_path}/images/train/a.png" in capsys.readouterr().out


@pytest.mark.parametrize(
    "lines",
    ["ground\nIgnore\nthing", "0 ground\n2 thing\n1 ignore", "0 0 0 ground\n2 2 2 thing\n1 1 1 ignore"],
)
def test_a_line_of_the_list_may_name_what_is_ignored(lines):
    names, classes_of, colours = read_classes(lines)
    listing = Listing(images=("i",), masks=("m",), classes=names, classes_of=classes_of, colours=colours)
    mask = np.array([[0, 1, 2]], np.uint8)
    mask = mask[..., None].repeat(3, -1) if colours else mask
    assert names == ("ground", "thing") and listing.to_classes(mask).tolist() == [[0, 255, 1]]


@pytest.mark.parametrize("folders", ["images/test", "test"])
def test_a_test_folder_serves_as_val_and_segnets_folders_are_read(folders, tmp_path):
    masks = {"images/test": "masks/test", "test": "testannot"}[folders]
    train = ("train", "trainannot") if folders == "test" else ("images/train", "masks/train")
    files = {f"{train[0]}/a.png": f"{train[1]}/a.png", f"{folders}/b.png": f"{masks}/b.png"}
    url = write_masks(tmp_path, files)
    val = open_scenes(url, "val", tmp_path)
    assert val.listing.images == (f"{folders}/b.png",) and not decode_scenes(val).problems
    assert any("is used as val" in note for note in val.notes)
    assert open_scenes(url, "train", tmp_path).listing.masks == (f"{train[1]}/a.png",)


def test_names_listed_twice_are_refused(tmp_path):
    folder = tiny_folder("voc", tmp_path)
    file = folder / "ImageSets/Segmentation/val.txt"
    first = file.read_text().split()[0]
    file.write_text(file.read_text() + f"{first}\n{first}\n")
    assert f"occur twice, such as {first}" in refusal(open_scenes, f"voc:{folder}", "val", tmp_path)


@pytest.mark.parametrize(
    ("layout", "lists"),
    [
        ("nyu", ("nyu_train.txt", "nyu_test.txt")),
        ("voc", ("ImageSets/Segmentation/train.txt", "ImageSets/Segmentation/val.txt")),
        ("vocboxes", ("ImageSets/Main/train.txt", "ImageSets/Main/val.txt")),
    ],
)
def test_validation_images_in_the_list_of_training_images_are_warned_of(layout, lists, tmp_path):
    folder = tiny_folder(layout, tmp_path)
    train, val = (folder / name for name in lists)
    url, lines = f"{layout}:{folder}", val.read_text().splitlines()
    assert not open_data("scenes", url, workspace(tmp_path, url)).warnings
    train.write_text("\n".join([*train.read_text().splitlines(), *lines[:3]]))
    (warning,) = open_data("scenes", url, workspace(tmp_path, url)).warnings
    assert f"3 of the {len(lines)} validation images are training images too" in warning
    train.write_text(val.read_text())
    (warning,) = open_data("scenes", url, workspace(tmp_path, url)).warnings
    assert f"{len(lines)} of the {len(lines)}" in warning and check_scenes(url, read_all=True) == 1


def test_images_on_which_nothing_is_trained_may_be_in_both_splits(tmp_path):
    for url in ("tiny-trainval:", f"davis:{tiny_folder('davis', tmp_path)}"):
        names = tiny_folder("davis", tmp_path) / "ImageSets/2017"
        (names / "train.txt").write_text((names / "val.txt").read_text())
        assert not open_data("scenes", url, workspace(tmp_path, url)).warnings
        assert check_scenes(url, read_all=True) == 0
