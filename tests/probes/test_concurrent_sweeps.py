"""Linear probes trained together equal those trained alone, on any number of processes, also after kills and stops.

Their weights are compared: after six epochs in float32 they agree to 1e-4 of a head's largest weight.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from elsewhere import program, ranks
from linear_program import EPOCHS, run_probes, tasks_of
from toy_exports import export_of_size, workspace

from engine.training import interruptions
from engine.training.states import load_state, newest_intact
from probes.linear import sweep
from probes.linear.heads import Head, Heads, HeadSettings
from probes.linear.probe import train_together
from probes.tasks.linear import PROTOCOLS

PROGRAM = Path(__file__).with_name("linear_program.py")
# LARS with batch norm, a sweep that also trains on held-out images, and MSN's head: batches of 120, 96 and 152.
NAMES = ("linear_lars@extrema", "linear_sgd@moca_readme", "linear@msn")
KEYS = (".parameter.weight", ".mean", "history")
TOLERANCE = 1e-4


def trained_weights(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """The weights in the last state of each training, by its name."""
    folders = [path for path in (folder / "cache" / "linear").iterdir() if path.is_dir()]
    states = {path.name: load_state(newest_intact(path)) for path in folders}
    return {
        name: {key: value for key, value in state.tensors.items() if key.endswith(KEYS) and not key.startswith("best.")}
        for name, state in states.items()
    }


def output_of_processes(count: int, folder: Path, *arguments: str) -> list[str]:
    return [process.end() for process in ranks(count, PROGRAM, folder, ",".join(NAMES), *arguments)]


@pytest.fixture
def save_every_batch(monkeypatch):
    """The last state then has the weights at the end of the training."""
    monkeypatch.setattr(sweep, "SAVE_EVERY", 0.0)
    monkeypatch.setattr(interruptions, "SAVE_SHARE", 1.0)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The weights and the outcome of each probe trained alone."""
    folder = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "SAVE_EVERY", 0.0)
        patch.setattr(interruptions, "SAVE_SHARE", 1.0)
        outcomes = {name: run_probes(folder, name)[name] for name in NAMES}
    return trained_weights(folder), outcomes


def check_equal(folder: Path, alone) -> None:
    trained = trained_weights(folder)
    assert trained.keys() == alone[0].keys() and len(trained) == len(NAMES)
    for name, tensors in alone[0].items():
        for key, value in tensors.items():
            if key == "history":  # counts of images, of which one of 200 may be a near tie
                assert (trained[name][key] - value).abs().max() <= 1
            else:
                largest = value.abs().max().item()
                torch.testing.assert_close(trained[name][key], value, rtol=0, atol=TOLERANCE * largest, msg=key)


def test_probes_trained_together_equal_those_trained_alone_and_share_forward_passes(save_every_batch, alone, tmp_path):
    outcomes = run_probes(tmp_path, ",".join(NAMES))
    check_equal(tmp_path, alone)
    epochs = {name: task.epochs for name, task in tasks_of(",".join(NAMES)).items()}
    assert sorted(epochs.values()) == [EPOCHS - 10, EPOCHS - 10, EPOCHS - 9]
    # While the second probe trains, all 200 images but some of the last ones, which it drops; then 180.
    passes = sum(outcome.cost["augmented_forwards"] for outcome in outcomes.values())
    assert 192 * (EPOCHS - 10) + 180 <= passes <= 200 * (EPOCHS - 10) + 180
    assert outcomes[NAMES[0]].cost["stream_forwards"] == passes
    assert outcomes[NAMES[1]].cost["stream_forwards"] == passes - 180
    for name, outcome in outcomes.items():
        expected = alone[1][name]
        assert outcome.facts["train"] == expected.facts["train"] and outcome.facts["val"] == expected.facts["val"]
        assert outcome.numbers.keys() == expected.numbers.keys()
        assert all(abs(outcome.numbers[metric] - value) <= 1 for metric, value in expected.numbers.items())
        assert all(len(metric.per_image) == 200 for metric in outcome.metrics.values())


@pytest.mark.slow
def test_a_training_stopped_on_two_processes_resumes_on_one(save_every_batch, alone, tmp_path):
    """A signal to one process stops both after the same batch."""
    lines = output_of_processes(2, tmp_path, "stop")
    assert len(lines) == 2 and lines[0] == lines[1], lines
    assert "stopped by a signal after step" in lines[0] and "of 3 linear probes on digits train" in lines[0]
    run_probes(tmp_path, ",".join(NAMES))
    check_equal(tmp_path, alone)


@pytest.mark.exhaustive
def test_a_killed_training_resumes_on_four_processes(alone, tmp_path):
    program(PROGRAM, tmp_path, ",".join(NAMES), 2).end()
    states = [load_state(newest_intact(path)).facts for path in (tmp_path / "cache" / "linear").glob("*[!k]")]
    started = [state for state in states if state["epoch"] + state["iteration"] > 0]
    assert any(state["epoch"] < EPOCHS - 10 for state in started), "no run was killed in the middle"
    output_of_processes(4, tmp_path)
    check_equal(tmp_path, alone)


@pytest.mark.exhaustive
def test_a_finished_probe_is_not_trained_again(save_every_batch, alone, tmp_path):
    """A probe that was trained alone before is not trained again; the others end as they do alone."""
    first = run_probes(tmp_path, NAMES[2])[NAMES[2]]
    outcomes = run_probes(tmp_path, ",".join(NAMES))
    check_equal(tmp_path, alone)
    assert outcomes[NAMES[2]].numbers == first.numbers and outcomes[NAMES[2]].cost["augmented_forwards"] == 0


def test_a_probe_that_fails_does_not_stop_the_others(tmp_path):
    good = tasks_of(NAMES[0])[NAMES[0]]
    bad = replace(good, lrs=(1e38,), weight_decays=(1e3,), optimizer="sgd", entry="plain", warmup_epochs=0)
    space = workspace(tmp_path, "digits:", limit=100)
    outcomes = dict(train_together([bad, good, good], export_of_size(16), space))
    assert isinstance(outcomes[0], ValueError) and "the loss is not finite" in str(outcomes[0])
    assert outcomes[1].numbers == outcomes[2].numbers
    forwards = [outcomes[index].cost["augmented_forwards"] for index in (1, 2)]
    assert forwards[0] > 0 and forwards[1] == 0, "two equal trainings are trained once"


@pytest.mark.parametrize("protocol", ["linear_lars@mae", "linear@msn", "linear_sgd@ibot"])
def test_divided_heads_equal_those_of_one_process(protocol):
    """Initial weights and steps do not depend on the division, and states of all parts merge to one."""
    task = PROTOCOLS[protocol].task
    settings = HeadSettings(optimizer=task.optimizer, entry=task.entry, eps=task.eps)
    grid = [Head(readout=name, lr=lr) for name in ("a", "b") for lr in (0.01, 0.02, 0.03)]
    widths, generator = {"a": 8, "b": 5}, torch.Generator().manual_seed(0)
    features = {name: torch.randn(16, width, generator=generator) for name, width in widths.items()}
    labels = torch.arange(16) % 4

    def heads(own=None):
        return Heads(grid, widths, 4, settings, batch=16, seed=3, own=own)

    undivided, parts = heads(), [heads(range(2)), heads(range(2, 2)), heads(range(2, 6))]
    for _ in range(3):
        undivided.step(features, labels, 1.0)
        for part in parts:
            part.step(features, labels, 1.0) if part.own else None
    merged = {name: value.clone() for part in parts for name, value in part.state().items() if part.own}
    expected = undivided.state()
    assert merged.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(merged[name], value, rtol=1e-5, atol=1e-6)
    redivided = heads(range(1, 5))
    redivided.load(merged)
    assert np.allclose(redivided.hits(features, labels), undivided.hits(features, labels)[1:5])
