"""`bench plan`: what jobs take, counted once where they share it, beside truth after the run; assumed machines."""

import json
import re
import signal
import time
from collections.abc import Hashable
from dataclasses import replace

import pytest
import torch

from bench.run.calibration import MACHINES, Calibration, machine, pass_seconds
from bench.run.forecast import remaining_work, shared_key
from checkpoints.flops import forward_flops, training_flops
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


def parts_of(work: Work) -> dict[str, float]:
    counts: dict[str, float] = {}
    for part in work.parts:
        counts[part.kind] = counts.get(part.kind, 0) + part.count
    return counts


def shared_parts(export, space: Workspace, tasks, scale: Scale = SCALE) -> list[dict[str, float]]:
    """What is left for each of the tasks, which run together, by those before it."""
    done: dict[Hashable, float] = {}
    left = []
    for task in tasks:
        work = task.cost(scale)
        keys = [shared_key(task, part, export, space) for part in work.parts]
        left.append(parts_of(remaining_work(work, keys, done, "together")))
    return left


def test_operations_without_memory_are_those_of_the_network():
    vit, images = ViT(SPEC), torch.zeros(2, 3, 32, 32)
    assert count_flops(lambda: vit(images))[1] == 2 * forward_flops(SPEC)
    both = count_flops(lambda: vit(images)[0].sum().backward())[1]
    # On a CPU the gradient of the fused attention computes its weights anew.
    assert training_flops(SPEC) <= both / 2 < 1.02 * training_flops(SPEC)
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


def test_what_tasks_share_is_counted_once(exports, tmp_path):
    from checkpoints.resolve import load

    export, space = load(str(exports[0])), Workspace(cache=tmp_path, data="digits:")
    tasks = (KNN, replace(KNN, k=(5,)), replace(KNN, fraction=0.1), replace(KNN, interpolation="bilinear"))
    left = [parts["features"] for parts in shared_parts(export, space, tasks)]
    assert left == [1200, 0, 100, 1200]


def test_a_shared_stream_costs_what_the_longest_takes():
    done: dict[Hashable, float] = {}

    def left(count: float, stream: str, group: str = "together") -> dict[str, float]:
        work = Work(parts=(Part(kind="crops", count=count, of="augmented"),))
        return parts_of(remaining_work(work, [stream], done, group))

    assert [left(count, "first") for count in (90, 100, 50)] == [{"crops": 90}, {"crops": 10}, {"crops": 0}]
    # Another stream of the same images crops what was decoded for the first one, as far as that goes.
    assert [left(count, "second") for count in (60, 120)] == [
        {"further crops": 60, "crops": 0},
        {"further crops": 40, "crops": 20},
    ]
    assert left(110, "first") == {"further crops": 10, "crops": 0}
    assert left(50, "third", "alone") == {"crops": 50}


def test_augmented_sweeps_on_one_stream_share_it(exports, tmp_path):
    from checkpoints.resolve import load

    export, space = load(str(exports[0])), Workspace(cache=tmp_path, data="digits:")
    names = ("linear_sgd@ibot_base", "linear@dino", "linear@mocov3", "linear_lars@mae")
    left = shared_parts(export, space, [linear.PROTOCOLS[name].task for name in names])
    assert [parts["crops"] for parts in left] == [90_000, 0, 0, 0]
    assert [parts.get("further crops") for parts in left] == [None, None, None, 81_000]  # MAE has a crop of its own


def test_streams_that_run_together_decode_as_often_as_counted(exports, tmp_path, monkeypatch):
    from checkpoints.resolve import load

    decoded: list[str] = []
    image = ImageSet.image
    monkeypatch.setattr(ImageSet, "image", lambda images, index: decoded.append(images.split) or image(images, index))
    export, space = load(str(exports[0])), Workspace(cache=tmp_path, data="tiny:")
    crop = linear.Linear(lrs=(1.0,), epochs=1, batch=16, select="val")
    tasks = (crop, replace(crop, crop_rule="mae", epochs=2), replace(crop, train_interpolation="bicubic"))
    scale = replace(SCALE, images={"train": 64, "val": 32})
    left = shared_parts(export, space, tasks, scale)
    assert [outcome.metrics["top1"].value >= 0 for _, outcome in linear.Linear.together(tasks, export, space)]
    assert decoded.count("train") == sum(parts["crops"] for parts in left) == 128
    assert sum(parts.get("further crops", 0) for parts in left) == 128


@pytest.mark.parametrize("decode", ["exact", "fast"])
def test_further_crops_are_timed_on_images_that_stay_decoded(decode, exports, tmp_path, monkeypatch):
    from checkpoints.resolve import load

    decoded: list[int] = []
    image = ImageSet.image
    monkeypatch.setattr(ImageSet, "image", lambda images, index: decoded.append(index) or image(images, index))
    export, space = load(str(exports[0])), Workspace(cache=tmp_path, data="tiny:", decode=decode, workers=0)
    seconds, waiting = pass_seconds("further crops", export, space, 0.01)
    assert 0 < waiting <= seconds and len(decoded) == len(set(decoded)) >= 16


def test_seconds_are_measured_ones_first_and_else_follow_from_operations(tmp_path):
    units = {"": {"features": 0.5}, "a": {"features": 0.25}}
    calibration = Calibration(path=tmp_path / "c.json", rate=1e9, units=units)
    trained = Part(kind="training", count=10, flops=2e8)
    assert [calibration.seconds(FORWARD, task) for task in "ab"] == [250, 500]
    assert calibration.seconds(trained, "a") == 2.0 and calibration.seconds(Part(kind="updates", count=3), "a") == 0


def test_an_assumed_machine_reads_or_computes_whichever_is_slower():
    one, eight = (machine("h100", gpus, None, "bfloat16") for gpus in (1, 8))
    reading = Part(kind="features", count=2400, flops=1)
    computing = Part(kind="features", count=1, flops=989e12)
    assert one.seconds(reading, "") == 1.0 and one.seconds(computing, "") == pytest.approx(2.5)
    assert eight.seconds(computing, "") == pytest.approx(2.5 / 7.2)
    assert replace(one, loaders=16).seconds(reading, "") == 0.5
    assert one.seconds(Part(kind="start", count=2), "") == 60
    with pytest.raises(ValueError, match="there are: h100, a100"):
        machine("tpu", 1, None, "bfloat16")
    assert replace(one, decode="fast").seconds(reading, "") == pytest.approx(300 / 540)
    assert one.decoding(reading) == 1.0 and one.decoding(computing) == 0.0
    assert all("assumed" in line for known in MACHINES.values() for line in known.lines())


@pytest.fixture
def plan(bench, exports, tmp_path):
    """`code, out, err = plan("--suite", ...)` of the first export on a hundred digits."""

    def call(*words: object, command: str = "plan") -> tuple[int, str, str]:
        data = ("--data", "digits=digits:", "--limit", "100")
        return bench(command, "--checkpoint", exports[0], "--out", tmp_path / "out", *data, *words)

    return call


def test_a_calibration_is_kept(plan, tmp_path):
    suite = ("--suite", "knn@dino,lowshot@bench")
    code, said, _ = plan(*suite)
    counts, times = said.split("measuring this machine")
    assert code == 0 and "  knn@dino on digits: 200 images in 1.0 passes" in counts
    assert "  lowshot@bench on digits: no images to read" in counts
    assert "  knn@dino on digits: " in times and "  lowshot@bench on digits: " in times
    assert "2 of 2 jobs one after another: " in times and "at once: 1 job, which uses all" in times
    assert "% decoding" in times and "% forward passes" in times  # cores do both in turn
    (kept,) = (tmp_path / "out/cache/calibration").glob("*.json")
    before = kept.stat().st_mtime_ns
    _, said, _ = plan(*suite)
    assert kept.stat().st_mtime_ns == before and "measuring" not in said  # nothing was measured again
    assert re.search(r" s, \d+% [a-z ]+; 200 images in 1.0 passes", said)  # the time beside the counts
    _, said, _ = plan(*suite, "--set", "knn.k=5")  # other settings are measured, what was measured is known
    assert said.split("measuring")[1].count("  knn@dino on digits with k=5: ") == 1
    times = plan(*suite, "--fresh")[1].split("measuring")[1]
    assert "  knn@dino on digits: " in times and "  lowshot@bench on digits: " in times


def test_a_dry_run_uses_times_that_a_plan_measured(plan):
    code, said, _ = plan("--suite", "knn@dino", "--dry-run", command="run")
    assert code == 0 and "200 images in 1.0 passes" in said and "no time known" not in said
    assert "the time of these jobs is not known: bench plan, with the same options, measures it" in said
    plan("--suite", "knn@dino")
    said = plan("--suite", "knn@dino,lowshot@bench", "--dry-run", command="run")[1]
    assert "the time of 1 of 2 jobs is not known" in said


def test_measuring_ends_when_its_time_is_over(plan, monkeypatch):
    monkeypatch.setattr("bench.run.forecast.MEASURING", 0)
    code, said, _ = plan("--suite", "knn@dino,lowshot@bench")
    assert code == 0 and "2 jobs are not measured yet" in said and "0 of 2 jobs" in said


def test_what_takes_too_long_to_measure_is_given_up_and_other_jobs_come_first(plan, monkeypatch):
    monkeypatch.setattr("bench.run.forecast.LIMIT", 3.0)
    monkeypatch.setattr("probes.tasks.knn.Knn.cost", lambda task, scale: Work(parts=(Part(kind="fits", count=1),)))
    endless = Work(parts=(Part(kind="fits", count=1, flops=1e18),))
    monkeypatch.setattr("probes.tasks.lowshot.LowShot.cost", lambda task, scale: endless)
    monkeypatch.setattr("probes.tasks.lowshot.LowShot.benchmark", lambda *values: time.sleep(60))
    started, before = time.perf_counter(), signal.getsignal(signal.SIGALRM)
    code, said, _ = plan("--suite", "lowshot@bench,knn@dino")
    assert time.perf_counter() - started < 60 and signal.getsignal(signal.SIGALRM) == before
    assert code == 0 and "  knn@dino on digits: " in said.split("measuring")[1]
    assert "1 jobs are not measured yet" in said and "1 of 2 jobs" in said


def test_a_plan_for_schedulers_and_for_a_shell(plan, tmp_path):
    words = ("--suite", "knn@dino,linear@dino_cached", "--set", "knn.k=5", "--assume", "h100", "--gpus", 2)
    code, said, _ = plan(*words, "--json")
    made = json.loads(said)
    by_name = {entry["protocol"]: entry for entry in made}
    assert code == 0 and by_name.keys() == {"knn@dino", "linear@dino_cached"}
    first, second = (by_name[name]["command"] for name in ("knn@dino", "linear@dino_cached"))
    assert first[:2] == ["bench", "run"] and "--suite=knn@dino" in first and "knn.k=5" in first
    assert "knn.k=5" not in second and "--limit=100" in first and made[0]["gpus"] == 2
    assert made[0]["seconds"] <= made[1]["seconds"]  # cheap ones first
    assert all(entry["seconds"] > 0 and entry["flops"] > 0 for entry in made)
    code, said, _ = plan(*words, "--script")
    commands = [line for line in said.splitlines() if line.startswith("bench run ")]
    assert code == 0 and said.startswith("#!/usr/bin/env bash\n") and len(commands) == 2
    assert not list((tmp_path / "out").rglob("calibration"))  # nothing was measured


def test_known_images_need_no_files_on_an_assumed_machine(bench, exports, tmp_path):
    words = ("plan", "--checkpoint", exports[0], "--suite", "knn@dino,linear@dino", "--out", tmp_path)
    code, said, _ = bench(*words, "--data", "imagenet", "--assume", "h100")
    assert code == 0 and "1331167 images in 1.0 passes" in said and "assumed, not measured: 1 x NVIDIA H100" in said
    code, said, _ = bench(*words, "--data", "imagenet", "--assume", "h100", "--precision", "float32")
    assert code == 0 and "in float32 forward" in said
    code, _, err = bench(*words, "--data", "imagenet")
    assert code == 2 and "images are needed to measure this machine: give NAME=URL, or add --assume" in err


def test_a_plan_names_what_takes_the_time(bench, exports, tmp_path):
    def terms(*words: object) -> dict[str, dict[str, float]]:
        given = ("--suite", "knn@dino,linear@dino,finetune@mae", "--data", "imagenet", "--assume", "h100", *words)
        jobs = json.loads(bench("plan", "--checkpoint", exports[0], "--out", tmp_path, *given, "--json")[1])
        assert all(sum(job["terms"].values()) == pytest.approx(job["seconds"]) for job in jobs)
        return {job["protocol"]: job["terms"] for job in jobs}

    exact, fast, fed = terms(), terms("--decode", "fast"), terms("--workers", 10**9)
    knn, crops = ({name: of[name]["decoding"] for name in exact} for of in (exact, fast))
    assert knn["knn@dino"] == pytest.approx(1.8 * crops["knn@dino"]) and knn["linear@dino"] > crops["linear@dino"]
    assert exact["finetune@mae"]["augmentation"] > fast["finetune@mae"]["augmentation"] > 0
    assert fed["knn@dino"]["decoding"] < fed["knn@dino"]["search"]  # so small a network never limits
    assert not fed["finetune@mae"]["augmentation"] and fed["finetune@mae"]["training steps"]


@pytest.mark.usefixtures("toys")
def test_a_task_that_counts_nothing_has_no_time(plan):
    code, said, _ = plan("--suite", "toy@one", "--assume", "h100")
    assert code == 0 and "toy@one on digits: no time known" in said and "toy does not count" in said


def test_what_would_fail_is_said(plan):
    code, said, _ = plan("--suite", "finetune@mae", "--assume", "h100")
    assert code == 1 and "finetune@mae on digits: would fail: 100 training images do not fill a batch of 1024" in said
    code, said, _ = plan("--suite", "semi@extrema_cls_1percent", "--assume", "h100")
    assert code == 1 and "would fail: 10 training images do not fill a batch of 1024" in said
    assert "; --set semi.batch=8\n" in said  # one of each of ten classes, where 1 % is one image


def test_a_plan_with_nothing_left_counts_no_jobs():
    from bench.run.forecast import totals

    (line,) = totals([], 1e9, 0, "exact")
    assert "nothing" in line and "0 of 0" not in line
