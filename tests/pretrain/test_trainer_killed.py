"""A training that was killed at any moment and resumed equals an uninterrupted one bit for bit."""

import contextlib
import io
import random
import time
from itertools import pairwise
from pathlib import Path

import pytest
from elsewhere import started
from small_trainings import BATCH, IMAGES, same, trainer
from written import lines_of

from engine.training import interruptions
from engine.training.states import WRITING, states

pytestmark = pytest.mark.slow

KILLS = {"mae": 12, "moca": 1}  # MOCA's state also has a codebook, its mu and a teacher
EPOCHS = {"mae": 27, "moca": 4}


def resumable(name: str, out: Path):
    return trainer(name, out, recipe={"epochs": EPOCHS[name]}, save_minutes=0.0, resume=True)


def steps(name: str) -> int:
    return EPOCHS[name] * IMAGES // BATCH


def run(name: str, out: Path) -> None:
    """Save after nearly every update."""
    interruptions.SAVE_SHARE = 1.0
    resumable(name, out).train()


def newest_step(out: Path) -> int:
    saved_states = states(out / "states")
    return int(saved_states[0].name.split("-")[1]) if saved_states else 0


def kill_once(name: str, out: Path, randomness: random.Random, while_saving: bool) -> bool:
    """Kill a training after a few saved updates; returns whether it was killed while writing a state."""
    process, goal = started(run, name, out), newest_step(out) + randomness.randint(1, 5)
    while newest_step(out) < goal and process.is_alive():
        time.sleep(0.001)
    time.sleep(randomness.uniform(0.0, 0.02))
    while while_saving and process.is_alive() and not any(out.glob(f"states/{WRITING}*")):
        time.sleep(0.0001)
    assert process.is_alive(), process.exitcode
    process.kill()
    process.join()
    return any(out.glob(f"states/{WRITING}*"))


@pytest.fixture(scope="module", params=["moca", pytest.param("mae", marks=pytest.mark.exhaustive)])
def uninterrupted(request, tmp_path_factory):
    training = resumable(request.param, tmp_path_factory.mktemp("uninterrupted"))
    assert training.train() == "finished"
    return training


@pytest.fixture(scope="module")
def killed(uninterrupted, tmp_path_factory):
    name, out, randomness = uninterrupted.name, tmp_path_factory.mktemp("killed"), random.Random(0)
    killed_while_saving = [
        kill_once(name, out, randomness, while_saving=number % 2 == 0) for number in range(KILLS[name])
    ]
    assert any(killed_while_saving), "no kill happened while a state was written"
    assert 0 < newest_step(out) < steps(name)
    resumed, resumed_at, printed = resumable(name, out), newest_step(out), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(printed):
        patch.setattr("engine.progress.SILENT_FOR", 0.0)
        assert resumed.train() == "finished"
    images, resumed_images = steps(name) * BATCH, (steps(name) - resumed_at) * BATCH
    assert f"{images} of {images} images, {resumed_images} of them now, in " in printed.getvalue()
    return resumed


def test_a_killed_training_equals_an_uninterrupted_one(uninterrupted, killed):
    assert same(uninterrupted.state().tensors, killed.state().tensors)
    assert uninterrupted.state().facts == killed.state().facts
    folder = killed.run.out / "states"
    assert not list(folder.glob(f"{WRITING}*")) and len(states(folder)) == 2


def test_the_log_has_every_update_once(uninterrupted, killed):
    means = []
    for lines in (lines_of(uninterrupted.run.out), lines_of(killed.run.out)):
        logged_steps = [line["step"] for line in lines]
        assert logged_steps == sorted(set(logged_steps)) and logged_steps[-1] == steps(uninterrupted.name)
        assert [line["updates"] for line in lines] == [after - before for before, after in pairwise([0, *logged_steps])]
        means.append(sum(line["loss"] * line["updates"] for line in lines) / logged_steps[-1])
    assert means[0] == pytest.approx(means[1], rel=1e-12)
