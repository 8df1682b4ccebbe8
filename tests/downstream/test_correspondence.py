"""Correspondence end to end on generated pairs: selected pairs, metrics, skipped pairs, errors."""

import json
import random
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from PIL import Image
from toy_scenes import export_of, workspace

from downstream.data.scenes import decode_scenes, open_scenes, scene_pair, tiny_folder
from downstream.frozen.task import backbone_of
from downstream.tasks.correspondence import PROTOCOLS, pck, weighted_pck
from engine.tasks import Outcome

TASK = PROTOCOLS["correspondence@smoke"].task


def run_task(folder, url="tiny-spair:", task=TASK, **settings) -> Outcome:
    return task.run(export_of(), workspace(folder, url, **{"limit": None, **settings}))


def update_json(path, **content) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | content))


def test_pairs_are_selected_as_in_the_official_code(tmp_path):
    """Seed 20, one shuffle for each class and viewpoint variation, then the first pairs."""
    scenes = open_scenes("tiny-spair:", "val", tmp_path)
    selected = replace(TASK, pairs=3).select_pairs(scenes, np.arange(len(scenes)))
    views = {
        name: scene_pair(scenes, number, {}).viewpoint_variation for number, name in enumerate(scenes.image_pairs.pairs)
    }
    for column, view in enumerate((0, 1, 2, None)):
        expected = set()
        for title in ("cat", "dog"):
            names = [name for name in sorted(views) if f":{title}." in name and view in (None, views[name])]
            random.seed(20)
            random.shuffle(names)
            expected |= set(names[:3])
        assert {
            scenes.image_pairs.pairs[number] for number in selected.numbers[selected.in_subset[:, column]]
        } == expected


def test_metrics_follow_from_the_keypoint_errors(tmp_path):
    """PCK by point weighs classes equally, PCK by image pairs. `pck` itself is tested against the recording."""
    result, scenes = run_task(tmp_path), open_scenes("tiny-spair:", "val", tmp_path)
    selected = TASK.select_pairs(scenes, np.arange(len(scenes)))
    backbone = backbone_of(export_of(), workspace(tmp_path, "tiny-spair:"))
    class_scores, all_errors = [], []
    for number, title in enumerate(scenes.classes):
        patches = {index: TASK.read_patches(backbone, scenes, index) for index in range(len(scenes))}
        pairs = selected.numbers[(selected.classes == number) & selected.in_subset[:, 3]].tolist()
        errors = [TASK.match_pair(scenes, pair, patches)[1] for pair in pairs]
        all_errors += errors
        class_scores.append(pck(errors, TASK.threshold))
        assert result.facts["classes"][title]["all"] == class_scores[-1]
        assert result.facts["classes"][title].keys() == {"view0", "view1", "view2", "all"}
    assert result.numbers["PCK_point"] == pytest.approx(np.mean([score["point"] for score in class_scores]))
    assert result.numbers["PCK_image"] == pytest.approx(pck(all_errors, TASK.threshold)["image"])
    assert result.numbers.keys() == {"PCK_point", "PCK_image", *(f"PCK_point_view{view}" for view in range(3))}
    assert len(np.unique(result.metrics["PCK_point"].resampled)) > 100


def test_weight_of_a_pair_is_the_product_of_its_images_weights(tmp_path):
    scenes = open_scenes("tiny-spair:", "val", tmp_path)
    selected = replace(TASK, pairs=100).select_pairs(scenes, np.arange(len(scenes)))
    counts = np.stack([np.arange(len(selected.numbers)) % 4, np.full(len(selected.numbers), 4)], axis=1)
    weights = np.random.RandomState(0).randint(0, 4, (1, len(scenes))).astype(float)
    times = (weights[0, selected.ends[:, 0]] * weights[0, selected.ends[:, 1]]).astype(int)
    repeated = type(selected)(*(np.repeat(values, times, axis=0) for values in selected))
    expected = weighted_pck(repeated, np.repeat(counts, times, axis=0), np.ones((1, len(scenes))))
    for name, values in weighted_pck(selected, counts, weights).items():
        assert values == pytest.approx(expected[name]), name


def test_keypoints_are_found_in_the_same_image(tmp_path):
    """Not all of them, because a match is the corner of a patch. The target is a copy of the image."""
    spair = tiny_folder("spair", tmp_path)
    for path in (spair / "PairAnnotation/test").iterdir():
        content = json.loads(path.read_text())
        same = {f"trg_{field}": content[f"src_{field}"] for field in ("imsize", "bndbox", "kps")}
        path.write_text(json.dumps(content | same))
        number, source, _ = path.name.partition(":")[0].split("-")
        images = spair / "JPEGImages" / content["category"]
        (images / f"copy_{source}.jpg").write_bytes((images / f"{source}.jpg").read_bytes())
        path.rename(path.with_name(f"{number}-{source}-copy_{source}:{content['category']}.json"))
    assert run_task(tmp_path, f"spair:{spair}").numbers["PCK_point"] > 95 > run_task(tmp_path).numbers["PCK_point"]


def test_bad_pairs_are_named_or_skipped(tmp_path):
    spair = tiny_folder("spair", tmp_path)
    url, pairs = f"spair:{spair}", sorted((spair / "PairAnnotation/test").iterdir())
    image = spair / "JPEGImages/dog/val_0.jpg"
    Image.open(image).resize((50, 40)).save(image)
    points = json.loads(pairs[0].read_text())["src_kps"]
    update_json(pairs[0], src_kps=[[500, 3], *points[1:]])
    for broken, message in (
        (pairs[0], "keypoint 500, 3"),
        (pairs[15], "50 x 40"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            run_task(tmp_path, url)
        assert str(error.value).startswith(f"{broken}: ") and "\n" not in str(error.value)
        update_json(pairs[0], src_kps=points)
    update_json(pairs[0], src_kps=points[1:])
    lines = [*decode_scenes(open_scenes(url, "val", tmp_path))[0].values()]
    assert len(lines) == 3 and all(f"{pairs[0]}: " in line and "keypoints of the" in line for line in lines[:2])
    result = run_task(tmp_path, url, skip_bad=True)
    assert result.facts["val"]["skipped"].keys() == {
        str(spair / f"JPEGImages/{name}.jpg") for name in ("cat/val_0", "cat/val_1", "dog/val_0")
    }
    assert result.facts["pairs"] == 6 + 10
    pairs[0].write_text("{")
    with pytest.raises(ValueError, match=f"^{pairs[0]}: "):
        run_task(tmp_path, url)


def test_boxes_without_area_or_beyond_their_image_are_named(tmp_path):
    spair = tiny_folder("spair", tmp_path)
    pair = min((spair / "PairAnnotation/test").iterdir())
    before = pair.read_bytes()
    for end, box in product(
        ("source", "target"), ([50, 50, 10, 10], [20, 20, 20, 20], [5, 5, 300, 30], [-40, 5, 30, 30])
    ):
        update_json(pair, **{f"{end[:1]}{'rc' if end == 'source' else 'rg'}_bndbox": box})
        (line,) = decode_scenes(open_scenes(f"spair:{spair}", "val", tmp_path))[0].values()
        assert line.startswith(f"{pair}: ") and end in line and ", ".join(map(str, box)) in line
        with pytest.raises(ValueError, match=f"box {box[0]}, .*{end}"):
            run_task(tmp_path, f"spair:{spair}")
        pair.write_bytes(before)


def test_pairs_of_an_image_with_itself_are_refused(tmp_path):
    spair = tiny_folder("spair", tmp_path)
    pair = min((spair / "PairAnnotation/test").iterdir())
    pair.rename(pair.with_name("000001-val_0-val_0:cat.json"))
    with pytest.raises(ValueError, match=r"000001-val_0-val_0:cat\.json is a pair of an image with itself"):
        open_scenes(f"spair:{spair}", "val", tmp_path)


def test_missing_images_and_pairs_are_named(tmp_path):
    spair = tiny_folder("spair", tmp_path)
    with pytest.raises(ValueError, match="raise limit"):
        run_task(tmp_path, limit=2)
    (spair / "JPEGImages/cat/val_3.jpg").unlink()
    with pytest.raises(ValueError, match=r"1 of 12 images of val .*JPEGImages/cat/val_3\.jpg"):
        open_scenes(f"spair:{spair}", "val", tmp_path)
    (spair / "PairAnnotation/test/pair.json").write_text("{}")
    with pytest.raises(ValueError, match=r"PairAnnotation/test/pair\.json"):
        open_scenes(f"spair:{spair}", "val", tmp_path)


def test_a_pair_that_two_files_hold_is_warned_of(tmp_path):
    folder = tiny_folder("spair", tmp_path) / "PairAnnotation/test"
    first = min(folder.iterdir())
    copy = first.with_name(f"000999-{first.name.partition('-')[2]}")
    copy.write_bytes(first.read_bytes())
    (warning,) = open_scenes(f"spair:{folder.parents[1]}", "val", tmp_path).warnings
    assert copy.name in warning and first.name in warning
