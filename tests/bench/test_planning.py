"""`bench plan`: work of jobs, shared work counted once; calibration, time limits and assumed machines."""

import json
import re
import signal
import time
from collections.abc import Hashable
from dataclasses import replace

import pytest
import torch

from bench.run.calibration import MACHINES, Calibration, machine, pass_seconds
from bench.run.forecast import remaining_work, shared_key, totals
from checkpoints.export import ViTExport
from checkpoints.flops import forward_flops, training_flops
from checkpoints.resolve import load
from checkpoints.spec import ViTSpec
from checkpoints.vit import ViT
from engine.tasks import Workspace
from engine.work import Part, Scale, Work, count_flops
from imagesets.sets import ImageSet
from probes.tasks import knn, linear

SPEC = ViTSpec(
    architecture="vit_tiny_patch16_224", image_size=32, patch_size=8, width=24, depth=3, heads=3, mlp_hidden=96
)
SCALE = Scale(spec=SPEC, images={"train": 1000, "val": 200}, classes=10)
KNN = knn.PROTOCOLS["knn@dino"].task
FORWARD = Part(kind="features", count=1000, flops=forward_flops(SPEC), of="train")


@pytest.fixture
def export(exports) -> ViTExport:
    return load(str(exports[0]))


@pytest.fixture
def decoded(monkeypatch) -> list[tuple[str, int]]:
    """Split and index of every image that is decoded, in order."""
    images_decoded: list[tuple[str, int]] = []
    decode = ImageSet.image

    def image(images, index):
        images_decoded.append((images.split, index))
        return decode(images, index)

    monkeypatch.setattr(ImageSet, "image", image)
    return images_decoded


def parts_of(work: Work) -> dict[str, float]:
    counts: dict[str, float] = {}
    for part in work.parts:
        counts[part.kind] = counts.get(part.kind, 0) + part.count
    return counts


def shared_parts(export, space: Workspace, tasks, scale: Scale = SCALE) -> list[dict[str, float]]:
    """The work of each task that the tasks before it, run together with it, have not done yet."""
    done: dict[Hashable, float] = {}
    remaining = []
    for task in tasks:
        work = task.cost(scale)
        keys = [shared_key(task, part, export, space) for part in work.parts]
        remaining.append(parts_of(remaining_work(work, keys, done, "together")))
    return remaining


def test_counted_flops_match_those_of_the_network():
    vit, images = ViT(SPEC), torch.zeros(2, 3, 32, 32)
    assert count_flops(lambda: vit(images))[1] == 2 * forward_flops(SPEC)
    forward_and_backward = count_flops(lambda: vit(images)[0].sum().backward())[1]
    # On a CPU the gradient of the fused attention computes its weights anew.
    assert training_flops(SPEC) <= forward_and_backward / 2 < 1.02 * training_flops(SPEC)
    # 17 tokens: four products of the attention's and two of the MLP's layers, and the two with the tokens.
    tokens, width = 17, 24
    block = 2 * tokens * (4 * width**2 + 2 * width * 96) + 4 * tokens**2 * width
    assert forward_flops(SPEC) == 3 * block + 2 * 16 * width * 3 * 8**2


def test_knn_counts_a_pass_and_all_pairs():
    work = KNN.cost(SCALE)
    assert parts_of(work) == {"features": 1200, "comparisons": 1000 * 200, "libraries": 1}
    assert work.images == 1200 and work.disk == 4 * 24 * 1200
    assert work.flops == 1200 * forward_flops(SPEC) + 2 * 24 * 1000 * 200


def test_an_augmented_sweep_counts_every_epoch_and_head():
    task = linear.PROTOCOLS["linear_sgd@ibot_base"].task
    parts = {part.kind: part for part in task.cost(SCALE).parts}
    assert parts["crops"].count == 100 * 900 and parts["head steps"].count == 100
    assert parts["head steps"].flops == 45 * 4 * 900 * 48 * 10  # rates, two products, images, class token and mean
    assert parts["head images"].count == 100 * 100 + 200
    cached = parts_of(replace(task, augment=False).cost(SCALE))
    assert cached["features"] == 1200 and "crops" not in cached


def test_features_that_tasks_share_are_counted_once(export, tmp_path):
    space = Workspace(cache=tmp_path, data="digits:")
    tasks = (KNN, replace(KNN, k=(5,)), replace(KNN, fraction=0.1), replace(KNN, interpolation="bilinear"))
    counts = [parts["features"] for parts in shared_parts(export, space, tasks)]
    assert counts == [1200, 0, 100, 1200]


def test_a_shared_stream_of_crops_costs_as_much_as_its_longest_task():
    done: dict[Hashable, float] = {}

    def remaining(count: float, stream: str, group: str = "together") -> dict[str, float]:
        work = Work(parts=(Part(kind="crops", count=count, of="augmented"),))
        return parts_of(remaining_work(work, [stream], done, group))

    assert [remaining(count, "first") for count in (90, 100, 50)] == [{"crops": 90}, {"crops": 10}, {"crops": 0}]
    # Another stream of the same images crops what was decoded for the first one, as far as that goes.
    assert [remaining(count, "second") for count in (60, 120)] == [
        {"further crops": 60, "crops": 0},
        {"further crops": 40, "crops": 20},
    ]
    assert remaining(110, "first") == {"further crops": 10, "crops": 0}
    assert remaining(50, "third", "alone") == {"crops": 50}


def test_augmented_sweeps_on_one_stream_share_it(export, tmp_path):
    space = Workspace(cache=tmp_path, data="digits:")
    names = ("linear_sgd@ibot_base", "linear@dino", "linear@mocov3", "linear_lars@mae")
    remaining = shared_parts(export, space, [linear.PROTOCOLS[name].task for name in names])
    assert [parts["crops"] for parts in remaining] == [90_000, 0, 0, 0]
    assert [parts.get("further crops") for parts in remaining] == [None, None, None, 81_000]  # MAE uses another crop


def test_streams_run_together_decode_as_many_images_as_counted(export, decoded, tmp_path):
    space = Workspace(cache=tmp_path, data="tiny:")
    crop = linear.Linear(lrs=(1.0,), epochs=1, batch=16, select="val")
    tasks = (crop, replace(crop, crop_rule="mae", epochs=2), replace(crop, train_interpolation="bicubic"))
    scale = replace(SCALE, images={"train": 64, "val": 32})
    remaining = shared_parts(export, space, tasks, scale)
    assert [outcome.metrics["top1"].value >= 0 for _, outcome in linear.Linear.together(tasks, export, space)]
    assert [split for split, _ in decoded].count("train") == sum(parts["crops"] for parts in remaining) == 128
    assert sum(parts.get("further crops", 0) for parts in remaining) == 128


@pytest.mark.parametrize("decode", ["exact", "fast"])
def test_further_crops_are_timed_on_images_that_are_already_decoded(decode, export, decoded, tmp_path):
    space = Workspace(cache=tmp_path, data="tiny:", decode=decode, workers=0)
    seconds, waiting = pass_seconds("further crops", export, space, 0.01)
    assert 0 < waiting <= seconds and len(decoded) == len(set(decoded)) >= 16


def test_seconds_are_measured_or_else_derived_from_flops(tmp_path):
    units = {"": {"features": 0.5}, "a": {"features": 0.25}}
    calibration = Calibration(path=tmp_path / "c.json", rate=1e9, units=units)
    trained = Part(kind="training", count=10, flops=2e8)
    assert [calibration.seconds(FORWARD, task) for task in "ab"] == [250, 500]
    assert calibration.seconds(trained, "a") == 2.0 and calibration.seconds(Part(kind="updates", count=3), "a") == 0


def test_an_assumed_machine_is_limited_by_decoding_or_by_compute():
    one_gpu, eight_gpus = (machine("h100", gpus, None, "bfloat16") for gpus in (1, 8))
    reading = Part(kind="features", count=2400, flops=1)
    computing = Part(kind="features", count=1, flops=989e12)
    assert one_gpu.seconds(reading, "") == 1.0 and one_gpu.seconds(computing, "") == pytest.approx(2.5)
    assert eight_gpus.seconds(computing, "") == pytest.approx(2.5 / 7.2)
    assert replace(one_gpu, loaders=16).seconds(reading, "") == 0.5
    assert one_gpu.seconds(Part(kind="start", count=2), "") == 60
    with pytest.raises(ValueError, match="there are: h100, a100"):
        machine("tpu", 1, None, "bfloat16")
    assert replace(one_gpu, decode="fast").seconds(reading, "") == pytest.approx(300 / 540)
    assert one_gpu.decoding(reading) == 1.0 and one_gpu.decoding(computing) == 0.0
    assert all("assumed" in line for assumed in MACHINES.values() for line in assumed.lines())


@pytest.fixture
def plan(bench, exports, tmp_path):
    """`code, out, err = plan("--suite", ...)` of the first export on a hundred digits."""

    def call(*words: object, command: str = "plan") -> tuple[int, str, str]:
        data = ("--data", "digits=digits:", "--limit", "100")
        return bench(command, "--checkpoint", exports[0], "--out", tmp_path / "out", *data, *words)

    return call


def test_a_calibration_is_saved_and_reused(plan, tmp_path):
    suite = ("--suite", "knn@dino,lowshot@bench")
    code, output, _ = plan(*suite)
    counts, times = output.split("measuring this machine")
    assert code == 0 and "  knn@dino on digits: 200 images in 1.0 passes" in counts
    assert "  lowshot@bench on digits: no images to read" in counts
    assert "  knn@dino on digits: " in times and "  lowshot@bench on digits: " in times
    assert "2 of 2 jobs one after another: " in times and "at once: 1 job, which uses all" in times
    assert "% decoding" in times and "% forward passes" in times  # cores do both in turn
    (calibration,) = (tmp_path / "out/cache/calibration").glob("*.json")
    before = calibration.stat().st_mtime_ns
    _, output, _ = plan(*suite)
    assert calibration.stat().st_mtime_ns == before and "measuring" not in output  # nothing was measured again
    assert re.search(r" s, \d+% [a-z ]+; 200 images in 1.0 passes", output)  # the time beside the counts
    _, output, _ = plan(*suite, "--set", "knn.k=5")  # other settings are measured, what was measured is known
    assert output.split("measuring")[1].count("  knn@dino on digits with k=5: ") == 1
    times = plan(*suite, "--fresh")[1].split("measuring")[1]
    assert "  knn@dino on digits: " in times and "  lowshot@bench on digits: " in times


def test_a_dry_run_uses_the_times_measured_by_a_plan(plan):
    code, output, _ = plan("--suite", "knn@dino", "--dry-run", command="run")
    assert code == 0 and "200 images in 1.0 passes" in output and "no time known" not in output
    assert "the time of these jobs is not known: bench plan, with the same options, measures it" in output
    plan("--suite", "knn@dino")
    output = plan("--suite", "knn@dino,lowshot@bench", "--dry-run", command="run")[1]
    assert "the time of 1 of 2 jobs is not known" in output


def test_measuring_stops_when_its_time_is_over(plan, monkeypatch):
    monkeypatch.setattr("bench.run.forecast.MEASURING", 0)
    code, output, _ = plan("--suite", "knn@dino,lowshot@bench")
    assert code == 0 and "2 jobs are not measured yet" in output and "0 of 2 jobs" in output


def test_a_measurement_that_takes_too_long_is_abandoned_and_other_jobs_are_measured(plan, monkeypatch):
    monkeypatch.setattr("bench.run.forecast.LIMIT", 3.0)
    monkeypatch.setattr("probes.tasks.knn.Knn.cost", lambda task, scale: Work(parts=(Part(kind="fits", count=1),)))
    endless = Work(parts=(Part(kind="fits", count=1, flops=1e18),))
    monkeypatch.setattr("probes.tasks.lowshot.LowShot.cost", lambda task, scale: endless)
    monkeypatch.setattr("probes.tasks.lowshot.LowShot.benchmark", lambda *values: time.sleep(60))
    started, handler = time.perf_counter(), signal.getsignal(signal.SIGALRM)
    code, output, _ = plan("--suite", "lowshot@bench,knn@dino")
    assert time.perf_counter() - started < 60 and signal.getsignal(signal.SIGALRM) == handler
    assert code == 0 and "  knn@dino on digits: " in output.split("measuring")[1]
    assert "1 jobs are not measured yet" in output and "1 of 2 jobs" in output


def test_a_plan_as_json_and_as_a_shell_script(plan, tmp_path):
    words = ("--suite", "knn@dino,linear@dino_cached", "--set", "knn.k=5", "--assume", "h100", "--gpus", 2)
    code, output, _ = plan(*words, "--json")
    jobs = json.loads(output)
    by_name = {job["protocol"]: job for job in jobs}
    assert code == 0 and by_name.keys() == {"knn@dino", "linear@dino_cached"}
    first, second = (by_name[name]["command"] for name in ("knn@dino", "linear@dino_cached"))
    assert first[:2] == ["bench", "run"] and "--suite=knn@dino" in first and "knn.k=5" in first
    assert "knn.k=5" not in second and "--limit=100" in first and jobs[0]["gpus"] == 2
    assert jobs[0]["seconds"] <= jobs[1]["seconds"]  # cheap ones first
    assert all(job["seconds"] > 0 and job["flops"] > 0 for job in jobs)
    code, output, _ = plan(*words, "--script")
    commands = [line for line in output.splitlines() if line.startswith("bench run ")]
    assert code == 0 and output.startswith("#!/usr/bin/env bash\n") and len(commands) == 2
    assert not list((tmp_path / "out").rglob("calibration"))  # nothing was measured


def test_known_image_sets_need_no_files_on_an_assumed_machine(bench, refused, exports, tmp_path):
    words = ("plan", "--checkpoint", exports[0], "--suite", "knn@dino,linear@dino", "--out", tmp_path)
    code, output, _ = bench(*words, "--data", "imagenet", "--assume", "h100")
    assert code == 0 and "1331167 images in 1.0 passes" in output and "assumed, not measured: 1 x NVIDIA H100" in output
    code, output, _ = bench(*words, "--data", "imagenet", "--assume", "h100", "--precision", "float32")
    assert code == 0 and "in float32 forward" in output
    code, output, _ = bench(*words, "--data", "imagenet", "--assume", "h100", "--script")
    assert code == 0 and output.count("--precision=bfloat16") == 2  # as forecast
    refused(*words, "--data", "imagenet", named="images are needed | NAME=URL | --assume")


def test_a_plan_breaks_its_time_down_by_kind_of_work(bench, exports, tmp_path):
    def terms(*words: object) -> dict[str, dict[str, float]]:
        options = ("--suite", "knn@dino,linear@dino,finetune@mae", "--data", "imagenet", "--assume", "h100", *words)
        jobs = json.loads(bench("plan", "--checkpoint", exports[0], "--out", tmp_path, *options, "--json")[1])
        assert all(sum(job["terms"].values()) == pytest.approx(job["seconds"]) for job in jobs)
        return {job["protocol"]: job["terms"] for job in jobs}

    exact, fast, unlimited = terms(), terms("--decode", "fast"), terms("--workers", 10**9)
    knn, crops = ({name: of[name]["decoding"] for name in exact} for of in (exact, fast))
    assert knn["knn@dino"] == pytest.approx(1.8 * crops["knn@dino"]) and knn["linear@dino"] > crops["linear@dino"]
    assert exact["finetune@mae"]["augmentation"] > fast["finetune@mae"]["augmentation"] > 0
    assert unlimited["knn@dino"]["decoding"] < unlimited["knn@dino"]["search"]  # a small network
    assert not unlimited["finetune@mae"]["augmentation"] and unlimited["finetune@mae"]["training steps"]


@pytest.mark.usefixtures("toys")
def test_a_task_without_a_cost_has_no_known_time(plan):
    code, output, _ = plan("--suite", "toy@one", "--assume", "h100")
    assert code == 0 and "toy@one on digits: no time known" in output and "toy does not count" in output


def test_a_job_that_would_fail_is_reported_with_its_fix(plan):
    code, output, _ = plan("--suite", "finetune@mae", "--assume", "h100")
    assert code == 1 and "finetune@mae on digits: would fail: 100 training images do not fill a batch of 1024" in output
    code, output, _ = plan("--suite", "semi@extrema_cls_1percent", "--assume", "h100")
    assert code == 1 and "would fail: 10 training images do not fill a batch of 1024" in output
    assert "; --set semi.batch=8\n" in output  # one of each of ten classes, where 1 % is one image


def test_a_plan_with_nothing_left_counts_no_jobs():
    (line,) = totals([], 1e9, 0, "exact")
    assert "nothing" in line and "0 of 0" not in line
