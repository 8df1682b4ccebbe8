"""Retrieval: revisited sets in their layout, other sets by class, and invalid ground truth."""

import json
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
from probes.retrieved import level_scores
from probes.tasks.retrieval import PROTOCOLS, Retrieval

TASK = Retrieval(size=24)
COLOURS = [(220, 30, 30), (30, 220, 30), (30, 30, 220)]


@pytest.fixture
def landmarks(tmp_path):
    """Three landmarks of four images each, of which a query has two easy, one hard and one junk image."""
    (tmp_path / "jpg").mkdir()
    random, names = RandomState(0), [f"place{number % 3}_{number}" for number in range(12)]
    for number, name in enumerate([*names, "query0", "query1", "query2"]):
        shape = (16, 32 if number % 2 else 40, 3)  # not square as the network's images are
        colour = COLOURS[int(name[5:].split("_")[0]) if name.startswith("place") else number % 3]
        pixels = np.clip(np.array(colour) + random.normal(0, 9, shape), 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"jpg/{name}.jpg")
    gnd = [{"bbx": [0, 0, 9, 9], "easy": [q, q + 3], "hard": [q + 6], "junk": [q + 9]} for q in range(3)]
    truth = {"imlist": names, "qimlist": ["query0", "query1", "query2"], "gnd": gnd}
    (tmp_path / "gnd_toy.json").write_text(json.dumps(truth))
    return tmp_path


@pytest.mark.parametrize("scales", ["one", "three"])
def test_landmarks_are_found_at_every_level(landmarks, tmp_path, scales):
    task = Retrieval(size=24 if scales == "one" else 48, scales=scales)
    outcome = task.run(varied_export(), Workspace(cache=tmp_path / "cache", data=f"revisited:{landmarks}"))
    assert all(value == 100 for value in outcome.numbers.values())
    assert outcome.metrics["map_hard"].per_image.shape == (3,) and outcome.cost["forwards"] == 15


def test_database_and_queries_are_in_the_order_of_the_ground_truth(landmarks):
    database, queries = (open_set(f"revisited:{landmarks}", split) for split in ("train", "val"))
    assert check_image_set(f"revisited:{landmarks}").ok  # although all images are of one class
    assert database.path(10).endswith("place1_10.jpg") and queries.path(2).endswith("query2.jpg")


def test_other_sets_are_scored_by_class(tmp_path):
    outcome = TASK.run(varied_export(), Workspace(cache=tmp_path, data="tiny:"))
    assert 25 < outcome.numbers["map"] <= 100 and outcome.metrics["map"].per_image.shape == (32,)
    order = np.array([[2], [0], [1]])  # by hand: positives at ranks 0 and 2, in trapezoids
    truth = [{"easy": [2, 1], "hard": [], "junk": []}]
    assert level_scores(order, truth, "easy").average[0] == pytest.approx((1 + 1 + 1 / 2 + 2 / 3) / 4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda truth: truth["gnd"].pop(), "2 queries"),
        (lambda truth: truth["gnd"][0]["easy"].append(99), "beyond the 12"),
        (lambda truth: truth["imlist"].append("nowhere"), "'nowhere'"),
        (lambda truth: truth.pop("gnd"), "another form"),
        (lambda truth: truth["gnd"][1].update(easy=[0.5]), "$.gnd[1].easy[0]"),
        (lambda truth: truth["gnd"][1].update(hard=[1]), "image 1 twice"),
        (lambda truth: truth["imlist"].__setitem__(0, "place1_1"), "'place1_1'"),
        (lambda truth: truth["imlist"].__setitem__(0, "query0"), "'query0' is in `imlist`"),
        (lambda truth: truth["imlist"].append("query1"), "12, in `junk` of `gnd[1]`"),
        (lambda truth: [groups.update(easy=[], hard=[]) for groups in truth["gnd"]], "no query"),
    ],
)
def test_invalid_ground_truth_is_refused(landmarks, change, words):
    path = landmarks / "gnd_toy.json"
    truth = json.loads(path.read_text())
    change(truth)
    path.write_text(json.dumps(truth))
    message = refusal(open_set, f"revisited:{landmarks}", "train")
    assert words in message and "gnd_toy.json" in message
    path.unlink()
    with pytest.raises(ValueError, match=r"convert gnd_NAME\.pkl"):
        open_set(f"revisited:{landmarks}", "val")


@pytest.mark.parametrize("content", [b"[" * 200_000, b'{"imlist": ' + b"[" * 200_000, b"{not json", b"\xff\xfe{}", b""])
def test_ground_truth_that_is_no_json_is_refused(landmarks, content):
    (landmarks / "gnd_toy.json").write_bytes(content)
    assert "gnd_toy.json" in refusal(open_set, f"revisited:{landmarks}", "val")


@pytest.mark.parametrize("twin", ["jpg/place0_0.png", "jpg/deeper/query1.jpg"])
def test_two_images_of_one_name_and_two_ground_truths_are_refused(landmarks, twin):
    (landmarks / twin).parent.mkdir(exist_ok=True)
    Image.new("RGB", (9, 9)).save(landmarks / twin)
    assert twin.removeprefix("jpg/").partition(".")[0] in refusal(open_set, f"revisited:{landmarks}", "train")
    (landmarks / twin).rename(landmarks / "jpg/not_listed.jpg")
    shutil.copy(landmarks / "jpg/not_listed.jpg", landmarks / "jpg/not_listed.png")
    open_set(f"revisited:{landmarks}", "train")
    shutil.copy(landmarks / "gnd_toy.json", landmarks / "gnd_other.json")
    assert "gnd_other.json" in refusal(open_set, f"revisited:{landmarks}", "train")


def test_a_limit_of_the_database_is_refused(landmarks, tmp_path):
    space = Workspace(cache=tmp_path, data=f"revisited:{landmarks}", limit=4)
    with pytest.raises(ValueError, match="drop limit"):
        PROTOCOLS["retrieval@dino_oxford"].task.run(varied_export(), space)


def test_a_query_in_the_database_is_junk_for_itself(landmarks, tmp_path):
    path = landmarks / "gnd_toy.json"
    truth = json.loads(path.read_text())
    truth["imlist"] += truth["qimlist"]
    for query, groups in enumerate(truth["gnd"][:2]):
        groups["junk"].append(12 + query)
    truth["gnd"][2].update(easy=[], hard=[])  # not scored
    path.write_text(json.dumps(truth))
    outcome = TASK.run(varied_export(), Workspace(cache=tmp_path / "cache", data=f"revisited:{landmarks}"))
    assert outcome.numbers["map_medium"] == 100
