"""Attentive probes as a task: alone, in company with linear probes, continued after a stop, refused in one line."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from test_health_task import export

from engine.tasks import Workspace
from engine.training.interruptions import Stopped, StopRequest
from engine.training.schedules import TrainProgress
from probes.linear.sweep import ConcurrentSweeps
from probes.tasks.attentive import PROTOCOLS, Attentive
from probes.tasks.linear import Linear

TASK = replace(PROTOCOLS["attentive@smoke"].task, epochs=3, lrs=(0.01, 0.03))


def same(one, other):
    assert one.numbers == other.numbers and one.facts["grid"] == other.facts["grid"]
    assert all(np.array_equal(one.arrays[name], other.arrays[name]) for name in one.arrays)


def test_company_changes_no_bit_and_shares_the_stream(tmp_path):
    linear = Linear(epochs=3, batch=32)
    assert linear.stream(None, None) == TASK.stream(None, None)
    alone = TASK.run(export(), Workspace(cache=tmp_path / "alone", data="tiny:"))
    together = dict(Attentive.together([linear, TASK], export(), Workspace(cache=tmp_path / "both", data="tiny:")))
    same(alone, together[1])
    forwards = [outcome.cost["augmented_forwards"] for outcome in together.values()]
    assert sum(forwards) == 3 * alone.facts["training_images"] == alone.cost["augmented_forwards"]
    same(linear.run(export(), Workspace(cache=tmp_path / "linear", data="tiny:")), together[0])


def test_a_stopped_training_continues_with_the_same_bits(tmp_path, monkeypatch):
    whole = TASK.run(export(), Workspace(cache=tmp_path / "whole", data="tiny:"))
    space, pause, calls = Workspace(cache=tmp_path / "stopped", data="tiny:"), ConcurrentSweeps.pause, []

    def stopping(self):
        calls.append(1)
        self.request = StopRequest() if len(calls) < 4 else self.request
        self.request.asked = len(calls) == 4
        pause(self)

    monkeypatch.setattr(ConcurrentSweeps, "pause", stopping)
    with pytest.raises(Stopped):
        TASK.run(export(), space)
    monkeypatch.setattr(ConcurrentSweeps, "pause", pause)
    same(whole, TASK.run(export(), space))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(head="capi"), ("64", "32")),
        (dict(head="ep", queries=5), ("queries=5", "32")),
        (dict(head="cae", attention_heads=3), ("attention_heads=3", "32")),
    ],
)
def test_widths_that_a_head_does_not_fit_are_refused_before_the_run(changes, words):
    with pytest.raises(ValueError) as error:
        replace(TASK, **changes).check_network(export().spec)
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)


def test_patches_tell_what_their_mean_does_not(tmp_path):
    """Classes that differ in where a token is large, whose means are alike: attention finds them, the mean does not."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(256) % 2
    tokens = 0.1 * torch.randn(256, 8, 32, generator=generator)
    tokens[:, 0, 0] += 3
    tokens[:, 0, 1] += 2.0 * labels - 1
    tokens[:, 1:, 1] -= (2.0 * labels[:, None] - 1) / 7  # the mean over tokens has none of it
    space = Workspace(cache=tmp_path, data="none:")
    heads = replace(TASK, lrs=(0.01,), readout="patches").heads(32, 2, 256, space)
    for step in range(200):
        heads.step({"patches": tokens}, labels, TrainProgress(step=step, steps_per_epoch=20, epochs=10))
    assert heads.hits({"patches": tokens}, labels).item() > 250
