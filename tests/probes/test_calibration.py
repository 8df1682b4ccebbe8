"""Calibration beside accuracy: of closed forms and scikit-learn, and in the outcomes of probes."""

import numpy as np
import pytest
import torch
from numpy.random import RandomState
from sklearn.metrics import log_loss
from toy_exports import one_block_export

from engine.tasks import Workspace
from engine.training.states import load_state, newest_whole, save_state
from probes.scores import calibration, calibration_error, hits_of, reliability
from probes.tasks.finetune import Finetune
from probes.tasks.linear import Linear


def test_the_calibration_error_is_the_mean_distance_of_confidence_and_accuracy():
    right = np.array([1, 1, 1, 0, 1, 0, 0, 0, 1], bool)
    bins = reliability(right, np.array([0.95] * 4 + [0.25] * 4 + [1.0]))
    assert bins.tolist() == [[0.25, 0.25, 4], [pytest.approx(0.96), 0.8, 5]]
    assert calibration_error(bins) == pytest.approx(100 * 0.16 * 5 / 9)
    random = RandomState(0)
    sure = random.uniform(0.3, 1, 40_000)
    assert calibration_error(reliability(random.uniform(size=len(sure)) < sure, sure)) < 1  # honest
    assert calibration_error(reliability(random.uniform(size=len(sure)) < sure - 0.2, sure)) == pytest.approx(20, abs=1)


def test_the_likelihood_is_scikit_learns_and_skipped_images_do_not_count():
    logits, labels = torch.randn(50, 7, generator=torch.Generator().manual_seed(0)), torch.arange(50) % 7
    hits, indices = hits_of(logits, labels), np.arange(50) + (np.arange(50) > 20)
    metrics = calibration(hits.top1, hits.confidence, hits.nll, indices, 51, chosen_on_val=False)
    assert metrics["nll"].value == pytest.approx(log_loss(labels, logits.double().softmax(dim=1)), rel=1e-6)
    assert np.flatnonzero(np.isnan(metrics["nll"].per_image)).tolist() == [21]
    assert 0 < metrics["ece"].value < 100


def test_probes_report_both_and_a_training_of_an_earlier_version_neither(tmp_path):
    space = Workspace(cache=tmp_path, data="tiny:")
    linear = Linear(lrs=(0.1,), augment=False, epochs=2, batch=16).run(one_block_export(), space)
    task = Finetune(lr=1e-3, lr_rule="absolute", batch=16, epochs=2, warmup_epochs=1, mixed_together=16)
    tuned = task.run(one_block_export(), space)
    for outcome in (linear, tuned):
        sure, right = outcome.arrays["confidence"].astype(float), outcome.metrics["top1"].per_image
        error = calibration_error(reliability(right, sure))  # of stored values, in half precision
        assert outcome.numbers["ece"] == pytest.approx(error, abs=0.1) and outcome.numbers["nll"] > 0
    (training,) = (path for path in (tmp_path / "finetune").iterdir() if path.is_dir())
    state = load_state(newest_whole(training))
    tensors = {name: value for name, value in state.tensors.items() if not name.endswith("_nll")}
    save_state(training, 8, type(state)(tensors=tensors, facts=state.facts), kept=1)
    again = task.run(one_block_export(), space).numbers
    assert again == {name: value for name, value in tuned.numbers.items() if name not in ("ece", "nll")}
