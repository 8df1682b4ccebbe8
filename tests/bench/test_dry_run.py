"""`bench run --dry-run` and the lines before a run: work, and jobs and checkpoints that would fail."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bench.results.record import read_result

DATA = ("--data", "tiny=tiny:")


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out"


def test_a_dry_run_shows_jobs_and_their_work(output_of, exports, out):
    words = ("--suite", "knn@dino", "linear_sgd@mst", "--set", "linear_sgd@mst.epochs=3", "linear_sgd@mst.batch=16")
    output = output_of("run", "--checkpoint", exports[0], *DATA, "--out", out, "--dry-run", *words, "--limit", "40")
    assert not out.exists()
    assert "knn@dino on tiny: 40 train + 32 val images; 72 images in 1.0 passes" in output
    assert "linear_sgd@mst on tiny with batch=16 epochs=3: " in output
    assert "; 144 images in 2.0 passes, 9 iterations" in output  # 3 epochs of 36, 4 that choose, 32 to validate
    assert "\n2 to do;" in output


def test_a_dry_run_goes_on_after_jobs_that_would_fail_and_names_a_broken_checkpoint(
    bench, refused, exports, out, tmp_path
):
    words = ("--suite", "knn@dino,linear@dino_cached,finetune@mae", *DATA, "--out", out)
    code, output, _ = bench("run", "--checkpoint", *exports[:2], *words, "--dry-run")
    assert code == 1 and not out.exists()
    assert "first: random" in output and "second: random" in output
    reason = "would fail: 64 training images do not fill a batch of 1024; --set finetune.batch=64"
    assert output.count(reason) == 2 and "6 to do, of which 2 would fail" in output
    broken = tmp_path / "broken.pth"
    broken.write_bytes(b"no checkpoint")
    for dry_run in ((), ("--dry-run",)):
        refused("run", "--checkpoint", exports[0], broken, *words, *dry_run, named=f"--checkpoint {broken}: ")
    assert not list(out.rglob("*.json"))


def test_jobs_that_would_fail_are_named_first_and_the_others_run(bench, output_of, refused, exports, out):
    words = ("--suite", "knn@dino,semi@extrema_cls_1percent,finetune@mae", *DATA, "--out", out)
    lines = output_of("run", "--checkpoint", *exports, *words).splitlines()
    before = lines[: lines.index(next(line for line in lines if "knn@dino on tiny ..." in line))]
    assert "4 left out (above), 0 failed" in lines[-1] and len(list(out.rglob("*.json"))) >= 2
    for task, batch in (("semi@extrema_cls_1percent", "semi.batch=4"), ("finetune@mae", "finetune.batch=64")):
        (line,) = [line for line in before if line.startswith(f"left out: {task} on tiny: ")]
        assert line.endswith(f"--set {batch}")
    code, output, _ = bench("run", "--checkpoint", exports[0], *words, "--dry-run")
    assert code == 1 and "2 would fail" in output.splitlines()[-1]
    assert "knn@dino on tiny: 64 train + 32 val images; exists" in output
    few = ("--set", "semi.batch=4", "semi.epochs=1", "semi.warmup_epochs=0")
    words = ("--suite", "semi@extrema_cls_1percent", *few, *DATA, "--out", out)
    assert "1 done" in output_of("run", "--checkpoint", exports[0], *words)  # the batch size was the only problem
    words = ("--suite", "finetune@mae", *DATA, "--out", out)
    refused("run", "--checkpoint", exports[0], *words, named="finetune@mae on tiny: | --set finetune.batch=64")


@pytest.mark.parametrize(("scheme", "classes"), [("folder", ("ant", "bee")), ("imagenet", ("n01440764", "n01443537"))])
def test_validation_images_alone_serve_protocols_without_training(
    scheme, classes, bench, output_of, refused, exports, out, tmp_path
):
    random = np.random.default_rng(0)
    for number in range(12):
        path = tmp_path / "set" / "val" / classes[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (32, 32, 3), np.uint8)).save(path)
    url = f"{scheme}:{tmp_path}/set"
    words = ("--checkpoint", exports[0], "--data", f"mine={url}", "--out", out, "--suite")
    assert "2 of 2 jobs" in output_of("plan", *words, "health,knn@dino")
    output = output_of("run", *words, "health,knn@dino")
    assert "mine has no training images, so these are left out on it: knn@dino" in output and "2 done" in output
    result = read_result(next(out.rglob("health@val*.json")))
    assert result.data.images == {"val": 12} and "rankme" in result.metrics
    refused("run", *words, "knn@dino,lowshot@bench", named=f"--data mine={url}: no train folder")


def test_images_that_no_chosen_protocol_reads_are_named(output_of, exports, out):
    words = ("--data", "mine=tiny:", "scenes=tiny-ade20k:", "--out", out, "--dry-run")
    probes = output_of("run", "--checkpoint", exports[0], "--suite", "knn@dino", *words)
    (line,) = [line for line in probes.splitlines() if line.startswith("--data")]
    assert line.startswith("--data scenes ") and "upernet" in line and "lowshot" not in line
    dense = output_of("run", "--checkpoint", exports[0], "--suite", "dense_knn@smoke", *words)
    (line,) = [line for line in dense.splitlines() if line.startswith("--data")]
    assert line.startswith("--data mine ") and "lowshot" in line and "upernet" not in line
    both = output_of("run", "--checkpoint", exports[0], "--suite", "knn@dino,dense_knn@smoke", *words)
    assert "\n--data" not in f"\n{both}"
