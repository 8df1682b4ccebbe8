"""Video propagation end to end on generated videos: scores, skipped videos, errors."""

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from toy_scenes import export_of, workspace

from downstream.data.scenes import decode_scenes, open_scenes, tiny_folder
from downstream.tasks.video_propagation import PROTOCOLS, mean_scores
from engine.tasks import Outcome

TASK = PROTOCOLS["video_propagation@smoke"].task


def run_task(folder, url="tiny-davis:", **settings) -> Outcome:
    return TASK.run(export_of(), workspace(folder, url, **{"limit": None, **settings}))


def test_objects_weigh_equally_and_videos_are_resampled(tmp_path):
    result = run_task(tmp_path)
    objects, video_of_object = result.arrays["objects"], result.arrays["videos"]
    assert objects.shape == (6, 6) and video_of_object.tolist() == [0, 0, 1, 1, 2, 2]
    assert result.numbers["JF_mean"] == pytest.approx(100 * (objects[:, 0].mean() + objects[:, 3].mean()) / 2)
    assert result.numbers["J_recall"] == pytest.approx(100 * objects[:, 1].mean())
    one_video = mean_scores(objects, video_of_object, np.array([[0.0, 3.0, 0.0]]))
    assert one_video["F_mean"] == pytest.approx(100 * objects[2:4, 3].mean())
    assert len(np.unique(result.metrics["JF_mean"].resampled)) > 5
    assert not result.metrics["J_decay"].higher_is_better


def test_masks_stay_in_a_still_video(tmp_path):
    davis = tiny_folder("davis", tmp_path)
    for kind, suffix in (("JPEGImages", "jpg"), ("Annotations", "png")):
        for video in (davis / kind / "480p").glob("val*"):
            for frame in sorted(video.iterdir())[1:]:
                frame.write_bytes((video / f"00000.{suffix}").read_bytes())
    of_moving, of_still = run_task(tmp_path / "moving"), run_task(tmp_path, f"davis:{davis}")
    assert of_still.numbers["J_mean"] > of_moving.numbers["J_mean"] + 10
    assert of_still.numbers["J_decay"] == pytest.approx(0, abs=5)


def test_bad_videos_are_named_or_skipped(tmp_path):
    davis = tiny_folder("davis", tmp_path)
    empty, small = (davis / f"Annotations/480p/val{number}/00000.png" for number in (0, 1))
    Image.fromarray(np.zeros((48, 72), np.uint8)).save(empty)
    small = small.with_name("00004.png")
    Image.fromarray(np.ones((24, 36), np.uint8)).save(small)
    url = f"davis:{davis}"
    with pytest.raises(ValueError, match="no object to follow") as error:
        run_task(tmp_path, url)
    assert str(error.value).startswith(f"{empty}: ") and "\n" not in str(error.value)
    result = run_task(tmp_path, url, skip_bad=True)
    assert result.facts["videos"] == ["val2"] and list(result.facts["videos left out"]) == ["val1", "val0"]
    assert result.facts["val"]["skipped"].keys() == {str(small).replace("Annotations", "JPEGImages")[:-3] + "jpg"}
    (line,) = decode_scenes(open_scenes(url, "val", tmp_path))[0].values()
    assert str(small) in line


def test_missing_frames_are_refused(tmp_path):
    davis = tiny_folder("davis", tmp_path)
    (davis / "Annotations/480p/val1/00002.png").unlink()
    with pytest.raises(ValueError, match=r"Annotations/480p/val1/00002\.png"):
        open_scenes(f"davis:{davis}", "val", tmp_path)
    (davis / "JPEGImages/480p/val1/00002.jpg").unlink()
    with pytest.raises(ValueError, match=r"480p/val1 holds 7 frames.*00002\.jpg"):
        open_scenes(f"davis:{davis}", "val", tmp_path)


def test_frames_smaller_than_a_patch_are_refused():
    with pytest.raises(ValueError, match="short"):
        replace(TASK, short=4).summary(export_of().spec, {"val": 24})
