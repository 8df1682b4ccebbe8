"""Encoders of unfinished trainings: `bench import RUN`, `bench run --checkpoint RUN` and `bench inspect RUN`."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from small_trainings import digits, same, trainer
from written import contents

from bench.run import runner
from bench.run.checkpoints import load_checkpoint
from checkpoints.export import ViTExport

NAMES = {"name": "dino-smoke", "recipe": "smoke"}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A training of two branches, stopped after update 4 of 6, whose images are no longer there."""
    images = replace(digits(), url="folder:/nowhere")
    settings = dict(images=images, facts=NAMES, monitor=lambda export, progress: training.stop() or {}, monitor_every=1)
    training = trainer("dino", tmp_path_factory.mktemp("stopped"), export_every=1, **settings)
    assert training.train() == "stopped" and training.step == 4
    return training


def test_the_encoders_of_a_stopped_training_are_exported(bench, stopped, tmp_path, refused):
    before = contents(stopped.run.out)
    for name, export in stopped.exports():
        branch = () if name == "export" else ("--branch", "student")
        code, out, _ = bench("import", stopped.run.out, "--out", tmp_path / name, *branch)
        assert code == 0 and f"{stopped.run.out}: epoch 1.33 of 2, not finished (update 4 of 6): using" in out
        written = ViTExport.load(tmp_path / name)
        assert same(written.tensors, export.tensors) and written.digest == export.digest
        assert written.facts["unfinished"] == {"step": 4, "steps": 6, "epochs": 2}
        assert (written.facts["name"], written.facts["epochs"]) == ("dino-smoke-epoch1.33of2", pytest.approx(4 / 3))
        assert dict(written.facts) == json.loads(json.dumps(dict(export.facts)))
    assert contents(stopped.run.out) == before
    code, out, _ = bench("inspect", tmp_path / "export-student")
    assert code == 0 and "epochs       1.33 of 2, not finished (update 4 of 6)\n" in out
    refused("import", stopped.run.out, "--out", tmp_path / "no", "--branch", "anchor", named="teacher or student")


def test_the_exports_of_a_finished_training_take_precedence(bench, stopped, tmp_path):
    """The training ends with the bits of one of whose states no export was made."""
    run, untouched = tmp_path / "run", tmp_path / "quiet"
    shutil.copytree(stopped.run.out, run)
    shutil.copytree(stopped.run.out, untouched)
    assert bench("import", run, "--out", tmp_path / "early")[0] == 0
    trainings = [trainer("dino", out, images=stopped.images, facts=NAMES, resume=True) for out in (run, untouched)]
    assert [training.train() for training in trainings] == ["finished"] * 2
    assert same(*(training.state().tensors for training in trainings))
    for name, export in trainings[0].exports():
        branch = () if name == "export" else ("--branch", "student")
        assert bench("import", run, "--out", tmp_path / name, *branch)[0] == 0
        copy = ViTExport.load(tmp_path / name)
        assert copy.digest == export.digest and copy.facts["name"] == "dino-smoke" and "unfinished" not in copy.facts
    code, out, _ = bench("inspect", run)
    assert code == 0 and "epochs       2.0\n" in out


def test_a_run_evaluates_the_newest_state_and_after_the_end_the_export(bench, toys, stopped, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(stopped.run.out, run)
    words = ("run", "--checkpoint", run, "--suite", "toy@one", "--data", "tiny=tiny:", "--out", tmp_path / "results")
    assert ViTExport.load(run / "export").facts["unfinished"]["step"] == 3, "of --export-every, older than the state"
    code, out, _ = bench(*words, "--dry-run")
    assert code == 0 and not (tmp_path / "results").exists()
    code, out, _ = bench(*words)
    assert code == 0 and out.splitlines()[0] == (
        f"{run}: epoch 1.33 of 2, not finished (update 4 of 6): using the encoder of its newest state"
    )
    digest = stopped.first_export().digest[:8]
    assert [path.name for path in (tmp_path / "results/exports").iterdir()] == [f"dino-smoke-epoch1.33of2-{digest}"]
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


def test_an_export_replaced_during_a_run_is_refused(exports, tmp_path, monkeypatch):
    """The first process has it in memory; other processes read it later."""
    monkeypatch.setattr("bench.run.runner.load_frozen", lambda reference: ViTExport.load(exports[1]))
    used, _ = load_checkpoint(str(exports[0]), None, tmp_path, save=False)
    with pytest.raises(ValueError, match="was replaced during this run; run the same command again"):
        runner._loaded(used)


def test_a_training_state_as_checkpoint_is_refused_with_its_run(refused, stopped):
    state = next((stopped.run.out / "states").iterdir())
    run = stopped.run.out
    refused("inspect", state, named=f"bench run and bench inspect take {run}, | `bench import {run}")


def edited(change):
    """A function that changes the run.json of a run."""

    def damage(run: Path) -> None:
        description = json.loads((run / "run.json").read_text())
        change(description)
        (run / "run.json").write_text(json.dumps(description))

    return damage


WRONG = [
    (lambda run: shutil.rmtree(run / "states"), "no training state yet | --save-minutes"),
    (lambda run: next((run / "states").iterdir()).write_bytes(b""), "states: | broken"),
    (lambda run: (run / "run.json").write_text("{}"), "run.json | KeyError: 'settings'"),
    (lambda run: (run / "run.json").write_text("[1]"), "run.json | TypeError: "),
    (lambda run: (run / "run.json").write_text("{"), "run.json | truncated"),
    (edited(lambda run_json: run_json.update(method="dyno")), "'dyno' | did you mean 'dino'?"),
    (edited(lambda run_json: run_json["settings"]["settings"].update(warmth=1)), "run.json | settings"),
    (edited(lambda run_json: run_json["settings"]["spec"].update(depth=3)), "its states do not fit dino"),
]


@pytest.mark.parametrize(("damage", "named"), WRONG, ids=[named for _, named in WRONG])
def test_damaged_runs_are_refused_in_one_line(damage, named, refused, stopped, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(stopped.run.out, run)
    damage(run)
    refused("import", run, "--out", tmp_path / "out", named=named)
    assert not (tmp_path / "out").exists()
