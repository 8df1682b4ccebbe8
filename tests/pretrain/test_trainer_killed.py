"""A training killed at any moment, and then continued, ends like one that nothing interrupted: bit for bit."""

import contextlib
import io
import json
import random
import time
from itertools import pairwise
from pathlib import Path

import pytest
from elsewhere import started
from small_trainings import BATCH, IMAGES, same, trainer

from engine.training import interruptions
from engine.training.states import WRITING, states

pytestmark = pytest.mark.slow

KILLS = {"mae": 12, "moca": 3}  # MOCA has a codebook, its mu and a teacher beside the weights
EPOCHS = {"mae": 27, "moca": 9}


def training(name: str, out: Path):
    return trainer(name, out, recipe={"epochs": EPOCHS[name]}, save_minutes=0.0, resume=True)


def steps(name: str) -> int:
    return EPOCHS[name] * IMAGES // BATCH


def run(name: str, out: Path) -> None:
    """Save after nearly every update."""
    interruptions.SAVE_SHARE = 1.0
    training(name, out).train()


def newest_step(out: Path) -> int:
    found = states(out / "states")
    return int(found[0].name.split("-")[1]) if found else 0


def killed_once(name: str, out: Path, randomness: random.Random, while_saving: bool) -> bool:
    """Kill a training a few saved updates after it began, in the middle of saving where asked for. Whether it was."""
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


def lines_of(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module", params=["moca", pytest.param("mae", marks=pytest.mark.exhaustive)])
def quiet(request, tmp_path_factory):
    training_ = training(request.param, tmp_path_factory.mktemp("quiet"))
    assert training_.train() == "finished"
    return training_


@pytest.fixture(scope="module")
def survivor(quiet, tmp_path_factory):
    name, out, randomness = quiet.name, tmp_path_factory.mktemp("killed"), random.Random(0)
    torn = [killed_once(name, out, randomness, while_saving=number % 2 == 0) for number in range(KILLS[name])]
    assert any(torn), "no kill hit a state while it was written"
    assert 0 < newest_step(out) < steps(name)
    last, before, printed = training(name, out), newest_step(out), io.StringIO()
    with pytest.MonkeyPatch.context() as changed, contextlib.redirect_stderr(printed):
        changed.setattr("engine.progress.SILENT_FOR", 0.0)
        assert last.train() == "finished"
    images, now = steps(name) * BATCH, (steps(name) - before) * BATCH
    assert f"{images} of {images} images, {now} of them now, in " in printed.getvalue()
    return last


def test_kills_change_nothing(quiet, survivor):
    assert same(quiet.state().tensors, survivor.state().tensors)
    assert quiet.state().facts == survivor.state().facts
    left = survivor.run.out / "states"
    assert not list(left.glob(f"{WRITING}*")) and len(states(left)) == 2


def test_the_log_has_every_update_once(quiet, survivor):
    means = []
    for lines in (lines_of(quiet.run.out), lines_of(survivor.run.out)):
        done = [line["step"] for line in lines]
        assert done == sorted(set(done)) and done[-1] == steps(quiet.name)
        assert [line["updates"] for line in lines] == [after - before for before, after in pairwise([0, *done])]
        means.append(sum(line["loss"] * line["updates"] for line in lines) / done[-1])
    assert means[0] == pytest.approx(means[1], rel=1e-12)
