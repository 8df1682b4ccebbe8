"""Kept heads predict the validation images with the numbers of their results; `bench predict` streams and resumes."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from written import rows_of

import bench as api
from bench.results.heads import is_kept, read_head
from bench.results.record import result_files
from bench.run import predictions as predicting
from downstream.data.scenes import open_scenes, scene_image, scene_mask
from downstream.frozen.task import class_areas
from downstream.metrics.scores import scores
from downstream.tasks.depth_linear import METRICS, depth_metrics, evaluation_mask, read_scene
from imagesets.sets import open_set
from probes.tasks.linear import PROTOCOLS as LINEAR

CLASSES = {
    "linear_sgd@ibot_base_cached": {"epochs": 3},
    "linear@msn_cached": {"epochs": 2},
    "linear_lars@mae_cached": {"epochs": 2, "warmup_epochs": 1},
    "attentive@smoke": {"epochs": 2},
    "finetune@smoke": {"epochs": 2},
    "logreg@dinov2": {"lambdas": (1.0, 0.01)},
}


def head_of(folder: Path) -> Path:
    (path,) = folder.rglob("*.json")
    return path


@pytest.fixture(scope="module")
def few_digits(tmp_path_factory) -> str:
    """A folder of some digits: 8 training and 5 validation images of each class."""
    folder = tmp_path_factory.mktemp("digits")
    for split, count in (("train", 80), ("val", 50)):
        digits = open_set("digits:", split).limited(count)
        for index, label in enumerate(digits.labels):
            path = folder / split / digits.classes[label] / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            digits.image(index).save(path)
    return f"folder:{folder}"


@pytest.mark.parametrize("protocol", CLASSES)
def test_class_predictions_have_the_result_s_numbers(protocol, exports, few_digits, tmp_path):
    """From nothing but the backbone and the two files of the head."""
    heads = tmp_path / "heads"
    settings = {"settings": CLASSES[protocol], "keep_heads": heads, "out": tmp_path / "results"}
    result = api.evaluate(exports[0], protocol, few_digits, **settings)
    images, head = open_set(few_digits, "val"), head_of(heads)
    rows = rows_of(api.predict(exports[0], head.with_suffix(".safetensors"), few_digits, tmp_path / "out"))
    names = [images.classes[label] for label in images.labels]
    is_right = [row["class"] == name for row, name in zip(rows, names, strict=True)]
    in_five = [name in [row[f"class{n}"] for n in ("", 2, 3, 4, 5)] for row, name in zip(rows, names, strict=True)]
    top1 = next(iter(result.numbers))
    assert 100 * sum(is_right) / len(rows) == result.numbers[top1]
    assert 100 * sum(in_five) / len(rows) == result.numbers.get("top5", 100 * sum(in_five) / len(rows))
    loaded = api.load_head(head, exports[0])
    assert loaded.classes == images.classes and loaded.file.result.numbers == result.numbers
    logits: dict[int, np.ndarray] = {}
    loaded.apply(images, logits.__setitem__)
    matrix = torch.from_numpy(np.stack([logits[index] for index in range(len(images))]))
    nll = torch.nn.functional.cross_entropy(matrix, torch.tensor(images.labels)).item()
    # Products of other batches, those of a forward pass and not of 1024 rows, round differently.
    assert nll == pytest.approx(result.numbers["nll"], rel=1e-6)
    (first,) = loaded.predict([images.image(0)])
    assert first == pytest.approx(np.exp(matrix[0].log_softmax(0).numpy()), rel=1e-5)


def test_masks_and_depths_have_the_result_s_numbers(exports, tmp_path):
    heads, out = tmp_path / "heads", tmp_path / "results"
    kept = {"keep_heads": heads / "mask", "out": out}
    few = {"steps": 4, "warmup": 2, "lr": (0.01,)}
    result = api.evaluate(exports[0], "segmentation_linear@smoke", "tiny-ade20k:", settings=few, **kept)
    scenes = open_scenes("tiny-ade20k:", "val", out / "cache")
    folder = scenes.image_path(0).parent
    table = api.predict(exports[0], head_of(heads / "mask"), folder, tmp_path / "masks")
    rows = {row["image"]: row for row in rows_of(table)}
    areas = []
    for index in range(len(scenes)):
        row = rows[scenes.image_path(index).name]
        mask, overlay = Image.open(table.parent / row["mask"]), Image.open(table.parent / row["overlay"])
        assert mask.mode == "P" and overlay.size == mask.size == scene_image(scenes, index).size
        areas.append(class_areas(np.asarray(mask), scene_mask(scenes, index), len(scenes.classes)))
    assert scores(np.stack(areas))["mIoU"] == result.numbers["mIoU"]
    assert {Path(row["mask"]).stem for row in rows.values()} == {Path(name).stem for name in rows}
    names = [row["class"] for row in rows_of(table.with_name("classes.csv"))]
    assert names == list(scenes.classes)

    kept["keep_heads"] = heads / "depth"
    result = api.evaluate(exports[0], "depth_linear@smoke", "tiny-nyu:", settings=few, **kept)
    scenes = open_scenes("tiny-nyu:", "val", out / "cache")
    loaded = api.load_head(head_of(heads / "depth"), exports[0])
    paths = [scenes.image_path(index) for index in range(len(scenes))]
    depths, errors = loaded.predict(paths), []
    for index, depth in enumerate(depths):
        truth = read_scene(scenes, index)[1]
        valid = evaluation_mask(truth, loaded.task.depths, loaded.task.eigen)
        errors.append(list(depth_metrics(torch.from_numpy(depth)[valid].double(), truth[valid].double()).values()))
    means = {name: np.nanmean(np.array(errors)[:, column]) for column, name in enumerate(METRICS)}
    assert means["rmse"] == result.numbers["rmse"] and 100 * means["delta1"] == result.numbers["delta1"]
    table = api.predict(exports[0], head_of(heads / "depth"), paths[0].parent, tmp_path / "depths")
    row = next(row for row in rows_of(table) if row["image"] == paths[0].name)
    millimetres = np.asarray(Image.open(table.parent / row["depth"]))
    assert millimetres.dtype == np.uint16 and np.abs(millimetres / 1000 - depths[0]).max() <= 0.0005001


def test_predictions_are_streamed_and_resumed(exports, tmp_path, monkeypatch):
    """A folder with a broken image; a kill between two images; another head, other images and other backbones."""
    heads, images = tmp_path / "heads", tmp_path / "photos"
    settings = {"settings": {"epochs": 1}, "limit": 100, "keep_heads": heads, "out": tmp_path / "results"}
    api.evaluate(exports[0], "linear_sgd@ibot_base_cached", "digits:", **settings)
    head, digits = head_of(heads), open_set("digits:", "val")
    for index in range(40):
        path = images / f"group {index % 3}" / f"{index}, a.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        digits.image(index).save(path)
    (images / "broken.jpg").write_bytes(b"no image")
    arguments = (exports[0], head, images)
    with pytest.raises(ValueError, match=r"broken\.jpg"):
        api.predict(*arguments, tmp_path / "strict")
    skipping = {"options": api.Options(skip_bad=True)}
    whole = api.predict(*arguments, tmp_path / "whole", **skipping).read_bytes()
    rows = rows_of(tmp_path / "whole/predictions.csv")
    assert api.predict(*arguments, tmp_path / "strict", **skipping).read_bytes() == whole
    assert len(rows) == 41 and [row["image"] for row in rows if row["error"]] == ["broken.jpg"]

    class Killed(BaseException):
        pass

    def kill(rows: predicting.Rows, index: int, prediction: np.ndarray) -> list:
        if index == 20:
            with open(out / "predictions.csv", "ab") as table:
                table.write(b'"half a ro\n')
            raise Killed
        return values(rows, index, prediction)

    values, out = predicting.Rows.values, tmp_path / "killed"
    with monkeypatch.context() as patch:
        patch.setattr(predicting.Rows, "values", kill)
        with pytest.raises(Killed):
            api.predict(*arguments, out, **skipping)
    assert (out / "predictions.csv").read_bytes().endswith(b'"half a ro\n')
    assert api.predict(*arguments, out, **skipping).read_bytes() == whole
    assert api.predict(*arguments, out, **skipping).read_bytes() == whole  # nothing is left to do

    copy = shutil.copytree(images, tmp_path / "copy")
    assert (
        api.predict(exports[0], head, copy, shutil.copytree(out, tmp_path / "moved"), **skipping).read_bytes() == whole
    )
    again = api.predict(exports[0], head, copy, tmp_path / "again", **skipping).parent
    (copy / "broken.jpg").write_bytes(b"new bits")
    header, *lines = whole.splitlines(keepends=True)
    for changed, folder, made in ((lines[::-1], images, out), (lines[20:], images, out), (lines, copy, again)):
        (made / "predictions.csv").write_bytes(header + b"".join(changed))
        with pytest.raises(ValueError) as refused:
            api.predict(exports[0], head, folder, made, **skipping)
        assert refused.value.argument == "out"

    with pytest.raises(ValueError) as refused:
        api.predict(exports[1], head, images, tmp_path / "other")
    assert refused.value.argument == "head" and api.load(exports[1]).digest[:8] in str(refused.value)
    with pytest.raises(ValueError) as refused:
        api.predict(exports[0], head, "digits:", out)
    assert refused.value.argument == "out"
    with pytest.raises(ValueError) as refused:
        api.load_head(head, exports[0], options=api.Options(decode="fast"))
    assert refused.value.argument == "options"
    inside = images / "out"
    refusals = [("out", images, inside), ("out", f"images:{images}", inside), ("images", images / "broken.jpg", out)]
    for argument, *changed in refusals:
        with pytest.raises(ValueError) as refused:
            api.predict(exports[0], head, *changed)
        assert refused.value.argument == argument
    head.with_suffix(".safetensors").write_bytes(b"other tensors")
    with pytest.raises(ValueError) as refused:
        api.load_head(head, exports[0])
    assert refused.value.argument == "head"


@pytest.mark.parametrize(
    ("names", "files"),
    [
        (["a.jpg", "b/a.jpg"], ["a", "b/a"]),
        (["a.jpg", "a.png"], ["a.jpg", "a.png"]),
        (["a-b.jpg", "a:b.jpg", "c.jpg"], ["a-b.jpg-0", "a-b.jpg-1", "c.jpg-2"]),
        (["A.jpg", "a.jpg", "x-1.jpg", "x/1.jpg"], ["A.jpg-0", "a.jpg-1", "x-1.jpg-2", "x/1.jpg-3"]),
    ],
)
def test_no_two_images_share_a_file(names, files, tmp_path):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    images = open_set(f"images:{tmp_path}", "train")
    name_of = predicting.file_names(images)
    assert {predicting.name_of(images, index): name_of(index) for index in range(len(images))} == dict(
        zip(names, files, strict=True)
    )


def test_a_result_without_its_head_is_evaluated_again(bench, exports, tmp_path):
    """With the training from the cache, and the same numbers; protocols without heads are named."""
    settings = ("--suite", "knn@dino,linear_sgd@ibot_base_cached", "--set", "linear_sgd@ibot_base_cached.epochs=1")
    words = (
        "run",
        "--checkpoint",
        exports[0],
        *settings,
        "--data",
        "d=digits:",
        "--limit",
        60,
        "--out",
        tmp_path / "r",
    )
    bench(*words)
    before = {path: path.with_suffix(".npz").read_bytes() for path in result_files(tmp_path / "r")}
    heads = tmp_path / "heads"
    code, output, _ = bench(*words, "--keep-heads", heads)
    assert code == 0 and "no head is kept of knn@dino" in output and "1 done, 1 skipped" in output
    assert {path: path.with_suffix(".npz").read_bytes() for path in before} == before
    written = head_of(heads).stat().st_mtime_ns
    code, output, _ = bench(*words, "--keep-heads", heads)
    assert code == 0 and "0 done, 2 skipped" in output and head_of(heads).stat().st_mtime_ns == written
    result = read_head(head_of(heads)).result
    data = replace(result.data, contents={"val": "bytes-times-all"})
    task = replace(LINEAR["linear_sgd@ibot_base_cached"].task, epochs=1)
    shutil.copytree(heads, tmp_path / "earlier")
    edited = head_of(tmp_path / "earlier")
    edited.write_text(edited.read_text().replace('"contents": {}', '"contents": {"val": "bytes-copied-then"}'))
    assert is_kept(edited, data, task)
    assert not is_kept(edited, replace(data, contents={"val": "others-times-all"}), task)
    assert not is_kept(edited, data, replace(task, epochs=2))
    caution = f"{head_of(heads).name}: trained with limit=60\n"
    words_of_head = ("--checkpoint", exports[0], "--images", "digits:", "--out", tmp_path / "labelled")
    code, _, err = bench("predict", "--head", heads, *words_of_head)
    assert code == 2 and str(head_of(heads).with_suffix(".safetensors")) in err
    code, _, err = bench("predict", "--head", head_of(heads), *words_of_head)
    assert code == 0 and caution in err
    code, _, err = bench(*words[:4], "knn@dino", *words[7:], "--keep-heads", heads)
    assert code == 2 and "--keep-heads" in err and "knn@dino" in err
