"""Video propagation end to end on generated videos: scores, skipped videos, errors."""

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from toy_scenes import export_of, workspace

from bench.__main__ import main
from downstream.data.scenes import decode_scenes, open_scenes, scene_mask, tiny_folder
from downstream.tasks.video_propagation import PROTOCOLS, mean_scores
from engine.tasks import Outcome
from engine.work import Scale

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


def test_numbers_of_objects_may_have_gaps_and_appear_later(tmp_path):
    davis = tiny_folder("davis", tmp_path)
    before = run_task(tmp_path / "before", f"davis:{davis}")
    for path in (davis / "Annotations/480p").rglob("*.png"):
        values = np.array([0, 4, 9], np.uint8)[np.array(Image.open(path))]
        if path.stem != "00000":
            values[0, values[0] == 0] = 5  # an object that the first frame does not show
        Image.fromarray(values).save(path)
    after = run_task(tmp_path / "after", f"davis:{davis}")
    assert np.array_equal(after.arrays["objects"], before.arrays["objects"])


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
    assert result.facts["videos"] == ["val2"] and list(result.facts["videos left out"]) == ["val0", "val1"]
    assert result.metrics["JF_mean"].resampled is None  # no interval of no width from a single video
    names = [str(path).replace("Annotations", "JPEGImages")[:-3] + "jpg" for path in (empty, small)]
    assert set(names) < result.facts["val"]["skipped"].keys()
    lines = decode_scenes(open_scenes(url, "val", tmp_path))[0].values()
    assert any(str(small) in line for line in lines) and any(line.startswith(f"{empty}: ") for line in lines)


def test_frames_of_another_size_are_found_before_a_run_and_by_the_check(tmp_path, capsys):
    davis = tiny_folder("davis", tmp_path)
    for kind, suffix in (("JPEGImages", "jpg"), ("Annotations", "png")):
        path = davis / kind / f"480p/val2/00003.{suffix}"
        Image.open(path).resize((36, 24), Image.Resampling.NEAREST).save(path)
    with pytest.raises(ValueError, match=r"val2/00003\.jpg: \(36, 24\)"):
        TASK.check_images(workspace(tmp_path, f"davis:{davis}", limit=None))
    TASK.check_images(workspace(tmp_path, f"davis:{davis}", limit=None, skip_bad=True))
    code, text = main(["data", "check", f"davis:{davis}"]), capsys.readouterr().out
    assert code == 1 and "val2/00003.jpg" in text


def test_a_limit_takes_whole_videos_and_names_them(tmp_path, capsys):
    for limit, names in ((1, ["val0"]), (8, ["val0"]), (17, ["val0", "val1"])):
        result = run_task(tmp_path, limit=limit)
        assert result.facts["videos"] == names and result.facts["val"]["images"] == 8 * len(names)
        assert f"{len(names)} of 3 videos: {', '.join(names)}" in capsys.readouterr().err
        assert any(", ".join(names) in note for note in result.facts["notes"])


def as_davis_2016(davis):
    """Turn a set into DAVIS 2016's form: one object of 255 in grey masks, and lists of pairs of paths."""
    for path in davis.rglob("*.png"):
        Image.fromarray((np.asarray(Image.open(path)) > 0).astype(np.uint8) * 255).save(path)
    for split in ("train", "val"):
        frames = sorted(davis.glob(f"JPEGImages/480p/{split}*/*.jpg"))
        pairs = [str(frame.relative_to(davis)) for frame in frames]
        lines = [f"/{name} /{name.replace('JPEGImages', 'Annotations')[:-3]}png \n" for name in pairs]
        (davis / f"ImageSets/2017/{split}.txt").write_text("".join(lines))
    (davis / "ImageSets/2017").rename(davis / "ImageSets/480p")


def test_davis_2016_is_read_as_it_comes(tmp_path, capsys):
    davis = tiny_folder("davis", tmp_path)
    of_2017 = open_scenes(f"davis:{davis}", "val", tmp_path)
    as_davis_2016(davis)
    scenes = open_scenes(f"davis:{davis}", "val", tmp_path)
    assert scenes.listing.images == of_2017.listing.images and scenes.fingerprint != of_2017.fingerprint
    assert np.unique(scene_mask(scenes, 0)).tolist() == [0, 1]
    result = run_task(tmp_path, f"davis:{davis}")
    assert result.facts["objects"] == 3 and any("DAVIS 2016" in note for note in result.facts["notes"])
    code, text = main(["data", "check", f"davis:{davis}"]), capsys.readouterr().out
    assert code == 0 and "3 videos" in text and "classes" not in text and "object 2" not in text
    Image.fromarray(np.full((48, 72), 38, np.uint8)).save(davis / "Annotations/480p/val0/00001.png")
    assert "the value 38" in next(iter(decode_scenes(scenes)[0].values()))


def test_validation_videos_are_enough(tmp_path, capsys):
    davis = tiny_folder("davis", tmp_path)
    (davis / "ImageSets/2017/train.txt").unlink()
    result = run_task(tmp_path, f"davis:{davis}")
    assert result.numbers == run_task(tmp_path).numbers
    code, text = main(["data", "check", f"davis:{davis}"]), capsys.readouterr().out
    assert code == 0 and "train.txt" in text
    (davis / "ImageSets/2017/val.txt").rename(davis / "ImageSets/2017/train.txt")
    code, text = main(["data", "check", f"davis:{davis}"]), capsys.readouterr().out
    assert code == 1 and "val.txt" in text


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
        replace(TASK, short=4).cost(Scale(spec=export_of().spec, images={"val": 24}, classes=0))
