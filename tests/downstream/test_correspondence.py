"""Correspondence end to end on generated pairs: selected pairs, counts, pairs left out, errors."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from toy_scenes import export_of, workspace

from downstream.data.scenes import decode_scenes, open_scenes, scene_pair, tiny_folder
from downstream.frozen.task import backbone_of
from downstream.tasks.correspondence import PROTOCOLS, pck, weighted_pck
from engine.tasks import Outcome

TASK = PROTOCOLS["correspondence@smoke"].task


def outcome(folder, url="tiny-spair:", task=TASK, **settings) -> Outcome:
    return task.run(export_of(), workspace(folder, url, **{"limit": None, **settings}))


def changed(path, **content) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | content))


def test_pairs_are_selected_as_in_the_source(tmp_path):
    """random.seed(20), a shuffle of each class and difference of viewpoint, and the first of them."""
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


def test_numbers_follow_from_the_errors(tmp_path):
    """Those of each class by the function that is tested against the recording; classes weigh equally by point, pairs
    by image."""
    result, scenes = outcome(tmp_path), open_scenes("tiny-spair:", "val", tmp_path)
    selected = TASK.select_pairs(scenes, np.arange(len(scenes)))
    backbone = backbone_of(export_of(), workspace(tmp_path, "tiny-spair:"))
    of_classes, pairs = [], []
    for number, title in enumerate(scenes.classes):
        patches = {index: TASK.read_patches(backbone, scenes, index) for index in range(len(scenes))}
        own = selected.numbers[(selected.classes == number) & selected.in_subset[:, 3]].tolist()
        pairs += (errors := [TASK.match_pair(scenes, pair, patches)[1] for pair in own])
        of_classes.append(pck(errors, TASK.threshold))
        assert result.facts["classes"][title]["all"] == of_classes[-1]
        assert result.facts["classes"][title].keys() == {"view0", "view1", "view2", "all"}
    assert result.numbers["PCK_point"] == pytest.approx(np.mean([own["point"] for own in of_classes]))
    assert result.numbers["PCK_image"] == pytest.approx(pck(pairs, TASK.threshold)["image"])
    assert result.numbers.keys() == {"PCK_point", "PCK_image", *(f"PCK_point_view{view}" for view in range(3))}
    assert len(np.unique(result.metrics["PCK_point"].resampled)) > 100


def test_a_pair_counts_as_often_as_its_images(tmp_path):
    scenes = open_scenes("tiny-spair:", "val", tmp_path)
    selected = replace(TASK, pairs=100).select_pairs(scenes, np.arange(len(scenes)))
    counts = np.stack([np.arange(len(selected.numbers)) % 4, np.full(len(selected.numbers), 4)], axis=1)
    weights = np.random.RandomState(0).randint(0, 4, (1, len(scenes))).astype(float)
    times = (weights[0, selected.ends[:, 0]] * weights[0, selected.ends[:, 1]]).astype(int)
    repeated = type(selected)(*(np.repeat(values, times, axis=0) for values in selected))
    expected = weighted_pck(repeated, np.repeat(counts, times, axis=0), np.ones((1, len(scenes))))
    for name, values in weighted_pck(selected, counts, weights).items():
        assert values == pytest.approx(expected[name]), name


def test_an_image_finds_its_own_keypoints(tmp_path):
    """But for the corner of a patch, which stands for all of it."""
    spair = tiny_folder("spair", tmp_path)
    for path in (spair / "PairAnnotation/test").iterdir():
        content = json.loads(path.read_text())
        same = {f"trg_{what}": content[f"src_{what}"] for what in ("imsize", "bndbox", "kps")}
        path.write_text(json.dumps(content | same))
        number, source, _ = path.name.partition(":")[0].split("-")
        path.rename(path.with_name(f"{number}-{source}-{source}:{content['category']}.json"))
    assert outcome(tmp_path, f"spair:{spair}").numbers["PCK_point"] > 95 > outcome(tmp_path).numbers["PCK_point"]


def test_bad_pairs_are_named_or_counted(tmp_path):
    spair = tiny_folder("spair", tmp_path)
    url, pairs = f"spair:{spair}", sorted((spair / "PairAnnotation/test").iterdir())
    image = spair / "JPEGImages/dog/val_0.jpg"
    Image.open(image).resize((50, 40)).save(image)
    points = json.loads(pairs[0].read_text())["src_kps"]
    changed(pairs[0], src_kps=[[500, 3], *points[1:]])
    for broken, message in (
        (pairs[0], "keypoint 500, 3 lies outside of the source"),
        (pairs[15], "its image has 50 x 40"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            outcome(tmp_path, url)
        assert str(caught.value).startswith(f"{broken}: ") and "\n" not in str(caught.value)
        changed(pairs[0], src_kps=points)
    changed(pairs[0], src_kps=points[1:])
    lines = [*decode_scenes(open_scenes(url, "val", tmp_path))[0].values()]
    assert len(lines) == 3 and all(f"{pairs[0]}: " in line and "keypoints of the" in line for line in lines[:2])
    result = outcome(tmp_path, url, skip_bad=True)
    assert result.facts["val"]["skipped"].keys() == {
        str(spair / f"JPEGImages/{name}.jpg") for name in ("cat/val_0", "cat/val_1", "dog/val_0")
    }
    assert result.facts["pairs"] == 6 + 10
    pairs[0].write_text("{")
    with pytest.raises(ValueError, match=f"^{pairs[0]}: "):
        outcome(tmp_path, url)


def test_what_a_set_lacks_is_said(tmp_path):
    spair = tiny_folder("spair", tmp_path)
    with pytest.raises(ValueError, match="no pair of val is left; raise --limit"):
        outcome(tmp_path, limit=2)
    (spair / "JPEGImages/cat/val_3.jpg").unlink()
    with pytest.raises(ValueError, match=r"1 of 12 images of val are not there, such as JPEGImages/cat/val_3.jpg"):
        open_scenes(f"spair:{spair}", "val", tmp_path)
    (spair / "PairAnnotation/test/pair.json").write_text("{}")
    with pytest.raises(ValueError, match=r"PairAnnotation/test/pair\.json is no pair's name"):
        open_scenes(f"spair:{spair}", "val", tmp_path)
