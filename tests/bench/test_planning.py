"""`bench plan`: work of jobs, shared work counted once; measured rates and assumed machines."""

from collections.abc import Hashable
from dataclasses import replace

import pytest
import torch

from bench.options import EvaluationOptions
from bench.run.calibration import Machine, assumed_machine
from bench.run.forecast import plan as plan_of
from bench.run.forecast import remaining_work, totals
from checkpoints.export import ViTExport
from checkpoints.flops import forward_flops, training_flops
from checkpoints.resolve import load
from checkpoints.spec import ViTSpec
from checkpoints.vit import ViT
from engine.tasks import Workspace
from engine.work import Part, Scale, Work, count_flops
from probes.tasks import finetune, knn, linear, robustness_finetune

SPEC = ViTSpec(
    architecture="vit_tiny_patch16_224", image_size=32, patch_size=8, width=24, depth=3, heads=3, mlp_hidden=96
)
SCALE = Scale(spec=SPEC, images={"train": 1000, "val": 200}, classes=10)
KNN = knn.PROTOCOLS["knn@dino"].task
FORWARD = Part(kind="features", count=1000, flops=forward_flops(SPEC), of="train")


@pytest.fixture
def export(exports) -> ViTExport:
    return load(str(exports[0]))


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
        shared = task.shares(export, space)
        remaining.append(parts_of(remaining_work(task.cost(scale), shared, space.data, done)))
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
    assert parts_of(work) == {"features": 1200, "heads": 1}
    assert work.images == 1200 and work.disk == 4 * 24 * 1200
    assert work.flops == 1200 * forward_flops(SPEC) + 2 * 24 * 1000 * 200


def test_an_augmented_sweep_counts_every_epoch_and_head():
    task = linear.PROTOCOLS["linear_sgd@ibot_base"].task
    parts = {part.kind: part for part in task.cost(SCALE).parts}
    assert parts["crops"].count == 100 * 900 and parts["heads"].count == 100
    product = 45 * 2 * 48 * 10  # rates, multiply-add, class token and mean, classes
    evaluated = 100 * 100 + 200
    assert parts["heads"].count * parts["heads"].flops == pytest.approx(product * (2 * 100 * 900 + evaluated))
    cached = parts_of(replace(task, augment=False).cost(SCALE))
    assert cached["features"] == 1200 and "crops" not in cached


def test_features_that_tasks_share_are_counted_once(export, tmp_path):
    space = Workspace(cache=tmp_path, data="digits:")
    tasks = (KNN, replace(KNN, k=(5,)), replace(KNN, fraction=0.1), replace(KNN, interpolation="bilinear"))
    counts = [parts["features"] for parts in shared_parts(export, space, tasks)]
    assert counts == [1200, 0, 100, 1200]


def test_augmented_sweeps_on_one_stream_share_it(export, tmp_path):
    space = Workspace(cache=tmp_path, data="digits:")
    names = ("linear_sgd@ibot_base", "linear@dino", "linear@mocov3", "linear_lars@mae")
    remaining = shared_parts(export, space, [linear.PROTOCOLS[name].task for name in names])
    assert [parts["crops"] for parts in remaining] == [90_000, 0, 0, 81_000]  # MAE uses another crop


def test_a_fine_tuning_is_counted_once_for_both_of_its_tasks(export, tmp_path):
    protocols = finetune.PROTOCOLS["finetune@smoke"], robustness_finetune.PROTOCOLS["robustness_finetune@smoke"]
    space = Workspace(cache=tmp_path, data="digits:")
    first, second = shared_parts(export, space, [protocol.task for protocol in protocols])
    assert first["training"] and not second["training"] and not second["start"] and second["features"]


def test_seconds_follow_from_the_rates_of_a_machine():
    rates = Machine(forward=1e9, training=1e8, heads=1e9, step=0.5, reading=0.25, start=3.0)
    training, heads = Part(kind="training", count=10, flops=2e8), Part(kind="heads", count=2, flops=5e8)
    assert rates.terms(replace(FORWARD, flops=1e6)) == {"forward passes": 1.0, "reading": 250.0}
    assert rates.terms(training) == {"training steps": 20.0, "reading": pytest.approx(2.5 * 300 / 190)}
    assert rates.terms(heads) == {"heads": 2.0} and rates.terms(Part(kind="start", count=2)) == {"start": 6.0}
    assert Machine(reading=1.0).terms(FORWARD) is None and Machine(forward=1e9).terms(FORWARD) is None


def test_an_assumed_machine_is_limited_by_reading_or_by_compute():
    one_gpu, eight_gpus = (assumed_machine("h100", gpus, None, "bfloat16") for gpus in (1, 8))
    reading = Part(kind="features", count=2400, flops=1)
    computing = Part(kind="features", count=1, flops=989e12)
    assert one_gpu.terms(reading) == {"reading": pytest.approx(1.0)}
    assert one_gpu.terms(computing) == {"forward passes": pytest.approx(2.5)}
    assert eight_gpus.terms(computing) == {"forward passes": pytest.approx(2.5 / 7.2)}
    assert assumed_machine("h100", 1, 16, "bfloat16").terms(reading) == {"reading": pytest.approx(0.5)}
    assert assumed_machine("h100", 1, None, "bfloat16", "fast").terms(reading) == {"reading": pytest.approx(300 / 540)}
    with pytest.raises(ValueError, match="there are: h100, a100"):
        assumed_machine("tpu", 1, None, "bfloat16")


@pytest.fixture
def plan(bench, exports, tmp_path):
    """`code, out, err = plan("--suite", ...)` of the first export on a hundred digits."""

    def call(*words: object, command: str = "plan") -> tuple[int, str, str]:
        data = ("--data", "digits=digits:", "--limit", "100")
        return bench(command, "--checkpoint", exports[0], "--out", tmp_path / "out", *data, *words)

    return call


def test_a_plan_prints_counts_then_measures_the_machine(plan):
    code, output, _ = plan("--suite", "knn@dino,lowshot@bench")
    counts, times = output.split("measuring this machine")
    assert code == 0 and "  knn@dino on digits: 100 train + 100 val images; 200 images in 1.0 passes" in counts
    assert "100 val images; no images to read" in counts
    assert "  knn@dino on digits: " in times and "  lowshot@bench on digits: " in times and "not known" not in times
    assert "2 of 2 jobs one after another: " in times and "training steps" not in times


def test_what_cannot_be_measured_is_said_to_be_unknown_with_its_operations(plan, monkeypatch):
    def fail(*values: object, **options: object) -> float:
        raise ValueError("no rate")

    monkeypatch.setattr("bench.run.calibration.network_rate", fail)
    code, output, _ = plan("--suite", "knn@dino,lowshot@bench")
    assert code == 0 and "forward not measured: no rate" in output
    assert "knn@dino on digits: not known" in output
    totals = output.splitlines()[-2]
    assert "0 of 2" not in output and "time not known of 1 job with" in totals and "TFLOP" in totals


def test_known_image_sets_need_no_files_on_an_assumed_machine(bench, refused, exports, tmp_path):
    words = ("plan", "--checkpoint", exports[0], "--suite", "knn@dino,linear@dino", "--out", tmp_path)
    code, output, _ = bench(*words, "--data", "imagenet", "--assume", "h100")
    assert code == 0 and "1331167 images in 1.0 passes" in output
    assert output.endswith("assumed, not measured: 1 x h100 in bfloat16; docs/scale.md has the rates\n")
    code, output, _ = bench(*words, "--data", "imagenet", "--assume", "h100", "--precision", "float32")
    assert code == 0 and "1 x h100 in float32" in output
    refused(*words, "--data", "imagenet", named="images are needed | NAME=URL | --assume")


def test_a_plan_breaks_its_time_down_by_kind_of_work(exports, tmp_path):
    suite, shared = "knn@dino,linear@dino,finetune@mae", {"data": ("imagenet",), "out": tmp_path, "device": "cpu"}
    options = EvaluationOptions(checkpoint=(str(exports[0]),), suite=suite, **shared)

    def terms(*assumed: object) -> dict[str, dict[str, float]]:
        forecasts = plan_of(options, assumed_machine("h100", 1, *assumed))
        return {forecast.job.protocol.name: forecast.terms for forecast in forecasts}

    exact, fast, unlimited = terms(None, "bfloat16"), terms(None, "bfloat16", "fast"), terms(10**9, "bfloat16")
    for name in exact:
        assert exact[name]["reading"] == pytest.approx(1.8 * fast[name]["reading"])
    assert "reading" not in unlimited["finetune@mae"] and unlimited["finetune@mae"]["training steps"]


@pytest.mark.usefixtures("toys")
def test_a_task_without_a_cost_has_no_known_time(plan):
    code, output, _ = plan("--suite", "toy@one", "--assume", "h100")
    assert code == 0 and "toy does not count its work" in output


def test_a_job_that_would_fail_is_reported_with_its_fix(plan):
    code, output, _ = plan("--suite", "finetune@mae", "--assume", "h100")
    assert code == 1 and "would fail: 100 training images do not fill a batch of 1024" in output
    code, output, _ = plan("--suite", "semi@extrema_cls_1percent", "--assume", "h100")
    assert code == 1 and "would fail: 10 training images do not fill a batch of 1024" in output
    assert "; --set semi.batch=8\n" in output  # one of each of ten classes, where 1 % is one image


def test_a_plan_with_nothing_left_counts_no_jobs():
    (line,) = totals([])
    assert "nothing" in line and "0 of 0" not in line
