"""Attentive probes as a task: beside linear probes, resumed after a stop, and settings that are refused."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from refusals import refusal
from timm.data import create_transform
from toy_exports import varied_export

from engine.seeding import AUGMENT, seeded
from engine.tasks import Workspace
from engine.training.interruptions import Stopped, StopRequest
from engine.training.schedules import TrainProgress
from imagesets.sets import open_set
from probes.linear.probe import train_together
from probes.linear.sweep import ConcurrentSweeps
from probes.linear.train_transform import TrainTransform
from probes.tasks.attentive import PROTOCOLS
from probes.tasks.linear import Linear

TASK = replace(PROTOCOLS["attentive@smoke"].task, epochs=3, lrs=(0.01, 0.03))


def assert_same_outcome(outcome, expected):
    assert outcome.numbers == expected.numbers and outcome.facts["grid"] == expected.facts["grid"]
    assert all(np.array_equal(outcome.arrays[name], expected.arrays[name]) for name in outcome.arrays)


def test_training_beside_a_linear_probe_changes_no_bit_and_shares_the_stream(tmp_path):
    linear = Linear(epochs=3, batch=32)
    assert linear.shares(None, None) == TASK.shares(None, None)
    alone = TASK.run(varied_export(), Workspace(cache=tmp_path / "alone", data="tiny:"))
    space = Workspace(cache=tmp_path / "together", data="tiny:")
    together = dict(train_together([linear, TASK], varied_export(), space))
    assert_same_outcome(alone, together[1])
    forwards = [outcome.cost["augmented_forwards"] for outcome in together.values()]
    assert sum(forwards) == 3 * alone.facts["training_images"] == alone.cost["augmented_forwards"]
    assert_same_outcome(linear.run(varied_export(), Workspace(cache=tmp_path / "linear", data="tiny:")), together[0])


@pytest.mark.parametrize(
    "changes",
    [pytest.param({}, marks=pytest.mark.exhaustive), dict(policy="original", erase=0.25, falling=(0.01, 1e-3))],
)
def test_a_stopped_training_resumes_with_the_same_bits(changes, tmp_path, monkeypatch):
    task = replace(TASK, **changes)
    uninterrupted = task.run(varied_export(), Workspace(cache=tmp_path / "uninterrupted", data="tiny:"))
    space, calls = Workspace(cache=tmp_path / "stopped", data="tiny:"), []
    save_or_stop = ConcurrentSweeps.save_or_stop

    def stop_at_fourth_call(self):
        calls.append(1)
        self.request = StopRequest() if len(calls) < 4 else self.request
        self.request.asked = len(calls) == 4
        save_or_stop(self)

    monkeypatch.setattr(ConcurrentSweeps, "save_or_stop", stop_at_fourth_call)
    with pytest.raises(Stopped):
        task.run(varied_export(), space)
    monkeypatch.setattr(ConcurrentSweeps, "save_or_stop", save_or_stop)
    assert_same_outcome(uninterrupted, task.run(varied_export(), space))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(head="capi"), ("64", "32")),
        (dict(head="aim"), ("128", "32")),
        (dict(head="ep", queries=5), ("queries=5", "32")),
        (dict(head="cae", attention_heads=3), ("attention_heads=3", "32")),
    ],
)
def test_a_head_that_does_not_fit_the_width_is_refused_before_the_run(changes, words):
    message = refusal(replace(TASK, **changes).check_network, varied_export().spec)
    assert all(word in message for word in words)


def test_attention_separates_classes_that_mean_patches_do_not(tmp_path):
    """The classes differ in one token that attention can select; means over tokens are the same for both."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(256) % 2
    tokens = 0.1 * torch.randn(256, 8, 32, generator=generator)
    tokens[:, 0, 0] += 3
    tokens[:, 0, 1] += 2.0 * labels - 1
    tokens[:, 1:, 1] -= (2.0 * labels[:, None] - 1) / 7  # the mean over tokens does not differ
    space = Workspace(cache=tmp_path, data="none:")
    heads = replace(TASK, lrs=(0.01,), readout="patches").heads(32, 2, 256, space)
    for step in range(200):
        heads.step({"patches": tokens}, labels, TrainProgress(step=step, steps_per_epoch=20, epochs=10))
    assert heads.hits({"patches": tokens}, labels).item() > 250


def test_autoaugment_equals_timms_on_any_number_of_threads():
    images, mean, std = open_set("tiny:", "train"), (0.48, 0.46, 0.41), (0.23, 0.22, 0.23)
    settings = dict(size=24, interpolation="bicubic", rule="torchvision", seed=3, epoch=2, image_numbers=np.arange(64))
    ours = TrainTransform(**settings, policy="original", erase=0.25, mean=mean, std=std)
    plain = create_transform(
        24, True, auto_augment="original", interpolation="bicubic", re_prob=0.25, mean=mean, std=std, re_mode="pixel"
    )
    sequential = []
    for index in range(64):
        with seeded(AUGMENT, 3, 2, index):
            pixels = plain(images.image(index)) * torch.tensor(std)[:, None, None] + torch.tensor(mean)[:, None, None]
        sequential.append((255 * pixels).round().clamp(0, 255).byte())
    with ThreadPoolExecutor(4) as pool:
        threaded = list(pool.map(lambda index: ours(images, index), range(64)))
    assert all(torch.equal(pixels, expected) for pixels, expected in zip(threaded, sequential, strict=True))
