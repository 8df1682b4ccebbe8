"""The encoder of a training before it has finished: `bench export RUN`, `bench run --checkpoint RUN`, and inspect."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from small_trainings import digits, same, trainer

from bench.run import runner
from bench.run.checkpoints import load_checkpoint
from checkpoints.export import ViTExport

NAMES = {"name": "dino-smoke", "recipe": "smoke"}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A training of two branches, stopped after update 4 of 6, whose images are on another machine."""
    images = replace(digits(), url="folder:/nowhere")
    settings = dict(images=images, facts=NAMES, monitor=lambda export, progress: found.stop() or {}, monitor_every=1)
    found = trainer("dino", tmp_path_factory.mktemp("stopped"), export_every=1, **settings)
    assert found.train() == "stopped" and found.step == 4
    return found


def files_in(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_encoders_of_a_stopped_training_are_exported(bench, stopped, tmp_path):
    before = files_in(stopped.run.out)
    code, out, _ = bench("export", stopped.run.out, "--out", tmp_path / "early")
    assert code == 0 and f"{stopped.run.out}: epoch 1.33 of 2, not finished (update 4 of 6)\n" in out
    assert out.splitlines()[-1].endswith(
        f"{tmp_path / 'early/export'} --suite frozen --data nowhere=folder:/nowhere --out results"
    )
    assert files_in(stopped.run.out) == before
    assert {path.name for path in (tmp_path / "early").iterdir()} == {"export", "export-student"}
    for name, now in stopped.exports():
        written = ViTExport.load(tmp_path / "early" / name)
        assert same(written.tensors, now.tensors) and written.digest == now.digest
        assert written.facts["unfinished"] == {"step": 4, "steps": 6, "epochs": 2}
        assert (written.facts["name"], written.facts["epochs"]) == ("dino-smoke-epoch1.33of2", pytest.approx(4 / 3))
        assert dict(written.facts) == json.loads(json.dumps(dict(now.facts)))
    code, out, _ = bench("inspect", tmp_path / "early/export-student")
    assert code == 0 and "epochs       1.33 of 2, not finished (update 4 of 6)\n" in out


def test_without_a_place_they_lie_in_the_runs_folder_and_the_training_goes_on(bench, stopped, tmp_path):
    """To the bits of one that nobody looked at; then its own export is the one that counts."""
    run, quiet = tmp_path / "run", tmp_path / "quiet"
    shutil.copytree(stopped.run.out, run)
    shutil.copytree(stopped.run.out, quiet)
    for _ in range(2):
        assert bench("export", run)[0] == 0
    assert ViTExport.load(run / "unfinished/export").digest == stopped.first_export().digest
    ends = [trainer("dino", out, images=stopped.images, facts=NAMES, resume=True) for out in (run, quiet)]
    assert [end.train() for end in ends] == ["finished"] * 2 and same(*(end.state().tensors for end in ends))
    code, out, _ = bench("export", run)
    assert code == 0 and out == f"{run} has finished: its encoder is in {run / 'export'}; --out DIR copies it\n"
    assert bench("export", run, "--out", tmp_path / "copy")[0] == 0
    for name, now in ends[0].exports():
        copy = ViTExport.load(tmp_path / "copy" / name)
        assert copy.digest == now.digest and copy.facts["name"] == "dino-smoke" and "unfinished" not in copy.facts
    code, out, _ = bench("inspect", run)
    assert code == 0 and "epochs       2.0\n" in out


def test_a_run_takes_the_newest_state_and_later_the_export(bench, toys, stopped, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(stopped.run.out, run)
    words = ("run", "--checkpoint", run, "--suite", "toy@one", "--data", "tiny=tiny:", "--out", tmp_path / "results")
    assert ViTExport.load(run / "export").facts["unfinished"]["step"] == 3, "--export-every wrote none"
    code, out, _ = bench(*words, "--dry-run")
    assert code == 0 and not (tmp_path / "results").exists()
    code, out, _ = bench(*words)
    assert code == 0 and out.splitlines()[0] == (
        f"{run}: epoch 1.33 of 2, not finished (update 4 of 6): using the encoder of its newest state"
    )
    now = stopped.first_export().digest[:8]
    assert [path.name for path in (tmp_path / "results/exports").iterdir()] == [f"dino-smoke-epoch1.33of2-{now}"]
    assert "1 skipped" in bench(*words)[1]
    trainer("dino", run, images=stopped.images, facts=NAMES, resume=True).train()
    code, out, _ = bench(*words)
    assert code == 0 and "not finished" not in out and "1 done" in out
    names = [
        json.loads(path.read_text())["checkpoint"]["name"] for path in (tmp_path / "results/results").rglob("*.json")
    ]
    assert sorted(names) == ["dino-smoke", "dino-smoke-epoch1.33of2"]
    with open(tmp_path / "results/leaderboard.csv") as file:
        assert "dino-smoke-epoch1.33of2," in file.read()


def test_an_export_that_is_replaced_meanwhile_is_not_mistaken(exports, tmp_path, monkeypatch):
    """The first process has it in memory; the others read what is there by then."""
    monkeypatch.setattr("bench.run.runner.load_frozen", lambda reference: ViTExport.load(exports[1]))
    used, _ = load_checkpoint(str(exports[0]), None, tmp_path, save=False)
    with pytest.raises(ValueError, match="was replaced during this run; run the same command again"):
        runner._loaded(used)


def test_a_state_named_as_a_checkpoint_says_what_to_name(bench, stopped):
    state = next((stopped.run.out / "states").iterdir())
    code, out, err = bench("inspect", state)
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert f"bench run and bench inspect take {stopped.run.out}, " in err and f"`bench export {stopped.run.out}`" in err


def changed(run: Path, change) -> None:
    described = json.loads((run / "run.json").read_text())
    change(described)
    (run / "run.json").write_text(json.dumps(described))


WRONG = [
    (lambda run: (run / "run.json").unlink(), "is not the folder of a training | --out of bench pretrain"),
    (lambda run: shutil.rmtree(run / "states"), "no training state yet | --save-minutes"),
    (lambda run: next((run / "states").iterdir()).write_bytes(b""), "states: | broken"),
    (lambda run: (run / "run.json").write_text("{}"), "run.json | KeyError: 'settings'"),
    (lambda run: (run / "run.json").write_text("[1]"), "run.json | TypeError: "),
    (lambda run: (run / "run.json").write_text("{"), "run.json | JSONDecodeError: "),
    (lambda run: changed(run, lambda found: found.update(method="dyno")), "'dyno' | did you mean 'dino'?"),
    (lambda run: changed(run, lambda found: found["settings"]["settings"].update(warmth=1)), "run.json | settings"),
    (lambda run: changed(run, lambda found: found["settings"]["spec"].update(depth=3)), "its states do not fit dino"),
]


@pytest.mark.parametrize(("harm", "named"), WRONG, ids=[named for _, named in WRONG])
def test_what_cannot_be_exported_is_one_line(harm, named, refused, stopped, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(stopped.run.out, run)
    harm(run)
    refused("export", run, named=named)
    assert not (run / "unfinished").exists()
