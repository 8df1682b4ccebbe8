"""What `bench run --dry-run` says of protocols and checkpoints before anything runs."""

from pathlib import Path

import pytest

DATA = ("--data", "tiny=tiny:")


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out"


def test_a_dry_run_shows_settings_and_sizes(bench, exports, out):
    words = ("--suite", "knn@dino", "linear_sgd@mst", "--set", "linear_sgd@mst.epochs=3", "linear_sgd@mst.batch=16")
    code, said, _ = bench("run", "--checkpoint", exports[0], *words, *DATA, "--out", out, "--dry-run", "--limit", "40")
    assert code == 0 and not out.exists()
    assert "  knn@dino, version 1\n" in said and "k=10,20,100,200 temperature=0.07" in said
    assert "  linear_sgd@mst, version 2 (modified)\n" in said and "lrs=0.00024 " in said and " epochs=3 " in said
    assert "image size 32, forward passes 72, gallery 40, queries 32\n" in said
    sizes = "image size 32, heads 1, epochs 3, steps 9, batch 16, forward passes 144"
    assert " ".join(said.split()).count(sizes) == 1  # three epochs of 36, 4 that choose, 32 of validation
    assert "\ntasks that read the same features share their forward passes\n" in said and "\n2 to do;" in said
    many = bench("run", "--checkpoint", exports[0], "--suite", "everything", *DATA, "--out", out, "--dry-run")[1]
    assert "protocols: bench list PROTOCOL\n" in many and "temperature=" not in many


def test_a_dry_run_shows_what_would_fail_and_every_checkpoint_that_can_be_used(bench, exports, out, tmp_path):
    broken = tmp_path / "broken.pth"
    broken.write_bytes(b"no checkpoint")
    words = ("--suite", "knn@dino,linear@dino_cached,finetune@mae", *DATA, "--out", out)
    checkpoints = (exports[0], broken, exports[1])
    code, said, _ = bench("run", "--checkpoint", *checkpoints, *words, "--dry-run")
    assert code == 1 and not out.exists()
    assert "first: random" in said and "second: random" in said
    why = "would fail: 64 training images do not fill a batch of 1024; --set finetune.batch=64 "
    assert " ".join(said.split()).count(why) == 2
    assert f"\ncannot be used: --checkpoint {broken}: " in said
    assert "6 to do, of which 2 would fail; nothing was run or written (--dry-run)" in said
    code, said, err = bench("run", "--checkpoint", *checkpoints, *words)
    assert code == 2 and not said and f"--checkpoint {broken}: " in err and not list(out.rglob("*.json"))


def test_jobs_known_to_fail_are_said_before_anything_runs_and_the_rest_runs(bench, exports, out):
    words = ("--suite", "knn@dino,semi@extrema_cls_1percent,finetune@mae", *DATA, "--out", out)
    code, said, _ = bench("run", "--checkpoint", *exports, *words)
    lines = said.splitlines()
    before = lines[: lines.index(next(line for line in lines if "knn@dino on tiny ..." in line))]
    assert code == 0 and "4 left out (above), 0 failed" in lines[-1] and len(list(out.rglob("*.json"))) >= 2
    for task, batch in (("semi@extrema_cls_1percent", "semi.batch=4"), ("finetune@mae", "finetune.batch=64")):
        assert [
            line.endswith(f"--set {batch}") for line in before if line.startswith(f"left out: {task} on tiny: ")
        ] == [True]
    code, said, _ = bench("run", "--checkpoint", exports[0], *words, "--dry-run")
    assert code == 1 and "2 would fail" in said.splitlines()[-1]
    assert "knn@dino on tiny: 64 train + 32 val images, exists" in said
    few = ("--set", "semi.batch=4", "semi.epochs=1", "semi.warmup_epochs=0")
    words = ("--suite", "semi@extrema_cls_1percent", *few, *DATA, "--out", out)
    code, said, _ = bench("run", "--checkpoint", exports[0], *words)
    assert code == 0 and "1 done" in said  # the one setting was enough
    code, _, err = bench("run", "--checkpoint", exports[0], "--suite", "finetune@mae", *DATA, "--out", out)
    assert code == 2 and "nothing can run: finetune@mae on tiny: " in err and "--set finetune.batch=64" in err
