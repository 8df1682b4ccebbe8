"""A training killed at any moment, and then continued, ends like one that nothing interrupted: bit for bit."""

import json
import random
import time
from itertools import pairwise
from pathlib import Path

import pytest
from elsewhere import started
from small_trainings import BATCH, IMAGES, same, trainer

from pretrain import interruptions
from pretrain.checkpointing import WRITING, states

EPOCHS, KILLS = 80, 20
STEPS = EPOCHS * IMAGES // BATCH


def training(out: Path, **settings):
    return trainer("mae", out, recipe={"epochs": EPOCHS}, save_minutes=0.0, resume=True, **settings)


def run(out: Path) -> None:
    """Save after nearly every update."""
    interruptions.SAVE_SHARE = 1.0
    training(out).train()


def newest_step(out: Path) -> int:
    found = states(out / "states")
    return int(found[0].name.split("-")[1]) if found else 0


def killed_once(out: Path, randomness: random.Random, while_saving: bool) -> bool:
    """Kill a training a few saved updates after it began, in the middle of saving where asked for. Whether it was."""
    process, goal = started(run, out), newest_step(out) + randomness.randint(1, 5)
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


@pytest.fixture(scope="module")
def quiet(tmp_path_factory):
    training_ = training(tmp_path_factory.mktemp("quiet"))
    assert training_.train() == "finished"
    return training_


@pytest.fixture(scope="module")
def survivor(tmp_path_factory):
    out, randomness = tmp_path_factory.mktemp("killed"), random.Random(0)
    torn = [killed_once(out, randomness, while_saving=number % 2 == 0) for number in range(KILLS)]
    assert any(torn), "no kill hit a state while it was written"
    assert 0 < newest_step(out) < STEPS
    last = training(out)
    assert last.train() == "finished"
    return last


def test_twenty_kills_change_nothing(quiet, survivor):
    assert same(quiet.state().tensors, survivor.state().tensors)
    assert quiet.state().facts == survivor.state().facts
    left = survivor.run.out / "states"
    assert not list(left.glob(f"{WRITING}*")) and len(states(left)) == 2


def test_the_log_has_every_update_once(quiet, survivor):
    means = []
    for lines in (lines_of(quiet.run.out), lines_of(survivor.run.out)):
        done = [line["step"] for line in lines]
        assert done == sorted(set(done)) and done[-1] == STEPS
        assert [line["updates"] for line in lines] == [after - before for before, after in pairwise([0, *done])]
        means.append(sum(line["loss"] * line["updates"] for line in lines) / STEPS)
    assert means[0] == pytest.approx(means[1], rel=1e-12)
