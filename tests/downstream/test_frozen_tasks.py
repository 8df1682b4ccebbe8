"""Tasks on frozen patches end to end on generated scenes: metrics, shared work, resuming after kills, and errors."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from elsewhere import ranks
from frozen_program import CAPI, DEPTHS, HUMMINGBIRD, LOGISTIC, SEGMENTER, TASKS
from own_networks import write_networks
from PIL import Image
from slow_clock import slow_clock
from toy_scenes import PLAIN, SPECS, export_of, kill_at_call, workspace

from bench.__main__ import main
from checkpoints.resolve import load_frozen
from downstream.data.scenes import decode_scenes, open_scenes, scene_depth, tiny_folder
from downstream.frozen import heads as training
from downstream.frozen import patches
from downstream.frozen.heads import HeadTraining
from downstream.metrics.scores import scores
from downstream.tasks import dense_knn, depth_linear, segmentation_linear
from engine.tasks import Outcome
from engine.training.interruptions import Stopped
from engine.work import Scale

PROGRAM = Path(__file__).with_name("frozen_program.py")


def run_task(name: str, folder: Path, **settings) -> Outcome:
    task, url = TASKS[name]
    return task.run(export_of(), workspace(folder, url, **settings))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Callable[[str], Outcome]:
    """A function from a task's name to the outcome of an uninterrupted run, which was never silent for ten seconds."""

    @cache
    def outcome_of(name: str) -> Outcome:
        with slow_clock(file=1.5):
            return run_task(name, tmp_path_factory.mktemp(name))

    return outcome_of


@pytest.mark.slow
@pytest.mark.exhaustive
def test_no_mm_library_is_imported(tmp_path):
    """Neither by listing all tasks, of which some need them, nor by running those on frozen patches."""
    program = (
        "from engine.extensions import load_extensions; load_extensions('downstream');"
        "from frozen_program import *; compute_metrics(Path(sys.argv[1]), World());"
        "print(json.dumps(list(sys.modules)))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(PROGRAM.parent), *sys.path])}
    command = [sys.executable, "-c", program, tmp_path]
    modules = json.loads(subprocess.run(command, capture_output=True, env=environment, check=True).stdout)
    assert "downstream.tasks.dense_knn" in modules
    assert not {"mmengine", "mmcv", "mmseg", "mmdet", "pycocotools", "cv2"} & set(modules)


def test_a_gradient_that_is_not_finite_is_an_error_after_the_last_step_too(tmp_path, monkeypatch):
    loss_of = segmentation_linear.SegmentationLinear.loss

    def breaking_last(self, head, features, targets, step, random):
        loss = loss_of(self, head, features, targets, step, random)
        if step == self.steps - 1:
            loss.register_hook(lambda gradient: gradient * float("nan"))
        return loss

    monkeypatch.setattr(segmentation_linear.SegmentationLinear, "loss", breaking_last)
    with pytest.raises(ValueError, match="the gradient norm is nan in step 5 of 6"):
        run_task("segmentation", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_every_number_of_processes_gives_the_same_metrics(size, uninterrupted, tmp_path):
    """Each batch and each tile of a search is the same; the results have the same bits."""
    expected = {name: dict(uninterrupted(name).numbers) for name in TASKS}
    for metrics in [json.loads(process.end()) for process in ranks(size, PROGRAM, tmp_path)]:
        assert metrics == expected


def test_metrics_follow_from_the_arrays(uninterrupted):
    segmentation, depth, capi = map(uninterrupted, ("segmentation", "depth", "capi"))
    assert segmentation.numbers == pytest.approx(scores(segmentation.arrays["areas"]))
    assert scores(capi.arrays["areas"])["mIoU"] == pytest.approx(capi.numbers["mIoU"])
    assert segmentation.arrays["areas"][..., 2].sum(1).min() > 0.8 * 64 * 96
    for name, metric in depth.metrics.items():
        scale = 100 if metric.unit == "%" else 1
        assert metric.value == pytest.approx(scale * np.nanmean(metric.per_image)), name
    assert not any(metric.chosen_on_val for metric in segmentation.metrics.values())
    trials = segmentation.facts["tried"]
    assert len(trials) == 4
    assert segmentation.facts["learning_rate"] == max(trials, key=lambda trial: trial["mIoU"])["lr"]


def test_selection_on_the_validation_images_is_marked(tmp_path):
    task = SEGMENTER.selecting("val")
    result = task.run(export_of(), workspace(tmp_path, "tiny-ade20k:"))
    assert all(metric.chosen_on_val for metric in result.metrics.values())
    assert result.numbers["mIoU"] == max(trial["mIoU"] for trial in result.facts["tried"])
    assert task.selecting("holdout") == SEGMENTER and DEPTHS.selecting("val") == DEPTHS


def test_evaluation_settings_reuse_the_trained_heads(tmp_path):
    single_scale = run_task("segmentation", tmp_path)
    folders = {path.name for path in (tmp_path / "cache/segmentation_linear").iterdir()}
    multi_scale = replace(SEGMENTER, scales=(0.5, 1.0), flip=True).run(export_of(), workspace(tmp_path, "tiny-ade20k:"))
    assert {path.name for path in (tmp_path / "cache/segmentation_linear").iterdir()} == folders
    assert multi_scale.numbers != single_scale.numbers


@pytest.mark.parametrize("name", [pytest.param("segmentation", marks=pytest.mark.exhaustive), "depth"])
def test_killed_training_resumes(name, uninterrupted, tmp_path):
    """Killed in the fourth step, after the state of the third was saved: the result has the same bits."""
    kill_at_call(HeadTraining, "update", 4, lambda: run_task(name, tmp_path / "killed"))
    states = [path.name for path in (tmp_path / "killed").rglob("step-*.safetensors")]
    assert max(states).startswith("step-000000003-")
    resumed = run_task(name, tmp_path / "killed")
    assert dict(resumed.metrics) == dict(uninterrupted(name).metrics) and resumed.facts == uninterrupted(name).facts


def test_stopped_training_resumes(uninterrupted, tmp_path, monkeypatch):
    update = HeadTraining.update

    def update_with_signal(self, maps, targets):
        update(self, maps, targets)
        if self.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(training, "save_interval", lambda steps: steps)
    monkeypatch.setattr(HeadTraining, "update", update_with_signal)
    with pytest.raises(Stopped, match="after step 2 of 6 of depth_linear on tiny-nyu:"):
        run_task("depth", tmp_path / "stopped")
    monkeypatch.setattr(HeadTraining, "update", update)
    assert dict(run_task("depth", tmp_path / "stopped").metrics) == dict(uninterrupted("depth").metrics)


def test_interrupted_extraction_resumes_and_is_shared(tmp_path, monkeypatch):
    """Tasks that read the same images at the same size share their features."""
    read, scene_image = [], patches.scene_image

    def fail_at_fifth_image(scenes, index):
        read.append(index)
        if len(read) == 5:
            raise KeyboardInterrupt
        return scene_image(scenes, index)

    monkeypatch.setattr(patches, "scene_image", fail_at_fifth_image)
    settings = {"batch_size": 2, "workers": 1}
    with pytest.raises(KeyboardInterrupt):
        run_task("capi", tmp_path, **settings)
    capi = run_task("capi", tmp_path, **settings)
    assert capi.cost["forwards"] == 16 - 4
    assert run_task("logistic", tmp_path, **settings).cost["forwards"] == 0
    assert LOGISTIC.shares(export_of(), workspace(tmp_path, "tiny-voc:")) == CAPI.shares(export_of(), None)


@pytest.mark.parametrize(
    "spec",
    ["relative", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("registers", "class attention"))],
)
def test_tasks_run_on_every_architecture(spec, tmp_path):
    """Image sides are padded or rounded up to a multiple of the patch size, 14."""
    odd = replace(SPECS[spec], patch_size=14, image_size=28) if SPECS[spec].family == "vit" else SPECS[spec]
    export = export_of(odd)
    for task, url in ((DEPTHS, "tiny-nyu:"), (HUMMINGBIRD, "tiny-voc:")):
        short = replace(task, steps=2) if hasattr(task, "steps") else task
        result = short.run(export, workspace(tmp_path, url, limit=4))
        assert all(np.isfinite(metric.value) for metric in result.metrics.values())


def test_bad_scenes_are_named_or_skipped(tmp_path):
    ade, nyu = tiny_folder("ade20k", tmp_path), tiny_folder("nyu", tmp_path)
    mask = ade / "annotations/validation/ADE_val_00000000.png"
    Image.open(mask).resize((48, 32)).save(mask)
    depth_map = nyu / "room_val/sync_depth_00000.png"
    Image.fromarray(np.asarray(Image.open(depth_map)) // 1000).save(depth_map)
    for task, url, file in ((SEGMENTER, f"ade20k:{ade}", mask), (DEPTHS, f"nyu:{nyu}", depth_map)):
        with pytest.raises(ValueError) as error:
            task.run(export_of(), workspace(tmp_path, url))
        assert str(error.value).startswith(f"{file}: ") and "\n" not in str(error.value)
        result = task.run(export_of(), workspace(tmp_path, url, skip_bad=True))
        assert len(result.facts["val"]["skipped"]) == 1 and not result.facts["train"]["skipped"]
    assert np.isnan(result.metrics["rmse"].per_image).tolist() == [True] + 7 * [False]


IMPOSSIBLE = [
    (np.zeros((60, 80), np.uint16), "no pixel has a depth"),
    (np.full((60, 80), 5, np.uint16), "read as 0.005 m"),
    (np.full((30, 40), 5000, np.uint16), "the depth is 30 x 40 pixels and its image 60 x 80"),
    (np.full((60, 80), 200, np.uint8), "depths of 8 bits end at 0.255 m"),
    (np.full((60, 80, 3), 200, np.uint8), "16-bit grey PNG"),
    (np.full((60, 80), 65535, np.uint16), "no pixel has a depth"),
    *[(np.where(np.eye(60, 80), bad, 5000), "negative, infinite or NaN") for bad in (np.nan, -1.0)],
]


def test_impossible_depths_are_refused(tmp_path):
    nyu = tiny_folder("nyu", tmp_path)
    for values, message in IMPOSSIBLE:
        scenes = open_scenes(f"nyu:{nyu}", "val", tmp_path)
        image = Image.fromarray(values.astype(np.float32) if values.dtype == float else values)
        image.save(nyu / scenes.listing.depths[3], "TIFF" if values.dtype == float else "PNG")
        with pytest.raises(ValueError, match=message):
            scene_depth(scenes, 3, (60, 80))
        (line,) = decode_scenes(scenes)[0].values()
        assert scenes.listing.depths[3] in line and message in line


# How the metres (H, W) float64 of the tiny set are stored, the options that tell it, and the rounding in metres.
UNITS = [
    (lambda metres: metres.astype(np.float32), "?unit=m", 1e-6),
    (lambda metres: np.round(100 * metres).astype(np.uint16), "?unit=cm", 5.1e-3),
    (lambda metres: np.round(1000 * metres).astype(np.int32), "?unit=mm", 1e-6),
    (lambda metres: np.where(metres, np.round(1000 * metres), 65535).astype(np.uint16), "", 1e-6),
    (lambda metres: np.where(metres, np.round(5000 * metres), 65535).astype(np.uint16), "?scale=5000", 1e-4),
    (lambda metres: np.round(25.5 * metres).astype(np.uint8), "?scale=25.5", 0.02),
    (lambda metres: np.round(25 * metres).astype(np.uint8), "?unit=cm&scale=0.25", 0.0201),
]


def test_own_depth_is_read_in_its_unit(tmp_path):
    nyu = tiny_folder("nyu", tmp_path)
    expected = open_scenes(f"nyu:{nyu}", "val", tmp_path)
    metres = scene_depth(expected, 2, (60, 80))
    depths = {path: np.asarray(Image.open(path)) / 1000 for path in nyu.rglob("sync_depth_*.png")}
    for old, new in (("nyu_train.txt", "train.txt"), ("nyu_test.txt", "val.txt")):
        (nyu / old).rename(nyu / new)
    for convert, options, tolerance in UNITS:
        for path, of_path in depths.items():
            Image.fromarray(convert(of_path)).save(path, "TIFF")
        scenes = open_scenes(f"nyu:{nyu}{options}", "val", tmp_path)
        np.testing.assert_allclose(scene_depth(scenes, 2, (60, 80)), metres, atol=tolerance, err_msg=options)
        assert scenes.listing.images == expected.listing.images and not decode_scenes(scenes)[0], options
        if options not in ("", "?unit=mm"):
            assert open_scenes(f"nyu:{nyu}", "val", tmp_path).fingerprint != scenes.fingerprint, options


def test_wrong_options_of_depth_are_refused(tmp_path):
    nyu = tiny_folder("nyu", tmp_path)
    for options, message in (
        ("?unit=km", "unit"),
        ("?scale=0", "scale"),
        ("?scale=nan", "scale"),
        ("?scal=5", "'scale'"),
        ("?unit=m&unit=cm", "twice"),
        ("?val=none.txt", r"no list none\.txt"),
    ):
        with pytest.raises(ValueError, match=message):
            open_scenes(f"nyu:{nyu}{options}", "val", tmp_path)
    with pytest.raises(ValueError, match="no option 'unit'"):
        open_scenes("tiny-davis:?unit=m", "val", tmp_path)


@pytest.mark.parametrize("name", ["nyu/nyu_test.txt", "davis/ImageSets/2017/val.txt"])
def test_names_listed_twice_are_refused(name, tmp_path):
    layout, _, file = name.partition("/")
    root = tiny_folder(layout, tmp_path)
    lines = (root / file).read_text().splitlines()
    (root / file).write_text("\n".join([*lines, lines[2]]))
    with pytest.raises(ValueError, match="twice") as error:
        open_scenes(f"{layout}:{root}", "val", tmp_path)
    assert lines[2].split()[0].lstrip("/") in str(error.value)


def test_lists_may_have_any_name(tmp_path):
    nyu = tiny_folder("nyu", tmp_path)
    (nyu / "mine.txt").write_text("\ufeff" + (nyu / "nyu_test.txt").read_text())
    own = open_scenes(f"nyu:{nyu}?val=mine.txt", "val", tmp_path)
    assert own.fingerprint == open_scenes(f"nyu:{nyu}", "val", tmp_path).fingerprint
    (nyu / "test.txt").write_text("")
    assert any("test.txt" in note for note in open_scenes(f"nyu:{nyu}", "val", tmp_path).notes)
    with (nyu / "nyu_test.txt").open("r+b") as file:
        file.truncate(3 << 30)  # sparse: takes no space
    with pytest.raises(ValueError, match=r"nyu_test\.txt: 3,221,225,472 bytes"):
        open_scenes(f"nyu:{nyu}", "val", tmp_path)


@pytest.mark.parametrize("split", ["train", "val"])
def test_depths_that_do_not_count_are_found_before_a_run_and_by_the_check(split, tmp_path, capsys):
    nyu = tiny_folder("nyu", tmp_path)
    for path in (nyu / f"room_{split}").glob("*.png"):
        Image.fromarray(np.full((60, 80), 12000, np.uint16)).save(path)
    with pytest.raises(ValueError, match=f"no pixel of {split}.* to 10 m"):
        DEPTHS.check_images(workspace(tmp_path, f"nyu:{nyu}"))
    code, text = main(["data", "check", f"nyu:{nyu}"]), capsys.readouterr().out
    assert code == 1 and f"no pixel of {split}" in text
    replace(DEPTHS, depths=(0.001, 15.0)).check_images(workspace(tmp_path, f"nyu:{nyu}"))


@pytest.mark.parametrize(("factor", "advice"), [(1, ""), (0.1, "save 1000 for each metre"), (2.2, "?scale=5000")])
def test_depths_in_another_unit_are_warned_of_in_a_run_and_in_the_check(factor, advice, tmp_path, capsys, on_terminal):
    """A single map could show near or far objects, but not all maps of rooms."""
    nyu = tiny_folder("nyu", tmp_path)
    for path in nyu.rglob("sync_depth_*.png"):
        Image.fromarray((np.asarray(Image.open(path)) * factor).astype(np.uint16)).save(path)
    outcome = DEPTHS.run(export_of(), workspace(tmp_path, f"nyu:{nyu}", limit=4))
    warnings = outcome.facts.get("warnings", [])
    lines = [line for line in capsys.readouterr().err.splitlines() if "depth maps of val" in line]
    assert lines == [f"nyu:{nyu}#limited-4: {warning}" for warning in warnings] and len(lines) == bool(advice)
    assert all(advice in line for line in lines)
    assert main(["data", "check", f"nyu:{nyu}"]) == 0
    text = capsys.readouterr().out
    assert text.count("depth maps of") == 2 * bool(advice) and advice in text
    if factor > 1:  # not if the task is set to such depths
        far = replace(DEPTHS, depths=(0.001, 20.0)).run(export_of(), workspace(tmp_path, f"nyu:{nyu}", limit=4))
        assert "warnings" not in far.facts


@pytest.mark.parametrize(("task", "skip_bad"), [(SEGMENTER, False), (HUMMINGBIRD, True), (CAPI, False)])
def test_masks_of_a_single_class_are_refused(task, skip_bad, tmp_path):
    """As in binary masks of 0 and 255, where 255 means unlabelled."""
    voc = tiny_folder("voc", tmp_path)
    for path in (voc / "SegmentationClass").iterdir():
        mask = np.asarray(Image.open(path))
        Image.fromarray(np.where(mask > 0, 255, 0).astype(np.uint8)).save(path)
    if skip_bad:
        path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"background alone.*255"):
        task.run(export_of(), workspace(tmp_path, f"voc:{voc}", skip_bad=skip_bad))


def test_lists_of_nyu_are_sorted_and_may_lie_beside_the_scenes(tmp_path):
    nyu = tiny_folder("nyu", tmp_path)
    first = open_scenes(f"nyu:{nyu}", "train", tmp_path)
    assert first.listing.images == tuple(sorted(first.listing.images))
    (nyu / "NYU").mkdir()
    for folder in ("room_train", "room_val"):
        (nyu / folder).rename(nyu / "NYU" / folder)
    moved = open_scenes(f"nyu:{nyu}", "train", tmp_path)
    assert moved.listing.images == tuple(f"NYU/{name}" for name in first.listing.images)
    (nyu / "nyu_test.txt").write_text("/a.jpg\n")
    with pytest.raises(ValueError, match=r"nyu_test\.txt, line 1: '/a\.jpg'"):
        open_scenes(f"nyu:{nyu}", "val", tmp_path)


def test_planned_work_is_counted():
    spec = replace(PLAIN, depth=4)
    scale = Scale(spec=spec, images={"train": 40, "val": 8}, classes=150)
    for task in (SEGMENTER, DEPTHS):
        counts = {part.kind: part.count for part in task.cost(scale).parts}
        assert (counts["crops"], counts["heads"]) == (24, 6 * len(task.lr))
        assert counts["evaluation"] == 8 + (12 if task is SEGMENTER else 0)
    for task in (HUMMINGBIRD, CAPI, LOGISTIC):
        parts = task.cost(scale).parts
        assert sum(part.count for part in parts if part.kind == "features") == 48
    (search,) = [part for part in HUMMINGBIRD.cost(scale).parts if part.kind == "heads"]
    assert search.flops == 2 * spec.width * 8 * 16 * 40  # a multiply-add for each pair and channel
    for module in (segmentation_linear, depth_linear, dense_knn):
        for protocol in module.PROTOCOLS.values():
            assert protocol.task.cost(scale).memory > 0


def test_unsuitable_networks_and_images_are_refused(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    write_networks(tmp_path)
    vector = load_frozen("module:toynets:vector").spec
    for task, _ in TASKS.values():
        with pytest.raises(ValueError, match="one vector per image"):
            task.check_network(vector)
        with pytest.raises(ValueError, match="this task needs"):
            task.check_images(workspace(tmp_path, "tiny-coco:"))
    without = replace(PLAIN, class_token=False, class_position=False, pool="avg")
    with pytest.raises(ValueError, match="has no class token"):
        depth_linear.PROTOCOLS["depth_linear@dinov2_lin1"].task.check_network(without)
    with pytest.raises(ValueError, match="memory of 10 patches"):
        replace(HUMMINGBIRD, memory=10).cost(Scale(spec=PLAIN, images={"train": 40, "val": 8}, classes=150))


def test_features_of_patches_lie_in_reserved_space(tmp_path, monkeypatch):
    """On a full disk, a write into a sparse file that is mapped to memory would end the process without a word."""
    shapes = {"features": ((64, 1024), np.float32), "done": ((5,), np.bool_)}
    patches._allocate(tmp_path, shapes)
    for name, (shape, dtype) in shapes.items():
        path = tmp_path / f"{name}.npy"
        array = np.load(path, mmap_mode="r+")
        assert array.shape == shape and array.dtype == dtype and not array.any()
        assert path.stat().st_blocks * 512 >= path.stat().st_size
        array[-1] = 1
    patches._allocate(tmp_path, shapes)  # keeps what is there
    assert np.load(tmp_path / "features.npy")[-1].all()
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ValueError, match=r"need 0\.\d MiB in .* give out "):
        patches._allocate(tmp_path / "other", shapes)
    assert (tmp_path / "other" / "features.npy").stat().st_blocks * 512 < 64 * 1024  # not filled
