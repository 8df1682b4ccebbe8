"""`bench run` end to end on toy tasks: results, skipping, failures, changed settings, wrong usage."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from written import rows_of

import bench as bench_api
from bench.results.record import DataUsed, read_result
from bench.run.prepare import effective_limit

pytestmark = pytest.mark.usefixtures("toys")
DATA = ("--data", "tiny=tiny:")


@pytest.fixture
def run(bench, exports, tmp_path):
    """`code, out, err = run("--suite", "toy")` on the first export, into one folder."""

    def call(*words: object, checkpoint=exports[0], data=DATA) -> tuple[int, str, str]:
        return bench("run", "--checkpoint", checkpoint, "--out", tmp_path / "out", *data, *words)

    return call


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out"


def result_paths(out: Path) -> list[Path]:
    return sorted((out / "results").rglob("*.json"))


def runs(out: Path) -> list[str]:
    path = out / "cache" / "runs.txt"
    return path.read_text().splitlines() if path.exists() else []


def test_a_run_writes_results_and_a_leaderboard(run, out, exports):
    code, output, _ = run("--suite", "toys", "--seed", "3")
    assert code == 0
    (path,) = (path for path in result_paths(out) if "toy@one" in path.name)
    result = read_result(path)
    assert path.name == "toy@one-seed3.json"
    assert path.parent == out / f"results/first-{result.checkpoint.digest[:8]}/tiny"
    assert (result.status, result.task, result.seed, result.data.url) == ("ok", "toy", 3, "tiny:")
    assert result.protocol.source == "a paper, table 1"
    assert result.checkpoint.method == "random" and result.checkpoint.source == "random.pth"
    assert result.data.images == {"train": 64, "val": 32}
    assert set(result.data.fingerprints) == {"train", "val"}
    assert result.settings == {"k": [1, 2], "rate": 0.5, "depth": None, "mode": "plain"}
    assert result.versions["torch"] and result.versions["numpy"] and result.versions["ssl-vit-bench"]
    assert result.hardware["cores"] >= 1 and result.hardware["memory_gib"] > 0
    assert result.cost == {} and result.images_per_second is None  # the toys forward no image
    assert np.load(path.with_suffix(".npz"))["correct"].tolist() == [True, False, True, False]
    assert float(rows_of(out)[0]["tiny/toy@one:top1_k1"]) == result.metrics["top1_k1"].value
    assert "toy@one on tiny" in output and "top1_k1 " in output and "2 done, 0 skipped, 0 failed" in output
    assert (out / "leaderboard.md").read_text().startswith("# Leaderboard")
    assert not (out / "exports").exists()  # the checkpoint is an export already


def test_cheap_tasks_run_first(run, out):
    run("--suite", "dear,toy@one")
    assert [line.split()[0] for line in runs(out)] == ["toy", "dear", "dear"]


def test_existing_results_are_skipped_unless_rerun_is_given(run, out):
    run("--suite", "toy@one")
    code, output, _ = run("--suite", "toy@one")
    assert code == 0 and "exists, skipped" in output and "0 done, 1 skipped" in output
    assert "0 done, 1 skipped" in run("--suite", "toy@one", "--set", "toy.k=1,2")[1]  # the protocol's own value
    assert len(runs(out)) == 1
    run("--suite", "toy@one", "--rerun")
    assert len(runs(out)) == 2
    run("--suite", "toy@one", "--seed", "1")
    assert len(runs(out)) == 3
    assert rows_of(out)[0]["tiny/toy@one:top1_k1:n"] == "2"


def test_a_failed_task_is_recorded_and_retried_after_the_others(run, out):
    (out / "cache").mkdir(parents=True)
    (out / "cache" / "fail toy").touch()
    code, output, _ = run("--suite", "toy,dear@one")
    assert code == 1
    assert "FAILED after" in output and "RuntimeError: the toy was told to fail and says so in two lines" in output
    results = {path.name: read_result(path) for path in result_paths(out)}
    failed = results["toy@one-seed0.json"]
    assert (failed.status, failed.metrics) == ("failed", {})
    assert failed.message == "RuntimeError: the toy was told to fail and says so in two lines"
    assert results["dear@one-seed0.json"].status == "ok"
    (log,) = (out / "results").rglob("toy@one-seed0.log")
    assert "Traceback" in log.read_text() and "was told to fail" in log.read_text()
    assert rows_of(out)[0]["failed"] == "tiny/toy@one seed 0; tiny/toy@two[v2] seed 0"
    (out / "cache" / "fail toy").unlink()
    code, output, _ = run("--suite", "toy,dear")  # failed ones are tried again after new ones
    assert code == 0 and "3 done" in output
    assert [line.split()[0] for line in runs(out)] == ["toy", "toy", "dear", "dear", "toy", "toy"]
    assert {read_result(path).status for path in result_paths(out)} == {"ok"}
    assert not list((out / "results").rglob("*.log"))
    assert rows_of(out)[0]["failed"] == ""


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("nan", "metrics that are not finite: top1_k1, top1_k2"),
        ("none", "the task returned no metrics"),
        ("forgot", "the task's run() returned NoneType; return an engine.tasks.Outcome"),
        ("odd metric", "metrics whose value is not one number: errors"),
        ("odd facts", "facts that are not JSON: Object of type object is not JSON serializable"),
    ],
)
def test_an_invalid_outcome_is_a_failure(mode, message, run, out):
    code, _, _ = run("--suite", "toy@one", "--set", f"toy.mode={mode}")
    assert code == 1
    assert [read_result(path).message for path in result_paths(out)] == [message]


def test_an_interrupted_run_keeps_its_finished_results(run, out):
    code, _, err = run("--suite", "toy@one,dear@one", "--set", "dear.mode=interrupt")
    assert code == 130
    assert err.splitlines()[-1] == "interrupted; run the same command again to continue"
    assert [read_result(path).protocol.name for path in result_paths(out)] == ["toy@one"]
    assert rows_of(out)[0]["tiny/toy@one:top1_k1"]


def test_a_stopped_training_ends_the_run_without_a_failure(run, out):
    """The same command continues with it and the tasks after it."""
    code, _, err = run("--suite", "toy@one,dear@one", "--set", "toy.mode=stop")
    assert code == 75 and err.splitlines()[-1].startswith("stopped by a signal after step 3 of 8 of toy training, ")
    assert result_paths(out) == [] and runs(out) == ["toy tiny:"] and (out / "leaderboard.md").exists()


def test_a_result_that_another_run_made_meanwhile_is_skipped(run, out, monkeypatch):
    run("--suite", "toy@one")
    monkeypatch.setattr("bench.run.prepare.job_state", lambda *_: "new")  # as if planned before the first run
    code, output, _ = run("--suite", "toy@one")
    assert code == 0 and "toy@one on tiny: made by another run meanwhile, skipped" in output
    assert "0 done, 1 skipped" in output and len(runs(out)) == 1
    assert run("--suite", "toy@one", "--rerun")[0] == 0 and len(runs(out)) == 2


def test_a_leaderboard_that_cannot_be_written_is_still_printed(run, bench, out):
    run("--suite", "toy@one")
    (out / "leaderboard.csv").unlink()
    (out / "leaderboard.csv").mkdir()
    code, output, err = bench("leaderboard", "--out", out)
    assert code == 2 and "tiny/toy@one" in output and "leaderboard.csv" in err and err.count("\n") == 1


def test_results_of_changed_settings_are_marked(run, out):
    assert run("--suite", "toy", "--set", "toy.k=7,8", "toy@two.rate=0.25", "--set", "toy@one.depth=4")[0] == 0
    results = {read_result(path).protocol.name: read_result(path) for path in result_paths(out)}
    assert results["toy@one"].protocol.changes == {"k": [7, 8], "depth": 4}
    assert results["toy@two"].protocol.changes == {"k": [7, 8], "rate": 0.25}
    assert all(result.protocol.modified for result in results.values())
    assert results["toy@one"].settings == {"k": [7, 8], "rate": 0.5, "depth": 4, "mode": "plain"}
    assert "tiny/toy@one[k=7+8 depth=4]:top1_k7" in rows_of(out)[0]


def test_a_limited_result_counts_as_full_only_if_no_image_is_left_out(run, out):
    code, output, _ = run("--suite", "toy@one", "--limit", "64")  # as many as the larger split has
    (path,) = result_paths(out)
    assert code == 0 and "1 done" in output and path.name == "toy@one-seed0.json" and read_result(path).limit is None
    assert "0 done, 1 skipped" in run("--suite", "toy@one")[1]
    assert "1 done" in run("--suite", "toy@one", "--limit", "8")[1]
    columns = [name for name in rows_of(out)[0] if name.endswith(":top1_k1")]
    assert columns == ["tiny/toy@one:top1_k1", "tiny/toy@one[limit=8]:top1_k1"]
    data = DataUsed(name="a", url="a:", images={"train": 60, "val": 20})
    assert [effective_limit(limit, data) for limit in (None, 60, 61, 59, 20)] == [None, None, None, 59, 20]


def test_several_seeds_repeat_what_is_random(bench, exports, out):
    words = (
        "run",
        "--checkpoint",
        exports[0],
        "--data",
        "tiny=tiny:",
        "--suite",
        "knn@dino,lowshot@bench",
        "--out",
        out,
    )
    assert "1 failed" not in bench(*words, "--seed", "0", "1")[1]
    code, output, _ = bench(*words, "--seed", "0", "1", "2")
    assert code == 0 and "1 done, 3 skipped" in output
    names = sorted(path.name for path in result_paths(out))
    assert names == ["knn@dino-seed0.json", *(f"lowshot@bench-seed{seed}.json" for seed in range(3))]
    results = [read_result(path) for path in result_paths(out)]
    assert {result.protocol.name: result.random for result in results} == {"knn@dino": False, "lowshot@bench": True}
    drawn = [result.numbers["top1_1shot"] for result in results if result.random]
    assert len(set(drawn)) > 1
    (row,) = rows_of(out)
    assert float(row["tiny/lowshot@bench:top1_1shot"]) == pytest.approx(np.mean(drawn))
    assert float(row["tiny/lowshot@bench:top1_1shot:std"]) == pytest.approx(np.std(drawn, ddof=1))
    results = bench_api.evaluate(exports[0], "lowshot@bench", "tiny=tiny:", seed=[1, 2], out=out)
    assert [result.seed for result in results] == [1, 2]
    assert len(bench_api.evaluate(exports[0], "knn@dino", "tiny=tiny:", seed=[0, 1], out=out)) == 1


def test_two_exports_of_the_same_name_are_kept_apart(run, exports, out):
    for export in exports:
        assert run("--suite", "toy@one", "--name", "same", checkpoint=export)[0] == 0
    assert len(result_paths(out)) == 2 and len(rows_of(out)) == 2


@pytest.mark.exhaustive  # half of it imports what all tasks need and generates the tiny scenes
def test_smoke_has_default_images(bench, exports, out):
    _, output, _ = bench("run", "--checkpoint", exports[0], "--suite", "smoke", "--out", out, "--dry-run")
    assert "toy@one on digits: 1297 train + 500 val images; " in output


def test_other_suites_have_no_default_images(refused, exports, out):
    refused("run", "--checkpoint", exports[0], "--suite", "toys", "--out", out, named="--data: which images?")


def test_other_images_under_a_known_name_are_refused(run, out):
    run("--suite", "toy@one")
    code, _, err = run("--suite", "toy@one", data=("--data", "tiny=digits:"))
    assert code == 2 and "'tiny' (tiny:; images: train 64 then, 1297 now, " in err and "--rerun" in err


def test_a_damaged_result_is_measured_again(run, out):
    run("--suite", "toy@one")
    (path,) = result_paths(out)
    path.write_text('{"schema": 1, "stat')
    assert "1 done" in run("--suite", "toy@one")[1]
    assert read_result(path).status == "ok"


def test_a_result_of_a_newer_version_is_not_overwritten(run, out):
    run("--suite", "toy@one")
    (path,) = result_paths(out)
    value = json.loads(path.read_text()) | {"schema": 99}
    path.write_text(json.dumps(value))
    code, _, err = run("--suite", "toy@one")
    assert code == 2 and "result schema 99" in err
    assert json.loads(path.read_text())["schema"] == 99


def test_the_leaderboard_command_rebuilds_and_prints(run, bench, out):
    run("--suite", "toy")
    (out / "leaderboard.csv").unlink()
    (out / "results" / "broken.json").write_text("{")
    code, output, err = bench("leaderboard", "--out", out)
    assert code == 0
    assert "tiny/toy@one" in output and "first" in output and "left out: " in output and "broken.json" in output
    assert "leaderboard.csv" in err and (out / "leaderboard.csv").exists()


WRONG = [
    (["--suite", "nope"], "--suite: | 'nope' | bench list protocols"),
    (["--suite", ","], "--suite: it is empty"),
    (["--suite", "broken"], "'broken' of benchtoys 1.0 | ModuleNotFoundError | no_such_library"),
    (["--suite", "toy", "--set", "toy.kk=1"], "--set toy.kk=1: | 'kk' | did you mean 'k'?"),
    (["--suite", "toy", "--set", "toy.k=x"], "--set toy.k=x: | commas | whole number"),
    (["--suite", "toy", "--set", "dear.k=1"], "--set dear.k=1: | 'dear' is not part of this run"),
    (["--suite", "toy", "--data", "digits"], "--data digits: | digits=digits:"),
    (["--suite", "toy", "--data", "/tmp/x"], "--data /tmp/x: | x=folder:/tmp/x"),
    (["--suite", "toy", "--data", "tiny:"], "--data tiny:: | tiny=tiny:"),
    (["--suite", "toy", "--data", "c=folder:/no/X"], "--data c=folder:/no/X: no folder /no/X"),
    (["--suite", "toy", "--data", "a/b=tiny:"], "a/b | letters, digits"),
    (["--suite", "toy", "--data", "tiny=tiny:"], "'tiny' is given twice"),
    (["--suite", "toy", "--name", "a", "b"], "--name: 2 names for 1 checkpoints"),
    (["--suite", "toy", "--name", "../x"], "--name ../x: | letters"),
    (["--suite", "toy", "--limit", "0"], "--limit: | '0' | at least 1"),
    (["--suite", "toy", "--device", "tpu"], "--device tpu: | auto, cpu, cuda or cuda:N"),
    (["--suite", "toy", "--precision", "float16"], "--precision float16 | float32 or bfloat16"),
    (["--suite", "toy", "--checkpoint", "/nowhere"], "--checkpoint /nowhere: no checkpoint '/nowhere'"),
]


@pytest.mark.parametrize(("words", "named"), WRONG, ids=lambda value: " ".join(value) if type(value) is list else "")
def test_wrong_requests_are_refused_in_one_line_and_write_nothing(words, named, refused, exports, out):
    refused("run", "--checkpoint", exports[0], "--out", out, *DATA, *words, named=named)
    assert not (out / "results").exists()


def test_out_that_is_a_file_is_refused(refused, exports, tmp_path):
    path = tmp_path / "file"
    path.write_text("")
    words = ("run", "--checkpoint", exports[0], "--suite", "toy", *DATA, "--out", path)
    refused(*words, named=f"--out: File exists: {path} | choose another path")


def test_a_repeated_run_differs_only_in_time_and_cost(bench, exports, out):
    """The repetition reads features from disk and forwards nothing."""
    arguments = ("--suite", "knn@dino,lowshot@bench", "--data", "tiny=tiny:", "--out", out)
    results_of_runs = []
    for options in ((), ("--rerun",)):
        assert bench("run", "--checkpoint", exports[0], *arguments, *options)[0] == 0
        results_of_runs.append([json.loads(path.read_text()) for path in result_paths(out)])
    assert [sum(result["cost"]["forwards"] for result in run) for run in results_of_runs] == [96, 0]
    assert {result["images_per_second"] for result in results_of_runs[1]} == {None}
    for first, second in zip(*results_of_runs, strict=True):
        assert first.keys() == second.keys()
        assert {key for key in first if first[key] != second[key]} <= {"seconds", "cost", "images_per_second", "date"}


def plain_colours(folder: Path, value: int, suffix: str = "bmp") -> None:
    """Two classes of plain images. Bitmaps of another `value` have the same sizes in bytes but other pixels."""
    for number in range(24):
        split, label = ("train", "val")[number % 2], "ab"[number // 2 % 2]
        (folder / split / label).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (10 * number, value, 0)).save(folder / split / label / f"{number}.{suffix}")


@pytest.fixture
def pictures(bench, exports, out, tmp_path):
    """`code, out, err = pictures("--suite", "knn@dino")` on the pictures in tmp_path / "images"."""
    words = ("run", "--checkpoint", exports[0], "--data", f"x=folder:{tmp_path / 'images'}", "--out", out)
    return lambda *options: bench(*words, *options)


def test_a_result_with_skipped_images_does_not_count_as_complete(pictures, out, tmp_path):
    plain_colours(tmp_path / "images", 0, "png")
    (tmp_path / "images/train/a/0.png").write_bytes(b"no image")
    suite = ("--suite", "knn@dino")
    assert pictures(*suite, "--skip-bad")[0] == 0
    assert "x/knn@dino[skipped=1]:top1_k10" in rows_of(out)[0] and "x/knn@dino:top1_k10" not in rows_of(out)[0]
    assert "exists, skipped" in pictures(*suite, "--skip-bad")[1]
    code, output, _ = pictures(*suite)
    assert code == 1 and "0.png" in output and "exists" not in output and "the earlier result is kept" in output
    assert rows_of(out)[0]["failed"] == "x/knn@dino seed 0" and rows_of(out)[0]["x/knn@dino[skipped=1]:top1_k10"]


def test_a_failed_rerun_keeps_the_earlier_result(run, out):
    run("--suite", "toy@one")
    (path,) = result_paths(out)
    contents = {file: file.read_bytes() for file in (path, path.with_suffix(".npz"))}
    flag = out / "cache" / "fail toy"
    flag.touch()
    code, output, _ = run("--suite", "toy@one", "--rerun")
    assert code == 1 and "FAILED after" in output and "the earlier result is kept" in output
    assert {file: file.read_bytes() for file in contents} == contents
    suffixes = sorted(file.name.removeprefix("toy@one-seed0.") for file in path.parent.iterdir())
    assert suffixes == ["failed.json", "failed.log", "json", "npz"]
    (row,) = rows_of(out)
    assert row["tiny/toy@one:top1_k1"] and row["failed"] == "tiny/toy@one seed 0"
    assert "the number shown is of an earlier run" in (out / "leaderboard.md").read_text()
    flag.unlink()
    assert run("--suite", "toy@one", "--rerun")[0] == 0
    assert len(list(path.parent.iterdir())) == 2 and rows_of(out)[0]["failed"] == ""


def test_a_run_ends_with_the_tables_of_its_own_protocols(run, out):
    run("--suite", "toy@one,dear@one")
    output = run("--suite", "toy@one")[1]
    assert "\ntiny/toy@one\n" in output and "\ntiny/dear@one\n" not in output
    assert "\n1 more table in leaderboard.md\n" in output


def test_a_run_reports_its_own_failures_and_the_leaderboard_all(run, bench, exports, out):
    flag = out / "cache" / "fail toy"
    flag.parent.mkdir(parents=True)
    flag.touch()
    output = run("--suite", "toy@one,dear@one")[1]
    failure = "first: toy@one on tiny: RuntimeError: the toy was told to fail and says so in two lines"
    assert output.count(f"\nfailed: {failure}\n1 done, 0 skipped, 1 failed;") == 1 and output.count("\nfailed: ") == 1
    flag.unlink()
    (out / "results" / "broken.json").write_text("{")
    code, output, err = run("--suite", "toy@one", checkpoint=exports[1])
    assert code == 0 and "1 done, 0 skipped, 0 failed" in output
    assert "first: " not in output + err and "told to fail" not in output + err and "broken.json" not in output + err
    output = bench("leaderboard", "--out", out)[1]
    assert output.count("failed: first: tiny/toy@one seed 0: RuntimeError") == 1 and output.count("broken.json") == 1


def test_a_checkpoint_given_twice_is_run_once(run, exports, out):
    code, output, _ = run("--suite", "toy@one", "--checkpoint", exports[0])
    assert code == 0 and "1 done, 0 skipped" in output and len(runs(out)) == 1


def test_a_result_of_other_settings_under_the_same_version_is_refused_without_rerun(run, out):
    run("--suite", "toy@one")
    (path,) = result_paths(out)
    content = json.loads(path.read_text())
    for settings, code in (({"rate": 0.25}, 2), ({"dropped_since": 1}, 0)):
        path.write_text(json.dumps({**content, "settings": content["settings"] | settings}))
        assert run("--suite", "toy@one")[0] == code
    path.write_text(json.dumps({**content, "settings": content["settings"] | {"rate": 0.25}}))
    _, _, err = run("--suite", "toy@one")
    assert "rate 0.25 then, 0.5 now" in err and "--rerun" in err and len(runs(out)) == 1
    assert run("--suite", "toy@one", "--rerun")[0] == 0 and read_result(path).settings["rate"] == 0.5


def test_results_on_overwritten_images_are_refused_without_rerun(pictures, out, tmp_path):
    plain_colours(tmp_path / "images", 0)
    assert pictures("--suite", "knn@dino,knn@ibot")[0] == 0
    first = read_result(result_paths(out)[0])
    plain_colours(tmp_path / "images", 200)
    code, _, err = pictures("--suite", "knn@dino")
    assert code == 2 and "overwritten" in err and "--rerun" in err
    assert read_result(result_paths(out)[0]) == first
    assert pictures("--suite", "knn@dino,knn@ibot", "--rerun")[0] == 0
    second = read_result(result_paths(out)[0])
    assert second.data.fingerprints == first.data.fingerprints and second.data.contents != first.data.contents
    assert second.cost["forwards"] + read_result(result_paths(out)[1]).cost["forwards"] == 24


def test_results_from_before_and_after_overwriting_are_two_columns(bench, pictures, out, tmp_path):
    """As after a rerun was killed between two jobs."""
    plain_colours(tmp_path / "images", 0)
    assert pictures("--suite", "knn@dino,knn@ibot")[0] == 0
    before = result_paths(out)[0].read_bytes()
    plain_colours(tmp_path / "images", 200)
    assert pictures("--suite", "knn@dino,knn@ibot", "--rerun")[0] == 0
    result_paths(out)[0].write_bytes(before)
    _, output, _ = bench("leaderboard", "--out", out)
    assert re.search(r"x: [\w ]+ differ between results.* as x-", output.replace("\n", " "))
    columns = rows_of(out)[0]
    assert "x/knn@ibot:top1_k10" in columns and "x/knn@dino:top1_k10" not in columns
    assert any(name.startswith("x-") and "/knn@dino:top1_k10" in name for name in columns)


def drawn(folder, names):
    """Small pictures, PNG, with these names."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names):
        Image.fromarray(np.random.RandomState(number).randint(0, 255, (16, 16, 3)).astype(np.uint8)).save(folder / name)


def test_images_that_a_protocol_also_reads_belong_to_its_result(bench, exports, out, tmp_path):
    root = tmp_path / "set"
    for folder in ("original", "strong"):
        drawn(root / folder, ["200000.png", "201000.png"])

    def run(*words):
        suite = ("--suite", "copydays@dino", "--set", "copydays.size=16", "--data", f"c=copydays:{root}")
        return bench("run", "--checkpoint", exports[0], *suite, "--out", out, *words)

    assert "1 done" in run()[1] and "1 skipped" in run()[1]
    drawn(root / "whitening", [f"{number}.png" for number in range(9)])
    assert "1 done" in run()[1] and "1 skipped" in run()[1]  # the same command evaluates what was added
    result = read_result(result_paths(out)[0])
    assert result.facts["whitened by"] == 9 and list(result.data.reads) == ["whitening"]
    drawn(root / "whitening", ["8.png", "9.png"])
    code, _, err = run()
    assert code == 2 and "whitening" in err and "--rerun" in err
    assert run("--rerun")[0] == 0 and "1 skipped" in run()[1]
    shutil.rmtree(root / "whitening")
    code, _, err = run()
    assert code == 2 and "whitening" in err
    (root / "whitening").symlink_to(root / "nowhere")
    code, _, err = run()
    assert code == 2 and "whitening is a broken link" in err
