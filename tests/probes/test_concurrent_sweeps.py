"""Linear probes that train together: what each gives alone, on any number of processes, killed and continued.

Weights are compared: trained in float32 over a score of epochs, they agree to 1e-4 of a head's largest weight.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from elsewhere import program, ranks
from linear_program import EPOCHS, evaluated, tasks_of
from toy_exports import export_of_size, workspace

from engine.distributed import World
from engine.training import interruptions
from engine.training.states import load_state, newest_intact
from probes.linear import sweep
from probes.linear.heads import Head, Heads, HeadSettings
from probes.linear.sweep import divide_heads
from probes.tasks.linear import PROTOCOLS, Linear

PROGRAM = Path(__file__).with_name("linear_program.py")
# Batch norm with LARS, a sweep that trains on the held-out images too, MSN's head: batches of 120, 96 and 152.
NAMES = ("linear_lars@extrema", "linear_sgd@moca_readme", "linear@msn")
KEYS = (".parameter.weight", ".mean", "history")
TOLERANCE = 1e-4


def trained(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Training -> the weights of its last state."""
    folders = [path for path in (folder / "cache" / "linear").iterdir() if path.is_dir()]
    states = {path.name: load_state(newest_intact(path)) for path in folders}
    return {
        name: {key: value for key, value in state.tensors.items() if key.endswith(KEYS) and not key.startswith("best.")}
        for name, state in states.items()
    }


def processes(count: int, folder: Path, *arguments: str) -> list[str]:
    return [each.end() for each in ranks(count, PROGRAM, folder, ",".join(NAMES), *arguments)]


@pytest.fixture
def saving(monkeypatch):
    """States after every batch, and so of the trained heads."""
    monkeypatch.setattr(sweep, "SAVE_EVERY", 0.0)
    monkeypatch.setattr(interruptions, "SAVE_SHARE", 1.0)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The weights that each probe gets alone, and its numbers."""
    folder = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "SAVE_EVERY", 0.0)
        patch.setattr(interruptions, "SAVE_SHARE", 1.0)
        outcomes = {name: evaluated(folder, name)[name] for name in NAMES}
    return trained(folder), outcomes


def check_equal(folder: Path, alone) -> None:
    found = trained(folder)
    assert found.keys() == alone[0].keys() and len(found) == len(NAMES)
    for name, tensors in alone[0].items():
        for key, value in tensors.items():
            if key == "history":  # images: one of 200 may be on the edge
                assert (found[name][key] - value).abs().max() <= 1
            else:
                largest = value.abs().max().item()
                torch.testing.assert_close(found[name][key], value, rtol=0, atol=TOLERANCE * largest, msg=key)


def test_company_gives_what_each_gives_alone_and_computes_every_image_once(saving, alone, tmp_path):
    outcomes = evaluated(tmp_path, ",".join(NAMES))
    check_equal(tmp_path, alone)
    epochs = {name: task.epochs for name, task in tasks_of(",".join(NAMES)).items()}
    assert sorted(epochs.values()) == [EPOCHS - 10, EPOCHS - 10, EPOCHS - 9]
    # All 200 images but some of the last ones, which the second leaves out, as long as it is there; then 180.
    passes = sum(outcome.cost["augmented_forwards"] for outcome in outcomes.values())
    assert 192 * (EPOCHS - 10) + 180 <= passes <= 200 * (EPOCHS - 10) + 180
    assert outcomes[NAMES[0]].cost["stream_forwards"] == passes
    assert outcomes[NAMES[1]].cost["stream_forwards"] == passes - 180
    for name, outcome in outcomes.items():
        other = alone[1][name]
        assert outcome.facts["train"] == other.facts["train"] and outcome.facts["val"] == other.facts["val"]
        assert outcome.numbers.keys() == other.numbers.keys()
        assert all(abs(outcome.numbers[metric] - value) <= 1 for metric, value in other.numbers.items())
        rows = [len(each.per_image) for each in outcome.metrics.values()]
        assert set(rows) == {200}


@pytest.mark.slow
def test_two_processes_stopped_and_continued_by_one(saving, alone, tmp_path):
    """A signal to one process stops both after the same batch."""
    lines = processes(2, tmp_path, "stop")
    assert len(lines) == 2 and lines[0] == lines[1], lines
    assert "stopped by a signal after step" in lines[0] and "of 3 linear probes on digits train" in lines[0]
    evaluated(tmp_path, ",".join(NAMES))
    check_equal(tmp_path, alone)


@pytest.mark.exhaustive
def test_killed_and_continued_by_four_processes(alone, tmp_path):
    program(PROGRAM, tmp_path, ",".join(NAMES), 2).end()
    states = [load_state(newest_intact(path)).facts for path in (tmp_path / "cache" / "linear").glob("*[!k]")]
    begun = [state for state in states if state["epoch"] + state["iteration"] > 0]
    assert any(state["epoch"] < EPOCHS - 10 for state in begun), "no run was killed in the middle"
    processes(4, tmp_path)
    check_equal(tmp_path, alone)


def test_a_probe_that_is_ahead_waits_for_the_others(saving, alone, tmp_path):
    """One that trained alone before, to its end, is not trained again; the others come to the same end."""
    first = evaluated(tmp_path, NAMES[2])[NAMES[2]]
    outcomes = evaluated(tmp_path, ",".join(NAMES))
    check_equal(tmp_path, alone)
    assert outcomes[NAMES[2]].numbers == first.numbers and outcomes[NAMES[2]].cost["augmented_forwards"] == 0


def test_a_probe_that_fails_does_not_stop_the_others(tmp_path):
    good = tasks_of(NAMES[0])[NAMES[0]]
    bad = replace(good, lrs=(1e38,), weight_decays=(1e3,), optimizer="sgd", entry="plain", warmup_epochs=0)
    space = workspace(tmp_path, "digits:", limit=100)
    found = dict(Linear.together([bad, good, good], export_of_size(16), space))
    assert isinstance(found[0], ValueError) and "the loss is not finite" in str(found[0])
    assert found[1].numbers == found[2].numbers
    spent = [found[place].cost["augmented_forwards"] for place in (1, 2)]
    assert spent[0] > 0 and spent[1] == 0, "the same training twice is trained once"


@pytest.mark.parametrize("size", [1, 2, 3, 8, 64])
def test_heads_are_divided_evenly_and_completely(size):
    costs = [[4, 4], [1] * 45, [2] * 3, [8]]
    parts = [divide_heads(costs, World(rank=rank, size=size)) for rank in range(size)]
    for number, each in enumerate(costs):
        assert [place for part in parts for place in part[number]] == list(range(len(each)))
    loads = [sum(sum(each[place] for place in own) for each, own in zip(costs, part, strict=True)) for part in parts]
    assert max(loads) <= sum(map(sum, costs)) / size + 8


@pytest.mark.parametrize("protocol", ["linear_lars@mae", "linear@msn", "linear_sgd@ibot"])
def test_divided_heads_are_those_of_one_process(protocol):
    """Initial weights and steps do not depend on the division, and states are made of all parts."""
    task = PROTOCOLS[protocol].task
    settings = HeadSettings(optimizer=task.optimizer, entry=task.entry, eps=task.eps)
    grid = [Head(readout=name, lr=lr) for name in ("a", "b") for lr in (0.01, 0.02, 0.03)]
    widths, generator = {"a": 8, "b": 5}, torch.Generator().manual_seed(0)
    features = {name: torch.randn(16, width, generator=generator) for name, width in widths.items()}
    labels = torch.arange(16) % 4

    def heads(own=None):
        return Heads(grid, widths, 4, settings, batch=16, seed=3, own=own)

    whole, parts = heads(), [heads(range(2)), heads(range(2, 2)), heads(range(2, 6))]
    for _ in range(3):
        whole.step(features, labels, 1.0)
        for part in parts:
            part.step(features, labels, 1.0) if part.own else None
    merged = {name: value.clone() for part in parts for name, value in part.state().items() if part.own}
    expected = whole.state()
    assert merged.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(merged[name], value, rtol=1e-5, atol=1e-6)
    other = heads(range(1, 5))
    other.load(merged)
    assert np.allclose(other.hits(features, labels), whole.hits(features, labels)[1:5])
